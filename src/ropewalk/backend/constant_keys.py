"""What keys have in common whatever their token: left out of an int8 cache, and added to the scores instead.

With x the layer's input after its norm, without the norm's bias B, and R(p) the rotation at position p, a key is

    R(p) (W x + r)          r = W B + b          W, b: matrix and bias of the keys

An int8 cache has one scale for all numbers of a key. Where r is large (Qwen2 has biases of 200 beside a W x of about 1)
the scale is r's, and little of W x is left. So r is taken out where it is large, pair by pair of rotated dimensions:
where it exceeds LIMIT times the largest standard deviation that W x has in a dimension of that head, for which the
components of x are taken as independent, with a variance of 1 before the norm's weight. What that changes in the
scores is a term for each such pair (`kernels.pages`).

Dimensions that are not rotated have the same part of every key's score, which the softmax ignores; there all of r is
left out, unless scores are capped or compete with sinks. Keys that pass a norm of their own have no such part.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ropewalk.backend.base import Float32Array
from ropewalk.backend.sources import layer_sources, layer_vectors
from ropewalk.backend.weights import PackedWeights
from ropewalk.checkpoint.base import Checkpoint
from ropewalk.checkpoint.quants import dequantize
from ropewalk.kernels.pages import TERM_BYTES
from ropewalk.kernels.tables import K, Layer
from ropewalk.model.config import ModelConfig

LIMIT = 2.0

TERM = np.dtype([("pair", "<i4"), ("r", "<f4", 2), ("", "<i4")])
assert TERM.itemsize == TERM_BYTES


class ConstantKeys:
    """The constant parts of a model's keys; fills in K_REST and K_TERMS of its layer table.

    Attributes
    ----------
    n_terms : int64 [n_layers, n_kv_heads]
        Pairs whose constant part is left out.
    """

    def __init__(self, config: ModelConfig, checkpoint: Checkpoint, weights: PackedWeights) -> None:
        weights.layers[:, Layer.K_REST] = weights.layers[:, Layer.K_BIAS]
        self.n_terms = np.zeros((config.n_layers, config.n_kv_heads), np.int64)
        self._memory: list[NDArray[np.generic]] = []
        for layer, row in enumerate(weights.layers):
            if config.latent or row[Layer.K_NORM] or row[Layer.K_ROW_NORM]:
                continue
            parts = _parts(config, checkpoint, weights, layer)
            if parts is None:
                continue
            bias, constant, spread = parts
            first, second = _pairs(config, layer)
            size = np.hypot(constant[:, first], constant[:, second])
            large = size > LIMIT * spread.max(axis=1, keepdims=True)
            left_out = np.zeros(constant.shape, np.bool_)
            left_out[:, first] = left_out[:, second] = large
            if not (config.sinks or config.attention_softcap):
                left_out[:, 2 * len(first) :] = True
            if not left_out.any():
                continue
            rest = bias - constant * left_out
            terms = np.zeros((config.n_kv_heads, 1 + _width(config) // 2), TERM)
            for of_head, chosen, r in zip(terms, large, constant, strict=True):
                (pairs,) = np.nonzero(chosen)
                of_head["pair"][0] = len(pairs)
                of_head["pair"][1 : 1 + len(pairs)] = pairs
                of_head["r"][1 : 1 + len(pairs)] = np.stack([r[first[pairs]], r[second[pairs]]], axis=1)
            self.n_terms[layer] = terms["pair"][:, 0]
            self._memory += [rest, terms]
            row[Layer.K_REST] = rest.ctypes.data
            row[Layer.K_TERMS] = terms.ctypes.data if large.any() else 0


def _width(config: ModelConfig) -> int:
    return config.rope[0].width if config.rope else 0


def _pairs(config: ModelConfig, layer: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """First and second dimension of each pair that this layer rotates."""
    n = _width(config) // 2 if config.layer_rope[layer] >= 0 else 0
    if n and config.rope[0].layout == "neighbours":
        return np.arange(0, 2 * n, 2), np.arange(1, 2 * n, 2)
    return np.arange(n), np.arange(n, 2 * n)


def _parts(
    config: ModelConfig, checkpoint: Checkpoint, weights: PackedWeights, layer: int
) -> tuple[Float32Array, Float32Array, Float32Array] | None:
    """Bias, constant part, and standard deviation of the rest, each [n_kv_heads, head_dim]; None without a bias."""
    names = layer_vectors(config, layer)

    def vector(field: Layer) -> Float32Array | None:
        name, start = names[field]
        found = weights.vectors.get(name)
        return None if found is None else found[start:]

    bias, norm, norm_bias = map(vector, (Layer.K_BIAS, Layer.ATTN_NORM, Layer.ATTN_NORM_BIAS))
    if bias is None and norm_bias is None:
        return None
    source = layer_sources(config, layer)[K]
    assert source
    raw = checkpoint.raw(source.name)[source.start : source.stop]
    matrix = dequantize(raw, checkpoint.tensors[source.name].format)
    shape = (config.n_kv_heads, config.head_dim)
    bias = np.zeros(len(matrix), np.float32) if bias is None else bias[: len(matrix)]
    constant = bias
    if norm_bias is not None:  # in float64 and without BLAS, so that no bit depends on the machine's threads
        constant = bias + (matrix * norm_bias.astype(np.float64)).sum(axis=1).astype(np.float32)
    spread = np.sqrt(np.square(matrix if norm is None else matrix * norm).sum(axis=1))
    return bias.reshape(shape), constant.reshape(shape), spread.reshape(shape)
