"""Attention over a cache that holds one vector a token, of which keys and values are made: `kernels.latent`.

The key is all of the vector, [rotated part, c], the value its end, c. It is stored once, as `kernels.pages` stores
keys: lanes are tokens, for the scores and for the sums too, so a weighted sum is made lane by lane, page after page,
and its 16 lanes are added up by a fixed tree at the end of a partition. Of a token a page holds:

    float16   [head_dim, 16 tokens]
    int8      [head_dim / 4, 16 tokens, 4], raised by 128; one float32 scale for the rotated part and one for c, in the
              places where other caches have those of keys and of values

A score of an int8 cache is the sum of two exact integer sums, each times its scale. A token that a row does not see has
the weight 0 and is not touched by it, whatever stands there. Queries, partitions and partial results are those of
`kernels.attention`; a partial result is `head_dim` wide and begins with zeros in place of the rotated part.
"""

from functools import cache

import numpy as np
from numba import types
from numba.extending import intrinsic

from ropewalk.kernels.attention import (
    PARTIAL_FIELDS,
    PARTITION,
    add_tiles,
    dot_rows,
    fma_rows,
    join_dots,
    softmax_partition,
    store_rows,
    visible,
)
from ropewalk.kernels.jit import inline, worker
from ropewalk.kernels.pages import PAGE, SCALES_BYTES, put_key_int8, put_query_int8
from ropewalk.kernels.simd import (
    I64,
    emit_fma,
    emit_load,
    emit_sum_tree,
    floats,
    keep_lanes,
    load_bytes,
    load_f32,
    load_floats,
    load_halfs,
    load_i32,
    load_ints,
    splat,
    store_f32,
    store_floats,
    to_floats,
    zero_ints_tile,
    zero_tile,
)

_ZERO = np.float32(0)


@inline
def value_offset(rope, quantized):
    """Bytes from where a page begins to where its values do."""
    return PAGE * rope * (1 if quantized else 2)


@inline
def put_latent_int8(page, rope_scales, scales, slot, x, rope, head_dim):
    """A vector and its two scales; the floats at x are used up."""
    put_key_int8(page, rope_scales, slot, x, rope)
    put_key_int8(page + value_offset(rope, True), scales, slot, x + 4 * rope, head_dim - rope)


@inline
def query_units(n):
    """Elements that n dimensions of an int8 query take in a row of its tile."""
    return n // 2 + 3


@inline
def put_latent_query_int8(q, rope, head_dim, out, step):
    """A query head's two parts, each as `attention.put_query_int8` puts a whole one; the floats at q are used up."""
    put_query_int8(q, rope, out, step)
    put_query_int8(q + 4 * rope, head_dim - rope, out + step * query_units(rope), step)


