"""Where rotary scaling is asked for: the keys of a GGUF file, and a user who wants another.

GGUF keys are `<architecture>.rope.scaling.*`; the divisors of llama3 and longrope are tensors. What the keys mean is
what llama.cpp makes of them: the factor of the attention that a file states multiplies the one of YaRN, and replaces
the one of longrope.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from ropewalk.errors import CheckpointError, InvalidParameterError, UnsupportedModelError
from ropewalk.model.scaling import (
    LARGEST,
    SCHEMES,
    DynamicNTK,
    Linear,
    LongRope,
    RopeScaling,
    YaRN,
    score_scale,
)

if TYPE_CHECKING:
    from ropewalk.model.config import ModelConfig

GGUF_SCHEMES = ("none", "linear", "yarn", "longrope", "dynamic")
"""The last is not GGUF's: it comes from folders in Hugging Face's layout, which are read as if they were GGUF."""
MOST_POSITIONS = 2**31 - 1


class Keys(Protocol):
    """Typed reads of one architecture's metadata."""

    prefix: str

    def value(self, key: str) -> object: ...

    def boolean(self, key: str, default: bool) -> bool: ...

    def integer(self, key: str, default: int | None = None, *, low: int = 1) -> int: ...

    def number(
        self, key: str, default: float | None = None, *, low: float, high: float, open_low: bool = False
    ) -> float: ...


def read_scaling(
    keys: Keys, context_length: int, has_lists: bool, truncate: bool = True
) -> RopeScaling | None:
    """The scaling that a GGUF file states.

    Parameters
    ----------
    context_length : int
        Of the file.
    has_lists : bool
        Whether it has the tensors of longrope.
    truncate : bool
        Whether YaRN's ramp ends at whole pairs, unless the file says so.

    Raises
    ------
    UnsupportedModelError
        A scheme or a parameter that is not implemented.
    CheckpointError
        A value that is not allowed.
    """
    try:
        return _read(keys, context_length, has_lists, truncate)
    except InvalidParameterError as error:
        raise CheckpointError(f"{keys.prefix}rope.scaling: {error}") from None


def _read(keys: Keys, context_length: int, has_lists: bool, truncate: bool) -> RopeScaling | None:
    kind = keys.value("rope.scaling.type")
    if kind is None:
        kind = "longrope" if has_lists else "linear"
    if kind not in GGUF_SCHEMES:
        raise UnsupportedModelError(
            f"{keys.prefix}rope.scaling.type = {kind!r:.80} is not supported; supported: {', '.join(GGUF_SCHEMES)}"
        )
    if has_lists and kind != "longrope":
        raise UnsupportedModelError(
            f"{keys.prefix}rope.scaling.type = {kind!r} is not supported beside rope_factors_long.weight"
        )
    old = keys.number("rope.scale_linear", 0.0, low=0.0, high=LARGEST)
    factor = keys.number("rope.scaling.factor", old, low=0.0, high=LARGEST)
    stated = keys.number("rope.scaling.attn_factor", 0.0, low=0.0, high=LARGEST)
    original = keys.integer("rope.scaling.original_context_length", context_length, low=0) or context_length
    if kind == "longrope":
        return _longrope(factor or context_length / original, original, stated)
    if kind == "yarn":
        return _yarn(keys, factor, original, stated, truncate)
    if kind == "dynamic":
        return DynamicNTK(factor, original)
    if stated not in (0, 1):
        raise UnsupportedModelError(
            f"{keys.prefix}rope.scaling.attn_factor = {stated:g} is not supported with {kind!r} scaling"
        )
    return Linear(factor) if kind == "linear" and factor not in (0, 1) else None


def _longrope(factor: float, original: int, stated: float) -> LongRope:
    return LongRope(max(factor, 1.0), original, attention_factor=stated or None)


