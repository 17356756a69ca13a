"""`ModelConfig` from a file: its metadata is read, and proved against its tensors.

A file that describes anything we do not compute exactly is refused here, by an error that names the key or the tensor,
its value and what is allowed.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypedDict

from ropewalk.errors import CheckpointError, UnsupportedModelError, warn
from ropewalk.model.config import POOLINGS, ExpertConfig, LatentConfig, ModelConfig
from ropewalk.model.families import (
    FAMILIES,
    MISSING_MATHEMATICS,
    UNIMPLEMENTED_TENSORS,
    Family,
    QKNorm,
)
from ropewalk.model.keys import Keys, show
from ropewalk.model.read_rope import (
    latent_rope,
    layer_rope,
    local_layers,
    read_rope,
    read_windows,
)
from ropewalk.model.scaling import score_scale
from ropewalk.model.shapes import tensor_shapes

if TYPE_CHECKING:
    from ropewalk.checkpoint.gguf import TensorInfo

MAX_LAYERS = 4096
MAX_USED_EXPERTS = 64
PRODUCT_BIASES = frozenset(
    ("attn_q", "attn_k", "attn_v", "attn_qkv", "attn_output", "ffn_gate", "ffn_up", "ffn_down", "output")
) | {"ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"}
NORM_BIASES = frozenset(("attn_norm", "attn_norm_2", "ffn_norm", "output_norm"))


class _Scales(TypedDict):
    """Factors of a `ModelConfig`, and its two bounds."""

    embedding_scale: float
    attention_scale: float
    attention_softcap: float
    residual_scale: float
    logit_scale: float
    logit_softcap: float


def read_config(metadata: Mapping[str, object], tensors: Mapping[str, TensorInfo]) -> ModelConfig:
    """Read the configuration of a file; errors and warnings are those of `ModelConfig.from_gguf`."""
    family, architecture = _family_of(metadata.get("general.architecture"))
    keys = Keys(metadata, architecture)
    for key in family.needs:
        keys.number(key, low=0.0, high=1e6, open_low=True)
    latent = _read_latent(keys) if family.latent else None
    sizes = _read_sizes(keys, metadata, tensors, latent)
    n_layers, head_dim = sizes["n_layers"], sizes["head_dim"]
    experts, layer_experts = _read_experts(keys, family, tensors, n_layers, sizes["ffn_size"])
    windows = read_windows(keys, family, n_layers)
    rope = read_rope(keys, family, head_dim, any(windows), tensors)
    attn_norm, ffn_norm = (_first_norm(names, tensors) for names in (family.attn_norm, family.ffn_norm))
    name = metadata.get("general.name")
    wide = n_layers in family.wide_scale_layers
    scale_width = sizes["hidden_size"] / sizes["n_heads"] if wide else head_dim
    if latent:
        rope = tuple(latent_rope(setting) for setting in rope)
        scale_width = (latent.nope + latent.rope) / score_scale(rope[0].scaling) ** 2
    config = ModelConfig(
        architecture=architecture,
        name=name if isinstance(name, str) else None,
        **sizes,
        norm_eps=keys.number(
            "attention.layer_norm_epsilon" if family.layer_norm else "attention.layer_norm_rms_epsilon",
            low=0.0,
            high=1.0,
            open_low=True,
        ),
        rope=rope,
        layer_rope=layer_rope(family, len(rope), windows, local_layers(keys, family, n_layers)),
        layer_window=windows,
        activation=family.activation,
        **_read_scales(keys, family, sizes["hidden_size"], scale_width),
        qk_norm=_qk_norm(family, tensors),
        post_norms=family.post_norms,
        tied_output="output.weight" not in tensors,
        gated=family.gated,
        fused_gate_up=family.fused_gate_up,
        fused_qkv="blk.0.attn_qkv.weight" in tensors,
        layer_norm=family.layer_norm,
        attn_norm=attn_norm,
        ffn_norm=ffn_norm,
        parallel=_is_parallel(keys, family, attn_norm, ffn_norm),
        biases=_read_biases(family, tensors),
        learned_positions=0 if family.rope_layout else sizes["context_length"],
        sinks=family.sinks,
        latent=latent,
        experts=experts,
        layer_experts=layer_experts,
        pooling=POOLINGS[keys.integer("pooling_type", 0, low=0, high=len(POOLINGS) - 1)],
    )
    keys.check_the_rest()
    check_tensors(config, tensors, keys.integer("nextn_predict_layers", 0, low=0))
    return config


def _read_sizes(
    keys: Keys,
    metadata: Mapping[str, object],
    tensors: Mapping[str, TensorInfo],
    latent: LatentConfig | None,
) -> dict[str, int]:
    n_layers = keys.integer("block_count", high=min(MAX_LAYERS, len(tensors)))
    # Layers that guess further tokens are not run.
    n_layers -= keys.integer("nextn_predict_layers", 0, low=0, high=n_layers - 1)
    hidden_size = keys.integer("embedding_length")
    n_heads = keys.integer("attention.head_count", high=2**16)
    n_kv_heads = keys.integer("attention.head_count_kv", n_heads, high=n_heads)
    if n_heads % n_kv_heads:
        keys.refuse("attention.head_count_kv", n_kv_heads, f"a divisor of attention.head_count = {n_heads}")
    if not keys.has("attention.key_length") and hidden_size % n_heads:
        keys.refuse("attention.head_count", n_heads, f"a divisor of embedding_length = {hidden_size}")
    head_dim = keys.integer("attention.key_length", hidden_size // n_heads, high=2**16)
    value_length = keys.integer("attention.value_length", head_dim, high=2**16)
    if value_length != (latent.kv_rank if latent else head_dim):
        raise UnsupportedModelError(
            f"{keys.prefix}attention.value_length = {value_length} is not supported; "
            f"it must equal attention.key_length = {head_dim}"
        )
    return {
        "n_layers": n_layers,
        "hidden_size": hidden_size,
        "n_heads": n_heads,
        "n_kv_heads": n_kv_heads,
        "head_dim": head_dim,
        "ffn_size": keys.integer("feed_forward_length"),
        "vocab_size": _read_vocab_size(keys, metadata, tensors),
        "context_length": keys.integer("context_length"),
    }


def _read_scales(keys: Keys, family: Family, hidden_size: int, scale_width: float) -> _Scales:
    """Factors and bounds, by their names in `ModelConfig`; scores are divided by √scale_width unless it is said how."""
    usual = math.sqrt(hidden_size) if family.scales_embedding else 1.0
    score_scale = 1 / math.sqrt(scale_width)
    return {
        "embedding_scale": keys.scale("embedding_scale", usual),
        "attention_scale": keys.number("attention.scale", score_scale, low=0.0, high=1e6, open_low=True),
        "attention_softcap": keys.number("attn_logit_softcapping", 0.0, low=0.0, high=1e6),
        "residual_scale": keys.scale("residual_scale", 1.0),
        "logit_scale": keys.scale("logit_scale", 1.0) ** (-1 if family.divides_logits else 1),
        "logit_softcap": keys.number("final_logit_softcapping", 0.0, low=0.0, high=1e6),
    }


def _read_vocab_size(keys: Keys, metadata: Mapping[str, object], tensors: Mapping[str, TensorInfo]) -> int:
    """The rows of the embedding; the tokenizer's list and the optional key must agree with it."""
    if "token_embd.weight" not in tensors:
        raise CheckpointError("tensor token_embd.weight is missing")
    shape = tensors["token_embd.weight"].shape
    if len(shape) != 2:
        raise CheckpointError(
            f"tensor token_embd.weight has shape {list(shape)}; it must have two dimensions"
        )
    rows = int(shape[0])
    if keys.integer("vocab_size", rows) != rows:
        keys.refuse("vocab_size", keys.integer("vocab_size"), f"{rows}, the rows of token_embd.weight")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, Sequence) and len(tokens) != rows:
        raise CheckpointError(
            f"tokenizer.ggml.tokens has {len(tokens)} entries, but token_embd.weight has {rows} rows"
        )
    return rows


