"""`config.json` of Hugging Face's layout as GGUF metadata: which family a `model_type` is, and its numbers.

`FAMILIES` says for each `model_type` which GGUF architecture it is, which table of `names` has its tensors,
and what its configuration is silent about. Values are copied under GGUF's keys; whether they make sense is
for `ropewalk.model.reading` to say. What GGUF has no key for must have the value that the architecture takes
for granted, or is refused by name.

This module does not know files or tensors. Sources: the configuration classes of transformers and the
GGUF specification.
"""

import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ropewalk.checkpoint.cursor import show
from ropewalk.checkpoint.names import Sizes
from ropewalk.errors import CheckpointError, UnsupportedModelError

Keys = dict[str, object]


class Config:
    """The object in `config.json`; of a model that also sees, the part about text. Reads name what is wrong."""

    def __init__(self, values: Mapping[str, Any], label: str) -> None:
        text = values.get("text_config")
        self.values = {**values, **text} if isinstance(text, Mapping) else dict(values)
        self.label = label
        for key in ("text_config", "rope_scaling", "rope_parameters"):
            if (value := self.values.get(key)) is not None and not isinstance(value, Mapping):
                raise CheckpointError(f"{label}: {key} is {show(value)}; allowed: an object, null")

    def first(self, *names: str) -> Any:
        """The value under the first of these names that has one, or None."""
        return next((v for name in names if (v := self.values.get(name)) is not None), None)

    def integer(self, *names: str, default: int | None = None) -> int:
        value = self.first(*names)
        value = default if value is None else value
        if value is None:
            raise CheckpointError(f"{self.label}: {' or '.join(names)} is missing")
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 31:
            raise CheckpointError(
                f"{self.label}: {names[0]} is {show(value)}; allowed: a whole number from 0"
            )
        return value

    def number(self, *names: str) -> float | None:
        value = self.first(*names)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise CheckpointError(f"{self.label}: {names[0]} is {show(value)}; allowed: a number")
        return float(value)

    def flag(self, name: str) -> bool | None:
        value = self.values.get(name)
        if value is not None and not isinstance(value, bool):
            raise CheckpointError(f"{self.label}: {name} is {show(value)}; allowed: true, false")
        return value

    def demand(self, name: str, *allowed: object) -> None:
        """Refuse a feature that is not implemented; a value that is absent is one of the allowed."""
        value = self.values.get(name)
        if value is not None and value not in allowed:
            raise UnsupportedModelError(
                f"{self.label}: {name} = {show(value)} is not supported; "
                f"supported: {', '.join(map(show, allowed)) or 'absent'}"
            )


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
    config.demand("decoder_sparse_step", 1)
    config.demand("mlp_only_layers", [])
    return _experts(config)


def _sigmoid_experts(config: Config) -> Keys:
    """Routers that score by a sigmoid, leading dense layers, and shared experts counted in experts."""
    config.demand("n_group", 1)
    config.demand("topk_group", 1)
    keys = _experts(config) | {"expert_shared_count": config.integer("n_shared_experts", default=0)}
    keys["leading_dense_block_count"] = config.integer("first_k_dense_replace", default=0)
    if (scale := config.number("routed_scaling_factor")) is not None:
        keys["expert_weights_scale"] = scale
    return keys


def _deepseek(config: Config) -> Keys:
    """Latent attention, whose cache is that of one head for all; and its experts, chosen in groups or not."""
    config.demand("topk_method", "greedy", "group_limited_greedy", "noaux_tc")
    config.demand("rope_interleave", True)
    config.demand("scoring_func", "softmax", "sigmoid")
    config.demand("attention_bias", False)
    config.demand("moe_layer_freq", 1)
    rank, rope, value = (config.integer(k) for k in ("kv_lora_rank", "qk_rope_head_dim", "v_head_dim"))
    keys = _experts(config) | {
        "attention.head_count_kv": 1,
        "attention.kv_lora_rank": rank,
        "attention.key_length": rank + rope,
        "attention.value_length": rank,
        "attention.key_length_mla": config.integer("qk_nope_head_dim") + rope,
        "attention.value_length_mla": value,
        "expert_shared_count": config.integer("n_shared_experts", default=0),
        "leading_dense_block_count": config.integer("first_k_dense_replace", default=0),
        "expert_gating_func": 2 if _is_sigmoid(config) else 1,
    }
    if config.first("q_lora_rank"):
        keys["attention.q_lora_rank"] = config.integer("q_lora_rank")
    in_groups = _is_sigmoid(config) or config.first("topk_method") == "group_limited_greedy"
    if in_groups and config.integer("n_group", default=1) > 1:
        keys["expert_group_count"] = config.integer("n_group")
        keys["expert_group_used_count"] = config.integer("topk_group")
    if (scale := config.number("routed_scaling_factor")) is not None:
        keys["expert_weights_scale"] = scale
    return keys


