"""The table and the buffers of a model's low-rank adapters, as `kernels.lora` reads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ropewalk.backend.sources import MatrixSource, layer_sources
from ropewalk.checkpoint.lora import LoraWeights
from ropewalk.errors import UnsupportedModelError
from ropewalk.kernels.tables import (
    DOWN,
    GATE,
    LORA_MATRIX_FIELDS,
    MATRICES_PER_LAYER,
    UP,
    K,
    Lora,
    LoraMatrix,
    Q,
    V,
)
from ropewalk.model.config import ModelConfig


class AdapterTable:
    """Fields of `kernels.tables.Lora`, and the memory that they point to.

    Parameters
    ----------
    config : ModelConfig
    adapters : sequence of LoraWeights
        A token's number of an adapter is its place here.

    Raises
    ------
    UnsupportedModelError
        If an adapter changes a tensor that is none of a layer's attention or feed-forward matrices.
    """

    def __init__(self, config: ModelConfig, adapters: Sequence[LoraWeights]) -> None:
        sources = [s for layer in range(config.n_layers) for s in _adaptable(config, layer)]
        assert len(sources) == config.n_layers * MATRICES_PER_LAYER
        self._kept: list[NDArray[np.float32]] = []
        self._widths = np.zeros((len(adapters), len(sources)), np.int64)  # inputs and outputs together
        self._matrices = np.zeros((len(adapters), len(sources), LORA_MATRIX_FIELDS), np.int64)
        for number, adapter in enumerate(adapters):
            self._fill(number, adapter, sources)
        self._bytes = 4 * (self._matrices[:, :, LoraMatrix.RANK] * self._widths).sum(axis=1)
        self._max_rank = int(self._matrices[:, :, LoraMatrix.RANK].max())
        self._shrunk = np.zeros(0, np.float32)
        self.table = np.zeros(len(Lora), np.int64)
        self.table[Lora.MATRICES] = self._matrices.ctypes.data
        self.table[Lora.N_MATRICES] = len(sources)
        self.table[Lora.MAX_RANK] = self._max_rank

    def _fill(self, number: int, adapter: LoraWeights, sources: list[MatrixSource | None]) -> None:
        unused = set(adapter.matrices)
        for column, source in enumerate(sources):
            if source is None or source.name not in adapter.matrices:
                continue
            unused.discard(source.name)
            a, b = adapter.matrices[source.name]
            a, b = np.ascontiguousarray(a), np.ascontiguousarray(b[source.start : source.stop].T)
            self._kept += [a, b]
            self._widths[number, column] = a.shape[1] + b.shape[1]
            row = self._matrices[number, column]
            row[LoraMatrix.A], row[LoraMatrix.B] = a.ctypes.data, b.ctypes.data
            row[LoraMatrix.RANK], row[LoraMatrix.OUTPUTS] = len(a), b.shape[1]
        if unused:
            raise UnsupportedModelError(
                f"the adapter {adapter.path} changes {min(unused)}; supported are the matrices of attention "
                "that is not latent and of feed-forward networks without experts"
            )

    def grow(self, n: int) -> None:
        """Make room for n tokens."""
        self._shrunk = np.zeros(3 * n * self._max_rank, np.float32)
        self.table[Lora.SHRUNK] = self._shrunk.ctypes.data

    def bytes_of(self, adapters: NDArray[Any]) -> int:
        """Bytes that a pass reads of the adapters that its tokens have."""
        return int(self._bytes[np.unique(adapters[adapters >= 0])].sum())

    def set_tokens(self, adapters: NDArray[Any]) -> None:
        """Say which adapter each token has: int32 [n], −1 for none. The array must outlive the step."""
        self.table[Lora.TOKEN_ADAPTERS] = adapters.ctypes.data


def _adaptable(config: ModelConfig, layer: int) -> list[MatrixSource | None]:
    """The seven matrices of a layer, None where the kernels do not add what an adapter says."""
    sources = list(layer_sources(config, layer))
    if config.latent:
        sources[Q] = sources[K] = sources[V] = None
    if config.layer_experts[layer]:
        sources[GATE] = sources[UP] = sources[DOWN] = None
    return sources
