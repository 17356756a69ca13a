"""Answers the requests of a batch: keeps the engine's batch full, and no more requests in memory than that needs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from ropewalk.api.bodies import new_id
from ropewalk.api.body import checked
from ropewalk.api.errors import ApiError, as_api_error, no_such_model
from ropewalk.api.requests import Body
from ropewalk.api.tasks import Task, make_task
from ropewalk.errors import BatchError

if TYPE_CHECKING:
    from ropewalk.async_engine import AsyncEngine
    from ropewalk.batch.files import BatchInput, BatchOutput
    from ropewalk.llm import LLM
    from ropewalk.outputs import RequestOutput


class Line(Body):
    """One line of the input."""

    custom_id: str
    method: Literal["POST"]
    url: Literal["/v1/chat/completions", "/v1/completions"]
    body: dict[str, Any]


@dataclass
class Tally:
    """How far a batch is.

    Attributes
    ----------
    n_requests, n_done, n_failed : int
        All of the input; answered, in this run or before; of these, with a status that is not 200.
    n_answered : int
        Answered in this run.
    prompt_tokens, generated_tokens : int
        Of the answers of this run.
    first_error : str
        The first of this run; empty if there was none.
    started_s : float
        `time.monotonic()` when this run began.
    """

    n_requests: int
    n_done: int
    n_failed: int
    n_answered: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    first_error: str = ""
    started_s: float = field(default_factory=time.monotonic)

    @property
    def elapsed_s(self) -> float:
        """Seconds since this run began."""
        return time.monotonic() - self.started_s

    @property
    def left_s(self) -> float | None:
        """Seconds to the end if it goes on like this; None before the first answer."""
        if not self.n_answered:
            return None
        return (self.n_requests - self.n_done) * self.elapsed_s / self.n_answered


class BatchRunner:
    """Answers one batch.

    Parameters
    ----------
    engine : AsyncEngine
    name : str
        The model's name; requests may also say none.
    aliases : collection of str
        Other names by which requests may call it.
    max_tokens : int, optional
        For requests that do not say how many.
    n_ahead : int
        Completions that run or wait in the engine: twice its `max_batch` keeps it full.
    on_answer : callable (Tally)
        Told after each answer.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        name: str,
        *,
        aliases: Collection[str] = (),
        max_tokens: int | None = None,
        n_ahead: int = 32,
        on_answer: Callable[[Tally], object] = lambda tally: None,
    ) -> None:
        self._engine = engine
        self._name, self._aliases = name, aliases
        self._max_tokens = max_tokens
        self._n_ahead = n_ahead
        self._on_answer = on_answer
        self._n_running = 0
        self._freed = asyncio.Event()

    async def run(self, source: BatchInput, target: BatchOutput) -> Tally:
        """Answer every request that `target` does not hold yet; answers are written as they come.

        A request that fails has its error for an answer. What ends the run is a dead engine or a file that fails.

        Raises
        ------
        BatchError
            If a file fails.
        GenerationError
            If the engine has died.
        """
        tally = Tally(source.n_requests, target.n_done, target.n_failed)
        try:
            async with asyncio.TaskGroup() as group:
                for number, content in source.requests(target.done):
                    answer = _Answer(number, content["custom_id"], target, tally, self._on_answer)
                    try:
                        task = self._task(content)
                    except Exception as error:
                        answer.give_error(error)
                        await asyncio.sleep(0)
                        continue
                    while self._n_running and self._n_running + task.n_sequences > self._n_ahead:
                        self._freed.clear()
                        await self._freed.wait()
                    self._n_running += task.n_sequences
                    group.create_task(self._answer(task, answer))
        except ExceptionGroup as group_error:
            raise _first(group_error) from None
        return tally

    def _task(self, content: dict[str, Any]) -> Task:
        line = checked(Line, content)
        body = line.body
        if body.get("stream"):
            raise ApiError("stream: a batch has no streams; leave it out", param="stream")
        said = [body.get(name) for name in ("max_tokens", "max_completion_tokens")]
        if self._max_tokens is not None and said == [None, None]:
            body = {**body, "max_tokens": self._max_tokens}
        return make_task(line.url, body, self._find)

    def _find(self, name: str | None) -> tuple[str, LLM]:
        known = [self._name, *self._aliases]
        if name is not None and name not in known:
            raise no_such_model(name, known)
        return name or self._name, self._engine.llm

    async def _answer(self, task: Task, answer: _Answer) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                waiting = [
                    group.create_task(
                        self._engine.generate(job.prompt, job.params, constraint=job.constraint)
                    )
                    for job in task.jobs
                ]
            outputs = [each.result() for each in waiting]
            body = task.body(outputs)
        except Exception as error:
            if not self._engine.is_alive:
                raise
            answer.give_error(_first(error))
        else:
            answer.give(body, outputs)
        finally:
            self._n_running -= task.n_sequences
            self._freed.set()


@dataclass
class _Answer:
    """What one line of the input gets."""

    number: int
    custom_id: str
    target: BatchOutput
    tally: Tally
    on_answer: Callable[[Tally], object]

    def give(self, body: Any, outputs: list[RequestOutput]) -> None:
        self.tally.prompt_tokens += sum(output.timings.prompt_tokens for output in outputs)
        self.tally.generated_tokens += sum(output.timings.generated_tokens for output in outputs)
        self._write(200, body)

    def give_error(self, error: BaseException) -> None:
        if isinstance(error, BatchError):
            raise error
        told = as_api_error(error)
        self.tally.first_error = self.tally.first_error or f"line {self.number}: {told}"
        self._write(told.status, told.body)

    def _write(self, status: int, body: Any) -> None:
        self.target.write(self.number, self.custom_id, new_id("req_"), status, body)
        self.tally.n_answered += 1
        self.tally.n_done, self.tally.n_failed = self.target.n_done, self.target.n_failed
        self.on_answer(self.tally)


def _first(error: BaseException) -> BaseException:
    """The first exception in a group, or the error itself."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
