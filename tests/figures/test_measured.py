"""The two figures of measurements: what is drawn of given ones, and a small real loop."""

import numpy as np
import pytest

from ropewalk import figures
from ropewalk.bench import Case, Measurement, Work
from ropewalk.errors import GenerationError, InvalidParameterError
from ropewalk.figures.loop import Loop, measure

MEASURED = [
    Measurement(
        Case("prefill", 64, 1, 0), 2, "float16", Work(90_000_000, 10_000_000, 8_000_000_000), 0.04, 30e9
    ),
    Measurement(
        Case("decode", 1, 1, 0), 2, "float16", Work(90_000_000, 10_000_000, 125_000_000), 0.004, 32e9
    ),
    Measurement(
        Case("decode", 1, 4, 0), 2, "float16", Work(90_000_000, 40_000_000, 500_000_000), 0.006, 31e9
    ),
]


def test_points_of_the_roofline():
    """Two operations for each multiply-accumulate; a point's rate is its intensity times the bytes a second."""
    prefill, one, four = figures.roofline.points(MEASURED)
    assert (prefill.label, prefill.intensity, prefill.rate) == ("64", 160.0, pytest.approx(4e11))
    assert (one.label, one.intensity, one.rate) == ("1", 2.5, pytest.approx(62.5e9))
    assert four.rate == pytest.approx(four.intensity * MEASURED[2].bytes_per_s)


def test_roofline_draws_the_roof_and_every_point():
    axes = figures.roofline.draw(MEASURED, "a model").axes[0]
    slope, flat, decode, prefill = axes.lines
    x, y = slope.get_data()
    assert y == pytest.approx(
        32 * np.asarray(x)
    )  # GB/s times operations a byte: the largest of the bandwidths
    assert flat.get_ydata() == pytest.approx([400, 400])
    assert x[1] == pytest.approx(400 / 32)
    assert decode.get_xydata() == pytest.approx(np.array([[2.5, 62.5], [1000 / 130, 1000 / 6]]))
    assert prefill.get_xydata() == pytest.approx(np.array([[160, 400]]))
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels[:2] == ["memory: 32.0 GB/s read", "highest rate seen: 400 GFLOP/s"]
    assert axes.get_xlabel() == "operations for each byte read"


def test_roofline_of_nothing():
    with pytest.raises(InvalidParameterError, match="measurements is empty"):
        figures.roofline.draw([], "nothing")


def test_loop_figure():
    loop = Loop((0.01, 0.01, 0.02), (0.01, 0.02, 0.03), (5, 6, 7))
    assert loop.passes == (3, 6)
    left, right = figures.loop.draw(loop, "a model").axes
    assert left.lines[1].get_ydata() == pytest.approx([10, 20, 30])
    assert right.lines[0].get_ydata() == pytest.approx([0.01, 0.02, 0.04])
    assert right.lines[1].get_ydata() == pytest.approx([0.01, 0.03, 0.06])
    labels = [text.get_text() for text in right.get_legend().get_texts()]
    assert labels == ["with the KV cache: 3 passes of a token", "without: 6 passes"]


def test_a_real_loop_gives_the_same_tokens_both_ways(smollm2):
    loop = measure(smollm2, 5, 2)
    assert len(loop.with_cache) == len(loop.without) == len(loop.token_ids) == 5
    assert min(*loop.with_cache, *loop.without) > 0


def test_tokens_that_differ_are_an_error(smollm2, monkeypatch):
    runs = iter([([1], [0.1])] * 2 + [([1, 2], [0.1] * 2), ([1, 3], [0.1] * 2)])
    monkeypatch.setattr(figures.loop, "timed", lambda *args: next(runs))
    with pytest.raises(GenerationError, match=r"the tokens differ: \[1, 2\], \[1, 3\]"):
        measure(smollm2, 2)


@pytest.mark.parametrize(("n_tokens", "repeats"), [(1, 1), (2, 0)])
def test_too_little_to_measure(n_tokens, repeats):
    with pytest.raises(InvalidParameterError, match="allowed: at least"):
        measure("smollm2-135m", n_tokens, repeats)
