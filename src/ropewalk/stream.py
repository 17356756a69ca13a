"""One prompt's answer as an iterator: a chunk for each token, drawn when it is asked for.

Steps the engine through its `Driver` when there is no chunk at hand. Can be forked where its reader is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from types import TracebackType
from typing import Any

from ropewalk.driver import Driver
from ropewalk.errors import GenerationError
from ropewalk.generation import Generation
from ropewalk.outputs import StreamChunk
from ropewalk.params import SamplingParams


class Stream(Generator[StreamChunk, None, None]):
    """The chunks of a prompt, made by `LLM.stream`, `LLM.stream_chat` and `fork`.

    A generator: `close` (or the last chunk, or dropping it) ends its requests and frees their pages.
    """

    def __init__(self, driver: Driver, submit: Callable[[], Generation]) -> None:
        self._driver = driver
        self._submit: Callable[[], Generation] | None = submit
        self._generation: Generation | None = None
        self._n_read: dict[int, int] = {}  # tokens of each completion that the reader has
        self._closed = False

    def send(self, value: None) -> StreamChunk:
        """Return the next chunk; raises what `LLM.stream` says."""
        if self._closed:
            raise StopIteration
        try:
            generation = self._started()
            while not generation.chunks and not generation.ended:
                self._driver.advance(generation)
            if generation.chunks:
                chunk = generation.chunks.popleft()
                self._n_read[chunk.index] = self._n_read.get(chunk.index, 0) + 1
                return chunk
            if (error := generation.error) is not None:
                raise error if isinstance(error, GenerationError) else GenerationError(str(error)) from error
            raise StopIteration
        except BaseException:
            self._end()
            raise

    def throw(
        self,
        kind: type[BaseException] | BaseException,
        value: BaseException | object = None,
        trace: TracebackType | None = None,
        /,
    ) -> Any:
        """End the stream and raise an exception."""
        self._end()
        error = (
            kind if isinstance(kind, BaseException) else value if isinstance(value, BaseException) else kind()
        )
        raise error.with_traceback(trace)

    def fork(
        self, params: SamplingParams | None = None, *, index: int = 0, priority: int | None = None
    ) -> Stream:
        """Return a stream of another continuation of what was read so far.

        It begins with the next token and is what it would be had the output begun like this by itself: limits,
        penalties and stop strings count the whole of it, and its result has the whole text. Both share their pages of
        the KV cache, so nothing is computed again.

        Parameters
        ----------
        params : SamplingParams, optional
            For what comes next; `n` must be 1. Default: the same ones with a fresh seed.
        index : int, default 0
            Which completion of the prompt to fork.
        priority : int, optional
            Default: that of this stream.

        Raises
        ------
        InvalidParameterError
            If there is nothing to go on with: an end token or a stop string was read, or `max_tokens` of them. Or if
            log-probabilities are asked for that the output so far does not have.
        GenerationError
            If the stream was closed.
        """
        if self._closed:
            raise GenerationError("this stream is closed and cannot be forked")
        generation = self._driver.fork(self._started(), self._n_read, params, index=index, priority=priority)
        return Stream._of(self._driver, generation)

    @classmethod
    def _of(cls, driver: Driver, generation: Generation) -> Stream:
        stream = cls(driver, lambda: generation)
        stream._started()
        stream._n_read = {0: generation.n_taken}
        return stream

    def _started(self) -> Generation:
        if self._generation is None:
            assert self._submit is not None
            self._generation, self._submit = self._submit(), None
        return self._generation

    def _end(self) -> None:
        self._closed = True
        if self._generation is not None:
            self._driver.drop(self._generation)

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self._end()
