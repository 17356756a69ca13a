"""A command line to try verbs on, and a model that answers at once."""

from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from ropewalk.cli import chat as chat_verb
from ropewalk.cli import run as run_verb
from ropewalk.cli.app import build
from ropewalk.engine.sampler import Logprob
from ropewalk.errors import PromptError


@pytest.fixture
def ropewalk():
    """A function from arguments (and stdin) to what the command line did with them."""
    app = build()

    def invoke(*arguments: str, stdin: str | bytes | None = None):
        return CliRunner().invoke(app, [str(a) for a in arguments], input=stdin)

    return invoke


def finished(text: str, prompt: object, params) -> SimpleNamespace:
    timings = SimpleNamespace(
        prompt_tokens=10,
        cached_tokens=0,
        disk_tokens=0,
        generated_tokens=len(text),
        drafted_tokens=0,
        accepted_tokens=0,
        prefill_s=0.1,
        decode_s=0.5,
        prefill_tps=100.0,
        decode_tps=20.0,
        time_to_first_token_s=0.11,
    )
    return SimpleNamespace(
        prompt=prompt,
        prompt_token_ids=[1, 2],
        text=text,
        token_ids=list(range(len(text))),
        finish_reason="stop",
        n_truncated=0,
        outputs=[SimpleNamespace(n_dropped=0)],
        stop_reason=None,
        logprobs=None if params.logprobs is None else [Logprob(7, -0.5, 1, ((7, -0.5), (9, -2.0)))],
        error=None,
        seed=params.seed or 77,
        timings=timings,
    )


class FakeLLM:
    """Answers with `replies` in turn, a character at a time, and remembers what it was asked."""

    context_length = 100
    has_chat_template = True

    def __init__(self) -> None:
        self.replies = ["Hello!"]
        self.asked: list[tuple[str, object, object]] = []
        self.closed = False

    def _answer(self, verb, prompt, params):
        self.asked.append((verb, prompt, params))
        reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        if isinstance(reply, Exception):
            raise reply
        return reply

    def _stream(self, verb, prompt, params):
        text = self._answer(verb, prompt, params)
        for i, character in enumerate(text):
            last = i == len(text) - 1
            yield SimpleNamespace(text=character, output=finished(text, prompt, params) if last else None)

    def stream(self, prompt, params):
        return self._stream("stream", prompt, params)

    def stream_chat(self, messages, params):
        return self._stream("stream_chat", [dict(m) for m in messages], params)

    def generate(self, prompts, params):
        return [finished(self._answer("generate", p, params), p, params) for p in prompts]

    def chat(self, messages, params):
        return [finished(self._answer("chat", messages, params), messages, params)]

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.closed = True


@pytest.fixture
def llm(monkeypatch):
    """The `FakeLLM` that `run` and `chat` open in place of a model; `.opened` is how they asked for it."""
    fake = FakeLLM()

    def open_llm(model, machine):
        fake.opened = (model, machine)
        return fake

    monkeypatch.setattr(run_verb, "open_llm", open_llm)
    monkeypatch.setattr(chat_verb, "open_llm", open_llm)
    return fake


@pytest.fixture
def too_long():
    return PromptError("the prompt has 120 tokens; at most 99 fit into a context of 100")
