"""Measured steps of a model under the roof of the machine: arithmetic against bytes (Williams et al. 2009, "Roofline").

A step does so many operations for each byte that it reads; a multiply-accumulate counts as two. Its rate cannot be
above the read bandwidth times that, nor above what the arithmetic can do. The second is not known of a CPU: the line is
the highest rate of all steps that were measured, and says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ropewalk.errors import InvalidParameterError
from ropewalk.figures.style import MARKERS, canvas, plain_log

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ropewalk.bench import Measurement


@dataclass(frozen=True)
class Point:
    """A measured step: what it is, operations for each byte read, and operations per second."""

    label: str
    phase: str
    intensity: float
    rate: float


def points(measurements: Sequence[Measurement]) -> list[Point]:
    """A point for each measurement of `ropewalk.bench`."""
    return [
        Point(
            f"{m.case.tokens}" if m.case.phase == "prefill" else f"{m.case.batch}",
            m.case.phase,
            2 * m.work.macs / m.work.n_bytes,
            2 * m.macs_per_s,
        )
        for m in measurements
    ]


def draw(
    measurements: Sequence[Measurement], name: str, *, machine: str = "", theme: str = "light"
) -> Figure:
    """Draw it, on logarithmic axes.

    Parameters
    ----------
    measurements : sequence of Measurement
        Of `ropewalk.bench`, of one model on one machine. The roof is their largest read bandwidth.
    name : str
        Of the model.
    machine : str
        What it ran on.
    theme : "light", "dark" or "auto"

    Raises
    ------
    InvalidParameterError
        There are no measurements.
    """
    if not measurements:
        raise InvalidParameterError("measurements is empty; allowed: at least one")
    shown = points(measurements)
    bandwidth, best = max(m.bandwidth for m in measurements), max(p.rate for p in shown)
    low, high = min(p.intensity for p in shown) / 2, 3 * max(p.intensity for p in shown)
    ridge = best / bandwidth
    with canvas(theme, 7.4, 4.6) as (figure, colours):
        axes = figure.add_subplot()
        slope = np.array([low, max(low, min(ridge, high))])
        axes.plot(
            slope,
            slope * bandwidth / 1e9,
            color=colours.ink,
            label=f"memory: {bandwidth / 1e9:.1f} GB/s read",
        )
        axes.plot([slope[1], high], [best / 1e9] * 2, color=colours.ink, linestyle=(0, (1, 1.5)),
                  label=f"highest rate seen: {best / 1e9:,.0f} GFLOP/s")  # fmt: skip
        for i, (phase, what) in enumerate(
            (("decode", "decode, by batch"), ("prefill", "prefill, by tokens"))
        ):
            of_phase = sorted((p for p in shown if p.phase == phase), key=lambda p: p.intensity)
            if not of_phase:
                continue
            axes.plot(
                [p.intensity for p in of_phase],
                [p.rate / 1e9 for p in of_phase],
                MARKERS[i],
                color=colours.series[i],
                label=what,
                linestyle="-",
                linewidth=0.9,
                markersize=6,
            )
            for p in of_phase:
                axes.annotate(p.label, (p.intensity, p.rate / 1e9), (7, -4), textcoords="offset points", va="top",
                              color=colours.series[i])  # fmt: skip
        axes.set_xscale("log")
        axes.set_yscale("log")
        plain_log(axes.xaxis)
        plain_log(axes.yaxis, (1.0, 2.0, 5.0))
        axes.set_xlim(low, high)
        axes.set_xlabel("operations for each byte read")
        axes.set_ylabel("GFLOP/s")
        axes.set_title(f"Roofline: {name}")
        axes.legend(loc="lower right")
        if machine:
            figure.suptitle(f"measured on {machine}", x=0.01, ha="left", fontsize=10, color=colours.muted)
        return figure
