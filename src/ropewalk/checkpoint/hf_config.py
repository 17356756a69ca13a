"""`config.json` of Hugging Face's layout as GGUF metadata: its sizes, its windows, and what its family adds.

Values are copied under GGUF's keys; whether they make sense is for `ropewalk.model.reading` to say. `hf_families` knows
the families, `hf_rope` the rotary settings.

This module does not know files or tensors. Sources: the configuration classes of transformers and the GGUF
specification.
"""

import difflib
from dataclasses import dataclass

import numpy as np

from ropewalk.checkpoint.cursor import show
from ropewalk.checkpoint.hf_families import FAMILIES, HFFamily, Keys
from ropewalk.checkpoint.hf_rope import Tensors, rope_keys, rope_width
from ropewalk.checkpoint.hf_values import Config
from ropewalk.checkpoint.names import Sizes
from ropewalk.errors import CheckpointError, UnsupportedModelError


@dataclass(frozen=True)
class Translated:
    """A configuration as GGUF has it, and what assembling the tensors takes.

    Attributes
    ----------
    metadata : under GGUF's keys, without the tokenizer's.
    sizes : what rearranging rows depends on.
    tensors : tensors that are numbers of the configuration, float32 by GGUF name.
    """

    family: HFFamily
    metadata: dict[str, object]
    sizes: Sizes
    tensors: Tensors


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
    more, tensors = rope_keys(config, sizes)
    keys |= more
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
    width = rope_width(config, family, head_dim)
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
