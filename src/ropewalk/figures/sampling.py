"""What the knobs of sampling do to a distribution: as the model gave it, at a temperature, and after top-p.

The knobs are the sampler's own (`ropewalk.engine.sampler`). Without a model: `EXAMPLE_LOGITS`, twenty tokens. They are
constructed: the example that the theory takes its numbers from was never published with its distribution, so this one
was sought, in steps of a tenth, to have all of them to the digits shown:

    most likely token   0.27 at T = 1, 0.63 at T = 0.5
    entropy             2.56 nats at T = 1, 1.50 at T = 0.5, 2.28 after top-p 0.9
    top-p 0.9           keeps 13 of the 20
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ropewalk.engine.sampler import Candidates, Logits, scaled, top_p
from ropewalk.errors import InvalidParameterError
from ropewalk.figures.style import canvas, on_paper
from ropewalk.params import SamplingParams

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EXAMPLE_LOGITS = (
    *(3.0, 2.0, 1.8, 1.7, 1.6, 1.6, 1.5, 1.3, 0.9, 0.9),
    *(0.8, 0.6, 0.5, 0.4, 0.2, 0.2, 0.1, -0.2, -0.3, -0.5),
)
N_BARS = 20


@dataclass(frozen=True, eq=False)
class Panel:
    """One distribution.

    Attributes
    ----------
    title : str
    probabilities : float64 [b]
        Of the tokens that have a bar; 0 where a knob removed it.
    entropy : float
        Of the whole distribution, in nats.
    n_tokens : int
        That can be drawn.
    """

    title: str
    probabilities: NDArray[np.float64]
    entropy: float
    n_tokens: int


@dataclass(frozen=True, eq=False)
class Sampling:
    """The three panels, and the labels of their bars, the most likely token first."""

    labels: tuple[str, ...]
    n_tokens: int
    panels: tuple[Panel, ...]


def sampling(
    logits: Logits | None = None,
    texts: Sequence[str] | None = None,
    *,
    temperature: float = 0.5,
    mass: float = 0.9,
) -> Sampling:
    """Work the panels out.

    Parameters
    ----------
    logits : float32 [n], optional
        Of all tokens. Default: `EXAMPLE_LOGITS`.
    texts : sequence of str [n], optional
        Of the tokens. Default: their numbers.
    temperature, mass : float
        Of the second panel, and the p of the third.

    Raises
    ------
    InvalidParameterError
        A value that `SamplingParams` refuses, or a temperature that is greedy.
    """
    params = SamplingParams(temperature=temperature, top_p=mass)
    if params.greedy:
        raise InvalidParameterError(f"temperature is {temperature!r}; allowed: at least 1e-5")
    logits = np.array(EXAMPLE_LOGITS, np.float32) if logits is None else logits
    plain = scaled(logits, 1.0)
    best = plain.ids[np.argsort(-plain.weights, kind="stable")[:N_BARS]]
    kept = top_p(plain, params.top_p)

    def panel(title: str, c: Candidates) -> Panel:
        return Panel(title, c.probabilities_of(best), c.entropy, len(c.ids))

    return Sampling(
        labels=tuple(str(i) if texts is None else texts[i] for i in best.tolist()),
        n_tokens=len(plain.ids),
        panels=(
            panel("T = 1", plain),
            panel(f"T = {temperature:g}", scaled(logits, params.temperature)),
            panel(f"top-p {mass:g}", kept),
        ),
    )


def draw(shown: Sampling | None = None, *, title: str | None = None, theme: str = "light") -> Figure:
    """Draw the panels.

    Parameters
    ----------
    shown : Sampling, optional
        Default: `sampling()`.
    title : str, optional
        What the distribution is of. Default: the constructed example.
    theme : "light", "dark" or "auto"
    """
    shown = shown or sampling()
    title = title or f"A constructed distribution of {shown.n_tokens} tokens"
    named = any(not label.isdecimal() for label in shown.labels)
    with canvas(theme, 9.6, 4.2 if named else 3.6) as (figure, colours):
        panels = figure.subplots(1, 3, sharey=True)
        places = np.arange(len(shown.labels))
        for axes, panel, colour in zip(panels, shown.panels, colours.series, strict=False):
            kept = panel.probabilities > 0
            axes.bar(places, panel.probabilities, color=colour, width=0.78)
            axes.plot(
                places[~kept], np.zeros(np.count_nonzero(~kept)), "x", color=colours.muted, markersize=5
            )
            first = float(panel.probabilities[0])
            where = {"textcoords": "offset points", "ha": "center", **on_paper(colours)}
            axes.annotate(f"{first:.2f}", (0, first), (0, 4), **where)
            removed = shown.n_tokens - panel.n_tokens
            lines = [
                f"entropy {panel.entropy:.2f} nats",
                f"{panel.n_tokens:,} of {shown.n_tokens:,} tokens"
                if removed
                else f"all {shown.n_tokens:,} tokens",
            ]
            at = {"transform": axes.transAxes, "ha": "right", "va": "top", "linespacing": 1.5}
            axes.text(0.97, 0.95, "\n".join(lines), **at, **on_paper(colours))
            axes.set_title(panel.title)
            axes.grid(visible=False, axis="x")
            if named:
                axes.set_xticks(places, shown.labels, rotation=90, fontsize=8, fontfamily="DejaVu Sans Mono")
            else:
                axes.set_xticks(places[::5], shown.labels[::5])
            axes.set_xlabel("token" + ("" if named else ", most likely first"))
        panels[0].set_ylabel("probability")
        panels[0].set_ylim(0, 1.12 * max(panel.probabilities.max() for panel in shown.panels))
        figure.suptitle(title, x=0.01, ha="left", fontsize=10, color=colours.muted)
        return figure
