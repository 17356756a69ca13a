"""`ropewalk embed`: texts as vectors."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from ropewalk.cli.console import verb, write_json
from ropewalk.cli.loading import open_llm
from ropewalk.cli.options import Machine, machine, model_argument, takes
from ropewalk.cli.prompt import checked_utf8
from ropewalk.errors import InvalidParameterError, PromptError


@verb
@takes(machine=machine)
def embed(
    model: Annotated[str, model_argument(required=True)],
    texts: Annotated[
        list[str] | None, typer.Argument(metavar="TEXT", help="Default: each line of stdin is one.")
    ] = None,
    *,
    pooling: Annotated[
        str | None,
        typer.Option(
            "--pooling",
            metavar="KIND",
            help="mean, last or cls. Default: what the file says, otherwise last.",
        ),
    ] = None,
    raw: Annotated[
        bool, typer.Option("--no-normalize", help="Leave the vectors as long as they are.")
    ] = False,
    machine: Machine,
) -> None:
    """Print the embedding of each text.

    One JSON object a line: {"index", "text", "embedding"}.
    """
    from ropewalk.model.config import POOLINGS

    if pooling not in (None, *POOLINGS[1:]):
        raise InvalidParameterError(f"--pooling is {pooling!r}; allowed: {', '.join(POOLINGS[1:])}")
    if texts:
        given = [checked_utf8(os.fsencode(text), "a text") for text in texts]
    else:
        given = checked_utf8(sys.stdin.buffer.read(), "stdin").splitlines()
    if not given:
        raise PromptError("there are no texts; at least one is needed")
    with open_llm(model, machine) as llm:
        for index, text in enumerate(given):
            (vector,) = llm.embed(text, pooling=pooling, normalize=not raw)
            write_json({"index": index, "text": text, "embedding": [float(x) for x in vector]})
