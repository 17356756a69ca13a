"""Names of tensors in Hugging Face's layout, and what each becomes in GGUF, as data: one table a `model_type`.

A row maps a stored stem to one or more targets. `{n}` is the layer; `{e}` counts what is stacked into one
tensor (experts, or heads of a norm). What is behind the stem, `.weight` or `.bias`, stays. A target is a stem
and the names of steps of `STEPS`, separated by blanks: "blk.{n}.attn_q rope_q".

Sources of the names: the families' model classes in transformers, and GGUF's naming in ggml's `docs/gguf.md`.
This module does not know files or configurations beyond the sizes in `Sizes`.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from ropewalk.checkpoint.assemble import (
    Array,
    Flat,
    HeadPart,
    PlusOne,
    Step,
    Take,
    TakeLast,
    Transpose,
    rope_rows,
)


@dataclass(frozen=True)
class Sizes:
    """The sizes that rearranging rows depends on.

    Attributes
    ----------
    head_dim, rope_width : dimensions of a head, and how many of them are rotated.
    ffn_size : width of one expert.
    key_rows, value_rows : of each head, in the matrix that latent attention makes keys and values with; 0 without it.
    """

    n_heads: int
    n_kv_heads: int
    head_dim: int
    rope_width: int
    ffn_size: int = 0
    key_rows: int = 0
    value_rows: int = 0

    @property
    def q_rows(self) -> int:
        """Rows of the matrix of queries, of all heads."""
        return self.n_heads * self.head_dim

    @property
    def kv_rows(self) -> int:
        """Rows of the matrix of keys, and of that of values."""
        return self.n_kv_heads * self.head_dim


def _rope_q(s: Sizes) -> Step:
    return Take(rope_rows(s.n_heads, s.head_dim, s.rope_width), s.q_rows)


def _rope_k(s: Sizes) -> Step:
    return Take(rope_rows(s.n_kv_heads, s.head_dim, s.rope_width), s.kv_rows)


def _grouped(s: Sizes) -> tuple[Array, Array, Array]:
    """Row numbers of q, k and v where each KV head is stored after its own heads of q, and its v after it."""
    group = s.n_heads // s.n_kv_heads
    rows = np.arange(s.q_rows + 2 * s.kv_rows).reshape(s.n_kv_heads, group + 2, s.head_dim)
    return rows[:, :-2].reshape(-1), rows[:, -2].reshape(-1), rows[:, -1].reshape(-1)


def _grouped_q(s: Sizes) -> Step:
    return Take(_grouped(s)[0][rope_rows(s.n_heads, s.head_dim, s.rope_width)], s.q_rows + 2 * s.kv_rows)


def _grouped_k(s: Sizes) -> Step:
    return Take(_grouped(s)[1][rope_rows(s.n_kv_heads, s.head_dim, s.rope_width)], s.q_rows + 2 * s.kv_rows)


def _grouped_v(s: Sizes) -> Step:
    return Take(_grouped(s)[2], s.q_rows + 2 * s.kv_rows)


def _grouped_qkv(s: Sizes) -> Step:
    return Take(np.concatenate(_grouped(s)), s.q_rows + 2 * s.kv_rows)


def _first_half(s: Sizes) -> Step:
    return Take(np.arange(s.ffn_size), 2 * s.ffn_size)


def _second_half(s: Sizes) -> Step:
    return Take(np.arange(s.ffn_size, 2 * s.ffn_size), 2 * s.ffn_size)


def _even(s: Sizes) -> Step:
    return Take(np.arange(0, 2 * s.ffn_size, 2), 2 * s.ffn_size)


def _odd(s: Sizes) -> Step:
    return Take(np.arange(1, 2 * s.ffn_size, 2), 2 * s.ffn_size)


STEPS: Mapping[str, Callable[[Sizes], Step]] = {
    "rope_q": _rope_q,
    "rope_k": _rope_k,
    "grouped_q": _grouped_q,
    "grouped_k": _grouped_k,
    "grouped_v": _grouped_v,
    "grouped_qkv": _grouped_qkv,
    "first_half": _first_half,
    "second_half": _second_half,
    "even": _even,
    "odd": _odd,
    "even_bias": lambda s: TakeLast(np.arange(0, 2 * s.ffn_size, 2), 2 * s.ffn_size),
    "odd_bias": lambda s: TakeLast(np.arange(1, 2 * s.ffn_size, 2), 2 * s.ffn_size),
    "latent_keys": lambda s: HeadPart(s.n_heads, s.key_rows + s.value_rows, 0, s.key_rows, True),
    "latent_values": lambda s: HeadPart(
        s.n_heads, s.key_rows + s.value_rows, s.key_rows, s.key_rows + s.value_rows, False
    ),
    "transpose": lambda s: Transpose(),
    "plus_one": lambda s: PlusOne(),
    "flat": lambda s: Flat(),
}
"""What can happen to a tensor on its way, by the word that the tables use."""

Table = Mapping[str, str | tuple[str, ...]]

_BODY = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_LAYER = "model.layers.{n}."
_ATTENTION = {
    _LAYER + "input_layernorm": "blk.{n}.attn_norm",
    _LAYER + "self_attn.q_proj": "blk.{n}.attn_q",
    _LAYER + "self_attn.k_proj": "blk.{n}.attn_k",
    _LAYER + "self_attn.v_proj": "blk.{n}.attn_v",
    _LAYER + "self_attn.o_proj": "blk.{n}.attn_output",
    _LAYER + "post_attention_layernorm": "blk.{n}.ffn_norm",
}
_ROPE = {
    _LAYER + "self_attn.q_proj": "blk.{n}.attn_q rope_q",
    _LAYER + "self_attn.k_proj": "blk.{n}.attn_k rope_k",
}
_GATED = {
    _LAYER + "mlp.gate_proj": "blk.{n}.ffn_gate",
    _LAYER + "mlp.up_proj": "blk.{n}.ffn_up",
    _LAYER + "mlp.down_proj": "blk.{n}.ffn_down",
}
_QK_NORM = {
    _LAYER + "self_attn.q_norm": "blk.{n}.attn_q_norm",
    _LAYER + "self_attn.k_norm": "blk.{n}.attn_k_norm",
}
_EXPERTS = {
    _LAYER + "mlp.gate": "blk.{n}.ffn_gate_inp",
    _LAYER + "mlp.experts.{e}.gate_proj": "blk.{n}.ffn_gate_exps",
    _LAYER + "mlp.experts.{e}.up_proj": "blk.{n}.ffn_up_exps",
    _LAYER + "mlp.experts.{e}.down_proj": "blk.{n}.ffn_down_exps",
}
_SHARED_EXPERT = {
    _LAYER + "mlp.shared_expert_gate": "blk.{n}.ffn_gate_inp_shexp flat",
    _LAYER + "mlp.shared_expert.gate_proj": "blk.{n}.ffn_gate_shexp",
    _LAYER + "mlp.shared_expert.up_proj": "blk.{n}.ffn_up_shexp",
    _LAYER + "mlp.shared_expert.down_proj": "blk.{n}.ffn_down_shexp",
}
_SHARED_EXPERTS = {
    _LAYER + "mlp.gate.e_score_correction_bias": "blk.{n}.exp_probs_b.bias",
    _LAYER + "mlp.shared_experts.gate_proj": "blk.{n}.ffn_gate_shexp",
    _LAYER + "mlp.shared_experts.up_proj": "blk.{n}.ffn_up_shexp",
    _LAYER + "mlp.shared_experts.down_proj": "blk.{n}.ffn_down_shexp",
}
_QWEN2 = {**_BODY, **_ATTENTION, **_GATED}
_LLAMA = {**_QWEN2, **_ROPE}
_LATE_NORM = {_LAYER + "post_attention_layernorm": "blk.{n}.post_attention_norm"}
_POST_NORMS = {
    _LAYER + "post_attention_layernorm": "blk.{n}.post_attention_norm",
    _LAYER + "post_feedforward_layernorm": "blk.{n}.post_ffw_norm",
}


def _with_norms(table: Mapping[str, str], step: str) -> Mapping[str, str]:
    """The table with a step added to every norm."""
    return {k: f"{v} {step}" if v.endswith("norm") else v for k, v in table.items()}


_GEMMA = _with_norms(_QWEN2, "plus_one")
_GEMMA2 = _with_norms(
    {**_QWEN2, **_POST_NORMS, _LAYER + "pre_feedforward_layernorm": "blk.{n}.ffn_norm"}, "plus_one"
)
_GPT2_LAYERS = {
    "wte": "token_embd",
    "wpe": "position_embd",
    "ln_f": "output_norm",
    "h.{n}.ln_1": "blk.{n}.attn_norm",
    "h.{n}.attn.c_attn": "blk.{n}.attn_qkv transpose",
    "h.{n}.attn.c_proj": "blk.{n}.attn_output transpose",
    "h.{n}.ln_2": "blk.{n}.ffn_norm",
    "h.{n}.mlp.c_fc": "blk.{n}.ffn_up transpose",
    "h.{n}.mlp.c_proj": "blk.{n}.ffn_down transpose",
}

TABLES: Mapping[str, Table] = {
    "llama": _LLAMA,
    "mixtral": {
        **_BODY,
        **_ATTENTION,
        **_ROPE,
        _LAYER + "block_sparse_moe.gate": "blk.{n}.ffn_gate_inp",
        _LAYER + "block_sparse_moe.experts.{e}.w1": "blk.{n}.ffn_gate_exps",
        _LAYER + "block_sparse_moe.experts.{e}.w3": "blk.{n}.ffn_up_exps",
        _LAYER + "block_sparse_moe.experts.{e}.w2": "blk.{n}.ffn_down_exps",
    },
    "qwen2": _QWEN2,
    "qwen3": {**_QWEN2, **_QK_NORM},
    "qwen2_moe": {**_BODY, **_ATTENTION, **_GATED, **_EXPERTS, **_SHARED_EXPERT},
    "qwen3_moe": {**_BODY, **_ATTENTION, **_GATED, **_EXPERTS, **_QK_NORM},
    "olmoe": {**_BODY, **_ATTENTION, **_EXPERTS, **_QK_NORM},
    "gemma": _GEMMA,
    "gemma2": _GEMMA2,
    "gemma3": {**_GEMMA2, **_with_norms(_QK_NORM, "plus_one")},
    "nemotron": _with_norms(_QWEN2, "plus_one"),
    "seed_oss": {**_QWEN2, **_LATE_NORM},
    "dots1": {**_QWEN2, **_EXPERTS, **_SHARED_EXPERTS, **_QK_NORM},
    "glm4_moe": {**_QWEN2, **_EXPERTS, **_SHARED_EXPERTS, **_QK_NORM, **_LATE_NORM},
    "deepseek2": {
        **_QWEN2,
        **_EXPERTS,
        **_SHARED_EXPERTS,
        _LAYER + "self_attn.q_a_proj": "blk.{n}.attn_q_a",
        _LAYER + "self_attn.q_a_layernorm": "blk.{n}.attn_q_a_norm",
        _LAYER + "self_attn.q_b_proj": "blk.{n}.attn_q_b",
        _LAYER + "self_attn.kv_a_proj_with_mqa": "blk.{n}.attn_kv_a_mqa",
        _LAYER + "self_attn.kv_a_layernorm": "blk.{n}.attn_kv_a_norm",
        _LAYER + "self_attn.kv_b_proj": ("blk.{n}.attn_k_b latent_keys", "blk.{n}.attn_v_b latent_values"),
    },
    "olmo2": {**_QWEN2, **_POST_NORMS, **_QK_NORM},
    "phi": {
        **_BODY,
        "model.final_layernorm": "output_norm",
        **_ATTENTION,
        _LAYER + "self_attn.dense": "blk.{n}.attn_output",
        _LAYER + "mlp.fc1": "blk.{n}.ffn_up",
        _LAYER + "mlp.fc2": "blk.{n}.ffn_down",
    },
    "phi3": {
        **_QWEN2,
        _LAYER + "self_attn.qkv_proj": "blk.{n}.attn_qkv",
        _LAYER + "mlp.gate_up_proj": "blk.{n}.ffn_up",
    },
    "granitemoe": {
        **_LLAMA,
        _LAYER + "block_sparse_moe.router.layer": "blk.{n}.ffn_gate_inp",
        _LAYER + "block_sparse_moe.input_linear": (
            "blk.{n}.ffn_gate_exps first_half",
            "blk.{n}.ffn_up_exps second_half",
        ),
        _LAYER + "block_sparse_moe.output_linear": "blk.{n}.ffn_down_exps",
    },
    "stablelm": {
        **_QWEN2,
        _LAYER + "self_attn.q_layernorm.norms.{e}": "blk.{n}.attn_q_norm",
        _LAYER + "self_attn.k_layernorm.norms.{e}": "blk.{n}.attn_k_norm",
    },
    "starcoder2": {
        **_QWEN2,
        _LAYER + "mlp.c_fc": "blk.{n}.ffn_up",
        _LAYER + "mlp.c_proj": "blk.{n}.ffn_down",
    },
    "gpt2": {
        **_GPT2_LAYERS,
        **{f"transformer.{k}": v for k, v in _GPT2_LAYERS.items()},
        "lm_head": "output",
    },
    "gpt_neox": {
        "gpt_neox.embed_in": "token_embd",
        "gpt_neox.final_layer_norm": "output_norm",
        "embed_out": "output",
        "gpt_neox.layers.{n}.input_layernorm": "blk.{n}.attn_norm",
        "gpt_neox.layers.{n}.attention.query_key_value": "blk.{n}.attn_qkv grouped_qkv",
        "gpt_neox.layers.{n}.attention.dense": "blk.{n}.attn_output",
        "gpt_neox.layers.{n}.post_attention_layernorm": "blk.{n}.ffn_norm",
        "gpt_neox.layers.{n}.mlp.dense_h_to_4h": "blk.{n}.ffn_up",
        "gpt_neox.layers.{n}.mlp.dense_4h_to_h": "blk.{n}.ffn_down",
    },
    "falcon": {
        "transformer.word_embeddings": "token_embd",
        "transformer.ln_f": "output_norm",
        "lm_head": "output",
        "transformer.h.{n}.input_layernorm": "blk.{n}.attn_norm",
        "transformer.h.{n}.ln_mlp": "blk.{n}.attn_norm",
        "transformer.h.{n}.ln_attn": "blk.{n}.attn_norm_2",
        "transformer.h.{n}.self_attention.query_key_value": "blk.{n}.attn_qkv grouped_qkv",
        "transformer.h.{n}.self_attention.dense": "blk.{n}.attn_output",
        "transformer.h.{n}.mlp.dense_h_to_4h": "blk.{n}.ffn_up",
        "transformer.h.{n}.mlp.dense_4h_to_h": "blk.{n}.ffn_down",
    },
    "cohere": {**_QWEN2, **_QK_NORM},
    "glm4": {
        **_QWEN2,
        _LAYER + "mlp.gate_up_proj": "blk.{n}.ffn_up",
        _LAYER + "post_self_attn_layernorm": "blk.{n}.post_attention_norm",
        _LAYER + "post_mlp_layernorm": "blk.{n}.post_ffw_norm",
    },
    "glm": {**_QWEN2, _LAYER + "mlp.gate_up_proj": "blk.{n}.ffn_up"},
    "internlm2": {
        "model.tok_embeddings": "token_embd",
        "model.norm": "output_norm",
        "output": "output",
        _LAYER + "attention_norm": "blk.{n}.attn_norm",
        _LAYER + "attention.wqkv": (
            "blk.{n}.attn_q grouped_q",
            "blk.{n}.attn_k grouped_k",
            "blk.{n}.attn_v grouped_v",
        ),
        _LAYER + "attention.wo": "blk.{n}.attn_output",
        _LAYER + "ffn_norm": "blk.{n}.ffn_norm",
        _LAYER + "feed_forward.w1": "blk.{n}.ffn_gate",
        _LAYER + "feed_forward.w3": "blk.{n}.ffn_up",
        _LAYER + "feed_forward.w2": "blk.{n}.ffn_down",
    },
    "gpt_oss": {
        **_BODY,
        **_ATTENTION,
        _LAYER + "post_attention_layernorm": "blk.{n}.post_attention_norm",
        _LAYER + "self_attn.sinks": "blk.{n}.attn_sinks.weight",
        _LAYER + "mlp.router": "blk.{n}.ffn_gate_inp",
        # `prequantized` joins the blocks and scales of MXFP4 to the first of these; the second are plain numbers.
        _LAYER + "mlp.experts.gate_up_proj.weight": (
            "blk.{n}.ffn_gate_exps.weight even",
            "blk.{n}.ffn_up_exps.weight odd",
        ),
        _LAYER + "mlp.experts.gate_up_proj": (
            "blk.{n}.ffn_gate_exps.weight transpose even",
            "blk.{n}.ffn_up_exps.weight transpose odd",
        ),
        _LAYER + "mlp.experts.gate_up_proj_bias": (
            "blk.{n}.ffn_gate_exps.bias even_bias",
            "blk.{n}.ffn_up_exps.bias odd_bias",
        ),
        _LAYER + "mlp.experts.down_proj.weight": "blk.{n}.ffn_down_exps.weight",
        _LAYER + "mlp.experts.down_proj": "blk.{n}.ffn_down_exps.weight transpose",
        _LAYER + "mlp.experts.down_proj_bias": "blk.{n}.ffn_down_exps.bias",
    },
}
"""Stored stems and their targets, by the name that `hf_families` gives a table."""

IGNORED = re.compile(
    r".*\.(rotary_emb|rotary_pos_emb)\.inv_freq|.*\.attn\.(bias|masked_bias)|.*\.attention\.(bias|masked_bias)"
    r"|.*\.position_ids"
)
"""Tensors that some files carry and that nothing depends on: constants of the code that saved them."""

OTHER_SENSES = ("vision_tower.", "vision_model.", "visual.", "multi_modal_projector.", "audio_tower.", "mtp.")
"""How the tensors of parts begin that have nothing to do with text."""

TEXT_PREFIXES = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.", ""),
    ("layers.", "model.layers."),
    ("embed_tokens.", "model.embed_tokens."),
    ("norm.", "model.norm."),
)
"""Where models that also see, and models without an output matrix, keep tensors that text models have elsewhere."""


class Names:
    """One table, ready for lookups."""

    def __init__(self, table: Table) -> None:
        self._rules = [
            (
                re.compile(
                    re.escape(k).replace(r"\{n\}", r"(?P<n>\d{1,5})").replace(r"\{e\}", r"(?P<e>\d{1,5})")
                ),
                v,
            )
            for k, v in table.items()
        ]

    def find(self, name: str) -> Iterable[tuple[str, tuple[str, ...], int | None]] | None:
        """Targets of a stored tensor: name, steps, and its number where several are stacked; None if unknown."""
        for stem, suffix in _splits(name):
            for pattern, targets in self._rules:
                if match := pattern.fullmatch(stem):
                    place = match.groupdict()
                    number = None if place.get("e") is None else int(place["e"])
                    each = (targets,) if isinstance(targets, str) else targets
                    return [_target(t, place.get("n"), suffix, number) for t in each]
        return None


def _splits(name: str) -> list[tuple[str, str]]:
    """The name as it stands, and cut before `.weight` or `.bias`."""
    stem, dot, suffix = name.rpartition(".")
    return [(name, "")] + ([(stem, dot + suffix)] if suffix in ("weight", "bias") else [])


def _target(
    rule: str, layer: str | None, suffix: str, number: int | None
) -> tuple[str, tuple[str, ...], int | None]:
    stem, *steps = rule.split()
    # int: "007" and "7" would be one layer twice, and then one tensor twice, which is refused.
    filled = stem if layer is None else stem.replace("{n}", str(int(layer)))
    if suffix == ".bias":
        steps = [word for word in steps if word != "plus_one"]
    return filled + suffix, tuple(steps), number