def _is_sigmoid(config: Config) -> bool:
    """DeepSeek V3 scores its experts so; its configuration need not say it."""
    said = config.first("scoring_func")
    return said == "sigmoid" if said else config.values.get("model_type") == "deepseek_v3"


def _scores(config: Config) -> Keys:
    """Gemma's soft caps, and its scale of q·k."""
    keys: Keys = {}
    for ours, theirs in (
        ("attn_logit_softcapping", "attn_logit_softcapping"),
        ("final_logit_softcapping", "final_logit_softcapping"),
    ):
        if cap := config.number(theirs):
            keys[ours] = cap
    if (scalar := config.number("query_pre_attn_scalar")) is not None:
        if scalar <= 0:
            raise CheckpointError(f"{config.label}: query_pre_attn_scalar is {scalar}; allowed: above 0")
        keys["attention.scale"] = 1 / math.sqrt(scalar)
    return keys


def _granite(config: Config) -> Keys:
    names = {
        "embedding_scale": "embedding_multiplier",
        "residual_scale": "residual_multiplier",
        "attention.scale": "attention_multiplier",
        "logit_scale": "logits_scaling",
    }
    given = {ours: config.number(theirs) for ours, theirs in names.items()}
    return {k: v for k, v in given.items() if v is not None} | _experts(config)


def _minicpm(config: Config) -> Keys:
    keys: Keys = {}
    if (scale := config.number("scale_emb")) is not None:
        keys["embedding_scale"] = scale
    if (depth := config.number("scale_depth")) is not None:
        keys["residual_scale"] = depth / math.sqrt(config.integer("num_hidden_layers"))
    if base := config.number("dim_model_base"):
        keys["logit_scale"] = config.integer("hidden_size") / base
    return keys


def _cohere(config: Config) -> Keys:
    scale = config.number("logit_scale")
    return {} if scale is None else {"logit_scale": scale}


def _parallel(config: Config) -> Keys:
    value = config.flag("use_parallel_residual")
    return {} if value is None else {"use_parallel_residual": value}


def _clamped(config: Config) -> Keys:
    limit = config.number("clip_qkv")
    return ({"attention.clamp_kqv": limit} if limit else {}) | _experts(config)


def _smollm3(config: Config) -> Keys:
    layers = config.integer("num_hidden_layers")
    config.demand("no_rope_layers", [int(n % 4 != 3) for n in range(layers)])
    if config.first("no_rope_layers") is None:
        config.demand("no_rope_layer_interval", 4)
    config.demand("use_sliding_window", False)
    return {}


def _gpt_oss(config: Config) -> Keys:
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


@dataclass(frozen=True)
class Translated:
    """A configuration as GGUF has it, and what assembling the tensors takes.

    Attributes
    ----------
    metadata : under GGUF's keys, without the tokenizer's.
    tensors : tensors that are numbers of the configuration, float32 by GGUF name.
    """

    family: HFFamily
    metadata: dict[str, object]
    sizes: Sizes
    tensors: dict[str, np.ndarray[Any, Any]]


def translate(config: Config) -> Translated:
    """Turn a configuration into metadata.

    Raises
    ------
    UnsupportedModelError
        An unknown `model_type`, activation or rotary scheme, or a feature that is not implemented.
    CheckpointError
        A value is missing or of the wrong type.
    """
    family = _family(config)
    config.demand("is_causal", True)
    config.demand("use_bidirectional_attention", False)
    for key, allowed in family.demands.items():
        config.demand(key, *allowed)
    activation = config.first("hidden_activation", "hidden_act", "activation_function", "activation")
    if activation is not None and activation not in family.activations:
        raise UnsupportedModelError(
            f"{config.label}: the activation {show(activation)} is not what {family.architecture} computes; "
            f"supported there: {', '.join(family.activations)}"
        )
    sizes, keys = _sizes(config, family)
    keys |= family.extra(config) if family.extra else {}
    keys |= _windows(config, family, sizes)
    rope_keys, tensors = _rope(config, sizes)
    keys |= rope_keys
    metadata = {f"{family.architecture}.{key}": value for key, value in keys.items()}
    return Translated(family, {"general.architecture": family.architecture, **metadata}, sizes, tensors)


