"""Families of Hugging Face's layout as rows of data: for each `model_type` of a `config.json` what GGUF calls it.

`FAMILIES` says which GGUF architecture it is, which table of `names` has its tensors, and what its configuration is
silent about. A function computes the keys that this family has alone, from a key of the configuration or several. What
GGUF has no key for must have the value that the architecture takes for granted, or is refused by name.

This module does not know files or tensors. Sources: the configuration classes of transformers and the GGUF
specification.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ropewalk.checkpoint.hf_values import Config
from ropewalk.errors import CheckpointError

Keys = dict[str, object]


@dataclass(frozen=True)
class HFFamily:
    """What a `model_type` is.

    Attributes
    ----------
    architecture : GGUF's name for it.
    table : which of `names.TABLES` has its tensors.
    activations : values of its activation key that mean what the architecture computes.
    layer_norm : whether the epsilon is that of LayerNorm.
    window_period : how GGUF readers spread windows over the layers when no pattern is written: every p-th has
        none; 0: all have it.
    demands : keys whose other values are not implemented, with the allowed ones.
    extra : further keys, computed.
    rope_part : the rotated share of a head where the configuration does not say.
    """

    architecture: str
    table: str
    activations: tuple[str, ...] = ("silu", "swish")
    layer_norm: bool = False
    window_period: int = 0
    demands: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    extra: Callable[[Config], Keys] | None = None
    rope_part: float = 1.0


def _experts(config: Config) -> Keys:
    """Numbers of a mixture of experts; absent where there is none."""
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    if config.first(*names) is None:
        return {}
    keys: Keys = {
        "expert_count": config.integer(*names),
        "expert_used_count": config.integer("num_experts_per_tok", "experts_per_token"),
        "expert_feed_forward_length": config.integer("moe_intermediate_size", "intermediate_size"),
    }
    if config.first("shared_expert_intermediate_size"):
        keys["expert_shared_feed_forward_length"] = config.integer("shared_expert_intermediate_size")
    if (normalised := config.flag("norm_topk_prob")) is not None:
        keys["expert_weights_norm"] = normalised
    return keys


def _qwen_experts(config: Config) -> Keys:
    """Every layer has experts."""
    config.demand("decoder_sparse_step", 1)
    config.demand("mlp_only_layers", [])
    return _experts(config)


def _shared_experts(config: Config) -> Keys:
    """Leading dense layers, shared experts that are counted in experts, and a factor of what the others give."""
    keys = _experts(config) | {
        "expert_shared_count": config.integer("n_shared_experts", default=0),
        "leading_dense_block_count": config.integer("first_k_dense_replace", default=0),
    }
    if (scale := config.number("routed_scaling_factor")) is not None:
        keys["expert_weights_scale"] = scale
    return keys


def _sigmoid_experts(config: Config) -> Keys:
    """Routers that score by a sigmoid, without groups."""
    config.demand("n_group", 1)
    config.demand("topk_group", 1)
    return _shared_experts(config)


def _deepseek(config: Config) -> Keys:
    """Latent attention, whose cache is that of one head for all; and its experts, chosen in groups or not."""
    config.demand("topk_method", "greedy", "group_limited_greedy", "noaux_tc")
    config.demand("rope_interleave", True)
    config.demand("scoring_func", "softmax", "sigmoid")
    config.demand("attention_bias", False)
    config.demand("moe_layer_freq", 1)
    rank, rope, value = (config.integer(k) for k in ("kv_lora_rank", "qk_rope_head_dim", "v_head_dim"))
    keys = _shared_experts(config) | {
        "attention.head_count_kv": 1,
        "attention.kv_lora_rank": rank,
        "attention.key_length": rank + rope,
        "attention.value_length": rank,
        "attention.key_length_mla": config.integer("qk_nope_head_dim") + rope,
        "attention.value_length_mla": value,
        "expert_gating_func": 2 if _is_sigmoid(config) else 1,
    }
    if config.first("q_lora_rank"):
        keys["attention.q_lora_rank"] = config.integer("q_lora_rank")
    in_groups = _is_sigmoid(config) or config.first("topk_method") == "group_limited_greedy"
    if in_groups and config.integer("n_group", default=1) > 1:
        keys["expert_group_count"] = config.integer("n_group")
        keys["expert_group_used_count"] = config.integer("topk_group")
    return keys


def _is_sigmoid(config: Config) -> bool:
    """DeepSeek V3 scores its experts so; its configuration need not say it."""
    said = config.first("scoring_func")
    return said == "sigmoid" if said else config.values.get("model_type") == "deepseek_v3"


def _scores(config: Config) -> Keys:
    """Gemma's soft caps, and its scale of q·k."""
    keys: Keys = {}
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if cap := config.number(key):
            keys[key] = cap
    if (scalar := config.number("query_pre_attn_scalar")) is not None:
        if scalar <= 0:
            raise CheckpointError(f"{config.label}: query_pre_attn_scalar is {scalar}; allowed: above 0")
        keys["attention.scale"] = 1 / math.sqrt(scalar)
    return keys


def _granite(config: Config) -> Keys:
    """Four factors, and experts where there are some."""
    names = {
        "embedding_scale": "embedding_multiplier",
        "residual_scale": "residual_multiplier",
        "attention.scale": "attention_multiplier",
        "logit_scale": "logits_scaling",
    }
    given = {ours: config.number(theirs) for ours, theirs in names.items()}
    return {k: v for k, v in given.items() if v is not None} | _experts(config)


