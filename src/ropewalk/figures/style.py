"""How all figures look, and how they are written to files.

Colours are told apart by people with any kind of colour vision (after Okabe and Ito, "Color Universal Design",
2008), and everything that a colour says, a line style, marker or label says too. A theme is for light or for dark
pages. "auto", for SVG alone, is one file for both: its colours are CSS variables that follow the reader's setting.

Files are reproducible: no date, no random ids. Does not know what a figure shows.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ropewalk.errors import InvalidParameterError, RopewalkError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MARKERS = ("o", "s", "^", "D", "v", "P")
LINES: tuple[Any, ...] = ("-", (0, (6, 2)), (0, (2, 1.5)), (0, (6, 1.5, 1.5, 1.5)))
SUFFIXES = (".svg", ".png")
DPI = 160


@dataclass(frozen=True)
class Theme:
    """Colours of a figure, `#rrggbb`: of text, of secondary text, of grid lines, of the page, and of data."""

    ink: str
    muted: str
    grid: str
    paper: str
    blue: str
    orange: str
    green: str
    pink: str

    @property
    def series(self) -> tuple[str, ...]:
        """Colours of data, in the order in which they are used."""
        return self.blue, self.orange, self.green, self.pink


THEMES = {
    "light": Theme("#1f2328", "#59636e", "#d8dee4", "#ffffff", "#0063a6", "#c24e00", "#00795a", "#a8457f"),
    "dark": Theme("#f0f6fc", "#9aa4af", "#363d46", "#0d1117", "#58b2ee", "#f2984b", "#2fc79a", "#e58fc0"),
}
ALLOWED = ("auto", *THEMES)


def theme_of(name: str) -> Theme:
    """The theme of that name; "auto" is drawn as "light". Raises InvalidParameterError."""
    if name not in ALLOWED:
        raise InvalidParameterError(f"theme is {name!r}; allowed: {', '.join(ALLOWED)}")
    return THEMES["light" if name == "auto" else name]


@contextmanager
def canvas(theme: str, width: float, height: float) -> Iterator[tuple[Figure, Theme]]:
    """An empty figure of so many inches, and its colours; what is drawn within looks as all figures do.

    Raises
    ------
    RopewalkError
        matplotlib is not installed.
    """
    colours = theme_of(theme)
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        raise RopewalkError("figures need matplotlib: pip install matplotlib") from None
    with rc_context(_settings(colours)):
        figure = Figure(figsize=(width, height), layout="constrained")
        figure.set_label(theme)
        yield figure, colours


def _settings(theme: Theme) -> Any:
    ink = ("text.color", "axes.labelcolor", "axes.titlecolor")
    muted = ("xtick.color", "ytick.color", "axes.edgecolor")
    return {
        **dict.fromkeys(ink, theme.ink),
        **dict.fromkeys(muted, theme.muted),
        "figure.facecolor": theme.paper,
        "axes.facecolor": theme.paper,
        "savefig.facecolor": theme.paper,
        "legend.frameon": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": theme.grid,
        "grid.linewidth": 0.8,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlesize": 11,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "font.family": "DejaVu Sans",
        "font.size": 9.5,
        "lines.linewidth": 2.0,
    }


def on_paper(theme: Theme) -> dict[str, Any]:
    """For text: a background of the page's colour, so that lines do not run through it."""
    return {"bbox": {"facecolor": theme.paper, "edgecolor": "none", "pad": 1.0}}


def plain_log(axis: Any, steps: tuple[float, ...] = (1.0,)) -> None:
    """Ticks of a logarithmic axis at `steps` times powers of ten, as ordinary numbers."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axis.set_major_locator(LogLocator(10, steps))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))


def spread(values: list[float], gap: float) -> list[float]:
    """The values moved apart so that neighbours differ by at least `gap`, for labels beside a plot; in their order."""
    order = sorted(range(len(values)), key=values.__getitem__)
    placed = list(values)
    for _ in range(len(values)):
        for below, above in pairwise(order):
            if (short := gap - (placed[above] - placed[below])) > 0:
                placed[below] -= short / 2
                placed[above] += short / 2
    return placed


def check_file(path: Path, theme: str) -> None:
    """Raise InvalidParameterError unless a figure of that theme can be written to such a file."""
    theme_of(theme)
    if path.suffix.lower() not in SUFFIXES:
        raise InvalidParameterError(f"the figure's file is {path}; allowed: a name that ends in .svg or .png")
    if not path.absolute().parent.is_dir():
        raise InvalidParameterError(
            f"the figure's file is {path}; there is no folder {path.absolute().parent}"
        )


def save(figure: Figure, path: Path) -> None:
    """Write a figure as SVG or PNG, by the file's suffix; in the theme that it was drawn in.

    Raises
    ------
    InvalidParameterError
        Another suffix, or a folder that is not there.
    RopewalkError
        The file cannot be written.
    """
    from matplotlib import rc_context

    theme = str(figure.get_label())
    check_file(path, theme)
    is_svg = path.suffix.lower() == ".svg"
    metadata = {"Date": None, "Creator": "Ropewalk"} if is_svg else {"Software": "Ropewalk"}
    try:
        with rc_context({"svg.hashsalt": "ropewalk", "svg.fonttype": "none"}):
            figure.savefig(path, dpi=DPI, metadata=metadata, transparent=is_svg and theme == "auto")
        if is_svg:
            path.write_text(_finished(path.read_text(), theme))
    except OSError as error:
        raise RopewalkError(f"the figure's file is {path}: {error.strerror}") from None


def _finished(svg: str, theme: str) -> str:
    """Text in the reader's own font; with "auto", colours as variables that follow the page."""
    svg = svg.replace("'DejaVu Sans'", "'DejaVu Sans', system-ui, sans-serif")
    svg = "\n".join(line.rstrip() for line in svg.splitlines()) + "\n"
    if theme != "auto":
        return svg
    names = {getattr(THEMES["light"], f.name): f.name for f in fields(Theme)}
    svg = re.sub("#[0-9a-f]{6}", lambda m: f"var(--{names[m[0]]}, {m[0]})" if m[0] in names else m[0], svg)
    light, dark = (
        " ".join(f"--{f.name}: {getattr(THEMES[name], f.name)};" for f in fields(Theme))
        for name in ("light", "dark")
    )
    style = (
        f"<style>\nsvg {{ {light} }}\n@media (prefers-color-scheme: dark) {{ svg {{ {dark} }} }}\n</style>\n"
    )
    return re.sub(r"(<svg[^>]*>\n)", lambda m: m[1] + style, svg, count=1)