def _family(config: Config) -> HFFamily:
    kind = config.values.get("model_type")
    if isinstance(kind, str) and kind in FAMILIES:
        return FAMILIES[kind]
    near = difflib.get_close_matches(str(kind), FAMILIES, n=2, cutoff=0.75)
    hint = f"; the nearest are {' and '.join(near)}" if near else ""
    raise UnsupportedModelError(
        f"{config.label}: model_type = {show(kind)} is not supported{hint}; supported are {', '.join(FAMILIES)}"
    )


def _sizes(config: Config, family: HFFamily) -> tuple[Sizes, Keys]:
    hidden = config.integer("hidden_size", "n_embd")
    n_heads = config.integer("num_attention_heads", "n_head")
    n_kv_heads = _kv_heads(config, n_heads)
    latent = config.integer("qk_rope_head_dim", default=0)
    head_dim = latent or config.integer("head_dim", default=hidden // max(n_heads, 1))
    if not n_heads or not n_kv_heads or n_heads % n_kv_heads or not head_dim:
        raise CheckpointError(
            f"{config.label}: {n_heads} heads of width {head_dim} with {n_kv_heads} for keys and values cannot be"
        )
    ffn = config.integer("intermediate_size", "n_inner", "ffn_hidden_size", default=4 * hidden)
    expert_ffn = config.integer("moe_intermediate_size", default=ffn)
    eps = config.number("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps")
    context = config.integer("max_position_embeddings", "n_positions", "n_ctx", "seq_length", default=2048)
    width = _rope_width(config, family, head_dim)
    keys: Keys = {
        "block_count": config.integer("num_hidden_layers", "n_layer", "num_layers"),
        "context_length": context,
        "embedding_length": hidden,
        "feed_forward_length": ffn,
        "attention.head_count": n_heads,
        "attention.head_count_kv": n_kv_heads,
        f"attention.layer_norm_{'' if family.layer_norm else 'rms_'}epsilon": 1e-5 if eps is None else eps,
    }
    if head_dim * n_heads != hidden:
        keys |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    if family.table != "gpt2":
        keys["rope.dimension_count"] = width
    parts = (config.integer("qk_nope_head_dim", default=0), config.integer("v_head_dim", default=0))
    return Sizes(n_heads, n_kv_heads, head_dim, width, expert_ffn, *parts), keys


def _kv_heads(config: Config, n_heads: int) -> int:
    """Heads of keys and values; Falcon says it in three ways, depending on the generation."""
    if config.flag("multi_query") and not config.flag("new_decoder_architecture"):
        return 1
    if config.values.get("model_type") == "falcon" and not config.flag("new_decoder_architecture"):
        return n_heads
    return config.integer("num_key_value_heads", "num_kv_heads", default=n_heads)


def _rope_parameters(config: Config) -> tuple[Mapping[str, Any], Mapping[str, Any] | None]:
    """Rotary settings of the layers that see everything, and of those with a window if they have their own."""
    new = config.values.get("rope_parameters")
    if isinstance(new, Mapping):
        if isinstance(everywhere := new.get("full_attention"), Mapping):
            local = new.get("sliding_attention")
            return everywhere, local if isinstance(local, Mapping) else None
        return new, None
    old = config.values.get("rope_scaling")
    parameters = dict(old) if isinstance(old, Mapping) else {}
    if (base := config.first("rope_theta", "rotary_emb_base")) is not None:
        parameters["rope_theta"] = base
    local_base = config.first("rope_local_base_freq")
    return parameters, None if local_base is None else {"rope_theta": local_base}


def _rope_width(config: Config, family: HFFamily, head_dim: int) -> int:
    """Rotated dimensions of a head; some families rotate a part without saying so (B2)."""
    parameters, _ = _rope_parameters(config)
    part = parameters.get("partial_rotary_factor")
    part = config.number("partial_rotary_factor", "rotary_pct", "rope_pct") if part is None else part
    part = family.rope_part if part is None else part
    if isinstance(part, bool) or not isinstance(part, int | float) or not 0 < part <= 1:
        raise CheckpointError(
            f"{config.label}: the rotated part of a head is {show(part)}; allowed: above 0, up to 1"
        )
    width = int(head_dim * part)
    if width % 2 and family.table != "gpt2":
        raise CheckpointError(
            f"{config.label}: {width} dimensions of a head are rotated; allowed: an even number"
        )
    return width


def _rope(config: Config, sizes: Sizes) -> tuple[Keys, dict[str, np.ndarray[Any, Any]]]:
    parameters, local = _rope_parameters(config)
    keys: Keys = {}
    base = _number(config, parameters, "rope_theta", None)
    if base is not None:
        keys["rope.freq_base"] = base
    if local is not None and (local_base := _number(config, local, "rope_theta", None)) is not None:
        keys["rope.freq_base_swa"] = local_base
    kind = parameters.get("rope_type", parameters.get("type"))
    if kind in (None, "default"):
        return keys, {}
    if not isinstance(kind, str) or kind not in SCALINGS:
        raise UnsupportedModelError(
            f"{config.label}: rope_type = {show(kind)} is not supported; supported: default, {', '.join(SCALINGS)}"
        )
    more, tensors = SCALINGS[kind](config, parameters, sizes, 10000.0 if base is None else base)
    return keys | more, tensors


Scaled = tuple[Keys, dict[str, np.ndarray[Any, Any]]]
Scaling = Callable[[Config, Mapping[str, Any], Sizes, float], Scaled]


def _number(config: Config, parameters: Mapping[str, Any], key: str, default: float | None) -> float | None:
    value = parameters.get(key, default)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise CheckpointError(
            f"{config.label}: {key} of the rotary scaling is {show(value)}; allowed: a number"
        )
    return float(value)


def _needed(config: Config, parameters: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = _number(config, parameters, key, default)
    if value is None or value <= 0:
        raise CheckpointError(
            f"{config.label}: {key} of the rotary scaling is {show(value)}; allowed: above 0"
        )
    return value


def _original(config: Config, parameters: Mapping[str, Any]) -> int:
    """Positions that the model was first trained on."""
    value = parameters.get("original_max_position_embeddings")
    value = config.first("original_max_position_embeddings") if value is None else value
    value = config.integer("max_position_embeddings") if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise CheckpointError(f"{config.label}: original_max_position_embeddings is {show(value)}")
    return value


def _linear(config: Config, parameters: Mapping[str, Any], sizes: Sizes, base: float) -> Scaled:
    return {"rope.scaling.type": "linear", "rope.scaling.factor": _needed(config, parameters, "factor")}, {}


def _dynamic(config: Config, parameters: Mapping[str, Any], sizes: Sizes, base: float) -> Scaled:
    return {
        "rope.scaling.type": "dynamic",
        "rope.scaling.factor": _needed(config, parameters, "factor"),
        "rope.scaling.original_context_length": config.integer("max_position_embeddings"),
    }, {}


def _yarn(config: Config, parameters: Mapping[str, Any], sizes: Sizes, base: float) -> Scaled:
    original = _original(config, parameters)
    longest = config.integer("max_position_embeddings")
    keys: Keys = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": _needed(config, parameters, "factor", longest / original),
        "rope.scaling.original_context_length": original,
    }
    for ours, theirs in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
        if (value := _number(config, parameters, theirs, None)) is not None:
            keys[f"rope.scaling.{ours}"] = value
    stretch = math.log(max(_needed(config, parameters, "factor", longest / original), 1.0))
    usual = 1 + 0.1 * stretch  # what YaRN multiplies cosines and sines with, unless something else is stated
    attention = _number(config, parameters, "attention_factor", None)
    over, under = (_number(config, parameters, key, None) for key in ("mscale", "mscale_all_dim"))
    if under and config.first("kv_lora_rank"):
        # GGUF states a tenth of the weight, and readers put it into the scores of latent attention.
        if attention is not None or over != under:
            raise UnsupportedModelError(
                f"{config.label}: mscale = {over} and mscale_all_dim = {under} must be equal"
            )
        keys["rope.scaling.yarn_log_multiplier"] = 0.1 * under
    elif attention is None and over and under:
        attention = (1 + 0.1 * over * stretch) / (1 + 0.1 * under * stretch)
    if attention is not None:
        keys["rope.scaling.attn_factor"] = attention / usual
    if parameters.get("truncate") is False:
        keys["rope.scaling.yarn_truncate"] = False
    return keys, {}


def _llama3(config: Config, parameters: Mapping[str, Any], sizes: Sizes, base: float) -> Scaled:
    """GGUF has no key for it: the divisors themselves are a tensor.

    Wavelengths above original / low_freq_factor are divided by the factor, those below
    original / high_freq_factor are left, and between them the frequencies are blended ("The Llama 3 Herd of
    Models", arXiv:2407.21783).
    """
    factor = _needed(config, parameters, "factor")
    low, high = (_needed(config, parameters, f"{k}_freq_factor") for k in ("low", "high"))
    if high <= low:
        raise CheckpointError(
            f"{config.label}: high_freq_factor is {high}; allowed: above low_freq_factor = {low}"
        )
    frequencies = base ** (-np.arange(0, sizes.rope_width, 2, dtype=np.float64) / sizes.rope_width)
    turns = _original(config, parameters) * frequencies / (2 * np.pi)
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    divisors = 1 / (kept + (1 - kept) / factor)
    return {}, {"rope_freqs.weight": divisors.astype(np.float32)}


def _longrope(config: Config, parameters: Mapping[str, Any], sizes: Sizes, base: float) -> Scaled:
    original = _original(config, parameters)
    longest = config.integer("max_position_embeddings")
    keys: Keys = {"rope.scaling.type": "longrope", "rope.scaling.original_context_length": original}
    stretch = longest / original
    factor = _number(config, parameters, "attention_factor", None)
    if factor is None:
        factor = math.sqrt(1 + math.log(stretch) / math.log(original)) if stretch > 1 < original else 1.0
    keys["rope.scaling.attn_factor"] = factor
    tensors = {}
    for length in ("long", "short"):
        values = parameters.get(f"{length}_factor")
        numbers = isinstance(values, list) and all(type(v) in (int, float) and v > 0 for v in values)
        if not isinstance(values, list) or not numbers or len(values) != sizes.rope_width // 2:
            raise CheckpointError(
                f"{config.label}: {length}_factor is {show(values)}; allowed: {sizes.rope_width // 2} positive numbers"
            )
        tensors[f"rope_factors_{length}.weight"] = np.array(values, np.float32)
    return keys, tensors


SCALINGS: Mapping[str, Scaling] = {
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "llama3": _llama3,
    "longrope": _longrope,
    "su": _longrope,
}


def _windows(config: Config, family: HFFamily, sizes: Sizes) -> Keys:
    """The sliding window, and which layers have it where that is not what readers take for granted."""
    n_layers = config.integer("num_hidden_layers", "n_layer", "num_layers")
    local = _local_layers(config, family, n_layers)
    is_used = config.flag("use_sliding_window") is not False and config.values.get("sliding_window")
    if not is_used or not any(local):
        return {}
    keys: Keys = {"attention.sliding_window": config.integer("sliding_window")}
    period = family.window_period
    if local != [not period or n % period != 0 for n in range(1, n_layers + 1)]:
        keys["attention.sliding_window_pattern"] = np.array(local, np.bool_)
    return keys


def _local_layers(config: Config, family: HFFamily, n_layers: int) -> list[bool]:
    types = config.values.get("layer_types")
    if types is not None:
        kinds = {"sliding_attention": True, "full_attention": False}
        if (
            not isinstance(types, list)
            or len(types) != n_layers
            or not all(isinstance(t, str) and t in kinds for t in types)
        ):
            raise UnsupportedModelError(
                f"{config.label}: layer_types is {show(types)}; "
                f"supported: {n_layers} times full_attention or sliding_attention"
            )
        return [kinds[t] for t in types]
    if config.flag("use_sliding_window") and "max_window_layers" in config.values:
        return [n >= config.integer("max_window_layers") for n in range(n_layers)]
    period = config.integer("sliding_window_pattern", "_sliding_window_pattern", default=family.window_period)
    return [not period or n % period != 0 for n in range(1, n_layers + 1)]
