"""Passes over tokens that are given, outside the engine's loop: logits, embeddings, and scores of continuations.

A pass has a KV cache of its own for as long as it takes. Several sequences share its steps, and a beginning that they
have in common is computed once; neither changes a bit of the results. Knows token ids only.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from ropewalk.backend.base import PAGE_SIZE, Backend, Float32Array, KVCache, StepBatch
from ropewalk.engine.pages import pages_for

MAX_LOGIT_ROWS = 64
"""Rows of logits that are asked for at once: the backend keeps room for them, 1 MB each at most."""


@dataclass(frozen=True)
class Score:
    """How probable a continuation is.

    Attributes
    ----------
    token_ids : list of int, n of them
    logprobs : float64 [n]
        Natural logarithm of each token's probability after everything before it, in the model's own distribution.
    is_greedy : bool
        Whether each token was the likeliest: what temperature 0 would have said.
    """

    token_ids: list[int]
    logprobs: NDArray[np.float64]
    is_greedy: bool

    @property
    def total(self) -> float:
        """Logarithm of the probability of the whole continuation."""
        return float(self.logprobs.sum())


@dataclass
class _Sequence:
    """Tokens that stand at `start` and on, in the pages of a table int32 [n_pages]."""

    tokens: NDArray[np.int32]
    start: int
    table: NDArray[np.int32]


class Passes:
    """Passes through a model.

    Parameters
    ----------
    backend : Backend
    cache_dtype : str
    token_budget : int
        Most tokens of one step.
    """

    def __init__(self, backend: Backend, cache_dtype: str, token_budget: int) -> None:
        self._backend = backend
        self._cache_dtype = cache_dtype
        self._budget = token_budget

    def logits(self, token_ids: Sequence[int], adapter: int = -1) -> Iterator[Float32Array]:
        """Yield the logits of all positions, a few at a time: float32 [m, vocab], valid until the next is asked for.

        Here and below, `adapter` is the number of the low-rank adapter to go through; -1: none.
        """
        cache = self._new_cache(pages_for(len(token_ids)))
        whole = _Sequence(_ids(token_ids), 0, _pages(0, len(token_ids)))
        for batch in _batches([whole], min(self._budget, MAX_LOGIT_ROWS), adapter):
            yield self._backend.forward(_with_logits(batch), cache)

    def embedding(
        self, token_ids: Sequence[int], pooling: str, adapter: int = -1
    ) -> Generator[None, None, Float32Array]:
        """Make a vector of the last layer's output after the output norm, in pieces of one step.

        Parameters
        ----------
        pooling : {"mean", "last", "cls"}
            Of all tokens, of the last, or of the first.

        Returns
        -------
        float32 [hidden_size]
        """
        cache = self._new_cache(pages_for(len(token_ids)))
        whole = _Sequence(_ids(token_ids), 0, _pages(0, len(token_ids)))
        parts: list[Float32Array] = []
        for batch in _batches([whole], self._budget, adapter):
            if parts:
                yield
            parts.append(self._backend.hidden(batch, cache))
        states = np.concatenate(parts)
        vector: Float32Array = {
            "mean": lambda: states.mean(0, dtype=np.float64).astype(np.float32),
            "last": lambda: states[-1],
            "cls": lambda: states[0],
        }[pooling]()
        return vector

    def score(
        self, context: Sequence[int], continuations: Sequence[Sequence[int]], adapter: int = -1
    ) -> list[Score]:
        """Score each of several continuations, of at least one token, of a context, of at least one token."""
        n_context, n_shared = len(context), len(context) // PAGE_SIZE
        longest = n_context + max(map(len, continuations), default=1) - 1
        if n_context <= self._backend.config.rope_switch < longest:
            return [self._score_alone(context, token_ids) for token_ids in continuations]
        shared, n_pages = _pages(0, n_context), pages_for(n_context)
        tables, copies = [], []
        for token_ids in continuations:
            own = np.arange(
                n_pages, n_pages + pages_for(n_context + len(token_ids)) - n_shared, dtype=np.int32
            )
            if n_context % PAGE_SIZE:
                copies.append((int(shared[-1]), int(own[0])))
            n_pages += len(own)
            tables.append(np.concatenate([shared[:n_shared], own]))
        cache = self._new_cache(n_pages)
        first = self._last_logits(_Sequence(_ids(context), 0, shared), cache, adapter)
        cache.copy_pages(copies)
        # The last token of a continuation is predicted, but predicts nothing that is asked for.
        known = [_ids(token_ids)[:-1] for token_ids in continuations]
        rows = self._rows_of(
            [_Sequence(ids, n_context, table) for ids, table in zip(known, tables, strict=True) if len(ids)],
            cache,
            adapter,
        )
        return [_score(token_ids, first, rows) for token_ids in continuations]

    def _score_alone(self, context: Sequence[int], token_ids: Sequence[int]) -> Score:
        """Score a continuation with a pass of its own: where its length changes the keys of the context."""
        whole = self.logits([*context, *token_ids[:-1]])
        rows = islice((row for rows in whole for row in rows), len(context) - 1, None)
        return _score(token_ids, next(rows).copy(), rows)

    def _last_logits(self, sequence: _Sequence, cache: KVCache, adapter: int) -> Float32Array:
        *before, last = _batches([sequence], self._budget, adapter)
        for batch in before:
            self._backend.forward(batch, cache)
        logits: Float32Array = self._backend.forward(_with_logits(last, len(last.tokens) - 1), cache)[
            0
        ].copy()
        return logits

    def _rows_of(self, sequences: list[_Sequence], cache: KVCache, adapter: int) -> Iterator[Float32Array]:
        for batch in _batches(sequences, min(self._budget, MAX_LOGIT_ROWS), adapter):
            yield from self._backend.forward(_with_logits(batch), cache)

    def _new_cache(self, n_pages: int) -> KVCache:
        return self._backend.new_cache(n_pages, self._cache_dtype)


def log_softmax(logits: Float32Array) -> NDArray[np.float64]:
    """Log-probabilities along the last axis, in float64."""
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=-1, keepdims=True)
    wide -= np.log(np.exp(wide).sum(axis=-1, keepdims=True))
    return wide


def _score(token_ids: Sequence[int], first: Float32Array, rows: Iterator[Float32Array]) -> Score:
    """Score tokens by the logits before the first, and those after each but the last."""
    logprobs, is_greedy, logits = [], True, first
    for i, token in enumerate(token_ids):
        if i:
            logits = next(rows)
        logprobs.append(float(log_softmax(logits)[token]))
        is_greedy = is_greedy and int(logits.argmax()) == token
    return Score([int(token) for token in token_ids], np.array(logprobs), is_greedy)


def _ids(token_ids: Sequence[int]) -> NDArray[np.int32]:
    return np.asarray(token_ids, dtype=np.int32)


def _pages(first: int, n_tokens: int) -> NDArray[np.int32]:
    return np.arange(first, first + pages_for(n_tokens), dtype=np.int32)


def _batches(sequences: Sequence[_Sequence], budget: int, adapter: int) -> Iterator[StepBatch]:
    """Lay sequences out one after another, in steps of at most `budget` tokens, without logits."""
    tables = np.zeros((len(sequences), max((len(s.table) for s in sequences), default=0)), dtype=np.int32)
    for row, sequence in enumerate(sequences):
        tables[row, : len(sequence.table)] = sequence.table
    lengths = [len(s.tokens) for s in sequences]
    tokens = np.concatenate([s.tokens for s in sequences]) if sequences else np.zeros(0, np.int32)
    positions = [np.arange(s.start, s.start + len(s.tokens), dtype=np.int32) for s in sequences]
    for start in range(0, len(tokens), budget):
        part = slice(start, start + budget)
        yield StepBatch(
            tokens=tokens[part],
            positions=np.concatenate(positions)[part],
            sequences=np.repeat(np.arange(len(sequences), dtype=np.int32), lengths)[part],
            page_tables=tables,
            logit_rows=np.zeros(0, dtype=np.int32),
            adapters=np.full(len(tokens[part]), adapter, dtype=np.int32),
            lengths=np.array([s.start + len(s.tokens) for s in sequences], dtype=np.int32),
        )


def _with_logits(batch: StepBatch, first: int = 0) -> StepBatch:
    """The same step, and the logits of row `first` and all after it."""
    return replace(batch, logit_rows=np.arange(first, len(batch.tokens), dtype=np.int32))
