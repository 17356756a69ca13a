"""Attention over one vector a token, key and value at once, against NumPy in float64."""

import numpy as np
import pytest

from ropewalk.kernels import attention as A
from ropewalk.kernels import latent_attention as L
from ropewalk.kernels import pages as P
from ropewalk.kernels.jit import kernel
from ropewalk.kernels.simd import call

D, ROPE = 80, 16


@kernel
def put(page, rope_scales, scales, slot, x, rope, d, int8):
    if int8:
        L.put_latent_int8(page, rope_scales, scales, slot, x, rope, d)
    else:
        P.put_key(page, slot, x, d)


@kernel
def put_queries(q, rope, tile, int8):
    rows, d = q.shape
    for row in range(rows):
        if int8:
            L.put_latent_query_int8(q[row].ctypes.data, rope, d, tile + 4 * row, 4 * rows)
        else:
            P.put_query(q[row].ctypes.data, d, tile + 4 * row, 4 * rows)


@kernel
def run(worker, arguments):
    call(worker, arguments)


def attend(q, x, *, position, window=0, int8=False, order=None):
    """Partial results of queries [tokens, heads, D] at `position` and on over x [n, D]: sums [tokens, heads, D]."""
    tokens, heads, _ = q.shape
    n_pages = -(-len(x) // 16)
    order = np.arange(n_pages, dtype=np.int32) if order is None else order.astype(np.int32)
    pages = np.full((n_pages, 16 * D * (1 if int8 else 2)), 0xFF, np.uint8)  # what was never written is NaN
    scales = np.full((2, n_pages, 16), np.nan, np.float32)
    for token, vector in enumerate(x.copy()):
        at = order[token // 16]
        where = (pages[at].ctypes.data, scales[0, at].ctypes.data, scales[1, at].ctypes.data)
        put(*where, token % 16, vector.ctypes.data, ROPE, D, int8)
    rows = tokens * heads
    tile = np.zeros((rows, P.query_row_bytes(D)), np.uint8)
    put_queries(q.reshape(rows, D).copy(), ROPE, tile.ctypes.data, int8)
    partial = np.full((rows, A.PARTIAL_FIELDS + D), np.nan, np.float32)
    scratch, cap = np.full(A.scores_bytes(rows), 0xFF, np.uint8), np.zeros(1, np.float32)
    keys = pages.ctypes.data
    values = keys + 16 * ROPE * (1 if int8 else 2)
    where = (tile.ctypes.data, 4 * rows, keys, values, scales[0].ctypes.data, scales[1].ctypes.data)
    more = (pages.shape[1], order.ctypes.data, position, window, D, cap.ctypes.data, 0, 0, 0)
    arguments = (*where, *more, partial.ctypes.data, scratch.ctypes.data)
    run(L.latent_attention_worker(heads, tokens, int(int8)), arguments)
    sums, total = partial[:, A.PARTIAL_FIELDS :], partial[:, 1:2]
    with np.errstate(invalid="ignore"):
        return (sums / total).reshape(q.shape)


def kept(x, int8):
    """What a cache keeps of vectors [n, D], float64."""
    if not int8:
        return x.astype(np.float16).astype(np.float64)
    parts = []
    for part in np.split(x, [ROPE], axis=1):
        scale = np.abs(part).max(-1, keepdims=True) / np.float32(127)
        parts.append(np.rint(part / scale) * scale.astype(np.float64))
    return np.concatenate(parts, axis=1)


def exact(q, x, position, window, int8):
    """One token's queries [heads, D]: the weighted sums, zeros in place of the rotated part."""
    first = max(0, position - window + 1) if window else 0
    x = kept(x[first : position + 1], int8)
    s = q.astype(np.float64) @ x.T
    p = np.exp(s - s.max(-1, keepdims=True))
    x[:, :ROPE] = 0
    return p / p.sum(-1, keepdims=True) @ x


def random(n, tokens=1, heads=4):
    """The rotated part ten times as large as the rest, as it may be: it is not normalised."""
    rng = np.random.default_rng(n)
    x = rng.standard_normal((n, D)).astype(np.float32)
    x[:, :ROPE] *= 10
    return (rng.standard_normal((tokens, heads, D)) / 16).astype(np.float32), x


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("window", [0, 20])
@pytest.mark.parametrize("n", [1, 15, 16, 17, 100, 256])
def test_sums_are_those_of_the_vectors_that_are_kept(n, window, int8):
    q, x = random(n)
    seen = attend(q, x, position=n - 1, window=window, int8=int8)[0]
    assert np.abs(seen - exact(q[0], x, n - 1, window, int8)).max() < (5e-4 if int8 else 3e-6)


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("window", [0, 3, 16])
def test_a_tile_of_tokens_has_the_bits_of_each_token_alone(window, int8):
    """Where pages and partitions begin and end, in any order of pages, beside an infinite vector of the last token."""
    for position in (0, 5, 12, 13, 30, 96, 255 - 3):
        q, x = random(position + 3, tokens=3)
        x[-1, ROPE:] = np.inf
        order = np.random.default_rng(1).permutation(-(-len(x) // 16))
        at_once = attend(q, x, position=position, window=window, int8=int8, order=order)
        for t in range(3):
            n = position + t + 1
            alone = attend(q[t : t + 1], x[:n], position=n - 1, window=window, int8=int8)
            assert np.array_equal(at_once[t], alone[0], equal_nan=True), (position, t)
        assert np.isfinite(at_once[:-1]).all()
