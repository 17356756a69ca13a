"""How fast this machine reads memory: the bound that decoding is measured against."""

import threading
import time

import numpy as np

from ropewalk.kernels.jit import kernel
from ropewalk.kernels.simd import load_bytes, store_bytes

CHUNK = 1 << 17


@kernel
def read_chunks(address, n_bytes, first, step, chunk, out):
    """Read chunks `first`, `first + step`, ... of a range; sizes are multiples of 256 bytes."""
    a, b = load_bytes(address), load_bytes(address)
    for start in range(first * chunk, n_bytes, step * chunk):
        for at in range(address + start, address + min(start + chunk, n_bytes), 256):
            a = a ^ load_bytes(at) ^ load_bytes(at + 64)
            b = b ^ load_bytes(at + 128) ^ load_bytes(at + 192)
    store_bytes(out, a ^ b)


def measure_read_bandwidth(n_threads: int, n_bytes: int = 1 << 29, repeats: int = 7) -> float:
    """Speed at which `n_threads` threads together read a buffer larger than the caches.

    The threads either read a part of the buffer each, or small chunks in turns, as they do in a model's step. Which
    of the two is faster depends on the machine's memory; the bound is the better median.

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
    n_bytes -= n_bytes % (256 * n_threads)
    data, outs = np.ones(n_bytes, np.uint8), np.zeros((n_threads, 64), np.uint8)
    read_chunks(data.ctypes.data, 256, 0, 1, 256, outs.ctypes.data)
    speeds: dict[int, list[float]] = {n_bytes // n_threads: [], CHUNK: []}
    for _ in range(repeats):
        for chunk, seen in speeds.items():
            threads = [
                threading.Thread(
                    target=read_chunks,
                    args=(data.ctypes.data, n_bytes, i, n_threads, chunk, outs[i].ctypes.data),
                )
                for i in range(n_threads)
            ]
            start = time.perf_counter()
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            seen.append(n_bytes / (time.perf_counter() - start))
    return float(max(np.median(seen) for seen in speeds.values()))
