"""`ropewalk batch`: a file of requests in OpenAI's batch format, answered into another file."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ropewalk.cli.console import one_line, tell, verb
from ropewalk.cli.loading import open_llm
from ropewalk.cli.options import DEFAULT_MODEL, Machine, drafting_machine, takes
from ropewalk.cli.serve import name_of

if TYPE_CHECKING:
    from ropewalk.batch.files import BatchInput, BatchOutput
    from ropewalk.batch.runner import Tally

SOME_FAILED = 3
"""Exit status when every line is answered, and some of the answers are errors."""
WITHOUT_EFFECT = frozenset(
    {
        *("n_threads", "max_batch", "token_budget", "progress"),
        *("kv_memory", "kv_tokens", "kv_cache", "prefix_cache", "cache_dir", "cache_dir_size"),
        *("draft", "draft_tokens"),
    }
)
"""Options of the machine that never change a token."""
LINE_EVERY_S = 30.0
"""Between lines of progress where stderr is no terminal."""


@verb
@takes(machine=drafting_machine)
def batch(
    requests: Annotated[Path, typer.Argument(help="A file with one JSON object a line.")],
    *,
    output: Annotated[Path, typer.Option("--output", "-o", help="Answers; one that exists is continued.")],
    model: Annotated[
        str, typer.Option("--model", "-m", help="Path, catalog name or hf.co/owner/repo[:file].")
    ] = DEFAULT_MODEL,
    alias: Annotated[
        list[str] | None,
        typer.Option(
            "--alias", metavar="NAME", help="Another name that requests give the model. Repeatable."
        ),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option("--max-tokens", "-n", min=1, help="For requests that do not say how many."),
    ] = None,
    max_batch: Annotated[int, typer.Option("--max-batch", min=1, help="Completions that run at once.")] = 32,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no summary.")] = False,
    machine: Machine,
) -> None:
    """Answer a file of requests, many at once.

    They are those of /v1/chat/completions and /v1/completions. A line is {"custom_id": "a", "method": "POST", "url":
    "/v1/chat/completions", "body": {...}}. Answers are written as they come, in OpenAI's batch format: match them by
    custom_id. A run that was stopped or killed goes on when the same command is given again. Exit status 3: all
    lines are answered, some with errors.
    """
    from ropewalk.batch.files import BatchInput, BatchOutput

    source = BatchInput(requests)
    name = name_of(model)
    with BatchOutput(output, source, what_matters(name, max_tokens, machine)) as answers:
        left = source.n_requests - answers.n_done
        if answers.n_done and not quiet:
            tell(f"{answers.n_done} of {source.n_requests} requests are answered already")
        if left:
            with open_llm(model, machine, max_batch=max_batch) as llm, _progress(quiet) as show:
                options = {"aliases": alias or (), "max_tokens": max_tokens, "n_ahead": 2 * max_batch}
                try:
                    tally = asyncio.run(_run(llm, name, source, answers, on_answer=show, **options))
                except KeyboardInterrupt:
                    tell(f"{answers.n_done} of {source.n_requests} answered; give the command again to go on")
                    raise
            if not quiet:
                tell(summary(tally))
        if answers.n_failed:
            raise typer.Exit(SOME_FAILED)


def what_matters(name: str, max_tokens: int | None, machine: Machine) -> bytes:
    """What the answers of a batch depend on, besides its requests."""
    settings = {k: v for k, v in dataclasses.asdict(machine).items() if k not in WITHOUT_EFFECT}
    return json.dumps([name, max_tokens, settings], sort_keys=True, default=str).encode()


async def _run(llm: Any, name: str, source: BatchInput, answers: BatchOutput, **options: Any) -> Tally:
    from ropewalk.async_engine import AsyncEngine
    from ropewalk.batch.runner import BatchRunner

    async with AsyncEngine(llm) as engine:
        return await BatchRunner(engine, name, **options).run(source, answers)


def summary(tally: Tally) -> str:
    """What a run did, in one or two lines."""
    seconds = max(tally.elapsed_s, 1e-9)
    text = (
        f"{tally.n_answered} requests in {clock(seconds)}: {tally.prompt_tokens} tokens read and "
        f"{tally.generated_tokens} written, {tally.generated_tokens / seconds:.1f} tok/s"
    )
    if tally.n_failed:
        text += f"\n{tally.n_failed} of {tally.n_requests} failed"
    if tally.first_error:
        text += f"; the first of this run: {one_line(tally.first_error)}"
    return text


def clock(seconds: float) -> str:
    """`"0.8 s"`, `"59 s"`, `"1:05"`, `"26:01:05"`."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class Rate:
    """Tokens and requests per second over the last `SPAN_S`."""

    SPAN_S = 20.0

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int, int]] = deque()

    def line(self, tally: Tally, now: float) -> str:
        """What to show beside a bar, after noting the tally."""
        seen = self._seen
        if not seen:
            seen.append((tally.started_s, 0, 0))
        seen.append((now, tally.generated_tokens, tally.n_answered))
        while len(seen) > 2 and now - seen[1][0] >= self.SPAN_S:
            seen.popleft()
        past, tokens, requests = seen[0]
        span = max(now - past, 1e-9)
        text = f"{(seen[-1][1] - tokens) / span:.1f} tok/s, {(seen[-1][2] - requests) / span:.2f} requests/s"
        if tally.left_s is not None:
            text += f", {clock(tally.left_s)} left"
        return text + (f", {tally.n_failed} failed" if tally.n_failed else "")


@contextmanager
def _progress(quiet: bool) -> Iterator[Any]:
    """A function that takes a tally: it draws a bar on a terminal, elsewhere it tells a line now and then."""
    if quiet:
        yield lambda tally: None
    elif sys.stderr.isatty():
        with _bar() as show:
            yield show
    else:
        yield _lines()


def _lines() -> Any:
    rate = Rate()
    told = time.monotonic()

    def show(tally: Tally) -> None:
        nonlocal told
        now = time.monotonic()
        line = rate.line(tally, now)
        if now - told >= LINE_EVERY_S:
            told = now
            tell(f"{tally.n_done} of {tally.n_requests} requests: {line}")

    return show


@contextmanager
def _bar() -> Iterator[Any]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    rate = Rate()
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("", total=None)
        yield lambda tally: progress.update(
            bar,
            completed=tally.n_done,
            total=tally.n_requests,
            description=rate.line(tally, time.monotonic()),
        )
