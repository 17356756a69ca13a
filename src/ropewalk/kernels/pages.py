"""What attention reads, and how a token's vectors get there: pages of the KV cache, and tiles of queries.

A page holds 16 tokens. For each layer and KV head the keys of all pages lie one page after the other, then the values
of all pages, because the hardware's prefetcher follows long streams only. Of one head a page holds:

    float16   keys [head_dim, 16 tokens], already rotated; values [head_dim / 16, 16 tokens, 16]
    int8      keys [head_dim / 4, 16 tokens, 4], raised by 128; values [head_dim / 16, 4, 16, 4 tokens];
              and, in an array of their own, one float32 scale for each token, [16], of the keys and of the values

so that lanes are tokens for the scores and dimensions for the sums. The query heads of a group share every read, and
in prefill those of several tokens that follow each other: together they are the rows of a query tile,

    float16   float32 [head_dim, rows], rotated and scaled
    int8      16-bit integers, as activations are in `kernels.matmul`: high bytes [head_dim / 4, rows, 4], low bytes
              likewise; then scales float32 [rows], and the sums of the high and of the low bytes int32 [rows]

A large bias would set the scale of an int8 key and leave few bits for what differs from token to token. So what a
rotary pair has in common for all keys may be missing in the cache (`backend.constant_keys` chooses), and its term is
added to the scores: with (r0, r1) that part, (q0, q1) the query's, and t the angle of the key's position,

    q . rotated(r) = cos t * (q0 r0 + q1 r1) + sin t * (q1 r0 - q0 r1)

The terms of a KV head are records of TERM_BYTES: the first begins with their number (int32), each other one is the
pair's number (int32) and r0, r1 (float32). A query's row ends with the two sums in brackets for each term, float32.
"""

import numpy as np

from ropewalk.kernels.jit import inline
from ropewalk.kernels.pointwise import pair_of, round_within
from ropewalk.kernels.simd import (
    absolute,
    load_f32,
    load_floats,
    load_i8_as_ints,
    load_i32,
    load_u8,
    load_u16,
    max_lane,
    maximum,
    splat,
    store_f32,
    store_halfs,
    store_i8_of_ints,
    store_i32,
    store_u8,
    store_u16,
    sum_ints,
)

PAGE = 16  # tokens
TERM_BYTES = 16  # of a constant part of keys
SCALES_BYTES = 4 * PAGE  # of the keys, or the values, of one head in one page
_ZERO = np.float32(0)


def head_page_bytes(head_dim: int, quantized: bool) -> int:
    """Bytes of the keys, or of the values, of one head in one page, scales aside."""
    return PAGE * head_dim * (1 if quantized else 2)


def query_row_bytes(head_dim: int) -> int:
    """Bytes of one row of a query tile, with as many terms as there can be."""
    return 4 * (head_dim + head_dim // 2 + 4)


@inline
def _largest(x, n):
    """The greatest magnitude of n floats."""
    largest = splat(_ZERO)
    for d in range(0, n, 16):
        largest = maximum(absolute(load_floats(x + 4 * d)), largest)
    return max_lane(largest)


@inline
def _put_scale(at, x, n, limit):
    """Store the scale by which n floats are integers from -limit to limit; gives its inverse, 0 for zeros."""
    top = _largest(x, n)
    store_f32(at, top / limit)
    return limit / top if top > _ZERO else _ZERO


# ---- queries


@inline
def put_query(q, head_dim, out, step):
    """A query head's floats into a row of a tile: `out` is the row's first element, `step` the bytes between two."""
    for d in range(head_dim):
        store_f32(out + step * d, load_f32(q + 4 * d))


@inline
def put_query_int8(q, head_dim, out, step):
    """The same as 16-bit integers, 256 * high + low, both signed bytes; the floats at q are used up."""
    low_part, fields = out + step * (head_dim // 4), out + step * (head_dim // 2)
    inverse = _put_scale(fields, q, head_dim, np.float32(32512))
    sum_high, sum_low = np.int32(0), np.int32(0)
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


# ---- keys and values


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
    inverse = _put_scale(scales + 4 * slot, x, head_dim, np.float32(127))
    for d in range(0, head_dim, 16):
        store_i8_of_ints(x + 4 * d, round_within(load_floats(x + 4 * d) * inverse, np.float32(127)) + 128)
        for i in range(0, 16, 4):
            store_i32(page + 16 * (d + i) + 4 * slot, load_i32(x + 4 * d + i))


@inline
def put_value_int8(page, scales, slot, x, head_dim):
    """A value as signed bytes, four tokens together, and its scale; the floats at x are used up."""
    inverse = _put_scale(scales + 4 * slot, x, head_dim, np.float32(127))
    for d in range(0, head_dim, 16):
        store_i8_of_ints(x + 4 * d, round_within(load_floats(x + 4 * d) * inverse, np.float32(127)))
        for i in range(16):
            at = page + 16 * d + 64 * (slot // 4) + 4 * i + slot % 4
            store_u8(at, load_u8(x + 4 * d + i))
