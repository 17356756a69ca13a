"""Compiling ahead: which kernels a model needs, and all that there are.

A kernel is compiled once and then loaded from disk (`kernels.cache`), so each of these functions is slow the first
time and takes milliseconds later.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import active_children, get_context
from typing import Any

from ropewalk.backend.sources import matrices_of
from ropewalk.checkpoint.base import Checkpoint
from ropewalk.checkpoint.quants import FORMATS
from ropewalk.kernels.attention import MAX_GROUP, attention_worker, head_passes, tile_tokens
from ropewalk.kernels.cache import cache_folder
from ropewalk.kernels.formats import PACKED
from ropewalk.kernels.forward import compile_steps
from ropewalk.kernels.latent import latent_worker
from ropewalk.kernels.latent_attention import latent_attention_worker
from ropewalk.kernels.lora import lora_worker
from ropewalk.kernels.matmul import matmul_worker, tiles
from ropewalk.kernels.moe import expert_worker
from ropewalk.kernels.pack import compile_packer
from ropewalk.kernels.sampling import compile_sampling
from ropewalk.kernels.team import compile_words
from ropewalk.model.config import ModelConfig


@dataclass(frozen=True)
class Part:
    """Kernels that belong together: what they are, for people, and the call that compiles (or loads) them."""

    what: str
    function: Callable[..., object]
    arguments: tuple[Any, ...] = ()

    def compile(self) -> None:
        """Compile it, or load it from disk."""
        self.function(*self.arguments)


def parts_of_model(checkpoint: Checkpoint, config: ModelConfig, *, adapted: bool = False) -> list[Part]:
    """What packing and running this model takes, attention aside; `adapted` says that it has adapters.

    Raises
    ------
    UnsupportedModelError
        A matrix has a type that no kernel multiplies.
    """
    uses = dict.fromkeys(
        (info.format.name, info.format.block_bytes, source.fine)
        for info, source in filter(None, matrices_of(checkpoint, config))
    )
    experts = [_EXPERTS] if config.experts else []
    experts += [_LATENT] if config.latent else []
    adapters = [_ADAPTERS] if adapted else []
    return [_FORWARD, _SAMPLING, *experts, *adapters, *(_format_part(*use) for use in uses)]


def attention_parts(config: ModelConfig, cache_dtype: str) -> list[Part]:
    """What a cache of this type takes in addition."""
    full, rest = head_passes(config.kv_group)
    shapes = dict.fromkeys((heads, tokens) for heads in (full, rest) for tokens in (1, tile_tokens(full)))
    return [_attention_part(*shape, cache_dtype == "int8", config.latent is not None) for shape in shapes]


def all_parts() -> list[Part]:
    """Everything that any model may need."""
    formats = [
        _format_part(name, FORMATS[name].block_bytes, fine) for name in PACKED for fine in (True, False)
    ]
    heads_of = [(heads, False) for heads in range(1, MAX_GROUP + 1)] + [(MAX_GROUP, True)]
    attention = [
        _attention_part(heads, tokens, is_int8, is_latent)
        for heads, is_latent in heads_of  # models with latent attention have 16 or 128
        for tokens in sorted({1, tile_tokens(heads)})
        for is_int8 in (False, True)
    ]
    return [_FORWARD, _SAMPLING, _EXPERTS, _ADAPTERS, _LATENT, *formats, *attention]


def compile_parts(parts: Iterable[Part], progress: Callable[[str, float], None] | None = None) -> None:
    """Compile (or load) in order; `progress` is told what is next and the share that is done, 0 to 1."""
    parts = list(parts)
    doing = _doing()
    for i, part in enumerate(parts):
        if progress:
            progress(f"{doing} {part.what}", i / len(parts))
        part.compile()


def _doing() -> str:
    """What is told: on a busy machine loading takes long too, and who reads of compiling each time doubts the cache."""
    return "preparing" if any(cache_folder().glob("*.nbc")) else "compiling"


def compile_in_processes(
    parts: Iterable[Part], n_processes: int, progress: Callable[[str, float], None] | None = None
) -> None:
    """As `compile_parts`, several at a time: onto the disk, not into this process.

    Numba compiles one function at a time in a process, whatever its threads. The program must be one that
    `multiprocessing` can start anew: the command line is, a notebook may not be.
    """
    parts = list(parts)
    others = set(active_children())
    pool = ProcessPoolExecutor(n_processes, get_context("spawn"))
    try:
        with _interrupts_held_back():
            waiting = [pool.submit(part.compile) for part in parts]
        for i, (part, future) in enumerate(zip(parts, waiting, strict=True)):
            if progress:
                progress(f"compiling {part.what}", i / len(parts))
            future.result()
    except BaseException:  # nobody waits for what they are at; a file appears whole or not at all
        for child in set(active_children()) - others:
            child.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """Ctrl-C reaches all processes of a terminal; the first one ends the others, which never see it.

    Processes that are started meanwhile inherit this from their first instruction on, before they have imported
    anything; for this one it comes at the end.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _format_part(name: str, block_bytes: int, fine: bool) -> Part:
    return Part(f"kernels for {name}", _compile_format, (PACKED[name].kind, block_bytes, fine))


def _compile_format(kind: int, block_bytes: int, fine: bool) -> None:
    compile_packer(kind, block_bytes)
    for tile in tiles():
        matmul_worker(kind, tile, int(fine))


def _attention_part(heads: int, tokens: int, is_int8: bool, is_latent: bool) -> Part:
    cache, what = "int8" if is_int8 else "float16", "latent attention" if is_latent else "attention"
    worker = latent_attention_worker if is_latent else attention_worker
    return Part(f"{what} for {heads} heads, tokens: {tokens}, {cache}", worker, (heads, tokens, int(is_int8)))


def _compile_forward() -> None:
    compile_words()
    compile_steps()


_FORWARD = Part("the forward pass", _compile_forward)
_SAMPLING = Part("sampling", compile_sampling)
_EXPERTS = Part("mixtures of experts", expert_worker)
_LATENT = Part("latent attention", latent_worker)
_ADAPTERS = Part("low-rank adapters", lora_worker)
