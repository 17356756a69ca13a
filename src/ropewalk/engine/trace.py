"""What a generation did, step by step and token by token: the data of `RequestOutput.trace`.

A `StepTrace` is one pass through the model, with its bytes and where its time went; a `TokenTrace` is one draw, with
the distribution before and after each sampling knob; a `Trace` is both, for one completion. Plain frozen data, made by
`engine.recorder` for requests with `SamplingParams(trace=...)`. Knows token ids, not their texts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ropewalk.engine.sampler import Candidates, Context, Logits, descending, steps
from ropewalk.params import SamplingParams

GROUPS = {
    "qkv": "matmul",
    "out": "matmul",
    "gate_up": "matmul",
    "down": "matmul",
    "output": "matmul",
    "adapt": "matmul",
    "attend": "attention",
    "rotate": "pointwise",
    "norm": "pointwise",
    "pointwise": "pointwise",
    "route": "pointwise",
    "wait": "wait",
    "sampling": "sampling",
    "schedule": "overhead",
    "prepare": "overhead",
    "finish": "overhead",
    "trace": "trace",
}
"""The parts of a step, and what each belongs to.

matmul: products with weights (`qkv`, `out`, `gate_up`, `down`, `output`), and with adapters (`adapt`). attention:
`attend`. pointwise: norms, rotation and writing to the cache (`rotate`), activations and rounding for the next product
(`pointwise`), the choice of experts (`route`). wait: at barriers, for other threads. sampling: the draw. overhead:
Python around it: `schedule` (who runs, page tables), `prepare` (embedding rows, tables for the kernels), `finish`.
trace: the making of the trace itself.
"""

TextOf = Callable[[int], str]


@dataclass(frozen=True)
class Stage:
    """The distribution after one sampling knob.

    Attributes
    ----------
    name : str
        "raw", then the knobs that are on, in order: `engine.sampler.steps`.
    n_candidates : int
        Tokens that can still be drawn.
    entropy : float
        Of the distribution, in nats.
    n_removed : int
        Tokens that this knob took away.
    removed_probability : float
        Their probability in the distribution before it.
    """

    name: str
    n_candidates: int
    entropy: float
    n_removed: int = 0
    removed_probability: float = 0.0


@dataclass(frozen=True)
class Candidate:
    """A token that might have been drawn, with its probability in each stage; 0 where it cannot be drawn."""

    token_id: int
    probabilities: tuple[float, ...]


@dataclass(frozen=True, eq=False)
class StepTrace:
    """One step that a request took part in.

    Attributes
    ----------
    number : int
        Of the engine's steps, from 0.
    phase : "prefill" or "decode"
        Whether it reads the request's prompt, or computes the token drawn last.
    first_position, n_tokens : int
        The request's tokens in this step, guesses included.
    pages : tuple of int
        The request's page table, these tokens included.
    page_bytes : int
        Bytes of a page of the KV cache, over all layers.
    batch_sequences, batch_tokens, batch_drawn : int
        Requests, tokens and drawn tokens of the whole step.
    pages_used, pages_total : int
        Of the pool, by all requests.
    weight_bytes : dict of str to int
        Bytes of weights that the step read, by part.
    cache_read_bytes, cache_written_bytes : int
        Bytes of keys and values, of the whole step.
    start_ns : int
        When it began, on the clock of `time.perf_counter_ns`.
    parts : tuple of str
        What it did, in order (see `GROUPS`), each until the next.
    ends_ns : int64 [len(parts)]
        When each part ended.
    """

    number: int
    phase: str
    first_position: int
    n_tokens: int
    pages: tuple[int, ...]
    page_bytes: int
    batch_sequences: int
    batch_tokens: int
    batch_drawn: int
    pages_used: int
    pages_total: int
    weight_bytes: dict[str, int]
    cache_read_bytes: int
    cache_written_bytes: int
    start_ns: int
    parts: tuple[str, ...] = field(repr=False)
    ends_ns: NDArray[np.int64] = field(repr=False)

    @property
    def seconds(self) -> float:
        """How long it took, without the making of the trace itself."""
        return (int(self.ends_ns[-1]) - self.start_ns) / 1e9 - self.part_s.get("trace", 0.0)

    @property
    def model_s(self) -> float:
        """How long the pass through the model took: all of it but sampling and Python around it."""
        outside = ("sampling", "overhead", "trace")
        return sum(s for part, s in self.part_s.items() if GROUPS[part] not in outside)

    @property
    def part_s(self) -> dict[str, float]:
        """Seconds of each part, on the clock of the thread that runs the step."""
        lengths = np.diff(self.ends_ns, prepend=self.start_ns)
        totals: dict[str, float] = {}
        for part, length in zip(self.parts, lengths.tolist(), strict=True):
            totals[part] = totals.get(part, 0.0) + length / 1e9
        return totals

    @property
    def wait_s(self) -> dict[str, float]:
        """What of "wait" came after each part: until the other threads were done with it too."""
        lengths = np.diff(self.ends_ns, prepend=self.start_ns).tolist()
        totals: dict[str, float] = {}
        for before, part, length in zip(self.parts, self.parts[1:], lengths[1:], strict=False):
            if part == "wait":
                totals[before] = totals.get(before, 0.0) + length / 1e9
        return totals

    @property
    def group_s(self) -> dict[str, float]:
        """Seconds of each group of parts, in the order of `GROUPS`."""
        return grouped(self.part_s)

    @property
    def read_bytes(self) -> int:
        """Bytes of weights and of KV cache that it read."""
        return sum(self.weight_bytes.values()) + self.cache_read_bytes

    @property
    def bytes_per_s(self) -> float:
        """Bytes read per second of the whole step."""
        return self.read_bytes / self.seconds

    def to_dict(self, origin_ns: int = 0) -> dict[str, Any]:
        """All of it but the single phases, as JSON values; `start_s` counts from `origin_ns`."""
        left_out = ("start_ns", "parts", "ends_ns", "pages")
        return {
            **{name: value for name, value in vars(self).items() if name not in left_out},
            "pages": list(self.pages),
            "start_s": (self.start_ns - origin_ns) / 1e9,
            "seconds": self.seconds,
            "read_bytes": self.read_bytes,
            "bytes_per_s": self.bytes_per_s,
            "part_s": self.part_s,
            "wait_s": self.wait_s,
            "group_s": self.group_s,
        }


@dataclass(frozen=True, eq=False)
class TokenTrace:
    """One token that was drawn.

    Attributes
    ----------
    token_id : int
    position : int
        In its sequence, prompt included.
    stages : tuple of Stage
    candidates : tuple of Candidate
        The most likely tokens of the first and of the last stage, and the one drawn; the most likely of the last
        stage first.
    step : StepTrace
        The step that computed the distribution.
    """

    token_id: int
    position: int
    stages: tuple[Stage, ...]
    candidates: tuple[Candidate, ...]
    step: StepTrace

    @property
    def probability(self) -> float:
        """The drawn token's, in the distribution that it was drawn from."""
        return next(c.probabilities[-1] for c in self.candidates if c.token_id == self.token_id)

    def to_dict(self, text_of: TextOf | None = None) -> dict[str, Any]:
        """All of it as JSON values, with the number of its step; `text_of` gives the texts of tokens."""

        def named(token_id: int) -> dict[str, Any]:
            return {"token_id": token_id} | ({"text": text_of(token_id)} if text_of else {})

        return {
            **named(self.token_id),
            "position": self.position,
            "probability": self.probability,
            "step": self.step.number,
            "stages": [vars(stage) for stage in self.stages],
            "candidates": [
                {**named(c.token_id), "probabilities": list(c.probabilities)} for c in self.candidates
            ],
        }


