"""The whole plan for a model, a KV cache and a machine: what `ropewalk plan` prints, as data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ropewalk.plan.machine import Machine
from ropewalk.plan.memory import (
    PAGE_SIZE,
    CacheType,
    cache_bytes,
    cache_elements,
    cache_type,
    check_count,
    crossing_tokens,
    largest_batch,
    largest_context,
    page_bytes,
    token_bytes,
)
from ropewalk.plan.roofline import Bound, decode_bound, prefill_bound, takeover_batch
from ropewalk.plan.shape import ModelShape


@dataclass(frozen=True)
class Plan:
    """What a model takes, and how fast it can be.

    Attributes
    ----------
    model, cache, machine
        What it is for; without a machine nothing is said about time or what fits.
    contexts, batches, prompts
        Rows and columns of its tables.
    """

    model: ModelShape
    cache: CacheType
    machine: Machine | None
    contexts: tuple[int, ...]
    batches: tuple[int, ...]
    prompts: tuple[int, ...]

    @property
    def bytes_per_token(self) -> int:
        """Of the KV cache, scales included."""
        return token_bytes(self.model, self.cache)

    @property
    def element_bytes_per_token(self) -> int:
        """The same without scales."""
        return sum(map(cache_elements, self.model.layers)) * self.cache.element_bytes

    @property
    def crossing_tokens(self) -> int:
        """Tokens up to which one sequence's KV cache is no larger than the weights."""
        return int(crossing_tokens(self.model.weights.total.n_bytes, self.bytes_per_token))

    @property
    def mha_crossing_tokens(self) -> int:
        """The same if every query head had keys and values of its own."""
        mha = token_bytes(self.model.as_mha, self.cache)
        return int(crossing_tokens(self.model.weights.total.n_bytes, mha))

    def cache_bytes(self, context: int, batch: int) -> int:
        """Bytes allocated for `batch` sequences of `context` tokens, whole pages."""
        return cache_bytes(self.model, self.cache, context, batch)

    @property
    def free_bytes(self) -> int | None:
        """Memory of the machine that the weights leave, below 0 if they do not fit; None where it is not known."""
        if self.machine is None or self.machine.memory_bytes is None:
            return None
        return self.machine.memory_bytes - self.model.weights.total.n_bytes

    def fits(self, context: int, batch: int) -> bool | None:
        """Whether weights and cache fit into the machine's memory; None where that is not known."""
        return None if self.free_bytes is None else self.cache_bytes(context, batch) <= self.free_bytes

    def largest_context(self, batch: int) -> int | None:
        """The most tokens for each of `batch` sequences, as memory allows, whatever the model was made for."""
        if self.free_bytes is None:
            return None
        return largest_context(self.model, self.cache, self.free_bytes, batch)

    def largest_batch(self, context: int) -> int | None:
        """The most sequences of `context` tokens that fit."""
        return (
            None
            if self.free_bytes is None
            else largest_batch(self.model, self.cache, self.free_bytes, context)
        )

    def decode(self, context: int, batch: int) -> Bound:
        """The bound of a decode step; a plan with a machine has it."""
        return decode_bound(self.model, self._machine, self.cache, context=context, batch=batch)

    def prefill(self, prompt: int) -> Bound:
        """The bound of reading a prompt; a plan with a machine has it."""
        return prefill_bound(self.model, self._machine, self.cache, prompt=prompt)

    def takeover_batch(self, context: int) -> int | None:
        """The decode batch at which arithmetic takes over from memory; None: never, or not known."""
        return takeover_batch(self.model, self._machine, self.cache, context=context)

    @property
    def _machine(self) -> Machine:
        assert self.machine is not None, "a plan without a machine has no bounds"
        return self.machine

    def as_dict(self) -> dict[str, Any]:
        """All of it as JSON values: bytes, seconds, tokens and operations, unscaled."""
        facts: dict[str, Any] = {
            "model": self._model_facts(),
            "weights": self._weight_facts(),
            "cache": {
                "type": self.cache.name,
                "bytes_per_token": self.bytes_per_token,
                "element_bytes_per_token": self.element_bytes_per_token,
                "scale_bytes_per_token": self.bytes_per_token - self.element_bytes_per_token,
                "page_tokens": PAGE_SIZE,
                "page_bytes": page_bytes(self.model, self.cache),
                "crossing_tokens": self.crossing_tokens,
                "mha_crossing_tokens": self.mha_crossing_tokens,
                "sizes": [
                    {"context": c, "batch": b, "bytes": self.cache_bytes(c, b), "fits": self.fits(c, b)}
                    for c in self.contexts
                    for b in self.batches
                ],
            },
        }
        if self.machine is not None:
            facts |= self._machine_facts(self.machine)
        return facts

    def _model_facts(self) -> dict[str, Any]:
        layers = self.model.layers
        return {
            "name": self.model.name,
            "layers": len(layers),
            "heads": _same([layer.n_heads for layer in layers]),
            "kv_heads": _same([layer.n_kv_heads for layer in layers]),
            "key_dim": _same([layer.key_dim for layer in layers]),
            "value_dim": _same([layer.value_dim for layer in layers]),
            "latent": _same([layer.latent for layer in layers]),
            "window": _same([layer.window for layer in layers]),
            "context_length": self.model.context_length,
            "notes": list(self.model.notes),
        }

    def _weight_facts(self) -> dict[str, Any]:
        weights = self.model.weights
        parts = {
            name: getattr(weights, name) for name in ("dense", "experts", "output", "embedding", "total")
        }
        return {
            "type": self.model.weight_type,
            **{name: {"count": part.count, "bytes": part.n_bytes} for name, part in parts.items()},
            "experts_in_all": weights.n_experts,
            "experts_used": weights.n_used,
            "read_bytes_per_step": weights.read_bytes(1),
            "used_count": weights.used_count(),
        }

    def _machine_facts(self, machine: Machine) -> dict[str, Any]:
        rate, kind = machine.rate_for(self.model.weight_type)
        return {
            "machine": {
                "name": machine.name,
                "memory_bytes": machine.memory_bytes,
                "bandwidth_bytes_per_s": machine.bandwidth,
                "operations_per_s": rate,
                "arithmetic": kind,
                "source": machine.source,
            },
            "fits": {
                "free_bytes": self.free_bytes,
                "largest_context": [{"batch": b, "context": self.largest_context(b)} for b in self.batches],
                "largest_batch": [{"context": c, "batch": self.largest_batch(c)} for c in self.contexts],
            },
            "decode": [
                {"context": c, "batch": b, **_bound_facts(self.decode(c, b))}
                for c in self.contexts
                for b in self.batches
            ],
            "takeover_batch": [{"context": c, "batch": self.takeover_batch(c)} for c in self.contexts],
            "prefill": [{"prompt": p, **_bound_facts(self.prefill(p))} for p in self.prompts],
        }


