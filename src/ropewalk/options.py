"""The options of a model that is opened, each said once: `LLM`, `AsyncEngine` and the command line share them.

What they mean is written where users look for it, in `LLM`. Plain data: importing this costs nothing.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar

if TYPE_CHECKING:
    from ropewalk.checkpoint.hub import Progress
    from ropewalk.drafts import Draft

DEFAULT_MODEL = "smollm2-135m"
NAMES_ELSEWHERE = {
    "max_model_len": "context_length",
    "n_ctx": "context_length",
    "gpu_memory_utilization": "kv_memory",
    "kv_cache_dtype": "cache_dtype",
    "max_num_seqs": "max_batch",
    "max_num_batched_tokens": "token_budget",
    "enable_prefix_caching": "prefix_cache",
    "quantization": "quantize",
    "speculative_config": "draft",
    "draft_model": "draft",
    "rope_freq_base": "rope_base",
}
"""Options of vLLM and llama-cpp-python, and ours."""


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """How requests are run: sizes, the KV cache, and drafts."""

    context_length: int | None = None
    kv_memory: str | float | None = None
    kv_tokens: int | None = None
    cache_dtype: str = "float16"
    max_batch: int = 16
    token_budget: int = 512
    kv_cache: bool = True
    prefix_cache: bool = True
    cache_dir: str | os.PathLike[str] | None = None
    cache_dir_size: str | float | None = None
    draft: Draft | None = None
    draft_tokens: int | None = None


@dataclass(frozen=True, kw_only=True)
class LLMOptions(EngineOptions):
    """These, and how the model itself is read from its file."""

    n_threads: int | None = None
    rope_scaling: Mapping[str, Any] | None = None
    rope_base: float | None = None
    quantize: str | None = None
    adapters: Mapping[str, str | os.PathLike[str]] | None = None
    progress: Progress | None = None


class EngineKeywords(TypedDict, total=False):
    """The fields of `EngineOptions` as keywords, for type checkers."""

    context_length: int | None
    kv_memory: str | float | None
    kv_tokens: int | None
    cache_dtype: str
    max_batch: int
    token_budget: int
    kv_cache: bool
    prefix_cache: bool
    cache_dir: str | os.PathLike[str] | None
    cache_dir_size: str | float | None
    draft: Draft | None
    draft_tokens: int | None


class LLMKeywords(EngineKeywords, total=False):
    """The fields of `LLMOptions` as keywords, for type checkers."""

    n_threads: int | None
    rope_scaling: Mapping[str, Any] | None
    rope_base: float | None
    quantize: str | None
    adapters: Mapping[str, str | os.PathLike[str]] | None
    progress: Progress | None


_Options = TypeVar("_Options", bound=EngineOptions)


def options_of(kind: type[_Options], given: Mapping[str, Any]) -> _Options:
    """Options from keywords of a user.

    Raises
    ------
    TypeError
        There is no such option; it says what may be meant.
    """
    known = [field.name for field in fields(kind)]
    for name in given:
        if name not in known:
            near = get_close_matches(name, known, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            if NAMES_ELSEWHERE.get(name) in known:
                hint = f"; here it is {NAMES_ELSEWHERE[name]!r}"
            raise TypeError(f"LLM has no option {name!r}{hint}")
    return kind(**given)


def signature() -> inspect.Signature:
    """What `help(LLM)` and notebooks show: the options by name, with their defaults."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    model = inspect.Parameter("model", kind, default=DEFAULT_MODEL, annotation="str | os.PathLike[str]")
    return inspect.Signature([model, *inspect.signature(LLMOptions).parameters.values()])
