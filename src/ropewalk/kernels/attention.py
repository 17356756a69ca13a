"""Attention over pages: queries of one KV head against their sequence's cached keys and values.

What is in a page and in a query tile is in `kernels.pages`. A score of an int8 cache is an exact integer sum times both
scales. So is its sum of values: a row's weights in a partition, each an exponential times the scale of its token's
values, become 14-bit integers with one scale.

The context is worked through in partitions of 256 tokens at absolute positions; each gives a partial result, for each
head PARTIAL_FIELDS floats (maximum, sum of exponentials, the scale of an int8 cache's weights, then unused) and its
weighted sum of values [head_dim]. `merge` adds partials up in ascending order (online softmax, Milakov & Gimelshein
2018), at once or after other threads have computed some of them: which tokens share a step or a tile, and who computes
them, changes no bit.
"""

from functools import cache

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ropewalk.kernels.cpu import choose_rung
from ropewalk.kernels.dot import emit_dot4
from ropewalk.kernels.jit import inline, worker
from ropewalk.kernels.pages import PAGE, SCALES_BYTES, TERM_BYTES, terms_offset
from ropewalk.kernels.pointwise import exp, soft_cap
from ropewalk.kernels.simd import (
    F32,
    I32,
    I64,
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
    load_i32,
    max_lane,
    maximum,
    minimum,
    prefetch,
    round_to_ints,
    splat,
    store_f32,
    store_floats,
    store_i8_of_ints,
    sum_tree,
    tile_of,
    zero_ints_tile,
    zero_tile,
)

PARTITION = 256
MAX_GROUP = 8  # query heads that one pass serves; larger groups take several passes
MAX_TILE_TOKENS = 8
PARTIAL_FIELDS = 16
_MINUS_INFINITY = np.float32(-np.inf)
WEIGHT_MAX = np.float32(127 * 128 + 127)  # two times seven bits, so that every CPU may take signed bytes
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


@inline
def exp_of(x):
    """e^x of one float32."""
    return first_lane(exp(splat(x)))


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


@intrinsic
def dot_values(typing_context, acc, values, address, stride):
    """acc[g] += the sums of four products of value bytes and the four weights at address + g * stride."""
    rung = choose_rung().vectors

    def emit(context, builder, sig, args):
        acc, values, address, stride = args
        for g in range(sig.args[0].count):
            four = emit_load(builder, I32, builder.add(address, builder.mul(stride, I64(g))))
            weights = builder.bitcast(emit_splat(builder, ints, four), bytes64.ir)
            row = emit_dot4(builder, rung, builder.extract_value(acc, g), weights, values, False)
            acc = builder.insert_value(acc, row, g)
        return acc

    return acc(acc, bytes64, types.int64, types.int64), emit


@intrinsic
def join_values(typing_context, high, low, address, stride):
    """(128 * high + low) * the scale at address + g * stride (float32), for each row g of a tile."""

    def emit(context, builder, sig, args):
        high, low, address, stride = args
        result = ir.Constant(ir.ArrayType(floats.ir, sig.args[0].count), ir.Undefined)
        for g in range(sig.args[0].count):
            above = builder.shl(builder.extract_value(high, g), ints.constant(7))
            exact = builder.sitofp(builder.add(above, builder.extract_value(low, g)), floats.ir)
            scale = emit_load(builder, F32, builder.add(address, builder.mul(stride, I64(g))))
            result = builder.insert_value(result, builder.fmul(exact, emit_splat(builder, floats, scale)), g)
        return result

    return tile_of(floats, high.count)(high, low, types.int64, types.int64), emit


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
        if PAGE * page < low or PAGE * page + PAGE > high:
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
def weights_to_bytes(row, table, first, pages, low, high, scales):
    """Turn a row's exponentials, times the scales of values, into 14-bit integers; gives what a unit of them is worth.

    `row` is the address of the exponentials of page 0; pages `first` ... `pages` - 1 get 16 bytes of high, and 16 of
    low seven bits, 0 for tokens that are not in low ... high - 1.
    """
    top = splat(_ZERO)
    for page in range(first, pages):
        at = row + 64 * page
        weights = load_floats(at) * load_floats(scales + load_i32(table + 4 * page) * SCALES_BYTES)
        if PAGE * page < low or PAGE * page + PAGE > high:
            weights = keep_lanes(weights, low - PAGE * page, high - PAGE * page, _ZERO)
        store_floats(at, weights)
        top = maximum(weights, top)
    largest = max_lane(top)
    inverse = WEIGHT_MAX / largest if largest > _ZERO else _ZERO
    for page in range(first, pages):
        at = row + 64 * page
        weights = round_to_ints(minimum(load_floats(at) * inverse, splat(WEIGHT_MAX)))
        store_i8_of_ints(at, weights >> 7)
        store_i8_of_ints(at + 16, weights & 127)
    return largest / WEIGHT_MAX


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
def _row_of_values(out, values, page_bytes, table, weights, chunk, start, end):
    """out += weights * values of tokens start ... end - 1, for one row and one chunk of 16 dimensions."""
    acc = load_floats(out)
    for token in range(start, end):
        v = values + load_i32(table + 4 * (token // PAGE)) * page_bytes
        x = load_halfs(v + 32 * (PAGE * chunk + token % PAGE))
        acc = fma(splat(load_f32(weights + 4 * token)), x, acc)
    store_floats(out, acc)


@inline
def _ahead(keys, page_bytes, table, page, position):
    """The keys of the page that stands one partition after this one; where there is none, this page's."""
    later = page + PARTITION // PAGE
    return keys + load_i32(table + 4 * (later if position >= PAGE * later else page)) * page_bytes


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
            if quantized:
                weights = scores + stride * row
                unit = weights_to_bytes(weights, table, first // PAGE, pages, low, high, v_scales)
                store_f32(partial + partial_stride * row + 8, unit)
        if quantized:
            for c in range(head_dim // PAGE):
                above, below = zero_ints_tile(rows), zero_ints_tile(rows)
                for page in range(first // PAGE, pages):
                    v = values + load_i32(table + 4 * page) * page_bytes + 256 * c
                    if tokens == 1:
                        prefetch(_ahead(keys, page_bytes, table, page, position) + 256 * c, 4)
                    for four in range(4):
                        weights, x = scores + 64 * page + 4 * four, load_bytes(v + 64 * four)
                        above = dot_values(above, x, weights, stride)
                        below = dot_values(below, x, weights + 16, stride)
                sums = join_values(above, below, partial + 8, partial_stride)
                store_rows(sums, partial + 4 * PARTIAL_FIELDS + 64 * c, partial_stride)
            return
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
                    _row_of_values(at, values, page_bytes, table, weights, c, low, end)
                acc = load_rows(acc, out, partial_stride)
            for page in range(last_start // PAGE, (first_end + PAGE - 1) // PAGE):
                v = values + load_i32(table + 4 * page) * page_bytes
                if tokens == 1:
                    prefetch(_ahead(keys, page_bytes, table, page, position) + 512 * c, 8)
                for token in range(max(last_start, PAGE * page), min(first_end, PAGE * page + PAGE)):
                    place = PAGE * c + token - PAGE * page
                    acc = fma_rows(acc, load_halfs(v + 32 * place), scores + 4 * token, stride)
            store_rows(acc, out, partial_stride)
            if tokens > 1 and last > shared_end:
                for row in range(heads, rows):
                    low, high = visible(position, window, row // heads)
                    at, weights = out + partial_stride * row, scores + stride * row
                    start = max(shared_end, low)
                    _row_of_values(at, values, page_bytes, table, weights, c, start, high)

    return attend
