"""From a model's name and options to the parts of an `LLM`: its file is found and read, its weights are packed.

What can be refused is refused before the weights are packed, which takes a while. Does not know prompts.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ropewalk.drafts import check_draft, open_speculator
from ropewalk.engine.budget import cache_size, check_context, check_count, disk_bytes
from ropewalk.engine.engine import Engine

if TYPE_CHECKING:
    from ropewalk.backend.base import Backend
    from ropewalk.checkpoint.base import Checkpoint
    from ropewalk.checkpoint.hub import Progress
    from ropewalk.engine.speculative.speculator import Speculator
    from ropewalk.options import EngineOptions, LLMOptions
    from ropewalk.text.chat import ChatTemplate
    from ropewalk.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Parts:
    """What an `LLM` is made of.

    Attributes
    ----------
    adapters : mapping of str to str
        Names of the backend's low-rank adapters, in its order, and what tells the content of each from any other's.
    speculator : Speculator or None
        What guesses tokens.
    name : str
        What the model was called, and the type of most of its weights.
    """

    backend: Backend
    tokenizer: Tokenizer
    template: ChatTemplate | None
    adapters: Mapping[str, str]
    speculator: Speculator | None
    name: str

    def new_engine(self, options: EngineOptions) -> Engine:
        """Return an engine of the sizes that the options ask for."""
        config, drafter = self.backend.config, self.speculator.drafter if self.speculator else None
        draft_page_bytes = drafter.page_bytes(options.cache_dtype) if drafter else 0
        size = cache_size(
            model_context=config.context_length,
            page_bytes=self.backend.page_bytes(options.cache_dtype) + draft_page_bytes,
            free_bytes=self.backend.free_bytes,
            max_batch=options.max_batch,
            context_length=options.context_length,
            kv_tokens=options.kv_tokens,
            kv_memory=options.kv_memory,
        )
        return Engine(
            self.backend,
            context_length=size.context_length,
            kv_tokens=size.kv_tokens,
            cache_dtype=options.cache_dtype,
            end_ids=self.tokenizer.eos_ids,
            max_batch=options.max_batch,
            token_budget=options.token_budget,
            keep_cache=options.kv_cache,
            prefix_cache=options.prefix_cache,
            speculator=self.speculator,
            adapters=self.adapters,
            cache_dir=options.cache_dir,
            cache_dir_bytes=disk_bytes(options.cache_dir, options.cache_dir_size),
        )


def open_parts(model: str | os.PathLike[str], options: LLMOptions, resources: ExitStack) -> Parts:
    """Open a model; what is to be closed at the end goes to `resources`. Raises what `LLM` says."""
    from ropewalk.adapters import open_loras
    from ropewalk.backend.cache import check_cache_dtype
    from ropewalk.backend.cpu import CpuBackend
    from ropewalk.kernels.team import warn_of_too_many
    from ropewalk.model.config import ModelConfig
    from ropewalk.model.rope_settings import override_rope
    from ropewalk.text.chat import ChatTemplate
    from ropewalk.text.tokenizer import Tokenizer

    checkpoint = _open_checkpoint(model, options, resources)
    config = ModelConfig.from_gguf(checkpoint.metadata, checkpoint.tensors)
    config = override_rope(config, options.rope_scaling, options.rope_base)
    tokenizer = Tokenizer.from_metadata(checkpoint.metadata)
    template = ChatTemplate.from_metadata(checkpoint.metadata)
    if options.n_threads is not None:
        check_count("n_threads", options.n_threads)
        warn_of_too_many(options.n_threads)
    check_count("max_batch", options.max_batch)
    check_cache_dtype(options.cache_dtype)
    check_context(options.context_length, config.context_length)
    speculator = speculator_of(
        options,
        tokenizer,
        config.vocab_size,
        resources,
        n_threads=options.n_threads,
        progress=options.progress,
    )
    loras = open_loras(options.adapters or {}, config, checkpoint)
    backend = CpuBackend(
        checkpoint,
        config,
        n_threads=options.n_threads,
        progress=_in_steps(options.progress),
        adapters=list(loras.values()),
    )
    resources.callback(backend.close)
    digests = {name: lora.digest for name, lora in loras.items()}
    name = f"{os.fspath(model)!r}, {_weight_type(checkpoint)}"
    return Parts(backend, tokenizer, template, digests, speculator, name)


def _weight_type(checkpoint: Checkpoint) -> str:
    """The tensor type that most bytes are of."""
    sizes: Counter[str] = Counter()
    for tensor in checkpoint.tensors.values():
        sizes[tensor.format.name] += tensor.n_bytes
    return sizes.most_common(1)[0][0]


def speculator_of(
    options: EngineOptions,
    tokenizer: Tokenizer,
    vocab_size: int,
    resources: ExitStack,
    *,
    n_threads: int | None = None,
    progress: Progress | None = None,
) -> Speculator | None:
    """Make what guesses tokens, if something is to; it is closed with `resources`."""
    check_count("token_budget", options.token_budget)
    check_draft(options.draft, options.draft_tokens, kv_cache=options.kv_cache)
    if options.draft is None:
        return None
    speculator = open_speculator(
        options.draft,
        options.draft_tokens,
        tokenizer,
        vocab_size,
        n_threads=n_threads,
        token_budget=options.token_budget,
        progress=progress,
    )
    resources.callback(speculator.drafter.close)
    return speculator


def _open_checkpoint(model: str | os.PathLike[str], options: LLMOptions, resources: ExitStack) -> Checkpoint:
    from ropewalk.checkpoint.base import open_checkpoint
    from ropewalk.checkpoint.hub import resolve

    checkpoint = resources.enter_context(open_checkpoint(resolve(model, progress=options.progress)))
    if options.quantize is None:
        return checkpoint
    from ropewalk.quantize import Requantized

    return resources.enter_context(Requantized(checkpoint, options.quantize, n_threads=options.n_threads))


def _in_steps(progress: Progress | None) -> Callable[[str, float], None] | None:
    """Turn a progress of `done` of `total` into one of shares, which a backend reports."""
    if progress is None:
        return None
    return lambda what, share: progress(what, round(100 * share), 100)
