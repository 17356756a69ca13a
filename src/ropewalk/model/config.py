"""What a checkpoint is: `ModelConfig`, read from GGUF metadata and proved against the tensors of the file.

Every number in it can be trusted: `reading` refuses what we do not compute exactly. It knows neither how tensors are
stored nor how they are multiplied.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ropewalk.model.families import Activation, QKNorm, RopeLayout, Scoring
from ropewalk.model.scaling import DIVISORS_TENSOR, LONGROPE_TENSORS, LongRope, RopeScaling

if TYPE_CHECKING:
    from ropewalk.checkpoint.gguf import TensorInfo

POOLINGS = ("", "mean", "cls", "last")
"""By their number in GGUF; 4, which ranks, needs tensors that no family has."""


@dataclass(frozen=True)
class RopeConfig:
    """One setting of the rotary position embedding.

    Attributes
    ----------
    base
        Pair i of `width / 2` turns by position · base^(−2i / width).
    width
        Rotated dimensions of a head, from its start; the rest passes through unchanged.
    layout
        "neighbours" rotates (2i, 2i + 1) together, "halves" (i, i + width / 2).
    freq_factors
        Whether the tensor `rope_freqs.weight` holds one divisor for each frequency.
    scaling
        The scheme that changes the frequencies, if there is one.
    """

    base: float
    width: int
    layout: RopeLayout
    freq_factors: bool = False
    scaling: RopeScaling | None = None

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of the tensors that hold divisors."""
        in_file = isinstance(self.scaling, LongRope) and not self.scaling.short_factors
        return (DIVISORS_TENSOR,) * self.freq_factors + (LONGROPE_TENSORS if in_file else ())


@dataclass(frozen=True)
class ExpertConfig:
    """The mixture of experts that stands in for the feed-forward network of some layers.

    Attributes
    ----------
    n_experts, n_used
        How many there are, and how many of them a token goes through.
    ffn_size, shared_ffn_size
        Width of one expert, and of the one that every token goes through; 0 where there is none.
    scoring, normalise, shared_gate
        See `ropewalk.model.families.Experts`.
    weight_scale
        Factor of the weights of the chosen experts.
    selection_bias
        Whether the file has numbers (`exp_probs_b.bias`) that are added to the scores for the choice alone.
    n_groups, n_groups_used
        Experts are in groups, and a token chooses among those of a few groups only: the ones with the highest score, by
        sigmoid the sum of the two highest.
    """

    n_experts: int
    n_used: int
    ffn_size: int
    shared_ffn_size: int
    scoring: Scoring
    normalise: bool
    shared_gate: bool
    weight_scale: float
    selection_bias: bool
    n_groups: int = 1
    n_groups_used: int = 1


@dataclass(frozen=True)
class LatentConfig:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): keys and values of all heads from one vector.

    Attributes
    ----------
    q_rank, kv_rank
        Widths of the vectors that the queries, and that keys and values are made from; q_rank 0: queries are made from
        the hidden state itself.
    nope, rope
        Dimensions of a query and key that are not rotated, and that are. The rotated part of the key is the same for
        all heads.
    value
        Dimensions of a value.
    """

    q_rank: int
    kv_rank: int
    nope: int
    rope: int
    value: int


@dataclass(frozen=True)
class ModelConfig:
    """Everything the mathematics of one decoder depends on, besides its weights.

    Attributes
    ----------
    head_dim
        Width of one head of q, k and v; `n_heads * head_dim` need not be `hidden_size`.
    rope, layer_rope
        The distinct rotary settings, and for each layer the index of its own; −1: this layer does not rotate.
    layer_window
        For each layer how many tokens it sees, the current one included; 0: all of them.
    embedding_scale, attention_scale
        Factors of the embedding row, and of q·k.
    gated, fused_gate_up, layer_norm, qk_norm, post_norms, sinks
        See `ropewalk.model.families.Family`.
    attn_norm, ffn_norm
        Names of the norms before the two branches; empty: none.
    parallel
        Whether both branches start from the layer's input.
    fused_qkv
        Whether `attn_qkv` holds the rows of q, then of k, then of v.
    biases
        Stems of the tensors that have a bias, such as "attn_q".
    learned_positions
        Rows of `position_embd.weight`, one added to each embedding; 0: none.
    residual_scale, logit_scale
        Factors of each branch before it is added, and of the logits.
    latent
        Latent attention. `n_kv_heads` is 1 then, and `head_dim` the width of what the cache holds of a token.
    experts, layer_experts
        The mixture of experts, and which layers have it.
    tied_output
        Whether the output matrix is the embedding matrix (the file has no `output.weight`).
    attention_softcap, logit_softcap
        c > 0: scores x become c · tanh(x / c); 0: unchanged.
    pooling
        How the hidden states of a text become its embedding: "mean", "cls" (the first) or "last"; empty: not stated.
    """

    architecture: str
    name: str | None
    n_layers: int
    hidden_size: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    context_length: int
    norm_eps: float
    rope: tuple[RopeConfig, ...]
    layer_rope: tuple[int, ...]
    layer_window: tuple[int, ...]
    activation: Activation
    embedding_scale: float
    attention_scale: float
    qk_norm: QKNorm
    post_norms: bool
    tied_output: bool
    attention_softcap: float
    logit_softcap: float
    gated: bool
    fused_gate_up: bool
    fused_qkv: bool
    layer_norm: bool
    attn_norm: str
    ffn_norm: str
    parallel: bool
    biases: frozenset[str]
    learned_positions: int
    residual_scale: float
    logit_scale: float
    sinks: bool
    latent: LatentConfig | None
    experts: ExpertConfig | None
    layer_experts: tuple[bool, ...]
    pooling: str

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, object], tensors: Mapping[str, TensorInfo]) -> ModelConfig:
        """Read the configuration of a GGUF file, and check every tensor's name and shape against it.

        Raises
        ------
        UnsupportedModelError
            The file says something that is not implemented: architecture, rope scaling, experts, a tensor.
        CheckpointError
            A key is missing or absurd, a tensor is missing, or its shape contradicts the keys.

        Warns
        -----
        UserWarning
            For each key of the architecture, and each tensor, that is unknown and therefore not used.
        """
        from ropewalk.model.reading import read_config

        return read_config(metadata, tensors)

    @property
    def qkv_bias(self) -> bool:
        """Whether q, k and v have biases."""
        return not self.biases.isdisjoint(("attn_q", "attn_qkv"))

    @property
    def rope_switch(self) -> int:
        """Tokens up to which one set of rotary frequencies holds; beyond, another does for all of them. 0: never."""
        return max((rope.scaling.switch for rope in self.rope if rope.scaling), default=0)

    @property
    def kv_group(self) -> int:
        """How many heads of q share one head of k and v."""
        return self.n_heads // self.n_kv_heads
