"""Which tensors a model of some configuration is made of, and of what shape: no more and no fewer are read.

Shapes are in NumPy order, a matrix is [outputs, inputs]. Names are GGUF's own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ropewalk.model.config import LatentConfig, ModelConfig


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a model of this configuration has; nothing else is read."""
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (config.vocab_size, hidden)}
    if config.learned_positions:
        shapes["position_embd.weight"] = (config.learned_positions, hidden)
    for layer in range(config.n_layers):
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in layer_shapes(config, layer).items()}
    shapes["output_norm.weight"] = (hidden,)
    if "output_norm" in config.biases:
        shapes["output_norm.bias"] = (hidden,)
    if not config.tied_output:
        shapes["output.weight"] = (config.vocab_size, hidden)
    if "output" in config.biases:
        shapes["output.bias"] = (config.vocab_size,)
    shapes |= {name: (rope.width // 2,) for rope in config.rope for name in rope.tensors}
    return shapes


def layer_shapes(config: ModelConfig, layer: int) -> dict[str, tuple[int, ...]]:
    """Name (without its `blk.<n>.`) and shape of the tensors of one layer, in the order of their use."""
    hidden, head_dim = config.hidden_size, config.head_dim
    q_rows, kv_rows = config.n_heads * head_dim, config.n_kv_heads * head_dim
    weights: dict[str, tuple[int, ...]] = {}
    if config.attn_norm:
        weights[config.attn_norm] = (hidden,)
    if config.latent:
        weights |= _latent_shapes(config, config.latent)
    elif config.fused_qkv:
        weights["attn_qkv"] = (q_rows + 2 * kv_rows, hidden)
    else:
        weights |= {"attn_q": (q_rows, hidden), "attn_k": (kv_rows, hidden), "attn_v": (kv_rows, hidden)}
    if config.qk_norm:
        weights |= {
            "attn_q_norm": _qk_norm_shape(config, config.n_heads),
            "attn_k_norm": _qk_norm_shape(config, config.n_kv_heads),
        }
    if config.sinks:
        weights["attn_sinks"] = (config.n_heads,)
    weights["attn_output"] = (hidden, config.n_heads * config.latent.value if config.latent else q_rows)
    if config.post_norms:
        weights["post_attention_norm"] = (hidden,)
    if config.ffn_norm:
        weights[config.ffn_norm] = (hidden,)
    weights |= _expert_shapes(config) if config.layer_experts[layer] else _dense_shapes(config)
    if config.post_norms:
        weights["post_ffw_norm"] = (hidden,)
    shapes = {}
    for stem, shape in weights.items():
        shapes[f"{stem}.weight"] = shape
        if stem in config.biases:
            shapes[f"{stem}.bias"] = shape if "norm" in stem else shape[:-1]
    if config.layer_experts[layer] and config.experts and config.experts.selection_bias:
        shapes["exp_probs_b.bias"] = (config.experts.n_experts,)
    return shapes


def _latent_shapes(config: ModelConfig, latent: LatentConfig) -> dict[str, tuple[int, ...]]:
    hidden, n_heads, rank = config.hidden_size, config.n_heads, latent.kv_rank
    q_rows = n_heads * (latent.nope + latent.rope)
    shapes: dict[str, tuple[int, ...]] = {"attn_q": (q_rows, hidden)}
    if latent.q_rank:
        shapes = {
            "attn_q_a": (latent.q_rank, hidden),
            "attn_q_a_norm": (latent.q_rank,),
            "attn_q_b": (q_rows, latent.q_rank),
        }
    return shapes | {
        "attn_kv_a_mqa": (rank + latent.rope, hidden),
        "attn_kv_a_norm": (rank,),
        "attn_k_b": (n_heads, rank, latent.nope),
        "attn_v_b": (n_heads, latent.value, rank),
    }


def _qk_norm_shape(config: ModelConfig, n_heads: int) -> tuple[int, ...]:
    head_dim = config.head_dim
    return {"head": (head_dim,), "each head": (n_heads, head_dim), "row": (n_heads * head_dim,)}[
        config.qk_norm
    ]


def _dense_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden, ffn = config.hidden_size, config.ffn_size
    gate: dict[str, tuple[int, ...]] = (
        {"ffn_gate": (ffn, hidden)} if config.gated and not config.fused_gate_up else {}
    )
    up_rows = 2 * ffn if config.fused_gate_up else ffn
    return gate | {"ffn_up": (up_rows, hidden), "ffn_down": (hidden, ffn)}


def _expert_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    assert config.experts
    n, ffn, hidden = config.experts.n_experts, config.experts.ffn_size, config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        "ffn_gate_inp": (n, hidden),
        "ffn_gate_exps": (n, ffn, hidden),
        "ffn_up_exps": (n, ffn, hidden),
        "ffn_down_exps": (n, hidden, ffn),
    }
    if shared := config.experts.shared_ffn_size:
        if config.experts.shared_gate:
            shapes["ffn_gate_inp_shexp"] = (hidden,)
        shapes |= {
            "ffn_gate_shexp": (shared, hidden),
            "ffn_up_shexp": (shared, hidden),
            "ffn_down_shexp": (hidden, shared),
        }
    return shapes
