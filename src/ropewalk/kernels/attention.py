"""Attention over pages: one token's queries of one KV head against its sequence's cached keys and values.

A page holds 16 tokens. For each layer and KV head the keys of all pages lie one page after the other, then the values
of all pages, because the hardware's prefetcher follows long streams only. Of one head a page holds:

    float16   keys [head_dim, 16 tokens], already rotated; values [head_dim / 16, 16 tokens, 16]
    int8      keys [head_dim / 4, 16 tokens, 4], raised by 128; values [head_dim / 16, 16 tokens, 16];
              and, in an array of their own, one float32 scale for each token, [16], of the keys and of the values

so that lanes are tokens for the scores and dimensions for the sums. The G query heads of a group share every read.
For an int8 cache the queries become 16-bit integers, as activations do in `kernels.matmul`, and a score is an exact
integer sum times both scales.

The context is worked through in partitions of 256 tokens at absolute positions; each gives a partial result, for
each head PARTIAL_FIELDS floats (maximum, sum of exponentials, then unused) and its weighted sum of values
[head_dim]. `merge` adds partials up in ascending order (online softmax, Milakov & Gimelshein 2018), at once or after
other threads have computed some of them: which tokens share a step, and who computes them, changes no bit.
"""

from functools import cache

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ropewalk.kernels.cpu import choose_rung
from ropewalk.kernels.dot import emit_dot4
from ropewalk.kernels.jit import inline, worker
from ropewalk.kernels.pointwise import exp, soft_cap
from ropewalk.kernels.simd import (
    F32,
    I32,
    I64,
    absolute,
    bytes64,
    emit_fma,
    emit_load,
    emit_splat,
    floats,
    ints,
    keep_lanes,
    load_bytes,
    load_f32,
    load_floats,
    load_halfs,
    load_i8_as_ints,
    load_i32,
    load_u16,
    max_lane,
    maximum,
    round_to_ints,
    splat,
    store_f32,
    store_floats,
    store_halfs,
    store_i8_of_ints,
    store_i32,
    store_u16,
    sum_ints,
    sum_tree,
    tile_of,
    to_floats,
    zero_ints_tile,
    zero_tile,
)

PAGE = 16
PARTITION = 256
MAX_GROUP = 8  # query heads that one pass serves; larger groups take several passes
PARTIAL_FIELDS = 16
SCORES_BYTES = 4 * MAX_GROUP * PARTITION  # of scratch, for one thread
_MINUS_INFINITY = np.float32(-np.inf)
_ZERO = np.float32(0)


@intrinsic
def fma_rows(typing_context, acc, vector, address, stride):
    """acc[g] += vector * (the float at address + g * stride), for each row g of a tile."""

    def emit(context, builder, sig, args):
        acc, vector, address, stride = args
        for g in range(sig.args[0].count):
            scalar = emit_load(builder, F32, builder.add(address, builder.mul(stride, I64(g))), 4)
            row = emit_fma(
                builder, emit_splat(builder, floats, scalar), vector, builder.extract_value(acc, g)
            )
            acc = builder.insert_value(acc, row, g)
        return acc

    return acc(acc, floats, types.int64, types.int64), emit


@intrinsic
def add_tiles(typing_context, a, b):
    def emit(context, builder, sig, args):
        total = ir.Constant(args[0].type, ir.Undefined)
        for g in range(sig.args[0].count):
            row = builder.fadd(builder.extract_value(args[0], g), builder.extract_value(args[1], g))
            total = builder.insert_value(total, row, g)
        return total

    return a(a, b), emit


@intrinsic
def store_rows(typing_context, tile, address, stride):
    """Store each row of a tile, `stride` bytes apart."""

    def emit(context, builder, sig, args):
        for g in range(sig.args[0].count):
            at = builder.add(args[1], builder.mul(args[2], I64(g)))
            builder.store(
                builder.extract_value(args[0], g), builder.inttoptr(at, floats.ir.as_pointer())
            ).align = 4
        return context.get_dummy_value()

    return types.void(tile, types.int64, types.int64), emit


