"""`ropewalk lm-eval`: EleutherAI's evaluation harness with our models in it."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from ropewalk.cli.console import verb
from ropewalk.errors import RopewalkError

PASSED_ON = {"ignore_unknown_options": True, "help_option_names": ["--help"]}
"""-h and all other options are lm_eval's."""


@verb
def lm_eval(
    arguments: Annotated[list[str] | None, typer.Argument(metavar="ARGUMENT", help="Of lm_eval.")] = None,
) -> None:
    """Run EleutherAI's lm_eval on a model.

    All arguments are handed to it as they are; the name of our models there is "ropewalk".

    For example: ropewalk lm-eval --model ropewalk --model_args model=smollm2-135m --tasks arc_easy
    """
    try:
        from lm_eval.__main__ import cli_evaluate
    except ImportError:
        raise RopewalkError("lm_eval is not installed: pip install lm_eval") from None
    import ropewalk.lm_eval  # noqa: F401  registers the model

    sys.argv = ["lm_eval", *(arguments or ())]
    cli_evaluate()
