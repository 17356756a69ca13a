"""Proof by numbers that rotary positions do what they are for: in float64, and in the float32 of the compiled kernels.

A query and a key, drawn at random, are rotated to many positions:

    shifts   the score of positions (m + 4, m) is the same for every m: near (m = 0, 8 … 504) and far (up to 131,072)
    zero     at equal positions the score is that of the vectors as they were
    norm     no rotation changes a length
    rest     dimensions beyond the rotated width stay what they were, bit for bit

Rotary scaling changes angles, not this; its attention factor multiplies what is rotated, which is accounted for.
Deviations are relative to the lengths of the vectors, except in `shift_deviation`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from ropewalk.kernels.rotation import rotate_rows
from ropewalk.model.config import RopeConfig
from ropewalk.model.families import RopeLayout
from ropewalk.model.rope import (
    DynamicNTK,
    Linear,
    Llama3,
    LongRope,
    NTKAware,
    RopeScaling,
    RopeTable,
    YaRN,
    cos_sin,
    plain_frequencies,
    rope_table,
    rotate,
)

OFFSET = 4
NEAR = np.arange(0, 505, 8)
FAR = np.array([0, 1, 1000, 4095, 4096, 8191, 32767, 65536, 100_003, 131_068])
SEED = 33
BOUNDS = {"float64": 1e-10, "float32": 1e-6}
"""Of relative deviations. An angle of 131,072 radians is known to 2e-11 in float64; float32 rounds to 6e-8."""

Floats = NDArray[np.floating[Any]]
Rotation = Callable[[Floats, NDArray[np.int64]], Floats]


@dataclass(frozen=True)
class RopeCheck:
    """What was seen of one rotary setting in one arithmetic.

    Attributes
    ----------
    setting : str
        The scheme, or which of a model's settings; with the length of the sequence where there are two tables.
    layout, width, head_dim
        Of the setting.
    arithmetic : str
        "float64" (NumPy) or "float32" (the compiled kernel).
    near, far, zero, norm : float
        Largest relative deviation, see the top of this file.
    rest : bool
        Whether what is not rotated is untouched.
    shortest, longest : float
        Wavelengths of the fastest and the slowest pair, in tokens.
    reach : int
        Largest position that was tried.
    """

    setting: str
    layout: str
    width: int
    head_dim: int
    arithmetic: str
    near: float
    far: float
    zero: float
    norm: float
    rest: bool
    shortest: float
    longest: float
    reach: int

    @property
    def bound(self) -> float:
        """The most that each deviation may be."""
        return BOUNDS[self.arithmetic]

    @property
    def passed(self) -> bool:
        """Whether all of it holds."""
        return self.rest and max(self.near, self.far, self.zero, self.norm) <= self.bound


def shift_deviation(
    width: int = 64,
    base: float = 10_000.0,
    offset: int = OFFSET,
    seed: int = SEED,
    shifts: Sequence[int] = (),
) -> float:
    """Largest difference, in float64, between the score at a shift and at none; for the default seed 4e-14.

    Parameters
    ----------
    shifts : sequence of int
        Default: 0, 8 … 504.
    """
    query, key = np.random.default_rng(seed).standard_normal((2, width))
    turn = _in_float64(RopeTable(plain_frequencies(base, width)[None], 1.0, 0), 0, "halves")
    scores = _scores(turn, query, key, np.asarray(shifts if len(shifts) else NEAR), offset)
    return float(np.abs(scores - scores[0]).max())


def schemes(width: int, original: int = 8192) -> dict[str, RopeScaling | None]:
    """One of each scheme, by name; `width` is that of the rotated part."""
    pairs = width // 2
    return {
        "none": None,
        "linear": Linear(4.0),
        "ntk": NTKAware(4.0),
        "dynamic": DynamicNTK(4.0, original),
        "yarn": YaRN(4.0, original),
        "llama3": Llama3(8.0, original),
        "longrope": LongRope(
            16.0,
            original,
            tuple(1 + 0.02 * i for i in range(pairs)),
            tuple(1 + 0.5 * i for i in range(pairs)),
        ),
    }


def check_all(head_dim: int = 64, base: float = 10_000.0, seed: int = SEED) -> list[RopeCheck]:
    """Check every scheme in both layouts, over the whole head and over half of it, in both arithmetics."""
    checks: list[RopeCheck] = []
    for width in (head_dim, head_dim // 2):
        for layout in get_args(RopeLayout):
            for name, scaling in schemes(width).items():
                rope = RopeConfig(base, width, layout, scaling=scaling)
                checks += check_setting(name, rope, _table_of(rope), head_dim, seed)
    return checks


def _table_of(rope: RopeConfig) -> RopeTable:
    """The tables of a scheme; of dynamic NTK those of two lengths stand for all."""
    if not isinstance(rope.scaling, DynamicNTK):
        return rope_table(rope, lambda name: [])
    lengths = (rope.scaling.original_context, rope.scaling.effective_context(0))
    frequencies = np.stack([rope.scaling.frequencies(rope.base, rope.width, n) for n in lengths])
    return RopeTable(frequencies, 1.0, rope.scaling.original_context)


def check_setting(
    name: str, rope: RopeConfig, table: RopeTable, head_dim: int, seed: int = SEED, reach: int = int(FAR[-1])
) -> list[RopeCheck]:
    """Check one setting: each of its tables in both arithmetics.

    Parameters
    ----------
    reach : int
        Largest position of a key to try.
    """
    rng = np.random.default_rng(seed)
    query, key = rng.standard_normal((2, head_dim))
    far = np.unique(np.minimum(FAR, reach))
    checks = []
    for number in range(len(table.frequencies)):
        label = name if len(table.frequencies) == 1 else f"{name}, {'long' if number else 'short'}"
        for arithmetic, make in (("float64", _in_float64), ("float32", _in_float32)):
            turn = make(table, number, rope.layout)
            q, k = (
                (query, key)
                if arithmetic == "float64"
                else (query.astype(np.float32), key.astype(np.float32))
            )
            near, distant, zero, norm, rest = _deviations(turn, q, k, far, rope.width, table.attention_scale)
            wavelengths = 2 * np.pi / table.frequencies[number]
            checks.append(
                RopeCheck(
                    setting=label,
                    layout=rope.layout,
                    width=rope.width,
                    head_dim=head_dim,
                    arithmetic=arithmetic,
                    near=near,
                    far=distant,
                    zero=zero,
                    norm=norm,
                    rest=rest,
                    shortest=float(wavelengths.min()),
                    longest=float(wavelengths.max()),
                    reach=int(far[-1]) + OFFSET,
                )
            )
    return checks


def _deviations(
    turn: Rotation, q: Floats, k: Floats, far: NDArray[np.int64], width: int, scale: float
) -> tuple[float, float, float, float, bool]:
    wide_q, wide_k = q.astype(np.float64), k.astype(np.float64)
    size = float(np.linalg.norm(wide_q) * np.linalg.norm(wide_k)) * scale**2
    everywhere = np.concatenate([NEAR, far])
    scores = _scores(turn, q, k, everywhere, OFFSET)
    same = _scores(turn, q, k, everywhere, 0)
    unturned = scale**2 * (wide_q[:width] @ wide_k[:width]) + wide_q[width:] @ wide_k[width:]
    turned = turn(np.tile(k, (len(everywhere), 1)), everywhere)
    lengths = np.linalg.norm(turned[:, :width].astype(np.float64), axis=1)
    length = scale * float(np.linalg.norm(wide_k[:width]))
    return (
        float(np.abs(scores[: len(NEAR)] - scores[0]).max()) / size,
        float(np.abs(scores[len(NEAR) :] - scores[0]).max()) / size,
        float(np.abs(same - unturned).max()) / size,
        float(np.abs(lengths - length).max()) / length,
        bool((turned[:, width:] == k[width:]).all()),
    )


def _scores(
    turn: Rotation, q: Floats, k: Floats, positions: NDArray[np.int64], offset: int
) -> NDArray[np.float64]:
    """Score of a query at position m + offset with a key at m, summed in float64: float64 [n]."""
    n = len(positions)
    queries, keys = turn(np.tile(q, (n, 1)), positions + offset), turn(np.tile(k, (n, 1)), positions)
    return np.asarray(np.sum(queries.astype(np.float64) * keys.astype(np.float64), axis=1))


def _in_float64(table: RopeTable, number: int, layout: RopeLayout) -> Rotation:
    def turn(x: Floats, positions: NDArray[np.int64]) -> Floats:
        angles = positions[:, None] * table.frequencies[number]
        scale = table.attention_scale
        return rotate(x, scale * np.cos(angles), scale * np.sin(angles), layout)

    return turn


def _in_float32(table: RopeTable, number: int, layout: RopeLayout) -> Rotation:
    def turn(x: Floats, positions: NDArray[np.int64]) -> Floats:
        cos, sin = cos_sin(table.frequencies[number], positions, table.attention_scale)
        return np.asarray(rotate_rows(x, cos, sin, layout == "neighbours"))

    return turn
