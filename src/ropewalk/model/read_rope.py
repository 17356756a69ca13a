"""Which layers see how far and how they rotate, from the keys of a file: windows and rotary settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ropewalk.model.config import RopeConfig
from ropewalk.model.families import Family
from ropewalk.model.keys import Keys
from ropewalk.model.rope_settings import read_scaling
from ropewalk.model.scaling import DIVISORS_TENSOR, LONGROPE_TENSORS, YaRN

if TYPE_CHECKING:
    from ropewalk.checkpoint.gguf import TensorInfo


def read_windows(keys: Keys, family: Family, n_layers: int) -> tuple[int, ...]:
    """The sliding window of each layer, 0 where there is none."""
    window = keys.integer("attention.sliding_window", 0, low=0)
    return tuple(window if local else 0 for local in local_layers(keys, family, n_layers))


def local_layers(keys: Keys, family: Family, n_layers: int) -> tuple[bool, ...]:
    """Which layers attend through the window, whether or not there is one."""
    pattern = keys.value("attention.sliding_window_pattern")
    if isinstance(pattern, np.ndarray):
        if pattern.dtype != np.bool_ or pattern.shape != (n_layers,):
            keys.refuse("attention.sliding_window_pattern", pattern, f"{n_layers} booleans")
        return tuple(pattern.tolist())
    period = keys.integer("attention.sliding_window_pattern", family.window_period, low=0)
    return tuple(not period or layer % period != 0 for layer in range(1, n_layers + 1))


def layer_rope(
    family: Family, n_settings: int, windows: tuple[int, ...], local: tuple[bool, ...]
) -> tuple[int, ...]:
    """For each layer the index of its rotary setting, those with a window the second if there is one; −1: none."""
    settings = [min(n_settings, 1 + int(window > 0)) - 1 for window in windows]
    for layer in range(len(windows)):
        fourth = family.unrotated == "period 4" and layer % 4 == 3
        if fourth or (family.unrotated == "global" and not local[layer]):
            settings[layer] = -1
    return tuple(settings)


def read_rope(
    keys: Keys, family: Family, head_dim: int, has_windows: bool, tensors: Mapping[str, TensorInfo]
) -> tuple[RopeConfig, ...]:
    """Rotary settings: of the layers that see everything, then (if any) of those with a window."""
    if not family.rope_layout:
        return ()
    width = keys.integer("rope.dimension_count", head_dim, low=2, high=head_dim)
    if width % 2:
        keys.refuse("rope.dimension_count", width, "an even number")
    base = keys.number("rope.freq_base", family.rope_base, low=1.0, high=1e15, open_low=True)
    local_base = keys.number(
        "rope.freq_base_swa", family.local_rope_base or base, low=1.0, high=1e15, open_low=True
    )
    has_lists = any(name in tensors for name in LONGROPE_TENSORS)
    scaling = read_scaling(keys, keys.integer("context_length"), has_lists, family.yarn_truncate)
    everywhere = RopeConfig(base, width, family.rope_layout, DIVISORS_TENSOR in tensors, scaling)
    own_setting = family.local_rope_base is not None or keys.has("rope.freq_base_swa")
    if not has_windows or not own_setting:
        return (everywhere,)
    if family.local_rope_base is None:
        return everywhere, replace(everywhere, base=local_base)
    return everywhere, RopeConfig(local_base, width, family.rope_layout)


def latent_rope(rope: RopeConfig) -> RopeConfig:
    """The setting with YaRN's factor in the scores alone; these files state a tenth of its weight."""
    if not isinstance(rope.scaling, YaRN) or not rope.scaling.mscale_all_dim:
        return rope
    weight = rope.scaling.mscale_all_dim / 0.1
    return replace(rope, scaling=replace(rope.scaling, mscale=weight, mscale_all_dim=weight))
