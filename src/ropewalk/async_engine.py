"""The front door for event loops: `AsyncEngine` runs an `LLM` on a thread of its own.

The thread steps while there is work and blocks, without using the CPU, while there is none. Requests come from any
thread and any event loop; each has a `_Mailbox`, into which the step puts its chunks, and which wakes the loop that
waits for them, if one does. So a step never waits for a reader, and what a slow reader has not fetched yet is at most
what its request may generate. Prompts, steps and texts are the business of `LLM` and its `Driver`.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import threading
import time
import uuid
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from queue import SimpleQueue
from types import TracebackType
from typing import Self, Unpack

from ropewalk.engine.statistics import Statistics
from ropewalk.errors import GenerationError, InvalidParameterError
from ropewalk.generation import Generation, nothing
from ropewalk.llm import LLM
from ropewalk.options import DEFAULT_MODEL, LLMKeywords
from ropewalk.outputs import RequestOutput, StreamChunk
from ropewalk.params import SamplingParams
from ropewalk.prompts import ChatKeywords, Prepared, Prompt, RequestKeywords
from ropewalk.truncation import Conversation


class AsyncEngine:
    """Many requests at once through one model, for `asyncio`.

    Use it as an async context manager, or await `close`. An engine that is dropped, or still open when the interpreter
    exits, ends by itself. A forked child cannot use its parent's engine.

    Parameters
    ----------
    llm : LLM, str or path, default "smollm2-135m"
        The model: an `LLM` that is open (others may use it at the same time; it stays open), or what `LLM` takes.
    **options
        Those of `LLM`, for a model that is opened here.

    Attributes
    ----------
    llm : LLM
        For `encode`, `decode`, `chat_template`, `config` and so on.

    Raises
    ------
    RopewalkError
        What `LLM` raises, if the model is opened here.
    """

    def __init__(
        self, llm: LLM | str | os.PathLike[str] = DEFAULT_MODEL, **options: Unpack[LLMKeywords]
    ) -> None:
        opened = not isinstance(llm, LLM)
        if isinstance(llm, LLM):
            if options:
                raise InvalidParameterError(
                    f"options are {', '.join(options)}; allowed: none, since the LLM is open already"
                )
            self.llm = llm
        else:
            self.llm = LLM(llm, **options)
        self._worker = _Worker(self.llm, opened)
        weakref.finalize(self, self._worker.stop).atexit = False  # at exit there is one that waits

    # Generating.

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        **options: Unpack[RequestKeywords],
    ) -> AsyncStream:
        """Continue a prompt; the result is an async iterator of chunks, one a token, as in `LLM.stream`.

        The request is queued at once, and runs whether somebody waits for its chunks or not. It is ended, and its pages
        are freed, within one step when the iterator is closed (`aclose`) or dropped, or a task is cancelled that
        waits for its next chunk.

        Parameters
        ----------
        prompt, params, **options
            As in `LLM.stream`.
        request_id : str, optional
            A name for `abort`. Default: a new one, in `AsyncStream.request_id`.

        Raises
        ------
        PromptError, InvalidParameterError
            At once, if prompt or parameters cannot be used or the name is in use.
        GenerationError
            At once, if the engine is closed or its thread has died. From the iterator, if the request fails, or
            that happens while it waits.
        """
        return self._stream(self.llm.prompts.prepare(prompt, params, **options), request_id)

    def stream_chat(
        self,
        messages: Conversation,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        **options: Unpack[ChatKeywords],
    ) -> AsyncStream:
        """Answer a conversation as `LLM.stream_chat` does, chunk by chunk as `stream` does."""
        return self._stream(self.llm.prompts.prepare_chat(messages, params, **options), request_id)

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        **options: Unpack[RequestKeywords],
    ) -> RequestOutput:
        """Continue one prompt and return the whole result. Cancelling the task ends the request.

        A request that `abort` ends returns what there was, with `finish_reason` "abort".

        Raises
        ------
        PromptError, InvalidParameterError, GenerationError
            As `stream` and its iterator do.
        """
        return await self._result(self.llm.prompts.prepare(prompt, params, **options), request_id)

    async def chat(
        self,
        messages: Conversation,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        **options: Unpack[ChatKeywords],
    ) -> RequestOutput:
        """Answer one conversation and return the whole result, as `generate` does."""
        return await self._result(self.llm.prompts.prepare_chat(messages, params, **options), request_id)

    def _stream(self, prepared: Prepared, request_id: str | None) -> AsyncStream:
        return AsyncStream(self, self._worker.submit(prepared, request_id))

    async def _result(self, prepared: Prepared, request_id: str | None) -> RequestOutput:
        mailbox = self._worker.submit(prepared, request_id, keep_chunks=False)
        try:
            return await mailbox.result()
        finally:
            self._worker.abort(mailbox)

    async def abort(self, request_id: str) -> bool:
        """End a request, and return once its pages are free: within one step.

        Its stream ends without an error, after the chunks that there were.

        Returns
        -------
        bool
            False if there is no such request, or it had ended by then.
        """
        self._worker.check_process()
        mailbox = self._worker.mailboxes.get(request_id)
        if mailbox is None:
            return False
        self._worker.abort(mailbox)
        await asyncio.wrap_future(mailbox.ended)
        return mailbox.aborted

    # How it is.

    @property
    def is_alive(self) -> bool:
        """Whether the engine's thread runs: False once it is closed or has died, and in a forked child."""
        return self._worker.is_alive

    @property
    def error(self) -> BaseException | None:
        """What the engine's thread died of; None while it lives, and after `close`."""
        return self._worker.error

    def statistics(self) -> Statistics:
        """`LLM.statistics` without waiting for a step under way; requests that it has not seen yet are waiting ones."""
        picture = self.llm.driver.statistics(wait=False)
        unseen = sum(mailbox.generation is None for mailbox in list(self._worker.mailboxes.values()))
        return replace(picture, waiting=picture.waiting + unseen)

    # Ending.

    async def close(self) -> None:
        """End all requests (whoever waits for one gets a GenerationError) and the thread; again does nothing.

        An `LLM` that was opened here is closed, one that was given stays open.
        """
        self._worker.stop()
        await asyncio.to_thread(self._worker.join)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class AsyncStream(AsyncIterator[StreamChunk]):
    """The chunks of one request. Closing or dropping it ends the request.

    One task at a time can wait for the next chunk; it may be a task of any event loop.

    Attributes
    ----------
    request_id : str
    """

    def __init__(self, engine: AsyncEngine, mailbox: _Mailbox) -> None:
        self.request_id = mailbox.request_id
        self._engine = engine
        self._mailbox = mailbox
        self._closed = False

    @property
    def output(self) -> RequestOutput | None:
        """The whole result; None until the request has ended. Of an aborted one, what there was."""
        return self._mailbox.output

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> StreamChunk:
        if self._closed:
            raise StopAsyncIteration
        self._engine._worker.check_process()
        if self._mailbox.is_awaited:
            raise RuntimeError("another task waits for the next chunk of this stream")
        try:
            return await self._mailbox.next()
        except BaseException:  # the end, a failure, or the task was cancelled
            self._close()
            raise

    async def aclose(self) -> None:
        """End the request, unless it has ended; the iterator is exhausted then."""
        self._close()

    def __del__(self) -> None:
        self._close()

    def _close(self) -> None:
        self._closed = True
        self._engine._worker.abort(self._mailbox)


