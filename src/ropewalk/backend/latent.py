"""The table and the buffers of latent attention, as `kernels.latent` reads them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ropewalk.kernels.definition import FINE_TOKEN_GROUP_BYTES
from ropewalk.kernels.matmul import max_tile
from ropewalk.kernels.tables import Latent
from ropewalk.model.config import LatentConfig, ModelConfig


class LatentTable:
    """Fields of `kernels.tables.Latent`, and the memory that they point to.

    Parameters
    ----------
    reads_floats : bool
        Whether any matrix is of a float type.

    Attributes
    ----------
    table : int64 [fields]
    """

    def __init__(self, config: ModelConfig, latent: LatentConfig, reads_floats: bool) -> None:
        self._config, self._latent, self._reads_floats = config, latent, reads_floats
        self.table = np.zeros(len(Latent), np.int64)
        self._buffers: dict[Latent, NDArray[Any]] = {}
        self.table[Latent.Q_RANK], self.table[Latent.NOPE] = latent.q_rank, latent.nope
        self.table[Latent.VALUE] = latent.value

    def grow(self, n: int) -> None:
        """Make room for n tokens."""
        config, latent = self._config, self._latent
        rows = -(-n // max_tile()) * max_tile()
        widest = max(latent.nope, latent.kv_rank)
        head_rows = config.n_heads * rows
        self._buffers = {
            Latent.QUERIES: np.zeros((rows, config.n_heads * (latent.nope + latent.rope)), np.float32),
            Latent.KEY_VALUES: np.zeros((rows, config.head_dim), np.float32),
            Latent.COMPRESSED: np.zeros((rows, latent.q_rank), np.float32),
            Latent.OUT: np.zeros((rows, config.n_heads * latent.value), np.float32),
            Latent.BYTE_TILES: np.zeros(head_rows * (widest // 32) * FINE_TOKEN_GROUP_BYTES, np.uint8),
            Latent.FLOAT_TILES: np.zeros((head_rows if self._reads_floats else 0, widest), np.float32),
        }
        for field, buffer in self._buffers.items():
            self.table[field] = buffer.ctypes.data
        self.table[Latent.ROWS] = rows
