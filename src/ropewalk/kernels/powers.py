"""What a logit weighs in a draw: a power of two, rounded to a whole number, so that every sum of weights is exact.

A token's exponent is (logit - largest logit) * log2(e) / temperature, at most 0. Its weight is 2**(bits + exponent),
a whole number after rounding half to even, and 0 where the exponent is below -bits: the most likely token weighs
2**bits, and one that is 2**bits times less likely still weighs 1. Sums of int64 do not depend on their order, so a
vectorised pass, a block at a time and a plain cumulative sum agree to the last bit, on every CPU.

This is the readable form; `kernels.sampling` has the same in compiled code and gives the same bits, because both
consist of the same IEEE additions and multiplications. Knows nothing of tokens, and does not import Numba.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

LN2 = 0.6931471805599453
LOG2E = 1.4426950408889634
MOST_BITS = 50


def _series(degree: int) -> tuple[float, ...]:
    terms = [1.0]
    for n in range(1, degree + 1):
        terms.append(terms[-1] * LN2 / n)
    return tuple(terms)


SERIES = _series(10)
"""Of 2**f, f in -0.5 ... 0.5: the terms ln(2)**n / n! of e**(f ln 2). What is left out is below 2.3e-13."""


def resolution(n: int) -> int:
    """Bits of the largest of n weights: as many as keep their sum below 2**63, and at most 50."""
    return min(MOST_BITS, 63 - n.bit_length())


def weights(exponents: NDArray[np.float64], bits: int) -> NDArray[np.int64]:
    """Return 2**(bits + exponent) as whole numbers.

    Parameters
    ----------
    exponents : float64 [c]
        At most 0; minus infinity is allowed, NaN is not.
    bits : int in 1 ... 50
        See `resolution`.

    Returns
    -------
    int64 [c]
        In 0 ... 2**bits.
    """
    clipped = np.maximum(exponents, -bits - 1.0)
    whole = np.rint(clipped)
    fraction = clipped - whole
    power = np.full_like(fraction, SERIES[-1])
    for term in SERIES[-2::-1]:
        power = power * fraction + term
    scaled = np.rint(np.ldexp(power, whole.astype(np.int32) + bits))
    return np.where(exponents >= -bits, scaled, 0.0).astype(np.int64)