class _Mailbox:
    """What a request has to say, from the thread that steps to the one task that reads.

    Attributes
    ----------
    generation : Generation or None
        The request while the engine has it.
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
        self.ended: Future[None] = Future()
        self.ended.set_running_or_notify_cancel()  # a reader that is cancelled does not cancel it
        self._keep_chunks = keep_chunks
        self._chunks: deque[StreamChunk] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._lock = threading.Lock()

    # Written by the thread that steps.

    def put(self, chunks: Iterable[StreamChunk]) -> None:
        if self._keep_chunks:
            self._chunks.extend(chunks)
            self._wake()

    def end(self, output: RequestOutput | None, error: BaseException | None, aborted: bool) -> None:
        self.output, self.error, self.aborted = output, error, aborted
        self.generation = None
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
        return self._waiter is not None

    async def next(self) -> StreamChunk:
        while not self._chunks:
            if self.ended.done() and not self._chunks:  # the last chunks are put before the end
                if self.error is not None:
                    raise self.error
                raise StopAsyncIteration
            await self._arrival()
        return self._chunks.popleft()

    async def result(self) -> RequestOutput:
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


class _Worker:
    """The engine's thread, and the requests that it has.

    What other threads want from it is posted to the driver, and a bell is rung, which wakes it if it sleeps. Both may
    be done in a `__del__`, which can interrupt any code at all: neither takes a lock that such code could hold.

    Attributes
    ----------
    mailboxes : dict of request_id to _Mailbox
        Of the requests that have not ended. Entered by their callers, taken out by whoever steps.
    """

    def __init__(self, llm: LLM, closes_llm: bool) -> None:
        self.mailboxes: dict[str, _Mailbox] = {}
        self.error: BaseException | None = None
        self._driver = llm.driver
        self._close_llm = llm.close if closes_llm else None
        self._bell: SimpleQueue[None] = SimpleQueue()
        self._stopping = False
        self._over = False
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="ropewalk-engine", daemon=True)
        atexit.register(self._stop_at_exit)
        self._thread.start()

    # Called by any thread.

    @property
    def is_alive(self) -> bool:
        stopped = self._stopping or self._over or self._pid != os.getpid()
        return not stopped and self._thread.is_alive()

    def submit(self, prepared: Prepared, request_id: str | None, *, keep_chunks: bool = True) -> _Mailbox:
        if request_id is None:
            request_id = uuid.uuid4().hex
        elif not isinstance(request_id, str):
            raise InvalidParameterError(f"request_id is {request_id!r}; allowed: a string")
        mailbox = _Mailbox(request_id, keep_chunks)
        if self.mailboxes.setdefault(request_id, mailbox) is not mailbox:
            raise InvalidParameterError(f"request_id is {request_id!r}; allowed: one that is not in use")
        self._post(partial(self._start, mailbox, prepared, time.perf_counter()))
        if not self.is_alive:  # asked last: a thread that ends after this ends the request too
            self.mailboxes.pop(request_id, None)
            raise self._refusal()
        return mailbox

    def abort(self, mailbox: _Mailbox) -> None:
        if not mailbox.ended.done():
            self._post(partial(self._abort, mailbox))

    def stop(self) -> None:
        self._stopping = True
        if self._pid == os.getpid():
            self._bell.put(None)

    def join(self) -> None:
        if self._pid == os.getpid():
            self._thread.join()

    def _stop_at_exit(self) -> None:
        self.stop()
        self.join()

    def _post(self, action: Callable[[], object]) -> None:
        if self._pid == os.getpid():
            self._driver.post(action)
            self._bell.put(None)

    def check_process(self) -> None:
        """Raise GenerationError in a forked child, where nothing would ever come."""
        if self._pid != os.getpid():
            raise self._refusal()

    def _refusal(self) -> GenerationError:
        if self._pid != os.getpid():
            return GenerationError("this AsyncEngine belongs to the process that this one was forked from")
        if self.error is not None:
            return GenerationError(f"the thread of this AsyncEngine died: {self.error!r}")
        return GenerationError("this AsyncEngine is closed")

    # The engine's thread.

    def _run(self) -> None:
        try:
            while not self._stopping:
                if not self.mailboxes:
                    self._bell.get()
                while not self._bell.empty():
                    self._bell.get_nowait()
                if not self._stopping:
                    self._step()
        except BaseException as error:
            self.error = error
        finally:
            self._finish()

    def _step(self) -> None:
        try:
            self._driver.step()
        except Exception:
            # A step that failed has ended those that had a part in it; the engine can be used afterwards.
            if self._driver.closed or any(box.generation for box in list(self.mailboxes.values())):
                raise

    def _finish(self) -> None:
        self._over = True
        for mailbox in list(self.mailboxes.values()):
            with self._driver.lock:
                self._end(mailbox, self._refusal())
        if self._close_llm is not None:
            self._close_llm()
        atexit.unregister(self._stop_at_exit)

    # Under the driver's lock, by whichever thread runs the step.

    def _start(self, mailbox: _Mailbox, prepared: Prepared, arrived_s: float) -> None:
        if mailbox.ended.done():
            return
        try:
            generation = prepared.submit(self._driver)
        except Exception as error:
            self._end(mailbox, _caused_by(error))
            return
        for request in generation.requests:
            request.arrived_s = arrived_s
        mailbox.generation = generation
        generation.on_advance = partial(self._deliver, mailbox)

    def _deliver(self, mailbox: _Mailbox) -> None:
        if (generation := mailbox.generation) is None:
            return
        mailbox.put(generation.chunks)
        generation.chunks.clear()
        if (lost_by := generation.lost_by) is not None:
            if not isinstance(lost_by, Exception) and threading.current_thread() is self._thread:
                return  # this thread dies of it, and then ends all requests
            self._end(mailbox, _caused_by(lost_by, "the step that ran the request failed: "))
        elif generation.ended:
            self._end(mailbox, None if generation.error is None else _caused_by(generation.error))

    def _abort(self, mailbox: _Mailbox) -> None:
        if not mailbox.ended.done():
            self._end(mailbox, None, aborted=True)

    def _end(self, mailbox: _Mailbox, error: BaseException | None, *, aborted: bool = False) -> None:
        generation = mailbox.generation
        self.mailboxes.pop(mailbox.request_id, None)
        output = None
        try:
            if generation is not None:
                generation.on_advance = nothing
                self._driver.drop(generation)
                output = generation.output
        finally:
            mailbox.end(output, error, aborted)


def _caused_by(cause: BaseException, what: str = "") -> GenerationError:
    if isinstance(cause, GenerationError):
        return cause
    error = GenerationError(f"{what}{cause}" if str(cause) else f"{what}{type(cause).__name__}")
    error.__cause__ = cause
    return error
