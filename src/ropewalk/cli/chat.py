"""`ropewalk chat`: a conversation of many turns, on a terminal or line by line through a pipe."""

from __future__ import annotations

import ast
import dataclasses
import os
import signal
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ropewalk.cli.answer import print_stream, speed_line
from ropewalk.cli.console import fields, one_line, tell, verb, visible
from ropewalk.cli.loading import open_llm
from ropewalk.cli.options import DEFAULT_MODEL, Machine, drafting_machine, model_argument, sampling, takes
from ropewalk.cli.prompt import checked_utf8
from ropewalk.errors import InvalidParameterError, PromptError, TemplateError
from ropewalk.params import SamplingParams

if TYPE_CHECKING:
    from ropewalk.cli.remote import RemoteModel
    from ropewalk.llm import LLM
    from ropewalk.outputs import StreamChunk

HELP = {
    "/set NAME VALUE": "change how tokens are chosen, for example /set temperature 0.2",
    "/show": "the settings, and how full the conversation is",
    "/system TEXT": "set the system message and start afresh",
    "/reset": "forget the conversation",
    "/help": "this list",
    "/exit": "leave, as Ctrl-D does; Ctrl-C stops an answer",
}
NOT_HERE = ("n", "logprobs", "trace")
AS_IT_COMES = Machine()
WORDS = {"none": None, "true": True, "false": False, "on": True, "off": False}


@verb
@takes(params=sampling, machine=drafting_machine)
def chat(
    model: Annotated[str, model_argument()] = DEFAULT_MODEL,
    *,
    system: Annotated[str | None, typer.Option("--system", help="The system message.")] = None,
    speed: Annotated[bool, typer.Option("--speed", help="Tell the speed after each answer.")] = False,
    url: Annotated[
        str | None,
        typer.Option("--url", metavar="URL", help="Talk with a model of a running server: ropewalk serve."),
    ] = None,
    params: SamplingParams,
    machine: Machine,
) -> None:
    """Talk with a model. /help lists the commands.

    With --url, MODEL is a name of that server's; by default its first. $ROPEWALK_API_KEY is sent if it is set.
    """
    if url is not None and machine != AS_IT_COMES:
        raise typer.BadParameter("--url leaves how the model runs to the server")
    with open_llm(model, machine) if url is None else open_remote(url, model) as llm:
        if not llm.has_chat_template:
            raise TemplateError(f"{model} has no chat template: use ropewalk run")
        shown = model if url is None else f"{getattr(llm, 'name', '')} of {url}"
        params = dataclasses.replace(params, adapter=machine.adapter)
        conversation = Conversation(llm, params, system, speed)
        if sys.stdin.isatty():
            tell(f"Talking with {one_line(shown)}. /help lists the commands, Ctrl-D leaves.")
        for line in lines():
            if not conversation.take(line):
                break


def open_remote(url: str, model: str) -> RemoteModel:
    """A model of a server; the default one is the server's first."""
    from ropewalk.cli.remote import RemoteModel

    return RemoteModel(url, None if model == DEFAULT_MODEL else model)


def lines() -> Iterator[str]:
    """What the user types, line by line: edited on a terminal, as it is through a pipe. Ends at Ctrl-D."""
    if not sys.stdin.isatty() or not sys.stdout.isatty():
        for number, line in enumerate(sys.stdin.buffer, 1):
            yield checked_utf8(line, f"line {number} of stdin").rstrip("\r\n")
        return
    os.environ.setdefault("PROMPT_TOOLKIT_NO_CPR", "1")  # or a terminal that does not answer gets a warning
    from prompt_toolkit import PromptSession

    session: PromptSession[str] = PromptSession(reserve_space_for_menu=0)
    while True:
        try:
            yield session.prompt("> ")
        except KeyboardInterrupt:
            tell("Ctrl-D or /exit leaves.")
        except EOFError:
            return


