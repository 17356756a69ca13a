"""`ropewalk warmup`: compile kernels ahead, so that the first answer does not wait for them."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from ropewalk.cli.console import byte_size, one_line, say, verb
from ropewalk.cli.loading import find, progress_on_stderr
from ropewalk.cli.options import DEFAULT_MODEL


@verb
def warmup(
    models: Annotated[
        list[str] | None,
        typer.Argument(metavar="MODEL", help=f"Models to be ready for. Default: {DEFAULT_MODEL}."),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Everything that any model may need.")] = False,
) -> None:
    """Compile ahead what models need.

    For both types of cache; it tells how long it took and where the kernels are kept.
    """
    from ropewalk.backend.cache import CACHE_DTYPES
    from ropewalk.backend.compile import (
        Part,
        all_parts,
        attention_parts,
        compile_in_processes,
        parts_of_model,
    )
    from ropewalk.checkpoint.base import open_checkpoint
    from ropewalk.kernels.cache import cache_bytes, cache_folder
    from ropewalk.kernels.team import available_threads
    from ropewalk.model.config import ModelConfig

    parts: list[Part] = []
    for model in models or ([] if every else [DEFAULT_MODEL]):
        with open_checkpoint(find(model)) as checkpoint:
            config = ModelConfig.from_gguf(checkpoint.metadata, checkpoint.tensors)
            parts += parts_of_model(checkpoint, config)
            for dtype in CACHE_DTYPES:
                parts += attention_parts(config, dtype)
    if every:
        parts += all_parts()
    start = time.perf_counter()
    with progress_on_stderr() as progress:
        compile_in_processes(
            dict.fromkeys(parts),
            available_threads(),
            lambda what, share: progress(what, round(100 * share), 100),
        )
    took = time.perf_counter() - start
    say(f"ready after {took:.1f} s: {byte_size(cache_bytes()[0])} in {one_line(cache_folder())}")
