"""Random numbers for the sampler: one number for each (seed, position), and no state.

A draw is a function of the request's seed and of the position of the drawn token in its sequence, so
neither the batch around it, nor the order of work, nor a retry can change it. The function is the
counter-based generator Philox4x64-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as
1, 2, 3", SC 2011) with key (seed, 0) and counter (position, 0, 0, 0); the first of its four words is used.
"""

from __future__ import annotations

_MASK = 2**64 - 1
_MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
_KEY_STEPS = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
_ROUNDS = 10


def philox4x64(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Encrypt a 256-bit counter with a 128-bit key in ten rounds; all words are in 0 ... 2**64 - 1."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product0 = _MULTIPLIERS[0] * c0
        product1 = _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (product1 >> 64) ^ c1 ^ k0,
            product1 & _MASK,
            (product0 >> 64) ^ c3 ^ k1,
            product0 & _MASK,
        )
        k0 = (k0 + _KEY_STEPS[0]) & _MASK
        k1 = (k1 + _KEY_STEPS[1]) & _MASK
    return c0, c1, c2, c3


def uniform(seed: int, position: int) -> float:
    """Return the number in [0, 1) that belongs to a seed and a position, a multiple of 2**-53.

    Parameters
    ----------
    seed : int in 0 ... 2**64 - 1
        Key of the request.
    position : int in 0 ... 2**64 - 1
        Position of the token to be drawn in its sequence; the first prompt token has position 0.
    """
    word = philox4x64((position, 0, 0, 0), (seed, 0))[0]
    return (word >> 11) * 2.0**-53


def seed_of(seed: int, index: int) -> int:
    """Return the seed of one of several completions of a prompt; that of completion 0 is `seed` itself.

    The others are words of the same generator with key (seed, 1), which no draw uses, and counter (index, 0, 0, 0).
    """
    return philox4x64((index, 0, 0, 0), (seed, 1))[0] if index else seed
