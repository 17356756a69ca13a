"""Rotary tables and rotation, by published values (cases B1, B2, B3, B6, B9)."""

import numpy as np
import pytest

from ropewalk.errors import CheckpointError
from ropewalk.model.config import RopeConfig
from ropewalk.model.rope import cos_sin, inverse_frequencies, rotate

LAYOUTS = ("neighbours", "halves")


def turn(x, position, rope):
    cos, sin = cos_sin(inverse_frequencies(rope), [position])
    return rotate(np.asarray(x), cos[0], sin[0], rope.layout)


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ("neighbours", [-1.142640, 1.922076, 2.959851, 4.029800]),
        ("halves", [-1.984111, 1.959901, 2.462378, 4.019800]),
    ],
)
def test_pairing_b1(layout, expected):
    x = np.array([1, 2, 3, 4], np.float32)
    rotated = turn(x, 1, RopeConfig(10000.0, 4, layout))
    assert rotated.dtype == np.float32
    np.testing.assert_allclose(rotated, expected, atol=1e-6)
    assert x.tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_position_zero_is_the_identity_b1(layout):
    x = np.arange(8, dtype=np.float32)
    assert turn(x, 0, RopeConfig(10000.0, 8, layout)).tolist() == x.tolist()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_score_depends_on_the_distance_only_b1(layout):
    """Float64, width 64: the largest deviation over shifts 0, 8, … 504 at offset 4 is rounding."""
    rng = np.random.default_rng(1)
    q, k = rng.standard_normal((2, 64))
    frequencies = inverse_frequencies(RopeConfig(10000.0, 64, layout))

    def at(x, position):
        return rotate(x, np.cos(position * frequencies), np.sin(position * frequencies), layout)

    scores = [at(q, 4 + shift) @ at(k, shift) for shift in range(0, 505, 8)]
    assert np.ptp(scores) < 2e-13
    assert at(q, 300) @ at(k, 300) == pytest.approx(q @ k, abs=1e-12)
    assert np.linalg.norm(at(q, 300)) == pytest.approx(np.linalg.norm(q), abs=1e-12)


def test_every_head_turns_alike_b1():
    """Positions run along the second last axis, whatever the number of heads."""
    rng = np.random.default_rng(2)
    x = rng.standard_normal((3, 5, 8)).astype(np.float32)
    rope = RopeConfig(10000.0, 8, "halves")
    cos, sin = cos_sin(inverse_frequencies(rope), np.arange(5))
    together = rotate(x, cos, sin, rope.layout)
    for head in range(3):
        for position in range(5):
            assert (together[head, position] == turn(x[head, position], position, rope)).all()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_partial_width_b2(layout):
    rope = RopeConfig(10000.0, 4, layout)
    np.testing.assert_allclose(inverse_frequencies(rope), [1, 0.01])
    x = np.random.default_rng(3).standard_normal(8).astype(np.float32)
    rotated = turn(x, 77, rope)
    assert rotated[4:].tobytes() == x[4:].tobytes()
    assert (rotated[:4] != x[:4]).all()
    np.testing.assert_array_equal(rotated[:4], turn(x[:4], 77, rope))


def test_frequencies_use_the_rotated_width_b2_b3():
    assert inverse_frequencies(RopeConfig(1e4, 64, "halves"))[1] == pytest.approx(0.749894, abs=1e-6)
    nemo = inverse_frequencies(RopeConfig(1e6, 128, "neighbours"))
    assert len(nemo) == 64
    assert nemo[1] == pytest.approx(0.805842, abs=1e-6)


def test_wavelengths():
    """Width 64 and base 10 000: from 2π to about 47 117 tokens."""
    wavelengths = 2 * np.pi / inverse_frequencies(RopeConfig(1e4, 64, "halves"))
    assert wavelengths[0] == pytest.approx(2 * np.pi)
    assert wavelengths[-1] == pytest.approx(47117, abs=0.5)


def llama3_divisors(width, base, factor, low, high, original):
    """The published rule, written out for the test: what a converter stores in `rope_freqs.weight`."""
    divisors = []
    for frequency in base ** (-np.arange(0, width, 2) / width):
        turns = original * frequency / (2 * np.pi)
        smooth = min(max((turns - low) / (high - low), 0), 1)
        divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, np.float32)


def test_divisors_of_the_file_are_used_b6():
    divisors = llama3_divisors(64, 5e5, 32, 1, 4, 8192)
    np.testing.assert_allclose(divisors[15:18], [1.651329, 3.292262, 9.666729], rtol=1e-5)
    plain = inverse_frequencies(RopeConfig(5e5, 64, "neighbours"))
    scaled = inverse_frequencies(RopeConfig(5e5, 64, "neighbours", freq_factors=True), divisors)
    ratio = plain / scaled
    np.testing.assert_allclose(ratio[:15], 1)
    np.testing.assert_allclose(ratio[15:18], [1.651329, 3.292262, 9.666729], rtol=1e-5)
    np.testing.assert_allclose(ratio[18:], 32)


@pytest.mark.parametrize(
    "divisors", [None, [1, 1, 1], [1, 1, 1, 0], [1, -1, 1, 1], [1, 1, 1, np.nan], [[1] * 4]]
)
def test_bad_divisors_are_refused_b6(divisors):
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight"):
        inverse_frequencies(RopeConfig(1e4, 8, "halves", freq_factors=True), divisors)


def test_divisors_nobody_asked_for_are_refused_b6():
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight is present"):
        inverse_frequencies(RopeConfig(1e4, 8, "halves"), [1, 1, 1, 1])


def test_angles_are_not_rounded_b9():
    frequencies = inverse_frequencies(RopeConfig(1e4, 32, "halves"))
    assert 1857 * frequencies[1] == pytest.approx(1044.2678, abs=1e-4)
    cos, _ = cos_sin(frequencies, [1857])
    assert cos.dtype == np.float32
    assert cos[0, 1] == pytest.approx(0.3067, abs=5e-5)  # an angle rounded to float16, 1045, gives -0.4082
    cos, _ = cos_sin(frequencies, [256, 257, 259, 260])
    assert len(set(cos[:, 0].tolist())) == 4


@pytest.mark.parametrize(("position", "drift"), [(131_071, 8e-5), (1_048_575, 0.011)])
def test_far_positions_are_exact_b9(position, drift):
    """Angles formed in float32 drift; ours are within one rounding of the float64 cosine."""
    rope = RopeConfig(5e5, 128, "halves")
    frequencies = inverse_frequencies(rope)
    exact = np.cos(position * frequencies)
    cos, _ = cos_sin(frequencies, np.array([position], np.int32))
    assert abs(cos[0] - exact).max() < 6e-8
    naive = np.cos(np.float32(position) * frequencies.astype(np.float32))
    assert abs(naive - exact).max() > drift / 2
