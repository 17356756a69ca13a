"""Rotary position embeddings: frequency tables, angles, rotation.

Pair i of a head turns by the angle position · θ_i, with θ_i = base^(−2i / width) (Su et al. 2021, "RoFormer",
arXiv:2104.09864), changed by a scheme of `ropewalk.model.scaling` or by the file's own divisors where there are any.
Angles are formed in float64: in float32 a cosine of width 128 and base 500 000 is already wrong by 8e-5 at position
131 071.

Layouts: "neighbours" turns dimensions (2i, 2i + 1) together, "halves" (i, i + width / 2). Dimensions from
`width` on pass through unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ropewalk.errors import CheckpointError, UnsupportedModelError
from ropewalk.model.families import RopeLayout
from ropewalk.model.scaling import (
    DIVISORS_TENSOR,
    LONGROPE_TENSORS,
    SCHEMES,
    DynamicNTK,
    Linear,
    Llama3,
    LongRope,
    NTKAware,
    RopeScaling,
    YaRN,
    plain_frequencies,
)

if TYPE_CHECKING:
    from ropewalk.model.config import RopeConfig

__all__ = [
    "SCHEMES",
    "DynamicNTK",
    "Linear",
    "Llama3",
    "LongRope",
    "NTKAware",
    "RopeScaling",
    "RopeTable",
    "YaRN",
    "cos_sin",
    "inverse_frequencies",
    "plain_frequencies",
    "rope_table",
    "rotate",
]

Float32Array = NDArray[np.float32]
Float64Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class RopeTable:
    """The rotary setting of some layers, ready to form angles from.

    Attributes
    ----------
    frequencies : float64 [n_tables, width / 2]
        Angle per position of each pair, in radians. The second table, where there is one, holds for every position
        of a sequence of more than `switch` tokens.
    attention_scale : float
        Factor of every cosine and sine.
    switch : int
        0 where there is one table.
    """

    frequencies: Float64Array
    attention_scale: float
    switch: int

    def of_length(self, n_tokens: int) -> Float64Array:
        """The frequencies of a sequence of `n_tokens` tokens: float64 [width / 2]."""
        frequencies: Float64Array = self.frequencies[int(0 < self.switch < n_tokens)]
        return frequencies

    def angles(self, n_positions: int, *, twice: bool = False) -> tuple[Float32Array, Float32Array]:
        """Scaled cosines and sines: two float32 [n_tables · n_positions, width / 2], one table after the other.

        With `twice` there are two tables, the same one if this has only one: as many as other layers may have.
        """
        positions = np.arange(n_positions)
        parts = [cos_sin(f, positions, self.attention_scale) for f in self.frequencies]
        parts = parts * 2 if twice and len(parts) == 1 else parts
        cos, sin = (np.concatenate(part) for part in zip(*parts, strict=True))
        return cos, sin


def rope_table(rope: RopeConfig, tensor: Callable[[str], ArrayLike], context_length: int = 0) -> RopeTable:
    """Work out the table of a setting.

    Parameters
    ----------
    tensor : callable
        Reads a tensor of the model file by name; asked for what the setting says is there.
    context_length : int
        Most tokens of a sequence.

    Raises
    ------
    CheckpointError
        Divisors have another length than the table, or are not positive and finite.
    UnsupportedModelError
        The frequencies change with every token: dynamic NTK beyond its trained context.
    """
    scaling = rope.scaling
    if isinstance(scaling, DynamicNTK) and context_length > scaling.original_context:
        raise UnsupportedModelError(
            f"rope scaling 'dynamic' is not supported in a context of {context_length}: beyond "
            f"{scaling.original_context} tokens every further token changes the angles of all keys in the cache; "
            "'ntk' and 'yarn' reach as far with one table"
        )
    if isinstance(scaling, LongRope) and not scaling.short_factors:
        lists = (_divisors(tensor(name), rope.width, name) for name in LONGROPE_TENSORS)
        rope = replace(rope, scaling=scaling.with_factors(*(values.tolist() for values in lists)))
    divisors = tensor(DIVISORS_TENSOR) if rope.freq_factors else None
    switch = scaling.switch if scaling else 0
    lengths = (switch, switch + 1) if switch else (0,)
    return RopeTable(
        frequencies=np.stack([inverse_frequencies(rope, divisors, length=length) for length in lengths]),
        attention_scale=scaling.attention_scale if scaling else 1.0,
        switch=switch,
    )


def inverse_frequencies(
    rope: RopeConfig, divisors: ArrayLike | None = None, *, length: int = 0
) -> Float64Array:
    """Angle per position of each pair, in radians: float64 [width / 2].

    Parameters
    ----------
    divisors : [width / 2], optional
        The tensor `rope_freqs.weight`, which must be given exactly when `rope.freq_factors` says so.
    length : int
        Tokens of the sequence, where the scaling depends on it.

    Raises
    ------
    CheckpointError
        The divisors are missing, not asked for, of another length, or not positive and finite.
    """
    if rope.scaling is None:
        frequencies = plain_frequencies(rope.base, rope.width)
    else:
        frequencies = rope.scaling.frequencies(rope.base, rope.width, length)
    if (divisors is not None) != rope.freq_factors:
        raise CheckpointError(
            f"{DIVISORS_TENSOR} is {'absent' if divisors is None else 'present'}, "
            f"but the rotary setting has freq_factors = {rope.freq_factors}"
        )
    return frequencies if divisors is None else frequencies / _divisors(divisors, rope.width, DIVISORS_TENSOR)


def _divisors(values: ArrayLike, width: int, name: str) -> Float64Array:
    factors = np.asarray(values, dtype=np.float64)
    if factors.shape != (width // 2,) or not (np.isfinite(factors) & (factors > 0)).all():
        raise CheckpointError(
            f"{name} (shape {list(factors.shape)}) must hold {width // 2} positive finite numbers"
        )
    return factors


def cos_sin(
    frequencies: Float64Array, positions: ArrayLike, attention_scale: float = 1.0
) -> tuple[Float32Array, Float32Array]:
    """Cosine and sine of every angle, times a factor: two float32 [n, width / 2], from float64 angles.

    Parameters
    ----------
    frequencies : float64 [width / 2]
    positions : integers [n]
    attention_scale : float
        See `RopeScaling.attention_scale`.
    """
    angles = np.asarray(positions, dtype=np.float64)[:, None] * frequencies
    cos, sin = np.cos(angles) * attention_scale, np.sin(angles) * attention_scale
    return cos.astype(np.float32), sin.astype(np.float32)


def rotate(
    x: NDArray[np.floating], cos: NDArray[np.floating], sin: NDArray[np.floating], layout: RopeLayout
) -> NDArray[np.floating]:
    """Rotate the first `width` dimensions of every head; a new array of the shape and dtype of x.

    Parameters
    ----------
    x : [..., head_dim]
    cos, sin : broadcastable to [..., width / 2]
    """
    n_pairs = cos.shape[-1]
    width = 2 * n_pairs
    if layout == "neighbours":
        first, second = slice(0, width, 2), slice(1, width, 2)
    else:
        first, second = slice(0, n_pairs), slice(n_pairs, width)
    a, b = x[..., first], x[..., second]
    rotated = x.copy()
    rotated[..., first] = a * cos - b * sin
    rotated[..., second] = a * sin + b * cos
    return rotated
