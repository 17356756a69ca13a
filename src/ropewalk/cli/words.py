"""What the command line says by itself: placeholders in --help, and what is wrong with an argument.

The library that reads the arguments names values by their types in Python, and refuses them in the words of a
validator. `add_verb` gives every option a placeholder and every number a reader of ours; `Verb` and `Verbs` add what
an option or a verb that people know from other programs is called here. Knows no verb.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, get_args

import typer
from typer.core import TyperCommand, TyperGroup

UsageError: Any = typer.BadParameter.__base__
PLACEHOLDERS = {int: "N", float: "X", str: "TEXT", Path: "FILE"}

OPTIONS_ELSEWHERE = {
    "-m": "the model stands without an option: ropewalk {verb} MODEL",
    "--model": "the model stands without an option: ropewalk {verb} MODEL",
    "-p": "the prompt stands without an option: ropewalk run MODEL PROMPT",
    "--prompt": "the prompt stands without an option: ropewalk run MODEL PROMPT",
    "-f": "pipe the file in: ropewalk {verb} MODEL < FILE",
    "--file": "pipe the file in: ropewalk {verb} MODEL < FILE",
    "--ctx-size": "here it is --context",
    "--max-model-len": "here it is --context",
    "--n-predict": "here it is --max-tokens",
    "--predict": "here it is --max-tokens",
    "--max-new-tokens": "here it is --max-tokens",
    "--system-prompt": "here it is --system",
    "-sys": "here it is --system",
    "--kv-cache-dtype": "here it is --cache-type",
    "--cache-type-k": "here it is --cache-type, for keys and values alike",
    "--cache-type-v": "here it is --cache-type, for keys and values alike",
    "--max-num-seqs": "here it is --max-batch",
    "--parallel": "here it is --max-batch",
    "--served-model-name": "here it is --alias",
    "--gpu-memory-utilization": "here it is --kv-memory, a size or a share such as 25%",
    "--api-key": "keys come from --api-key-file or $ROPEWALK_API_KEY: other users can see options",
    "--model-draft": "here it is --draft-model",
    "-ngl": "there are no GPU layers: it runs on the CPU",
    "--n-gpu-layers": "there are no GPU layers: it runs on the CPU",
    "--device": "it runs on the CPU",
    "--tensor-parallel-size": "it runs on one machine's CPU, with --threads",
    "--dtype": "weights are computed with as they are stored; --quantize makes them smaller",
    "--version": "it stands before the verb: ropewalk --version",
}
OPTIONS_IN_PYTHON = {
    "threads": "n_threads",
    "context": "context_length",
    "cache_type": "cache_dtype|cache_types",
    "prompt": "prompts",
    "depth": "depths",
    "batch": "batches",
}
"""Patterns of names."""
VERBS_ELSEWHERE = {
    "generate": "run",
    "complete": "run",
    "ask": "run",
    "server": "serve",
    "download": "pull",
    "ls": "list",
    "models": "list",
    "remove": "rm",
    "delete": "rm",
    "show": "inspect",
    "info": "inspect",
    "convert": "quantize",
    "benchmark": "bench",
    "eval": "lm-eval",
    "version": "--version",
    "help": "--help",
}


def as_options(message: str, options: Iterable[str]) -> str:
    """What a message says of parameters in Python, said of a verb's options.

    Parameters
    ----------
    options : iterable of str
        Names of the verb's parameters that are options.
    """
    for name in options:
        python = "|".join(filter(None, (name, OPTIONS_IN_PYTHON.get(name))))
        message = re.sub(rf"(?<![\w-])({python})(?=(, which)? is\b)", f"--{name.replace('_', '-')}", message)
    message = message.replace("--max-tokens is None", "--max-tokens is -1").replace(", -1 or None", ", or -1")
    return message.removesuffix(", or None")


class Verb(TyperCommand):
    """A verb that knows what options are called elsewhere."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        for parameter in self.params:
            if parameter.param_type_name == "argument":
                vars(parameter)["display_type"] = lambda ctx: ""  # its name says it

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As the library does; what is said of a wrong argument is completed."""
        try:
            return super().parse_args(ctx, args)
        except UsageError as error:
            here = OPTIONS_ELSEWHERE.get(getattr(error, "option_name", None) or "")
            if here and hasattr(error, "possibilities"):
                error.possibilities = None
                error.message += f"; {here.format(verb=self.name)}"
            elif "unexpected extra argument" in error.message:
                error.message += "; text with spaces needs quotes around it"
            raise


class Verbs(TyperGroup):
    """The list of verbs, which knows what verbs are called elsewhere."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """As the library does; what is said of a verb that there is not is completed."""
        try:
            return super().resolve_command(ctx, args)
        except UsageError as error:
            if here := VERBS_ELSEWHERE.get(args[0]):
                error.message = f"No such command '{args[0]}'; here it is ropewalk {here}"
            raise


def add_verb(app: typer.Typer, name: str, function: Callable[..., None], **settings: Any) -> None:
    """Add a verb to `app`, with placeholders and readers of numbers where it names none of its own."""
    signature = inspect.signature(function, eval_str=True)
    for parameter in signature.parameters.values():
        kind, info = get_args(parameter.annotation)[:2]
        _speak(parameter.name, kind, info)
    function.__annotations__ = {p.name: p.annotation for p in signature.parameters.values()}
    vars(function)["__signature__"] = signature
    vars(function).pop("__wrapped__", None)  # or what is completed here would be read anew from there
    app.command(name, cls=Verb, **settings)(function)


def _speak(name: str, kind: Any, info: Any) -> None:
    """Complete what is known of one parameter (a `typer.Option` or `typer.Argument`), in place."""
    declared = [text for text in (info.default, *(info.param_decls or ())) if str(text).startswith("-")]
    kind = next((k for k in (kind, *get_args(kind)) if k in PLACEHOLDERS), None) or _element(kind)
    if kind is None:  # a flag
        return
    if info.metavar is None:
        info.metavar = PLACEHOLDERS[kind] if declared else name.upper()
    if kind in (int, float) and info.parser is None:
        info.parser = number_reader(kind, info.min, info.max)


def _element(kind: Any) -> Any:
    """The type of the elements of `list[int] | None` and the like; None if it is no list of what we know."""
    inner = (element for part in get_args(kind) for element in get_args(part))
    return next((element for element in inner if element in PLACEHOLDERS), None)


def number_reader(
    kind: type[int] | type[float], low: float | None, high: float | None
) -> Callable[[Any], int | float]:
    """A function from what was typed (or a default) to a number from `low` to `high`, None being no bound.

    It raises `typer.BadParameter`, which says the value and what is allowed; the library says the option before it.
    """
    allowed = "a whole number" if kind is int else "a number"
    if low is not None and high is not None:
        allowed += f" in {low:g} ... {high:g}"
    elif low is not None:
        allowed += f" of at least {low:g}"

    def read(value: Any) -> int | float:
        try:
            number = kind(value)
        except (ValueError, OverflowError):
            number = None
        if number is None or not ((low is None or low <= number) and (high is None or number <= high)):
            raise typer.BadParameter(f"{value}; allowed: {allowed}")
        return number

    read.__name__ = PLACEHOLDERS[kind]
    return read
