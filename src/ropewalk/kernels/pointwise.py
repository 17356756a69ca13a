"""Everything between the matrix products: norms, activations, rotation, and quantizing activations into tiles.

All of it works lane by lane or reduces by the fixed tree of `simd`, so the bits depend on nothing but the
values. Arguments are addresses. The layout of a tile of activations is in `kernels.matmul`.
"""

import numpy as np

from ropewalk.kernels.jit import inline
from ropewalk.kernels.simd import (
    absolute,
    bits_of,
    float_of_bits,
    fma,
    load_f32,
    load_floats,
    max_lane,
    maximum,
    minimum,
    round_to_ints,
    splat,
    store_f32,
    store_floats,
    store_i8_of_ints,
    store_i32,
    sum_ints,
    sum_tree,
    to_floats,
)

ZERO, ONE, TWO, HALF = (np.float32(x) for x in (0, 1, 2, 0.5))
SILU, GELU_TANH = 0, 1

# exp: range reduction by powers of two and the degree-6 polynomial of Cephes' expf.
_LOG2E = np.float32(1.44269504088896341)
_LN2_HIGH, _LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
_C5, _C4, _C3 = np.float32(1.9875691500e-4), np.float32(1.3981999507e-3), np.float32(8.3334519073e-3)
_C2, _C1, _C0 = np.float32(4.1665795894e-2), np.float32(1.6666665459e-1), np.float32(5.0000001201e-1)
_EXP_MAX, _EXP_MIN = np.float32(88.0), np.float32(-87.0)

# gelu: sqrt(2 / pi) and the cubic term of the tanh form (Hendrycks & Gimpel, 2016).
_GELU_SCALE, _GELU_CUBE = np.float32(0.79788456080286535588), np.float32(0.044715)


@inline
def exp(x):
    """e^x within 2 ulp for x <= 88, where it saturates; below -87 exactly 0."""
    clamped = maximum(minimum(x, splat(_EXP_MAX)), splat(_EXP_MIN))
    whole = round_to_ints(clamped * _LOG2E)
    n = to_floats(whole)
    r = fma(n, splat(-_LN2_HIGH), clamped)
    r = fma(n, splat(-_LN2_LOW), r)
    p = fma(splat(_C5), r, splat(_C4))
    p = fma(p, r, splat(_C3))
    p = fma(p, r, splat(_C2))
    p = fma(p, r, splat(_C1))
    p = fma(p, r, splat(_C0))
    p = fma(p, r * r, r + ONE)
    power = float_of_bits((whole + 127) << 23)
    return zero_below(x, _EXP_MIN, p * power)


@inline
def zero_below(x, limit, value):
    """`value` where x >= limit, else 0: min(1, max(0, ...)) of a step, in lanes."""
    step = bits_of(x - limit) >> 31  # 1 where x < limit
    return float_of_bits(bits_of(value) & (step - 1))


@inline
def silu(x):
    return x / (exp(splat(ZERO) - x) + ONE)


@inline
def tanh(x):
    return splat(ONE) - splat(TWO) / (exp(x * TWO) + ONE)


@inline
def gelu_tanh(x):
    inner = fma(x * x * x, splat(_GELU_CUBE), x) * _GELU_SCALE
    return x * HALF * (tanh(inner) + ONE)


@inline
def inverse_rms(x, n, eps):
    """1 / sqrt(mean of squares + eps) of n floats; n is a multiple of 16."""
    squares = splat(ZERO)
    for i in range(0, n, 16):
        v = load_floats(x + 4 * i)
        squares = fma(v, v, squares)
    return ONE / np.sqrt(sum_tree(squares) / np.float32(n) + eps)


@inline
def rms_norm(x, weight, out, n, eps):
    """out = x * inverse_rms(x) * weight, for n floats."""
    scale = inverse_rms(x, n, eps)
    for i in range(0, n, 16):
        store_floats(out + 4 * i, load_floats(x + 4 * i) * scale * load_floats(weight + 4 * i))


@inline
def round_within(x, limit):
    """Integers from -limit to limit, half to even; NaN becomes a limit. They only hold off rounding errors."""
    return round_to_ints(minimum(maximum(x, splat(-limit)), splat(limit)))


