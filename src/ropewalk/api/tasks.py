"""From the body of a request to what is to be generated, and from outputs to the body of the answer.

A `Task` has `jobs`, one a prompt, for `AsyncEngine.generate` or `stream`. Of a whole answer, `body(outputs)` is the
body; of a streamed one, `start()`, `take(job, chunk)` for each chunk and `end(outputs)` give the events.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

from ropewalk.api.bodies import Event, Usage, usage_of
from ropewalk.api.errors import ApiError, near
from ropewalk.api.requests import ResponseFormat, Sampling
from ropewalk.outputs import RequestOutput, StreamChunk
from ropewalk.params import SamplingParams
from ropewalk.text.grammar import JSON_OPTIONS
from ropewalk.truncation import Conversation, Encode, fit

if TYPE_CHECKING:
    from ropewalk.engine.constraint import Constraint
    from ropewalk.engine.sampler import Logprob
    from ropewalk.llm import LLM
    from ropewalk.text.grammar import GrammarConstraint, Grammars
    from ropewalk.text.tokenizer import Tokenizer

Find = Callable[[str | None], tuple[str, "LLM"]]
"""From the `model` of a body, or None, to its name and the model; raises ApiError."""


@dataclass(frozen=True)
class Job:
    """One prompt, for the engine.

    Attributes
    ----------
    prompt : token ids
    params : SamplingParams
    constraint : Constraint or None
    is_limited : bool
        Whether the client said how many tokens it wants at most; otherwise `params.max_tokens` is a default.
    n_truncated : int or None
        Tokens that were left out of the prompt; None if it is not to be cut.
    """

    prompt: Sequence[int]
    params: SamplingParams
    constraint: Constraint | None = None
    is_limited: bool = False
    n_truncated: int | None = None


class Task(ABC):
    """One request.

    Attributes
    ----------
    model : str
        The name by which the answer calls the model.
    llm : LLM
    stream : bool
        Whether the client wants events.
    user : str or None
        What the client calls its user.
    jobs : list of Job
    """

    model: str
    llm: LLM
    stream: bool
    user: str | None
    jobs: list[Job]

    @property
    def n_sequences(self) -> int:
        """Completions of all prompts."""
        return sum(job.params.n for job in self.jobs)

    def usage(self, outputs: Sequence[RequestOutput]) -> Usage:
        """What the outputs cost."""
        cut = [job.n_truncated for job in self.jobs if job.n_truncated is not None]
        return usage_of(outputs, sum(cut) if cut else None)

    @abstractmethod
    def body(self, outputs: Sequence[RequestOutput]) -> Any:
        """The whole answer; an output for each job."""

    @abstractmethod
    def start(self) -> list[Event]:
        """What is sent before anything is generated."""

    @abstractmethod
    def take(self, job: int, chunk: StreamChunk) -> list[Event]:
        """What a chunk of a job adds."""

    @abstractmethod
    def end(self, outputs: Sequence[RequestOutput]) -> list[Event]:
        """What is sent after the last chunk of the last job."""

    def failed(self, error: ApiError) -> list[Event]:
        """What is sent in place of the rest when the request fails: the error."""
        return [error.body]

    def shown(self, logprobs: Sequence[Logprob]) -> list[Logprob]:
        """Those of all tokens but the end token, which is no text."""
        return [each for each in logprobs if each.token_id not in self.llm.tokenizer.eos_ids]


def make_task(path: str, body: dict[str, Any], find: Find) -> Task:
    """Check a request and make its task. This may take a while: text is tokenized, a template runs.

    Parameters
    ----------
    path : str
        "/v1/chat/completions", "/v1/completions" or "/v1/responses".
    body : dict
        As `body.read_json` gives it.
    find : function from the body's `model` to its name and the `LLM`

    Raises
    ------
    ApiError
        If the request cannot be answered.
    RopewalkError
        For `errors.as_api_error`: a template refuses the messages, a schema cannot be used, and so on.
    """
    from ropewalk.api.chat import ChatTask
    from ropewalk.api.completions import CompletionTask
    from ropewalk.api.responses import ResponseTask

    tasks: dict[str, Callable[[dict[str, Any], Find], Task]] = {
        "/v1/chat/completions": ChatTask,
        "/v1/completions": CompletionTask,
        "/v1/responses": ResponseTask,
    }
    if path not in tasks:
        raise ApiError(f"unknown path{near(path, tasks)}", status=404)
    return tasks[path](body, find)


def make_job(
    llm: LLM,
    ids: Sequence[int],
    params: SamplingParams,
    constraint: Constraint | None,
    *,
    is_limited: bool,
    messages: Conversation | None = None,
    encode: Encode | None = None,
) -> Job:
    """Return the job of a prompt, which is cut if `params` let it be; of a conversation if `messages` are given."""
    left, fitted, _ = fit(ids, params, llm.context_length, llm.tokenizer, messages=messages, encode=encode)
    n_truncated = None if params.truncate_prompt_tokens is None else len(ids) - len(left)
    return Job(left, replace(fitted, truncate_prompt_tokens=None), constraint, is_limited, n_truncated)


def encoded(llm: LLM, text: str, *, may_be_cut: bool = False) -> list[int]:
    """Return the token ids of a prompt, as `LLM.encode` does."""
    if not may_be_cut:
        check_length(llm, text)
    return llm.encode(text)


def check_length(llm: LLM, text: str) -> None:
    """Refuse a text that cannot fit into the context, before it is tokenized: that of megabytes may take long."""
    n_bytes, longest = len(text.encode()), _longest_token(llm.tokenizer)
    if n_bytes > llm.context_length * longest:
        limit = f"{llm.context_length} tokens of at most {longest} bytes"
        raise ApiError(f"the text has {n_bytes} bytes, more than {limit}", code="context_length_exceeded")


@lru_cache(maxsize=16)
def _longest_token(tokenizer: Tokenizer) -> int:
    return max(len(tokenizer.token_bytes(i)) for i in range(tokenizer.vocab_size))


@dataclass(frozen=True)
class Structure:
    """What an answer as a whole is to follow.

    Attributes
    ----------
    kind : "json_schema", "regex" or "lark"
        The method of `Grammars` that takes the source.
    source : schema, regular expression or grammar
    """

    kind: Literal["json_schema", "regex", "lark"]
    source: Any

    def constraint(self, grammars: Grammars) -> GrammarConstraint:
        """Compile it; raises InvalidParameterError if it cannot be used."""
        constraint: GrammarConstraint = getattr(grammars, self.kind)(self.source)
        return constraint

    @property
    def rule(self) -> str:
        """The same as the right side of a rule in a Lark grammar; raises ApiError for a grammar of its own."""
        if self.kind == "lark":
            raise ApiError("grammar cannot be combined with tools", param="grammar")
        if self.kind == "regex":
            from llguidance import regex_to_lark

            return f"/{regex_to_lark(self.source)}/"
        schema = {} if self.source is True else self.source
        return f"%json {json.dumps({**schema, 'x-guidance': JSON_OPTIONS})}"


def structure_of(request: Sampling, response_format: ResponseFormat | None) -> Structure | None:
    """Return what the answer must follow; at most one of the ways to say it may be used."""
    structured = response_format if response_format and response_format.type != "text" else None
    ways = [
        *(["response_format"] if structured else []),
        *(name for name in ("regex", "grammar") if getattr(request, name) is not None),
    ]
    if len(ways) > 1:
        raise ApiError(f"{ways[0]} and {ways[1]} cannot be combined", param=ways[1])
    if structured is not None:
        schema = structured.json_schema
        return Structure("json_schema", {"type": "object"} if schema is None else schema.schema_)
    if request.regex is not None:
        return Structure("regex", request.regex)
    return None if request.grammar is None else Structure("lark", request.grammar)


def constraint_of(llm: LLM, request: Sampling, response_format: ResponseFormat | None) -> Constraint | None:
    """As `structure_of`, compiled."""
    structure = structure_of(request, response_format)
    return None if structure is None else structure.constraint(llm.grammars)
