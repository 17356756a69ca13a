"""The theory's three figures: every published number, in the data and in what is drawn."""

import math

import numpy as np
import pytest

from ropewalk import figures
from ropewalk.errors import InvalidParameterError
from ropewalk.plan import shape_of_gguf
from ropewalk.plan.memory import cache_bytes, cache_type

GIB = 2**30


def texts(figure):
    """All that is written in a figure."""
    from matplotlib.text import Text

    return "\n".join(t.get_text() for t in figure.findobj(Text))


# ---- the KV cache


def test_cache_numbers():
    """The table's float16 rows, and where the curves of MHA and of the weights cross."""
    mha, gqa = figures.cache.lines(figures.cache.example())
    assert (mha.token_bytes, gqa.token_bytes) == (524_288, 131_072)
    assert [mha.token_bytes * n / GIB for n in (4096, 32768, 16 * 4096)] == [2, 16, 32]
    assert [gqa.token_bytes * n / GIB for n in (4096, 32768, 16 * 4096)] == [0.5, 4, 8]
    assert int(mha.crossing_tokens) == 25_749
    assert mha.token_bytes / gqa.token_bytes == 4
    assert figures.cache.example().weights.total.n_bytes == 13.5e9


def test_int8_lines_have_scales():
    """Half the bytes, and 4 for each key and each value of a token and head, as the engine allocates."""
    *_, mha, gqa = figures.cache.lines(figures.cache.example(), ("float16", "int8"))
    assert mha.token_bytes == 262_144 + 32 * 32 * 2 * 4
    assert gqa.token_bytes == 65_536 + 32 * 8 * 2 * 4


def test_cache_figure_says_what_it_shows():
    drawn = texts(figures.cache.draw())
    for label in (
        "MHA, 32 KV heads, float16: as large as the weights at 25,749 tokens",
        "GQA, 8 KV heads, float16: as large as the weights at 102,996 tokens",
        "weights, F16: 13.5 GB",
        "24 GB accelerator",
        "80 GB accelerator",
        "context, tokens",
        "KV cache of one sequence, GB",
    ):
        assert label in drawn


def test_cache_lines_are_where_they_should_be():
    axes = figures.cache.draw().axes[0]
    curves = {
        line.get_label().split(",")[0]: line.get_xydata()
        for line in axes.lines
        if "heads" in str(line.get_label())
    }
    for name, per_token in (("MHA", 524_288), ("GQA", 131_072)):
        x, y = curves[name].T
        assert x.tolist() == [2**i for i in range(10, 18)]
        assert y == pytest.approx(x * per_token / 1e9)
    levels = {round(float(line.get_ydata()[0]), 6) for line in axes.lines if len(line.get_xdata()) == 2}
    assert levels >= {13.5, 24.0, 80.0}


def test_cache_of_a_real_model(smollm2):
    from ropewalk.checkpoint.gguf import open_gguf

    with open_gguf(smollm2) as checkpoint:
        shape = shape_of_gguf(checkpoint)
    _, own = figures.cache.lines(shape)
    assert own.token_bytes == 23_040 == cache_bytes(shape, cache_type("float16"), 16) / 16
    assert "GQA, 3 KV heads" in texts(figures.cache.draw(shape))


def test_unknown_caches_are_refused():
    with pytest.raises(InvalidParameterError, match="int7"):
        figures.cache.draw(caches=("int7",))


# ---- rotary positions


def test_rope_numbers():
    """64 wide, base 10,000: wavelengths from 6 to 47,117 tokens; a score changes by some 4e-14 over shifts to 504."""
    shown = figures.rope.rotary()
    assert shown.positions.tolist() == list(range(0, 505, 8))
    waves = shown.wavelengths
    assert len(waves) == 32
    assert waves[0] == pytest.approx(2 * math.pi)
    assert round(waves[-1]) == 47_117
    assert 1e-14 < shown.deviations[4] < 1e-13
    assert max(shown.deviations.values()) < 1e-13
    assert len(shown.scores) == 4


def test_at_no_distance_the_score_is_that_of_the_vectors():
    rng = np.random.default_rng(figures.rope.SEED)
    query, key = rng.standard_normal((2, 64))
    shown = figures.rope.rotary()
    assert shown.scores[0] == pytest.approx(np.full(64, query @ key), abs=1e-13)
    turned = figures.rope.turned(query, shown.positions, shown.frequencies)
    assert np.linalg.norm(turned, axis=1) == pytest.approx(np.full(64, np.linalg.norm(query)))


