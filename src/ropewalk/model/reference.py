"""The decoder in NumPy float32, written as the mathematics reads: the oracle of every faster path.

`Reference.logits` runs a whole text without a cache: nothing is kept between calls, so writing n tokens this
way takes O(n²) token passes. `forward` with a `ReferenceCache` does the same work incrementally. Both are the
same lines; a call without a cache attends over its own tokens only.

Weights are dequantized when a layer needs them. `keep_bytes` bounds how much float32 stays in memory, so that
a 1.5B model can be checked with little memory (slowly) and a small one quickly. The embedding matrix always
stays: it is needed at both ends of a model with tied output.

Arrays: hidden states are [n, hidden]; q is [n_heads, n, head_dim]; keys and values [n_kv_heads, n, head_dim].
Knows nothing of requests, pages or threads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ropewalk.errors import PromptError
from ropewalk.model.rope import cos_sin, rope_table, rotate

if TYPE_CHECKING:
    from typing import Protocol

    from ropewalk.model.config import ExpertConfig, LatentConfig, ModelConfig
    from ropewalk.model.families import Activation

    class Checkpoint(Protocol):
        """What the reference needs of a model file."""

        def tensor(self, name: str) -> NDArray[np.float32]: ...


Float32Array = NDArray[np.float32]
QUERY_BLOCK = 256
"""Queries whose scores are held at once: n_heads · 256 · n floats."""


@dataclass
class ReferenceCache:
    """Tokens so far, and their rotated keys, and values, in every layer: float32 [n_kv_heads, length, head_dim]."""

    tokens: list[int] = field(default_factory=list)
    keys: list[Float32Array] = field(default_factory=list)
    values: list[Float32Array] = field(default_factory=list)

    @property
    def length(self) -> int:
        """How many tokens."""
        return len(self.tokens)


class Reference:
    """One model, computed slowly and plainly.

    Parameters
    ----------
    config
        The configuration read from the same checkpoint.
    checkpoint
        Anything whose `tensor(name)` returns a float32 array, such as `ropewalk.checkpoint.gguf.GGUF`.
    keep_bytes
        How many bytes of dequantized layer weights to keep for the next call.
    observe
        Called before every product with a matrix: its name without ".weight", the inputs [n, columns], and which
        expert's it is (None where there are none).
    """

    def __init__(
        self,
        config: ModelConfig,
        checkpoint: Checkpoint,
        *,
        keep_bytes: int = 2**31,
        observe: Callable[[str, Float32Array, int | None], None] | None = None,
    ) -> None:
        self.config = config
        self._observe = observe
        self._checkpoint = checkpoint
        self._spare_bytes = keep_bytes
        self._kept = {"token_embd.weight": checkpoint.tensor("token_embd.weight")}
        self._tables = [rope_table(rope, checkpoint.tensor, config.context_length) for rope in config.rope]

    def new_cache(self) -> ReferenceCache:
        """An empty KV cache for one sequence."""
        return ReferenceCache()

    def logits(self, token_ids: ArrayLike) -> Float32Array:
        """Logits of every position of one text, without a cache.

        Parameters
        ----------
        token_ids : integers [n]

        Returns
        -------
        float32 [n, vocab_size]

        Raises
        ------
        PromptError
            No token, or a token outside the vocabulary.
        """
        return self.forward(token_ids, None)

    def forward(self, token_ids: ArrayLike, cache: ReferenceCache | None) -> Float32Array:
        """Logits of the next n tokens of a sequence whose earlier tokens are in `cache`, which grows by n.

        Arguments, result and errors are those of `logits`.
        """
        config = self.config
        tokens = np.asarray(token_ids)
        if tokens.ndim != 1 or not tokens.size or not np.issubdtype(tokens.dtype, np.integer):
            raise PromptError(
                f"token ids must be a non-empty list of integers, not shape {list(tokens.shape)}"
            )
        if tokens.min() < 0 or tokens.max() >= config.vocab_size:
            raise PromptError(f"token ids must be from 0 to {config.vocab_size - 1}")
        start = cache.length if cache else 0
        if cache and start <= config.rope_switch < start + tokens.size and start:
            everything = [*cache.tokens, *tokens.tolist()]  # the keys so far have other frequencies: all anew
            cache.tokens, cache.keys, cache.values = [], [], []
            return self.forward(everything, cache)[start:]
        positions = np.arange(start, start + tokens.size)
        x = self._weight("token_embd.weight")[tokens] * np.float32(config.embedding_scale)
        if config.learned_positions:
            if positions[-1] >= config.learned_positions:
                raise PromptError(
                    f"positions beyond {config.learned_positions - 1} have no learned embedding"
                )
            x = x + self._weight("position_embd.weight")[positions]
        for layer in range(config.n_layers):
            x = self._layer(layer, x, positions, cache)
        if cache:
            cache.tokens += tokens.tolist()
        x = self._norm(x, "output_norm")
        y = self._linear(x, "token_embd" if config.tied_output else "output")
        if "output" in config.biases and config.tied_output:
            y = y + self._weight("output.bias")
        return softcap(y * np.float32(config.logit_scale), config.logit_softcap)

    def _layer(
        self, layer: int, x: Float32Array, positions: NDArray[np.int64], cache: ReferenceCache | None
    ) -> Float32Array:
        """Two branches, each added to the residual stream: one after the other, or both from the same input."""
        config, block = self.config, f"blk.{layer}."
        scale = np.float32(config.residual_scale)
        attn_input = self._norm(x, block + config.attn_norm) if config.attn_norm else x
        after: Float32Array = x + scale * self._attention(layer, attn_input, positions, cache)
        source = x if config.parallel else after
        ffn_input = self._norm(source, block + config.ffn_norm) if config.ffn_norm else source
        branch = self._experts if config.layer_experts[layer] else self._feed_forward
        y = branch(layer, ffn_input)
        if config.post_norms:
            y = self._norm(y, block + "post_ffw_norm")
        return np.asarray(after + scale * y, np.float32)

    def _attention(
        self, layer: int, x: Float32Array, positions: NDArray[np.int64], cache: ReferenceCache | None
    ) -> Float32Array:
        config, block = self.config, f"blk.{layer}."
        if config.latent:
            q, k, v = self._latent_heads(x, block, config.latent)
        else:
            q, k, v = self._heads(x, block)
        if config.layer_rope[layer] >= 0:
            which = config.layer_rope[layer]
            table = self._tables[which]
            frequencies = table.of_length(int(positions[-1]) + 1)
            cos, sin = cos_sin(frequencies, positions, table.attention_scale)
            q = rotate(q, cos, sin, config.rope[which].layout)
            k = rotate(k, cos, sin, config.rope[which].layout)
        if cache:
            k, v = append(cache, layer, k, v)
        mixed = attend(
            q,
            k,
            v,
            first_position=int(positions[0]),
            scale=config.attention_scale,
            window=config.layer_window[layer],
            cap=config.attention_softcap,
            sinks=self._weight(block + "attn_sinks.weight") if config.sinks else None,
        )
        branch = self._linear(mixed, block + "attn_output")
        return self._norm(branch, block + "post_attention_norm") if config.post_norms else branch

    def _heads(self, x: Float32Array, block: str) -> tuple[Float32Array, Float32Array, Float32Array]:
        """q, k and v, split into heads and normalised: float32 [n_heads or n_kv_heads, n, head_dim] each."""
        config = self.config
        n_heads, n_kv, head_dim = config.n_heads, config.n_kv_heads, config.head_dim
        if config.fused_qkv:
            rows = self._linear(x, block + "attn_qkv")
            q, k, v = np.split(rows, [n_heads * head_dim, (n_heads + n_kv) * head_dim], axis=1)
        else:
            q, k, v = (self._linear(x, block + f"attn_{name}") for name in "qkv")
        if config.qk_norm == "row":
            q, k = self._norm(q, block + "attn_q_norm"), self._norm(k, block + "attn_k_norm")
        q, k, v = (y.reshape(len(x), -1, head_dim) for y in (q, k, v))
        if config.qk_norm in ("head", "each head"):
            q, k = self._norm(q, block + "attn_q_norm"), self._norm(k, block + "attn_k_norm")
        return q.swapaxes(0, 1), k.swapaxes(0, 1), v.swapaxes(0, 1)

    def _latent_heads(
        self, x: Float32Array, block: str, latent: LatentConfig
    ) -> tuple[Float32Array, Float32Array, Float32Array]:
        """q, k and v of every head, written out, the part that is rotated first: float32 [n_heads, n, ...] each."""
        if latent.q_rank:
            x_q = self._norm(self._linear(x, block + "attn_q_a"), block + "attn_q_a_norm")
            q = self._linear(x_q, block + "attn_q_b")
        else:
            q = self._linear(x, block + "attn_q")
        q = q.reshape(len(x), self.config.n_heads, -1).swapaxes(0, 1)
        kept, rotated = np.split(self._linear(x, block + "attn_kv_a_mqa"), [latent.kv_rank], axis=1)
        kept = self._norm(kept, block + "attn_kv_a_norm")
        k = kept @ self._weight(block + "attn_k_b.weight")
        v = kept @ self._weight(block + "attn_v_b.weight").swapaxes(1, 2)
        rotated = np.broadcast_to(rotated, (len(k), *rotated.shape))
        q = np.concatenate([q[:, :, latent.nope :], q[:, :, : latent.nope]], axis=-1)
        return q, np.concatenate([rotated, k], axis=-1), v

    def _feed_forward(self, layer: int, x: Float32Array) -> Float32Array:
        config, block = self.config, f"blk.{layer}."
        up = self._linear(x, block + "ffn_up")
        if config.fused_gate_up:
            gate, up = np.split(up, 2, axis=1)
        else:
            gate = self._linear(x, block + "ffn_gate") if config.gated else up
        return self._linear(activate(config.activation, gate, up, config.gated), block + "ffn_down")

    def _experts(self, layer: int, x: Float32Array) -> Float32Array:
        """Every token through the experts that its router chose, and through the shared one if there is one."""
        config, block = self.config, f"blk.{layer}."
        experts = config.experts
        assert experts
        bias = self._weight(block + "exp_probs_b.bias") if experts.selection_bias else None
        chosen, weights = route(self._linear(x, block + "ffn_gate_inp"), experts, bias)
        y = np.zeros_like(x)
        for expert in np.unique(chosen):
            token, slot = np.nonzero(chosen == expert)
            gate = self._linear(x[token], block + "ffn_gate_exps", expert)
            up = self._linear(x[token], block + "ffn_up_exps", expert)
            down = self._linear(activate(config.activation, gate, up, True), block + "ffn_down_exps", expert)
            y[token] += weights[token, slot, None] * down
        if experts.shared_ffn_size:
            gate, up = self._linear(x, block + "ffn_gate_shexp"), self._linear(x, block + "ffn_up_shexp")
            shared = self._linear(activate(config.activation, gate, up, True), block + "ffn_down_shexp")
            if experts.shared_gate:
                shared = shared * sigmoid(x @ self._weight(block + "ffn_gate_inp_shexp.weight"))[:, None]
            y = y + shared
        return y

    def _linear(self, x: Float32Array, stem: str, expert: int | None = None) -> Float32Array:
        """x · Wᵀ + b for the matrix [outputs, inputs] of that name, or one expert's; b where there is one."""
        if self._observe:
            self._observe(stem, x, expert)
        weight = self._weight(stem + ".weight")
        y = x @ (weight if expert is None else weight[expert]).T
        if stem.rsplit(".")[-1] not in self.config.biases:
            return y
        bias = self._weight(stem + ".bias")
        return y + (bias if expert is None else bias[expert])

    def _norm(self, x: Float32Array, stem: str) -> Float32Array:
        weight, eps = self._weight(stem + ".weight"), self.config.norm_eps
        if not self.config.layer_norm:
            return rms_norm(x, weight, eps)
        has_bias = stem.rsplit(".")[-1] in self.config.biases
        return layer_norm(x, weight, self._weight(stem + ".bias") if has_bias else None, eps)

    def _weight(self, name: str) -> Float32Array:
        """A tensor as float32, kept while there is room."""
        if name in self._kept:
            return self._kept[name]
        weight = self._checkpoint.tensor(name)
        if weight.nbytes <= self._spare_bytes:
            self._kept[name] = weight
            self._spare_bytes -= weight.nbytes
        return weight


