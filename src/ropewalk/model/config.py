"""What a checkpoint is: `ModelConfig`, read from GGUF metadata and proved against the tensors of the file.

A file that describes anything we do not compute exactly is refused here, by an error that names the key or
the tensor, its value and what is allowed; after this module every number can be trusted. It knows neither how
tensors are stored nor how they are multiplied.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from ropewalk.errors import CheckpointError, UnsupportedModelError
from ropewalk.model.families import (
    FAMILIES,
    INERT_KEYS,
    UNIMPLEMENTED_KEYS,
    UNIMPLEMENTED_TENSORS,
    Activation,
    Family,
    RopeLayout,
    tensor_shapes,
)
from ropewalk.model.scaling import RopeScaling

if TYPE_CHECKING:
    from ropewalk.checkpoint.gguf import TensorInfo

MAX_LAYERS = 4096
MAX_SIZE = 2**31 - 1
"""Largest size, vocabulary or position: token ids and positions are int32 everywhere."""


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


@dataclass(frozen=True)
class ModelConfig:
    """Everything the mathematics of one decoder depends on, besides its weights.

    Attributes
    ----------
    head_dim
        Width of one head of q, k and v; `n_heads * head_dim` need not be `hidden_size`.
    rope, layer_rope
        The distinct rotary settings, and for each layer the index of its own.
    layer_window
        For each layer how many tokens it sees, the current one included; 0: all of them.
    embedding_scale, attention_scale
        Factors of the embedding row, and of q·k.
    qkv_bias, qk_norm, post_norms
        See `Family`.
    tied_output
        Whether the output matrix is the embedding matrix (the file has no `output.weight`).
    attention_softcap, logit_softcap
        c > 0: scores x become c · tanh(x / c); 0: unchanged.
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
    qkv_bias: bool
    qk_norm: bool
    post_norms: bool
    tied_output: bool
    attention_softcap: float
    logit_softcap: float

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
        architecture = metadata.get("general.architecture")
        if not isinstance(architecture, str) or architecture not in FAMILIES:
            raise UnsupportedModelError(
                f"general.architecture = {_show(architecture)} is not supported; "
                f"supported are {', '.join(FAMILIES)}"
            )
        family = FAMILIES[architecture]
        keys = _Keys(metadata, architecture)
        sizes = _read_sizes(keys, metadata, tensors)
        n_layers, head_dim = sizes["n_layers"], sizes["head_dim"]
        windows = _read_windows(keys, family, n_layers)
        rope = _read_rope(keys, family, head_dim, any(windows), "rope_freqs.weight" in tensors)
        name = metadata.get("general.name")
        wide = n_layers in family.wide_scale_layers
        scale_width = sizes["hidden_size"] / sizes["n_heads"] if wide else head_dim
        config = cls(
            architecture=architecture,
            name=name if isinstance(name, str) else None,
            **sizes,
            norm_eps=keys.number("attention.layer_norm_rms_epsilon", low=0.0, high=1.0, open_low=True),
            rope=rope,
            layer_rope=tuple(int(window > 0) for window in windows),
            layer_window=windows,
            activation=family.activation,
            embedding_scale=math.sqrt(sizes["hidden_size"]) if family.scales_embedding else 1.0,
            attention_scale=keys.number(
                "attention.scale", 1 / math.sqrt(scale_width), low=0.0, high=1e6, open_low=True
            ),
            qkv_bias=_has_bias(family, tensors),
            qk_norm=family.qk_norm,
            post_norms=family.post_norms,
            tied_output="output.weight" not in tensors,
            attention_softcap=keys.number("attn_logit_softcapping", 0.0, low=0.0, high=1e6),
            logit_softcap=keys.number("final_logit_softcapping", 0.0, low=0.0, high=1e6),
        )
        keys.check_the_rest()
        check_tensors(config, tensors)
        return config

    @property
    def kv_group(self) -> int:
        """How many heads of q share one head of k and v."""
        return self.n_heads // self.n_kv_heads


