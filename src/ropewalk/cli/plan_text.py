"""A plan for people: facts, then tables of the cache, of what fits, of decode and of prefill."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ropewalk.cli.console import columns, fields, one_line, say

if TYPE_CHECKING:
    from ropewalk.plan import ModelShape, Plan


def show(plan: Plan) -> None:
    """A plan for people."""
    say(fields({name: one_line(value) for name, value in _facts(plan).items()}))
    say("\nKV cache, GiB = 1024³ bytes" + ("" if plan.free_bytes is None else " (* does not fit)"))
    say(_table(plan, "context", lambda c, b: _cache_cell(plan, c, b)))
    if plan.machine is None:
        return
    from ropewalk.plan.units import duration

    if plan.free_bytes is not None:
        say("\n" + _fits(plan))
    say("\ndecode at best: time of a step, tokens over the batch (a: bound by arithmetic, else by memory)")
    say(_table(plan, "context", lambda c, b: _bound_cell(plan, c, b)))
    say(_takeover(plan))
    say("\nprefill at best: time to the first token")
    rows = [("prompt", "time", "tokens/s", "bound by")]
    for p in plan.prompts:
        bound = plan.prefill(p)
        rows.append((f"{p:,}", duration(bound.seconds), f"{bound.tokens_per_s:,.0f}", bound.bound_by))
    say(columns(rows, right=(0, 1, 2)))


def _facts(plan: Plan) -> dict[str, str]:
    from ropewalk.plan.units import both, per_second

    model, weights, machine = plan.model, plan.model.weights, plan.machine
    total = weights.total
    lines = {
        "model": f"{model.name}: {_layers(model)}",
        "weights": f"{total.count:,} ({model.weight_type}), {both(total.n_bytes)}",
        "read by a token": f"{both(weights.read_bytes(1))}, {weights.used_count():,.0f} weights"
        + (f", {weights.n_used} of {weights.n_experts} experts" if weights.n_experts else ""),
        "KV cache": _cache_line(plan),
        "outgrows weights": f"at {plan.crossing_tokens:,} tokens of one sequence"
        + (f"; with a KV head for every head at {plan.mha_crossing_tokens:,}" if model.shares_heads else ""),
    }
    if machine is not None:
        rate, kind = machine.rate_for(model.weight_type)
        memory = "as installed" if machine.memory_bytes is None else both(machine.memory_bytes)
        arithmetic = (
            "not known" if rate is None else per_second(rate, "op") + ("" if kind == "any" else f" in {kind}")
        )
        lines |= {
            "machine": machine.name,
            "": f"memory {memory}, reads {per_second(machine.bandwidth, 'B')}, arithmetic {arithmetic}",
            "source": machine.source,
        }
    for note in model.notes:
        lines["note"] = note
    return lines


def _layers(model: ModelShape) -> str:
    from ropewalk.plan.shape import LayerShape

    kinds: dict[LayerShape, int] = {}
    for layer in model.layers:
        kinds[layer] = kinds.get(layer, 0) + 1
    texts = []
    for layer, count in kinds.items():
        what = f"{layer.n_heads} heads, {layer.n_kv_heads} for keys and values, width {layer.key_dim}"
        if layer.latent:
            what = f"{layer.n_heads} heads over a latent of {layer.latent}, which is key and value"
        texts.append(
            f"{count} layers of {what}" + (f", seeing {layer.window:,} tokens" if layer.window else "")
        )
    return "; ".join(texts) + (f"; made for {model.context_length:,} tokens" if model.context_length else "")


def _cache_line(plan: Plan) -> str:
    from ropewalk.plan import PAGE_SIZE
    from ropewalk.plan.units import in_gib

    scales = plan.bytes_per_token - plan.element_bytes_per_token
    return (
        f"{plan.cache.name}, {plan.bytes_per_token:,} B ({in_gib(plan.bytes_per_token)}) a token"
        + (f", {scales:,} B of it scales" if scales else "")
        + f", in pages of {PAGE_SIZE} tokens"
        + ("" if plan.cache.ours else "; Ropewalk itself has float16 and int8")
    )


def _table(plan: Plan, corner: str, cell: Callable[[int, int], str]) -> str:
    rows = [(corner, *(f"batch {b:,}" for b in plan.batches))]
    rows += [(f"{c:,}", *(cell(c, b) for b in plan.batches)) for c in plan.contexts]
    return columns(rows, right=range(len(plan.batches) + 1))


def _cache_cell(plan: Plan, context: int, batch: int) -> str:
    return f"{plan.cache_bytes(context, batch) / 2**30:,.3f} GiB" + (
        "*" if plan.fits(context, batch) is False else ""
    )


def _bound_cell(plan: Plan, context: int, batch: int) -> str:
    from ropewalk.plan.units import duration

    bound = plan.decode(context, batch)
    speed = f"{bound.tokens_per_s:,.0f}" if bound.tokens_per_s >= 100 else f"{bound.tokens_per_s:.1f}"
    return f"{duration(bound.seconds)}, {speed} tok/s" + (" a" if bound.bound_by == "arithmetic" else "")


def _takeover(plan: Plan) -> str:
    """From which batch on arithmetic takes over, for each context and for none."""
    assert plan.machine is not None
    if plan.machine.rate_for(plan.model.weight_type)[0] is None:
        return "where arithmetic takes over is not known without --flops"
    lines = []
    for c in (1, *plan.contexts):
        batch = plan.takeover_batch(c)
        at = "of the shortest sequences" if c == 1 else f"at {c:,} tokens"
        binds = (
            f"arithmetic binds from a batch of {batch:,}"
            if batch
            else "memory binds every batch, by the caches"
        )
        lines.append(f"{at} {binds}")
    return "\n".join(lines)


def _fits(plan: Plan) -> str:
    from ropewalk.plan.units import both

    assert plan.free_bytes is not None
    if plan.free_bytes < 0:
        return f"the weights do not fit: {both(-plan.free_bytes)} too much"
    lines = [f"beside the weights {both(plan.free_bytes)} are free (activations not counted)"]
    limit = plan.model.context_length
    for b in plan.batches:
        most = plan.largest_context(b) or 0
        beyond = f", more than the {limit:,} that the model was made for" if limit and most > limit else ""
        lines.append(f"largest context of a batch of {b:,}: {most:,} tokens{beyond}")
    lines += [f"largest batch of {c:,} tokens each: {plan.largest_batch(c):,}" for c in plan.contexts]
    return "\n".join(lines)
