"""How fast this machine reads memory: the bound that decoding is measured against.

Measured as a step reads its weights: all threads take chunks from a shared counter, so that one whose core was taken
away does not hold up the rest, and meet at a barrier between sweeps. A sweep's time is from the first thread's start
to the last one's end, on the clocks of the threads themselves; starting threads costs as much as reading a small
model. The best of many sweeps counts: whatever else the machine does can only make a sweep slower, and a bound is
what cannot be passed.

What is read matters as well as how. A part of a model that is not far larger than the last-level cache is still there
in the next step, so that decoding reads faster than memory can be read. Where there is a model, its own weights are
what has to be swept.
"""

import threading

import numpy as np
from numpy.typing import NDArray

from ropewalk.kernels.clock import write_clock
from ropewalk.kernels.jit import kernel
from ropewalk.kernels.simd import load_bytes, store_bytes
from ropewalk.kernels.sync import barrier, new_sync, next_of_run

CHUNK = 1 << 17
STRIDE = 256  # bytes read in one turn of the loop


@kernel
def sweep(tid, words, n_threads, address, n_bytes, chunk, n_sweeps, out, stamps):
    """Read a range `n_sweeps` times, as one of `n_threads` threads.

    Parameters
    ----------
    words : int64
        The shared words of `kernels.sync`, of this team alone.
    address, n_bytes, chunk : int
        Of the range; sizes are multiples of 256.
    out : int
        Address of 64 bytes of this thread's own.
    stamps : int
        Address of int64 [n_sweeps, n_threads, 2 (start, end), 2 (seconds, nanoseconds)].
    """
    a, b = load_bytes(address), load_bytes(address)
    n_chunks = (n_bytes + chunk - 1) // chunk
    for number in range(n_sweeps):
        stamp = stamps + 32 * (number * n_threads + tid)
        write_clock(stamp)
        item, turn = next_of_run(tid, n_threads, words, 0, n_chunks, 0)
        while item < n_chunks:
            start = item * chunk
            for at in range(address + start, address + min(start + chunk, n_bytes), 256):
                a = a ^ load_bytes(at) ^ load_bytes(at + 64)
                b = b ^ load_bytes(at + 128) ^ load_bytes(at + 192)
            item, turn = next_of_run(tid, n_threads, words, 0, n_chunks, turn)
        write_clock(stamp + 16)
        barrier(tid, words, n_threads)
    store_bytes(out, a ^ b)


def sweep_speeds(data: NDArray[np.uint8], n_threads: int, chunk: int, n_sweeps: int) -> NDArray[np.float64]:
    """Bytes per second of each of `n_sweeps` sweeps over `data`.

    Parameters
    ----------
    data : uint8 [n], n at least 256
        What is read; a rest of less than 256 bytes is left out.
    chunk : int
        Bytes that a thread takes at a time, a multiple of 256.
    """
    n_bytes = len(data) - len(data) % STRIDE
    words, outs = new_sync(n_threads), np.zeros((n_threads, 64), np.uint8)
    stamps = np.zeros((n_sweeps, n_threads, 2, 2), np.int64)

    def run(tid: int) -> None:
        address, out = data.ctypes.data, outs[tid].ctypes.data
        sweep(tid, words, n_threads, address, n_bytes, chunk, n_sweeps, out, stamps.ctypes.data)

    threads = [threading.Thread(target=run, args=(tid,)) for tid in range(1, n_threads)]
    for thread in threads:
        thread.start()
    run(0)
    for thread in threads:
        thread.join()
    moments = stamps[..., 0] * 1_000_000_000 + stamps[..., 1]
    taken = moments[:, :, 1].max(axis=1) - moments[:, :, 0].min(axis=1)
    speeds: NDArray[np.float64] = n_bytes * 1e9 / taken
    return speeds


def measure_read_bandwidth(
    n_threads: int, n_bytes: int = 1 << 29, repeats: int = 7, data: NDArray[np.uint8] | None = None
) -> float:
    """Speed at which `n_threads` threads together read memory: the best of all sweeps.

    The threads take either a part each or small chunks in turns, as they do in a model's step. Which of the two is
    faster depends on the machine's memory.

    Parameters
    ----------
    n_threads : int
    n_bytes : int
        Size of a buffer to read; far more than the last-level cache holds.
    repeats : int
        Sweeps of each of the two ways.
    data : uint8 [n], optional
        Read this instead of a buffer: the weights of a model.

    Returns
    -------
    float
        Bytes per second.
    """
    if data is None:
        data = np.ones(n_bytes, np.uint8)
    part = -(-len(data) // (STRIDE * n_threads)) * STRIDE
    return max(float(sweep_speeds(data, n_threads, chunk, repeats).max()) for chunk in (CHUNK, part))