def append(
    cache: ReferenceCache, layer: int, keys: Float32Array, values: Float32Array
) -> tuple[Float32Array, Float32Array]:
    """Add new keys and values to a layer of the cache; returns all of them."""
    if layer == len(cache.keys):
        cache.keys.append(keys)
        cache.values.append(values)
    else:
        cache.keys[layer] = np.concatenate([cache.keys[layer], keys], axis=1)
        cache.values[layer] = np.concatenate([cache.values[layer], values], axis=1)
    return cache.keys[layer], cache.values[layer]


def attend(
    q: Float32Array,
    k: Float32Array,
    v: Float32Array,
    *,
    first_position: int,
    scale: float,
    window: int = 0,
    cap: float = 0.0,
    sinks: Float32Array | None = None,
) -> Float32Array:
    """Causal grouped-query attention of the last n of m positions.

    Parameters
    ----------
    q : [n_heads, n, head_dim]
        Rotated queries at positions `first_position` …
    k, v : [n_kv_heads, m, head_dim]
        Rotated keys and values at positions 0 … m − 1.
    scale
        Factor of q·k.
    window
        How many positions a query sees, its own included; 0: all up to its own.
    cap
        See `softcap`.
    sinks : [n_heads], optional
        One more score for each head, of a position whose value is zero (Xiao et al. 2023, arXiv:2309.17453).

    Returns
    -------
    [n, n_heads · head_dim]
    """
    n_heads, n, head_dim = q.shape
    n_kv_heads, m, _ = k.shape
    grouped = q.reshape(n_kv_heads, n_heads // n_kv_heads, n, head_dim)
    mixed = np.empty((*grouped.shape[:-1], v.shape[-1]), np.float32)
    for start in range(0, n, QUERY_BLOCK):
        rows = slice(start, min(start + QUERY_BLOCK, n))
        scores = np.float32(scale) * (grouped[:, :, rows] @ k[:, None].swapaxes(-1, -2))
        seen = visible(np.arange(rows.start, rows.stop) + first_position, m, window)
        scores = np.where(seen, softcap(scores, cap), np.float32(-np.inf))
        if sinks is not None:
            column = np.broadcast_to(sinks.reshape(n_kv_heads, -1, 1, 1), (*scores.shape[:-1], 1))
            scores = np.concatenate([scores, column], axis=-1)
        weights = softmax(scores)[..., :m]
        mixed[:, :, rows] = weights @ v[:, None]
    return mixed.reshape(n_heads, n, -1).swapaxes(0, 1).reshape(n, -1)


def visible(positions: NDArray[np.int64], n_keys: int, window: int) -> NDArray[np.bool_]:
    """Which of the keys 0 … n_keys − 1 each query position sees: bool [n, n_keys]."""
    distance = positions[:, None] - np.arange(n_keys)
    return (distance >= 0) & (distance < window) if window else distance >= 0


def softmax(x: Float32Array) -> Float32Array:
    """exp(x) / Σ exp(x) over the last axis, safe for large values and for −inf."""
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    weights: Float32Array = e / e.sum(axis=-1, keepdims=True)
    return weights


def softcap(x: Float32Array, cap: float) -> Float32Array:
    """cap · tanh(x / cap), which stays within ±cap; x itself when cap is 0."""
    capped: Float32Array = np.float32(cap) * np.tanh(x / np.float32(cap)) if cap else x
    return capped


def output_norm(config: ModelConfig, x: Float32Array, vectors: Mapping[str, Float32Array]) -> Float32Array:
    """The norm before the output matrix; `vectors` has its weight, and its bias if there is one, by tensor name."""
    weight = vectors["output_norm.weight"]
    if config.layer_norm:
        return layer_norm(x, weight, vectors.get("output_norm.bias"), config.norm_eps)
    return rms_norm(x, weight, config.norm_eps)


def rms_norm(x: Float32Array, weight: Float32Array, eps: float) -> Float32Array:
    """x / √(mean(x²) + eps) · weight over the last axis (Zhang and Sennrich 2019, arXiv:1910.07467)."""
    mean_square: Float32Array = np.mean(x * x, axis=-1, keepdims=True)
    normed: Float32Array = x / np.sqrt(mean_square + np.float32(eps)) * weight
    return normed


def layer_norm(x: Float32Array, weight: Float32Array, bias: Float32Array | None, eps: float) -> Float32Array:
    """(x − mean) / √(variance + eps) · weight + bias over the last axis (Ba et al. 2016, arXiv:1607.06450)."""
    centred = x - np.mean(x, axis=-1, keepdims=True)
    normed = rms_norm(centred, weight, eps)
    return normed if bias is None else normed + bias


def route(
    scores: Float32Array, experts: ExpertConfig, bias: Float32Array | None
) -> tuple[NDArray[np.int64], Float32Array]:
    """Which experts each token goes through, and with what weights.

    Parameters
    ----------
    scores : [n, n_experts]
        The router's outputs.
    bias : [n_experts], optional
        Added for the choice alone.

    Returns
    -------
    int64 [n, n_used], float32 [n, n_used]
        In descending order of what they were chosen by; of equal ones the lower number first.
    """
    shares = softmax(scores) if experts.scoring == "softmax" else scores
    if experts.scoring == "sigmoid":
        shares = sigmoid(scores)
    choice = shares if bias is None else shares + bias
    if experts.n_groups > 1:
        choice = within_groups(choice, experts)
    order = np.argsort(-choice, axis=-1, kind="stable")
    chosen = order[:, : experts.n_used]
    weights = np.take_along_axis(shares, chosen, axis=-1)
    if experts.scoring == "softmax of chosen":
        weights = softmax(weights)
    elif experts.normalise:
        weights = weights / weights.sum(axis=-1, keepdims=True)
    return chosen, weights * np.float32(experts.weight_scale)


def within_groups(choice: Float32Array, experts: ExpertConfig) -> Float32Array:
    """−inf for all experts but those of the best groups (DeepSeek-V3, arXiv:2412.19437, section 2.1.2)."""
    grouped = choice.reshape(len(choice), experts.n_groups, -1)
    best = np.sort(grouped, axis=-1)[:, :, ::-1]
    scores = best[:, :, :2].sum(-1) if experts.scoring == "sigmoid" else best[:, :, 0]
    ranks = np.argsort(np.argsort(-scores, axis=-1, kind="stable"), axis=-1)
    kept = np.where((ranks < experts.n_groups_used)[:, :, None], grouped, np.float32(-np.inf))
    return np.asarray(kept.reshape(choice.shape), np.float32)


def activate(kind: Activation, gate: Float32Array, up: Float32Array, gated: bool) -> Float32Array:
    """activation(gate) · up, or without a gate activation(up).

    "swiglu_oai" is gpt-oss's: the gate bounded by 7 from above, up by ±7, and gate · sigmoid(1.702 · gate) · (up + 1).
    """
    if kind == "swiglu_oai":
        gate, up = np.minimum(gate, np.float32(7)), np.clip(up, np.float32(-7), np.float32(7))
        return np.asarray(gate * sigmoid(np.float32(1.702) * gate) * (up + 1), np.float32)
    activated: Float32Array = ACTIVATIONS[kind](gate) * up if gated else ACTIVATIONS[kind](up)
    return activated


def sigmoid(x: Float32Array) -> Float32Array:
    """1 / (1 + exp(−x))."""
    with np.errstate(over="ignore"):
        y: Float32Array = np.reciprocal(1 + np.exp(-x))
    return y


def silu(x: Float32Array) -> Float32Array:
    """x / (1 + exp(−x)); the exponential of a large negative x is infinite, and the result 0."""
    with np.errstate(over="ignore"):
        activated: Float32Array = x / (1 + np.exp(-x))
    return activated


def gelu_tanh(x: Float32Array) -> Float32Array:
    """The tanh form of the Gaussian error linear unit (Hendrycks and Gimpel 2016, arXiv:1606.08415)."""
    inner = np.float32(np.sqrt(2 / np.pi)) * (x + np.float32(0.044715) * (x * x * x))
    activated: Float32Array = x * (1 + np.tanh(inner)) * np.float32(0.5)
    return activated


def gelu(x: Float32Array) -> Float32Array:
    """x · Φ(x), Φ the standard normal distribution (Hendrycks and Gimpel 2016, arXiv:1606.08415)."""
    erf = np.vectorize(math.erf, otypes=[np.float32])(x.astype(np.float64) / math.sqrt(2))
    activated: Float32Array = x * (1 + erf) * np.float32(0.5)
    return activated


def relu2(x: Float32Array) -> Float32Array:
    """max(x, 0)² (So et al. 2021, arXiv:2109.08668)."""
    positive: Float32Array = np.maximum(x, np.float32(0))
    return positive * positive


ACTIVATIONS = {"silu": silu, "gelu": gelu, "gelu_tanh": gelu_tanh, "relu2": relu2}
