"""The front door for event loops: `AsyncEngine` runs an `LLM` on a thread of its own.

The thread, a `Worker`, steps while there is work and blocks, without using the CPU, while there is none. Requests come
from any thread and any event loop; each has a `Mailbox`, into which the step puts its chunks. What a slow reader has
not fetched yet is at most what its request may generate. Prompts, steps and texts are the business of `LLM` and its
`Driver`.
"""

from __future__ import annotations

import asyncio
import os
import weakref
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Self, Unpack

from ropewalk.engine.statistics import Statistics
from ropewalk.errors import GenerationError, InvalidParameterError
from ropewalk.generation import Generation, nothing
from ropewalk.llm import LLM
from ropewalk.mailbox import Mailbox
from ropewalk.options import DEFAULT_MODEL, LLMKeywords
from ropewalk.outputs import RequestOutput, StreamChunk
from ropewalk.params import SamplingParams
from ropewalk.prompts import ChatKeywords, Prepared, Prompt, RequestKeywords
from ropewalk.truncation import Conversation
from ropewalk.worker import Worker


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
        self._worker = Worker(self.llm.driver, self.llm.close if opened else nothing)
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
        return AsyncStream(
            self, self._worker.submit(partial(prepared.submit, self.llm.driver), request_id), {}
        )

    async def _result(self, prepared: Prepared, request_id: str | None) -> RequestOutput:
        begin = partial(prepared.submit, self.llm.driver)
        mailbox = self._worker.submit(begin, request_id, keep_chunks=False)
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

    def __init__(self, engine: AsyncEngine, mailbox: Mailbox, n_read: dict[int, int]) -> None:
        self.request_id = mailbox.request_id
        self._engine = engine
        self._mailbox = mailbox
        self._n_read = n_read  # tokens of each completion that the reader has
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
            chunk = await self._mailbox.next()
        except BaseException:  # the end, a failure, or the task was cancelled
            self._close()
            raise
        self._n_read[chunk.index] = self._n_read.get(chunk.index, 0) + 1
        return chunk

    async def fork(
        self,
        params: SamplingParams | None = None,
        *,
        index: int = 0,
        priority: int | None = None,
        request_id: str | None = None,
    ) -> AsyncStream:
        """Return a stream of another continuation of what was read so far; see `Stream.fork`.

        It is queued when this returns, before the next step. What this stream has drawn and its reader has not read
        makes no difference, except under a constraint, which can only be forked where it is.

        Parameters
        ----------
        params, index, priority
            As in `Stream.fork`.
        request_id : str, optional
            As in `AsyncEngine.stream`.

        Raises
        ------
        InvalidParameterError
            As `Stream.fork` does, or if the name is in use.
        GenerationError
            If the stream was closed or has failed, or the engine is closed or has died.
        """
        if self._closed:
            raise GenerationError("this stream is closed and cannot be forked")
        driver, source, n_read = self._engine.llm.driver, self._mailbox, dict(self._n_read)

        def begin() -> Generation:
            if source.generation is None:
                assert source.error is not None, "a request that never began has failed"
                raise source.error
            return driver.fork(source.generation, n_read, params, index=index, priority=priority)

        mailbox = self._engine._worker.submit(begin, request_id)
        fork = AsyncStream(self._engine, mailbox, {0: n_read.get(index, 0)})
        try:
            await asyncio.wrap_future(mailbox.begun)
        except BaseException:  # refused, or the task was cancelled
            fork._close()
            raise
        return fork

    async def aclose(self) -> None:
        """End the request, unless it has ended; the iterator is exhausted then."""
        self._close()

    def __del__(self) -> None:
        self._close()

    def _close(self) -> None:
        self._closed = True
        self._engine._worker.abort(self._mailbox)