def _minicpm(config: Config) -> Keys:
    """Factors of embedding, residual stream and logits (Hu et al. 2024, arXiv:2404.06395, section 3.1)."""
    keys: Keys = {}
    if (scale := config.number("scale_emb")) is not None:
        keys["embedding_scale"] = scale
    if (depth := config.number("scale_depth")) is not None:
        keys["residual_scale"] = depth / math.sqrt(config.integer("num_hidden_layers"))
    if base := config.number("dim_model_base"):
        keys["logit_scale"] = config.integer("hidden_size") / base
    return keys


def _cohere(config: Config) -> Keys:
    """A factor of the logits."""
    scale = config.number("logit_scale")
    return {} if scale is None else {"logit_scale": scale}


def _parallel(config: Config) -> Keys:
    """Whether attention and feed-forward network read the same input."""
    value = config.flag("use_parallel_residual")
    return {} if value is None else {"use_parallel_residual": value}


def _clamped(config: Config) -> Keys:
    """Queries, keys and values that are cut off, and experts."""
    limit = config.number("clip_qkv")
    return ({"attention.clamp_kqv": limit} if limit else {}) | _experts(config)


def _smollm3(config: Config) -> Keys:
    """Every fourth layer is without rotation, as GGUF's readers take for granted."""
    layers = config.integer("num_hidden_layers")
    config.demand("no_rope_layers", [int(n % 4 != 3) for n in range(layers)])
    if config.first("no_rope_layers") is None:
        config.demand("no_rope_layer_interval", 4)
    config.demand("use_sliding_window", False)
    return {}


def _gpt_oss(config: Config) -> Keys:
    """Experts with the one gate that is implemented."""
    config.demand("swiglu_alpha", 1.702)
    config.demand("swiglu_limit", 7.0)
    return _experts(config)


_GELU_TANH = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")
_GEMMA = ("gelu_pytorch_tanh", "gelu")
"""Gemma 1's files say "gelu" and mean the tanh form, as their own code does."""
_TEXT = ("silu",)

_LLAMA = HFFamily("llama", "llama")
FAMILIES: Mapping[str, HFFamily] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "ministral": _LLAMA,
    "internlm3": HFFamily("llama", "llama", demands={"qkv_bias": (False,)}),
    "mixtral": HFFamily("llama", "mixtral", extra=_experts),
    "qwen2": HFFamily("qwen2", "qwen2"),
    "qwen3": HFFamily("qwen3", "qwen3"),
    "qwen2_moe": HFFamily("qwen2moe", "qwen2_moe", extra=_qwen_experts),
    "qwen3_moe": HFFamily("qwen3moe", "qwen3_moe", extra=_qwen_experts),
    "olmoe": HFFamily("olmoe", "olmoe", extra=_clamped),
    "gemma": HFFamily("gemma", "gemma", _GEMMA),
    "gemma2": HFFamily("gemma2", "gemma2", _GEMMA, window_period=2, extra=_scores),
    "gemma3_text": HFFamily("gemma3", "gemma3", _GEMMA, window_period=6, extra=_scores),
    "gemma3": HFFamily("gemma3", "gemma3", _GEMMA, window_period=6, extra=_scores),
    "phi": HFFamily("phi2", "phi", _GELU_TANH, True, demands={"qk_layernorm": (False,)}, rope_part=0.5),
    "phi3": HFFamily("phi3", "phi3"),
    "olmo2": HFFamily("olmo2", "olmo2", window_period=4),
    "olmo3": HFFamily("olmo2", "olmo2", window_period=4),
    "granite": HFFamily("granite", "llama", extra=_granite),
    "granitemoe": HFFamily("granitemoe", "granitemoe", extra=_granite),
    "smollm3": HFFamily("smollm3", "llama", extra=_smollm3),
    "stablelm": HFFamily("stablelm", "stablelm", layer_norm=True, extra=_parallel, rope_part=0.25),
    "starcoder2": HFFamily("starcoder2", "starcoder2", _GELU_TANH, True),
    "gpt2": HFFamily(
        "gpt2",
        "gpt2",
        _GELU_TANH,
        True,
        demands={"scale_attn_weights": (True,), "scale_attn_by_inverse_layer_idx": (False,)},
    ),
    "gpt_neox": HFFamily("gptneox", "gpt_neox", ("gelu",), True, extra=_parallel, rope_part=0.25),
    "falcon": HFFamily(
        "falcon", "falcon", ("gelu",), True, demands={"alibi": (False,), "parallel_attn": (True,)}
    ),
    "cohere": HFFamily("command-r", "cohere", _TEXT, True, extra=_cohere),
    "cohere2": HFFamily("cohere2", "cohere", _TEXT, True, window_period=4, extra=_cohere),
    "glm4": HFFamily("glm4", "glm4", rope_part=0.5),
    "glm": HFFamily("chatglm", "glm", rope_part=0.5),
    "minicpm": HFFamily("minicpm", "llama", extra=_minicpm),
    "internlm2": HFFamily("internlm2", "internlm2", demands={"bias": (False,)}),
    "nemotron": HFFamily("nemotron", "nemotron", ("relu2",), True, rope_part=0.5),
    "arcee": HFFamily("arcee", "llama", ("relu2",)),
    "ernie4_5": HFFamily("ernie4_5", "qwen2", demands={"use_bias": (False,)}),
    "seed_oss": HFFamily("seed_oss", "seed_oss"),
    "dots1": HFFamily("dots1", "dots1", extra=_sigmoid_experts),
    "glm4_moe": HFFamily("glm4moe", "glm4_moe", extra=_sigmoid_experts, rope_part=0.5),
    "deepseek_v2": HFFamily("deepseek2", "deepseek2", extra=_deepseek),
    "deepseek_v3": HFFamily("deepseek2", "deepseek2", extra=_deepseek),
    "gpt_oss": HFFamily("gpt-oss", "gpt_oss", window_period=2, extra=_gpt_oss),
}
"""Every `model_type` that is read."""
