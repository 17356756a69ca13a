"""Rotary position embeddings: frequencies, angle tables, rotation.

Pair i of a head turns by the angle position · θ_i, with θ_i = base^(−2i / width) (Su et al. 2021, "RoFormer",
arXiv:2104.09864), divided by the file's own divisors where it has some. Angles are formed in float64: in
float32 a cosine of width 128 and base 500 000 is already wrong by 8e-5 at position 131 071.

Layouts: "neighbours" turns dimensions (2i, 2i + 1) together, "halves" (i, i + width / 2). Dimensions from
`width` on pass through unchanged.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ropewalk.errors import CheckpointError
from ropewalk.model.families import RopeLayout

if TYPE_CHECKING:
    from ropewalk.model.config import RopeConfig

Float32Array = NDArray[np.float32]
Float64Array = NDArray[np.float64]


def inverse_frequencies(rope: RopeConfig, divisors: ArrayLike | None = None) -> Float64Array:
    """Angle per position of each pair, in radians: float64 [width / 2].

    Parameters
    ----------
    divisors : [width / 2], optional
        The tensor `rope_freqs.weight`, which must be given exactly when `rope.freq_factors` says so.

    Raises
    ------
    CheckpointError
        The divisors are missing, not asked for, of another length, or not positive and finite.
    """
    frequencies = rope.base ** (-np.arange(0, rope.width, 2, dtype=np.float64) / rope.width)
    if (divisors is not None) != rope.freq_factors:
        raise CheckpointError(
            f"rope_freqs.weight is {'absent' if divisors is None else 'present'}, "
            f"but the rotary setting has freq_factors = {rope.freq_factors}"
        )
    if divisors is None:
        return frequencies
    factors = np.asarray(divisors, dtype=np.float64)
    if factors.shape != frequencies.shape or not (np.isfinite(factors) & (factors > 0)).all():
        raise CheckpointError(
            f"rope_freqs.weight (shape {list(factors.shape)}) must hold "
            f"{rope.width // 2} positive finite numbers"
        )
    return frequencies / factors


def cos_sin(frequencies: Float64Array, positions: ArrayLike) -> tuple[Float32Array, Float32Array]:
    """Cosine and sine of every angle: two float32 [n, width / 2], from float64 angles.

    Parameters
    ----------
    frequencies : float64 [width / 2]
    positions : integers [n]
    """
    angles = np.asarray(positions, dtype=np.float64)[:, None] * frequencies
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


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
