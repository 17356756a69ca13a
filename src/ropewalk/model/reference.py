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

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ropewalk.errors import PromptError
from ropewalk.model.rope import cos_sin, inverse_frequencies, rotate

if TYPE_CHECKING:
    from typing import Protocol

    from ropewalk.model.config import ModelConfig

    class Checkpoint(Protocol):
        """What the reference needs of a model file."""

        def tensor(self, name: str) -> NDArray[np.float32]: ...


Float32Array = NDArray[np.float32]
QUERY_BLOCK = 256
"""Queries whose scores are held at once: n_heads · 256 · n floats."""


@dataclass
class ReferenceCache:
    """Rotated keys, and values, of every layer so far: lists of float32 [n_kv_heads, length, head_dim]."""

    length: int = 0
    keys: list[Float32Array] = field(default_factory=list)
    values: list[Float32Array] = field(default_factory=list)


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
    """

    def __init__(self, config: ModelConfig, checkpoint: Checkpoint, *, keep_bytes: int = 2**31) -> None:
        self.config = config
        self._checkpoint = checkpoint
        self._spare_bytes = keep_bytes
        self._kept = {"token_embd.weight": checkpoint.tensor("token_embd.weight")}
        self._frequencies = [
            inverse_frequencies(rope, checkpoint.tensor("rope_freqs.weight") if rope.freq_factors else None)
            for rope in config.rope
        ]

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
        positions = np.arange(start, start + tokens.size)
        x = self._weight("token_embd.weight")[tokens] * np.float32(config.embedding_scale)
        for layer in range(config.n_layers):
            x = x + self._attention(layer, self._norm(x, f"blk.{layer}.attn_norm.weight"), positions, cache)
            x = x + self._feed_forward(layer, self._norm(x, f"blk.{layer}.ffn_norm.weight"))
        if cache:
            cache.length += tokens.size
        x = self._norm(x, "output_norm.weight")
        output = "token_embd.weight" if config.tied_output else "output.weight"
        return softcap(self._linear(x, output), config.logit_softcap)

    def _attention(
        self, layer: int, x: Float32Array, positions: NDArray[np.int64], cache: ReferenceCache | None
    ) -> Float32Array:
        config, block = self.config, f"blk.{layer}."
        q = self._heads(x, block + "attn_q", config.n_heads)
        k = self._heads(x, block + "attn_k", config.n_kv_heads)
        v = self._heads(x, block + "attn_v", config.n_kv_heads)
        if config.qk_norm:
            q = self._norm(q, block + "attn_q_norm.weight")
            k = self._norm(k, block + "attn_k_norm.weight")
        which = config.layer_rope[layer]
        cos, sin = cos_sin(self._frequencies[which], positions)
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
        )
        branch = self._linear(mixed, block + "attn_output.weight")
        return self._norm(branch, block + "post_attention_norm.weight") if config.post_norms else branch

    def _heads(self, x: Float32Array, name: str, n_heads: int) -> Float32Array:
        """One of the q, k, v projections, split: float32 [n_heads, n, head_dim]."""
        y = self._linear(x, name + ".weight")
        if self.config.qkv_bias:
            y = y + self._weight(name + ".bias")
        return y.reshape(len(x), n_heads, self.config.head_dim).swapaxes(0, 1)

    def _feed_forward(self, layer: int, x: Float32Array) -> Float32Array:
        block = f"blk.{layer}."
        gate = ACTIVATIONS[self.config.activation](self._linear(x, block + "ffn_gate.weight"))
        up = self._linear(x, block + "ffn_up.weight")
        branch = self._linear(gate * up, block + "ffn_down.weight")
        return self._norm(branch, block + "post_ffw_norm.weight") if self.config.post_norms else branch

    def _linear(self, x: Float32Array, name: str) -> Float32Array:
        """x · Wᵀ for the matrix of that name, [outputs, inputs]."""
        return x @ self._weight(name).T

    def _norm(self, x: Float32Array, name: str) -> Float32Array:
        return rms_norm(x, self._weight(name), self.config.norm_eps)

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

    Returns
    -------
    [n, n_heads · head_dim]
    """
    n_heads, n, head_dim = q.shape
    n_kv_heads, m, _ = k.shape
    grouped = q.reshape(n_kv_heads, n_heads // n_kv_heads, n, head_dim)
    mixed = np.empty_like(grouped)
    for start in range(0, n, QUERY_BLOCK):
        rows = slice(start, min(start + QUERY_BLOCK, n))
        scores = np.float32(scale) * (grouped[:, :, rows] @ k[:, None].swapaxes(-1, -2))
        seen = visible(np.arange(rows.start, rows.stop) + first_position, m, window)
        weights = softmax(np.where(seen, softcap(scores, cap), np.float32(-np.inf)))
        mixed[:, :, rows] = weights @ v[:, None]
    return mixed.reshape(n_heads, n, head_dim).swapaxes(0, 1).reshape(n, n_heads * head_dim)


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


def rms_norm(x: Float32Array, weight: Float32Array, eps: float) -> Float32Array:
    """x / √(mean(x²) + eps) · weight over the last axis (Zhang and Sennrich 2019, arXiv:1910.07467)."""
    mean_square: Float32Array = np.mean(x * x, axis=-1, keepdims=True)
    normed: Float32Array = x / np.sqrt(mean_square + np.float32(eps)) * weight
    return normed


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


ACTIVATIONS = {"silu": silu, "gelu_tanh": gelu_tanh}
