"""The counter-based generator: published vectors, NumPy's own implementation, and fixed numbers."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ropewalk.engine.draws import philox4x64, uniform

word = st.integers(0, 2**64 - 1)

# Known answers of Philox4x64-10 as its authors publish them with the Random123 library.
KNOWN = [
    (
        (0, 0, 0, 0),
        (0, 0),
        (0x16554D9ECA36314C, 0xDB20FE9D672D0FDC, 0xD7E772CEE186176B, 0x7E68B68AEC7BA23B),
    ),
    (
        (2**64 - 1,) * 4,
        (2**64 - 1,) * 2,
        (0x87B092C3013FE90B, 0x438C3C67BE8D0224, 0x9CC7D7C69CD777B6, 0xA09CAEBF594F0BA0),
    ),
    (
        (0x243F6A8885A308D3, 0x13198A2E03707344, 0xA4093822299F31D0, 0x082EFA98EC4E6C89),
        (0x452821E638D01377, 0xBE5466CF34E90C6C),
        (0xA528F45403E61D95, 0x38C72DBD566E9788, 0xA5A1610E72FD18B5, 0x57BD43B5E52B7FE6),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_known_answers(counter, key, expected):
    assert philox4x64(counter, key) == expected


@given(counter=st.tuples(word, word, word, word), key=st.tuples(word, word))
def test_equals_numpy(counter, key):
    """NumPy steps its counter before it draws, so its first block is ours of counter + 1."""
    following = (sum(part << (64 * i) for i, part in enumerate(counter)) + 1) % 2**256
    ours = philox4x64(tuple((following >> (64 * i)) % 2**64 for i in range(4)), key)
    numpy = np.random.Philox(key=np.array(key, dtype=np.uint64), counter=np.array(counter, dtype=np.uint64))
    assert list(ours) == [int(part) for part in numpy.random_raw(4)]


@pytest.mark.parametrize(
    ("seed", "position", "expected"),
    [
        (0, 0, "0x1.6554d9eca3630p-4"),
        (0, 1, "0x1.7a5d3204726c0p-7"),
        (1, 0, "0x1.96fd4e899e337p-1"),
        (42, 7, "0x1.b2f70ef2464fep-1"),
        (2**64 - 1, 8191, "0x1.5b13411103472p-1"),
    ],
)
def test_fixed_draws(seed, position, expected):
    """These numbers are part of the promise that a seed gives the same text again."""
    assert uniform(seed, position).hex() == expected


def test_draws_are_uniform_over_positions_and_over_seeds():
    for draws in ([uniform(7, p) for p in range(4000)], [uniform(s, 7) for s in range(4000)]):
        counts = np.histogram(draws, bins=20, range=(0, 1))[0]
        assert np.sum((counts - 200) ** 2 / 200) < 50  # chi-square, 19 degrees of freedom: p < 1e-4
        assert min(draws) >= 0
        assert max(draws) < 1