def _read_sizes(
    keys: _Keys, metadata: Mapping[str, object], tensors: Mapping[str, TensorInfo]
) -> dict[str, int]:
    n_layers = keys.integer("block_count", high=min(MAX_LAYERS, len(tensors)))
    hidden_size = keys.integer("embedding_length")
    n_heads = keys.integer("attention.head_count", high=2**16)
    n_kv_heads = keys.integer("attention.head_count_kv", n_heads, high=n_heads)
    if n_heads % n_kv_heads:
        keys.refuse("attention.head_count_kv", n_kv_heads, f"a divisor of attention.head_count = {n_heads}")
    if not keys.has("attention.key_length") and hidden_size % n_heads:
        keys.refuse("attention.head_count", n_heads, f"a divisor of embedding_length = {hidden_size}")
    head_dim = keys.integer("attention.key_length", hidden_size // n_heads, high=2**16)
    value_length = keys.integer("attention.value_length", head_dim, high=2**16)
    if value_length != head_dim:
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


def _read_vocab_size(keys: _Keys, metadata: Mapping[str, object], tensors: Mapping[str, TensorInfo]) -> int:
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


def _read_windows(keys: _Keys, family: Family, n_layers: int) -> tuple[int, ...]:
    """The sliding window of each layer, 0 where there is none."""
    window = keys.integer("attention.sliding_window", 0, low=0)
    pattern = keys.value("attention.sliding_window_pattern")
    if not family.window_period:
        if window or pattern is not None:
            raise UnsupportedModelError(
                f"{keys.prefix}attention.sliding_window = {window} is not supported: "
                "this architecture is implemented without a sliding window"
            )
        return (0,) * n_layers
    if isinstance(pattern, np.ndarray):
        if pattern.dtype != np.bool_ or pattern.shape != (n_layers,):
            keys.refuse("attention.sliding_window_pattern", pattern, f"{n_layers} booleans")
        return tuple(window if local else 0 for local in pattern.tolist())
    period = keys.integer("attention.sliding_window_pattern", family.window_period)
    return tuple(window if layer % period else 0 for layer in range(1, n_layers + 1))


def _read_rope(
    keys: _Keys, family: Family, head_dim: int, has_windows: bool, has_factors: bool
) -> tuple[RopeConfig, ...]:
    """Rotary settings: of the layers that see everything, then (if any) of those with a window."""
    width = keys.integer("rope.dimension_count", head_dim, low=2, high=head_dim)
    if width % 2:
        keys.refuse("rope.dimension_count", width, "an even number")
    base = keys.number("rope.freq_base", family.rope_base, low=1.0, high=1e15, open_low=True)
    local_base = keys.number("rope.freq_base_swa", family.local_rope_base, low=1.0, high=1e15, open_low=True)
    everywhere = RopeConfig(base, width, family.rope_layout, has_factors)
    if not has_windows:
        return (everywhere,)
    return everywhere, RopeConfig(local_base, width, family.rope_layout)


def _has_bias(family: Family, tensors: Mapping[str, TensorInfo]) -> bool:
    return family.qkv_bias == "always" or (family.qkv_bias == "optional" and "blk.0.attn_q.bias" in tensors)


def check_tensors(config: ModelConfig, tensors: Mapping[str, TensorInfo]) -> None:
    """Refuse missing tensors, wrong shapes and tensors that would change the result; warn of other extras."""
    expected = tensor_shapes(config)
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
        if kind in UNIMPLEMENTED_TENSORS or kind.endswith((".bias", ".scale")):
            raise UnsupportedModelError(
                f"tensor {name} is not supported in architecture {config.architecture}"
            )
        warnings.warn(f"tensor {name} is unknown and not used", UserWarning, stacklevel=3)


def _show(value: object) -> str:
    """A value of the file for an error message: short, whatever the file holds."""
    if isinstance(value, np.ndarray):
        return f"{value.dtype} array of {value.size}, {value[:4].tolist()} …"
    text = repr(value)
    return text if len(text) <= 80 else text[:80] + "…"


class _Keys:
    """The metadata of one architecture: typed and bounded reads, and a memory of what was read."""

    def __init__(self, metadata: Mapping[str, object], architecture: str) -> None:
        self.prefix = architecture + "."
        self._values = {
            key.removeprefix(self.prefix): value
            for key, value in metadata.items()
            if key.startswith(self.prefix)
        }
        self._read: set[str] = set()

    def has(self, key: str) -> bool:
        return key in self._values

    def value(self, key: str) -> object:
        self._read.add(key)
        return self._values.get(key)

    def integer(self, key: str, default: int | None = None, *, low: int = 1, high: int = MAX_SIZE) -> int:
        value = self._scalar(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            self.refuse(key, value, f"an integer from {low} to {high}")
        return value

    def number(
        self, key: str, default: float | None = None, *, low: float, high: float, open_low: bool = False
    ) -> float:
        value = self._scalar(key, default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not low <= value <= high or (open_low and value == low):
            self.refuse(key, value, f"a number {'above' if open_low else 'from'} {low:g} up to {high:g}")
        return float(value)

    def _scalar(self, key: str, default: float | None) -> float:
        """One number; an array (one entry a layer) counts as one when its entries are all the same."""
        value = self.value(key)
        if value is None:
            if default is None:
                raise CheckpointError(f"metadata key {self.prefix}{key} is missing")
            return default
        if isinstance(value, np.ndarray) and value.ndim == 1 and value.size:
            if (value != value[0]).any():
                raise UnsupportedModelError(
                    f"{self.prefix}{key} = {_show(value)} is not supported; "
                    "all layers must have the same value"
                )
            value = value[0].item()
        return value  # type: ignore[return-value]  # its type is checked by the callers

    def refuse(self, key: str, value: object, allowed: str) -> NoReturn:
        raise CheckpointError(f"{self.prefix}{key} = {_show(value)} is not allowed; it must be {allowed}")

    def check_the_rest(self) -> None:
        """Refuse features that are not implemented; warn of keys that nobody read."""
        for key, value in self._values.items():
            if key in UNIMPLEMENTED_KEYS:
                neutral = UNIMPLEMENTED_KEYS[key]
                if isinstance(value, np.ndarray) or value not in neutral:
                    allowed = " or ".join(map(repr, neutral)) or "absent"
                    raise UnsupportedModelError(
                        f"{self.prefix}{key} = {_show(value)} is not implemented; supported: {allowed}"
                    )
            elif key not in self._read and key not in INERT_KEYS:
                if key.startswith("rope."):
                    raise UnsupportedModelError(f"{self.prefix}{key} = {_show(value)} is not implemented")
                warnings.warn(f"metadata key {self.prefix}{key} is unknown and not used", stacklevel=3)
