"""The sizes of a model that planning needs: layers of the KV cache, and weights by how they are read.

`ModelShape` comes from a GGUF file (`shape_of_gguf`), a Hugging Face `config.json` (`ropewalk.plan.hf`) or plain
numbers (`shape_of_numbers`). A part of the weights has a count and bytes:

    dense      multiplied with every token: attention, feed-forward networks, shared experts, norms
    experts    all routed experts, of which a token goes through `n_used` of `n_experts`
    output     the output matrix, read by the tokens whose logits are wanted; the embedding itself where they share
    embedding  rows that are looked up: in memory, but never read as a whole
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from ropewalk.errors import CheckpointError, InvalidParameterError, UnsupportedModelError
from ropewalk.model.config import ModelConfig
from ropewalk.plan.memory import WeightType, check_count

if TYPE_CHECKING:
    from ropewalk.checkpoint.base import Checkpoint


@dataclass(frozen=True)
class LayerShape:
    """One layer of the KV cache.

    Attributes
    ----------
    n_heads, n_kv_heads
        Of queries, and of keys and values.
    key_dim, value_dim
        Width of one head.
    window
        Tokens that it sees, the current one included; 0: all.
    latent
        Elements of the one vector a token that multi-head latent attention has in place of keys and values of all
        heads; 0 in all other models.
    """

    n_heads: int
    n_kv_heads: int
    key_dim: int
    value_dim: int
    window: int = 0
    latent: int = 0


@dataclass(frozen=True)
class Part:
    """Some of the weights: how many, and their bytes."""

    count: int = 0
    n_bytes: int = 0

    def __add__(self, other: Part) -> Part:
        return Part(self.count + other.count, self.n_bytes + other.n_bytes)


@dataclass(frozen=True)
class Weights:
    """Weights by how they are read; see the top of this file."""

    dense: Part
    output: Part = Part()
    embedding: Part = Part()
    experts: Part = Part()
    n_experts: int = 0
    n_used: int = 0

    @property
    def total(self) -> Part:
        """All of them."""
        return self.dense + self.output + self.embedding + self.experts

    def distinct_experts(self, n_tokens: int) -> float:
        """Experts a layer that a step of so many tokens is expected to read, if each is as likely as any other."""
        if not self.n_experts:
            return 0.0
        return self.n_experts * (1 - (1 - self.n_used / self.n_experts) ** n_tokens)

    def read_bytes(self, n_tokens: int) -> float:
        """Bytes that a step of so many tokens reads; experts as `distinct_experts` expects."""
        share = self.distinct_experts(n_tokens) / self.n_experts if self.n_experts else 0.0
        return self.dense.n_bytes + self.output.n_bytes + share * self.experts.n_bytes

    def used_count(self, *, logits: bool = True) -> float:
        """Weights that one token is multiplied with, with or without the output matrix."""
        share = self.n_used / self.n_experts if self.n_experts else 0.0
        return self.dense.count + share * self.experts.count + (self.output.count if logits else 0)


@dataclass(frozen=True)
class ModelShape:
    """What planning needs of a model.

    Attributes
    ----------
    name
        For people.
    layers
        Of the KV cache, in order.
    weight_type
        Name of their type, or of the types that are mixed.
    context_length
        Most tokens that it was made for; None: not known.
    notes
        What was assumed.
    """

    name: str
    layers: tuple[LayerShape, ...]
    weights: Weights
    weight_type: str
    context_length: int | None = None
    notes: tuple[str, ...] = field(default=())

    @property
    def as_mha(self) -> ModelShape:
        """The same model if every head of the queries had keys and values of its own."""
        layers = tuple(replace(layer, n_kv_heads=layer.n_heads) for layer in self.layers)
        return replace(self, layers=layers)

    @property
    def shares_heads(self) -> bool:
        """Whether heads of queries share keys and values (grouped-query attention)."""
        return any(layer.n_kv_heads < layer.n_heads and not layer.latent for layer in self.layers)

    def with_weight_type(self, kind: WeightType) -> ModelShape:
        """The same model with all its weights in one type."""
        w = self.weights

        def changed(part: Part) -> Part:
            return Part(part.count, kind.n_bytes(part.count))

        weights = replace(
            w,
            dense=changed(w.dense),
            output=changed(w.output),
            embedding=changed(w.embedding),
            experts=changed(w.experts),
        )
        return replace(self, weights=weights, weight_type=kind.name)


def shape_of_numbers(
    *,
    layers: int,
    kv_heads: int,
    head_dim: int,
    params: int,
    weight_type: WeightType,
    heads: int | None = None,
    window: int = 0,
    name: str = "a model of these numbers",
) -> ModelShape:
    """A uniform decoder of which only these numbers are known; all its weights count as read with every token.

    Parameters
    ----------
    params : int
        Weights in all.
    heads : int, optional
        Heads of the queries; default: as many as of keys and values.

    Raises
    ------
    InvalidParameterError
        A number below 1, or heads that `kv_heads` does not divide.
    """
    heads = check_count("heads", kv_heads if heads is None else heads)
    for key, value in (
        ("layers", layers),
        ("kv_heads", kv_heads),
        ("head_dim", head_dim),
        ("params", params),
    ):
        check_count(key, value)
    check_count("window", window, 0)
    if heads % kv_heads:
        raise InvalidParameterError(f"kv_heads is {kv_heads}; allowed: a divisor of heads, which is {heads}")
    if layers > 4096:
        raise InvalidParameterError(f"layers is {layers}; allowed: at most 4096")
    layer = LayerShape(heads, kv_heads, head_dim, head_dim, window)
    weights = Weights(dense=Part(params, weight_type.n_bytes(params)))
    return ModelShape(name, (layer,) * layers, weights, weight_type.name)


def shape_of_gguf(checkpoint: Checkpoint) -> ModelShape:
    """The shape of a GGUF file, or of a folder that is read as one, with the types and bytes of its own tensors.

    A file of an architecture that Ropewalk cannot run is planned for by its keys alone.

    Raises
    ------
    CheckpointError
        A key is missing or absurd.
    """
    notes: tuple[str, ...] = ()
    try:
        config = ModelConfig.from_gguf(checkpoint.metadata, checkpoint.tensors)
    except UnsupportedModelError as error:
        layers, context_length = _layers_of_keys(checkpoint.metadata)
        notes = (f"planned for by its keys alone, sliding windows left aside, as it cannot be run: {error}",)
    else:
        layers, context_length = _layers_of_config(checkpoint.metadata, config), config.context_length
    name = checkpoint.metadata.get("general.name")
    return ModelShape(
        name=name if isinstance(name, str) else checkpoint.path.name,
        layers=layers,
        weights=_weights_of_tensors(checkpoint),
        weight_type=_types_of_tensors(checkpoint),
        context_length=context_length,
        notes=notes,
    )


def _layers_of_config(metadata: Mapping[str, object], config: ModelConfig) -> tuple[LayerShape, ...]:
    if _Keys(metadata).integer("attention.kv_lora_rank", 0):
        return _layers_of_keys(metadata)[0]
    return tuple(
        LayerShape(config.n_heads, config.n_kv_heads, config.head_dim, config.head_dim, window)
        for window in config.layer_window
    )


def _weights_of_tensors(checkpoint: Checkpoint) -> Weights:
    parts = {"dense": Part(), "output": Part(), "embedding": Part(), "experts": Part()}
    tied = "output.weight" not in checkpoint.tensors
    for name, info in checkpoint.tensors.items():
        if name == "token_embd.weight":
            part = "output" if tied else "embedding"
        elif name == "output.weight":
            part = "output"
        else:
            part = "experts" if "_exps." in name else "dense"
        parts[part] += Part(info.size, info.n_bytes)
    weights = Weights(parts["dense"], parts["output"], parts["embedding"], parts["experts"])
    if not weights.experts.count:
        return weights
    keys = _Keys(checkpoint.metadata)
    return replace(weights, n_experts=keys.integer("expert_count"), n_used=keys.integer("expert_used_count"))


def _types_of_tensors(checkpoint: Checkpoint) -> str:
    sizes: dict[str, int] = {}
    for info in checkpoint.tensors.values():
        if len(info.shape) > 1:
            sizes[info.format.name] = sizes.get(info.format.name, 0) + info.n_bytes
    return " and ".join(sorted(sizes, key=lambda name: -sizes[name])) or "no matrices"


def _layers_of_keys(metadata: Mapping[str, object]) -> tuple[tuple[LayerShape, ...], int | None]:
    keys = _Keys(metadata)
    n_layers = keys.integer("block_count")
    if n_layers > 4096:
        raise CheckpointError(f"{keys.prefix}block_count = {n_layers} is not allowed; at most 4096")
    heads = keys.integers("attention.head_count", n_layers)
    kv_heads = keys.integers("attention.head_count_kv", n_layers, heads)
    key_dim = keys.integer("attention.key_length", keys.integer("embedding_length") // max(heads[0], 1))
    value_dim = keys.integer("attention.value_length", key_dim)
    lora = keys.integer("attention.kv_lora_rank", 0)
    latent = lora + keys.integer("rope.dimension_count") if lora else 0
    layers = tuple(
        LayerShape(h, k, key_dim, value_dim, 0, latent) for h, k in zip(heads, kv_heads, strict=True)
    )
    return layers, keys.integer("context_length", 0) or None


class _Keys:
    """Sizes among the metadata of one architecture, whatever it is."""

    def __init__(self, metadata: Mapping[str, object]) -> None:
        self._metadata = metadata
        self.prefix = f"{metadata.get('general.architecture')}."

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._metadata.get(self.prefix + key, default)
        if isinstance(value, np.ndarray) and value.size:
            value = value.flat[0].item()
        if value is None:
            raise CheckpointError(
                f"metadata key {self.prefix}{key} is missing: without it nothing can be planned"
            )
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**31:
            raise CheckpointError(
                f"{self.prefix}{key} = {value!r:.80} is not allowed; it must be an integer from 0 on"
            )
        return value

    def integers(self, key: str, n: int, default: list[int] | None = None) -> list[int]:
        """One number a layer; a single one holds for all."""
        value = self._metadata.get(self.prefix + key)
        if value is None and default is not None:
            return default
        if isinstance(value, np.ndarray) and value.shape == (n,) and np.issubdtype(value.dtype, np.integer):
            return [int(v) for v in value]
        return [self.integer(key)] * n
