"""Choosing the integers and scales of quantized blocks: weighted least squares over many candidate scales.

A group of 16 or 32 weights x becomes d q + m with small integers q. For a candidate (d, m) the integers follow by
rounding; for those integers the best (d, m) is the solution of a 2 × 2 system, and how far the group then is from x
follows from the same sums. The candidate with the smallest error is refined in the same way until that helps no
more. Blocks of 256 weights store the scales (and minima) of their groups as small integers times one float16 (two):
these are searched around their rounded values, and the float16 numbers are least squares over the whole block. Every
weight counts with `importance · √(mean square of the group + x²)`, so that large weights, which move outputs most, are
hit best.

Lanes are groups: 16 of them are worked on at a time, from scratch memory `[weight][lane]`. Sums are taken over
residuals, not over squares of the weights, so that float32 is enough for 6 bits too.

Knows nothing of files, rows or how blocks are laid out; `ropewalk.checkpoint.encode` packs the results.
"""

import math

import numpy as np

from ropewalk.kernels.jit import inline, kernel
from ropewalk.kernels.simd import (
    absolute,
    bits_of,
    float_of_bits,
    fma,
    load_f32,
    load_floats,
    load_halfs,
    maximum,
    minimum,
    round_even,
    splat,
    splat_int,
    store_f32,
    store_floats,
    store_halfs,
)

LANES = 16
VECTOR_BYTES = 64
ZERO, ONE, TWO = np.float32(0), np.float32(1), np.float32(2)
_TINY = np.float32(1e-30)
_STRETCH, _SHIFT = np.float32(0.025), np.float32(0.4)
N_STRETCHES, N_SCALES = 9, 16
_HUGE = np.float32(3e38)
_HALF_MAX = np.float32(65504)
_SINGULAR = np.float32(1e-5)  # a determinant so small beside its terms is rounding error
REFINEMENTS = 4
SCALE_ROUNDS = 3

# The scratch memory of a tile of 16 groups: x and its weights [32][16] each, then single vectors.
_X, _W = 0, 32 * VECTOR_BYTES
(
    _SCALE, _MINIMUM, _ERROR,  # of each group, the best so far
    _SW, _SQ, _SQQ, _SR, _SRQ,  # sums that belong to it
    _D, _DMIN, _LS, _LM,  # factors of its block, and its integers
    _TEMP, _HALF,
) = (64 * VECTOR_BYTES + i * VECTOR_BYTES for i in range(14))  # fmt: skip
SCRATCH_BYTES = _HALF + VECTOR_BYTES


@inline
def less(a, b):
    """All bits where a < b, else none; none where either is NaN."""
    return splat_int(np.int32(0)) - (bits_of(minimum(a - b, splat(ZERO))) >> 31)


@inline
def pick(mask, a, b):
    """a where the mask has bits, else b."""
    return float_of_bits((bits_of(a) & mask) | (bits_of(b) & (mask ^ -1)))


@inline
def to_half(at, value):
    """What float16 makes of the values, at most its largest number; `at` is 64 bytes of scratch."""
    store_halfs(at, minimum(maximum(value, splat(-_HALF_MAX)), splat(_HALF_MAX)))
    return load_halfs(at)


@inline
def safe_inverse(value):
    """1 / value, and a large finite number where it is 0 (which then rounds everything to a bound)."""
    nothing = less(absolute(value), splat(_TINY))
    return splat(ONE) / pick(nothing, splat(ONE), value) * pick(nothing, splat(ZERO), splat(ONE))


@inline
def nearest(x, inverse, low, high):
    """The integers of x / d, between low and high; `inverse` is 1 / d."""
    return minimum(maximum(round_even(x * inverse), low), high)


@inline
def affine_sums(s, n, d, m, low, high):
    """Sums over a group for the integers that (d, m) gives: q, q², r, r q and r², weighted; r is what is left of x."""
    inverse = safe_inverse(d)
    sq = sqq = sr = srq = srr = splat(ZERO)
    for i in range(n):
        x, w = load_floats(s + _X + i * 64), load_floats(s + _W + i * 64)
        q = nearest(x - m, inverse, low, high)
        r = x - fma(d, q, m)
        wq, wr = w * q, w * r
        sq, sqq = sq + wq, fma(wq, q, sqq)
        sr, srq, srr = sr + wr, fma(wr, q, srq), fma(wr, r, srr)
    return sq, sqq, sr, srq, srr


