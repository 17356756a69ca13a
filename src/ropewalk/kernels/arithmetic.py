"""How fast this machine multiplies: the bound that reading a prompt is measured against.

The rate is that of our own matrix product with nothing to wait for: 4-bit weights that stay in the first-level cache
against full tiles of 8-bit activations, by all threads at once. Two operations are counted for each weight and token,
a multiplication and an addition.
"""

import threading
import time

import numpy as np

from ropewalk.kernels import formats as F
from ropewalk.kernels.definition import TOKEN_GROUP_BYTES
from ropewalk.kernels.jit import kernel
from ropewalk.kernels.matmul import matmul_worker, max_tile
from ropewalk.kernels.simd import call

PANELS, COLUMNS = 4, 256  # 4 · 16 rows of 256 weights of Q4_0: 9 kB


@kernel
def repeat_worker(address, arguments, times):
    """Call a worker again and again with the same arguments."""
    for _ in range(times):
        call(address, arguments)


def measure_arithmetic(n_threads: int, seconds: float = 0.1, repeats: int = 5) -> float:
    """Operations a second that `n_threads` threads do together; the best of a few rounds.

    Parameters
    ----------
    n_threads : int
    seconds : float
        Of one round, about.
    repeats : int

    Returns
    -------
    float
        Operations per second.
    """
    works = [_Work() for _ in range(n_threads)]
    works[0].run(1)  # compiles
    start = time.perf_counter()
    works[0].run(100)
    times = max(1, int(100 * seconds / max(time.perf_counter() - start, 1e-6)))
    best = 0.0
    for _ in range(repeats):
        threads = [threading.Thread(target=work.run, args=(times,)) for work in works]
        start = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        best = max(best, n_threads * times * works[0].operations / (time.perf_counter() - start))
    return best


class _Work:
    """A product that one thread can repeat, with buffers of its own."""

    def __init__(self) -> None:
        packed, tile = F.PACKED["Q4_0"], max_tile()
        self.operations = 2 * 16 * PANELS * COLUMNS * tile
        self._address = matmul_worker(packed.kind, tile, 0)
        self._panels = np.zeros((PANELS, packed.panel_bytes(COLUMNS)), np.uint8)
        self._tile = np.zeros(COLUMNS // F.GROUP * tile * TOKEN_GROUP_BYTES, np.uint8)
        self._out = np.zeros((tile, 16 * PANELS), np.float32)
        self._arguments = (
            self._panels.ctypes.data,
            PANELS,
            self._panels.shape[1],
            COLUMNS // F.GROUP,
            self._tile.ctypes.data,
            self._out.ctypes.data,
            self._out.strides[0],
            tile,
            0,
        )

    def run(self, times: int) -> None:
        repeat_worker(self._address, self._arguments, times)
