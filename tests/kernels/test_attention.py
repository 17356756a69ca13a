"""Attention over pages against NumPy in float64."""

import numpy as np
import pytest

from ropewalk.kernels.attention import attention_worker, scratch_bytes
from ropewalk.kernels.jit import kernel
from ropewalk.kernels.simd import call


@kernel
def call_worker(address, arguments):
    call(address, arguments)


def attend(q, k, v, *, position, first=0, cap=0.0, order=None):
    """Run the kernel: q [G, d], k and v [n, d] laid out in pages that stand in the given order in memory."""
    group, d = q.shape
    n_pages = -(-len(k) // 16)
    order = np.arange(n_pages) if order is None else order
    pages = np.full((n_pages, 2, 16 * d), np.nan, np.float16)  # what was never written must not matter
    for page in range(n_pages):
        part = slice(16 * page, min(16 * page + 16, len(k)))
        lanes = part.stop - part.start
        keys, values = pages[order[page], 0].reshape(d, 16), pages[order[page], 1].reshape(d // 16, 16, 16)
        keys[:, :lanes] = k[part].T
        values[:, :lanes] = v[part].reshape(lanes, d // 16, 16).transpose(1, 0, 2)
    table = order.astype(np.int32)
    out, scratch = np.zeros((group, d), np.float32), np.zeros(scratch_bytes(d), np.uint8)
    cap_at = np.array([cap], np.float32)
    address = pages.ctypes.data
    arguments = (q.ctypes.data, address, address + 32 * d, 64 * d, table.ctypes.data, position, first, d)
    call_worker(
        attention_worker(group), (*arguments, cap_at.ctypes.data, out.ctypes.data, scratch.ctypes.data)
    )
    return out


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
