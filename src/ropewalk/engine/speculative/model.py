"""A draft model: a second, smaller model of the same vocabulary guesses what the first will say.

It has a KV cache of its own with as many pages as the first model's, and a request's page table serves for both: shared
beginnings and preemption need nothing else, and a page that was copied on write is read again. What the draft model has
not read yet of a request (all of it at first, what was drawn without drafts, what took another course than its guesses)
it reads before it guesses.

`_tokens` [n_pages, PAGE_SIZE] has the token that the draft model read for each slot, -1 for none. A position is up to
date if that is the request's token there and all positions before it are. Two things could make it look so by chance,
and are excluded: a page that was handed out anew since (`PagePool.births` counts that), and what lies behind a position
that is read again, which is crossed out.

A guess is drawn with the request's own knobs, seed and position: where the two models agree on the probabilities, they
draw the same token. Its class is the probability that the draft model gives it.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ropewalk.backend.base import PAGE_SIZE, Backend, Float32Array, StepBatch
from ropewalk.engine.constraint import Constraint
from ropewalk.engine.pages import PagePool, pages_for
from ropewalk.engine.request import Request
from ropewalk.engine.sampler import choose
from ropewalk.engine.speculative.drafter import Draft, Step
from ropewalk.engine.speculative.pace import Pace, StepCosts

_BORDERS = (0.0, 0.3, 0.5, 0.7, 0.85, 0.95, 0.99)  # the least probability of each class, from 1 on


class DraftModel:
    """Drafts from a backend of its own.

    Parameters
    ----------
    backend : Backend
        The draft model; closed with this object.
    vocab_size : int
        Of the model that checks: no id outside it is guessed.
    token_budget : int
        Most tokens that are read for one step, as in `Engine`.
    clock : callable
        Seconds, of which its paces are made.
    """

    priors: Sequence[float] = (0.65, 0.25, 0.4, 0.5, 0.65, 0.8, 0.9, 0.95)

    def __init__(
        self,
        backend: Backend,
        vocab_size: int,
        token_budget: int = 512,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.backend = backend
        self._clock = clock
        self.costs = StepCosts()
        self._vocab_size = vocab_size
        self._token_budget = token_budget
        self._cache: Any = None
        self._pool: PagePool | None = None
        self._tokens: NDArray[np.int32] = np.zeros((0, PAGE_SIZE), np.int32)
        self._births: NDArray[np.int64] = np.zeros(0, np.int64)

    def page_bytes(self, dtype: str) -> int:
        """Bytes of a page of its own cache."""
        return self.backend.page_bytes(dtype)

    @property
    def n_bytes(self) -> int:
        """Bytes allocated for its cache."""
        return 0 if self._cache is None else int(self._cache.n_bytes)

    def start(self, pool: PagePool, dtype: str) -> None:
        """Forget everything, and make a cache for the pages of this pool, unless there is one."""
        self._pool = pool
        if self._cache is None:
            self._cache = self.backend.new_cache(pool.n_pages, dtype)
        self._tokens = np.full((pool.n_pages, PAGE_SIZE), -1, np.int32)
        self._births = np.zeros(pool.n_pages, np.int64)

    def close(self) -> None:
        """Release the draft model and its cache."""
        self._cache = None
        self.backend.close()

    def draft(self, drafts: Sequence[Draft], step: Step, pace: Pace) -> None:
        """Guess in rounds: each is one pass of the draft model, and one token more of every draft that goes on."""
        behind = {draft: self._behind(draft.request) for draft in drafts}
        guessers = {d: _Guesser(d, self._vocab_size) for d in drafts if self._can_read(d)}
        going = list(guessers)
        while going := pace.continuing(going, step, self.costs, lambda d: len(behind[d])):
            started_s = self._clock()
            read = self._read(going, behind)
            step.drafting_s += self._clock() - started_s
            for draft, logits in read.items():
                if guessers[draft].guess(logits):
                    behind[draft] = np.array(draft.tokens[-1:], np.int32)
                else:
                    del guessers[draft]
            going = [draft for draft in guessers if draft in read]

    def _can_read(self, draft: Draft) -> bool:
        """Whether the draft model knows all ids, and its context reaches that far."""
        config, request = self.backend.config, draft.request
        window = request.window[: request.n_window]
        draft.most = min(draft.most, config.context_length - request.n_window + 1)
        return draft.most > 0 and int(window.max()) < config.vocab_size

    def _pool_births(self, pages: Sequence[int]) -> NDArray[np.int64]:
        assert self._pool is not None, "start was not called"
        return np.array([self._pool.births[page] for page in pages], np.int64)

    def _behind(self, request: Request) -> NDArray[np.int32]:
        """Tokens to be read before the next guess: the last known one at least."""
        n = request.n_window
        pages = request.pages[: pages_for(n)]
        known = np.where(
            (self._births[pages] == self._pool_births(pages))[:, None], self._tokens[pages], np.int32(-1)
        ).reshape(-1)
        window = request.window[:n]
        differ = np.flatnonzero(known[:n] != window)
        return window[min(int(differ[0]), n - 1) if len(differ) else n - 1 :]

    def _read(
        self, going: Sequence[Draft], behind: dict[Draft, NDArray[np.int32]]
    ) -> dict[Draft, Float32Array]:
        """Run one pass over what the drafts are behind, within the budget; logits of those that have caught up.

        Of several that would read the same shared page only the first does; the others find it read the next time.
        """
        parts: list[tuple[Draft, int, NDArray[np.int32], bool]] = []
        written: set[int] = set()
        left = self._token_budget
        for draft in going:
            tokens = behind[draft]
            start = draft.request.n_window + len(draft.tokens) - len(tokens)
            count = min(len(tokens), left)
            pages = draft.request.pages[start // PAGE_SIZE : pages_for(start + count)]
            if count and written.isdisjoint(pages):
                written.update(pages)
                parts.append((draft, start, tokens[:count], count == len(tokens)))
                behind[draft] = tokens[count:]
                left -= count
        started_s = self._clock()
        logits = self.backend.forward(_lay_out(parts), self._cache)
        self.costs.record(self._token_budget - left, self._clock() - started_s)
        for draft, start, tokens, _ in parts:
            self._note(draft.request.pages, start, tokens)
        finished = [draft for draft, _, _, is_last in parts if is_last]
        # A batch that wants no logits may give a row of none.
        return dict(zip(finished, logits, strict=False))

    def _note(self, pages: list[int], start: int, tokens: NDArray[np.int32]) -> None:
        """Note what was read at the positions from `start` on, and cross out what lies behind."""
        first = start // PAGE_SIZE
        rest = pages[first:]
        births = self._pool_births(rest)
        slots = self._tokens[rest]
        slots[self._births[rest] != births] = -1
        flat = slots.reshape(-1)
        offset = start - first * PAGE_SIZE
        flat[offset : offset + len(tokens)] = tokens
        flat[offset + len(tokens) :] = -1
        self._tokens[rest], self._births[rest] = flat.reshape(slots.shape), births


class _Guesser:
    """Draws the guesses of one draft, as the engine would draw them."""

    def __init__(self, draft: Draft, vocab_size: int) -> None:
        self._draft = draft
        self._vocab_size = vocab_size
        self._constraint: Constraint | None = None

    def guess(self, logits: Float32Array) -> bool:
        """Add a guess; False if there is none to be had, or nothing can follow it.

        What goes wrong here, in a constraint for example, goes wrong again when the engine draws: for it alone.
        """
        try:
            return self._guess(logits)
        except Exception:
            return False

    def _guess(self, logits: Float32Array) -> bool:
        draft, request = self._draft, self._draft.request
        if request.constraint and self._constraint is None:
            self._constraint = request.constraint.fork()
        logits = self._known(logits)
        largest = logits.max()
        if not np.isfinite(largest):
            return False
        context = request.context
        if draft.tokens or self._constraint:
            context = replace(
                context,
                output=np.concatenate([context.output, np.array(draft.tokens, np.int32)]),
                allowed=self._constraint.mask() if self._constraint else None,
            )
        position = request.n_tokens + len(draft.tokens)
        token = choose(logits, request.params, context, seed=request.seed, position=position)
        if self._constraint:
            self._constraint.accept(token)
        share = float(np.exp(logits[token] - largest) / np.exp(logits - largest).sum())
        draft.add(token, bisect_right(_BORDERS, share))
        return token not in context.ends and not (self._constraint and self._constraint.ended)

    def _known(self, logits: Float32Array) -> Float32Array:
        """Logits of the ids of the model that checks: others are cut off, missing ones are impossible."""
        if len(logits) >= self._vocab_size:
            return logits[: self._vocab_size]
        known = np.full(self._vocab_size, -np.inf, np.float32)
        known[: len(logits)] = logits
        return known


def _lay_out(parts: Sequence[tuple[Draft, int, NDArray[np.int32], bool]]) -> StepBatch:
    """The batch of (draft, first position, tokens, whether the last one's logits are wanted)."""
    counts = [len(tokens) for _, _, tokens, _ in parts]
    tables = np.zeros((len(parts), max(len(draft.request.pages) for draft, *_ in parts)), np.int32)
    for row, (draft, *_) in enumerate(parts):
        tables[row, : len(draft.request.pages)] = draft.request.pages
    ends = np.cumsum(counts) - 1
    return StepBatch(
        tokens=np.concatenate([tokens for _, _, tokens, _ in parts]),
        positions=np.concatenate(
            [np.arange(start, start + len(tokens), dtype=np.int32) for _, start, tokens, _ in parts]
        ),
        sequences=np.repeat(np.arange(len(parts), dtype=np.int32), counts),
        page_tables=tables,
        logit_rows=ends[[wanted for *_, wanted in parts]].astype(np.int32),
    )
