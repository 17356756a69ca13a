"""A text to measure a model with: a file or stdin, cut into windows."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from ropewalk.cli.prompt import checked_utf8
from ropewalk.errors import PromptError

TEXT_ARGUMENT = typer.Argument(metavar="FILE", help="The text, in UTF-8; '-' reads stdin.")
WindowOption = Annotated[int, typer.Option("--window", help="Tokens of a window, each read on its own.")]
StrideOption = Annotated[
    int | None,
    typer.Option(
        "--stride",
        help="Tokens from one window to the next, each scored once. "
        "Default: windows side by side, the second half of each scored, as llama.cpp does.",
    ),
]
WindowsOption = Annotated[int | None, typer.Option("--windows", help="Use the first so many. Default: all.")]


def read_text(name: str) -> str:
    """The text of a file, or of stdin.

    Raises
    ------
    PromptError
        If there is no such file, or it is not UTF-8.
    """
    if name == "-":
        return checked_utf8(sys.stdin.buffer.read(), "stdin")
    try:
        return checked_utf8(Path(name).read_bytes(), name)
    except OSError as error:
        raise PromptError(f"{name} cannot be read: {error.strerror}") from None