SCALES_BYTES = 4 * PAGE  # of the keys, or the values, of one head in one page


def head_page_bytes(head_dim: int, quantized: bool) -> int:
    """Bytes of the keys, or of the values, of one head in one page, scales aside."""
    return PAGE * head_dim * (1 if quantized else 2)


def head_passes(group: int) -> tuple[int, int]:
    """Query heads of a KV head that a full pass serves, and those of the last pass."""
    full = -(-group // -(-group // MAX_GROUP))
    return full, group % full or full


def partial_bytes(head_dim: int) -> int:
    """Bytes of one head's part of a partial result."""
    return 4 * (PARTIAL_FIELDS + head_dim)


def query_bytes(head_dim: int) -> int:
    """Bytes of one query head as 16-bit integers: high bytes, low bytes, then scale, two sums, and padding."""
    return 2 * head_dim + 16


@inline
def exp_of(x):
    """e^x of one float32."""
    return max_lane(exp(splat(x)))


@inline
def _largest(x, n):
    """The greatest magnitude of n floats."""
    largest = splat(_ZERO)
    for d in range(0, n, 16):
        largest = maximum(absolute(load_floats(x + 4 * d)), largest)
    return max_lane(largest)


@intrinsic
def dot_rows(typing_context, acc, keys, address, stride):
    """acc[g] += the sums of four products of key bytes and the four query bytes at address + g * stride."""
    rung = choose_rung().name

    def emit(context, builder, sig, args):
        acc, keys, address, stride = args
        for g in range(sig.args[0].count):
            four = emit_load(builder, I32, builder.add(address, builder.mul(stride, I64(g))))
            query = builder.bitcast(emit_splat(builder, ints, four), bytes64.ir)
            row = emit_dot4(builder, rung, builder.extract_value(acc, g), keys, query, True)
            acc = builder.insert_value(acc, row, g)
        return acc

    return acc(acc, bytes64, types.int64, types.int64), emit


@intrinsic
def join_dots(typing_context, high, low, fields, stride, key_scales):
    """Scores: (256 * high + low) * the query's scale * the keys' scales, after taking out what raised the keys.

    Fields of head g, at fields + g * stride: the query's scale (float32), and the sums of its high and of its low
    bytes (int32).
    """

    def emit(context, builder, sig, args):
        high, low, fields, stride, key_scales = args
        result = ir.Constant(ir.ArrayType(floats.ir, sig.args[0].count), ir.Undefined)
        for g in range(sig.args[0].count):
            at = builder.add(fields, builder.mul(stride, I64(g)))
            parts = []
            for part, offset in ((high, 4), (low, 8)):
                raised = builder.shl(emit_load(builder, I32, builder.add(at, I64(offset)), 4), I32(7))
                exact = builder.sub(builder.extract_value(part, g), emit_splat(builder, ints, raised))
                parts.append(builder.sitofp(exact, floats.ir))
            dot = emit_fma(builder, parts[0], floats.constant(256.0), parts[1])
            scale = emit_splat(builder, floats, emit_load(builder, F32, at, 4))
            result = builder.insert_value(result, builder.fmul(builder.fmul(dot, scale), key_scales), g)
        return result

    return tile_of(floats, high.count)(high, low, types.int64, types.int64, floats), emit


@inline
def put_query(q, head_dim, out):
    """One query head as 16-bit integers, 256 * high + low, both signed bytes; its scale, and the sums of each."""
    top = _largest(q, head_dim)
    inverse = np.float32(32512) / top if top > _ZERO else _ZERO
    sum_high, sum_low = np.int32(0), np.int32(0)
    for d in range(0, head_dim, 16):
        x = round_to_ints(load_floats(q + 4 * d) * inverse)
        store_i8_of_ints(out + d, (x + 128) >> 8)
        store_i8_of_ints(out + head_dim + d, x)
        sum_high += sum_ints(load_i8_as_ints(out + d))
        sum_low += sum_ints(load_i8_as_ints(out + head_dim + d))
    store_f32(out + 2 * head_dim, top / np.float32(32512))
    store_i32(out + 2 * head_dim + 4, sum_high)
    store_i32(out + 2 * head_dim + 8, sum_low)


@inline
def _softmax_partition(row, pages, low, high, cap):
    """Turn scores into exponentials relative to their maximum; gives the maximum and the sum of exponentials.

    `row` is the address of the scores of page 0 of the partition, `low` and `high` the visible tokens in it.
    """
    first, last = low // PAGE, pages
    top = splat(_MINUS_INFINITY)
    for page in range(first, last):
        s = load_floats(row + 64 * page)
        if cap > _ZERO:
            s = soft_cap(s, cap)
        s = keep_lanes(s, low - PAGE * page, high - PAGE * page, _MINUS_INFINITY)
        store_floats(row + 64 * page, s)
        top = maximum(s, top)
    m = max_lane(top)
    total = splat(_ZERO)
    for page in range(first, last):
        e = exp(load_floats(row + 64 * page) - m)
        store_floats(row + 64 * page, e)
        total = total + e
    return m, sum_tree(total)


@inline
def begin(out, state, group, head_dim):
    """Nothing merged yet: `out` float32 [group, head_dim] is 0, `state` [group, 2] a maximum of -inf and a sum of 0."""
    for g in range(group):
        store_f32(state + 8 * g, _MINUS_INFINITY)
        store_f32(state + 8 * g + 4, _ZERO)
        for d in range(0, head_dim, 16):
            store_floats(out + 4 * (head_dim * g + d), splat(_ZERO))


@inline
def merge(out, state, partial, group, head_dim):
    """Add a partial result to what is merged so far."""
    for g in range(group):
        at, new = state + 8 * g, partial + 4 * (PARTIAL_FIELDS + head_dim) * g
        top = max(load_f32(at), load_f32(new))
        keep, add = exp_of(load_f32(at) - top), exp_of(load_f32(new) - top)
        store_f32(at, top)
        store_f32(at + 4, load_f32(at + 4) * keep + load_f32(new + 4) * add)
        for d in range(0, head_dim, 16):
            row = out + 4 * (head_dim * g + d)
            store_floats(row, load_floats(row) * keep + load_floats(new + 4 * (PARTIAL_FIELDS + d)) * add)


@inline
def finish(out, state, group, head_dim):
    """Divide by the sums of exponentials."""
    for g in range(group):
        total = splat(load_f32(state + 8 * g + 4))
        for d in range(0, head_dim, 16):
            row = out + 4 * (head_dim * g + d)
            store_floats(row, load_floats(row) / total)


@cache
def attention_worker(group: int, quantized: int) -> int:
    """Address of the compiled worker for `group` query heads (1 to 8) that share a KV head, and the cache's type.

    It computes the partial result of one partition. Its arguments, all int64: address of the queries (float32 [group,
    head_dim], rotated and scaled; for an int8 cache what `put_query` made of them); addresses of the layer's and
    head's keys and values in page 0, and of their scales (int8 only); bytes between pages; address of the
    partition's part of the page table (int32); the first token of the partition that is seen, and the one after the
    last; head_dim; address of the soft cap (float32, 0 for none); address of the partial result; address of scratch.
    """
    row = 4 * PARTITION

    @worker(types.void(*[types.int64] * 13))
    def attend(
        q, keys, values, k_scales, v_scales, page_bytes, table, low, high, head_dim, cap, partial, scores
    ):
        partial_stride = 4 * (PARTIAL_FIELDS + head_dim)
        query_stride = 2 * head_dim + 16
        pages = (high + PAGE - 1) // PAGE
        for page in range(low // PAGE, pages):
            number = load_i32(table + 4 * page)
            k = keys + number * page_bytes
            if quantized:
                above, below = zero_ints_tile(group), zero_ints_tile(group)
                for d in range(0, head_dim, 4):
                    four = load_bytes(k + 16 * d)
                    above = dot_rows(above, four, q + d, query_stride)
                    below = dot_rows(below, four, q + head_dim + d, query_stride)
                s = join_dots(
                    above,
                    below,
                    q + 2 * head_dim,
                    query_stride,
                    load_floats(k_scales + number * SCALES_BYTES),
                )
            else:
                even, odd = zero_tile(group), zero_tile(group)
                for d in range(0, head_dim, 2):
                    even = fma_rows(even, load_halfs(k + 32 * d), q + 4 * d, 4 * head_dim)
                    odd = fma_rows(odd, load_halfs(k + 32 * d + 32), q + 4 * d + 4, 4 * head_dim)
                s = add_tiles(even, odd)
            store_rows(s, scores + 64 * page, row)
        for g in range(group):
            m, total = _softmax_partition(scores + row * g, pages, low, high, load_f32(cap))
            store_f32(partial + partial_stride * g, m)
            store_f32(partial + partial_stride * g + 4, total)
            if quantized:  # a value's scale multiplies its weight
                for page in range(low // PAGE, pages):
                    scale = load_floats(v_scales + load_i32(table + 4 * page) * SCALES_BYTES)
                    weights = scores + row * g + 64 * page
                    store_floats(weights, load_floats(weights) * scale)
        for c in range(head_dim // 16):
            acc = zero_tile(group)
            for page in range(low // PAGE, pages):
                v = values + load_i32(table + 4 * page) * page_bytes
                for token in range(max(low, PAGE * page), min(high, PAGE * page + PAGE)):
                    if quantized:
                        sixteen = to_floats(load_i8_as_ints(v + 16 * (PAGE * c + token - PAGE * page)))
                    else:
                        sixteen = load_halfs(v + 32 * (PAGE * c + token - PAGE * page))
                    acc = fma_rows(acc, sixteen, scores + 4 * token, row)
            store_rows(acc, partial + 4 * PARTIAL_FIELDS + 64 * c, partial_stride)

    return attend


# ---- writing a token's keys and values


@inline
def put_key(page, slot, x, head_dim):
    """A key's floats to lane `slot` of a float16 page; the floats at x are used up."""
    for d in range(0, head_dim, 16):
        store_halfs(x + 4 * d, load_floats(x + 4 * d))
        for i in range(16):
            store_u16(page + 2 * (PAGE * (d + i) + slot), load_u16(x + 4 * d + 2 * i))


@inline
def put_value(page, slot, x, head_dim):
    """A value's floats to row `slot` of each chunk of a float16 page."""
    for d in range(0, head_dim, 16):
        store_halfs(page + 32 * (d + slot), load_floats(x + 4 * d))


@inline
def put_key_int8(page, scales, slot, x, head_dim):
    """A key as signed bytes raised by 128, four dimensions together, and its scale; the floats at x are used up."""
    top = _largest(x, head_dim)
    inverse = np.float32(127) / top if top > _ZERO else _ZERO
    store_f32(scales + 4 * slot, top / np.float32(127))
    for d in range(0, head_dim, 16):
        store_i8_of_ints(x + 4 * d, round_to_ints(load_floats(x + 4 * d) * inverse) + 128)
        for i in range(0, 16, 4):
            store_i32(page + 16 * (d + i) + 4 * slot, load_i32(x + 4 * d + i))


@inline
def put_value_int8(page, scales, slot, x, head_dim):
    """A value as signed bytes in row `slot` of each chunk, and its scale."""
    top = _largest(x, head_dim)
    inverse = np.float32(127) / top if top > _ZERO else _ZERO
    store_f32(scales + 4 * slot, top / np.float32(127))
    for d in range(0, head_dim, 16):
        store_i8_of_ints(page + 16 * (d + slot), round_to_ints(load_floats(x + 4 * d) * inverse))
