"""The shape of a model from its Hugging Face `config.json` alone: layers of the cache, and a count of its weights.

Weights are counted from the sizes of an ordinary decoder: attention, feed-forward network or experts, norms, embedding
and output matrix. So any configuration that says its sizes can be planned for, whether Ropewalk can run it or not.
Biases count where the configuration states them, or the family always has them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ropewalk.errors import CheckpointError
from ropewalk.plan.memory import WeightType, weight_type
from ropewalk.plan.shape import LayerShape, ModelShape, Part, Weights

MAX_LAYERS = 4096
_PLAIN_FFN = frozenset(
    {"gpt2", "gpt_neox", "starcoder2", "phi", "falcon", "opt", "gpt_bigcode", "bloom", "mpt"}
)
_QKV_BIAS = frozenset({"qwen2", "qwen2_moe"})
_QK_NORM = frozenset({"qwen3", "qwen3_moe", "gemma3", "gemma3_text"})
_POST_NORMS = frozenset({"gemma2", "gemma3", "gemma3_text"})
_TIED = frozenset({"gemma", "gemma2", "gemma3", "gemma3_text", "gpt2"})
"""Families of which a configuration does not say it: a feed-forward network without gate, and so on."""


def shape_of_hf(path: Path, kind: WeightType | None = None) -> ModelShape:
    """Read the shape from a `config.json`, or from a folder that has one.

    Parameters
    ----------
    kind : WeightType, optional
        Default: what `torch_dtype` (or `dtype`) says, and BF16 without it.

    Raises
    ------
    CheckpointError
        The file is no JSON object, or lacks a size, or has an absurd one.
    """
    path = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise CheckpointError(f"{path} is not JSON") from None
    if not isinstance(config, Mapping):
        raise CheckpointError(f"{path} is not a JSON object")
    name = config.get("_name_or_path")
    return shape_of_config(config, name if isinstance(name, str) and name else str(path), kind)


def shape_of_config(config: Mapping[str, Any], name: str, kind: WeightType | None = None) -> ModelShape:
    """The shape of a parsed `config.json`; raises as `shape_of_hf`."""
    outer = config
    inner = config.get("text_config")
    sizes = _Sizes({**config, **inner} if isinstance(inner, Mapping) else config)
    kind = kind or _stated_type(outer, sizes.values)
    n_layers = sizes.integer("num_hidden_layers", "n_layer", "num_layers", "n_layers", high=MAX_LAYERS)
    layers = _layers(sizes, n_layers)
    counts = _count(sizes, layers)
    n_experts = sizes.optional("num_local_experts", "num_experts", "n_routed_experts")
    parts = {name: Part(count, kind.n_bytes(count)) for name, count in counts.items()}
    weights = Weights(
        parts["dense"],
        parts["output"],
        parts["embedding"],
        parts["experts"],
        n_experts=n_experts,
        n_used=sizes.integer("num_experts_per_tok", "moe_topk", high=n_experts) if n_experts else 0,
    )
    context = sizes.optional("max_position_embeddings", "n_positions", "n_ctx", "seq_length")
    return ModelShape(
        name=name,
        layers=layers,
        weights=weights,
        weight_type=kind.name,
        context_length=context or None,
        notes=("weights counted from the sizes in config.json",),
    )


def _stated_type(*configs: Mapping[str, Any]) -> WeightType:
    for config in configs:
        stated = config.get("torch_dtype", config.get("dtype"))
        if isinstance(stated, str):
            return weight_type(stated.removeprefix("torch."))
    return weight_type("BF16")


def _layers(sizes: _Sizes, n_layers: int) -> tuple[LayerShape, ...]:
    heads = sizes.integer("num_attention_heads", "n_head", "n_heads")
    kv_heads = sizes.optional("num_key_value_heads", "n_head_kv", "num_kv_heads")
    if not kv_heads:
        kv_heads = 1 if sizes.values.get("multi_query") is True else heads
    if heads % kv_heads:
        raise CheckpointError(
            f"num_key_value_heads = {kv_heads} does not divide num_attention_heads = {heads}"
        )
    lora = sizes.optional("kv_lora_rank")
    if lora:
        rope = sizes.integer("qk_rope_head_dim")
        key_dim, value_dim = sizes.integer("qk_nope_head_dim") + rope, sizes.integer("v_head_dim")
        return (LayerShape(heads, heads, key_dim, value_dim, 0, lora + rope),) * n_layers
    head_dim = sizes.optional("head_dim") or sizes.hidden // heads
    return tuple(
        LayerShape(heads, kv_heads, head_dim, head_dim, window) for window in _windows(sizes, n_layers)
    )


def _windows(sizes: _Sizes, n_layers: int) -> list[int]:
    """The sliding window of each layer, by the list of layer types, or the pattern, or for all."""
    window = sizes.optional("sliding_window")
    if not window or sizes.values.get("use_sliding_window") is False:
        return [0] * n_layers
    kinds = sizes.values.get("layer_types")
    if isinstance(kinds, Sequence) and len(kinds) == n_layers:
        return [window if kind == "sliding_attention" else 0 for kind in kinds]
    if period := sizes.optional("sliding_window_pattern", "_sliding_window_pattern"):
        return [window if layer % period else 0 for layer in range(1, n_layers + 1)]
    if sizes.values.get("use_sliding_window") is True:
        first = sizes.optional("max_window_layers")
        return [window if layer >= first else 0 for layer in range(n_layers)]
    return [window] * n_layers


def _count(sizes: _Sizes, layers: Sequence[LayerShape]) -> dict[str, int]:
    """Weights of each part; see `ropewalk.plan.shape`."""
    hidden, vocab = sizes.hidden, sizes.integer("vocab_size")
    counts = {
        "dense": hidden,  # the last norm
        "experts": 0,
        "output": vocab * hidden,
        "embedding": vocab * hidden,
    }
    if sizes.values.get("tie_word_embeddings", sizes.family in _TIED) is True:
        counts["embedding"] = 0
    for number, layer in enumerate(layers):
        counts["dense"] += _attention(sizes, layer)
        counts["dense"] += hidden * (4 if sizes.family in _POST_NORMS else 2)
        for part, count in _feed_forward(sizes, number).items():
            counts[part] += count
    return counts


def _attention(sizes: _Sizes, layer: LayerShape) -> int:
    hidden = sizes.hidden
    q_rows = layer.n_heads * layer.key_dim
    if layer.latent:
        lora, rope = sizes.integer("kv_lora_rank"), sizes.integer("qk_rope_head_dim")
        q_lora = sizes.optional("q_lora_rank")
        queries = (hidden + q_rows + 1) * q_lora if q_lora else hidden * q_rows
        unpacked = lora * layer.n_heads * (layer.key_dim - rope + layer.value_dim) + lora
        return queries + hidden * layer.latent + unpacked + layer.n_heads * layer.value_dim * hidden
    kv_rows = layer.n_kv_heads * layer.key_dim
    count = 2 * hidden * (q_rows + kv_rows)
    bias = sizes.values.get("attention_bias", sizes.values.get("qkv_bias"))
    if bias is True or sizes.family in _QKV_BIAS:
        count += q_rows + 2 * kv_rows
    return count + (2 * layer.key_dim if sizes.family in _QK_NORM else 0)


def _feed_forward(sizes: _Sizes, number: int) -> dict[str, int]:
    hidden = sizes.hidden
    n_matrices = 2 if sizes.family in _PLAIN_FFN else 3
    n_experts = sizes.optional("num_local_experts", "num_experts", "n_routed_experts")
    step = sizes.optional("decoder_sparse_step", "moe_layer_freq") or 1
    if not n_experts or number < sizes.optional("first_k_dense_replace") or (number + 1) % step:
        ffn = sizes.optional("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size") or 4 * hidden
        return {"dense": n_matrices * hidden * ffn}
    ffn = sizes.optional("moe_intermediate_size") or sizes.integer("intermediate_size")
    # A gate of one row decides how much of it counts.
    gated = sizes.optional("shared_expert_intermediate_size")
    shared = gated or sizes.optional("n_shared_experts") * ffn
    return {
        "dense": hidden * n_experts + n_matrices * hidden * shared + (hidden if gated else 0),
        "experts": n_experts * n_matrices * hidden * ffn,
    }


class _Sizes:
    """Integers of a configuration under the several names that they have."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values
        self.family = str(values.get("model_type", ""))
        self.hidden = self.integer("hidden_size", "n_embd", "d_model")

    def integer(self, *names: str, high: int = 2**31 - 1) -> int:
        value = self._find(names)
        if value is None:
            raise CheckpointError(f"config.json has no {names[0]!r}: without it nothing can be planned")
        return self._checked(names[0], value, 1, high)

    def optional(self, *names: str) -> int:
        """The number, or 0 where there is none."""
        value = self._find(names)
        return 0 if value is None or value is False else self._checked(names[0], value, 0, 2**31 - 1)

    def _find(self, names: Sequence[str]) -> Any:
        return next((self.values[name] for name in names if self.values.get(name) is not None), None)

    @staticmethod
    def _checked(name: str, value: Any, low: int, high: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise CheckpointError(
                f"config.json has {name} = {value!r:.60}; it must be an integer from {low} to {high}"
            )
        return value
