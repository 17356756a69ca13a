"""Packing a checkpoint for the kernels: one arena of bytes, and the tables that say what lies where.

Each matrix is cut into panels (`kernels.formats`) by all threads at once, tensor by tensor, and the file's pages
are let go as soon as they are packed, so that the model is never in memory twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ropewalk.checkpoint.gguf import GGUF, TensorInfo
from ropewalk.errors import UnsupportedModelError
from ropewalk.kernels.formats import FLOAT_KINDS, GROUP, PACKED, PANEL_ROWS
from ropewalk.kernels.matmul import matmul_worker, tiles
from ropewalk.kernels.pack import packer
from ropewalk.kernels.products import READS_BYTES, READS_FLOATS
from ropewalk.kernels.tables import MATRIX_FIELDS, Layer, Matrix
from ropewalk.model.config import ModelConfig

# The seven matrices of a layer in the order of `kernels.tables`, and whether each reads 16-bit activations.
LAYER_MATRICES = (
    ("attn_q.weight", True),
    ("attn_k.weight", True),
    ("attn_v.weight", True),
    ("attn_output.weight", False),
    ("ffn_gate.weight", False),
    ("ffn_up.weight", False),
    ("ffn_down.weight", False),
)
# Which matrices read the same activations, and the field of the layer table that says in which form.
INPUTS = {
    Layer.QKV_INPUT: ("attn_q.weight", "attn_k.weight", "attn_v.weight"),
    Layer.OUT_INPUT: ("attn_output.weight",),
    Layer.FFN_INPUT: ("ffn_gate.weight", "ffn_up.weight"),
    Layer.DOWN_INPUT: ("ffn_down.weight",),
}
LAYER_VECTORS = {
    Layer.ATTN_NORM: "attn_norm.weight",
    Layer.Q_BIAS: "attn_q.bias",
    Layer.K_BIAS: "attn_k.bias",
    Layer.V_BIAS: "attn_v.bias",
    Layer.Q_NORM: "attn_q_norm.weight",
    Layer.K_NORM: "attn_k_norm.weight",
    Layer.POST_ATTN_NORM: "post_attention_norm.weight",
    Layer.FFN_NORM: "ffn_norm.weight",
    Layer.POST_FFN_NORM: "post_ffw_norm.weight",
}
PANELS_AT_A_TIME = 64


@dataclass(frozen=True, eq=False)
class PackedWeights:
    """Everything that `kernels.forward` reads of a model.

    Attributes
    ----------
    arena : uint8 [n_bytes]
        All panels, each matrix aligned to 64 bytes.
    vectors : dict of float32 [n]
        Norms and biases by tensor name.
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


def matrix_names(config: ModelConfig) -> Iterator[tuple[str, bool]]:
    """Tensor name of every matrix in table order, and whether it reads 16-bit activations."""
    for layer in range(config.n_layers):
        for name, fine in LAYER_MATRICES:
            yield f"blk.{layer}.{name}", fine
    yield ("token_embd.weight" if config.tied_output else "output.weight"), True


def matrices_of(checkpoint: GGUF, config: ModelConfig) -> list[tuple[TensorInfo, bool]]:
    """Every matrix in table order, and whether it reads 16-bit activations.

    Raises
    ------
    UnsupportedModelError
        A matrix has a type that no kernel multiplies.
    """
    if config.architecture not in ("llama", "qwen2", "gemma", "gemma2", "gemma3", "internlm2") or config.experts:
        raise UnsupportedModelError(
            f"architecture {config.architecture} runs in the reference, not yet in the CPU kernels"
        )
    infos = [(checkpoint.tensors[name], fine) for name, fine in matrix_names(config)]
    for info, _ in infos:
        if info.format.name not in PACKED:
            raise UnsupportedModelError(
                f"tensor {info.name} has type {info.format.name}; the CPU kernels multiply {', '.join(PACKED)}"
            )
    return infos