def _read_latent(keys: Keys) -> LatentConfig:
    """The widths of latent attention, whose cache is that of one head for all."""
    width = keys.integer("rope.dimension_count", low=2, high=2**16)
    rank = keys.integer("attention.kv_lora_rank", high=2**16)
    if keys.integer("attention.head_count_kv") != 1 or not keys.has("attention.key_length_mla"):
        raise UnsupportedModelError(
            f"{keys.prefix}attention.head_count_kv = {keys.value('attention.head_count_kv')} without key_length_mla is "
            "not supported: the file keeps keys and values of every head; convert the model with a recent llama.cpp"
        )
    if keys.integer("attention.key_length") != rank + width:
        keys.refuse("attention.key_length", keys.value("attention.key_length"), f"{rank} + {width}")
    return LatentConfig(
        q_rank=keys.integer("attention.q_lora_rank", 0, low=0, high=2**16),
        kv_rank=rank,
        nope=keys.integer("attention.key_length_mla", low=width + 1, high=2**16) - width,
        rope=width,
        value=keys.integer("attention.value_length_mla", high=2**16),
    )


def _read_experts(
    keys: Keys, family: Family, tensors: Mapping[str, TensorInfo], n_layers: int, ffn_size: int
) -> tuple[ExpertConfig | None, tuple[bool, ...]]:
    """The mixture of experts, and which layers have it: those with a router."""
    rule = family.experts
    n_experts = keys.integer("expert_count", 0, low=0, high=2**16)
    if rule is None or not n_experts:
        if n_experts:
            raise UnsupportedModelError(
                f"{keys.prefix}expert_count = {n_experts} is not supported: this architecture has no experts"
            )
        keys.integer("expert_used_count", 0, low=0, high=0)
        return None, (False,) * n_layers
    scoring, normalise = rule.scoring, keys.boolean("expert_weights_norm", rule.normalise)
    if keys.has("expert_gating_func"):
        number = keys.integer("expert_gating_func", high=3)
        scoring = ("softmax", "sigmoid", "softmax of chosen")[number - 1]
    width = keys.integer("expert_feed_forward_length", ffn_size)
    shared = width * keys.integer("expert_shared_count", 0, low=0, high=MAX_USED_EXPERTS)
    shared = keys.integer("expert_shared_feed_forward_length", shared, low=0)
    has_router = tuple(f"blk.{n}.ffn_gate_inp.weight" in tensors for n in range(n_layers))
    n_dense = keys.integer("leading_dense_block_count", 0, low=0, high=n_layers)
    if any(has_router[:n_dense]):
        keys.refuse(
            "leading_dense_block_count", n_dense, f"at most {has_router.index(True)}: that layer has a router"
        )
    config = ExpertConfig(
        n_experts=n_experts,
        n_used=keys.integer("expert_used_count", high=min(n_experts, MAX_USED_EXPERTS)),
        ffn_size=width,
        shared_ffn_size=shared or (ffn_size if rule.shared_gate else 0),
        scoring=scoring,
        normalise=normalise,
        shared_gate=rule.shared_gate,
        weight_scale=keys.scale("expert_weights_scale", 1.0),
        selection_bias=any(name.endswith("exp_probs_b.bias") for name in tensors),
        n_groups=keys.integer("expert_group_count", 1, high=n_experts),
        n_groups_used=keys.integer("expert_group_used_count", 1, high=keys.integer("expert_group_count", 1)),
    )
    if n_experts % config.n_groups or config.n_used * config.n_groups > n_experts * config.n_groups_used:
        keys.refuse(
            "expert_group_count", config.n_groups, "a divisor of expert_count, with groups large enough"
        )
    return config, has_router


