"""One generation under way: its tokens, how far they are computed, which pages it holds, how it ended.

A request is changed by the engine alone. It knows token ids; text and stop strings are the caller's business.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ropewalk.backend.base import PAGE_SIZE
from ropewalk.engine.constraint import Constraint
from ropewalk.engine.overflow import Slide
from ropewalk.engine.pages import pages_for
from ropewalk.engine.prefix import Node
from ropewalk.engine.sampler import Context, Logprob
from ropewalk.engine.trace import StepTrace, TokenTrace
from ropewalk.params import SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]
"""An end token, stop token or stop string; `max_tokens` or the context; the caller; a failure."""


@dataclass(eq=False)
class Request:
    """State of one generation.

    Attributes
    ----------
    id : int
        Number of the request, ascending in order of arrival.
    params, seed
        What was asked for; `seed` is the key of this request's draws, also when `params.seed` is None.
    end_ids : frozenset of int
        The model's end tokens, empty with `ignore_eos`.
    tokens : int32 [n_prompt + max_tokens]
        Prompt, then output; the first `n_tokens` are known.
    n_prompt, n_tokens, max_tokens : int
        Tokens of the prompt, of prompt and output so far, and the most that the output can have.
    slide : Slide or None
        What happens when the context is full; None: the output has no room for more than fits.
    window : int32 [len(tokens) - n_dropped]
        What the model sees, at positions from 0: `tokens`, without what has left the context.
    n_dropped : int
        Tokens that have left it.
    rope_switch : int
        Tokens in the window up to which one set of rotary frequencies holds; beyond it another holds for all of
        them, so that every key is computed anew. 0: there is one set.
    index, group
        Which completion of its prompt it is, and all of them in order, itself included.
    family : list of Request
        Those that it may share pages with: its group, and all forks of its members.
    priority : int
        Smaller ones run first.
    adapter : int
        Number of the low-rank adapter that its tokens go through; -1: none.
    cache_key : bytes
        What the values in its pages follow from besides its tokens; see `engine.prefix`.
    n_computed : int
        Positions 0 ... n_computed - 1 have keys and values in the cache. Changed by `PageTables` alone.
    pages : list of int
        Page table: the pages of the computed positions. Empty while the request waits and after its end.
    nodes : list of Node
        Their places in the prefix cache, for the full ones.
    n_cached : int
        Tokens of the prompt that were found computed when the request first ran.
    n_from_disk : int
        Those of them that were found in pages on disk.
    n_preempted : int
        How often it had to give up its pages and wait.
    n_drafted, n_accepted : int
        Guesses of its tokens that were checked, and how many of them were right.
    finish_reason, stop_reason, error
        None until the end. `stop_reason` is the stop token or stop string; `error` belongs to "error".
    constraint : Constraint or None
        What its output must follow.
    n_told : int
        Tokens of the output that the constraint was told; of an output that was cut or failed, not its length.
    logprobs : list of Logprob
        One for each output token if they were asked for.
    prompt_logprobs : list of Logprob
        One for each token of the prompt after the first, as far as it was read, if they were asked for. Of a group,
        completion 0 has them.
    traced_steps, traced_tokens : list of StepTrace, list of TokenTrace
        What it did, if it is traced.
    arrived_s, started_s, first_token_s, last_token_s : float
        `time.perf_counter()` when the request was added, first ran, and got its first and latest token.
    """

    id: int
    params: SamplingParams
    seed: int
    end_ids: frozenset[int]
    tokens: NDArray[np.int32]
    n_prompt: int
    n_tokens: int
    index: int = 0
    group: list[Request] = field(default_factory=list, repr=False)
    family: list[Request] = field(default_factory=list, repr=False)
    slide: Slide | None = None
    n_dropped: int = 0
    rope_switch: int = 0
    priority: int = 0
    adapter: int = -1
    cache_key: bytes = b""
    constraint: Constraint | None = None
    n_told: int = 0
    n_computed: int = 0
    pages: list[int] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list, repr=False)
    n_cached: int = 0
    n_from_disk: int = 0
    n_preempted: int = 0
    n_drafted: int = 0
    n_accepted: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: Exception | None = None
    logprobs: list[Logprob] = field(default_factory=list)
    prompt_logprobs: list[Logprob] = field(default_factory=list, repr=False)
    traced_steps: list[StepTrace] = field(default_factory=list, repr=False)
    traced_tokens: list[TokenTrace] = field(default_factory=list, repr=False)
    arrived_s: float = 0.0
    started_s: float = 0.0
    first_token_s: float = 0.0
    last_token_s: float = 0.0
    window: NDArray[np.int32] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.family = self.family or self.group
        self._slide()

    @property
    def max_tokens(self) -> int:
        """The most tokens that the output can have."""
        return len(self.tokens) - self.n_prompt

    @property
    def n_output(self) -> int:
        """Tokens of the output so far."""
        return self.n_tokens - self.n_prompt

    @property
    def output(self) -> list[int]:
        """Token ids of the output so far."""
        return [int(token) for token in self.tokens[self.n_prompt : self.n_tokens]]

    @property
    def n_window(self) -> int:
        """Known tokens that the model sees."""
        return self.n_tokens - self.n_dropped

    @property
    def n_pending(self) -> int:
        """Tokens of the window that are not computed yet; the next token is drawn when there are none left."""
        return self.n_window - self.n_computed

    @property
    def n_unscored(self) -> int:
        """Tokens of the prompt that still want a log-probability."""
        if self.params.prompt_logprobs is None or self.index:
            return 0
        return self.n_prompt - 1 - len(self.prompt_logprobs)

    def unscored(self, count: int) -> range:
        """Those of its next `count` positions whose logits score the token after them."""
        if not self.n_unscored:
            return range(0)
        first, end = len(self.prompt_logprobs), self.n_prompt - 1
        return range(max(first, self.n_computed), min(end, self.n_computed + count))

    @property
    def rank(self) -> tuple[int, int]:
        """Who comes first: the smaller priority, then the earlier arrival."""
        return self.priority, self.id

    @property
    def is_new(self) -> bool:
        """Whether what it finds computed was computed for others: it has drawn nothing and never lost its pages."""
        return not self.n_preempted and not self.first_token_s

    @property
    def pages_soon(self) -> int:
        """Pages for its known tokens and one page more, or to its end; the last token drawn is never computed."""
        return pages_for(self.n_window + min(PAGE_SIZE, self.room - 1))

    @property
    def room(self) -> int:
        """Tokens that can still be drawn before the output ends, the context slides, or all keys change."""
        most = len(self.window) if self.slide is None else min(len(self.window), self.slide.context_length)
        if not self.is_long and self.rope_switch:
            most = min(most, self.rope_switch + 1)
        return most - self.n_window

    @property
    def is_long(self) -> bool:
        """Whether what the model sees has grown beyond `rope_switch`."""
        return 0 < self.rope_switch < self.n_window

    def block(self, i: int) -> bytes:
        """What the values in its page i follow from, besides the pages before it."""
        tokens = self.window[i * PAGE_SIZE : (i + 1) * PAGE_SIZE].tobytes()
        return tokens if i else self._root + tokens

    def text(self, i: int) -> bytes:
        """What the values in its page i follow from, the pages before it included."""
        return self._root + self.window[: (i + 1) * PAGE_SIZE].tobytes()

    @property
    def _root(self) -> bytes:
        """What the values in all its pages follow from besides its tokens."""
        return self.cache_key + b"long" * self.is_long

    def common(self, other: Request) -> int:
        """Computed positions of another request that this one can take over, all but its last token's at most."""
        if other.is_long != self.is_long:
            return 0
        n = min(other.n_computed, self.n_window - 1)
        differ = np.flatnonzero(self.window[:n] != other.window[:n])
        return int(differ[0]) if len(differ) else n

    @property
    def context(self) -> Context:
        """What the sampler may look at, as views."""
        return Context(
            prompt=self.tokens[: self.n_prompt],
            output=self.tokens[self.n_prompt : self.n_tokens],
            ends=self.end_ids | self.params.stop_ids,
            allowed=self.constraint.mask() if self.constraint else None,
        )

    def append(self, token: int) -> None:
        """Add a drawn token, and end if it ends the generation; else a full context slides.

        What is computed is then computed for other positions than the window's: `PageTables.drop` must follow.
        """
        self.tokens[self.n_tokens] = self.window[self.n_window] = token
        self.n_tokens += 1
        if self.constraint is not None:
            self.constraint.accept(token)
            self.n_told = self.n_output
        if token in self.end_ids:
            self.finish_reason = "stop"
        elif token in self.params.stop_ids:
            self.finish_reason, self.stop_reason = "stop", token
        elif self.constraint is not None and self.constraint.ended:
            self.finish_reason = "stop"
        elif self.n_output == self.max_tokens:
            self.finish_reason = "length"
        elif self.slide is not None and self.n_window == self.slide.context_length:
            self._slide()

    def cut(self, n_output: int) -> None:
        """Forget the tokens of the output after these, which an end of the text leaves outside."""
        self.n_tokens = self.n_prompt + n_output
        self.error = None
        del self.logprobs[n_output:]
        self.traced_tokens = [traced for traced in self.traced_tokens if traced.position < self.n_tokens]

    def _slide(self) -> None:
        if self.slide is None or not (dropped := self.slide.dropped(self.n_tokens)):
            self.window = self.tokens
            return
        keep = self.slide.keep
        self.n_dropped = dropped
        self.window = np.concatenate([self.tokens[:keep], self.tokens[keep + dropped :]])