@dataclass(frozen=True, eq=False)
class Trace:
    """One completion: the steps it took part in, and the tokens it drew."""

    steps: tuple[StepTrace, ...]
    tokens: tuple[TokenTrace, ...]

    @property
    def seconds(self) -> float:
        """Of all steps together."""
        return sum(step.seconds for step in self.steps)

    @property
    def read_bytes(self) -> int:
        """Bytes of weights and of KV cache that all steps read."""
        return sum(step.read_bytes for step in self.steps)

    @property
    def bytes_per_token(self) -> float:
        """Bytes read for each token drawn in these steps, by all requests that shared them."""
        return self.read_bytes / max(1, sum(step.batch_drawn for step in self.steps))

    @property
    def part_s(self) -> dict[str, float]:
        """Seconds of each part, of all steps together."""
        return added(step.part_s for step in self.steps)

    @property
    def group_s(self) -> dict[str, float]:
        """Seconds of each group of parts, in the order of `GROUPS`."""
        return grouped(self.part_s)

    def to_dict(self, text_of: TextOf | None = None) -> dict[str, Any]:
        """All of it as JSON values."""
        origin_ns = self.steps[0].start_ns if self.steps else 0
        return {
            "steps": [step.to_dict(origin_ns) for step in self.steps],
            "tokens": [token.to_dict(text_of) for token in self.tokens],
            "seconds": self.seconds,
            "read_bytes": self.read_bytes,
            "bytes_per_token": self.bytes_per_token,
            "part_s": self.part_s,
            "group_s": self.group_s,
        }

    def to_chrome(self, text_of: TextOf | None = None) -> dict[str, Any]:
        """The same as an object in Chrome's trace format, for chrome://tracing or ui.perfetto.dev."""
        from ropewalk.engine.chrome import to_chrome

        return to_chrome(self, text_of)


