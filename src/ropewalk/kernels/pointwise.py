"""Everything between the matrix products: norms, activations, rotation, and quantizing activations into tiles.

All of it works lane by lane or reduces by the fixed tree of `simd`, so the bits depend on nothing but the
values. Arguments are addresses. The layout of a tile of activations is in `kernels.matmul`.
"""

import numpy as np

from ropewalk.kernels.definition import FINE_TOKEN_GROUP_BYTES, SMALLEST, TOKEN_GROUP_BYTES
from ropewalk.kernels.jit import inline
from ropewalk.kernels.rows import ROWS, TILE_ROWS, quantize_rows, quantize_rows_fine, stack, sum_rows
from ropewalk.kernels.simd import (
    ROUNDER,
    absolute,
    bits_of,
    evens,
    float_of_bits,
    fma,
    load_f32,
    load_floats,
    max_lane,
    maximum,
    minimum,
    odds,
    round_to_ints,
    splat,
    square_root,
    store_f32,
    store_floats,
    store_i8_of_ints,
    store_i32,
    sum_ints,
    sum_tree,
    zero_below,
    zip_high,
    zip_low,
)

_ROUNDER, _SMALLEST = np.float32(ROUNDER), np.float32(SMALLEST)
_ROUNDER_BITS = np.int64(_ROUNDER.view(np.int32))
ZERO, ONE, TWO, HALF = (np.float32(x) for x in (0, 1, 2, 0.5))
SILU, GELU_TANH, GELU, RELU2, SWIGLU_OAI = range(5)

# exp: range reduction by powers of two and the degree-6 polynomial of Cephes' expf.
_LOG2E = np.float32(1.44269504088896341)
_LN2_HIGH, _LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
_C5, _C4, _C3 = np.float32(1.9875691500e-4), np.float32(1.3981999507e-3), np.float32(8.3334519073e-3)
_C2, _C1, _C0 = np.float32(4.1665795894e-2), np.float32(1.6666665459e-1), np.float32(5.0000001201e-1)
_EXP_MAX, _EXP_MIN = np.float32(88.0), np.float32(-87.0)

# gelu: sqrt(2 / pi) and the cubic term of the tanh form (Hendrycks & Gimpel, 2016).
_GELU_SCALE, _GELU_CUBE = np.float32(0.79788456080286535588), np.float32(0.044715)

_SQRT_HALF, _SIGN = np.float32(0.70710678118654752), np.int64(-0x80000000)
_ERF_P = np.float32(0.3275911)
_ERF_1, _ERF_2, _ERF_3 = np.float32(0.254829592), np.float32(-0.284496736), np.float32(1.421413741)
_ERF_4, _ERF_5 = np.float32(-1.453152027), np.float32(1.061405429)
_OAI_ALPHA, _OAI_BOUND = np.float32(1.702), np.float32(7)


@inline
def exp(x):
    """e^x within 2 ulp for x <= 88, where it saturates; below -87 exactly 0."""
    clamped = minimum(x, splat(_EXP_MAX))
    whole = clamped * _LOG2E + _ROUNDER
    n = whole - _ROUNDER
    r = fma(n, splat(-_LN2_HIGH), clamped)
    r = fma(n, splat(-_LN2_LOW), r)
    p = fma(splat(_C5), r, splat(_C4))
    p = fma(p, r, splat(_C3))
    p = fma(p, r, splat(_C2))
    p = fma(p, r, splat(_C1))
    p = fma(p, r, splat(_C0))
    p = fma(p, r * r, r + ONE)
    power = float_of_bits(
        bits_of(p) + (bits_of(whole) << 23)
    )  # p * 2^n: a normal number, where x is not below
    return zero_below(x, _EXP_MIN, power)


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
def erf(x):
    """The error function within 5e-7 (Abramowitz & Stegun 1964, 7.1.26)."""
    size = absolute(x)
    t = splat(ONE) / fma(size, splat(_ERF_P), splat(ONE))
    p = fma(splat(_ERF_5), t, splat(_ERF_4))
    p = fma(p, t, splat(_ERF_3))
    p = fma(p, t, splat(_ERF_2))
    p = fma(p, t, splat(_ERF_1))
    y = maximum(splat(ONE) - p * t * exp(splat(ZERO) - size * size), splat(ZERO))
    return float_of_bits(bits_of(y) | (bits_of(x) & _SIGN))