@inline
def _scores(zeros, k, q, step, n, scales):
    """Scores of the n dimensions that begin at `k` in a page and at `q` in the tile; `zeros` gives the tile's size."""
    above, below = zeros, zeros
    for d in range(n // 4):
        four = load_bytes(k + 64 * d)
        above = dot_rows(above, four, q + step * d)
        below = dot_rows(below, four, q + step * (n // 4 + d))
    return join_dots(above, below, q + step * (n // 2), step, scales)


@intrinsic
def fma_seen(typing_context, acc, x, weights, stride):
    """acc[g] += x * (the 16 weights at weights + g * stride), in lanes whose weight is not 0."""

    def emit(context, builder, sig, args):
        acc, x, weights, stride = args
        for g in range(sig.args[0].count):
            weight = emit_load(builder, floats.ir, builder.add(weights, builder.mul(stride, I64(g))), 4)
            row = builder.extract_value(acc, g)
            seen = builder.fcmp_unordered("!=", weight, floats.constant(0.0))
            acc = builder.insert_value(acc, builder.select(seen, emit_fma(builder, weight, x, row), row), g)
        return acc

    return acc(acc, floats, types.int64, types.int64), emit


@intrinsic
def store_sums(typing_context, tile, address, stride):
    """Store the sum of the lanes of each row of a tile, one float each, `stride` bytes apart."""

    def emit(context, builder, sig, args):
        tile, address, stride = args
        for g in range(sig.args[0].count):
            total = emit_sum_tree(builder, builder.extract_value(tile, g))
            at = builder.add(address, builder.mul(stride, I64(g)))
            builder.store(total, builder.inttoptr(at, total.type.as_pointer())).align = 4
        return context.get_dummy_value()

    return types.void(tile, types.int64, types.int64), emit


@inline
def _dimension(page, d, quantized):
    """Dimension d of the 16 tokens of a page; of an int8 cache without its scale."""
    if quantized:
        return to_floats((load_ints(page + 64 * (d // 4)) >> (8 * (d % 4))) & 255) - np.float32(128)
    return load_halfs(page + 32 * d)


@inline
def _weigh(weights, table, first, pages, low, high, scales, quantized):
    """A row's exponentials become the weights of its sums: 0 where it does not see, times scales of an int8 cache."""
    for page in range(first // PAGE, pages):
        at = weights + 64 * page
        if page < low // PAGE or page >= (high + PAGE - 1) // PAGE:
            store_floats(at, splat(_ZERO))
        elif quantized:
            scaled = load_floats(at) * load_floats(scales + load_i32(table + 4 * page) * SCALES_BYTES)
            store_floats(at, keep_lanes(scaled, low - PAGE * page, high - PAGE * page, _ZERO))


@cache
def latent_attention_worker(heads: int, tokens: int, quantized: int) -> int:
    """Address of the compiled worker; what it does and its arguments are those of `attention.attention_worker`.

    The address of the values is that of their first dimension in page 0: where the rotated part ends. Terms are not
    looked at: there are none.
    """
    rows, stride = heads * tokens, 4 * PARTITION

    @worker(types.void(*[types.int64] * 17))
    def attend_latent(
        q,
        step,
        keys,
        values,
        k_scales,
        v_scales,
        page_bytes,
        table,
        position,
        window,
        head_dim,
        cap,
        terms,
        turns,
        turn_bytes,
        partial,
        scores,
    ):
        partial_stride = 4 * (PARTIAL_FIELDS + head_dim)
        rope = (values - keys) // (PAGE * (1 if quantized else 2))
        first, _ = visible(position, window, 0)
        _, last = visible(position, window, tokens - 1)
        pages = (last + PAGE - 1) // PAGE
        for page in range(first // PAGE, pages):
            number = load_i32(table + 4 * page)
            k = keys + number * page_bytes
            if quantized:
                rope_scales = load_floats(k_scales + number * SCALES_BYTES)
                scales = load_floats(v_scales + number * SCALES_BYTES)
                rest = q + step * query_units(rope)
                s = add_tiles(
                    _scores(zero_ints_tile(rows), k, q, step, rope, rope_scales),
                    _scores(zero_ints_tile(rows), k + PAGE * rope, rest, step, head_dim - rope, scales),
                )
            else:
                even, odd = zero_tile(rows), zero_tile(rows)
                for d in range(0, head_dim, 2):
                    at = q + step * d
                    even = fma_rows(even, load_halfs(k + 32 * d), at, 4)
                    odd = fma_rows(odd, load_halfs(k + 32 * d + 32), at + step, 4)
                s = add_tiles(even, odd)
            store_rows(s, scores + 64 * page, stride)
        for row in range(rows):
            low, high = visible(position, window, row // heads)
            row_pages = (high + PAGE - 1) // PAGE
            m, total = softmax_partition(scores + stride * row, row_pages, low, high, load_f32(cap))
            store_f32(partial + partial_stride * row, m)
            store_f32(partial + partial_stride * row + 4, total)
            _weigh(scores + stride * row, table, first, pages, low, high, v_scales, quantized)
        sums = partial + 4 * PARTIAL_FIELDS
        for d in range(0, rope, 16):
            store_rows(zero_tile(rows), sums + 4 * d, partial_stride)
        for d in range(rope, head_dim, 2):
            even, odd = zero_tile(rows), zero_tile(rows)
            for page in range(first // PAGE, pages):
                k, weights = keys + load_i32(table + 4 * page) * page_bytes, scores + 64 * page
                even = fma_seen(even, _dimension(k, d, quantized), weights, stride)
                odd = fma_seen(odd, _dimension(k, d + 1, quantized), weights, stride)
            store_sums(even, sums + 4 * d, partial_stride)
            store_sums(odd, sums + 4 * d + 4, partial_stride)

    return attend_latent