def _bound_facts(bound: Bound) -> dict[str, Any]:
    return {**vars(bound), "seconds": bound.seconds, "tokens_per_s": bound.tokens_per_s, "by": bound.bound_by}


def _same(values: list[int]) -> int | list[int]:
    """The one value of all layers, or that of each."""
    return values[0] if len(set(values)) == 1 else values


def make_plan(
    model: ModelShape,
    machine: Machine | None = None,
    *,
    cache: str = "float16",
    contexts: Sequence[int] | None = None,
    batches: Sequence[int] | None = None,
    prompts: Sequence[int] | None = None,
) -> Plan:
    """Plan for a model.

    Parameters
    ----------
    model : ModelShape
        Of `shape_of_gguf`, `shape_of_hf` or `shape_of_numbers`.
    machine : Machine, optional
        Of `find_machine`, or your own.
    cache : str
        A name of `CACHE_TYPES`.
    contexts : sequence of int, optional
        Tokens of a sequence. Default: 4,096 and 32,768, or what the model was made for if that is less.
    batches : sequence of int, optional
        Sequences at once. Default: 1, 4 and 16.
    prompts : sequence of int, optional
        Tokens of a prompt. Default: 512 and 4,096, or what the model was made for if that is less.

    Raises
    ------
    InvalidParameterError
        A number below 1, or an unknown cache type.
    """
    most = model.context_length or 32768
    contexts = sorted({min(4096, most), min(32768, most)}) if contexts is None else contexts
    prompts = sorted({min(512, most), min(4096, most)}) if prompts is None else prompts
    batches = (1, 4, 16) if batches is None else batches
    for name, values in (("context", contexts), ("batch", batches), ("prompt", prompts)):
        for value in values:
            check_count(name, value)
    return Plan(model, cache_type(cache), machine, tuple(contexts), tuple(batches), tuple(prompts))
