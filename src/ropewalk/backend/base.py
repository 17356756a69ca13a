"""What the engine asks of a machine: a flat batch of tokens goes in, logits come out.

A `StepBatch` says which tokens run in this step, at which positions, and in which pages of the KV cache
their keys and values live. A `Backend` packs one model and runs such batches; a `KVCache` is its memory
for keys and values. Nothing here knows requests, sampling or files, and nobody outside a backend knows
how a page or a weight is laid out.

The slot of a token is `page_tables[sequence, position // PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from ropewalk.model.config import ModelConfig

PAGE_SIZE = 16
"""Tokens in one page of the KV cache."""

Int32Array = NDArray[np.int32]
Float32Array = NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class StepBatch:
    """The tokens of one step, n of them from n_seqs sequences.

    Tokens of one sequence are consecutive and their positions ascend by one; every earlier position of
    that sequence was written by an earlier step, or comes earlier in this batch. Prefill, decode and a
    mixture of both look the same: a chunk is many tokens of one sequence, decode is one token of each.

    Attributes
    ----------
    tokens : int32 [n]
        Token ids.
    positions : int32 [n]
        Position of each token in its sequence, from 0.
    sequences : int32 [n]
        Row of `page_tables` that belongs to each token.
    page_tables : int32 [n_seqs, max_pages]
        Page numbers of each sequence in order. Entries past a sequence's last position are not read.
    logit_rows : int32 [m]
        Indices into `tokens` of those whose logits are wanted, ascending.
    lengths : int32 [n_seqs], optional
        Tokens of each sequence that are known, those of later steps included: some models' rotary frequencies follow
        from it. Default: up to its last position in this batch.
    adapters : int32 [n], optional
        Number of the low-rank adapter of each token, −1 for none. Default: none have one.
    """

    tokens: Int32Array
    positions: Int32Array
    sequences: Int32Array
    page_tables: Int32Array
    logit_rows: Int32Array
    lengths: Int32Array | None = None
    adapters: Int32Array | None = None

    @property
    def slots(self) -> Int32Array:
        """Slot in the cache of every token, int32 [n]."""
        pages = self.page_tables[self.sequences, self.positions // PAGE_SIZE]
        return (pages * PAGE_SIZE + self.positions % PAGE_SIZE).astype(np.int32)

    @property
    def known(self) -> Int32Array:
        """Known tokens of every sequence, int32 [n_seqs]: `lengths`, or what stands in for it."""
        if self.lengths is not None:
            return self.lengths
        lengths = np.zeros(len(self.page_tables), np.int32)
        np.maximum.at(lengths, self.sequences, self.positions + 1)
        return lengths

    def check(self, *, vocab_size: int, n_pages: int) -> None:
        """Raise ValueError unless the batch keeps the promises above; a fault here is the engine's.

        Parameters
        ----------
        vocab_size : int
            Token ids must lie in 0 ... vocab_size - 1.
        n_pages : int
            Page numbers that are read must lie in 0 ... n_pages - 1.
        """
        n = len(self.tokens)
        for name, dims in (
            ("tokens", 1),
            ("positions", 1),
            ("sequences", 1),
            ("page_tables", 2),
            ("logit_rows", 1),
        ):
            array = getattr(self, name)
            if array.dtype != np.int32 or array.ndim != dims:
                raise ValueError(
                    f"StepBatch.{name} must be int32 with {dims} axes, not {array.dtype} {array.shape}"
                )
        if n == 0 or len(self.positions) != n or len(self.sequences) != n:
            raise ValueError(
                f"StepBatch needs equally many tokens, positions and sequences, at least one: "
                f"{n}, {len(self.positions)}, {len(self.sequences)}"
            )
        n_seqs, max_pages = self.page_tables.shape
        _within("tokens", self.tokens, vocab_size)
        _within("sequences", self.sequences, n_seqs)
        _within("positions", self.positions, max_pages * PAGE_SIZE)
        _within("logit_rows", self.logit_rows, n)
        if np.any(np.diff(self.logit_rows) <= 0):
            raise ValueError("StepBatch.logit_rows must ascend")
        _within(
            "page_tables (entries in use)",
            self.page_tables[self.sequences, self.positions // PAGE_SIZE],
            n_pages,
        )
        same = self.sequences[1:] == self.sequences[:-1]
        if np.any(same & (np.diff(self.positions) != 1)):
            raise ValueError("StepBatch.positions of one sequence must ascend by one")
        if len(np.unique(self.sequences)) != n - np.count_nonzero(same):
            raise ValueError("StepBatch.sequences: tokens of one sequence must be consecutive")
        known = self.known
        if (
            known.dtype != np.int32
            or known.shape != (n_seqs,)
            or np.any(self.positions >= known[self.sequences])
        ):
            raise ValueError("StepBatch.lengths must be int32 [n_seqs], beyond every position")
        if len(np.unique(self.slots)) != n:
            raise ValueError("StepBatch: two tokens would be written to the same slot")


def _within(name: str, values: Int32Array, end: int) -> None:
    if values.size and (values.min() < 0 or values.max() >= end):
        raise ValueError(
            f"StepBatch.{name} must lie in 0 ... {end - 1}, got {values.min()} ... {values.max()}"
        )


def now_ns() -> int:
    """Nanoseconds of POSIX's monotonic clock, the one that compiled code reads too."""
    return time.clock_gettime_ns(time.CLOCK_MONOTONIC)