def test_rope_figure_has_flat_lines_and_its_two_wavelengths():
    figure = figures.rope.draw(context=8192)
    left, right = figure.axes
    assert len(left.lines) == 4
    for line in left.lines:
        y = line.get_ydata()
        assert np.ptp(y) < 1e-12
    assert right.lines[0].get_ydata()[[0, -1]] == pytest.approx([6.283185, 47_117.24], abs=0.01)
    drawn = texts(figure)
    for label in (
        "6.28 tokens",
        "47,117 tokens",
        "4 apart",
        "64 apart",
        "context: 8,192 tokens",
        "position of the key, tokens",
    ):
        assert label in drawn


def test_rope_of_other_frequencies():
    shown = figures.rope.rotary(np.array([1.0, 0.01]), offsets=(0, 1), name="four wide")
    assert shown.wavelengths == pytest.approx([2 * math.pi, 200 * math.pi])
    assert "four wide" in texts(figures.rope.draw(shown))


# ---- sampling


def test_the_six_published_values_of_the_example():
    plain, sharp, cut = figures.sampling.sampling().panels
    assert [round(float(p.probabilities[0]), 2) for p in (plain, sharp)] == [0.27, 0.63]
    assert [round(p.entropy, 2) for p in (plain, sharp, cut)] == [2.56, 1.50, 2.28]
    assert [p.n_tokens for p in (plain, sharp, cut)] == [20, 20, 13]
    assert np.count_nonzero(cut.probabilities) == 13


def test_the_example_worked_out_by_hand():
    """The same from the definitions, without the sampler."""
    logits = np.array(figures.sampling.EXAMPLE_LOGITS)
    assert len(logits) == 20
    p = np.exp(logits) / np.exp(logits).sum()
    q = p**2 / (p**2).sum()  # T = 1/2 squares
    kept = np.cumsum(p)
    n = int(np.argmax(kept >= 0.9)) + 1
    r = p[:n] / kept[n - 1]
    found = figures.sampling.sampling().panels
    for panel, expected in zip(found, (p, q, np.concatenate([r, np.zeros(20 - n)])), strict=True):
        assert panel.probabilities == pytest.approx(expected, abs=1e-6)  # logits are float32
        positive = expected[expected > 0]
        assert panel.entropy == pytest.approx(-(positive * np.log(positive)).sum(), abs=1e-6)
    assert n == 13
    assert kept[11] < 0.9 < kept[12]


def test_sampling_figure_says_what_it_shows():
    figure = figures.sampling.draw()
    drawn = texts(figure)
    for label in (
        "T = 1",
        "T = 0.5",
        "top-p 0.9",
        "entropy 2.56 nats",
        "entropy 1.50 nats",
        "entropy 2.28 nats",
    ):
        assert label in drawn
    assert "13 of 20 tokens" in drawn
    assert {"0.27", "0.63"} <= set(drawn.splitlines())
    heights = [bar.get_height() for bar in figure.axes[0].patches]
    assert heights == pytest.approx(figures.sampling.sampling().panels[0].probabilities)


def test_sampling_of_other_logits():
    """Ties at the cut go to the lowest id, as in the sampler; labels are the tokens' texts."""
    logits = np.log(np.array([0.125, 0.5, 0.125, 0.25], np.float32))
    shown = figures.sampling.sampling(logits, ["a", "b", "c", "d"], temperature=2.0, mass=0.75)
    assert shown.labels == ("b", "d", "a", "c")
    assert shown.panels[0].probabilities == pytest.approx([0.5, 0.25, 0.125, 0.125])
    assert shown.panels[2].n_tokens == 2
    assert "b" in texts(figures.sampling.draw(shown, title="four")).splitlines()


@pytest.mark.parametrize(
    ("options", "message"), [({"temperature": 0}, "temperature is 0"), ({"mass": 1.5}, "top_p is 1.5")]
)
def test_sampling_refuses(options, message):
    with pytest.raises(InvalidParameterError, match=message):
        figures.sampling.sampling(**options)
