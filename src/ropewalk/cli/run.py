"""`ropewalk run`: one prompt, its answer streamed to stdout, the speed told on stderr."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from ropewalk.cli.answer import as_dict, print_stream, speed_line
from ropewalk.cli.console import tell, verb, write_json
from ropewalk.cli.loading import open_llm
from ropewalk.cli.options import Machine, drafting_machine, sampling, takes
from ropewalk.cli.prompt import (
    ModelArgument,
    PromptArgument,
    RawOption,
    SystemOption,
    conversation,
    model_and_text,
)
from ropewalk.params import SamplingParams


@verb
@takes(params=sampling, machine=drafting_machine)
def run(
    model: ModelArgument = None,
    prompt: PromptArgument = None,
    *,
    system: SystemOption = None,
    raw: RawOption = False,
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
    model, text = model_and_text(model, prompt)
    params = dataclasses.replace(params, logprobs=logprobs, adapter=machine.adapter)
    with open_llm(model, machine) as llm:
        use_chat = not raw and (chat or system is not None or llm.has_chat_template)
        messages = conversation(text, system)
        if as_json:
            (whole,) = llm.chat(messages, params) if use_chat else llm.generate([text], params)
            if whole.error is not None:
                raise whole.error
            write_json(as_dict(whole, model))
            return
        output = print_stream(llm.stream_chat(messages, params) if use_chat else llm.stream(text, params))
    if output is not None and not quiet:
        tell(speed_line(output, params))
