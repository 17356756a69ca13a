"""`ropewalk bench`: how fast this machine runs a model, beside what its memory allows."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ropewalk.cli.console import columns, one_line, say, verb, write_json
from ropewalk.cli.loading import find, progress_on_stderr
from ropewalk.cli.options import DEFAULT_MODEL, model_argument

if TYPE_CHECKING:
    from ropewalk.bench import Measurement

HEADINGS = ("", "threads", "cache", "depth", "ms", "tok/s", "MB", "GB/s", "share", "GMAC/s")
LEFT = ("", "cache")


def numbers(text: str) -> tuple[int, ...]:
    """`"128,512"` as `(128, 512)`, for an option."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(f"{text!r}: expected whole numbers with commas between them") from None


@verb
def bench(
    model: Annotated[str, model_argument()] = DEFAULT_MODEL,
    *,
    prompt: Annotated[
        str | None,
        typer.Option("--prompt", "-p", metavar="N,N", help="Prompt lengths to prefill. Default: 128,512."),
    ] = None,
    depth: Annotated[
        str | None,
        typer.Option(
            "--depth",
            "-d",
            metavar="N,N",
            help="Tokens already in the cache. Default: 0,2048, as the model allows.",
        ),
    ] = None,
    batch: Annotated[
        str | None,
        typer.Option("--batch", "-b", metavar="N,N", help="Sequences decoded together. Default: 1,4,16."),
    ] = None,
    threads: Annotated[
        str | None,
        typer.Option(
            "--threads", "-t", metavar="N,N", help="Default: the cores this process may really use."
        ),
    ] = None,
    cache_type: Annotated[
        str, typer.Option("--cache-type", metavar="TYPE,TYPE", help="The KV cache's elements: float16, int8.")
    ] = "float16",
    repeats: Annotated[int, typer.Option("--repeats", "-r", min=1, help="Rounds that are counted.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Measure prefill and decode beside the memory's bandwidth.

    Lists are numbers with commas between them: every prompt length and every batch is measured at every depth.
    """
    from ropewalk.bench import Plan, run
    from ropewalk.checkpoint.base import open_checkpoint
    from ropewalk.model.config import ModelConfig

    lists = {"prompts": prompt, "depths": depth, "batches": batch, "threads": threads}
    chosen = {name: numbers(text) for name, text in lists.items() if text is not None}
    plan = Plan(**chosen, cache_types=tuple(cache_type.split(",")), repeats=repeats)
    with open_checkpoint(find(model)) as checkpoint, progress_on_stderr() as progress:
        config = ModelConfig.from_gguf(checkpoint.metadata, checkpoint.tensors)
        if depth is None:
            plan = plan.within(config.context_length)
        results = run(checkpoint, config, plan, lambda what, share: progress(what, round(100 * share), 100))
    facts = {"model": checkpoint.path.name, **machine(), "repeats": plan.repeats}
    if as_json:
        write_json({**facts, "results": [result.as_dict() for result in results]})
    else:
        show(facts, results)


def machine() -> dict[str, Any]:
    """What a figure holds for."""
    from ropewalk import __version__
    from ropewalk.kernels.cpu import choose_rung, cpu_identity

    return {"version": __version__, "cpu": cpu_identity()[0], "kernels": choose_rung().name}


def show(facts: dict[str, Any], results: Sequence[Measurement]) -> None:
    """A table on a terminal, aligned columns elsewhere; below it what the figures hold for."""
    rows = [row_of(result) for result in results]
    if sys.stdout.isatty():
        from rich.box import SIMPLE_HEAD
        from rich.console import Console
        from rich.table import Table

        table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
        for heading in HEADINGS:
            table.add_column(heading, justify="left" if heading in LEFT else "right", no_wrap=True)
        for row in rows:
            table.add_row(*row)
        Console().print(table)
    else:
        say(columns([HEADINGS, *rows], right=[i for i, h in enumerate(HEADINGS) if h not in LEFT]))
    bandwidths = dict.fromkeys((r.n_threads, r.cache_type, r.bandwidth) for r in results)
    for n_threads, cache_type, bandwidth in bandwidths:
        say(
            f"read bandwidth with {n_threads} threads, in the rounds with {cache_type}: {bandwidth / 1e9:.1f} GB/s"
        )
    say(
        f"{one_line(facts['model'])}, ropewalk {facts['version']} ({facts['kernels']}) on {facts['cpu']}; "
        f"medians of {facts['repeats']} rounds\n"
        "MB: what a step has to read; share: of the read bandwidth"
    )


def row_of(result: Measurement) -> tuple[str, ...]:
    """A result as the texts of a row."""
    case = result.case
    return (
        f"prefill {case.tokens}" if case.phase == "prefill" else f"decode x{case.batch}",
        str(result.n_threads),
        result.cache_type,
        str(case.depth),
        f"{1e3 * result.step_s:.2f}",
        f"{result.tokens_per_s:.1f}",
        f"{result.work.n_bytes / 1e6:.1f}",
        f"{result.bytes_per_s / 1e9:.1f}",
        f"{result.bandwidth_share:.0%}",
        f"{result.macs_per_s / 1e9:.1f}",
    )
