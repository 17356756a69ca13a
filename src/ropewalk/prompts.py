"""From what callers ask for to requests that an engine can take: rendered, encoded, cut to fit, and checked.

Nothing is queued here, so that the first request of many is not under way when the last one is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np

from ropewalk.driver import Driver
from ropewalk.engine.admission import check_prompt
from ropewalk.errors import InvalidParameterError, PromptError, TemplateError, TruncationWarning, warn
from ropewalk.generation import Generation
from ropewalk.params import SamplingParams
from ropewalk.text.chat import encode_chat
from ropewalk.truncation import Conversation, common, fit

if TYPE_CHECKING:
    from ropewalk.engine.constraint import Constraint
    from ropewalk.text.chat import ChatTemplate

Prompt = str | Sequence[int]


class RequestKeywords(TypedDict, total=False):
    """What is said of a request besides its prompt and its parameters; `LLM.stream` explains it."""

    priority: int
    constraint: Constraint | None


class ChatKeywords(RequestKeywords, total=False):
    """The same of a conversation."""

    tools: Sequence[Mapping[str, Any]] | None


@dataclass(frozen=True)
class Prepared:
    """A request that was checked and can be submitted."""

    text: str | None
    ids: Sequence[int]
    params: SamplingParams
    priority: int
    constraint: Constraint | None
    n_truncated: int

    def submit(self, driver: Driver) -> Generation:
        """Queue it."""
        generation = driver.submit(
            lambda engine: engine.add_request(
                self.ids, self.params, priority=self.priority, constraint=self.constraint
            ),
            self.text,
        )
        generation.n_truncated = self.n_truncated
        return generation


@dataclass(frozen=True)
class _Rendered:
    """A prompt as token ids, with what is known of where they come from."""

    text: str | None
    ids: Sequence[int]
    messages: Conversation | None = None
    tools: Sequence[Mapping[str, Any]] | None = None
    n_truncated: int = 0


class Prompts:
    """Prepares requests for an engine.

    Parameters
    ----------
    driver : Driver
        Whose engine and tokenizer they are for.
    template : ChatTemplate or None
    """

    def __init__(self, driver: Driver, template: ChatTemplate | None) -> None:
        self._driver = driver
        self._engine = driver.engine
        self._tokenizer = driver.tokenizer
        self._template = template

    def prepare(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        constraint: Constraint | None = None,
    ) -> Prepared:
        """Prepare a prompt as it stands; parameters and errors are those of `LLM.stream`."""
        self._driver.check_open()
        if isinstance(prompt, str):
            return self._checked(_Rendered(prompt, self.encode(prompt)), params, priority, constraint)
        _check_kind(prompt)
        return self._checked(_Rendered(None, prompt), params, priority, constraint)

    def prepare_chat(
        self,
        messages: Conversation,
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        priority: int = 0,
        constraint: Constraint | None = None,
    ) -> Prepared:
        """Prepare a conversation; parameters and errors are those of `LLM.stream_chat`."""
        self._driver.check_open()
        return self._checked(self._render(messages, tools), params, priority, constraint)

    def prepare_all(
        self, prompts: Any, params: Any, priority: Any, constraint: Constraint | None
    ) -> list[Prepared]:
        """Prepare what `LLM.generate` takes: one prompt or several."""
        each = _together(_several_prompts(prompts), params, priority)
        return [self.prepare(a, b, priority=c, constraint=constraint) for a, b, c in each]

    def prepare_chats(
        self,
        messages: Any,
        params: Any,
        tools: Sequence[Mapping[str, Any]] | None,
        priority: Any,
        constraint: Constraint | None,
    ) -> list[Prepared]:
        """Prepare what `LLM.chat` takes: one conversation or several."""
        several = isinstance(messages, Sequence) and messages and not isinstance(messages[0], Mapping | str)
        each = _together(list(messages) if several else [messages], params, priority)
        return [self.prepare_chat(a, b, tools=tools, priority=c, constraint=constraint) for a, b, c in each]

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Return the token ids of a prompt, special tokens in the text among them."""
        return self._tokenizer.encode(text, add_special=add_special, parse_special=True)

    def checked_ids(self, token_ids: Sequence[int]) -> list[int]:
        """Return token ids of 1 ... context_length tokens; raises PromptError for any others."""
        _check_kind(token_ids)
        most = self._engine.context_length
        vocab_size = self._engine.backend.config.vocab_size
        check_prompt(token_ids, vocab_size=vocab_size, most=most, context_length=most)
        return [int(token) for token in token_ids]

    def several_ids(self, texts: Prompt | Sequence[Prompt]) -> list[list[int]]:
        """Return the token ids of each of several texts, or of one."""
        return [
            self.checked_ids(self.encode(text) if isinstance(text, str) else text)
            for text in _several_prompts(texts)
        ]

    def context_and_rest(self, context: Prompt, continuation: Prompt) -> tuple[list[int], list[int]]:
        """Token ids of a context, and of what follows it."""
        before: Sequence[int] = self.encode(context) if isinstance(context, str) else context
        if isinstance(context, str) and isinstance(continuation, str):
            whole: Sequence[int] = self.encode(context + continuation)
            n = common(before, whole)
        else:
            rest = (
                self.encode(continuation, add_special=False)
                if isinstance(continuation, str)
                else continuation
            )
            _check_kind(rest)
            whole, n = [*self.checked_ids(before), *rest], len(before)
        ids = self.checked_ids(whole)
        if not 0 < n < len(ids):
            what = "context" if n == 0 else "continuation"
            raise PromptError(f"the {what} has no tokens of its own; at least one is needed")
        return ids[:n], ids[n:]

    def _checked(
        self,
        prompt: _Rendered,
        params: SamplingParams | None,
        priority: int,
        constraint: Constraint | None,
    ) -> Prepared:
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise InvalidParameterError(f"params is {params!r}; allowed: SamplingParams")
        prompt, params = self._fit(prompt, params)
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise InvalidParameterError(f"priority is {priority!r}; allowed: an integer")
        self._engine.admission.validate(prompt.ids, params)
        if constraint is not None and (params.ignore_eos or params.min_tokens):
            name = "ignore_eos" if params.ignore_eos else "min_tokens"
            raise InvalidParameterError(
                f"{name} is {getattr(params, name)!r}; allowed: the default, since a constraint says where outputs end"
            )
        return Prepared(prompt.text, prompt.ids, params, priority, constraint, prompt.n_truncated)

    def _render(self, messages: Conversation, tools: Sequence[Mapping[str, Any]] | None) -> _Rendered:
        if self._template is None:
            raise TemplateError(
                "the model has no chat template: it is a base model, or its file lacks one; give it a plain prompt"
            )
        text = self._template.render(messages, tools=tools)
        return _Rendered(text, encode_chat(self._tokenizer, text), messages, tools)

    def _fit(self, prompt: _Rendered, params: SamplingParams) -> tuple[_Rendered, SamplingParams]:
        """Cut a prompt that `params` let be cut; see `truncation.fit`."""
        ids, params, messages = fit(
            prompt.ids,
            params,
            self._engine.context_length,
            self._tokenizer,
            messages=prompt.messages,
            encode=lambda messages: self._render(messages, prompt.tools).ids,
        )
        if (n_truncated := len(prompt.ids) - len(ids)) == 0:
            return prompt, params
        what = "its middle was" if messages is None else "its oldest turns were"
        warn(
            f"a prompt of {len(prompt.ids)} tokens was cut to {len(ids)}: {what} left out", TruncationWarning
        )
        cut = replace(prompt, ids=ids) if messages is None else self._render(messages, prompt.tools)
        return replace(cut, n_truncated=n_truncated), params


def _several_prompts(prompts: Any) -> list[Any]:
    """Return the prompts, of one or several."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, bytes) or not isinstance(prompts, Iterable):
        raise _not_a_prompt(prompts)
    prompts = list(prompts)
    return [prompts] if prompts and isinstance(prompts[0], int | np.integer) else prompts


def _together(prompts: list[Any], params: Any, priority: Any) -> Iterable[tuple[Any, Any, Any]]:
    """Return each prompt with its parameters and its priority."""
    if not isinstance(params, Sequence):
        params = [params] * len(prompts)
    if not isinstance(priority, Sequence):
        priority = [priority] * len(prompts)
    for name, values in (("params", params), ("priorities", priority)):
        if len(values) != len(prompts):
            raise InvalidParameterError(f"there are {len(values)} {name} for {len(prompts)} prompts")
    return zip(prompts, params, priority, strict=True)


def _check_kind(ids: object) -> None:
    if not isinstance(ids, Sequence | np.ndarray) or isinstance(ids, bytes):
        raise _not_a_prompt(ids)


def _not_a_prompt(value: object) -> PromptError:
    return PromptError(f"a prompt is {value!r}; allowed: a string or a sequence of token ids")