def _yarn(keys: Keys, factor: float, original: int, stated: float, truncate: bool) -> YaRN:
    for key, neutral in (("yarn_ext_factor", (1.0, -1.0)), ("yarn_attn_factor", (0.0, 1.0))):
        value = keys.number(f"rope.scaling.{key}", neutral[-1], low=-1.0, high=LARGEST)
        if value not in neutral:
            raise UnsupportedModelError(
                f"{keys.prefix}rope.scaling.{key} = {value:g} is not supported; supported: {neutral[0]:g}, "
                f"{neutral[1]:g}"
            )
    scaling = YaRN(
        factor=factor or 1.0,
        original_context=original,
        beta_fast=keys.number("rope.scaling.yarn_beta_fast", 32.0, low=0.0, high=LARGEST, open_low=True),
        beta_slow=keys.number("rope.scaling.yarn_beta_slow", 1.0, low=0.0, high=LARGEST, open_low=True),
        truncate=keys.boolean("rope.scaling.yarn_truncate", truncate),
        mscale=1.0,
        mscale_all_dim=keys.number("rope.scaling.yarn_log_multiplier", 0.0, low=0.0, high=LARGEST),
    )
    return replace(scaling, attention_factor=stated * scaling.attention_scale) if stated else scaling


def override_rope(
    config: ModelConfig, scaling: Mapping[str, Any] | None = None, base: float | None = None
) -> ModelConfig:
    """The same model with another rotary scaling or base, and the context that this makes.

    Parameters
    ----------
    scaling : mapping, optional
        As `rope_scaling` in a `config.json`: `{"rope_type": "yarn", "factor": 4.0}`. The trained context is
        `original_max_position_embeddings`; default: that of the scaling which the file has, or the file's context.
        "none" and "default" take away whatever scaling the file has, divisors included.
    base : float, optional
        In place of the file's.

    Layers with a sliding window that have a setting of their own keep it.

    Raises
    ------
    InvalidParameterError
        A value that is not allowed, or a model without rotary positions.
    UnsupportedModelError
        A scheme or parameter that is not implemented.
    """
    if scaling is None and base is None:
        return config
    if not config.rope:
        raise InvalidParameterError("rope_scaling and rope_base: this model has no rotary positions")
    rope, context_length, attention_scale = config.rope[0], config.context_length, config.attention_scale
    if base is not None:
        if isinstance(base, bool) or not isinstance(base, int | float) or not 1 < base <= 1e15:
            raise InvalidParameterError(f"rope_base is {base!r}; allowed: a number above 1, up to 1e15")
        rope = replace(rope, base=float(base))
    if scaling is not None:
        trained = getattr(rope.scaling, "original_context", context_length)
        chosen = _chosen(scaling, trained)
        if (
            isinstance(chosen, LongRope)
            and not chosen.short_factors
            and not isinstance(rope.scaling, LongRope)
        ):
            raise InvalidParameterError("rope_scaling 'longrope' lacks 'short_factor' and 'long_factor'")
        if config.latent:
            attention_scale *= score_scale(chosen) / score_scale(rope.scaling)
        rope = replace(rope, scaling=chosen, freq_factors=False)
        if chosen is not None:
            context_length = min(chosen.effective_context(trained), MOST_POSITIONS)
    return replace(
        config,
        rope=(rope, *config.rope[1:]),
        context_length=context_length,
        attention_scale=attention_scale,
    )


def _chosen(scaling: Mapping[str, Any], original: int) -> RopeScaling | None:
    if not isinstance(scaling, Mapping):
        raise InvalidParameterError(
            f'rope_scaling is {scaling!r:.80}; allowed: a mapping, such as {{"rope_type": "yarn", "factor": 4}}'
        )
    named = {"none": "default"}
    kind = scaling.get("rope_type", scaling.get("type"))
    if not isinstance(kind, str):
        raise InvalidParameterError(f"rope_scaling has rope_type {kind!r}; allowed: the name of a scheme")
    if kind in SCHEMES and "factor" not in scaling:
        raise InvalidParameterError(
            f"rope_scaling {kind!r} lacks 'factor': by how much to extend the context"
        )
    try:
        return RopeScaling.from_hf({**scaling, "rope_type": named.get(kind, kind)}, context_length=original)
    except UnsupportedModelError:
        raise
    except ValueError as error:
        raise InvalidParameterError(f"rope_scaling: {error}") from None
