"""Packing a checkpoint for the kernels: one arena of bytes, and the tables that say what lies where.

Each matrix is cut into panels (`kernels.formats`) by all threads at once, tensor by tensor, and the file's pages
are let go as soon as they are packed, so that the model is never in memory twice.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ropewalk.checkpoint.gguf import GGUF, TensorInfo
from ropewalk.errors import UnsupportedModelError
from ropewalk.kernels.formats import FLOAT_KINDS, GROUP, PACKED, PANEL_ROWS
from ropewalk.kernels.matmul import matmul_worker, tiles
from ropewalk.kernels.pack import packer
from ropewalk.kernels.products import READS_BYTES, READS_FLOATS
from ropewalk.kernels.tables import (
    DOWN,
    GATE,
    MATRICES_PER_LAYER,
    MATRIX_FIELDS,
    ONTO_Y,
    OUT,
    TO_X,
    TO_Y,
    UP,
    K,
    Layer,
    Matrix,
    Q,
    V,
)
from ropewalk.model.config import ModelConfig

PANELS_AT_A_TIME = 64
QKV_BIASES = (Layer.Q_BIAS, Layer.K_BIAS, Layer.V_BIAS)
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


@dataclass(frozen=True)
class MatrixSource:
    """Where a matrix of the table is in the file: rows `start` to `stop` of a tensor.

    Attributes
    ----------
    fine : bool
        Whether it reads 16-bit activations.
    """

    name: str
    start: int
    stop: int
    fine: bool = False


def matrix_sources(config: ModelConfig) -> list[MatrixSource | None]:
    """Every matrix in table order; None where a layer does without."""
    sources: list[MatrixSource | None] = []
    for layer in range(config.n_layers):
        sources += layer_sources(config, layer)
    output = "token_embd.weight" if config.tied_output else "output.weight"
    return [*sources, MatrixSource(output, 0, config.vocab_size, fine=True)]


def layer_sources(config: ModelConfig, layer: int) -> tuple[MatrixSource | None, ...]:
    """The seven matrices of a layer in the order of `kernels.tables`.

    A feed-forward network without a gate has its only matrix before the activation in the gate's place.
    """
    block, head_dim, hidden, ffn = f"blk.{layer}.", config.head_dim, config.hidden_size, config.ffn_size
    q, kv = config.n_heads * head_dim, config.n_kv_heads * head_dim
    if config.fused_qkv:
        name = block + "attn_qkv.weight"
        ends = (0, q, q + kv, q + 2 * kv)
        qkv = [MatrixSource(name, *rows, fine=True) for rows in pairwise(ends)]
    else:
        rows_of = {"q": q, "k": kv, "v": kv}
        qkv = [MatrixSource(f"{block}attn_{x}.weight", 0, rows, fine=True) for x, rows in rows_of.items()]
    up_name, down = block + "ffn_up.weight", MatrixSource(block + "ffn_down.weight", 0, hidden)
    up: MatrixSource | None = MatrixSource(up_name, 0, ffn)
    if config.fused_gate_up:
        gate, up = MatrixSource(up_name, 0, ffn), MatrixSource(up_name, ffn, 2 * ffn)
    elif config.gated:
        gate = MatrixSource(block + "ffn_gate.weight", 0, ffn)
    else:
        gate, up = MatrixSource(up_name, 0, ffn), None
    return (*qkv, MatrixSource(block + "attn_output.weight", 0, hidden), gate, up, down)


def layer_vectors(config: ModelConfig, layer: int) -> dict[Layer, tuple[str, int]]:
    """Norms and biases of a layer: field of the table, and the tensor's name and the element where it begins.

    Names that the file does not have are fields that stay 0.
    """
    q, kv = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    row_norm = config.qk_norm == "row"
    stems = {
        Layer.ATTN_NORM: (f"{config.attn_norm}.weight", 0),
        Layer.ATTN_NORM_BIAS: (f"{config.attn_norm}.bias", 0),
        Layer.FFN_NORM: (f"{config.ffn_norm}.weight", 0),
        Layer.FFN_NORM_BIAS: (f"{config.ffn_norm}.bias", 0),
        Layer.Q_BIAS: ("attn_q.bias", 0),
        Layer.K_BIAS: ("attn_k.bias", 0),
        Layer.V_BIAS: ("attn_v.bias", 0),
        Layer.Q_ROW_NORM if row_norm else Layer.Q_NORM: ("attn_q_norm.weight", 0),
        Layer.K_ROW_NORM if row_norm else Layer.K_NORM: ("attn_k_norm.weight", 0),
        Layer.SINKS: ("attn_sinks.weight", 0),
        Layer.OUT_BIAS: ("attn_output.bias", 0),
        Layer.GATE_BIAS: ("ffn_gate.bias", 0),
        Layer.UP_BIAS: ("ffn_up.bias", 0),
        Layer.DOWN_BIAS: ("ffn_down.bias", 0),
    }
    if config.fused_qkv:
        stems |= {field: ("attn_qkv.bias", at) for field, at in zip(QKV_BIASES, (0, q, q + kv), strict=True)}
    if config.fused_gate_up:
        stems |= {Layer.GATE_BIAS: ("ffn_up.bias", 0), Layer.UP_BIAS: ("ffn_up.bias", config.ffn_size)}
    elif not config.gated:
        stems |= {Layer.GATE_BIAS: ("ffn_up.bias", 0), Layer.UP_BIAS: ("", 0)}
    if config.post_norms:
        stems[Layer.POST_ATTN_NORM] = ("post_attention_norm.weight", 0)
        stems[Layer.POST_FFN_NORM] = ("post_ffw_norm.weight", 0)
    return {field: (f"blk.{layer}.{name}", start) for field, (name, start) in stems.items()}


def matrices_of(checkpoint: GGUF, config: ModelConfig) -> list[tuple[TensorInfo, MatrixSource] | None]:
    """Every matrix in table order, as the file describes it; None where a layer does without.

    Raises
    ------
    UnsupportedModelError
        A matrix has a type that no kernel multiplies, or the model needs something else that no kernel has.
    """
    if config.qk_norm == "row" and config.qkv_bias:
        raise UnsupportedModelError("biases of q, k and v before a norm over all heads are not implemented")
    if config.experts:
        raise UnsupportedModelError(
            f"architecture {config.architecture} has experts, which the CPU kernels do not have yet"
        )
    found = [(checkpoint.tensors[s.name], s) if s else None for s in matrix_sources(config)]
    for info, _ in filter(None, found):
        if info.format.name not in PACKED:
            raise UnsupportedModelError(
                f"tensor {info.name} has type {info.format.name}; the CPU kernels multiply {', '.join(PACKED)}"
            )
    return found


def pack_model(
    checkpoint: GGUF,
    config: ModelConfig,
    n_threads: int,
    progress: Callable[[str, float], None] | None = None,
) -> PackedWeights:
    """Pack every matrix of a model; raises as `matrices_of` does."""
    found = matrices_of(checkpoint, config)
    report = progress or (lambda what, share: None)
    sizes = [_panels(m[1]) * PACKED[m[0].format.name].panel_bytes(m[0].shape[-1]) if m else 0 for m in found]
    arena = np.empty(sum(sizes) + 64, np.uint8)
    start = -arena.ctypes.data % 64
    matrices = np.zeros((len(found), MATRIX_FIELDS), np.int64)
    done = 0
    with ThreadPoolExecutor(n_threads) as pool:
        for row, matrix, size in zip(matrices, found, sizes, strict=True):
            if matrix is None:
                continue
            region = arena[start + done : start + done + size].reshape(_panels(matrix[1]), -1)
            _pack_matrix(checkpoint, *matrix, region, pool)
            _fill_row(row, *matrix, region)
            done += size
            report("loading weights", done / sum(sizes))
    vectors = _read_vectors(checkpoint, config)
    layers = _layer_table(config, vectors, matrices)
    checkpoint.release()
    return PackedWeights(arena, vectors, layers, matrices, _reads(matrices[-1:]))


def _panels(source: MatrixSource) -> int:
    return -(-(source.stop - source.start) // PANEL_ROWS)


def _pack_matrix(
    checkpoint: GGUF,
    info: TensorInfo,
    source: MatrixSource,
    region: NDArray[np.uint8],
    pool: ThreadPoolExecutor,
) -> None:
    raw = checkpoint.raw(info.name)[source.start : source.stop]
    pack = packer(PACKED[info.format.name].kind, info.format.block_bytes)

    def run(first: int) -> None:
        panels = region[first : first + PANELS_AT_A_TIME]
        panels[:] = 0
        pack(raw, panels, first)

    list(pool.map(run, range(0, len(region), PANELS_AT_A_TIME)))
    checkpoint.release()


def _fill_row(
    row: NDArray[np.int64], info: TensorInfo, source: MatrixSource, region: NDArray[np.uint8]
) -> None:
    kind = PACKED[info.format.name].kind
    row[Matrix.PANELS] = region.ctypes.data
    row[Matrix.N_PANELS], row[Matrix.PANEL_BYTES] = region.shape
    row[Matrix.N_GROUPS] = info.shape[-1] // GROUP
    row[Matrix.IS_FLOAT] = kind in FLOAT_KINDS
    row[Matrix.FINE] = source.fine
    for i, tile in enumerate(tiles()):
        row[Matrix.WORKERS + i] = matmul_worker(kind, tile, int(source.fine))


def _read_vectors(checkpoint: GGUF, config: ModelConfig) -> dict[str, NDArray[np.float32]]:
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
        row[Layer.ATTN_END], row[Layer.FFN_END] = _ends(config, row)
        of_layer = matrices[MATRICES_PER_LAYER * layer :]
        for field, which in INPUTS.items():
            row[field] = _reads(of_layer[list(which)])
    return layers


def _ends(config: ModelConfig, row: NDArray[np.int64]) -> tuple[int, int]:
    """Where the last product of each branch goes."""
    if config.parallel:
        return TO_Y, ONTO_Y
    more = config.post_norms or config.residual_scale != 1
    return (TO_Y if more or row[Layer.OUT_BIAS] else TO_X), (TO_Y if more or row[Layer.DOWN_BIAS] else TO_X)


def _reads(rows: NDArray[np.int64]) -> int:
    """In which forms these matrices read their activations."""
    floats = [bool(row[Matrix.IS_FLOAT]) for row in rows if row[Matrix.N_PANELS]]
    return (0 if all(floats) else READS_BYTES) | (READS_FLOATS if any(floats) else 0)
