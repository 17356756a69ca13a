"""Rotary positions: scores that follow from distances alone, and how long each pair takes for a full turn.

The score of a query at position m and a key at position n, both rotated, depends on m - n only (Su et al. 2021,
"RoFormer", arXiv:2104.09864). All of it in float64. Without a model: heads of 64 and base 10,000.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ropewalk.figures.style import LINES, MARKERS, canvas, plain_log, spread
from ropewalk.model.rope import plain_frequencies, rotate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ropewalk.model.rope import RopeTable

OFFSETS = (0, 4, 16, 64)
POSITIONS = np.arange(0, 505, 8)
SEED = 33  # one whose four scores lie apart

Numbers = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Rotary:
    """What the figure shows.

    Attributes
    ----------
    frequencies : float64 [width / 2]
        Angle per position of each pair, in radians.
    positions : int64 [p]
        Of the keys.
    scores : dict of int to float64 [p]
        For each offset, the score of one query, that far after the key, with one key, at each position.
    name : str
    """

    frequencies: Numbers
    positions: NDArray[np.int64]
    scores: dict[int, Numbers]
    name: str

    @property
    def wavelengths(self) -> Numbers:
        """Positions for a full turn of each pair, float64 [width / 2]."""
        return 2 * np.pi / self.frequencies

    @property
    def deviations(self) -> dict[int, float]:
        """For each offset, the largest difference of a score from that at the first position."""
        return {offset: float(np.abs(s - s[0]).max()) for offset, s in self.scores.items()}


def rotary(
    frequencies: Numbers | None = None,
    offsets: Sequence[int] = OFFSETS,
    *,
    name: str = "heads of 64, base 10,000",
    seed: int = SEED,
) -> Rotary:
    """Rotate a query and a key, both drawn at random, to many positions.

    Parameters
    ----------
    frequencies : float64 [width / 2], optional
        Of `ropewalk.model.rope`. Default: width 64, base 10,000.
    offsets : sequence of int
        Positions from the key to the query.
    """
    frequencies = plain_frequencies(10_000.0, 64) if frequencies is None else frequencies
    rng = np.random.default_rng(seed)
    query, key = rng.standard_normal((2, 2 * len(frequencies)))
    keys = turned(key, POSITIONS, frequencies)
    scores = {
        offset: np.sum(turned(query, POSITIONS + offset, frequencies) * keys, axis=1) for offset in offsets
    }
    return Rotary(frequencies, POSITIONS, scores, name)


def turned(x: Numbers, positions: NDArray[np.int64], frequencies: Numbers) -> Numbers:
    """One vector rotated to each position: float64 [p, width]."""
    angles = positions[:, None] * frequencies
    whole = rotate(np.tile(x, (len(positions), 1)), np.cos(angles), np.sin(angles), "halves")
    return np.asarray(whole, np.float64)


def of_table(table: RopeTable, name: str) -> Rotary:
    """The same for a model's own table; of two, the one for short sequences."""
    return rotary(table.frequencies[0], name=name)


def draw(shown: Rotary | None = None, *, context: int | None = None, theme: str = "light") -> Figure:
    """Draw both panels.

    Parameters
    ----------
    shown : Rotary, optional
        Default: `rotary()`.
    context : int, optional
        A line at so many tokens: what the model was made for.
    theme : "light", "dark" or "auto"
    """
    shown = shown or rotary()
    with canvas(theme, 9.6, 4.0) as (figure, colours):
        left, right = figure.subplots(1, 2)
        ends = [float(scores[-1]) for scores in shown.scores.values()]
        places = spread(ends, 0.07 * (max(ends) - min(ends)))
        for i, (offset, scores) in enumerate(shown.scores.items()):
            left.plot(shown.positions, scores, color=colours.series[i % 4], linestyle=LINES[i % 4])
            left.annotate(
                f"{offset} apart",
                (shown.positions[-1], places[i]),
                (5, 0),
                textcoords="offset points",
                va="center",
                color=colours.series[i % 4],
                annotation_clip=False,
            )
        left.set_xlim(0, shown.positions[-1])
        left.set_xlabel("position of the key, tokens")
        left.set_ylabel("score, query · key")
        left.set_title("Only the distance counts")
        pairs, waves = np.arange(len(shown.frequencies)), shown.wavelengths
        right.plot(pairs, waves, marker=MARKERS[0], markersize=3.5, linewidth=1.2, color=colours.blue)
        right.set_yscale("log")
        plain_log(right.yaxis)
        for i, place in ((0, (8, -2)), (len(waves) - 1, (-8, 2))):
            right.annotate(
                f"{waves[i]:,.2f} tokens" if waves[i] < 100 else f"{waves[i]:,.0f} tokens",
                (pairs[i], waves[i]),
                place,
                textcoords="offset points",
                ha="right" if i else "left",
                va="bottom" if i else "top",
            )
        if context:
            right.axhline(context, color=colours.orange, linestyle=LINES[1], linewidth=1.4)
            right.annotate(
                f"context: {context:,} tokens",
                (0, context),
                (2, 3),
                textcoords="offset points",
                color=colours.orange,
            )
        right.set_xlabel("pair of dimensions")
        right.set_ylabel("wavelength 2π / θ, tokens")
        right.set_title("How long a full turn takes")
        figure.suptitle(
            f"Rotary positions: {shown.name}", x=0.01, ha="left", fontsize=10, color=colours.muted
        )
        return figure
