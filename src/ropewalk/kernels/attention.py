"""Attention over pages: queries of one KV head against their sequence's cached keys and values.

A page holds 16 tokens. For each layer and KV head the keys of all pages lie one page after the other, then the values
of all pages, because the hardware's prefetcher follows long streams only. Of one head a page holds:

    float16   keys [head_dim, 16 tokens], already rotated; values [head_dim / 16, 16 tokens, 16]
    int8      keys [head_dim / 4, 16 tokens, 4], raised by 128; values [head_dim / 16, 16 tokens, 16];
              and, in an array of their own, one float32 scale for each token, [16], of the keys and of the values

so that lanes are tokens for the scores and dimensions for the sums. The query heads of a group share every read, and
in prefill those of several tokens that follow each other: together they are the rows of a query tile,

    float16   float32 [head_dim, rows], rotated and scaled
    int8      16-bit integers, as activations are in `kernels.matmul`: high bytes [head_dim / 4, rows, 4], low bytes
              likewise; then scales float32 [rows], and the sums of the high and of the low bytes int32 [rows]

where a score of an int8 cache is an exact integer sum times both scales.

A large bias would set the scale of an int8 key and leave few bits for what differs from token to token. So what a
rotary pair has in common for all keys may be missing in the cache (`backend.constant_keys` chooses), and its term is
added to the scores: with (r0, r1) that part, (q0, q1) the query's, and t the angle of the key's position,

    q . rotated(r) = cos t * (q0 r0 + q1 r1) + sin t * (q1 r0 - q0 r1)

The terms of a KV head are records of TERM_BYTES: the first begins with their number (int32), each other one is the
pair's number (int32) and r0, r1 (float32). A query's row ends with the two sums in brackets for each term, float32.

The context is worked through in partitions of 256 tokens at absolute positions; each gives a partial result, for
each head PARTIAL_FIELDS floats (maximum, sum of exponentials, then unused) and its weighted sum of values
[head_dim]. `merge` adds partials up in ascending order (online softmax, Milakov & Gimelshein 2018), at once or after
other threads have computed some of them: which tokens share a step or a tile, and who computes them, changes no bit.
"""

