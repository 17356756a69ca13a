"""What a caller may ask of one generation: `SamplingParams`, checked where it enters.

Knows names, types and ranges. Does not know a model: that a token id lies inside a vocabulary is checked
when the request is added. The order in which the sampling knobs act is written in `engine/sampler.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

from ropewalk.errors import InvalidParameterError

GREEDY_BELOW = 1e-5
"""Temperatures below this mean greedy: 1/T would soon leave the range of ordinary numbers."""


@dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens, and when to stop. Values are converted to plain Python types and checked.

    Attributes
    ----------
    n : int in 1 ... 64, default 1
        Completions of the prompt. Each draws with a seed of its own that follows from `seed` and its number and is
        reported in its output; that of the first is `seed`. Greedy ones are all the same.
    max_tokens : int or None, default 256
        Most tokens to generate, at least 1. None: up to the end of the context.
    min_tokens : int, default 0
        Before this many tokens, end tokens and `stop_token_ids` are not drawn and `stop` does not count.
    temperature : float, default 1.0
        Divides the logits; 0 (and anything below 1e-5) is greedy: the most likely token, lowest id on a tie.
    top_k : int, default 0
        Keep the k most likely tokens (exactly k, lowest id on a tie); 0 or -1 is off.
    top_p : float, default 1.0
        Keep the smallest set of most likely tokens whose probability reaches this; 1 is off.
    min_p : float, default 0.0
        Keep tokens at least this likely relative to the most likely one; 0 is off.
    typical_p : float, default 1.0
        Keep the smallest set of tokens of most typical surprise whose probability reaches this; 1 is off.
    repetition_penalty : float, default 1.0
        Positive logits of tokens in prompt or output are divided by this, negative ones multiplied.
    frequency_penalty, presence_penalty : float in -2 ... 2, default 0.0
        Subtracted from the logit of each output token, per occurrence and once. The prompt does not count.
    logit_bias : mapping of int to float in -100 ... 100, default {}
        Added to the logits of these token ids, before everything else.
    seed : int in 0 ... 2**64 - 1, or None
        Key of the random draws. None: a fresh one from the operating system, reported in the output.
    stop : str or sequence of str, default ()
        Generation ends where one of these appears in the text.
    stop_token_ids : sequence of int, default ()
        Generation ends when one of these is drawn.
    ignore_eos : bool, default False
        Go on after the model's own end tokens.
    logprobs : int or None
        Report the log-probability of every generated token and of this many most likely ones, under the
        raw distribution of the model, before any knob. None: none at all.
    prompt_logprobs : int or None
        The same for every token of the prompt but the first: `RequestOutput.prompt_logprobs`. The whole prompt is then
        computed, nothing of it taken from the prefix cache.
    truncate_prompt_tokens : int or None, default None
        Leave out the middle of a longer prompt, so that this many tokens are left: those that `keep_tokens` says, and
        the last ones. In a chat whole turns are left out, the oldest first. -1: only if it does not fit into the
        context, and then so much that `max_tokens` fit as well, but no more than half of it. None: a prompt that does
        not fit is refused. `RequestOutput.n_truncated` and a warning tell what was left out.
    slide : bool, default False
        When the context is full, go on: the older half of what is not kept leaves it, in whole pages, and the rest is
        computed anew, up to `max_tokens`, at most 1,048,576. False: the output ends there.
        `CompletionOutput.n_dropped` tells how many tokens have left.
    keep_tokens : int or None, default None
        Tokens at the beginning of the prompt that neither of the two leaves out. None: the start token, and in a chat
        all system messages at its beginning.
    trace : int or None
        Report what every step read and where its time went, and of every token the distribution before and after each
        knob, with this many of the most likely tokens: `RequestOutput.trace`. None: nothing.
    adapter : str or None
        Name of the low-rank adapter that prompt and output go through, one of `LLM(adapters=...)`. None: none.
    include_stop_str_in_output : bool, default False
        Leave the stop string (or the text of the stop token) at the end of the text.
    skip_special_tokens : bool, default True
        Leave special tokens out of the text.

    Raises
    ------
    InvalidParameterError
        Naming the field, its value and what is allowed.
    """

    n: int = 1
    max_tokens: int | None = 256
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: str | Iterable[str] = ()
    stop_token_ids: Iterable[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    trace: int | None = None
    truncate_prompt_tokens: int | None = None
    slide: bool = False
    keep_tokens: int | None = None
    adapter: str | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        self._int("n", 1, 64)
        self._int("max_tokens", 1, None, optional=True)
        self._int("min_tokens", 0, None)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise _refusal("min_tokens", self.min_tokens, f"at most max_tokens, which is {self.max_tokens}")
        self._number("temperature", 0.0, math.inf)
        self._int("top_k", -1, None)
        for name in ("top_p", "min_p", "typical_p"):
            self._number(name, 0.0, 1.0)
        self._number("repetition_penalty", 0.0, math.inf)
        if self.repetition_penalty == 0:
            raise _refusal("repetition_penalty", self.repetition_penalty, "a finite number above 0")
        for name in ("frequency_penalty", "presence_penalty"):
            self._number(name, -2.0, 2.0)
        self._int("seed", 0, 2**64 - 1, optional=True)
        for name in ("logprobs", "prompt_logprobs", "trace"):
            self._int(name, 0, None, optional=True)
        self._int("truncate_prompt_tokens", -1, None, optional=True)
        if self.truncate_prompt_tokens == 0:
            raise _refusal("truncate_prompt_tokens", 0, "an integer of at least 1, -1 or None")
        self._int("keep_tokens", 0, None, optional=True)
        for name in ("slide", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(value := getattr(self, name), bool):
                raise _refusal(name, value, "True or False")
        if self.adapter is not None and not isinstance(self.adapter, str):
            raise _refusal("adapter", self.adapter, "a name, or None")
        if self.slide and self.max_tokens is None:
            raise _refusal("max_tokens", None, "with slide, a number: the context sets no end")
        self._set("logit_bias", _checked_bias(self.logit_bias))
        self._set("stop", _checked_stop(self.stop))
        self._set("stop_token_ids", _checked_ids(self.stop_token_ids))

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always chosen."""
        return self.temperature < GREEDY_BELOW

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple."""
        return tuple(self.stop)

    @property
    def stop_ids(self) -> frozenset[int]:
        """`stop_token_ids` as a set."""
        return frozenset(self.stop_token_ids)

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _int(self, name: str, low: int, high: int | None, *, optional: bool = False) -> None:
        value = getattr(self, name)
        if value is None and optional:
            return
        if not _is_int(value) or value < low or (high is not None and value > high):
            allowed = f"an integer of at least {low}" if high is None else f"an integer in {low} ... {high}"
            raise _refusal(name, value, allowed + (", or None" if optional else ""))
        self._set(name, int(value))

    def _number(self, name: str, low: float, high: float) -> None:
        value = getattr(self, name)
        if not _is_finite(value) or not low <= value <= high:
            allowed = (
                f"a finite number of at least {low:g}" if high == math.inf else f"in {low:g} ... {high:g}"
            )
            raise _refusal(name, value, allowed)
        self._set(name, float(value))


def _refusal(name: str, value: object, allowed: str) -> InvalidParameterError:
    return InvalidParameterError(f"{name} is {value!r}; allowed: {allowed}")


def _is_int(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_finite(value: object) -> bool:
    if not isinstance(value, Real) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer that no float can hold
        return False


def _checked_bias(bias: Any) -> Mapping[int, float]:
    if not isinstance(bias, Mapping):
        raise _refusal("logit_bias", bias, "a mapping of token ids to numbers in -100 ... 100")
    for token, value in bias.items():
        if not _is_int(token) or token < 0:
            raise _refusal("logit_bias", token, "token ids, integers of at least 0, as keys")
        if not _is_finite(value) or abs(value) > 100:
            raise _refusal(f"logit_bias[{token}]", value, "in -100 ... 100")
    return {int(token): float(value) for token, value in bias.items()}


def _checked_stop(stop: Any) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else stop
    if not isinstance(stops, Iterable):
        raise _refusal("stop", stop, "a string or a sequence of strings")
    stops = tuple(stops)
    for item in stops:
        if not isinstance(item, str) or not item:
            raise _refusal("stop", item, "strings of at least one character")
    return stops


def _checked_ids(ids: Any) -> tuple[int, ...]:
    if isinstance(ids, str) or not isinstance(ids, Iterable):
        raise _refusal("stop_token_ids", ids, "a sequence of token ids")
    ids = tuple(ids)
    for item in ids:
        if not _is_int(item) or item < 0:
            raise _refusal("stop_token_ids", item, "token ids, integers of at least 0")
    return tuple(int(item) for item in ids)
