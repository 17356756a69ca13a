"""Measuring prefill and decode: what a step costs, what it has to read, and how near that is to the memory's speed.

Steps are run on `CpuBackend` itself, without scheduling, sampling or text, so that a figure is the machine's and the
kernels'. Every round measures the read bandwidth and then each case once; figures are medians over the rounds.

    prefill   `tokens` tokens of one sequence, after `depth` tokens that are in the cache; logits of the last one
    decode    `DECODE_STEPS` steps of one token of each of `batch` sequences, each with `depth` tokens in the cache

What a step has to read: every packed weight once for each pass of up to `MAX_TOKENS` tokens (the output matrix only
where logits are wanted; of experts as many as tokens meet that choose evenly), and the keys and values of the context
once. A multiply-accumulate (MAC) is counted for each
weight and token, and for each of the head_dim products of a query with a key and of a weight with a value.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ropewalk.backend.base import PAGE_SIZE, StepBatch
from ropewalk.backend.cache import CACHE_DTYPES, CpuCache, cache_page_bytes
from ropewalk.backend.cpu import MAX_TOKENS, CpuBackend, Progress
from ropewalk.backend.host import available_bytes
from ropewalk.backend.weights import PackedWeights
from ropewalk.checkpoint.base import Checkpoint
from ropewalk.errors import InvalidParameterError
from ropewalk.kernels.bandwidth import measure_read_bandwidth
from ropewalk.kernels.formats import GROUP, PANEL_ROWS
from ropewalk.kernels.tables import (
    EXPERT_MATRICES_PER_LAYER,
    GATE_EXPS,
    K_B,
    LATENT_MATRICES_PER_LAYER,
    MATRICES_PER_LAYER,
    Q_A,
    ROUTER,
    Matrix,
)
from ropewalk.kernels.team import available_threads, thread_limits
from ropewalk.model.config import ModelConfig

DECODE_STEPS = 8
BANDWIDTH_BYTES = 1 << 29  # of the buffer whose reading is the bound


@dataclass(frozen=True)
class Plan:
    """What to measure: every prompt length at every depth, every batch at every depth, for all threads and caches.

    Raises
    ------
    InvalidParameterError
        An empty list, a number below what makes sense, or an unknown cache type.
    """

    prompts: Sequence[int] = (128, 512)
    depths: Sequence[int] = (0, 2048)
    batches: Sequence[int] = (1, 4, 16)
    threads: Sequence[int] = field(default_factory=lambda: (available_threads(),))
    cache_types: Sequence[str] = ("float16",)
    repeats: int = 5

    def __post_init__(self) -> None:
        least = {"prompts": 1, "depths": 0, "batches": 1, "threads": 1}
        for name, low in least.items():
            values = getattr(self, name)
            if not values or min(values) < low:
                raise InvalidParameterError(
                    f"{name} is {list(values)}; allowed: numbers from {low} on, at least one"
                )
        cpus = thread_limits()["affinity"]
        if max(self.threads) > cpus:
            raise InvalidParameterError(f"threads is {max(self.threads)}; this process may use {cpus} CPUs")
        if not self.cache_types or set(self.cache_types) - set(CACHE_DTYPES):
            raise InvalidParameterError(
                f"cache_types is {list(self.cache_types)}; allowed: {', '.join(CACHE_DTYPES)}, at least one"
            )
        if self.repeats < 1:
            raise InvalidParameterError(f"repeats is {self.repeats}; it must be at least 1")

    def cases(self) -> list[Case]:
        """All cases, for one number of threads and one type of cache."""
        prefill = [Case("prefill", n, 1, depth) for depth in self.depths for n in self.prompts]
        return prefill + [Case("decode", 1, batch, depth) for depth in self.depths for batch in self.batches]

    def within(self, context_length: int) -> Plan:
        """The plan without the depths that do not leave room for its cases in a context."""
        room = context_length - max(DECODE_STEPS, *self.prompts)
        depths = tuple(depth for depth in self.depths if depth <= room)
        return replace(self, depths=depths or (0,))

    def check(self, config: ModelConfig, weight_bytes: int, free_bytes: int) -> None:
        """Raise InvalidParameterError if a case is longer than the model's context, or does not fit into memory."""
        for case in self.cases():
            if case.length > config.context_length:
                raise InvalidParameterError(
                    f"{case.phase} of {case.tokens if case.phase == 'prefill' else DECODE_STEPS} tokens at depth "
                    f"{case.depth} takes {case.length} tokens of context; the model has {config.context_length}"
                )
        largest = max(self.cases(), key=lambda case: case.n_pages)
        page_bytes = max(cache_page_bytes(config, dtype) for dtype in self.cache_types)
        needed = weight_bytes + largest.n_pages * page_bytes + BANDWIDTH_BYTES
        if needed > free_bytes:
            raise InvalidParameterError(
                f"a batch of {largest.batch} with {largest.length} tokens each takes "
                f"{largest.n_pages * page_bytes / 1e9:.1f} GB of cache, with the weights {needed / 1e9:.1f} GB; "
                f"{free_bytes / 1e9:.1f} GB are free: ask for smaller batches or depths"
            )


