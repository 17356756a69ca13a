"""Packing a checkpoint for the kernels: one arena of bytes, and the tables that say what lies where.

Each matrix is cut into panels (`kernels.formats`) by all threads at once, tensor by tensor, and the file's pages
are let go as soon as they are packed, so that the model is never in memory twice.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from ropewalk.backend.sources import MatrixSource, ffn_width, layer_vectors, matrices_of
from ropewalk.checkpoint.base import Checkpoint, TensorInfo
from ropewalk.kernels.formats import FLOAT_KINDS, GROUP, PACKED, PANEL_ROWS
from ropewalk.kernels.matmul import matmul_worker, tiles
from ropewalk.kernels.pack import packer
from ropewalk.kernels.tables import (
    DOWN,
    DOWN_EXPS,
    EXPERT_MATRICES_PER_LAYER,
    GATE,
    GATE_EXPS,
    K_B,
    LATENT_MATRICES_PER_LAYER,
    MATRICES_PER_LAYER,
    MATRIX_FIELDS,
    ONTO_Y,
    OUT,
    Q_A,
    TO_X,
    TO_Y,
    UP,
    UP_EXPS,
    V_B,
    K,
    Layer,
    Matrix,
    Q,
    V,
)
from ropewalk.kernels.tiles import READS_BYTES, READS_FLOATS
from ropewalk.model.config import ModelConfig

PANELS_AT_A_TIME = 64
# Which matrices of a layer read the same activations, and the field of the layer table that says in which form.
INPUTS = {
    Layer.QKV_INPUT: (Q, K, V),
    Layer.OUT_INPUT: (OUT,),
    Layer.FFN_INPUT: (GATE, UP),
    Layer.DOWN_INPUT: (DOWN,),
}


@dataclass(frozen=True, eq=False)
class PackedWeights:
    """Everything that `kernels.forward` reads of a model.

    Attributes
    ----------
    arena : uint8 [n_bytes]
        All panels, each matrix aligned to 64 bytes.
    vectors : dict of float32 [n]
        Norms, biases and sinks by tensor name.
    layers, matrices : int64
        The tables of `kernels.tables`; their addresses point into the two above.
    output_input : int
        Which tiles the output matrix reads.
    """

    arena: NDArray[np.uint8]
    vectors: dict[str, NDArray[np.float32]]
    layers: NDArray[np.int64]
    matrices: NDArray[np.int64]
    output_input: int

    @property
    def n_bytes(self) -> int:
        """Bytes of all packed matrices and vectors."""
        return self.arena.nbytes + sum(v.nbytes for v in self.vectors.values())

    @property
    def reads_floats(self) -> bool:
        """Whether any matrix is of a float type."""
        return bool(self.matrices[:, Matrix.IS_FLOAT].any())


def pack_model(
    checkpoint: Checkpoint,
    config: ModelConfig,
    n_threads: int,
    progress: Callable[[str, float], None] | None = None,
) -> PackedWeights:
    """Pack every matrix of a model; raises as `matrices_of` does."""
    found = matrices_of(checkpoint, config)
    report = progress or (lambda what, share: None)
    sizes = [_packed_bytes(*matrix) if matrix else 0 for matrix in found]
    arena = np.empty(sum(sizes) + 64, np.uint8)
    start = -arena.ctypes.data % 64
    matrices = np.zeros((len(found), MATRIX_FIELDS), np.int64)
    done = 0
    with ThreadPoolExecutor(n_threads) as pool:
        for row, matrix, size in zip(matrices, found, sizes, strict=True):
            if matrix is None:
                continue
            n_panels = _n_experts(matrix[0]) * _panels(matrix[1])
            region = arena[start + done : start + done + size].reshape(n_panels, -1)
            _pack_matrix(checkpoint, *matrix, region, pool)
            _fill_row(row, *matrix, region)
            done += size
            report("loading weights", done / sum(sizes))
    vectors = _read_vectors(checkpoint, config)
    layers = _layer_table(config, vectors, matrices)
    checkpoint.release()
    output = matrices[MATRICES_PER_LAYER * config.n_layers]
    return PackedWeights(arena, vectors, layers, matrices, _reads(output[None]))


def _panels(source: MatrixSource) -> int:
    """Panels of a matrix, or of one expert's."""
    return -(-source.n_rows // PANEL_ROWS)


def _n_experts(info: TensorInfo) -> int:
    return info.shape[0] if len(info.shape) == 3 else 1


def _packed_bytes(info: TensorInfo, source: MatrixSource) -> int:
    return _n_experts(info) * _panels(source) * PACKED[info.format.name].panel_bytes(info.shape[-1])


def _pack_matrix(
    checkpoint: Checkpoint,
    info: TensorInfo,
    source: MatrixSource,
    region: NDArray[np.uint8],
    pool: ThreadPoolExecutor,
) -> None:
    if source.below is not None:
        raws = [_float_rows(checkpoint, source)]
    else:
        raw = checkpoint.raw(info.name)
        raws = list(raw) if raw.ndim == 3 else [raw[source.start : source.stop]]
    pack, each = packer(PACKED[info.format.name].kind, info.format.block_bytes), _panels(source)

    def run(task: tuple[int, int]) -> None:
        expert, first = task
        panels = region[expert * each + first : expert * each + min(first + PANELS_AT_A_TIME, each)]
        panels[:] = 0
        pack(raws[expert], panels, first)
        checkpoint.release()  # not once a matrix: an output matrix may be a fifth of the file

    list(pool.map(run, product(range(len(raws)), range(0, each, PANELS_AT_A_TIME))))


def _float_rows(checkpoint: Checkpoint, source: MatrixSource) -> NDArray[np.uint8]:
    """The rows of a matrix and of the vector below it, as the bytes of float32."""
    rows = checkpoint.tensor(source.name)[source.start : source.stop]
    if source.below:
        rows = np.concatenate([rows, checkpoint.tensor(source.below)[None]])
    return np.ascontiguousarray(rows, np.float32).view(np.uint8)


def _fill_row(
    row: NDArray[np.int64], info: TensorInfo, source: MatrixSource, region: NDArray[np.uint8]
) -> None:
    kind = PACKED[info.format.name].kind
    row[Matrix.PANELS] = region.ctypes.data
    row[Matrix.N_PANELS], row[Matrix.PANEL_BYTES] = _panels(source), region.shape[1]
    row[Matrix.N_GROUPS] = info.shape[-1] // GROUP
    row[Matrix.IS_FLOAT] = kind in FLOAT_KINDS
    row[Matrix.FINE] = source.fine
    for i, tile in enumerate(tiles()):
        row[Matrix.WORKERS + i] = matmul_worker(kind, tile, int(source.fine))


def _read_vectors(checkpoint: Checkpoint, config: ModelConfig) -> dict[str, NDArray[np.float32]]:
    """Norms, biases and sinks, float32, whatever type the file stores them in; the output's bias in whole panels."""
    names = ["output_norm.weight", "output_norm.bias", "output.bias"]
    for layer in range(config.n_layers):
        names += [name for name, _ in layer_vectors(config, layer).values()]
    vectors = {name: checkpoint.tensor(name) for name in names if name in checkpoint.tensors}
    if "output.bias" in vectors:
        vectors["output.bias"] = np.pad(vectors["output.bias"], (0, -config.vocab_size % PANEL_ROWS))
    if config.parallel:  # the branches end as one, and so do their biases
        for layer in range(config.n_layers):
            attention, down = (f"blk.{layer}.{stem}.bias" for stem in ("attn_output", "ffn_down"))
            if attention in vectors:
                vectors[down] = vectors[attention] + vectors.get(down, np.float32(0))
    return vectors


def _layer_table(
    config: ModelConfig, vectors: dict[str, NDArray[np.float32]], matrices: NDArray[np.int64]
) -> NDArray[np.int64]:
    layers = np.zeros((config.n_layers, len(Layer)), np.int64)
    for layer, row in enumerate(layers):
        for field, (name, start) in layer_vectors(config, layer).items():
            vector = vectors.get(name)
            row[field] = 0 if vector is None else vector.ctypes.data + 4 * start
        row[Layer.WINDOW] = config.layer_window[layer]
        row[Layer.FFN], row[Layer.HAS_EXPERTS] = ffn_width(config, layer), config.layer_experts[layer]
        row[Layer.ATTN_END], row[Layer.FFN_END] = _ends(config, row)
        of_layer = matrices[MATRICES_PER_LAYER * layer :]
        for field, which in INPUTS.items():
            row[field] = _reads(of_layer[list(which)])
        if config.latent:
            last = LATENT_MATRICES_PER_LAYER * (config.n_layers - layer)
            _fill_latent(config, row, of_layer, matrices[len(matrices) - last :])
        if row[Layer.HAS_EXPERTS]:
            own = matrices[MATRICES_PER_LAYER * config.n_layers + 1 + EXPERT_MATRICES_PER_LAYER * layer :]
            row[Layer.FFN_INPUT] |= READS_FLOATS  # the router
            row[Layer.EXPERT_INPUT] = _reads(own[[GATE_EXPS, UP_EXPS]])
            row[Layer.EXPERT_DOWN_INPUT] = _reads(own[[DOWN_EXPS]])
    return layers


def _fill_latent(
    config: ModelConfig, row: NDArray[np.int64], of_layer: NDArray[np.int64], own: NDArray[np.int64]
) -> None:
    """Fields of latent attention; `own` begins with the layer's Q_A, K_B and V_B."""
    row[Layer.LATENT_MATRICES] = own.ctypes.data
    row[Layer.LATENT_Q_INPUT] = _reads(of_layer[[Q]])
    row[Layer.LATENT_KEY_INPUT], row[Layer.LATENT_VALUE_INPUT] = _reads(own[[K_B]]), _reads(own[[V_B]])
    if config.latent and config.latent.q_rank:
        row[Layer.QKV_INPUT] = _reads(of_layer[[K]]) | _reads(own[[Q_A]])


def _ends(config: ModelConfig, row: NDArray[np.int64]) -> tuple[int, int]:
    """Where the last product of each branch goes."""
    if config.parallel:
        return TO_Y, ONTO_Y
    more = config.post_norms or config.residual_scale != 1
    attention = TO_Y if more or row[Layer.OUT_BIAS] else TO_X
    return attention, TO_Y if more or row[Layer.DOWN_BIAS] or row[Layer.HAS_EXPERTS] else TO_X


def _reads(rows: NDArray[np.int64]) -> int:
    """In which forms these matrices read their activations."""
    floats = [bool(row[Matrix.IS_FLOAT]) for row in rows if row[Matrix.N_PANELS]]
    return (0 if all(floats) else READS_BYTES) | (READS_FLOATS if any(floats) else 0)