def pack_model(
    checkpoint: GGUF,
    config: ModelConfig,
    n_threads: int,
    progress: Callable[[str, float], None] | None = None,
) -> PackedWeights:
    """Pack every matrix of a model; raises as `matrices_of` does."""
    infos = matrices_of(checkpoint, config)
    report = progress or (lambda what, share: None)
    sizes = [_panels(info) * PACKED[info.format.name].panel_bytes(info.shape[1]) for info, _ in infos]
    arena = np.empty(sum(sizes) + 64, np.uint8)
    start = -arena.ctypes.data % 64
    matrices = np.zeros((len(infos), MATRIX_FIELDS), np.int64)
    done = 0
    with ThreadPoolExecutor(n_threads) as pool:
        for row, (info, fine), size in zip(matrices, infos, sizes, strict=True):
            region = arena[start + done : start + done + size].reshape(_panels(info), -1)
            _pack_matrix(checkpoint, info, region, pool)
            _fill_row(row, info, fine, region)
            done += size
            report("loading weights", done / sum(sizes))
    vectors = _read_vectors(checkpoint, config)
    layers = _layer_table(checkpoint, config, vectors)
    checkpoint.release()
    return PackedWeights(arena, vectors, layers, matrices, _reads(checkpoint, [infos[-1][0].name]))


def _panels(info: TensorInfo) -> int:
    return -(-info.shape[0] // PANEL_ROWS)


def _pack_matrix(
    checkpoint: GGUF, info: TensorInfo, region: NDArray[np.uint8], pool: ThreadPoolExecutor
) -> None:
    raw = checkpoint.raw(info.name)
    pack = packer(PACKED[info.format.name].kind, info.format.block_bytes)

    def run(first: int) -> None:
        panels = region[first : first + PANELS_AT_A_TIME]
        panels[:] = 0
        pack(raw, panels, first)

    list(pool.map(run, range(0, len(region), PANELS_AT_A_TIME)))
    checkpoint.release()


def _fill_row(row: NDArray[np.int64], info: TensorInfo, fine: bool, region: NDArray[np.uint8]) -> None:
    kind = PACKED[info.format.name].kind
    row[Matrix.PANELS] = region.ctypes.data
    row[Matrix.N_PANELS], row[Matrix.PANEL_BYTES] = region.shape
    row[Matrix.N_GROUPS] = info.shape[1] // GROUP
    row[Matrix.IS_FLOAT] = kind in FLOAT_KINDS
    row[Matrix.FINE] = fine
    for i, tile in enumerate(tiles()):
        row[Matrix.WORKERS + i] = matmul_worker(kind, tile, int(fine))


def _read_vectors(checkpoint: GGUF, config: ModelConfig) -> dict[str, NDArray[np.float32]]:
    """Norms and biases, float32, whatever type the file stores them in."""
    names = ["output_norm.weight"]
    for layer in range(config.n_layers):
        names += [f"blk.{layer}.{name}" for name in LAYER_VECTORS.values()]
    return {name: checkpoint.tensor(name) for name in names if name in checkpoint.tensors}


def _layer_table(
    checkpoint: GGUF, config: ModelConfig, vectors: dict[str, NDArray[np.float32]]
) -> NDArray[np.int64]:
    layers = np.zeros((config.n_layers, len(Layer)), np.int64)
    for layer, row in enumerate(layers):
        for field, name in LAYER_VECTORS.items():
            vector = vectors.get(f"blk.{layer}.{name}")
            row[field] = 0 if vector is None else vector.ctypes.data
        row[Layer.WINDOW] = config.layer_window[layer]
        for field, names in INPUTS.items():
            row[field] = _reads(checkpoint, [f"blk.{layer}.{name}" for name in names])
    return layers


def _reads(checkpoint: GGUF, names: list[str]) -> int:
    """In which forms these matrices read their activations."""
    floats = [PACKED[checkpoint.tensors[name].format.name].kind in FLOAT_KINDS for name in names]
    return (0 if all(floats) else READS_BYTES) | (READS_FLOATS if any(floats) else 0)