@dataclass(frozen=True)
class Case:
    """One thing to measure (see the top of this file); `tokens` is 1 for decode, `batch` is 1 for prefill."""

    phase: str
    tokens: int
    batch: int
    depth: int

    @property
    def steps(self) -> int:
        """Steps of one round."""
        return DECODE_STEPS if self.phase == "decode" else 1

    @property
    def length(self) -> int:
        """Tokens of each sequence at the end of a round."""
        return self.depth + self.tokens * self.steps

    @property
    def n_pages(self) -> int:
        """Pages of the cache that all sequences take."""
        return self.batch * -(-self.length // PAGE_SIZE)


@dataclass(frozen=True)
class Work:
    """What one step has to do at least: bytes of weights and cache to read, and multiply-accumulates."""

    weight_bytes: int
    cache_bytes: int
    macs: int

    @property
    def n_bytes(self) -> int:
        """Bytes of weights and cache together."""
        return self.weight_bytes + self.cache_bytes


@dataclass(frozen=True)
class Measurement:
    """A case with its medians: seconds of a step, and the read bandwidth (bytes/s) of the same rounds."""

    case: Case
    n_threads: int
    cache_type: str
    work: Work
    step_s: float
    bandwidth: float

    @property
    def tokens_per_s(self) -> float:
        """Tokens of all sequences by time."""
        return self.case.tokens * self.case.batch / self.step_s

    @property
    def bytes_per_s(self) -> float:
        """Bytes that the step has to read at least, by time."""
        return self.work.n_bytes / self.step_s

    @property
    def macs_per_s(self) -> float:
        """Multiply-accumulates by time."""
        return self.work.macs / self.step_s

    @property
    def bandwidth_share(self) -> float:
        """Share of the measured read bandwidth."""
        return self.bytes_per_s / self.bandwidth

    def as_dict(self) -> dict[str, Any]:
        """All of it as JSON values."""
        return {
            **vars(self.case),
            "threads": self.n_threads,
            "cache_type": self.cache_type,
            "step_s": self.step_s,
            "tokens_per_s": self.tokens_per_s,
            "weight_bytes": self.work.weight_bytes,
            "cache_bytes": self.work.cache_bytes,
            "bytes_per_s": self.bytes_per_s,
            "read_bandwidth_bytes_per_s": self.bandwidth,
            "bandwidth_share": self.bandwidth_share,
            "macs": self.work.macs,
            "macs_per_s": self.macs_per_s,
        }


def work_of(case: Case, config: ModelConfig, weights: PackedWeights, page_bytes: int) -> Work:
    """What a step of a case has to do, from the packed tables and the layout of the cache.

    Parameters
    ----------
    page_bytes : int
        Bytes of a page of 16 tokens of the cache, over all layers.
    """
    panels, panel_bytes, groups = (
        weights.matrices[:, field] for field in (Matrix.N_PANELS, Matrix.PANEL_BYTES, Matrix.N_GROUPS)
    )
    sizes, macs = panels * panel_bytes, panels * PANEL_ROWS * groups * GROUP
    in_layers = MATRICES_PER_LAYER * config.n_layers
    vectors = sum(v.nbytes for v in weights.vectors.values())
    token_bytes = page_bytes / (PAGE_SIZE * config.n_layers)  # of one layer
    head_macs = 2 * config.n_heads * config.head_dim
    weight_bytes, cache_bytes, n_macs = 0, 0.0, 0
    middle = case.depth + (case.steps - 1) // 2  # of decode, whose context grows by one token a step
    for start in range(0, case.tokens, MAX_TOKENS):
        first = middle + start
        last = first + min(MAX_TOKENS, case.tokens - start) - 1
        n_tokens = (last - first + 1) * case.batch
        weight_bytes += (
            sizes[:in_layers].sum() + vectors + _beside(config, sizes, _experts_met(config, n_tokens))
        )
        n_macs += (macs[:in_layers].sum() + _beside(config, macs, _experts_met(config, 1))) * n_tokens
        for window in config.layer_window:
            begin = max(0, first - window + 1) if window else 0
            cache_bytes += (last + 1 - begin) * token_bytes * case.batch
            n_macs += head_macs * _seen(first, last, window) * case.batch
    weight_bytes += sizes[in_layers]
    n_macs += macs[in_layers] * case.batch
    return Work(int(weight_bytes), round(cache_bytes), int(n_macs))


def _experts_met(config: ModelConfig, n_tokens: int) -> float:
    """Experts of a layer that some of the tokens go through, if they choose evenly and independently."""
    if config.experts is None:
        return 0.0
    n, used = config.experts.n_experts, config.experts.n_used
    return n * (1 - (1 - used / n) ** n_tokens)


def _beside(config: ModelConfig, per_matrix: NDArray[np.int64], n_experts: float) -> int:
    """What the matrices after the output matrix add: routers, `n_experts` of each layer, those of latent attention."""
    rows = per_matrix[MATRICES_PER_LAYER * config.n_layers + 1 :]
    n_latent = LATENT_MATRICES_PER_LAYER * config.n_layers if config.latent else 0
    experts, latent = np.split(rows, [len(rows) - n_latent])
    experts = experts.reshape(-1, EXPERT_MATRICES_PER_LAYER)
    total = experts[:, ROUTER].sum() + n_experts * experts[:, GATE_EXPS:].sum()
    if config.latent:
        per_layer = latent.reshape(-1, LATENT_MATRICES_PER_LAYER)
        total += per_layer[:, Q_A].sum() + config.n_heads * per_layer[:, K_B:].sum()
    return round(float(total))


def _seen(first: int, last: int, window: int) -> int:
    """Tokens that the queries at positions `first` ... `last` see, themselves included, all added up."""
    positions = np.arange(first, last + 1) + 1
    return int((np.minimum(positions, window) if window else positions).sum())


def measure(
    backend: CpuBackend,
    cases: Sequence[Case],
    cache_type: str,
    repeats: int,
    *,
    clock: Callable[[], float] = time.perf_counter,
    bandwidth: Callable[[int], float] = lambda n_threads: measure_read_bandwidth(
        n_threads, BANDWIDTH_BYTES, 3
    ),
    progress: Progress = lambda what, share: None,
) -> list[Measurement]:
    """Rounds over all cases on one backend and cache, after one round that is not counted."""
    cache = backend.new_cache(max(case.n_pages for case in cases), cache_type)
    _fill(backend, cache)
    speeds: list[float] = []
    seconds: list[list[float]] = []
    n_runs = (repeats + 1) * len(cases)
    for number in range(repeats + 1):
        speeds.append(bandwidth(backend.n_threads))
        seconds.append([])
        for case in cases:
            done = number * len(cases) + len(seconds[-1])
            progress(f"measuring, {backend.n_threads} threads, {cache_type}", done / n_runs)
            seconds[-1].append(_time_steps(backend, cache, case, clock))
    return [
        Measurement(
            case,
            backend.n_threads,
            cache_type,
            work_of(case, backend.config, backend.weights, cache.bytes_per_page),
            median(times),
            median(speeds[1:]),
        )
        for case, times in zip(cases, zip(*seconds[1:], strict=True), strict=True)
    ]


def _time_steps(backend: CpuBackend, cache: CpuCache, case: Case, clock: Callable[[], float]) -> float:
    """Seconds of a step: the mean of a round's."""
    batches = [batch_of(case, step, backend.config.vocab_size) for step in range(case.steps)]
    start = clock()
    for batch in batches:
        backend.forward(batch, cache)
    return (clock() - start) / case.steps


def batch_of(case: Case, step: int, vocab_size: int) -> StepBatch:
    """The tokens of one step of a case: drawn at random, the same ones each time."""
    n = case.tokens * case.batch
    first = case.depth + step * case.tokens
    positions = np.tile(np.arange(first, first + case.tokens, dtype=np.int32), case.batch)
    last_rows = np.arange(case.tokens - 1, n, case.tokens, dtype=np.int32)
    return StepBatch(
        tokens=np.random.default_rng(step).integers(0, vocab_size, n, np.int32),
        positions=positions,
        sequences=np.repeat(np.arange(case.batch, dtype=np.int32), case.tokens),
        page_tables=np.arange(case.n_pages, dtype=np.int32).reshape(case.batch, -1),
        logit_rows=last_rows,
    )


def _fill(backend: CpuBackend, cache: CpuCache) -> None:
    """Real keys and values in every page: untouched memory would be read faster than memory can be."""
    case = Case("prefill", PAGE_SIZE, 1, 0)
    backend.forward(batch_of(case, 0, backend.config.vocab_size), cache)
    cache.copy_pages([(0, page) for page in range(1, cache.n_pages)])


def run(
    checkpoint: Checkpoint, config: ModelConfig, plan: Plan, progress: Progress = lambda what, share: None
) -> list[Measurement]:
    """Measure a whole plan.

    Raises
    ------
    InvalidParameterError
        As `Plan.check`.
    """
    plan.check(config, sum(t.n_bytes for t in checkpoint.tensors.values()), available_bytes())
    results = []
    for n_threads in dict.fromkeys(plan.threads):
        with closing(CpuBackend(checkpoint, config, n_threads, progress)) as backend:
            for cache_type in dict.fromkeys(plan.cache_types):
                results += measure(backend, plan.cases(), cache_type, plan.repeats, progress=progress)
    return results