@inline
def activate(gate, up, kind):
    """activation(gate) * up; the last kind is gpt-oss's, which bounds both."""
    if kind == GELU_TANH:
        return gelu_tanh(gate) * up
    if kind == GELU:
        return gate * HALF * (erf(gate * _SQRT_HALF) + ONE) * up
    if kind == RELU2:
        positive = maximum(gate, splat(ZERO))
        return positive * positive * up
    if kind == SWIGLU_OAI:
        g, u = minimum(gate, splat(_OAI_BOUND)), maximum(minimum(up, splat(_OAI_BOUND)), splat(-_OAI_BOUND))
        return g / (exp(g * -_OAI_ALPHA) + ONE) * (u + ONE)
    return silu(gate) * up


@inline
def norm_factors(x, n, eps, centred):
    """Mean (0 unless `centred`) and 1 / sqrt(mean of squares + eps) of what is left without it, of n floats."""
    mean = ZERO
    if centred:
        total = splat(ZERO)
        for i in range(0, n, 16):
            total = total + load_floats(x + 4 * i)
        mean = sum_tree(total) / np.float32(n)
    squares = splat(ZERO)
    for i in range(0, n, 16):
        v = load_floats(x + 4 * i) - mean
        squares = fma(v, v, squares)
    return mean, ONE / np.sqrt(sum_tree(squares) / np.float32(n) + eps)


@inline
def normed(at, i, norm, mean, scale):
    """Sixteen floats from the i-th on, normalised; `norm` is (address of the weights, of the bias or 0, centred)."""
    v = (load_floats(at + 4 * i) - mean) * scale * load_floats(norm[0] + 4 * i)
    if norm[1] != 0:
        return v + load_floats(norm[1] + 4 * i)
    return v


@inline
def normalise_floats(x, norm, n, eps):
    """LayerNorm or RMS norm of n floats in place."""
    mean, scale = norm_factors(x, n, eps, norm[2] != 0)
    for i in range(0, n, 16):
        store_floats(x + 4 * i, normed(x, i, norm, mean, scale))


@inline
def round_within(x, limit):
    """Integers from -limit to limit, half to even; NaN becomes a limit. They only hold off rounding errors."""
    return round_to_ints(minimum(maximum(x, splat(-limit)), splat(limit)))


@inline
def _round(x):
    """x_q, half to even; of NaN any integer."""
    return bits_of(x + _ROUNDER) - _ROUNDER_BITS


@inline
def quantize_group(a, b, at, tile, token):
    """Put 32 activations (two vectors) into a tile's group as int8: x_q = round(x / s), s = max|x| / 127."""
    largest = max_lane(maximum(absolute(a), absolute(b)))
    inverse = np.float32(127) / largest if largest > _SMALLEST else ZERO
    qa, qb = _round(a * inverse), _round(b * inverse)
    store_i8_of_ints(at + 32 * token, qa)
    store_i8_of_ints(at + 32 * token + 16, qb)
    _put_fields(at + 32 * tile + 4 * token, 4 * tile, largest / np.float32(127), sum_ints(qa), sum_ints(qb))


