"""Model families as rows of data: what each architecture computes, and which tensors it is made of.

There is one decoder (`reference.py` spells it out). A `Family` states the few choices in which architectures
differ; `tensor_shapes` states which tensors a file must have, may have, and of what shape. Nothing here reads
a file, and nothing elsewhere branches on an architecture's name.

Shapes are in NumPy order, a matrix is [outputs, inputs]. Names are GGUF's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from ropewalk.model.config import ModelConfig

Activation = Literal["silu", "gelu_tanh"]
RopeLayout = Literal["neighbours", "halves"]


@dataclass(frozen=True)
class Family:
    """One row: the choices of an architecture that its GGUF metadata takes for granted.

    Attributes
    ----------
    rope_layout
        Which dimensions rotate together. GGUF stores the `llama` projections permuted for neighbouring pairs.
    rope_base
        Rotary base when the file does not state one.
    activation
        Of the gate in the feed-forward network.
    scales_embedding
        Whether the embedding row is multiplied by the square root of the hidden size.
    qkv_bias
        Whether the q, k and v projections have a bias: always, never, or when the file has the tensors.
    qk_norm
        Whether every head of q and of k is RMS-normalised before its rotation.
    post_norms
        Whether each branch is RMS-normalised once more before it is added to the residual stream.
    window_period
        p > 0: layers attend through the sliding window, except every p-th (p, 2p, …, counted from 1), which
        sees everything. 0: no layer has a window.
    local_rope_base
        Rotary base of the layers with a window, when the file does not state one.
    wide_scale_layers
        Layer counts of published checkpoints whose attention scale is 1/√(hidden / heads) instead of
        1/√head_dim: a fact about those weights that GGUF has no key for.
    """

    rope_layout: RopeLayout
    activation: Activation = "silu"
    rope_base: float = 10_000.0
    scales_embedding: bool = False
    qkv_bias: Literal["always", "never", "optional"] = "never"
    qk_norm: bool = False
    post_norms: bool = False
    window_period: int = 0
    local_rope_base: float = 10_000.0
    wide_scale_layers: frozenset[int] = field(default_factory=frozenset)


FAMILIES: Mapping[str, Family] = {
    "llama": Family(rope_layout="neighbours", qkv_bias="optional"),
    "qwen2": Family(rope_layout="halves", qkv_bias="always"),
    "gemma3": Family(
        rope_layout="halves",
        activation="gelu_tanh",
        rope_base=1_000_000.0,
        scales_embedding=True,
        qk_norm=True,
        post_norms=True,
        window_period=6,
        wide_scale_layers=frozenset({62}),  # Gemma 3 27B: query_pre_attn_scalar 168 = 5376 / 32
    ),
}

# Metadata keys (without the architecture's prefix) of features that are not implemented, and the values that
# mean "not used". Any other value is refused.
UNIMPLEMENTED_KEYS: Mapping[str, tuple[object, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "embedding_scale": (0, 1),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "logit_scale": (0, 1),
    "nextn_predict_layers": (0,),
    "residual_scale": (0, 1),
    "rope.scale_linear": (0, 1),
    "rope.scaling.alpha": (0, 1),
    "rope.scaling.attn_factor": (0, 1),
    "rope.scaling.factor": (0, 1),
    "rope.scaling.type": ("none",),
    "tensor_data_layout": (),
    "use_parallel_residual": (False,),
}

# Keys that say something, but nothing that changes the logits when the keys above are neutral.
INERT_KEYS = frozenset(
    {"rope.scaling.finetuned", "rope.scaling.original_context_length", "tokens_per_second"}
)

# Tensors that other architectures have. A file of ours that carries one computes something else than its
# architecture's name says. Biases and scales of any other tensor are refused the same way.
UNIMPLEMENTED_TENSORS = frozenset(
    f"{stem}.weight"
    for stem in (
        "attn_k_norm",
        "attn_norm_2",
        "attn_q_norm",
        "attn_qkv",
        "attn_sinks",
        "attn_sub_norm",
        "ffn_down_exps",
        "ffn_gate_exps",
        "ffn_gate_inp",
        "ffn_sub_norm",
        "ffn_up_exps",
        "layer_output_norm",
        "layer_output_scale",
        "post_attention_norm",
        "post_ffw_norm",
    )
)


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a model of this configuration has; nothing else is read."""
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (config.vocab_size, hidden)}
    for layer in range(config.n_layers):
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in layer_shapes(config).items()}
    shapes["output_norm.weight"] = (hidden,)
    if not config.tied_output:
        shapes["output.weight"] = (config.vocab_size, hidden)
    if any(rope.freq_factors for rope in config.rope):
        shapes["rope_freqs.weight"] = (config.rope[0].width // 2,)
    return shapes


def layer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name (without its `blk.<n>.`) and shape of the tensors of one layer, in the order of their use."""
    hidden, ffn = config.hidden_size, config.ffn_size
    q_rows, kv_rows = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "attn_norm.weight": (hidden,),
        "attn_q.weight": (q_rows, hidden),
        "attn_k.weight": (kv_rows, hidden),
        "attn_v.weight": (kv_rows, hidden),
    }
    if config.qkv_bias:
        shapes |= {"attn_q.bias": (q_rows,), "attn_k.bias": (kv_rows,), "attn_v.bias": (kv_rows,)}
    if config.qk_norm:
        shapes |= {"attn_q_norm.weight": (config.head_dim,), "attn_k_norm.weight": (config.head_dim,)}
    shapes["attn_output.weight"] = (hidden, q_rows)
    if config.post_norms:
        shapes["post_attention_norm.weight"] = (hidden,)
    shapes |= {
        "ffn_norm.weight": (hidden,),
        "ffn_gate.weight": (ffn, hidden),
        "ffn_up.weight": (ffn, hidden),
        "ffn_down.weight": (hidden, ffn),
    }
    if config.post_norms:
        shapes["post_ffw_norm.weight"] = (hidden,)
    return shapes
