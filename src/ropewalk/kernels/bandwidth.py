"""How fast this machine reads memory: the bound that decoding is measured against."""

import threading
import time

import numpy as np

from ropewalk.kernels.jit import kernel
from ropewalk.kernels.simd import load_bytes, store_bytes


@kernel
def read_bytes(address, n_bytes, out):
    """Read every cache line of a range (a multiple of 256 bytes), as the weight kernels do: one ascending stream."""
    a, b = load_bytes(address), load_bytes(address)
    for at in range(address, address + n_bytes, 256):
        a = a ^ load_bytes(at) ^ load_bytes(at + 64)
        b = b ^ load_bytes(at + 128) ^ load_bytes(at + 192)
    store_bytes(out, a ^ b)


def measure_read_bandwidth(n_threads: int, n_bytes: int = 1 << 29, repeats: int = 7) -> float:
    """Median speed at which `n_threads` threads together read a buffer larger than the caches.

    Parameters
    ----------
    n_threads : int
    n_bytes : int
        Size of the buffer; far more than the last-level cache holds.
    repeats : int

    Returns
    -------
    float
        Bytes per second.
    """
    share = n_bytes // n_threads // 256 * 256
    data = np.ones(share * n_threads, np.uint8)
    outs = np.zeros((n_threads, 64), np.uint8)
    read_bytes(data.ctypes.data, 256, outs.ctypes.data)
    speeds = []
    for _ in range(repeats):
        threads = [
            threading.Thread(
                target=read_bytes, args=(data.ctypes.data + i * share, share, outs[i].ctypes.data)
            )
            for i in range(n_threads)
        ]
        start = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        speeds.append(share * n_threads / (time.perf_counter() - start))
    return float(np.median(speeds))
