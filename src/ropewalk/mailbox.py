"""What a request has to say, from the thread that steps to the one task that reads.

A step puts its chunks there and wakes the event loop that waits for them, if one does; so it never waits for a reader.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future

from ropewalk.generation import Generation
from ropewalk.outputs import RequestOutput, StreamChunk


class Mailbox:
    """The chunks of one request that were not fetched yet, and how it ended.

    Attributes
    ----------
    generation : Generation or None
        The request, once the engine has it.
    begun : Future of None
        Done when it has; if it never will, what was wrong with the request.
    output, error, aborted
        How it ended; set before `ended`.
    ended : Future of None
    """

    def __init__(self, request_id: str, keep_chunks: bool) -> None:
        self.request_id = request_id
        self.generation: Generation | None = None
        self.output: RequestOutput | None = None
        self.error: BaseException | None = None
        self.aborted = False
        self.begun: Future[None] = Future()
        self.ended: Future[None] = Future()
        for future in (self.begun, self.ended):
            future.set_running_or_notify_cancel()  # a reader that is cancelled does not cancel it
        self._keep_chunks = keep_chunks
        self._chunks: deque[StreamChunk] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._lock = threading.Lock()

    # Written by the thread that steps.

    def begin(self, generation: Generation) -> None:
        """The engine has the request."""
        self.generation = generation
        self.begun.set_result(None)

    def put(self, chunks: Iterable[StreamChunk]) -> None:
        """Add chunks."""
        if self._keep_chunks:
            self._chunks.extend(chunks)
            self._wake()

    def end(self, output: RequestOutput | None, error: BaseException | None, aborted: bool) -> None:
        """There will be no more chunks."""
        self.output, self.error, self.aborted = output, error, aborted
        if not self.begun.done():
            self.begun.set_exception(error)
        self.ended.set_result(None)
        self._wake()

    def _wake(self) -> None:
        with self._lock:
            waiter, self._waiter = self._waiter, None
        if waiter is not None:
            with contextlib.suppress(RuntimeError):  # its loop is closed: nobody waits any more
                waiter.get_loop().call_soon_threadsafe(_resolve, waiter)

    # Read by a task of any loop.

    @property
    def is_awaited(self) -> bool:
        """Whether a task waits for chunks."""
        return self._waiter is not None

    async def next(self) -> StreamChunk:
        """Return the next chunk; after the last one raise what the request failed of, or StopAsyncIteration."""
        while not self._chunks:
            if self.ended.done() and not self._chunks:  # the last chunks are put before the end
                if self.error is not None:
                    raise self.error
                raise StopAsyncIteration
            await self._arrival()
        return self._chunks.popleft()

    async def result(self) -> RequestOutput:
        """Wait for the end; return the whole result or raise what the request failed of."""
        await asyncio.wrap_future(self.ended)
        if self.error is not None:
            raise self.error
        assert self.output is not None, "a request that did not fail has a result"
        return self.output

    async def _arrival(self) -> None:
        """Wait for chunks or the end."""
        waiter = asyncio.get_running_loop().create_future()
        with self._lock:
            if self._chunks or self.ended.done():
                return
            self._waiter = waiter
        try:
            await waiter
        finally:
            with self._lock:
                if self._waiter is waiter:
                    self._waiter = None


def _resolve(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