def added(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Seconds of each part, of several steps together."""
    totals: dict[str, float] = {}
    for step in parts:
        for part, seconds in step.items():
            totals[part] = totals.get(part, 0.0) + seconds
    return totals


def grouped(part_s: dict[str, float]) -> dict[str, float]:
    """Seconds by group, in the order of `GROUPS`; groups without a part are left out."""
    totals: dict[str, float] = {}
    for part, group in GROUPS.items():
        if part in part_s:
            totals[group] = totals.get(group, 0.0) + part_s[part]
    return totals


def explain(
    logits: Logits, params: SamplingParams, context: Context, token_id: int, n_best: int
) -> tuple[tuple[Stage, ...], tuple[Candidate, ...]]:
    """Tell how a token came to be drawn.

    Parameters
    ----------
    logits : float32 [vocab_size]
        What `sampler.choose` was given.
    token_id : int
        What it chose.
    n_best : int
        How many of the most likely tokens to tell of, in the first and in the last stage.

    Returns
    -------
    stages, candidates
        Of a `TokenTrace`.
    """
    names, distributions = zip(*steps(logits, params, context), strict=True)
    stages = [_stage(names[0], distributions[0], None)]
    for name, before, after in zip(names[1:], distributions, distributions[1:], strict=False):
        stages.append(_stage(name, after, before))
    told = {token_id, *_best(distributions[0], n_best), *_best(distributions[-1], n_best)}
    ids = np.array(sorted(told))
    table = np.stack([d.probabilities_of(ids) for d in distributions])
    order = np.lexsort((ids, -table[0], -table[-1]))
    return tuple(stages), tuple(Candidate(int(ids[i]), tuple(table[:, i].tolist())) for i in order)


def _stage(name: str, now: Candidates, before: Candidates | None) -> Stage:
    if before is None or len(now.ids) == len(before.ids):
        return Stage(name, len(now.ids), now.entropy)
    kept = float(before.probabilities_of(now.ids).sum())
    return Stage(name, len(now.ids), now.entropy, len(before.ids) - len(now.ids), max(0.0, 1.0 - kept))


def _best(candidates: Candidates, n: int) -> list[int]:
    """Ids of the n most likely tokens."""
    return [int(token_id) for token_id in candidates.ids[descending(candidates.logits, n)]]