def _family_of(architecture: object) -> tuple[Family, str]:
    """The row of an architecture; raises UnsupportedModelError with what there is."""
    if isinstance(architecture, str) and architecture in FAMILIES:
        return FAMILIES[architecture], architecture
    message = f"general.architecture = {show(architecture)} is not supported"
    if missing := MISSING_MATHEMATICS.get(str(architecture)):
        message += f": it needs {missing}, which is not implemented"
    elif near := difflib.get_close_matches(str(architecture)[:80], FAMILIES, 1):
        message += f"; did you mean {near[0]!r}?"
    raise UnsupportedModelError(f"{message}; supported are {', '.join(FAMILIES)}")


def _is_parallel(keys: Keys, family: Family, attn_norm: str, ffn_norm: str) -> bool:
    """Whether both branches start from the layer's input."""
    if family.parallel == "key":
        return keys.boolean("use_parallel_residual", True)
    if len(family.ffn_norm) > 1:
        keys.value("use_parallel_residual")  # converters write it whether or not it is so: the norm tells
    return family.parallel == "always" or (attn_norm == ffn_norm != "")


def _first_norm(names: tuple[str, ...], tensors: Mapping[str, TensorInfo]) -> str:
    """The first of these norms that the file has; where it has none of them, the first, to be missed by name."""
    found = [name for name in names if f"blk.0.{name}.weight" in tensors]
    return (found or [*names, ""])[0]


def _qk_norm(family: Family, tensors: Mapping[str, TensorInfo]) -> QKNorm:
    absent = family.qk_norm_optional and "blk.0.attn_q_norm.weight" not in tensors
    return "" if absent else family.qk_norm


def _read_biases(family: Family, tensors: Mapping[str, TensorInfo]) -> frozenset[str]:
    """Stems that have a bias in some layer, and those that must have one."""
    fused = "blk.0.attn_qkv.weight" in tensors
    needed = {
        "attn_qkv" if fused and stem in ("attn_q", "attn_k", "attn_v") else stem for stem in family.biases
    }
    found = {name.split(".")[-2] for name in tensors if name.endswith(".bias") and name.count(".") in (1, 3)}
    allowed = PRODUCT_BIASES | (NORM_BIASES if family.layer_norm else frozenset())
    return frozenset(needed | (found & allowed))


def check_tensors(config: ModelConfig, tensors: Mapping[str, TensorInfo], n_unused_layers: int = 0) -> None:
    """Refuse missing tensors, wrong shapes and tensors that would change the result; warn of other extras.

    Those of `n_unused_layers` layers after the last are passed over.
    """
    expected = tensor_shapes(config)
    unused = tuple(f"blk.{config.n_layers + i}." for i in range(n_unused_layers))
    for name, shape in expected.items():
        if name not in tensors:
            raise CheckpointError(f"tensor {name} is missing")
        found = tuple(tensors[name].shape)
        if found != shape:
            raise CheckpointError(
                f"tensor {name} has shape {list(found)}; its metadata asks for {list(shape)}"
            )
    for name in tensors:
        if name in expected:
            continue
        kind = name.split(".", 2)[2] if name.startswith("blk.") and name.count(".") >= 2 else name
        if name.startswith(unused):
            continue
        if kind in UNIMPLEMENTED_TENSORS or kind.endswith((".bias", ".scale")):
            raise UnsupportedModelError(
                f"tensor {name} is not supported in architecture {config.architecture}"
            )
        warn(f"tensor {name} is unknown and not used")
