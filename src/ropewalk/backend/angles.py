"""Cosines and sines of every layer, for as many positions as were asked for, as the kernels read them.

A model has one table of frequencies, or two: then one follows the other, and a token of a sequence that is longer than
the model's `rope_switch` finds its angles `n_positions` rows further down. Cosines and sines contain the attention
factor of the rotary scaling.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ropewalk.backend.base import PAGE_SIZE, Float32Array, Int32Array, StepBatch
from ropewalk.kernels.tables import Layer
from ropewalk.model.config import ModelConfig
from ropewalk.model.rope import rope_table


class Angles:
    """The tables of one model.

    Parameters
    ----------
    config : ModelConfig
    tensor : callable
        Reads a tensor of the model file by name.
    layers : int64 [n_layers, ...]
        The layer table of `kernels.tables`; COS and SIN are filled in here.

    Attributes
    ----------
    n_positions : int
        Positions that the tables reach: whole pages.

    Raises
    ------
    CheckpointError, UnsupportedModelError
        As `ropewalk.model.rope.rope_table`.
    """

    def __init__(
        self, config: ModelConfig, tensor: Callable[[str], ArrayLike], layers: NDArray[np.int64]
    ) -> None:
        self.n_positions = 0
        self._layer_rope = config.layer_rope
        self._switch = config.rope_switch
        self._tables = [rope_table(rope, tensor, config.context_length) for rope in config.rope]
        self._layers = layers
        self._angles: list[tuple[Float32Array, Float32Array]] = []
        self._by_pair = False
        self._turns: list[Float32Array] = []

    def reach(self, n_positions: int) -> None:
        """Make the tables reach so many positions."""
        if n_positions <= self.n_positions:
            return
        self.n_positions = -(-max(n_positions, 2 * self.n_positions) // PAGE_SIZE) * PAGE_SIZE
        self._angles = [t.angles(self.n_positions, twice=self._switch > 0) for t in self._tables]
        for layer, rope in zip(self._layers, self._layer_rope, strict=True):
            if rope >= 0:
                layer[Layer.COS], layer[Layer.SIN] = (x.ctypes.data for x in self._angles[rope])
        if self._by_pair:
            self.turn()

    def turn(self) -> None:
        """From now on have them by pair too, float32 [width / 2, cosine then sine, rows], for an int8 cache."""
        self._by_pair = True
        self._turns = [np.ascontiguousarray(np.stack([cos.T, sin.T], axis=1)) for cos, sin in self._angles]
        for layer, rope in zip(self._layers, self._layer_rope, strict=True):
            if rope >= 0:
                turns = self._turns[rope]
                layer[Layer.TURNS], layer[Layer.TURN_BYTES] = turns.ctypes.data, turns.strides[1]

    def rows(self, batch: StepBatch) -> Int32Array:
        """The row of every token of a batch, whose positions are within reach: int32 [n]."""
        if not self._switch:
            return batch.positions
        is_long = batch.known[batch.sequences] > self._switch
        return (batch.positions + self.n_positions * is_long).astype(np.int32)
