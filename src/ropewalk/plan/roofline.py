"""How fast a machine can be at best: bounds of decode and prefill from bytes and operations.

A step can be no quicker than the time to read its bytes, nor than the time to do its operations:

    bytes       the weights once, whatever the batch, and for each sequence the keys and values that it looks at
    operations  two for each weight and token, and for each product of a query with a key, a weight with a value

Decode reads every weight for two operations a sequence, so it is bound by bandwidth until the batch is large; a prompt
of some hundred tokens does enough operations for each weight that arithmetic binds it.
"""

from __future__ import annotations

from dataclasses import dataclass

from ropewalk.plan.machine import Machine
from ropewalk.plan.memory import CacheType, cache_read_bytes, check_count
from ropewalk.plan.shape import LayerShape, ModelShape


@dataclass(frozen=True)
class Bound:
    """The least time of a step.

    Attributes
    ----------
    tokens : int
        Tokens that come out of it: of a decode step one a sequence, of a prefill those of the prompt.
    weight_bytes, cache_bytes : float
        To be read.
    operations : float
    memory_s : float
        To read the bytes.
    arithmetic_s : float or None
        To do the operations; None where the machine's rate is not known.
    """

    tokens: int
    weight_bytes: float
    cache_bytes: float
    operations: float
    memory_s: float
    arithmetic_s: float | None

    @property
    def seconds(self) -> float:
        """The longer of the two."""
        return max(self.memory_s, self.arithmetic_s or 0.0)

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second at most."""
        return self.tokens / self.seconds

    @property
    def bound_by(self) -> str:
        """ "memory" or "arithmetic"."""
        return (
            "arithmetic" if self.arithmetic_s is not None and self.arithmetic_s > self.memory_s else "memory"
        )


def decode_bound(
    model: ModelShape, machine: Machine, cache: CacheType, *, context: int, batch: int = 1
) -> Bound:
    """Bound of a step that draws token number `context` + 1 of each of `batch` sequences.

    Parameters
    ----------
    context : int
        Tokens that each new token looks at, itself included.
    """
    check_count("context", context)
    check_count("batch", batch)
    operations = batch * (2 * model.weights.used_count() + _attention_operations(model, context, 1))
    return _bound(
        model,
        machine,
        tokens=batch,
        weight_bytes=model.weights.read_bytes(batch),
        cache_bytes=batch * cache_read_bytes(model, cache, context),
        operations=operations,
    )


def prefill_bound(
    model: ModelShape, machine: Machine, cache: CacheType, *, prompt: int, pass_tokens: int = 512
) -> Bound:
    """Bound of reading a prompt up to its first token: the least time to the first token.

    Parameters
    ----------
    prompt : int
        Tokens.
    pass_tokens : int
        Tokens of one pass through the weights, which are read once for each pass.
    """
    check_count("prompt", prompt)
    n_passes = -(-prompt // check_count("pass_tokens", pass_tokens))
    sizes = [min(pass_tokens, prompt - i * pass_tokens) for i in range(n_passes)]
    w = model.weights
    weight_bytes = sum(w.read_bytes(size) - w.output.n_bytes for size in sizes) + w.output.n_bytes
    ends = [sum(sizes[: i + 1]) for i in range(n_passes)]
    cache_bytes = sum(cache_read_bytes(model, cache, end) for end in ends[:-1])  # of the passes before
    operations = 2 * (w.used_count(logits=False) * prompt + w.output.count)
    return _bound(
        model,
        machine,
        tokens=prompt,
        weight_bytes=weight_bytes,
        cache_bytes=cache_bytes,
        operations=operations + _attention_operations(model, prompt, prompt),
    )


def takeover_batch(model: ModelShape, machine: Machine, cache: CacheType, *, context: int) -> int | None:
    """The smallest decode batch whose operations take longer than its bytes; None if there is none, or no rate.

    Reading the cache grows with the batch as the operations do, so with a long context arithmetic may never bind.
    """
    rate, _ = machine.rate_for(model.weight_type)
    if rate is None:
        return None
    low, high = 0, 1
    while decode_bound(model, machine, cache, context=context, batch=high).bound_by == "memory":
        low, high = high, 2 * high
        if high > 2**24:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        if decode_bound(model, machine, cache, context=context, batch=middle).bound_by == "memory":
            low = middle
        else:
            high = middle
    return high


def _bound(
    model: ModelShape,
    machine: Machine,
    *,
    tokens: int,
    weight_bytes: float,
    cache_bytes: float,
    operations: float,
) -> Bound:
    rate, _ = machine.rate_for(model.weight_type)
    return Bound(
        tokens=tokens,
        weight_bytes=weight_bytes,
        cache_bytes=cache_bytes,
        operations=operations,
        memory_s=(weight_bytes + cache_bytes) / machine.bandwidth,
        arithmetic_s=None if rate is None else operations / rate,
    )


def _attention_operations(model: ModelShape, context: int, n_queries: int) -> float:
    """Of the last `n_queries` of `context` tokens: two for each element of a key and of a value that is seen."""
    return float(
        sum(
            2 * layer.n_heads * sum(_widths(layer)) * _seen(layer, context, n_queries)
            for layer in model.layers
        )
    )


def _widths(layer: LayerShape) -> tuple[int, int]:
    """What a query is multiplied with, and what comes out, for one head; a latent serves as both."""
    return (layer.latent, layer.latent) if layer.latent else (layer.key_dim, layer.value_dim)


def _seen(layer: LayerShape, context: int, n_queries: int) -> int:
    """Pairs of a query and a position that it sees."""
    first = context - n_queries + 1  # tokens that the first query sees without a window
    if not layer.window or context <= layer.window:
        return (first + context) * n_queries // 2
    growing = max(0, layer.window - first)  # queries that still see everything before them
    return (first + first + growing - 1) * growing // 2 + layer.window * (n_queries - growing)
