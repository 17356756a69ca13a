"""Reading memory for the sake of its speed: that all of it is read, once a sweep, by all threads."""

import numpy as np
import pytest

from ropewalk.kernels.bandwidth import CHUNK, measure_read_bandwidth, sweep, sweep_speeds
from ropewalk.kernels.sync import new_sync


@pytest.mark.parametrize("chunk", [256, 1024, CHUNK])
def test_a_sweep_reads_every_byte_once(chunk):
    """The XOR of all lines, of the first one twice: a line that is left out or read twice changes it."""
    data = np.random.default_rng(1).integers(0, 256, 256 * 37, np.uint8)
    out, stamps = np.zeros(64, np.uint8), np.zeros((1, 1, 2, 2), np.int64)
    words = new_sync(1)
    sweep(0, words, 1, data.ctypes.data, len(data), chunk, 1, out.ctypes.data, stamps.ctypes.data)
    assert out.tolist() == np.bitwise_xor.reduce(data.reshape(-1, 64)).tolist()
    assert stamps[0, 0, 0].tolist() <= stamps[0, 0, 1].tolist()


@pytest.mark.parametrize("n_threads", [1, 2, 3])
def test_speeds_of_all_sweeps(n_threads):
    """A rest below 256 bytes is left out; nothing is read in no time, or faster than caches can be."""
    speeds = sweep_speeds(np.ones(5_000_100, np.uint8), n_threads, CHUNK, 6)
    assert speeds.shape == (6,)
    assert (speeds > 0).all()
    assert (speeds < 1e13).all()


def test_the_best_sweep_counts(monkeypatch):
    from ropewalk.kernels import bandwidth

    asked = []

    def speeds(data, n_threads, chunk, repeats):
        asked.append((len(data), n_threads, chunk, repeats))
        return np.array([5.0, 9.0, 7.0]) if chunk == CHUNK else np.array([1.0, 2.0, 8.0])

    monkeypatch.setattr(bandwidth, "sweep_speeds", speeds)
    assert measure_read_bandwidth(3, 10_000, 4) == 9.0
    assert measure_read_bandwidth(2, repeats=4, data=np.ones(700, np.uint8)) == 9.0
    assert asked == [(10_000, 3, CHUNK, 4), (10_000, 3, 3_584, 4), (700, 2, CHUNK, 4), (700, 2, 512, 4)]
