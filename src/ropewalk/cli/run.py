"""`ropewalk run`: one prompt, its answer streamed to stdout, the speed told on stderr."""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from ropewalk.cli.answer import as_dict, print_stream, speed_line
from ropewalk.cli.console import tell, verb, write_json
from ropewalk.cli.loading import open_llm
from ropewalk.cli.options import DEFAULT_MODEL, Machine, drafting_machine, model_argument, sampling, takes
from ropewalk.errors import PromptError
from ropewalk.params import SamplingParams


@verb
@takes(params=sampling, machine=drafting_machine)
def run(
    model: Annotated[str | None, model_argument()] = None,
    prompt: Annotated[str | None, typer.Argument(help="The prompt; '-' or nothing reads stdin.")] = None,
    *,
    system: Annotated[
        str | None, typer.Option("--system", help="A system message before the prompt.")
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompt as it is, without a chat template.")
    ] = False,
    chat: Annotated[bool, typer.Option("--chat", help="Insist on the model's chat template.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object in place of streamed text.")
    ] = False,
    logprobs: Annotated[
        int | None,
        typer.Option("--logprobs", min=0, help="With --json: the n likeliest tokens of each step."),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Do not tell the speed.")] = False,
    params: SamplingParams,
    machine: Machine,
) -> None:
    """Answer one prompt.

    A model with a chat template gets the prompt as a user's message; any other continues it as plain text.
    A single argument with a space in it, which names no file, is a prompt for the default model.
    """
    if raw and (chat or system is not None):
        raise typer.BadParameter("--raw is without a chat template: it excludes --chat and --system")
    if logprobs is not None and not as_json:
        raise typer.BadParameter("--logprobs needs --json")
    model, prompt = model_and_prompt(model, prompt)
    text = read_stdin() if prompt is None else checked_utf8(os.fsencode(prompt), "the prompt")
    params = dataclasses.replace(params, logprobs=logprobs, adapter=machine.adapter)
    with open_llm(model, machine) as llm:
        use_chat = not raw and (chat or system is not None or llm.has_chat_template)
        messages = [{"role": "user", "content": text}]
        if system is not None:
            messages.insert(0, {"role": "system", "content": system})
        if as_json:
            (whole,) = llm.chat(messages, params) if use_chat else llm.generate([text], params)
            if whole.error is not None:
                raise whole.error
            write_json(as_dict(whole, model))
            return
        output = print_stream(llm.stream_chat(messages, params) if use_chat else llm.stream(text, params))
    if output is not None and not quiet:
        tell(speed_line(output, params))


def model_and_prompt(model: str | None, prompt: str | None) -> tuple[str, str | None]:
    """What the two optional arguments mean; a prompt of None is to be read from stdin."""
    from ropewalk.checkpoint.hub import is_there

    if model is not None and prompt is None and any(map(str.isspace, model)) and not is_there(Path(model)):
        model, prompt = None, model
    if prompt is None and sys.stdin.isatty():
        raise typer.BadParameter("no prompt: give one after the model, or pipe it in", param_hint="PROMPT")
    return model or DEFAULT_MODEL, None if prompt == "-" else prompt


def read_stdin() -> str:
    """All of stdin as text, less one newline at its end."""
    text = checked_utf8(sys.stdin.buffer.read(), "the prompt (stdin)")
    return text.removesuffix("\n").removesuffix("\r")


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
