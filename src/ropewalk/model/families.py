"""Model families as rows of data: what each architecture computes.

There is one decoder (`reference.py` spells it out). A `Family` states the few choices in which architectures differ.
Nothing here reads a file, and nothing elsewhere branches on an architecture's name. Names of tensors are GGUF's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Activation = Literal["silu", "gelu", "gelu_tanh", "relu2", "swiglu_oai"]
RopeLayout = Literal["neighbours", "halves"]
Scoring = Literal["softmax", "sigmoid", "softmax of chosen"]
QKNorm = Literal["", "head", "each head", "row"]


@dataclass(frozen=True)
class Experts:
    """How an architecture chooses among its experts, where its metadata does not say.

    Attributes
    ----------
    scoring
        What a token's router outputs become: a softmax over all experts, a sigmoid each, or a softmax over those
        that were chosen.
    normalise
        Whether the weights of the chosen experts are divided by their sum.
    shared_gate
        Whether the shared expert is multiplied by the sigmoid of a product of its own.
    """

    scoring: Scoring = "softmax"
    normalise: bool = False
    shared_gate: bool = False


@dataclass(frozen=True)
class Family:
    """One row: the choices of an architecture that its GGUF metadata takes for granted.

    Attributes
    ----------
    models
        What people know it as.
    rope_layout
        Which dimensions rotate together. GGUF stores the `llama` projections permuted for neighbouring pairs. None:
        positions are learned (`position_embd.weight`).
    rope_base
        Rotary base when the file does not state one.
    yarn_truncate
        Whether YaRN's ramp ends at whole pairs, which GGUF has no key for.
    activation, gated
        Of the feed-forward network: activation(gate) · up, or without a gate activation(up).
    fused_gate_up
        Whether `ffn_up` holds the rows of the gate, then those of up.
    layer_norm
        Whether norms subtract the mean (LayerNorm); else they are RMS norms.
    attn_norm, ffn_norm
        Names of the norms before attention and before the feed-forward network, in order of preference: the first
        that the file has is the one. Empty: there is none. Where both are the same, the branches are parallel.
    parallel
        Whether both branches start from the layer's input: always, never, or as `use_parallel_residual` says.
    biases
        Stems of tensors that must have a bias. Those of other products may have one.
    scales_embedding
        Whether the embedding row is multiplied by the square root of the hidden size.
    needs
        Keys of factors without which a file of this architecture means nothing.
    divides_logits
        Whether `logit_scale` divides the logits instead of multiplying them.
    qk_norm
        How q and k are normalised before their rotation: "head", every head with the same weights; "each head", with
        weights of its own; "row", all heads as one vector.
    qk_norm_optional
        Whether that is only so where the file has the tensors.
    post_norms
        Whether each branch is normalised once more before it is added to the residual stream.
    window_period
        p > 0: layers attend through the sliding window, except every p-th (p, 2p, …, counted from 1), which
        sees everything; so 1 means that no layer has one. 0: all layers have it, if the file states one.
    local_rope_base
        Rotary base of the layers with a window, when the file does not state one. None: they rotate as the others do;
        else they also keep clear of any rotary scaling. 0: the others' base.
    unrotated
        "period 4": every fourth layer does not rotate. "global": nor do those without a window.
    wide_scale_layers
        Layer counts of published checkpoints whose attention scale is 1/√(hidden / heads) instead of
        1/√head_dim: a fact about those weights that GGUF has no key for.
    experts
        None where there are none.
    sinks
        Whether each head has a sink, one more score that takes part in the softmax and has no value.
    latent
        Whether keys and values are made from one vector for all heads, which is what the cache holds.
    """

    models: str
    rope_layout: RopeLayout | None
    activation: Activation = "silu"
    gated: bool = True
    fused_gate_up: bool = False
    rope_base: float = 10_000.0
    yarn_truncate: bool = True
    layer_norm: bool = False
    attn_norm: tuple[str, ...] = ("attn_norm",)
    ffn_norm: tuple[str, ...] = ("ffn_norm",)
    parallel: Literal["always", "never", "key"] = "never"
    biases: tuple[str, ...] = ()
    scales_embedding: bool = False
    needs: tuple[str, ...] = ()
    divides_logits: bool = False
    qk_norm: QKNorm = ""
    qk_norm_optional: bool = False
    post_norms: bool = False
    window_period: int = 0
    local_rope_base: float | None = None
    unrotated: Literal["", "period 4", "global"] = ""
    wide_scale_layers: frozenset[int] = field(default_factory=frozenset)
    experts: Experts | None = None
    sinks: bool = False
    latent: bool = False


_SCALES = ("embedding_scale", "residual_scale", "logit_scale")
_LN_BIASES = ("attn_norm", "ffn_norm", "output_norm")
_QKV = ("attn_q", "attn_k", "attn_v")
_GPT_BIASES = (*_LN_BIASES, "attn_qkv", "attn_output", "ffn_up", "ffn_down")

FAMILIES: Mapping[str, Family] = {
    "llama": Family(
        "Llama 1 to 3.3, Mistral, Mixtral, SmolLM 1 and 2, InternLM 3, Falcon 3",
        "neighbours",
        experts=Experts(normalise=True),
    ),
    "qwen2": Family("Qwen 2, Qwen 2.5", "halves", biases=_QKV),
    "qwen3": Family("Qwen 3", "halves", qk_norm="head"),
    "gemma": Family("Gemma 1", "halves", activation="gelu_tanh", scales_embedding=True),
    "gemma2": Family(
        "Gemma 2",
        "halves",
        activation="gelu_tanh",
        scales_embedding=True,
        post_norms=True,
        window_period=2,
        wide_scale_layers=frozenset({46}),  # Gemma 2 27B: query_pre_attn_scalar 144 = 4608 / 32
    ),
    "gemma3": Family(
        "Gemma 3",
        "halves",
        activation="gelu_tanh",
        rope_base=1_000_000.0,
        scales_embedding=True,
        qk_norm="head",
        post_norms=True,
        window_period=6,
        local_rope_base=10_000.0,
        wide_scale_layers=frozenset({62}),  # Gemma 3 27B: query_pre_attn_scalar 168 = 5376 / 32
    ),
    "phi2": Family(
        "Phi 1, 1.5 and 2",
        "halves",
        activation="gelu_tanh",
        gated=False,
        layer_norm=True,
        ffn_norm=("attn_norm",),
        biases=("attn_norm", "output_norm", "attn_output", "ffn_up", "ffn_down"),
    ),
    "phi3": Family("Phi 3, 3.5 and 4", "halves", fused_gate_up=True),
    "olmo2": Family(
        "OLMo 2 and 3",
        "halves",
        attn_norm=(),
        ffn_norm=(),
        qk_norm="row",
        post_norms=True,
        window_period=4,
        local_rope_base=0.0,
    ),
    "granite": Family("Granite 3 (dense)", "neighbours", needs=_SCALES, divides_logits=True),
    "smollm3": Family("SmolLM 3", "neighbours", unrotated="period 4"),
    "stablelm": Family(
        "StableLM",
        "halves",
        layer_norm=True,
        ffn_norm=("ffn_norm", "attn_norm"),
        biases=("attn_norm", "output_norm"),
        qk_norm="each head",
        qk_norm_optional=True,
    ),
    "starcoder2": Family(
        "StarCoder 2",
        "halves",
        activation="gelu_tanh",
        gated=False,
        layer_norm=True,
        biases=(*_LN_BIASES, *_QKV, "attn_output", "ffn_up", "ffn_down"),
    ),
    "gpt2": Family("GPT-2", None, activation="gelu_tanh", gated=False, layer_norm=True, biases=_GPT_BIASES),
    "gptneox": Family(
        "GPT-NeoX, Pythia",
        "halves",
        activation="gelu",
        gated=False,
        layer_norm=True,
        parallel="key",
        biases=_GPT_BIASES,
    ),
    "falcon": Family(
        "Falcon 1 and 2",
        "halves",
        activation="gelu",
        gated=False,
        layer_norm=True,
        attn_norm=("attn_norm_2", "attn_norm"),
        ffn_norm=("attn_norm",),
        parallel="always",
        biases=("attn_norm", "output_norm"),
    ),
    "command-r": Family(
        "Command R and R+, Aya",
        "neighbours",
        needs=("logit_scale",),
        layer_norm=True,
        ffn_norm=("attn_norm",),
        qk_norm="each head",
        qk_norm_optional=True,
    ),
    "cohere2": Family(
        "Command R7B and A",
        "neighbours",
        needs=("logit_scale",),
        layer_norm=True,
        ffn_norm=("attn_norm",),
        window_period=4,
        unrotated="global",
    ),
    "glm4": Family("GLM-4-0414", "neighbours", fused_gate_up=True, post_norms=True),
    "chatglm": Family("GLM-4-9B, ChatGLM 3", "neighbours", fused_gate_up=True),
    "minicpm": Family("MiniCPM 1 and 2", "neighbours", needs=_SCALES, divides_logits=True),
    "internlm2": Family("InternLM 2 and 2.5", "neighbours"),
    "qwen2moe": Family("Qwen 1.5 and 2 MoE", "halves", biases=_QKV, experts=Experts(shared_gate=True)),
    "qwen3moe": Family("Qwen 3 MoE", "halves", qk_norm="head", experts=Experts(normalise=True)),
    "olmoe": Family("OLMoE", "halves", qk_norm="row", experts=Experts()),
    "granitemoe": Family(
        "Granite 3 MoE",
        "neighbours",
        needs=_SCALES,
        divides_logits=True,
        experts=Experts("softmax of chosen"),
    ),
    "nemotron": Family(
        "Nemotron 4, Minitron",
        "halves",
        activation="relu2",
        gated=False,
        layer_norm=True,
        biases=_LN_BIASES,
    ),
    "arcee": Family("AFM (Arcee)", "neighbours", activation="relu2", gated=False),
    "ernie4_5": Family("ERNIE 4.5 (dense)", "neighbours"),
    "seed_oss": Family("Seed-OSS", "halves", ffn_norm=("post_attention_norm",), biases=_QKV),
    "dots1": Family("dots.llm1", "halves", qk_norm="head", experts=Experts("sigmoid", normalise=True)),
    "glm4moe": Family(
        "GLM-4.5",
        "halves",
        ffn_norm=("post_attention_norm",),
        biases=_QKV,
        qk_norm="head",
        qk_norm_optional=True,
        experts=Experts("sigmoid", normalise=True),
    ),
    "deepseek2": Family(
        "DeepSeek V2, V2 Lite, V3, R1",
        "neighbours",
        experts=Experts(),
        latent=True,
    ),
    "gpt-oss": Family(
        "gpt-oss",
        "halves",
        activation="swiglu_oai",
        yarn_truncate=False,
        ffn_norm=("post_attention_norm",),
        biases=(*_QKV, "attn_output", "ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"),
        window_period=2,
        experts=Experts("softmax of chosen"),
        sinks=True,
    ),
}

# Architectures that people will try, and what keeps them from being a row.
MISSING_MATHEMATICS: Mapping[str, str] = {
    "minicpm3": "latent attention in an older layout",
    "mamba": "state spaces",
    "mamba2": "state spaces",
    "jamba": "state spaces",
    "falcon-h1": "state spaces",
    "granitehybrid": "state spaces",
    "qwen3next": "linear attention",
    "rwkv6": "linear attention",
    "rwkv7": "linear attention",
    "mpt": "attention biases by distance",
    "bloom": "attention biases by distance",
    "baichuan": "attention biases by distance",
    "gemma3n": "per-layer embeddings",
    "llama4": "chunked attention",
    "bert": "attention in both directions",
    "t5": "an encoder",
}

# Metadata keys (without the architecture's prefix) of features that are not implemented, and the values that
# mean "not used". Any other value is refused.
UNIMPLEMENTED_KEYS: Mapping[str, tuple[object, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "rope.scaling.alpha": (0, 1),
    "tensor_data_layout": ("jploski",),  # Falcon's q, k and v one after the other
    "use_parallel_residual": (False,),
}

# Keys that say something, but nothing that changes the logits when the keys above are neutral.
INERT_KEYS = frozenset({"rope.scaling.finetuned", "tokens_per_second"})

# Tensors that other architectures have. A file that carries one beyond those of its own row computes something else
# than its architecture's name says. Biases and scales of any other tensor are refused the same way.
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
        "position_embd",
        "post_attention_norm",
        "post_ffw_norm",
    )
)
