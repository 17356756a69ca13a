"""Themes, files and what keeps figures the same from run to run."""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from ropewalk.errors import InvalidParameterError, RopewalkError
from ropewalk.figures import sampling
from ropewalk.figures.style import THEMES, Theme, canvas, save, spread


def luminance(colour: str) -> float:
    """Relative luminance of `#rrggbb`, as the Web Content Accessibility Guidelines 2.2 define it."""
    parts = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a: str, b: str) -> float:
    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", THEMES.values(), ids=THEMES)
def test_everything_can_be_read_on_its_page(theme):
    """4.5 for text, as WCAG asks; the colours of data carry text too."""
    for colour in (theme.ink, theme.muted, *theme.series):
        assert contrast(colour, theme.paper) >= 4.5, colour


def dichromat(colour: str, kind: str) -> tuple[float, ...]:
    """A colour as people without one kind of cone see it (Viénot et al. 1999), linear RGB."""
    r, g, b = (((int(colour[i : i + 2], 16) / 255 + 0.055) / 1.055) ** 2.4 for i in (1, 3, 5))
    mix = {"protan": (0.11238, 0.88762), "deutan": (0.29275, 0.70725)}[kind]
    yellow = mix[0] * r + mix[1] * g
    return yellow, yellow, b + 0.02 * (0.2 * (g - r) if kind == "protan" else 1.1 * (r - g))


@pytest.mark.parametrize("theme", THEMES.values(), ids=THEMES)
@pytest.mark.parametrize("kind", ["protan", "deutan"])
def test_no_two_colours_of_data_look_the_same_to_anybody(theme, kind):
    """Shades that come near each other are told apart by lines and markers as well."""
    seen = [dichromat(colour, kind) for colour in theme.series]
    for i, a in enumerate(seen):
        for b in seen[:i]:
            assert max(abs(x - y) for x, y in zip(a, b, strict=True)) > 0.05


@pytest.mark.parametrize("theme", ["light", "dark", "auto"])
def test_an_svg_is_the_same_each_time(tmp_path, theme):
    first, second = (tmp_path / f"{i}.svg" for i in (1, 2))
    for path in (first, second):
        save(sampling.draw(theme=theme), path)
    text = first.read_text()
    assert text == second.read_text()
    assert not re.search(r"\d{4}-\d\d-\d\dT|<dc:date>", text)
    ElementTree.parse(first)
    assert "entropy 2.56 nats" in text  # text is text, for readers and searches


def test_auto_follows_the_page(tmp_path):
    """Every colour is a variable, with the light one where variables are not understood."""
    path = tmp_path / "a.svg"
    save(sampling.draw(theme="auto"), path)
    text = path.read_text()
    assert "@media (prefers-color-scheme: dark)" in text
    body = text.split("</style>", 1)[1]
    for name, colour in vars(THEMES["light"]).items():
        assert re.sub(rf"var\(--{name}, {colour}\)", "", body).count(colour) == 0
    assert f"var(--blue, {THEMES['light'].blue})" in body
    assert THEMES["dark"].blue in text.split("</style>", 1)[0]


def test_themes_have_no_colour_twice():
    for theme in THEMES.values():
        assert len(set(vars(theme).values())) == len(vars(Theme(*"abcdefgh")))


def test_png(tmp_path):
    save(sampling.draw(theme="dark"), tmp_path / "a.PNG")
    assert (tmp_path / "a.PNG").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", ["a.pdf", "a", "no/such/folder/a.svg"])
def test_files_that_cannot_be(tmp_path, name):
    with pytest.raises(InvalidParameterError, match="the figure's file is"):
        save(sampling.draw(), tmp_path / name)


def test_a_file_that_cannot_be_written(tmp_path):
    (tmp_path / "a.svg").mkdir()
    with pytest.raises(RopewalkError, match=r"a\.svg: Is a directory"):
        save(sampling.draw(), tmp_path / "a.svg")


def test_an_unknown_theme():
    with pytest.raises(InvalidParameterError, match="theme is 'sepia'; allowed: auto, light, dark"):
        sampling.draw(theme="sepia")


def test_without_matplotlib(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(RopewalkError, match="pip install matplotlib"), canvas("light", 1, 1):
        pass


def test_labels_are_spread_in_their_order():
    placed = spread([0.0, 10.0, 0.1], 1.0)
    assert placed[1] == 10.0
    assert placed[2] - placed[0] == pytest.approx(1.0)
    assert (placed[0] + placed[2]) / 2 == pytest.approx(0.05)
    assert spread([1.0, 3.0], 0.5) == [1.0, 3.0]


def test_figures_are_loaded_when_they_are_used():
    import subprocess
    import sys

    code = (
        "import sys; from ropewalk import figures; figures.rope.rotary(); figures.cache.example();"
        "assert 'matplotlib' not in sys.modules and 'numba' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parent)
