"""Runs tasks on engines: whole or as a stream of events, with a time limit, and ended when nobody listens any more.

Every request ends in exactly one way: its whole answer, its last event, or one error. A cancelled coroutine (the client
is gone) ends the requests in the engine within one step, because `AsyncEngine` sees to that.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ropewalk.api.bodies import Event
from ropewalk.api.errors import ApiError, as_api_error
from ropewalk.api.tasks import Job, Task
from ropewalk.errors import GenerationError
from ropewalk.outputs import RequestOutput, StreamChunk

if TYPE_CHECKING:
    from ropewalk.api.embeddings import EmbeddingTask
    from ropewalk.async_engine import AsyncEngine, AsyncStream
    from ropewalk.serve.metrics import Metrics
    from ropewalk.serve.models import Served
    from ropewalk.serve.options import ServerOptions

LAST_WORD_S = 5.0
"""For a client that does not read to take the error that ends its stream."""


class ClientGoneError(Exception):
    """The client has closed its connection, or takes nothing of what it is sent."""


class Running:
    """The requests under way.

    Attributes
    ----------
    closing : bool
        Whether new ones are refused.
    """

    def __init__(self, options: ServerOptions, metrics: Metrics) -> None:
        self.closing = False
        self._options, self.metrics = options, metrics
        self._limits: set[asyncio.Timeout] = set()

    def cut(self) -> None:
        """End all of them with an error, because the server stops."""
        self.closing = True
        for limit in self._limits:
            if not limit.expired():
                limit.reschedule(asyncio.get_running_loop().time())

    def check(self, task: Task) -> None:
        """Hold a task to the server's limits; raises ApiError."""
        most = self._options.max_prompt_tokens
        for job in task.jobs:
            if most is not None and len(job.prompt) > most:
                message = f"the prompt has {len(job.prompt)} tokens; this server allows {most}"
                raise ApiError(message, code="context_length_exceeded")
            wanted, limit = job.params.max_tokens, self._options.max_output_tokens
            if job.is_limited and limit is not None and wanted is not None and wanted > limit:
                raise ApiError(f"max_tokens is {wanted}; this server allows {limit}", param="max_tokens")

    @asynccontextmanager
    async def limited(self) -> AsyncIterator[None]:
        """Hold what is inside to the time limit."""
        if self.closing:
            raise ApiError("the server is shutting down", status=503)
        try:
            async with asyncio.timeout(self._options.request_s) as limit:
                self._limits.add(limit)
                try:
                    yield
                finally:
                    self._limits.discard(limit)
        except TimeoutError:
            if self.closing:
                raise ApiError("the server is shutting down", status=503) from None
            raise ApiError(
                f"the request took longer than {self._options.request_s:g} s", status=504
            ) from None

    async def whole(self, task: Task, served: Served) -> tuple[Any, list[RequestOutput]]:
        """Run a task and return its body and its outputs; raises ApiError."""
        with told_as_api_errors(served.engine), served.place(task.n_sequences):
            try:
                async with self.limited(), asyncio.TaskGroup() as group:
                    waiting = [group.create_task(self._generate(job, served.engine)) for job in task.jobs]
            except asyncio.CancelledError:
                self.metrics.aborted(served, task.n_sequences)
                raise
            outputs = [each.result() for each in waiting]
            for output in outputs:
                self.metrics.ended(served, output)
            return task.body(outputs), outputs

    async def _generate(self, job: Job, engine: AsyncEngine) -> RequestOutput:
        output = await engine.generate(job.prompt, self._params(job), constraint=job.constraint)
        for completion in output.outputs:
            if completion.error is not None:
                raise completion.error
        return output

    def _params(self, job: Job) -> Any:
        limit, wanted = self._options.max_output_tokens, job.params.max_tokens
        if limit is None or (wanted is not None and wanted <= limit):
            return job.params
        return replace(job.params, max_tokens=limit)

    async def embed(self, task: EmbeddingTask, served: Served) -> Any:
        """Make the vectors of a task and return its body; raises ApiError."""
        most = self._options.max_prompt_tokens
        if most is not None and max(map(len, task.texts)) > most:
            raise ApiError(
                f"a text has {max(map(len, task.texts))} tokens; this server allows {most}", param="input"
            )
        with told_as_api_errors(served.engine), served.place(1):
            async with self.limited():
                vectors = [
                    (await asyncio.to_thread(task.llm.embed, [text], adapter=task.adapter))[0]
                    for text in task.texts
                ]
            return task.body(vectors)

    def begin(self, task: Task, served: Served) -> Streaming:
        """Queue a task whose events are wanted; raises ApiError while there can still be a status."""
        if self.closing:
            raise ApiError("the server is shutting down", status=503)
        place = served.place(task.n_sequences)
        with told_as_api_errors(served.engine):
            place.__enter__()
            try:
                streams = [
                    served.engine.stream(job.prompt, self._params(job), constraint=job.constraint)
                    for job in task.jobs
                ]
            except BaseException:
                place.__exit__(None, None, None)
                raise
        return Streaming(self, task, served, streams, place)


