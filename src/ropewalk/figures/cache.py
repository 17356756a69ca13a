"""The KV cache of one sequence against its context, beside the weights and the memories of machines.

Without a model: the theory's example, a model with 13.5 GB of 16-bit weights, 32 layers and heads of 128, whose 32
heads have keys and values each (multi-head attention, MHA) or share them in 8 groups (grouped-query attention, GQA).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ropewalk.figures.style import LINES, MARKERS, canvas, on_paper, plain_log
from ropewalk.plan.memory import CacheType, cache_type, crossing_tokens, token_bytes, weight_type
from ropewalk.plan.shape import LayerShape, ModelShape, shape_of_numbers

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MEMORIES = {"24 GB accelerator": 24e9, "80 GB accelerator": 80e9}
EXAMPLE_WEIGHTS = 6_750_000_000


def example() -> ModelShape:
    """The theory's model, with grouped-query attention; `as_mha` is the other one."""
    shape = shape_of_numbers(
        layers=32, heads=32, kv_heads=8, head_dim=128, params=EXAMPLE_WEIGHTS, weight_type=weight_type("F16")
    )
    return replace(shape, name="7B, 32 layers, heads of 128")


@dataclass(frozen=True)
class Line:
    """One kind of cache of the model: bytes for each token, and where it is as large as the weights."""

    label: str
    token_bytes: int
    crossing_tokens: float


def lines(model: ModelShape, caches: Sequence[str] = ("float16",)) -> list[Line]:
    """A line for each type of cache, with the model's own heads, and if these share, as if they did not."""
    found = []
    for cache in map(cache_type, caches):
        kinds = [(model.as_mha, "MHA"), (model, "GQA")] if model.shares_heads else [(model, "MHA")]
        for shape, name in kinds:
            n_bytes = token_bytes(shape, cache)
            label = f"{name}, {heads_of(shape.layers)} KV heads, {described(cache)}"
            found.append(Line(label, n_bytes, crossing_tokens(model.weights.total.n_bytes, n_bytes)))
    return found


def heads_of(layers: Sequence[LayerShape]) -> str:
    """Number of KV heads, or the range of them."""
    counts = [layer.n_kv_heads for layer in layers]
    return str(counts[0]) if len(set(counts)) == 1 else f"{min(counts)}-{max(counts)}"


def described(cache: CacheType) -> str:
    """A cache type's name, and that there are scales."""
    return f"{cache.name} with scales" if cache.scale_bytes else cache.name


def contexts(model: ModelShape) -> NDArray[np.int64]:
    """Contexts to draw: powers of two from 1,024 to 131,072, or to what the model was made for if that is more."""
    last = max(2**17, model.context_length or 0)
    return 2 ** np.arange(10, int(np.ceil(np.log2(last))) + 1, dtype=np.int64)


def draw(
    model: ModelShape | None = None, caches: Sequence[str] = ("float16",), *, theme: str = "light"
) -> Figure:
    """Draw it, on logarithmic axes.

    Parameters
    ----------
    model : ModelShape, optional
        From `ropewalk.plan.shape_of_gguf` and the like. Default: the theory's example.
    caches : sequence of str
        Types of the cache's elements: "float16", "int8", ...
    theme : "light", "dark" or "auto"

    Raises
    ------
    InvalidParameterError
        An unknown type or theme.
    """
    model = model or example()
    drawn, tokens = lines(model, caches), contexts(model)
    weights = model.weights.total.n_bytes
    with canvas(theme, 7.4, 4.8) as (figure, colours):
        axes = figure.add_subplot()
        for i, line in enumerate(drawn):
            size, colour = tokens * line.token_bytes / 1e9, colours.series[i % 4]
            label = f"{line.label}: as large as the weights at {int(line.crossing_tokens):,} tokens"
            axes.plot(tokens, size, color=colour, linestyle=LINES[i % 4], label=label)
            if tokens[0] < line.crossing_tokens < tokens[-1]:
                axes.plot([line.crossing_tokens], [weights / 1e9], MARKERS[i % 4], color=colour)
        levels = {f"weights, {model.weight_type}": weights, **MEMORIES}
        for name, n_bytes in levels.items():
            of_weights = name.startswith("weights")
            axes.axhline(n_bytes / 1e9, color=colours.ink if of_weights else colours.muted, linewidth=1.2,
                         linestyle="-" if of_weights else (0, (1, 2)))  # fmt: skip
            at_right = of_weights and min(line.crossing_tokens for line in drawn) < np.sqrt(
                tokens[0] * tokens[-1]
            )
            axes.annotate(
                f"{name}: {n_bytes / 1e9:.3g} GB" if of_weights else name,
                (tokens[-1 if at_right else 0], n_bytes / 1e9),
                (-4 if at_right else 4, -4 if of_weights else 4),
                textcoords="offset points",
                ha="right" if at_right else "left",
                va="top" if of_weights else "bottom",
                color=colours.ink if of_weights else colours.muted,
                **on_paper(colours),
            )
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        plain_log(axes.yaxis)
        axes.set_xlim(tokens[0], tokens[-1])
        axes.set_ylim(top=max(200, 2 * weights / 1e9))
        axes.set_xticks(tokens, [_thousands(int(n)) for n in tokens])
        axes.set_xlabel("context, tokens")
        axes.set_ylabel("KV cache of one sequence, GB")
        axes.set_title(f"KV cache: {model.name}")
        figure.legend(loc="outside lower left")
        return figure


def _thousands(n: int) -> str:
    return f"{n // 1024}k" if n % 1024 == 0 else f"{n:,}"