from functools import cache

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ropewalk.kernels.cpu import choose_rung
from ropewalk.kernels.dot import emit_dot4
from ropewalk.kernels.jit import inline, worker
from ropewalk.kernels.pointwise import exp, pair_of, round_within, soft_cap
from ropewalk.kernels.simd import (
    F32,
    I32,
    I64,
    absolute,
    bytes64,
    emit_fma,
    emit_load,
    emit_splat,
    first_lane,
    floats,
    fma,
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
    prefetch,
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
MAX_TILE_TOKENS = 8
PARTIAL_FIELDS = 16
_MINUS_INFINITY = np.float32(-np.inf)
_ZERO, _ONE = np.float32(0), np.float32(1)


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
def load_rows(typing_context, tile, address, stride):
    """What `store_rows` stored; of the tile that is given only the size counts."""

    def emit(context, builder, sig, args):
        result = ir.Constant(args[0].type, ir.Undefined)
        for g in range(sig.args[0].count):
            at = builder.add(args[1], builder.mul(args[2], I64(g)))
            result = builder.insert_value(result, emit_load(builder, floats.ir, at, 4), g)
        return result

    return tile(tile, types.int64, types.int64), emit


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


TERM_BYTES = 16  # of a constant part of keys
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


def tile_tokens(heads: int) -> int:
    """Tokens of a query tile for passes of `heads` heads: what the registers have room for."""
    rows = 14 if choose_rung().vectors == "vnni" else 4
    return max(1, min(rows // heads, MAX_TILE_TOKENS))


def scores_bytes(rows: int) -> int:
    """Bytes of scratch that a worker needs."""
    return 4 * PARTITION * rows


def query_row_bytes(head_dim: int) -> int:
    """Bytes of one row of a query tile, with as many terms as there can be."""
    return 4 * (head_dim + head_dim // 2 + 4)


@inline
def exp_of(x):
    """e^x of one float32."""
    return first_lane(exp(splat(x)))


@inline
def _largest(x, n):
    """The greatest magnitude of n floats."""
    largest = splat(_ZERO)
    for d in range(0, n, 16):
        largest = maximum(absolute(load_floats(x + 4 * d)), largest)
    return max_lane(largest)


@intrinsic
def dot_rows(typing_context, acc, keys, address):
    """acc[g] += the sums of four products of key bytes and the four query bytes at address + 4 * g."""
    rung = choose_rung().vectors

    def emit(context, builder, sig, args):
        acc, keys, address = args
        for g in range(sig.args[0].count):
            four = emit_load(builder, I32, builder.add(address, I64(4 * g)))
            query = builder.bitcast(emit_splat(builder, ints, four), bytes64.ir)
            row = emit_dot4(builder, rung, builder.extract_value(acc, g), keys, query, True)
            acc = builder.insert_value(acc, row, g)
        return acc

    return acc(acc, bytes64, types.int64), emit


@intrinsic
def join_dots(typing_context, high, low, fields, step, key_scales):
    """Scores: (256 * high + low) * the query's scale * the keys' scales, after taking out what raised the keys.

    Fields of row g at fields + 4 * g, `step` bytes apart: the query's scale (float32), and the sums of its high and of
    its low bytes (int32).
    """

    def emit(context, builder, sig, args):
        high, low, fields, step, key_scales = args
        result = ir.Constant(ir.ArrayType(floats.ir, sig.args[0].count), ir.Undefined)
        for g in range(sig.args[0].count):
            at = builder.add(fields, I64(4 * g))
            parts = []
            for part, place in ((high, 1), (low, 2)):
                field = builder.add(at, builder.mul(step, I64(place)))
                raised = builder.shl(emit_load(builder, I32, field, 4), I32(7))
                exact = builder.sub(builder.extract_value(part, g), emit_splat(builder, ints, raised))
                parts.append(builder.sitofp(exact, floats.ir))
            dot = emit_fma(builder, parts[0], floats.constant(256.0), parts[1])
            scale = emit_splat(builder, floats, emit_load(builder, F32, at, 4))
            result = builder.insert_value(result, builder.fmul(builder.fmul(dot, scale), key_scales), g)
        return result

    return tile_of(floats, high.count)(high, low, types.int64, types.int64, floats), emit


@inline
def put_query(q, head_dim, out, step):
    """A query head's floats into a row of a tile: `out` is the row's first element, `step` the bytes between two."""
    for d in range(head_dim):
        store_f32(out + step * d, load_f32(q + 4 * d))


@inline
def put_query_int8(q, head_dim, out, step):
    """The same as 16-bit integers, 256 * high + low, both signed bytes; the floats at q are used up."""
    top = _largest(q, head_dim)
    inverse = np.float32(32512) / top if top > _ZERO else _ZERO
    sum_high, sum_low = np.int32(0), np.int32(0)
    low_part, fields = out + step * (head_dim // 4), out + step * (head_dim // 2)
    for d in range(0, head_dim, 16):
        x = round_within(load_floats(q + 4 * d) * inverse, np.float32(32512))
        at = q + 4 * d
        store_i8_of_ints(at, (x + 128) >> 8)
        store_i8_of_ints(at + 16, x)
        sum_high += sum_ints(load_i8_as_ints(at))
        sum_low += sum_ints(load_i8_as_ints(at + 16))
        for i in range(4):
            store_i32(out + step * (d // 4 + i), load_i32(at + 4 * i))
            store_i32(low_part + step * (d // 4 + i), load_i32(at + 16 + 4 * i))
    store_f32(fields, top / np.float32(32512))
    store_i32(fields + step, sum_high)
    store_i32(fields + 2 * step, sum_low)


@inline
def put_terms(q, terms, half, neighbours, out, step):
    """A query's part of the terms, for `put_query_int8`'s row `out`; to be put before, while q are floats."""
    for i in range(load_i32(terms)):
        term = terms + TERM_BYTES * (i + 1)
        first, second = pair_of(q, load_i32(term), half, neighbours)
        q0, q1, r0, r1 = load_f32(first), load_f32(second), load_f32(term + 4), load_f32(term + 8)
        store_f32(out + step * 2 * i, q0 * r0 + q1 * r1)
        store_f32(out + step * (2 * i + 1), q1 * r0 - q0 * r1)


@inline
def terms_offset(head_dim):
    """Where terms begin in a row of an int8 query tile, in elements."""
    return head_dim // 2 + 3


@inline
def softmax_partition(row, pages, low, high, cap):
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
def begin(out, state, sinks, group, head_dim):
    """Nothing merged yet: `out` float32 [group, head_dim] is 0, `state` [group, 2] a maximum of -inf and a sum of 0.

    `sinks` (float32 [group], 0 for none) are scores that weigh in without a value (Xiao et al. 2023, gpt-oss).
    """
    for g in range(group):
        store_f32(state + 8 * g, load_f32(sinks + 4 * g) if sinks != 0 else _MINUS_INFINITY)
        store_f32(state + 8 * g + 4, _ONE if sinks != 0 else _ZERO)
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


@inline
def visible(position, window, token):
    """The first token that token `token` of a tile sees, and the one after the last, both within a partition.

    `position` is that of the tile's first token, counted from the partition's start; the range may be empty.
    """
    at = position + token
    low = max(at - window + 1, 0) if window > 0 else 0
    return min(low, PARTITION), max(min(at + 1, PARTITION), 0)


@inline
def _row_of_values(out, values, page_bytes, table, weights, chunk, start, end, quantized):
    """out += weights * values of tokens start ... end - 1, for one row and one chunk of 16 dimensions."""
    acc = load_floats(out)
    for token in range(start, end):
        v = values + load_i32(table + 4 * (token // PAGE)) * page_bytes
        place = PAGE * chunk + token % PAGE
        x = to_floats(load_i8_as_ints(v + 16 * place)) if quantized else load_halfs(v + 32 * place)
        acc = fma(splat(load_f32(weights + 4 * token)), x, acc)
    store_floats(out, acc)


@cache
def attention_worker(heads: int, tokens: int, quantized: int) -> int:
    """Address of the compiled worker for `heads` query heads (1 to 8) that share a KV head, of `tokens` tokens.

    It computes the partial results of one partition for heads * tokens rows, row = token * heads + head. Its
    arguments, all int64: address of the first row in its query tile; bytes between a row's elements; addresses of the
    layer's and head's keys and values in page 0, and of their scales (int8 only); bytes between pages; address of the
    partition's part of the page table (int32); position of the first token, counted from the partition's start; the
    window, 0 for none; head_dim; address of the soft cap (float32, 0 for none); address of the KV head's terms (int8
    only; 0 for none); address of the cosine of the first pair at the partition's start; bytes between cosines and
    sines; address of the partial results; address of scratch. Rows that see nothing of the partition get no result.
    """
    rows, stride = heads * tokens, 4 * PARTITION

    @worker(types.void(*[types.int64] * 17))
    def attend(
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
        n_terms = np.int64(load_i32(terms)) if quantized and terms != 0 else 0
        first, first_end = visible(position, window, 0)
        last_start, last = visible(position, window, tokens - 1)
        pages = (last + PAGE - 1) // PAGE
        for page in range(first // PAGE, pages):
            number = load_i32(table + 4 * page)
            k, v = keys + number * page_bytes, values + number * page_bytes
            if quantized:
                above, below = zero_ints_tile(rows), zero_ints_tile(rows)
                low_part, fields = q + step * (head_dim // 4), q + step * (head_dim // 2)
                for d in range(head_dim // 4):
                    four = load_bytes(k + 64 * d)
                    prefetch(v + 64 * d, 1)
                    above = dot_rows(above, four, q + step * d)
                    below = dot_rows(below, four, low_part + step * d)
                s = join_dots(above, below, fields, step, load_floats(k_scales + number * SCALES_BYTES))
                for i in range(n_terms):
                    turn = turns + 64 * page + 2 * turn_bytes * load_i32(terms + TERM_BYTES * (i + 1))
                    at = q + step * (terms_offset(head_dim) + 2 * i)
                    s = fma_rows(s, load_floats(turn), at, 4)
                    s = fma_rows(s, load_floats(turn + turn_bytes), at + step, 4)
            else:
                even, odd = zero_tile(rows), zero_tile(rows)
                for d in range(0, head_dim, 2):
                    at = q + step * d
                    prefetch(v + 32 * d, 1)
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
            if quantized:  # a value's scale multiplies its weight
                for page in range(low // PAGE, row_pages):
                    scale = load_floats(v_scales + load_i32(table + 4 * page) * SCALES_BYTES)
                    weights = scores + stride * row + 64 * page
                    store_floats(weights, load_floats(weights) * scale)
        # Tokens that only some rows see are added row by row: what a row does not see must not touch it, NaN or not.
        shared_end = max(first_end, last_start)
        for c in range(head_dim // 16):
            out = partial + 4 * PARTIAL_FIELDS + 64 * c
            acc = zero_tile(rows)
            if tokens > 1 and last_start > first:
                store_rows(acc, out, partial_stride)
                for row in range(rows):
                    low, high = visible(position, window, row // heads)
                    at, weights = out + partial_stride * row, scores + stride * row
                    end = min(last_start, high)
                    _row_of_values(at, values, page_bytes, table, weights, c, low, end, quantized)
                acc = load_rows(acc, out, partial_stride)
            for page in range(last_start // PAGE, (first_end + PAGE - 1) // PAGE):
                v = values + load_i32(table + 4 * page) * page_bytes
                for token in range(max(last_start, PAGE * page), min(first_end, PAGE * page + PAGE)):
                    place = PAGE * c + token - PAGE * page
                    if quantized:
                        sixteen = to_floats(load_i8_as_ints(v + 16 * place))
                    else:
                        sixteen = load_halfs(v + 32 * place)
                    acc = fma_rows(acc, sixteen, scores + 4 * token, stride)
            store_rows(acc, out, partial_stride)
            if tokens > 1 and last > shared_end:
                for row in range(heads, rows):
                    low, high = visible(position, window, row // heads)
                    at, weights = out + partial_stride * row, scores + stride * row
                    start = max(shared_end, low)
                    _row_of_values(at, values, page_bytes, table, weights, c, start, high, quantized)

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
        store_i8_of_ints(x + 4 * d, round_within(load_floats(x + 4 * d) * inverse, np.float32(127)) + 128)
        for i in range(0, 16, 4):
            store_i32(page + 16 * (d + i) + 4 * slot, load_i32(x + 4 * d + i))


@inline
def put_value_int8(page, scales, slot, x, head_dim):
    """A value as signed bytes in row `slot` of each chunk, and its scale."""
    top = _largest(x, head_dim)
    inverse = np.float32(127) / top if top > _ZERO else _ZERO
    store_f32(scales + 4 * slot, top / np.float32(127))
    for d in range(0, head_dim, 16):
        store_i8_of_ints(
            page + 16 * (d + slot), round_within(load_floats(x + 4 * d) * inverse, np.float32(127))
        )