class Streaming:
    """A task whose events are sent as they come.

    Attributes
    ----------
    outputs : list of RequestOutput
        After the last event; empty if it failed.
    error : ApiError or None
        Why it failed.
    """

    def __init__(
        self, running: Running, task: Task, served: Served, streams: list[AsyncStream], place: Any
    ) -> None:
        self.outputs: list[RequestOutput] = []
        self.error: ApiError | None = None
        self._running, self._task, self._served = running, task, served
        self._streams, self._place = streams, place

    async def run(self, send: Callable[[list[Event]], Awaitable[None]]) -> None:
        """Send events until the last one; a failure is the last event."""
        task, running = self._task, self._running
        try:
            with told_as_api_errors(self._served.engine):
                async with running.limited():
                    await send(task.start())
                    async for job, chunk in _together(self._streams):
                        if events := task.take(job, chunk):
                            await send(events)
                    outputs = [output for stream in self._streams if (output := stream.output) is not None]
                    await send(task.end(outputs))
        except ApiError as error:
            running.metrics.refused(error.status)
            self.error = error
            try:
                async with asyncio.timeout(LAST_WORD_S):
                    await send(task.failed(error))
            except TimeoutError:
                raise ClientGoneError from None
            return
        self.outputs = outputs
        for output in outputs:
            running.metrics.ended(self._served, output)

    async def close(self) -> None:
        """End what has not ended, and give the places back."""
        place, self._place = self._place, None
        if place is not None:
            if not self.outputs and self.error is None:
                self._running.metrics.aborted(self._served, self._task.n_sequences)
            for stream in self._streams:
                await stream.aclose()
            place.__exit__(None, None, None)


async def _together(streams: list[AsyncStream]) -> AsyncIterator[tuple[int, StreamChunk]]:
    """Yield the chunks of all streams as they come, each with the number of its stream."""
    if len(streams) == 1:
        async for chunk in streams[0]:
            yield 0, chunk
        return
    queue: asyncio.Queue[tuple[int, StreamChunk] | None] = asyncio.Queue(maxsize=64)

    async def pump(number: int, stream: AsyncStream) -> None:
        async for chunk in stream:
            await queue.put((number, chunk))

    async def pump_all() -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for number, stream in enumerate(streams):
                    group.create_task(pump(number, stream))
        finally:
            await queue.put(None)

    pumping = asyncio.create_task(pump_all())
    try:
        while (item := await queue.get()) is not None:
            yield item
        await pumping
    finally:
        pumping.cancel()
        while not queue.empty():
            queue.get_nowait()


@contextmanager
def told_as_api_errors(engine: AsyncEngine) -> Iterator[None]:
    """Turn every exception into an ApiError, but not the end of a client; of several at once, the first."""
    try:
        yield
    except ClientGoneError:
        raise
    except Exception as error:
        while isinstance(error, ExceptionGroup):
            error = error.exceptions[0]
        if isinstance(error, GenerationError) and not engine.is_alive:
            raise ApiError("the engine has stopped", status=503) from error
        raise as_api_error(error) from error
