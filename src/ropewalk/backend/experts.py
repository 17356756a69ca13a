"""The table and the buffers of a model's experts, as `kernels.moe` reads them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ropewalk.kernels.definition import TOKEN_GROUP_BYTES
from ropewalk.kernels.matmul import max_tile
from ropewalk.kernels.moe import SIGMOID, SOFTMAX, SOFTMAX_OF_CHOSEN
from ropewalk.kernels.tables import Layer, Moe
from ropewalk.kernels.tiles import READS_FLOATS
from ropewalk.model.config import ExpertConfig, ModelConfig

SCORINGS = {"softmax": SOFTMAX, "sigmoid": SIGMOID, "softmax of chosen": SOFTMAX_OF_CHOSEN}


class ExpertTable:
    """Fields of `kernels.tables.Moe`, and the memory that they point to.

    Parameters
    ----------
    layers : int64 [n_layers, fields]
        The table of `kernels.tables.Layer`.

    Attributes
    ----------
    table : int64 [fields]
    active : int32 [n_layers]
        How many experts of each layer the last pass used; 0 where a layer has none.
    """

    def __init__(self, config: ModelConfig, experts: ExpertConfig, layers: NDArray[np.int64]) -> None:
        self._config, self._experts = config, experts
        inputs = layers[:, [Layer.EXPERT_INPUT, Layer.EXPERT_DOWN_INPUT]]
        self._reads_floats = bool((inputs & READS_FLOATS).any())
        self.table = np.zeros(len(Moe), np.int64)
        self.active = np.zeros(config.n_layers, np.int32)
        self._scale = np.array([experts.weight_scale], np.float32)
        self._buffers: dict[Moe, NDArray[Any]] = {}
        n = experts.n_experts
        for field in (Moe.COUNTS, Moe.FIRSTS, Moe.ACTIVE):
            self._buffers[field] = np.zeros(n, np.int32)
        constants = {
            Moe.N_EXPERTS: n,
            Moe.N_USED: experts.n_used,
            Moe.FFN: experts.ffn_size,
            Moe.SCORING: SCORINGS[experts.scoring],
            Moe.NORMALISE: experts.normalise,
            Moe.HAS_SHARED_GATE: experts.shared_gate,
            Moe.N_GROUPS: experts.n_groups,
            Moe.N_GROUPS_USED: experts.n_groups_used,
            Moe.WEIGHT_SCALE: self._scale.ctypes.data,
            Moe.SCORES_STRIDE: 4 * self._scores_width,
            Moe.ACTIVE_OF_LAYERS: self.active.ctypes.data,
        }
        for field, value in constants.items():
            self.table[field] = value

    @property
    def _scores_width(self) -> int:
        """Floats of router outputs (in whole panels), of what is chosen by, and of the groups' scores."""
        return -(-(3 * self._experts.n_experts + 17) // 16) * 16

    def grow(self, n: int) -> None:
        """Make room for n tokens."""
        experts, hidden = self._experts, self._config.hidden_size
        n_pairs = n * experts.n_used
        # The tiles of a group end on a power of two.
        n_rows = n_pairs + min(n_pairs, experts.n_experts * max_tile())
        groups = max(hidden, experts.ffn_size) // 32
        self._buffers |= {
            Moe.SCORES: np.zeros((n, self._scores_width), np.float32),
            Moe.CHOSEN: np.zeros(n_pairs, np.int32),
            Moe.WEIGHTS: np.zeros(n_pairs, np.float32),
            Moe.ROWS: np.zeros(n_pairs, np.int32),
            Moe.SHARED_GATES: np.zeros(n, np.float32),
            Moe.GATE: np.zeros((n_rows, experts.ffn_size), np.float32),
            Moe.UP: np.zeros((n_rows, experts.ffn_size), np.float32),
            Moe.OUT: np.zeros((n_rows, hidden), np.float32),
            Moe.BYTE_TILES: np.zeros(n_rows * groups * TOKEN_GROUP_BYTES, np.uint8),
            Moe.FLOAT_TILES: np.zeros((n_rows if self._reads_floats else 0, groups * 32), np.float32),
        }
        for field, buffer in self._buffers.items():
            self.table[field] = buffer.ctypes.data
