"""Where the matrices and vectors of the kernels' tables are in a model file: names and rows, as data.

Knows the names of tensors and the order of the tables, not how a matrix is packed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

from ropewalk.checkpoint.base import Checkpoint, TensorInfo
from ropewalk.checkpoint.quants import FORMATS
from ropewalk.errors import UnsupportedModelError
from ropewalk.kernels.formats import PACKED
from ropewalk.kernels.tables import EXPERT_MATRICES_PER_LAYER, Layer
from ropewalk.model.config import LatentConfig, ModelConfig

QKV_BIASES = (Layer.Q_BIAS, Layer.K_BIAS, Layer.V_BIAS)


@dataclass(frozen=True)
class MatrixSource:
    """Where a matrix of the table is in the file: rows `start` to `stop` of a tensor, or of each expert's part of it.

    Attributes
    ----------
    below : str, optional
        A vector that is one more row. The matrix is packed as float32 then, whatever the file has.
    fine : bool
        Whether it reads 16-bit activations.
    """

    name: str
    start: int
    stop: int
    fine: bool = False
    below: str | None = None

    @property
    def n_rows(self) -> int:
        """Rows, with the one below."""
        return self.stop - self.start + bool(self.below)


def matrix_sources(config: ModelConfig) -> list[MatrixSource | None]:
    """Every matrix in table order; None where a layer does without."""
    sources: list[MatrixSource | None] = []
    for layer in range(config.n_layers):
        sources += layer_sources(config, layer)
    output = "token_embd.weight" if config.tied_output else "output.weight"
    sources.append(MatrixSource(output, 0, config.vocab_size, fine=True))
    if config.experts:
        for layer, has_experts in enumerate(config.layer_experts):
            sources += expert_sources(config, layer) if has_experts else [None] * EXPERT_MATRICES_PER_LAYER
    if config.latent:
        for layer in range(config.n_layers):
            sources += latent_sources(config, config.latent, layer)
    return sources


def layer_sources(config: ModelConfig, layer: int) -> tuple[MatrixSource | None, ...]:
    """The seven matrices of a layer in the order of `kernels.tables`.

    A feed-forward network without a gate has its only matrix before the activation in the gate's place.
    """
    block, head_dim, hidden, ffn = f"blk.{layer}.", config.head_dim, config.hidden_size, config.ffn_size
    q, kv = config.n_heads * head_dim, config.n_kv_heads * head_dim
    if config.latent:
        latent, of_q = config.latent, "attn_q_b.weight" if config.latent.q_rank else "attn_q.weight"
        qkv: list[MatrixSource | None] = [
            MatrixSource(block + of_q, 0, config.n_heads * (latent.nope + latent.rope), fine=True),
            MatrixSource(block + "attn_kv_a_mqa.weight", 0, head_dim, fine=True),
            None,
        ]
    elif config.fused_qkv:
        name = block + "attn_qkv.weight"
        ends = (0, q, q + kv, q + 2 * kv)
        qkv = [MatrixSource(name, *rows, fine=True) for rows in pairwise(ends)]
    else:
        rows_of = {"q": q, "k": kv, "v": kv}
        qkv = [MatrixSource(f"{block}attn_{x}.weight", 0, rows, fine=True) for x, rows in rows_of.items()]
    attention = (*qkv, MatrixSource(block + "attn_output.weight", 0, hidden))
    if config.layer_experts[layer]:
        return (*attention, *shared_expert_sources(config, layer))
    up_name, down = block + "ffn_up.weight", MatrixSource(block + "ffn_down.weight", 0, hidden)
    up: MatrixSource | None = MatrixSource(up_name, 0, ffn)
    if config.fused_gate_up:
        gate, up = MatrixSource(up_name, 0, ffn), MatrixSource(up_name, ffn, 2 * ffn)
    elif config.gated:
        gate = MatrixSource(block + "ffn_gate.weight", 0, ffn)
    else:
        gate, up = MatrixSource(up_name, 0, ffn), None
    return (*attention, gate, up, down)


def latent_sources(config: ModelConfig, latent: LatentConfig, layer: int) -> list[MatrixSource | None]:
    """What queries are made from, and the matrices of each head beside latent attention."""
    block = f"blk.{layer}."
    q_a = MatrixSource(block + "attn_q_a.weight", 0, latent.q_rank, fine=True) if latent.q_rank else None
    return [
        q_a,
        MatrixSource(block + "attn_k_b.weight", 0, latent.kv_rank, fine=True),
        MatrixSource(block + "attn_v_b.weight", 0, latent.value),
    ]


def shared_expert_sources(config: ModelConfig, layer: int) -> tuple[MatrixSource | None, ...]:
    """Gate, up and down of the expert that every token goes through; None where there is none."""
    width = config.experts.shared_ffn_size if config.experts else 0
    rows = {"gate": width, "up": width, "down": config.hidden_size}
    name = f"blk.{layer}.ffn_{{}}_shexp.weight"
    return tuple(MatrixSource(name.format(part), 0, n) if width else None for part, n in rows.items())


def expert_sources(config: ModelConfig, layer: int) -> list[MatrixSource | None]:
    """The router, below it the gate of the shared expert, and gate, up and down of all experts."""
    block, experts = f"blk.{layer}.", config.experts
    assert experts
    shared_gate = block + "ffn_gate_inp_shexp.weight" if experts.shared_gate else ""
    rows = {"gate": experts.ffn_size, "up": experts.ffn_size, "down": config.hidden_size}
    return [
        MatrixSource(block + "ffn_gate_inp.weight", 0, experts.n_experts, below=shared_gate),
        *(MatrixSource(f"{block}ffn_{part}_exps.weight", 0, n) for part, n in rows.items()),
    ]


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
        Layer.Q_A_NORM: ("attn_q_a_norm.weight", 0),
        Layer.KV_A_NORM: ("attn_kv_a_norm.weight", 0),
        Layer.ROUTER_BIAS: ("ffn_gate_inp.bias", 0),
        Layer.CHOICE_BIAS: ("exp_probs_b.bias", 0),
        Layer.EXPERT_GATE_BIAS: ("ffn_gate_exps.bias", 0),
        Layer.EXPERT_UP_BIAS: ("ffn_up_exps.bias", 0),
        Layer.EXPERT_DOWN_BIAS: ("ffn_down_exps.bias", 0),
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


def matrices_of(checkpoint: Checkpoint, config: ModelConfig) -> list[tuple[TensorInfo, MatrixSource] | None]:
    """Every matrix in table order, as the file describes it; None where a layer does without.

    Raises
    ------
    UnsupportedModelError
        A matrix has a type that no kernel multiplies, or the model needs something else that no kernel has.
    """
    if config.qkv_bias and (config.qk_norm == "row" or config.latent):
        place = "in latent attention" if config.latent else "before a norm over all heads"
        raise UnsupportedModelError(f"biases of q, k and v {place} are not implemented")
    found: list[tuple[TensorInfo, MatrixSource] | None] = []
    for source in matrix_sources(config):
        if source is None:
            found.append(None)
            continue
        info = checkpoint.tensors[source.name]
        if source.below is not None:
            info = replace(info, format=FORMATS["F32"])
        if info.format.name not in PACKED:
            raise UnsupportedModelError(
                f"tensor {info.name} has type {info.format.name}; the CPU kernels multiply {', '.join(PACKED)}"
            )
        found.append((info, source))
    return found


def ffn_width(config: ModelConfig, layer: int) -> int:
    """Width of a layer's feed-forward network, or of its shared expert."""
    if config.experts and config.layer_experts[layer]:
        return config.experts.shared_ffn_size
    return config.ffn_size
