"""Attention over pages: one token's queries of one KV head against its sequence's cached keys and values.

A page holds 16 tokens. For each layer and KV head: keys float16 [head_dim, 16], lanes are tokens, already rotated;
values float16 [head_dim / 16, 16 tokens, 16], lanes are dimensions. The G query heads of a group share every read.

The context is worked through in partitions of 256 tokens at absolute positions; each gives a maximum, a sum of
exponentials and a weighted sum of values, and partitions are merged in ascending order (online softmax, Milakov &
Gimelshein 2018). Which tokens share a step, and who computes them, changes none of these sums.
"""

from functools import cache

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ropewalk.kernels.jit import inline, worker
from ropewalk.kernels.pointwise import exp, soft_cap
from ropewalk.kernels.simd import (
    F32,
    I64,
    emit_fma,
    emit_load,
    emit_splat,
    floats,
    keep_lanes,
    load_f32,
    load_floats,
    load_halfs,
    load_i32,
    max_lane,
    maximum,
    splat,
    store_f32,
    store_floats,
    sum_tree,
    zero_tile,
)

PAGE = 16
PARTITION = 256
MAX_GROUP = 8  # query heads that one pass serves; larger groups take several passes
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


def scratch_bytes(head_dim: int) -> int:
    """Bytes of scratch that one thread needs: scores of a partition, sums of values, and a few floats a head."""
    return 4 * MAX_GROUP * (PARTITION + head_dim + 16 + 4)


@inline
def exp_of(x):
    """e^x of one float32."""
    return max_lane(exp(splat(x)))


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


@cache
def attention_worker(group: int) -> int:
    """Address of the compiled worker for `group` query heads (1 to 8) that share a KV head.

    The worker's arguments, all int64: address of the queries (float32 [group, head_dim], rotated and scaled);
    addresses of the layer's and head's keys and values in page 0; bytes between pages; address of the page
    table (int32); the token's position; the first position it sees; head_dim; address of the soft cap (float32,
    0 for none); address of the output (float32 [group, head_dim]); address of scratch.
    """

    @worker(types.void(*[types.int64] * 11))
    def attend(q, keys, values, page_bytes, table, position, first, head_dim, cap, out, scratch):
        row_bytes = 4 * head_dim
        scores = scratch
        part = scores + 4 * PARTITION * MAX_GROUP  # values of one chunk of 16 dimensions [group, 16]
        state = part + 64 * MAX_GROUP  # per head: maximum, sum, and the two factors of a merge
        for g in range(group):
            store_f32(state + 16 * g, _MINUS_INFINITY)
            store_f32(state + 16 * g + 4, _ZERO)
            for c in range(0, head_dim, 16):
                store_floats(out + row_bytes * g + 4 * c, splat(_ZERO))
        for partition in range(first // PARTITION, position // PARTITION + 1):
            start = partition * PARTITION
            pages_of = table + 4 * (start // PAGE)
            low, high = max(first - start, 0), min(position + 1 - start, PARTITION)
            pages = (high + PAGE - 1) // PAGE
            for page in range(low // PAGE, pages):
                k = keys + load_i32(pages_of + 4 * page) * page_bytes
                even, odd = zero_tile(group), zero_tile(group)
                for d in range(0, head_dim, 2):
                    even = fma_rows(even, load_halfs(k + 32 * d), q + 4 * d, row_bytes)
                    odd = fma_rows(odd, load_halfs(k + 32 * d + 32), q + 4 * d + 4, row_bytes)
                store_rows(add_tiles(even, odd), scores + 64 * page, 4 * PARTITION)
            for g in range(group):
                m, total = _softmax_partition(scores + 4 * PARTITION * g, pages, low, high, load_f32(cap))
                at = state + 16 * g
                top = max(load_f32(at), m)
                old, new = exp_of(load_f32(at) - top), exp_of(m - top)
                store_f32(at, top)
                store_f32(at + 4, load_f32(at + 4) * old + total * new)
                store_f32(at + 8, old)
                store_f32(at + 12, new)
            for c in range(head_dim // 16):
                acc = zero_tile(group)
                for page in range(low // PAGE, pages):
                    v = values + load_i32(pages_of + 4 * page) * page_bytes + 512 * c
                    for token in range(max(low, PAGE * page), min(high, PAGE * page + PAGE)):
                        acc = fma_rows(
                            acc, load_halfs(v + 32 * (token - PAGE * page)), scores + 4 * token, 4 * PARTITION
                        )
                store_rows(acc, part, 64)
                for g in range(group):
                    at = out + row_bytes * g + 64 * c
                    old, new = load_f32(state + 16 * g + 8), load_f32(state + 16 * g + 12)
                    store_floats(at, load_floats(at) * old + load_floats(part + 64 * g) * new)
        for g in range(group):
            total = load_f32(state + 16 * g + 4)
            for c in range(0, head_dim, 16):
                at = out + row_bytes * g + 4 * c
                store_floats(at, load_floats(at) / splat(total))

    return attend