@inline
def best_affine(sums, sw, d, m, top):
    """The best scale and minimum for the same integers, and the error that is left; the minimum is at most `top`."""
    sq, sqq, sr, srq, srr = sums
    determinant = maximum(sw * sqq - sq * sq, sw * sqq * _SINGULAR + _TINY)
    dm = (sqq * sr - sq * srq) / determinant
    dm = minimum(m + dm, top) - m
    dd = (srq - dm * sq) / maximum(sqq, splat(_TINY))
    error = srr - (dd * srq + dm * sr) * TWO + dd * dd * sqq + dd * dm * sq * TWO + dm * dm * sw
    return d + dd, m + dm, error


@inline
def keep_better(s, d, m, error):
    """Store scale, minimum and error where the error is smaller than what is there; returns the error that is left."""
    old = load_floats(s + _ERROR)
    better = less(error, old)
    store_floats(s + _SCALE, pick(better, d, load_floats(s + _SCALE)))
    store_floats(s + _MINIMUM, pick(better, m, load_floats(s + _MINIMUM)))
    store_floats(s + _ERROR, pick(better, error, old))


@inline
def fit_affine(s, n, levels, top):
    """Scale and minimum of every group, for integers from 0 to `levels`; into the scratch memory."""
    low, high = load_floats(s + _X), load_floats(s + _X)
    sw = splat(ZERO)
    for i in range(n):
        x = load_floats(s + _X + i * 64)
        low, high, sw = minimum(low, x), maximum(high, x), sw + load_floats(s + _W + i * 64)
    low = minimum(low, top)
    store_floats(s + _SW, sw)
    zero, last = splat(ZERO), splat(levels)
    store_floats(s + _SCALE, zero)
    store_floats(s + _MINIMUM, low)
    sums = affine_sums(s, n, zero, low, zero, last)
    store_floats(s + _ERROR, sums[4])
    spread = high - low
    for c in range(4 * N_STRETCHES):
        d = spread / splat(levels * (ONE + _STRETCH * np.float32(c // 4 - 3)))
        m = minimum(fma(d, splat(_SHIFT * np.float32(c % 4 - 1)), low), top)
        sums = affine_sums(s, n, d, m, zero, last)
        better_d, better_m, error = best_affine(sums, sw, d, m, top)
        keep_better(s, better_d, better_m, error)
    for _ in range(REFINEMENTS):
        d, m = load_floats(s + _SCALE), load_floats(s + _MINIMUM)
        sums = affine_sums(s, n, d, m, zero, last)
        better_d, better_m, error = best_affine(sums, sw, d, m, top)
        keep_better(s, better_d, better_m, error)


@inline
def scale_sums(s, n, d, low, high):
    """As `affine_sums` without a minimum: q², r q and r²."""
    inverse = safe_inverse(d)
    sqq = srq = srr = splat(ZERO)
    for i in range(n):
        x, w = load_floats(s + _X + i * 64), load_floats(s + _W + i * 64)
        q = nearest(x, inverse, low, high)
        r = x - d * q
        wq = w * q
        sqq, srq, srr = fma(wq, q, sqq), fma(wq, r, srq), fma(w * r, r, srr)
    return sqq, srq, srr


@inline
def try_scale(s, n, d, low, high):
    """Least squares from the integers of scale d; kept if better."""
    sqq, srq, srr = scale_sums(s, n, d, low, high)
    dd = srq / maximum(sqq, splat(_TINY))
    keep_better(s, d + dd, splat(ZERO), srr - dd * srq)


@inline
def largest(s, n):
    """The number of largest size in each group, with its sign."""
    low = high = splat(ZERO)
    for i in range(n):
        x = load_floats(s + _X + i * 64)
        low, high = minimum(low, x), maximum(high, x)
    return pick(less(high, splat(ZERO) - low), low, high)


@inline
def fit_scale(s, n, bottom, top):
    """Scale of every group, positive or negative, for integers from `bottom` (below 0) to `top`."""
    low, high = splat(bottom), splat(top)
    extreme = largest(s, n)
    _, _, srr = scale_sums(s, n, splat(ZERO), low, high)
    store_floats(s + _SCALE, splat(ZERO))
    store_floats(s + _MINIMUM, splat(ZERO))
    store_floats(s + _ERROR, srr)
    for c in range(N_SCALES):
        stretch = ONE + _STRETCH * np.float32(c - 6)
        try_scale(s, n, extreme / splat(bottom * stretch), low, high)
        try_scale(s, n, extreme / splat(top * stretch), low, high)
    for _ in range(REFINEMENTS):
        try_scale(s, n, load_floats(s + _SCALE), low, high)


@inline
def gather(s, x, importance, first, n):
    """Bring 16 groups from rows to lanes, with their weights; beyond the last group, the last again."""
    per_row = importance.size // n
    for lane in range(LANES):
        group = min(first + lane, x.shape[0] - 1)
        column = (group % per_row) * n
        square = np.float32(0)
        for i in range(n):
            square += x[group, i] * x[group, i]
        square /= np.float32(n)
        for i in range(n):
            value = x[group, i]
            at = i * 64 + lane * 4
            store_f32(s + _X + at, value)
            weight = importance[column + i] * np.float32(math.sqrt(square + value * value))
            store_f32(s + _W + at, weight + _TINY)


@inline
def write_codes(s, codes, first, n, d, m, low, high):
    """The integers, counted from `low`, as bytes."""
    inverse = safe_inverse(d)
    for i in range(n):
        q = nearest(load_floats(s + _X + i * 64) - m, inverse, low, high) - low
        store_floats(s + _TEMP, q)
        for lane in range(min(LANES, codes.shape[0] - first)):
            codes[first + lane, i] = np.uint8(load_f32(s + _TEMP + lane * 4))


@inline
def write_lanes(s, out, first, values):
    store_floats(s + _TEMP, values)
    for lane in range(min(LANES, out.size - first)):
        out[first + lane] = load_f32(s + _TEMP + lane * 4)


@kernel
def quantize_affine(x, importance, levels, codes, scales, minima, scratch):
    """Groups with a float16 scale and minimum of their own (Q4_1, Q5_1).

    Parameters
    ----------
    x : float32 [groups, 32]
    importance : float32 [columns of a row]
    levels : largest integer, float32
    codes : uint8 [groups, 32], out
    scales, minima : float32 [groups], out; float16 holds them exactly
    scratch : int64, address of SCRATCH_BYTES bytes
    """
    n = x.shape[1]
    for first in range(0, x.shape[0], LANES):
        gather(scratch, x, importance, first, n)
        fit_affine(scratch, n, levels, splat(_HUGE))
        d = to_half(scratch + _HALF, load_floats(scratch + _SCALE))
        m = to_half(scratch + _HALF, load_floats(scratch + _MINIMUM))
        write_codes(scratch, codes, first, n, d, m, splat(ZERO), splat(levels))
        write_lanes(scratch, scales, first, d)
        write_lanes(scratch, minima, first, m)


@kernel
def quantize_scale(x, importance, bottom, top, codes, scales, scratch):
    """Groups with a float16 scale of their own (Q4_0, Q5_0); integers from `bottom` to `top`, stored from 0 on."""
    n = x.shape[1]
    for first in range(0, x.shape[0], LANES):
        gather(scratch, x, importance, first, n)
        fit_scale(scratch, n, bottom, top)
        d = to_half(scratch + _HALF, load_floats(scratch + _SCALE))
        write_codes(scratch, codes, first, n, d, splat(ZERO), splat(bottom), splat(top))
        write_lanes(scratch, scales, first, d)


@kernel
def quantize_range(x, importance, bottom, top, codes, scales, scratch):
    """As `quantize_scale`, with the scale that just reaches the largest number (Q8_0)."""
    n = x.shape[1]
    for first in range(0, x.shape[0], LANES):
        gather(scratch, x, importance, first, n)
        d = to_half(scratch + _HALF, absolute(largest(scratch, n)) / splat(top))
        write_codes(scratch, codes, first, n, d, splat(ZERO), splat(bottom), splat(top))
        write_lanes(scratch, scales, first, d)


# ---- blocks of 256: integers for the scales of the groups, and one or two float16 numbers for all of them


@inline
def block_largest(s, field, n_lanes, signed):
    """The number of largest size among each block's lanes, in all of them; without its sign unless `signed`."""
    for block in range(LANES // n_lanes):
        found = np.float32(0)
        for lane in range(block * n_lanes, (block + 1) * n_lanes):
            value = load_f32(s + field + lane * 4)
            if abs(value) > abs(found):
                found = value
        if not signed:
            found = abs(found)
        for lane in range(block * n_lanes, (block + 1) * n_lanes):
            store_f32(s + _TEMP + lane * 4, found)
    return load_floats(s + _TEMP)


@inline
def block_sum(s, values, n_lanes):
    """The sum over each block's lanes, in all of them."""
    store_floats(s + _TEMP, values)
    for block in range(LANES // n_lanes):
        total = np.float64(0)
        for lane in range(block * n_lanes, (block + 1) * n_lanes):
            total += load_f32(s + _TEMP + lane * 4)
        for lane in range(block * n_lanes, (block + 1) * n_lanes):
            store_f32(s + _TEMP + lane * 4, np.float32(total))
    return load_floats(s + _TEMP)


@inline
def search_affine(s, n, d, dmin, most, levels):
    """For each group the best pair of integers within 1 of LS and LM, and the error and the sums that belong to it."""
    ls, lm = load_floats(s + _LS), load_floats(s + _LM)
    store_floats(s + _ERROR, splat(_HUGE))
    zero, last, bound = splat(ZERO), splat(levels), splat(most)
    for c in range(9):
        scale = minimum(maximum(ls + splat(np.float32(c // 3 - 1)), zero), bound)
        low = minimum(maximum(lm + splat(np.float32(c % 3 - 1)), zero), bound)
        sq, sqq, sr, srq, srr = affine_sums(s, n, d * scale, zero - dmin * low, zero, last)
        better = less(srr, load_floats(s + _ERROR))
        store_floats(s + _LS, pick(better, scale, load_floats(s + _LS)))
        store_floats(s + _LM, pick(better, low, load_floats(s + _LM)))
        store_floats(s + _SQ, pick(better, sq, load_floats(s + _SQ)))
        store_floats(s + _SQQ, pick(better, sqq, load_floats(s + _SQQ)))
        store_floats(s + _SR, pick(better, sr, load_floats(s + _SR)))
        store_floats(s + _SRQ, pick(better, srq, load_floats(s + _SRQ)))
        store_floats(s + _ERROR, pick(better, srr, load_floats(s + _ERROR)))


@inline
def refine_affine(s, n, n_lanes, most, levels):
    """Least squares for the two factors, then the integers anew; kept where the block's error is smaller."""
    d, dmin, ls, lm = load_floats(s + _D), load_floats(s + _DMIN), load_floats(s + _LS), load_floats(s + _LM)
    error = load_floats(s + _ERROR)
    a11 = block_sum(s, ls * ls * load_floats(s + _SQQ), n_lanes)
    a12 = block_sum(s, ls * lm * load_floats(s + _SQ), n_lanes)
    a22 = block_sum(s, lm * lm * load_floats(s + _SW), n_lanes)
    b1 = block_sum(s, ls * load_floats(s + _SRQ), n_lanes)
    b2 = block_sum(s, lm * load_floats(s + _SR), n_lanes)
    determinant = maximum(a11 * a22 - a12 * a12, a11 * a22 * _SINGULAR + _TINY)
    new_d = to_half(s + _HALF, d + (b1 * a22 - b2 * a12) / determinant)
    new_dmin = to_half(s + _HALF, maximum(dmin + (b1 * a12 - b2 * a11) / determinant, splat(ZERO)))
    search_affine(s, n, new_d, new_dmin, most, levels)
    new_error = load_floats(s + _ERROR)
    better = less(block_sum(s, new_error, n_lanes), block_sum(s, error, n_lanes))
    store_floats(s + _D, pick(better, new_d, d))
    store_floats(s + _DMIN, pick(better, new_dmin, dmin))
    store_floats(s + _LS, pick(better, load_floats(s + _LS), ls))
    store_floats(s + _LM, pick(better, load_floats(s + _LM), lm))
    store_floats(s + _ERROR, pick(better, new_error, error))


@kernel
def quantize_affine_blocks(x, importance, n_lanes, most, levels, codes, scales, minima, factors, scratch):
    """Blocks whose groups have integer scales and minima from 0 to `most` (Q2_K, Q4_K, Q5_K).

    Parameters
    ----------
    x : float32 [groups, 16 or 32]; `n_lanes` groups are a block
    codes : uint8 [groups, 16 or 32], out
    scales, minima : float32 [groups], out, whole numbers
    factors : float32 [groups, 2], out: d and dmin of each group's block
    """
    n, s = x.shape[1], scratch
    bound, zero = splat(most), splat(ZERO)
    for first in range(0, x.shape[0], LANES):
        gather(s, x, importance, first, n)
        fit_affine(s, n, levels, zero)
        low = zero - load_floats(s + _MINIMUM)
        store_floats(s + _MINIMUM, low)
        d = to_half(s + _HALF, block_largest(s, _SCALE, n_lanes, False) / bound)
        dmin = to_half(s + _HALF, block_largest(s, _MINIMUM, n_lanes, False) / bound)
        store_floats(s + _D, d)
        store_floats(s + _DMIN, dmin)
        store_floats(s + _LS, nearest(load_floats(s + _SCALE), safe_inverse(d), zero, bound))
        store_floats(s + _LM, nearest(low, safe_inverse(dmin), zero, bound))
        search_affine(s, n, d, dmin, most, levels)
        for _ in range(SCALE_ROUNDS):
            refine_affine(s, n, n_lanes, most, levels)
        d, dmin, ls, lm = (
            load_floats(s + _D),
            load_floats(s + _DMIN),
            load_floats(s + _LS),
            load_floats(s + _LM),
        )
        write_codes(s, codes, first, n, d * ls, zero - dmin * lm, zero, splat(levels))
        write_lanes(s, scales, first, ls)
        write_lanes(s, minima, first, lm)
        write_lanes(s, factors[:, 0], first, d)
        write_lanes(s, factors[:, 1], first, dmin)


@inline
def search_scales(s, n, d, least, most, bottom, top):
    """For each group the best integer scale within 1 of LS, and the error and the sums that belong to it."""
    ls = load_floats(s + _LS)
    store_floats(s + _ERROR, splat(_HUGE))
    for c in range(3):
        scale = minimum(maximum(ls + splat(np.float32(c - 1)), splat(least)), splat(most))
        sqq, srq, srr = scale_sums(s, n, d * scale, splat(bottom), splat(top))
        better = less(srr, load_floats(s + _ERROR))
        store_floats(s + _LS, pick(better, scale, load_floats(s + _LS)))
        store_floats(s + _SQQ, pick(better, sqq, load_floats(s + _SQQ)))
        store_floats(s + _SRQ, pick(better, srq, load_floats(s + _SRQ)))
        store_floats(s + _ERROR, pick(better, srr, load_floats(s + _ERROR)))


@inline
def refine_scales(s, n, n_lanes, least, most, bottom, top):
    """Least squares for the factor, then the integers anew; kept where the block's error is smaller."""
    d, ls, error = load_floats(s + _D), load_floats(s + _LS), load_floats(s + _ERROR)
    a = block_sum(s, ls * ls * load_floats(s + _SQQ), n_lanes)
    b = block_sum(s, ls * load_floats(s + _SRQ), n_lanes)
    new_d = to_half(s + _HALF, d + b / maximum(a, splat(_TINY)))
    search_scales(s, n, new_d, least, most, bottom, top)
    new_error = load_floats(s + _ERROR)
    better = less(block_sum(s, new_error, n_lanes), block_sum(s, error, n_lanes))
    store_floats(s + _D, pick(better, new_d, d))
    store_floats(s + _LS, pick(better, load_floats(s + _LS), ls))
    store_floats(s + _ERROR, pick(better, new_error, error))


@kernel
def quantize_scale_blocks(x, importance, least, most, bottom, top, codes, scales, factors, scratch):
    """Blocks of 16 groups with integer scales from `least` (below 0) to `most` (Q3_K, Q6_K).

    Parameters
    ----------
    x : float32 [groups, 16]
    codes : uint8 [groups, 16], out, counted from `bottom`
    scales : float32 [groups], out, whole numbers
    factors : float32 [groups], out: d of each group's block
    """
    n, s, n_lanes = x.shape[1], scratch, 16
    for first in range(0, x.shape[0], LANES):
        gather(s, x, importance, first, n)
        fit_scale(s, n, bottom, top)
        d = to_half(s + _HALF, block_largest(s, _SCALE, n_lanes, True) / splat(least))
        store_floats(s + _D, d)
        store_floats(s + _LS, nearest(load_floats(s + _SCALE), safe_inverse(d), splat(least), splat(most)))
        search_scales(s, n, d, least, most, bottom, top)
        for _ in range(SCALE_ROUNDS):
            refine_scales(s, n, n_lanes, least, most, bottom, top)
        d, ls = load_floats(s + _D), load_floats(s + _LS)
        write_codes(s, codes, first, n, d * ls, splat(ZERO), splat(bottom), splat(top))
        write_lanes(s, scales, first, ls)
        write_lanes(s, factors, first, d)


# ---- sixteen levels that are not evenly spaced

LEVELS = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)
_MIDDLES = (LEVELS[1:] + LEVELS[:-1]) / TWO
_GAPS = np.diff(LEVELS)


@inline
def nearest_level(y):
    """The level nearest to y."""
    level = splat(LEVELS[0])
    for t in range(15):
        level = level + float_of_bits(bits_of(splat(_GAPS[t])) & less(splat(_MIDDLES[t]), y))
    return level


@inline
def try_levels(s, n, d):
    """As `try_scale`."""
    inverse = safe_inverse(d)
    sqq = srq = srr = splat(ZERO)
    for i in range(n):
        x, w = load_floats(s + _X + i * 64), load_floats(s + _W + i * 64)
        q = nearest_level(x * inverse)
        r = x - d * q
        wq = w * q
        sqq, srq, srr = fma(wq, q, sqq), fma(wq, r, srq), fma(w * r, r, srr)
    dd = srq / maximum(sqq, splat(_TINY))
    keep_better(s, d + dd, splat(ZERO), srr - dd * srq)


@kernel
def quantize_levels(x, importance, codes, scales, scratch):
    """Groups of 32 of the levels above with a float16 scale of their own (IQ4_NL); codes are numbers of levels."""
    n, s = x.shape[1], scratch
    for first in range(0, x.shape[0], LANES):
        gather(s, x, importance, first, n)
        extreme = largest(s, n)
        store_floats(s + _SCALE, splat(ZERO))
        store_floats(s + _MINIMUM, splat(ZERO))
        store_floats(s + _ERROR, splat(_HUGE))
        for c in range(10):
            try_levels(s, n, extreme / splat(LEVELS[0] + TWO * np.float32(c - 2)))
            try_levels(s, n, extreme / splat(LEVELS[15] + TWO * np.float32(c - 7)))
        for _ in range(REFINEMENTS):
            try_levels(s, n, load_floats(s + _SCALE))
        d = to_half(s + _HALF, load_floats(s + _SCALE))
        inverse = safe_inverse(d)
        for i in range(n):
            store_floats(s + _TEMP, load_floats(s + _X + i * 64) * inverse)
            for lane in range(min(LANES, x.shape[0] - first)):
                y, code = load_f32(s + _TEMP + lane * 4), 0
                for t in range(15):
                    code += y > _MIDDLES[t]
                codes[first + lane, i] = np.uint8(code)
        write_lanes(s, scales, first, d)
