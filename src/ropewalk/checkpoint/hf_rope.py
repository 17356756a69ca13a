"""Rotary settings of `config.json` as GGUF's keys and tensors, scheme by scheme.

Schemes that GGUF has keys for are copied; the divisors of llama3 and longrope become tensors, float32 [width / 2], as
GGUF has no key for them. What cosines are multiplied with becomes a factor of what YaRN multiplies them with anyway, as
GGUF's readers take it. What the schemes do to angles is the business of `ropewalk.model.scaling`.

Source: transformers' `modeling_rope_utils`, and the papers named there.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ropewalk.checkpoint.cursor import show
from ropewalk.checkpoint.hf_families import HFFamily, Keys
from ropewalk.checkpoint.hf_values import Config
from ropewalk.checkpoint.names import Sizes
from ropewalk.errors import CheckpointError, UnsupportedModelError

Tensors = dict[str, NDArray[np.float32]]
Scaled = tuple[Keys, Tensors]
Scaling = Callable[[Config, Mapping[str, Any], Sizes, float], Scaled]


def _rope_parameters(config: Config) -> tuple[Mapping[str, Any], Mapping[str, Any] | None]:
    """Rotary settings of the layers that see everything, and of those with a window if they have their own."""
    new = config.values.get("rope_parameters")
    if isinstance(new, Mapping):
        if isinstance(everywhere := new.get("full_attention"), Mapping):
            local = new.get("sliding_attention")
            return everywhere, local if isinstance(local, Mapping) else None
        return new, None
    old = config.values.get("rope_scaling")
    parameters = dict(old) if isinstance(old, Mapping) else {}
    if (base := config.first("rope_theta", "rotary_emb_base")) is not None:
        parameters["rope_theta"] = base
    local_base = config.first("rope_local_base_freq")
    return parameters, None if local_base is None else {"rope_theta": local_base}


def rope_width(config: Config, family: HFFamily, head_dim: int) -> int:
    """Rotated dimensions of a head, an even number; some families rotate a part without saying so.

    Raises
    ------
    CheckpointError : the part is not above 0 and at most 1, or the number is odd.
    """
    parameters, _ = _rope_parameters(config)
    part = parameters.get("partial_rotary_factor")
    part = config.number("partial_rotary_factor", "rotary_pct", "rope_pct") if part is None else part
    part = family.rope_part if part is None else part
    if isinstance(part, bool) or not isinstance(part, int | float) or not 0 < part <= 1:
        raise CheckpointError(
            f"{config.label}: the rotated part of a head is {show(part)}; allowed: above 0, up to 1"
        )
    width = int(head_dim * part)
    if width % 2 and family.table != "gpt2":
        raise CheckpointError(
            f"{config.label}: {width} dimensions of a head are rotated; allowed: an even number"
        )
    return width


def rope_keys(config: Config, sizes: Sizes) -> Scaled:
    """Rotary bases and scaling as GGUF's keys (without the architecture), and as tensors by GGUF name.

    Raises
    ------
    UnsupportedModelError : the scheme is not one of `SCALINGS`, or is used as GGUF cannot say.
    CheckpointError : one of its numbers is missing or has a value that is not allowed.
    """
    parameters, local = _rope_parameters(config)
    keys: Keys = {}
    base = _number(config, parameters, "rope_theta", None)
    if base is not None:
        keys["rope.freq_base"] = base
    if local is not None and (local_base := _number(config, local, "rope_theta", None)) is not None:
        keys["rope.freq_base_swa"] = local_base
    kind = parameters.get("rope_type", parameters.get("type"))
    if kind in (None, "default"):
        return keys, {}
    if not isinstance(kind, str) or kind not in SCALINGS:
        raise UnsupportedModelError(
            f"{config.label}: rope_type = {show(kind)} is not supported; supported: default, {', '.join(SCALINGS)}"
        )
    more, tensors = SCALINGS[kind](config, parameters, sizes, 10000.0 if base is None else base)
    return keys | more, tensors


def _number(config: Config, parameters: Mapping[str, Any], key: str, default: float | None) -> float | None:
    value = parameters.get(key, default)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise CheckpointError(
            f"{config.label}: {key} of the rotary scaling is {show(value)}; allowed: a number"
        )
    return float(value)


def _needed(config: Config, parameters: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = _number(config, parameters, key, default)
    if value is None or value <= 0:
        raise CheckpointError(
            f"{config.label}: {key} of the rotary scaling is {show(value)}; allowed: above 0"
        )
    return value


def _original(config: Config, parameters: Mapping[str, Any]) -> int:
    """Positions that the model was first trained on."""
    value = parameters.get("original_max_position_embeddings")
    value = config.first("original_max_position_embeddings") if value is None else value
    value = config.integer("max_position_embeddings") if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise CheckpointError(f"{config.label}: original_max_position_embeddings is {show(value)}")
    return value


def _linear(config: Config, parameters: Mapping[str, Any], sizes: Sizes, base: float) -> Scaled:
    """Positions divided by a factor (Chen et al. 2023, arXiv:2306.15595)."""
    return {"rope.scaling.type": "linear", "rope.scaling.factor": _needed(config, parameters, "factor")}, {}


def _dynamic(config: Config, parameters: Mapping[str, Any], sizes: Sizes, base: float) -> Scaled:
    """A base that grows with the length, beyond what was trained on."""
    return {
        "rope.scaling.type": "dynamic",
        "rope.scaling.factor": _needed(config, parameters, "factor"),
        "rope.scaling.original_context_length": config.integer("max_position_embeddings"),
    }, {}


def _yarn(config: Config, parameters: Mapping[str, Any], sizes: Sizes, base: float) -> Scaled:
    """YaRN (Peng et al. 2023, arXiv:2309.00071); without a factor it reaches as far as the configuration says."""
    original = _original(config, parameters)
    factor = _needed(config, parameters, "factor", config.integer("max_position_embeddings") / original)
    keys: Keys = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": factor,
        "rope.scaling.original_context_length": original,
    }
    for ours, theirs in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
        if (value := _number(config, parameters, theirs, None)) is not None:
            keys[f"rope.scaling.{ours}"] = value
    stretch = math.log(max(factor, 1.0))
    usual = 1 + 0.1 * stretch  # what YaRN multiplies cosines and sines with, unless something else is stated
    attention = _number(config, parameters, "attention_factor", None)
    over, under = (_number(config, parameters, key, None) for key in ("mscale", "mscale_all_dim"))
    if under and config.first("kv_lora_rank"):
        # GGUF states a tenth of the weight, and readers put it into the scores of latent attention.
        if attention is not None or over != under:
            raise UnsupportedModelError(
                f"{config.label}: mscale = {over} and mscale_all_dim = {under} must be equal"
            )
        keys["rope.scaling.yarn_log_multiplier"] = 0.1 * under
    elif attention is None and over and under:
        attention = (1 + 0.1 * over * stretch) / (1 + 0.1 * under * stretch)
    if attention is not None:
        keys["rope.scaling.attn_factor"] = attention / usual
    if parameters.get("truncate") is False:
        keys["rope.scaling.yarn_truncate"] = False
    return keys, {}


def _llama3(config: Config, parameters: Mapping[str, Any], sizes: Sizes, base: float) -> Scaled:
    """GGUF has no key for it: the divisors themselves are a tensor.

    Wavelengths above original / low_freq_factor are divided by the factor, those below
    original / high_freq_factor are left, and between them the frequencies are blended ("The Llama 3 Herd of
    Models", arXiv:2407.21783).
    """
    factor = _needed(config, parameters, "factor")
    low, high = (_needed(config, parameters, f"{k}_freq_factor") for k in ("low", "high"))
    if high <= low:
        raise CheckpointError(
            f"{config.label}: high_freq_factor is {high}; allowed: above low_freq_factor = {low}"
        )
    frequencies = base ** (-np.arange(0, sizes.rope_width, 2, dtype=np.float64) / sizes.rope_width)
    turns = _original(config, parameters) * frequencies / (2 * np.pi)
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    divisors = 1 / (kept + (1 - kept) / factor)
    return {}, {"rope_freqs.weight": divisors.astype(np.float32)}


def _longrope(config: Config, parameters: Mapping[str, Any], sizes: Sizes, base: float) -> Scaled:
    """Divisors that were searched for, for short and for long texts (Ding et al. 2024, arXiv:2402.13753)."""
    original = _original(config, parameters)
    longest = config.integer("max_position_embeddings")
    keys: Keys = {"rope.scaling.type": "longrope", "rope.scaling.original_context_length": original}
    stretch = longest / original
    factor = _number(config, parameters, "attention_factor", None)
    if factor is None:
        factor = math.sqrt(1 + math.log(stretch) / math.log(original)) if stretch > 1 < original else 1.0
    keys["rope.scaling.attn_factor"] = factor
    tensors = {}
    for length in ("long", "short"):
        values = parameters.get(f"{length}_factor")
        numbers = isinstance(values, list) and all(type(v) in (int, float) and v > 0 for v in values)
        if not isinstance(values, list) or not numbers or len(values) != sizes.rope_width // 2:
            raise CheckpointError(
                f"{config.label}: {length}_factor is {show(values)}; allowed: {sizes.rope_width // 2} positive numbers"
            )
        tensors[f"rope_factors_{length}.weight"] = np.array(values, np.float32)
    return keys, tensors


SCALINGS: Mapping[str, Scaling] = {
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "llama3": _llama3,
    "longrope": _longrope,
    "su": _longrope,
}
"""Every scheme that is read, by its `rope_type`: from the configuration, its rotary settings, sizes and base."""
