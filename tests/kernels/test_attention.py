"""Attention over pages against NumPy in float64."""

import numpy as np
import pytest

from ropewalk.kernels import attention as A
from ropewalk.kernels import pages as P
from ropewalk.kernels.jit import kernel
from ropewalk.kernels.simd import call


@kernel
def put(k_page, v_page, k_scales, v_scales, slot, k, v, d, int8):
    if int8:
        P.put_key_int8(k_page, k_scales, slot, k, d)
        P.put_value_int8(v_page, v_scales, slot, v, d)
    else:
        P.put_key(k_page, slot, k, d)
        P.put_value(v_page, slot, v, d)


def attend(q, k, v, *, position, first=0, **options):
    """One token's queries [G, d] against k and v [n, d]; it sees what stands at first ... position."""
    window = position - first + 1 if first else 0
    return attend_tile(q[None], k, v, position=position, window=window, **options)[0]


def attend_tile(q, k, v, *, position, window=0, cap=0.0, order=None, int8=False, sinks=None, left_out=None):
    """Run the kernel: q [tokens, G, d] at position and on, k and v written to pages that stand in the given order.

    `left_out` is what k does without: (r [d], pairs, angles [positions, d / 2], neighbours).
    """
    tokens, group, d = q.shape
    n_pages = -(-len(k) // 16)
    order = np.arange(n_pages) if order is None else order
    size = P.head_page_bytes(d, int8)
    pages = np.full((2, n_pages, size), 0xFF, np.uint8)  # what was never written must not matter
    scales = np.full((2, n_pages, 16), np.nan, np.float32)
    for token, (key, value) in enumerate(zip(k.copy(), v.copy(), strict=True)):
        at = order[token // 16]
        where = [a[i, at].ctypes.data for a in (pages, scales) for i in (0, 1)]
        put(*where, token % 16, key.ctypes.data, value.ctypes.data, d, int8)
    keys = (*(a[i].ctypes.data for a in (pages, scales) for i in (0, 1)), size)
    table, cap_at = order.astype(np.int32), np.array([cap], np.float32)
    out, partial = (
        np.zeros((tokens, group, d), np.float32),
        np.zeros((tokens * group, A.partial_bytes(d)), np.uint8),
    )
    rows = group * tokens
    scratch = np.zeros(A.scores_bytes(rows), np.uint8)
    tile = np.zeros((rows, P.query_row_bytes(d)), np.uint8)
    terms, turns, neighbours = terms_of(*left_out) if left_out else (None, np.zeros((0, 0, 0)), False)
    attend_in_order(
        A.attention_worker(group, tokens, int(int8)),
        0 if sinks is None else sinks.ctypes.data,
        int8,
        q.copy(),
        tile,
        keys,
        table,
        position,
        window,
        cap_at,
        out,
        partial,
        scratch,
        0 if terms is None else terms.ctypes.data,
        turns.ctypes.data,
        turns.strides[1],
        neighbours,
    )
    return out


def terms_of(r, pairs, angles, neighbours):
    """The tables of the terms: records of their number, then of each pair; cosines and sines by pair, whole pages."""
    terms = np.zeros(1 + len(pairs), [("pair", "<i4"), ("r", "<f4", 2), ("", "<i4")])
    terms["pair"] = [len(pairs), *pairs]
    terms["r"][1:] = r[np.stack(pair_dimensions(len(r), neighbours))[:, pairs].T]
    turns = np.stack([np.cos(angles), np.sin(angles)]).transpose(2, 0, 1).astype(np.float32)
    turns = np.pad(turns, ((0, 0), (0, 0), (0, 16)), constant_values=np.nan)
    return terms, np.ascontiguousarray(turns), neighbours


def pair_dimensions(d, neighbours):
    half = np.arange(d // 2)
    return (2 * half, 2 * half + 1) if neighbours else (half, half + d // 2)


@kernel
def attend_in_order(
    worker, sinks, int8, q, tile, keys, table, position, window, cap, out, partial, scratch,
    terms, turns, turn_bytes, neighbours,
):  # fmt: skip
    tokens, group, d = q.shape
    rows = tokens * group
    for row in range(rows):
        query = q[row // group, row % group].ctypes.data
        if int8:
            at = tile.ctypes.data + 4 * row
            if terms != 0:
                P.put_terms(query, terms, d // 2, neighbours, at + 4 * rows * P.terms_offset(d), 4 * rows)
            P.put_query_int8(query, d, at, 4 * rows)
        else:
            P.put_query(query, d, tile.ctypes.data + 4 * row, 4 * rows)
    state = np.zeros((tokens, group, 2), np.float32)
    for t in range(tokens):
        A.begin(out[t].ctypes.data, state[t].ctypes.data, sinks, group, d)
    for partition in range((position + tokens - 1) // A.PARTITION + 1):
        at = position - A.PARTITION * partition
        pages = table[A.PARTITION * partition // P.PAGE :].ctypes.data
        where = (
            tile.ctypes.data,
            4 * rows,
            keys[0],
            keys[1],
            keys[2],
            keys[3],
            keys[4],
            pages,
            at,
            window,
            d,
        )
        turned = turns + 4 * A.PARTITION * partition
        more = (cap.ctypes.data, terms, turned, turn_bytes, partial.ctypes.data, scratch.ctypes.data)
        call(worker, (*where, *more))
        for t in range(tokens):
            low, high = A.visible(at, window, t)
            if low < high:
                A.merge(out[t].ctypes.data, state[t].ctypes.data, partial[group * t].ctypes.data, group, d)
    for t in range(tokens):
        A.finish(out[t].ctypes.data, state[t].ctypes.data, group, d)


def exact(q, k, v, *, position, first=0, cap=0.0):
    k, v = (a[first : position + 1].astype(np.float16).astype(np.float64) for a in (k, v))
    s = q.astype(np.float64) @ k.T
    s = cap * np.tanh(s / cap) if cap else s
    p = np.exp(s - s.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True) @ v


def random(n, group=3, d=64, seed=0):
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal(shape).astype(np.float32) for shape in ((group, d), (n, d), (n, d)))
    return q / np.float32(np.sqrt(d)), k, v


@pytest.mark.parametrize("n", [1, 2, 15, 16, 17, 255, 256, 257, 600])
def test_page_and_partition_borders(n):
    q, k, v = random(n)
    assert np.max(np.abs(attend(q, k, v, position=n - 1) - exact(q, k, v, position=n - 1))) < 2e-6


@pytest.mark.parametrize(("group", "d"), [(1, 16), (2, 128), (7, 64), (8, 256)])
def test_groups_and_head_sizes(group, d):
    q, k, v = random(100, group, d)
    assert np.max(np.abs(attend(q, k, v, position=99) - exact(q, k, v, position=99))) < 2e-6


def test_c6_a_window_counts_the_current_token():
    """W = 3 over 6 tokens: rows see [0] [0,1] [0,1,2] [1,2,3] [2,3,4] [3,4,5]."""
    q, k, v = random(6)
    for position in range(6):
        first = max(0, position - 2)
        seen = attend(q, k, v, position=position, first=first)
        assert np.max(np.abs(seen - exact(q, k, v, position=position, first=first))) < 2e-6


def test_windows_that_start_within_pages_and_partitions():
    q, k, v = random(700)
    for first in (1, 15, 16, 200, 256, 300, 699):
        seen = attend(q, k, v, position=699, first=first)
        assert np.max(np.abs(seen - exact(q, k, v, position=699, first=first))) < 2e-6


def test_soft_cap():
    q, k, v = random(40)
    q *= 16
    seen = attend(q, k, v, position=39, cap=5.0)
    assert np.max(np.abs(seen - exact(q, k, v, position=39, cap=5.0))) < 4e-6


def test_the_order_of_pages_in_memory_changes_no_bit():
    q, k, v = random(100)
    shuffled = attend(q, k, v, position=99, order=np.array([3, 0, 6, 1, 5, 2, 4]))
    assert np.array_equal(shuffled, attend(q, k, v, position=99))


def test_what_comes_later_in_the_cache_changes_no_bit():
    q, k, v = random(100)
    for position in (0, 20, 63):
        alone = attend(q, k[: position + 1], v[: position + 1], position=position)
        assert np.array_equal(attend(q, k, v, position=position), alone)


def as_int8(x):
    """What an int8 cache keeps of keys or values [n, d], float64."""
    scale = np.abs(x).max(-1, keepdims=True) / np.float32(127)
    return np.rint(x / scale) * scale.astype(np.float64)


@pytest.mark.parametrize("n", [1, 16, 17, 257, 600])
@pytest.mark.parametrize(("group", "d"), [(3, 64), (1, 128), (4, 256)])
def test_an_int8_cache_is_exact_for_the_values_it_keeps(n, group, d):
    q, k, v = random(n, group, d)
    k64, v64 = as_int8(k), as_int8(v)
    s = q.astype(np.float64) @ k64.T
    p = np.exp(s - s.max(-1, keepdims=True))
    expected = p / p.sum(-1, keepdims=True) @ v64
    seen = attend(q, k, v, position=n - 1, int8=True)
    assert np.max(np.abs(seen - expected)) < 5e-4 * np.abs(v).max()


@pytest.mark.parametrize("n", [256, 512])
def test_int8_sums_have_room_for_the_largest_weights_and_values(n):
    q, k, v = random(n, 2, 64)
    v[:] = np.where(np.arange(64) % 2, 3.0, -3.0)
    assert np.allclose(attend(0 * q, k, v, position=n - 1, int8=True), v[:1], rtol=1e-6)


def rotated(r, pairs, angles, neighbours):
    """The chosen pairs of r [d] at every position [n, d], float64."""
    first, second = (dimensions[pairs] for dimensions in pair_dimensions(len(r), neighbours))
    out, t = np.zeros((len(angles), len(r))), angles[:, pairs]
    out[:, first] = r[first] * np.cos(t) - r[second] * np.sin(t)
    out[:, second] = r[second] * np.cos(t) + r[first] * np.sin(t)
    return out


def left_out_of(d, n, pairs, neighbours):
    """A constant part of keys that is 100 times what they differ by, and angles as models have them."""
    r = (100 * np.random.default_rng(3).standard_normal(d)).astype(np.float32)
    return r, np.array(pairs, int), np.arange(n)[:, None] * 100.0 ** (-2 * np.arange(d // 2) / d), neighbours


@pytest.mark.parametrize("n", [1, 17, 257, 600])
@pytest.mark.parametrize(
    ("group", "d", "pairs", "neighbours"),
    [(3, 64, [0, 5, 31], False), (4, 128, [2], True), (2, 32, range(16), False)],
)
def test_an_int8_cache_adds_what_its_keys_do_without(n, group, d, pairs, neighbours):
    """Exact again: q . (kept + R(p) r), although r alone would take all bits of the cache."""
    q, k, v = random(n, group, d)
    q *= np.float32(0.1)
    left_out = left_out_of(d, n, pairs, neighbours)
    k64, v64 = as_int8(k), as_int8(v)
    s = q.astype(np.float64) @ (k64 + rotated(*left_out)).T
    p = np.exp(s - s.max(-1, keepdims=True))
    expected = p / p.sum(-1, keepdims=True) @ v64
    seen = attend(q, k, v, position=n - 1, int8=True, left_out=left_out)
    assert np.max(np.abs(seen - expected)) < 5e-4 * np.abs(v).max()
    if n > 1:
        whole = attend(q, k + rotated(*left_out).astype(np.float32), v, position=n - 1, int8=True)
        assert np.max(np.abs(whole - expected)) > 20 * np.max(np.abs(seen - expected))


def test_int8_windows_and_page_order():
    q, k, v = random(300)
    whole = attend(q, k, v, position=299, first=100, int8=True)
    order = np.random.default_rng(1).permutation(19)
    assert np.array_equal(whole, attend(q, k, v, position=299, first=100, int8=True, order=order))
    near = exact(q, k, v, position=299, first=100)
    assert np.max(np.abs(whole - near)) < 0.02


@pytest.mark.parametrize("form", ["float16", "int8", "int8 with terms"])
@pytest.mark.parametrize("window", [0, 3, 16, 250, 300])
@pytest.mark.parametrize(("group", "tokens"), [(1, 8), (3, 4), (6, 2)])
def test_a_tile_of_tokens_has_the_bits_of_each_token_alone(group, tokens, window, form):
    """At the borders of pages and partitions, beside infinite values that only the last token sees."""
    _, k, v = random(530, 1, 32)
    v[-1] = np.inf
    queries = np.random.default_rng(7).standard_normal((tokens, group, 32)).astype(np.float32)
    for position in (0, 5, 15, 255 - tokens // 2, 256, 300, 511 - tokens // 2, 530 - tokens):
        n = position + tokens
        options = {"window": window, "int8": form != "float16"}
        if "terms" in form:
            options["left_out"] = left_out_of(32, n, [1, 7], True)
        at_once = attend_tile(queries, k[:n], v[:n], position=position, **options)
        for t in range(tokens):
            alone = attend_tile(queries[t : t + 1], k[:n], v[:n], position=position + t, **options)
            assert np.array_equal(at_once[t], alone[0], equal_nan=True), (position, t)
        assert np.isfinite(at_once[:-1]).all()


def test_a_sink_weighs_in_without_a_value():
    q, k, v = random(300)
    sinks = np.array([-3.0, 0.5, 8.0], np.float32)
    s = q.astype(np.float64) @ k.astype(np.float16).astype(np.float64).T
    p = np.exp(s) / (np.exp(s).sum(-1) + np.exp(sinks.astype(np.float64)))[:, None]
    seen = attend(q, k, v, position=299, sinks=sinks)
    assert np.max(np.abs(seen - p @ v.astype(np.float16).astype(np.float64))) < 2e-6