class Conversation:
    """The messages so far, and how the next one is answered. Knows nothing of line editing."""

    def __init__(
        self, llm: LLM | RemoteModel, params: SamplingParams, system: str | None, speed: bool
    ) -> None:
        self.llm = llm
        self.params = params
        self.system = system
        self.speed = speed
        self.messages: list[dict[str, str]] = []
        self.context_used = 0
        self.reset()

    def reset(self) -> None:
        """Forget everything but the system message."""
        self.messages = [] if self.system is None else [{"role": "system", "content": self.system}]
        self.context_used = 0

    def take(self, line: str) -> bool:
        """Obey a command or answer a message; False when it is time to leave."""
        line = line.strip()
        if line in ("/exit", "/quit", "/bye"):
            return False
        if line.startswith("/"):
            self.command(line)
        elif line:
            self.answer(line)
        return True

    def command(self, line: str) -> None:
        """Obey a line that begins with a slash. What is wrong with it is told, never raised."""
        name, _, rest = line.partition(" ")
        commands: dict[str, Callable[[str], None]] = {
            "/reset": lambda _: self.reset(),
            "/set": self.set,
            "/show": lambda _: self.show(),
            "/system": self.set_system,
            "/help": lambda _: tell(fields(HELP)),
        }
        if name in commands:
            commands[name](rest.strip())
        else:
            tell(f"{one_line(name)} is no command; /help lists them.")

    def set_system(self, text: str) -> None:
        """Set the system message, or none if `text` is empty, and start afresh."""
        self.system = text or None
        self.reset()

    def set(self, text: str) -> None:
        """Change one sampling parameter: `NAME VALUE`."""
        name, _, value = text.partition(" ")
        name = name.replace("-", "_")
        known = [f.name for f in dataclasses.fields(SamplingParams) if f.name not in NOT_HERE]
        if name not in known or not value.strip():
            tell(f"/set NAME VALUE, where NAME is one of {', '.join(known)}")
            return
        try:
            self.params = self._with(name, parse_value(value.strip()))
        except InvalidParameterError as error:
            tell(one_line(error))

    def _with(self, name: str, value: Any) -> SamplingParams:
        default = getattr(SamplingParams(), name)
        if value is None and default in ((), {}):  # no stop strings are an empty list of them
            value = default
        return dataclasses.replace(self.params, **{name: value})

    def show(self) -> None:
        """Tell the settings and the size of the conversation."""
        values = dataclasses.asdict(self.params).items()
        facts = {name: value_text(value) for name, value in values if name not in NOT_HERE}
        facts["messages"] = str(len(self.messages))
        facts["context"] = f"{self.context_used} of {self.llm.context_length} tokens"
        facts["system"] = visible(self.system or "(none)")
        tell(fields(facts))

    def answer(self, text: str) -> None:
        """Answer one message. Ctrl-C stops the answer and keeps what was said; a message that cannot be
        answered is taken back."""
        self.messages.append({"role": "user", "content": text})
        spoken: list[str] = []
        try:
            with stoppable() as stopped:
                output = print_stream(
                    heard(self.llm.stream_chat(self.messages, self.params), spoken, stopped)
                )
        except (PromptError, TemplateError) as error:
            self.messages.pop()
            tell(f"{one_line(error)}\n(/reset starts afresh.)")
            return
        if spoken:
            self.messages.append({"role": "assistant", "content": "".join(spoken)})
        else:  # stopped before the first token
            self.messages.pop()
        if output is None:
            tell("(stopped)")
            return
        self.context_used = output.timings.prompt_tokens + output.timings.generated_tokens
        if output.finish_reason == "length":
            full = self.context_used >= self.llm.context_length
            why = "the context is full: /reset starts afresh" if full else "/set max-tokens N allows more"
            tell(f"(cut after {output.timings.generated_tokens} tokens; {why})")
        if self.speed:
            tell(speed_line(output, self.params))


def value_text(value: object) -> str:
    """A value as `/show` writes it, in the words that `/set` understands."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return "none" if value in (None, (), {}) else repr(value)


def parse_value(text: str) -> object:
    """The value of `/set`: a word like none or on, a Python literal, or else the text itself."""
    if text.lower() in WORDS:
        return WORDS[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


@contextmanager
def stoppable() -> Iterator[Callable[[], bool]]:
    """Within it, one Ctrl-C only makes the yielded function true; a second one raises KeyboardInterrupt.

    An exception in the middle of a step would leave the engine with half of it done.
    """
    pressed = False

    def note(number: int, frame: object) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, before)


def heard(
    chunks: Generator[StreamChunk], spoken: list[str], stopped: Callable[[], bool]
) -> Iterator[StreamChunk]:
    """`chunks` until `stopped()`, with their texts also put into `spoken`."""
    with closing(chunks):
        for chunk in chunks:
            if stopped():
                break
            spoken.append(chunk.text)
            yield chunk
