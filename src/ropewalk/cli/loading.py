"""From a model's name to its file, and to an `LLM` that can answer; what takes long is shown on stderr."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ropewalk.cli.console import one_line, tell

if TYPE_CHECKING:
    from ropewalk.checkpoint.hub import Progress
    from ropewalk.cli.options import Machine
    from ropewalk.llm import LLM


@contextmanager
def progress_on_stderr() -> Iterator[Progress]:
    """A function `(what, done, total)` that shows a bar on a terminal, and elsewhere one line a `what`.

    Nothing is shown before it is called for the first time. It may be called from any thread.
    """
    if not sys.stderr.isatty():
        yield _lines_on_stderr()
        return
    bars = _Bars()
    try:
        yield bars
    finally:
        bars.close()


def _lines_on_stderr() -> Progress:
    told: set[str] = set()

    def show(what: str, done: int, total: int) -> None:
        if what not in told:
            told.add(what)
            tell(f"{one_line(what)} ...")

    return show


class _Bars:
    """One bar at a time: a new `what` replaces the last. Totals below a thousand are steps, others bytes."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.fields[amount]}", markup=False),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._task = self._progress.add_task("", amount="", start=False)
        self._what: str | None = None

    def __call__(self, what: str, done: int, total: int) -> None:
        if self._what is None:
            self._progress.start()
        if what != self._what:
            self._what = what
            self._progress.reset(self._task, description=one_line(what), total=total or None)
        self._progress.update(self._task, completed=done, total=total or None, amount=_amount(done, total))

    def close(self) -> None:
        """Take the bar away."""
        if self._what is not None:
            self._progress.stop()


def _amount(done: int, total: int) -> str:
    if total < 1000:
        return f"{done}/{total}" if total else ""
    return f"{done / 1e6:.1f}/{total / 1e6:.1f} MB"


def find(model: str) -> Path:
    """The file of a model, fetched first if need be; raises as `hub.resolve` does."""
    from ropewalk.checkpoint.hub import resolve

    with progress_on_stderr() as progress:
        return resolve(model, progress=progress)


def open_llm(model: str, machine: Machine) -> LLM:
    """A model that is ready to answer; to be closed. What `find` and `LLM` raise is raised here."""
    from ropewalk import LLM

    with progress_on_stderr() as progress:
        return LLM(
            model,
            n_threads=machine.n_threads,
            context_length=machine.context_length,
            cache_dtype=machine.cache_dtype,
            progress=progress,
        )