@dataclass
class StepRecord:
    """What one step did, noted while it runs, when somebody wants to know.

    Attributes
    ----------
    start_ns : int
        When it began, by `now_ns`.
    parts, ends_ns : list of str, list of int
        What it did, in order, and when each ended; each began when the one before it ended, so together they are the
        whole step.
    weight_bytes : dict of str to int
        Bytes of weights that were read, by part. "embedding" are the rows of the prompt's or last tokens.
    cache_read_bytes, cache_written_bytes : int
        Bytes of keys and values, scales included. What several tokens of one sequence look at counts once.
    """

    start_ns: int = field(default_factory=now_ns)
    parts: list[str] = field(default_factory=list)
    ends_ns: list[int] = field(default_factory=list)
    weight_bytes: dict[str, int] = field(default_factory=dict)
    cache_read_bytes: int = 0
    cache_written_bytes: int = 0

    def lap(self, part: str) -> None:
        """Note that a part ends now."""
        self.parts.append(part)
        self.ends_ns.append(now_ns())


class KVCache(Protocol):
    """Keys and values of every layer for `n_pages` pages; only its backend knows the layout."""

    @property
    def n_pages(self) -> int:
        """Pages allocated."""
        ...

    @property
    def bytes_per_page(self) -> int:
        """Bytes of one page over all layers, keys and values and scales included."""
        ...

    @property
    def n_bytes(self) -> int:
        """Bytes allocated for all pages."""
        ...

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole pages, all layers, from the first to the second of each pair, one pair after the other."""
        ...

    def read_page(self, page: int) -> NDArray[np.uint8]:
        """Return a copy of a whole page, all layers, as uint8 [bytes_per_page] in an order of its own."""
        ...

    def write_page(self, page: int, contents: NDArray[np.uint8]) -> None:
        """Make a page what `read_page` returned, of any cache of the same model and type."""
        ...


class Backend(Protocol):
    """One packed model on one machine."""

    @property
    def config(self) -> ModelConfig:
        """The model this backend runs."""
        ...

    @property
    def free_bytes(self) -> int:
        """Bytes that could be allocated for a KV cache now."""
        ...

    def page_bytes(self, dtype: str = "float16") -> int:
        """Bytes of one page of a KV cache, as `KVCache.bytes_per_page`, before there is one."""
        ...

    def identity(self, dtype: str = "float16") -> bytes:
        """Return what the contents of a page follow from besides its tokens and those before it, as 32 bytes.

        The weights, the model's parameters, the type and layout of the cache, and the definition of the arithmetic: two
        backends with one identity write the same bytes for the same tokens, on any day.
        """
        ...

    def new_cache(self, n_pages: int, dtype: str = "float16") -> KVCache:
        """Allocate a KV cache of `n_pages` pages of `PAGE_SIZE` tokens; `dtype` names the element type."""
        ...

    # `cache` is Any because each backend accepts only the caches it made itself.
    def forward(self, batch: StepBatch, cache: Any, record: StepRecord | None = None) -> Float32Array:
        """Run one step: write keys and values of every token, return logits of the wanted rows.

        Parameters
        ----------
        record : StepRecord, optional
            Where to note times and bytes; nothing that is computed depends on it.

        Returns
        -------
        float32 [m, vocab_size]
            Raw logits, one row per entry of `batch.logit_rows`; valid until the next call.
        """
        ...

    def hidden(self, batch: StepBatch, cache: Any) -> Float32Array:
        """Run one step, and return every token's hidden state after the output norm instead of logits.

        Returns
        -------
        float32 [n, hidden_size]
        """
        ...

    def close(self) -> None:
        """Release weights and threads; the backend cannot be used afterwards."""
        ...
