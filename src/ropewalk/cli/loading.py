"""From a model's name to its file, and to an `LLM` that can answer; what takes long is shown on stderr."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ropewalk.cli.console import byte_size, one_line, tell

if TYPE_CHECKING:
    import rich.progress

    from ropewalk.checkpoint.hub import Progress
    from ropewalk.cli.options import Machine
    from ropewalk.llm import LLM


SOON_S = 0.4
"""What is done before this long is never shown: a warm start has nothing to tell."""
BYTES_FROM = 1000
"""Totals below are steps, others are bytes."""


@contextmanager
def progress_on_stderr() -> Iterator[Progress]:
    """A function `(what, done, total)` that shows a bar on a terminal, and elsewhere one line a `what`.

    It may be called from any thread. A `what` that is over soon is not shown.
    """
    display = _Display(_Bar() if sys.stderr.isatty() else _Lines())
    try:
        yield display
    finally:
        display.close()


class _Display:
    """Hands what is going on to a view (`show`, `close`) once it has lasted for `SOON_S`."""

    def __init__(self, view: _Bar | _Lines) -> None:
        self._view = view
        self._lock = threading.Lock()
        self._what = ""
        self._amounts = (0, 0)
        self._shown = False
        self._timer: threading.Timer | None = None

    def __call__(self, what: str, done: int, total: int) -> None:
        with self._lock:
            self._amounts = (done, total)
            if what != self._what:
                self._stop_waiting()
                self._what = what
                self._shown = False
                self._timer = threading.Timer(SOON_S, self._reveal, (what,))
                self._timer.daemon = True
                self._timer.start()
            elif self._shown:
                self._view.show(what, done, total)

    def _reveal(self, what: str) -> None:
        with self._lock:
            if what == self._what:
                self._shown = True
                self._view.show(what, *self._amounts)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def close(self) -> None:
        """Take away what is on the screen."""
        with self._lock:
            self._stop_waiting()
            self._what = ""
            self._view.close()


class _Lines:
    """One line for each `what`, for stderr that is no terminal."""

    def __init__(self) -> None:
        self._told = ""

    def show(self, what: str, done: int, total: int) -> None:
        if what != self._told:
            self._told = what
            size = f" ({byte_size(total)})" if total >= BYTES_FROM else ""
            tell(f"{one_line(what)}{size} ...")

    def close(self) -> None:
        pass


class _Bar:
    """One bar at a time on a terminal."""

    def __init__(self) -> None:
        self._progress: rich.progress.Progress | None = None

    def show(self, what: str, done: int, total: int) -> None:
        progress = self._progress or self._start()
        progress.update(
            progress.task_ids[0],
            description=one_line(what),
            completed=done,
            total=total or None,
            amount=_amount(done, total),
        )

    def _start(self) -> rich.progress.Progress:
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
        self._progress.add_task("", amount="", total=None)
        self._progress.start()
        return self._progress

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()


def _amount(done: int, total: int) -> str:
    if total < BYTES_FROM:
        return f"{done}/{total}" if total else ""
    return f"{done / 1e6:.1f}/{total / 1e6:.1f} MB"


def find(model: str) -> Path:
    """The file of a model, fetched first if need be; raises as `hub.resolve` does."""
    from ropewalk.checkpoint.hub import resolve

    with progress_on_stderr() as progress:
        return resolve(model, progress=progress)


def open_llm(model: str, machine: Machine, *, max_batch: int = 1) -> LLM:
    """A model that answers `max_batch` requests at a time; to be closed. What `find` and `LLM` raise is raised here."""
    from ropewalk import LLM

    with progress_on_stderr() as progress:
        return LLM(model, **vars(replace(machine, max_batch=max_batch, progress=progress)))
