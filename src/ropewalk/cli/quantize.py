"""`ropewalk quantize`: write a model as a smaller GGUF file."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Annotated

import typer

from ropewalk.cli.console import byte_size, one_line, say, verb
from ropewalk.cli.loading import find, progress_on_stderr

TYPES = (
    "Q4_K_M, Q4_K_S, Q5_K_M, Q5_K_S, Q6_K, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, IQ4_NL, Q3_K_L, Q3_K_M, Q3_K_S, Q2_K, "
    "F16, BF16, F32"
)


@verb
def quantize(
    model: Annotated[
        str, typer.Argument(help="The model: a .gguf file, a folder with safetensors, or a name.")
    ],
    *,
    output: Annotated[Path, typer.Option("--output", "-o", help="The .gguf file to write.")],
    kind: Annotated[str, typer.Option("--type", metavar="TYPE", help=f"One of {TYPES}.")] = "Q4_K_M",
    imatrix: Annotated[
        Path | None, typer.Option("--imatrix", help="Importance matrix from `ropewalk imatrix` or llama.cpp.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file if it is there.")] = False,
    threads: Annotated[int | None, typer.Option("--threads", min=1, help="Threads to use.")] = None,
) -> None:
    """Write a model as a smaller GGUF file.

    llama.cpp opens it too.
    """
    from ropewalk.checkpoint.base import open_checkpoint
    from ropewalk.checkpoint.mixes import mix_named
    from ropewalk.imatrix import read_imatrix
    from ropewalk.quantize import quantize_model

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: nothing half-written stays
    mix = mix_named(kind)
    importance = None if imatrix is None else read_imatrix(imatrix)
    with open_checkpoint(find(model)) as checkpoint, progress_on_stderr() as progress:
        report = quantize_model(
            checkpoint,
            output,
            mix,
            importance=importance,
            n_threads=threads,
            overwrite=overwrite,
            progress=progress,
        )
        weights = sum(t.size for t in checkpoint.tensors.values())
    kinds = ", ".join(f"{n} {name}" for name, n in sorted(report.formats.items(), key=lambda f: -f[1]))
    say(
        f"{one_line(output)}: {mix.name}, {byte_size(output.stat().st_size)} "
        f"(tensors had {byte_size(report.bytes_before)}), {8 * report.bytes_after / weights:.2f} bits a weight; {kinds}"
    )
