"""Whether the CPU kernels can cut a model's widths into their groups."""

from __future__ import annotations

from ropewalk.backend.sources import ffn_width
from ropewalk.errors import UnsupportedModelError
from ropewalk.model.config import ModelConfig


def _latent_widths(config: ModelConfig) -> dict[str, tuple[int, int]]:
    latent = config.latent
    if latent is None:
        return {}
    return {
        "attention.q_lora_rank": (latent.q_rank, 32),
        "attention.kv_lora_rank": (latent.kv_rank, 32),
        "attention.key_length_mla - rope.dimension_count": (latent.nope, 32),
        "attention.value_length_mla": (latent.value, 32),
        "rope.dimension_count": (latent.rope, 16),
    }


def check_widths(config: ModelConfig) -> None:
    """Raise UnsupportedModelError unless they can: in groups of 32 columns and vectors of 16 floats."""
    checks = {
        "embedding_length": (config.hidden_size, 32),
        "feed_forward_length": (max(ffn_width(config, n) for n in range(config.n_layers)), 32),
        "expert_feed_forward_length": (config.experts.ffn_size if config.experts else 0, 32),
        "head_count * key_length": (config.n_heads * config.head_dim, 32),
        "key_length": (config.head_dim, 16),
        **_latent_widths(config),
    }
    for key, (value, multiple) in checks.items():
        if value % multiple:
            raise UnsupportedModelError(
                f"{config.architecture}.{key} = {value} is not supported by the CPU kernels; "
                f"it must be a multiple of {multiple}"
            )