@inline
def quantize_group_fine(a, b, at, tile, token):
    """The same with 16 bits, s = max|x| / 32512: x_q = 256 * high + low, and both parts are signed bytes."""
    largest = max_lane(maximum(absolute(a), absolute(b)))
    inverse = np.float32(32512) / largest if largest > _SMALLEST else ZERO
    qa, qb = _round(a * inverse), _round(b * inverse)
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
def put_group(a, b, to, fine, group):
    """Put 32 activations of a token into the tile(s) that the next products read.

    `to` says where: addresses of the tile of bytes and of that of floats (0 means not wanted), their size, its place.
    """
    as_bytes, as_floats, tile, token = to
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
def norm_to_tile(x, norm, n, eps, fine, to):
    """Normalise one token's n floats, unless there are no weights, and put them into tiles."""
    mean, scale = ZERO, ONE
    if norm[0] != 0:
        mean, scale = norm_factors(x, n, eps, norm[2] != 0)
    for g in range(n // 32):
        a, b = load_floats(x + 128 * g), load_floats(x + 128 * g + 64)
        if norm[0] != 0:
            a, b = normed(x, 32 * g, norm, mean, scale), normed(x, 32 * g + 16, norm, mean, scale)
        put_group(a, b, to, fine, g)


@inline
def put_rows(rows, stride, to, fine, group, groups):
    """`put_group` for 16 tokens, whose 32 activations lie `stride` bytes apart; `to` is the first one's."""
    as_bytes, as_floats, tile, place = to
    if as_bytes != 0:
        size = tile * (FINE_TOKEN_GROUP_BYTES if fine else TOKEN_GROUP_BYTES)
        if fine:
            quantize_rows_fine(rows, stride, as_bytes + size * group, tile, place, size * groups)
        else:
            quantize_rows(rows, stride, as_bytes + size * group, tile, place, size * groups)
    if as_floats != 0:
        for r in range(ROWS):
            token = (r // TILE_ROWS * groups + group) * tile + place + r % TILE_ROWS
            store_floats(as_floats + 128 * token, load_floats(rows + stride * r))
            store_floats(as_floats + 128 * token + 64, load_floats(rows + stride * r + 64))


def _make_activate_rows(activation):
    @inline
    def activate_rows(gate, up, stride, n, out):
        """activation(gate) * up of 32 floats of each of n rows, `stride` bytes apart; those of `out` touch."""
        for r in range(n):
            for i in (0, 64):
                at = stride * r + i
                store_floats(out + 128 * r + i, activation(load_floats(gate + at)) * load_floats(up + at))

    return activate_rows


silu_rows, gelu_tanh_rows = _make_activate_rows(silu), _make_activate_rows(gelu_tanh)


@inline
def norm_rows(x, norm, n, eps, fine, to):
    """`norm_to_tile` for 16 tokens; `to` is as in `put_rows`."""
    groups = n // 32
    if norm[0] == 0:
        for g in range(groups):
            put_rows(x + 128 * g, 4 * n, to, fine, g, groups)
        return
    sums, means, scales, rows = stack(1024), stack(64), stack(64), stack(2048)
    mean = splat(ZERO)
    if norm[2] != 0:
        for r in range(ROWS):
            total = splat(ZERO)
            for i in range(0, n, 16):
                total = total + load_floats(x + 4 * (n * r + i))
            store_floats(sums + 64 * r, total)
        mean = sum_rows(sums) / splat(np.float32(n))
    store_floats(means, mean)
    for r in range(ROWS):
        squares, mean_r = splat(ZERO), splat(load_f32(means + 4 * r))
        for i in range(0, n, 16):
            v = load_floats(x + 4 * (n * r + i)) - mean_r
            squares = fma(v, v, squares)
        store_floats(sums + 64 * r, squares)
    store_floats(scales, splat(ONE) / square_root(sum_rows(sums) / splat(np.float32(n)) + eps))
    for g in range(groups):
        for r in range(ROWS):
            mean_r, scale = load_f32(means + 4 * r), load_f32(scales + 4 * r)
            for i in (0, 16):
                store_floats(rows + 128 * r + 4 * i, normed(x + 4 * n * r, 32 * g + i, norm, mean_r, scale))
        put_rows(rows, 128, to, fine, g, groups)


@inline
def pair_of(x, i, half, neighbours):
    """Addresses of the two floats at x that the i-th of `half` angles turns."""
    return (x + 8 * i, x + 8 * i + 4) if neighbours else (x + 4 * i, x + 4 * (i + half))


@inline
def rotate(x, cos, sin, width, neighbours):
    """Rotate the first `width` floats in place by the angles whose cosines and sines are given (width / 2 each)."""
    half = width // 2
    whole = half // 16 * 16
    for i in range(0, whole, 16):
        c, s = load_floats(cos + 4 * i), load_floats(sin + 4 * i)
        if neighbours:
            a, b = load_floats(x + 8 * i), load_floats(x + 8 * i + 64)
            x0, x1 = evens(a, b), odds(a, b)
            y0, y1 = x0 * c - x1 * s, x1 * c + x0 * s
            store_floats(x + 8 * i, zip_low(y0, y1))
            store_floats(x + 8 * i + 64, zip_high(y0, y1))
        else:
            first, second = x + 4 * i, x + 4 * (i + half)
            x0, x1 = load_floats(first), load_floats(second)
            store_floats(first, x0 * c - x1 * s)
            store_floats(second, x1 * c + x0 * s)
    for i in range(whole, half):
        first, second = pair_of(x, i, half, neighbours)
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
def add_scaled(x, y, factor, n):
    """x += y * factor for n floats; n is a multiple of 16."""
    for i in range(0, n, 16):
        store_floats(x + 4 * i, load_floats(x + 4 * i) + load_floats(y + 4 * i) * factor)


@inline
def scale_by(x, factor, n):
    """x *= factor for n floats; n is a multiple of 16."""
    for i in range(0, n, 16):
        store_floats(x + 4 * i, load_floats(x + 4 * i) * factor)


@inline
def soft_cap(x, cap):
    """cap * tanh(x / cap) (Gemma 2), lane by lane."""
    return tanh(x / splat(cap)) * cap