@inline
def quantize_group(a, b, at, tile, token):
    """Put 32 activations (two vectors) into a tile's group as int8: x_q = round(x / s), s = max|x| / 127."""
    largest = max_lane(maximum(absolute(a), absolute(b)))
    inverse = np.float32(127) / largest if largest > ZERO else ZERO
    qa, qb = round_within(a * inverse, np.float32(127)), round_within(b * inverse, np.float32(127))
    store_i8_of_ints(at + 32 * token, qa)
    store_i8_of_ints(at + 32 * token + 16, qb)
    _put_fields(at + 32 * tile + 4 * token, 4 * tile, largest / np.float32(127), sum_ints(qa), sum_ints(qb))


@inline
def quantize_group_fine(a, b, at, tile, token):
    """The same with 16 bits, s = max|x| / 32512: x_q = 256 * high + low, and both parts are signed bytes."""
    largest = max_lane(maximum(absolute(a), absolute(b)))
    inverse = np.float32(32512) / largest if largest > ZERO else ZERO
    qa, qb = round_within(a * inverse, np.float32(32512)), round_within(b * inverse, np.float32(32512))
    high, low = at + 32 * token, at + 32 * (tile + token)
    store_i8_of_ints(high, (qa + 128) >> 8)
    store_i8_of_ints(high + 16, (qb + 128) >> 8)
    store_i8_of_ints(low, qa)
    store_i8_of_ints(low + 16, qb)
    _put_fields(at + 64 * tile + 4 * token, 4 * tile, largest / np.float32(32512), sum_ints(qa), sum_ints(qb))


@inline
def _put_fields(at, stride, s, sum_a, sum_b):
    store_f32(at, s)
    store_f32(at + stride, s * np.float32(sum_a + sum_b))
    store_i32(at + 2 * stride, -sum_a)
    store_i32(at + 3 * stride, -sum_b)


@inline
def put_group(a, b, as_bytes, fine, as_floats, tile, token, group):
    """Put 32 activations into the tile(s) that the next products read; an address of 0 means not wanted."""
    if as_bytes != 0:
        if fine:
            quantize_group_fine(a, b, as_bytes + group * tile * 80, tile, token)
        else:
            quantize_group(a, b, as_bytes + group * tile * 48, tile, token)
    if as_floats != 0:
        at = as_floats + (group * tile + token) * 128
        store_floats(at, a)
        store_floats(at + 64, b)


@inline
def norm_to_tile(x, weight, n, eps, as_bytes, fine, as_floats, tile, token):
    """RMS-normalise one token's n floats and put them into tiles."""
    scale = inverse_rms(x, n, eps)
    for g in range(n // 32):
        at = 128 * g
        a = load_floats(x + at) * scale * load_floats(weight + at)
        b = load_floats(x + at + 64) * scale * load_floats(weight + at + 64)
        put_group(a, b, as_bytes, fine, as_floats, tile, token, g)


@inline
def rotate(x, cos, sin, width, neighbours):
    """Rotate the first `width` floats in place by the angles whose cosines and sines are given (width / 2 each)."""
    half = width // 2
    for i in range(half):
        first, second = (x + 8 * i, x + 8 * i + 4) if neighbours else (x + 4 * i, x + 4 * (i + half))
        c, s = load_f32(cos + 4 * i), load_f32(sin + 4 * i)
        x0, x1 = load_f32(first), load_f32(second)
        store_f32(first, x0 * c - x1 * s)
        store_f32(second, x1 * c + x0 * s)


@inline
def add_to(x, y, n):
    """x += y for n floats; n is a multiple of 16."""
    for i in range(0, n, 16):
        store_floats(x + 4 * i, load_floats(x + 4 * i) + load_floats(y + 4 * i))


@inline
def scale_by(x, factor, n):
    """x *= factor for n floats; n is a multiple of 16."""
    for i in range(0, n, 16):
        store_floats(x + 4 * i, load_floats(x + 4 * i) * factor)


@inline
def soft_cap(x, cap):
    """cap * tanh(x / cap) (Gemma 2), lane by lane."""
    return tanh(x / splat(cap)) * cap
