"""The prompt of a verb: an argument, or stdin; and what every text that is given must be, which is UTF-8."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from ropewalk.cli.options import DEFAULT_MODEL, model_argument
from ropewalk.errors import PromptError

ModelArgument = Annotated[str | None, model_argument()]
PromptArgument = Annotated[str | None, typer.Argument(help="The prompt; '-' or nothing reads stdin.")]
SystemOption = Annotated[str | None, typer.Option("--system", help="A system message before the prompt.")]
RawOption = Annotated[
    bool, typer.Option("--raw", help="Continue the prompt as it is, without a chat template.")
]


def model_and_text(model: str | None, prompt: str | None) -> tuple[str, str]:
    """The name of the model, and the prompt's text; of stdin without the newline at its end.

    Raises
    ------
    PromptError
        If the prompt is empty or not UTF-8.
    """
    model, prompt = model_and_prompt(model, prompt)
    if prompt is not None:
        return model, checked_utf8(os.fsencode(prompt), "the prompt")
    text = checked_utf8(sys.stdin.buffer.read(), "the prompt (stdin)")
    return model, text.removesuffix("\n").removesuffix("\r")


def model_and_prompt(model: str | None, prompt: str | None) -> tuple[str, str | None]:
    """What the two optional arguments mean; a prompt of None is to be read from stdin."""
    from ropewalk.checkpoint.hub import is_there

    if model is not None and prompt is None and any(map(str.isspace, model)) and not is_there(Path(model)):
        model, prompt = None, model
    if prompt is None and sys.stdin.isatty():
        raise typer.BadParameter("no prompt: give one after the model, or pipe it in", param_hint="PROMPT")
    return model or DEFAULT_MODEL, None if prompt == "-" else prompt


def conversation(text: str, system: str | None) -> list[dict[str, str]]:
    """The messages of a prompt."""
    before = [] if system is None else [{"role": "system", "content": system}]
    return [*before, {"role": "user", "content": text}]


def checked_utf8(data: bytes, what: str) -> str:
    """`data` as text.

    Raises
    ------
    PromptError
        If it is empty or not UTF-8; `what` names it.
    """
    if not data:
        raise PromptError(f"{what} is empty")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        byte = data[error.start]
        raise PromptError(f"{what} is not UTF-8: byte 0x{byte:02x} at offset {error.start}") from None
