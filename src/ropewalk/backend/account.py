"""The account of a step: how many bytes of weights and of KV cache it has to read and write.

Exact, from the packed tables and the batch: every packed matrix and vector once for each pass through the layers,
the output matrix only where logits are wanted, of the experts those that some token goes through, and of the embedding
the rows of the tokens. Of the KV cache, in each
layer, the keys and values (with their scales) of the positions that a pass looks at, once for each sequence: the
window of the first token up to the last token. Not counted: activations, tables of angles and page tables, which stay
in the caches.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
from numpy.typing import NDArray

from ropewalk.backend.base import PAGE_SIZE, StepRecord
from ropewalk.backend.weights import PackedWeights
from ropewalk.kernels.tables import (
    DOWN,
    DOWN_EXPS,
    EXPERT_MATRICES_PER_LAYER,
    GATE,
    GATE_EXPS,
    K_B,
    LATENT_MATRICES_PER_LAYER,
    MATRICES_PER_LAYER,
    OUT,
    Q_A,
    ROUTER,
    UP,
    UP_EXPS,
    V_B,
    K,
    Matrix,
    Q,
    V,
)
from ropewalk.model.config import ModelConfig

PART_MATRICES = {"qkv": (Q, K, V), "out": (OUT,), "gate_up": (GATE, UP), "down": (DOWN,)}


class Account:
    """What passes through one model cost.

    Parameters
    ----------
    weights : PackedWeights
    config : ModelConfig
    embedding_row_bytes : int
        Bytes of one token's row of the embedding, as it is stored.
    """

    def __init__(self, weights: PackedWeights, config: ModelConfig, embedding_row_bytes: int) -> None:
        sizes = weights.matrices[:, Matrix.N_PANELS] * weights.matrices[:, Matrix.PANEL_BYTES]
        output = MATRICES_PER_LAYER * config.n_layers
        layers = sizes[:output].reshape(config.n_layers, MATRICES_PER_LAYER)
        self._layer_bytes = {part: int(layers[:, list(which)].sum()) for part, which in PART_MATRICES.items()}
        self._layer_bytes["norm"] = sum(v.nbytes for v in weights.vectors.values())
        self._output_bytes = int(sizes[output])
        n_latent_rows = 0 if config.latent is None else LATENT_MATRICES_PER_LAYER * config.n_layers
        experts, latent = np.split(sizes[output + 1 :], [len(sizes) - output - 1 - n_latent_rows])
        self._experts = experts.reshape(-1, EXPERT_MATRICES_PER_LAYER)  # one expert's; of routers all
        if n_latent_rows:
            per_head = latent.reshape(-1, LATENT_MATRICES_PER_LAYER)
            self._layer_bytes["qkv"] += int(per_head[:, Q_A].sum() + config.n_heads * per_head[:, K_B].sum())
            self._layer_bytes["out"] += int(config.n_heads * per_head[:, V_B].sum())
        if len(self._experts):
            self._layer_bytes["route"] = int(self._experts[:, ROUTER].sum())
        self._expert_biases = np.zeros(config.n_layers, np.int64)
        for name, vector in weights.vectors.items():
            if name.endswith("_exps.bias"):
                self._expert_biases[int(name.split(".")[1])] += vector.nbytes // len(vector)
                self._layer_bytes["norm"] -= vector.nbytes
        self._embedding_row_bytes = embedding_row_bytes
        self._windows = Counter(config.layer_window)

    def weight_bytes(
        self, n_tokens: int, n_logits: int, n_experts: NDArray[np.int32] | None = None
    ) -> dict[str, int]:
        """Bytes of weights that one pass of `n_tokens` tokens reads, by part.

        `n_experts` [n_layers] is how many experts each layer used, where there are any.
        """
        output = {"output": self._output_bytes} if n_logits else {}
        read = {**self._layer_bytes, **output, "embedding": n_tokens * self._embedding_row_bytes}
        if n_experts is not None:
            gate_up = self._experts[:, [GATE_EXPS, UP_EXPS]].sum(axis=1) + self._expert_biases
            read["gate_up"] += int((n_experts * gate_up).sum())
            read["down"] += int((n_experts * self._experts[:, DOWN_EXPS]).sum())
        return read

    def cached_positions(self, positions: NDArray[np.int32], sequences: NDArray[np.int32]) -> int:
        """Positions whose keys and values one pass reads, added up over sequences and layers."""
        firsts = np.flatnonzero(np.diff(sequences, prepend=-1))
        lasts = np.append(firsts[1:], len(sequences)) - 1
        first, end = positions[firsts].astype(np.int64), positions[lasts].astype(np.int64) + 1
        total = 0
        for window, n_layers in self._windows.items():
            begin = np.maximum(first - window + 1, 0) if window else 0
            total += n_layers * int((end - begin).sum())
        return total

    def note(
        self,
        record: StepRecord,
        positions: NDArray[np.int32],
        sequences: NDArray[np.int32],
        n_logits: int,
        page_bytes: int,
        n_experts: NDArray[np.int32] | None = None,
    ) -> None:
        """Add one pass to a record; `page_bytes` are those of a page of the cache over all layers."""
        for part, n_bytes in self.weight_bytes(len(positions), n_logits, n_experts).items():
            record.weight_bytes[part] = record.weight_bytes.get(part, 0) + n_bytes
        layer_token_bytes = page_bytes // (PAGE_SIZE * self._windows.total())
        record.cache_read_bytes += self.cached_positions(positions, sequences) * layer_token_bytes
        record.cache_written_bytes += len(positions) * page_bytes // PAGE_SIZE
