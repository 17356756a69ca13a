"""From what a caller says of adapters to their weights."""

from __future__ import annotations

import os
from collections.abc import Mapping

from ropewalk.checkpoint.base import Checkpoint
from ropewalk.checkpoint.lora import LoraWeights, open_lora
from ropewalk.checkpoint.names import Sizes
from ropewalk.errors import InvalidParameterError
from ropewalk.model.config import ModelConfig


def open_loras(
    adapters: Mapping[str, str | os.PathLike[str]], config: ModelConfig, checkpoint: Checkpoint
) -> dict[str, LoraWeights]:
    """Read low-rank adapters for a model; raises as `open_lora` does, or InvalidParameterError for a bad name."""
    if not isinstance(adapters, Mapping):
        raise InvalidParameterError(f"adapters is {adapters!r}; allowed: a mapping of names to paths")
    found = {}
    sizes = Sizes(config.n_heads, config.n_kv_heads, config.head_dim, _rope_width(config), config.ffn_size)
    for name, path in adapters.items():
        if not isinstance(name, str) or not name:
            raise InvalidParameterError(f"an adapter is called {name!r}; allowed: a name")
        found[name] = open_lora(os.fspath(path), config.architecture, sizes, checkpoint.tensors)
    return found


def _rope_width(config: ModelConfig) -> int:
    return config.rope[0].width if config.rope else config.head_dim
