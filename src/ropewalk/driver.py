"""Who steps the engine: everybody that waits for tokens, one at a time.

A thread that waits for a `Generation` takes the lock, runs a step, and hands what came of it to every generation that
had a part in it; so any number of threads share the steps of one engine, and none needs to know of the others.
`LLM` steps on the threads of its callers, `AsyncEngine` on a thread of its own. What else needs the model for long is
cut into pieces, and a step of the engine is followed by one of them. Does not know prompts, only token ids.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from weakref import WeakSet, WeakValueDictionary

from ropewalk.engine.engine import Engine
from ropewalk.engine.request import Request
from ropewalk.engine.statistics import Statistics
from ropewalk.errors import GenerationError, InvalidParameterError
from ropewalk.generation import Generation, nothing
from ropewalk.params import SamplingParams

if TYPE_CHECKING:
    from ropewalk.text.tokenizer import Tokenizer


Result = TypeVar("Result")

TURN_S = 0.0005
"""For which a thread that has more to run stays away from the lock after a step, if others may want it: who waits for a
lock wakes up later than who comes by."""


class Driver:
    """An engine, and the generations that run on it.

    Attributes
    ----------
    engine : Engine
        Used under `lock` only.
    live : mapping of request id to Generation
        Those that are held by a caller. What an interrupt leaves without one is ended by the next step.
    lock : RLock
    wanted : bool
        Whether somebody waits for the lock to close the engine, or to fork the process.
    closed : bool
    """

    def __init__(self, engine: Engine, tokenizer: Tokenizer) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.live: WeakValueDictionary[int, Generation] = WeakValueDictionary()
        self.lock = threading.RLock()
        self.wanted = self.closed = False
        self._posted: deque[Callable[[], object]] = deque()
        self._works: deque[_Work[Any]] = deque()
        self._picture = engine.statistics()
        _drivers.add(self)

    def post(self, action: Callable[[], object]) -> None:
        """Have `action` called, under the lock, by whoever runs the next step, before that step.

        Never waits, and may be called from anywhere, a `__del__` included. The action must not raise.
        """
        self._posted.append(action)

    def submit(self, request: Callable[[Engine], Request], prompt: str | None) -> Generation:
        """Queue what `request` adds to the engine; `prompt` is its text, for the result."""
        with self.lock:
            self.check_open()
            generation = Generation(request(self.engine).group, prompt, self.tokenizer)
            self.live.update((each.id, generation) for each in generation.requests)
            return generation

    def fork(
        self,
        first: Generation,
        n_read: Mapping[int, int],
        params: SamplingParams | None,
        *,
        index: int,
        priority: int | None,
    ) -> Generation:
        """Queue another continuation of what was read of a completion; `Stream.fork` explains the rest.

        Parameters
        ----------
        n_read : mapping of int to int
            Tokens that were read of each completion; of those that are not there, none.
        """
        if not 0 <= index < len(first.requests):
            raise InvalidParameterError(f"index is {index!r}; allowed: 0 ... {len(first.requests) - 1}")
        request, n_output = first.requests[index], n_read.get(index, 0)
        chosen = replace(request.params, n=1, seed=None, prompt_logprobs=None) if params is None else params
        with self.lock:
            generation = self.submit(
                lambda engine: engine.fork(request, chosen, n_output=n_output, priority=priority),
                first.prompt,
            )
            generation.n_truncated = first.n_truncated
            stop = generation.skip(n_output)
            if stop is not None:
                self.drop(generation)
                raise InvalidParameterError(f"stop has {stop!r}, which is in what was read; allowed: others")
        return generation

    def advance(self, generation: Generation) -> None:
        """Give a generation that has not ended at least one more token, or its end.

        Raises
        ------
        GenerationError
            If the engine was closed, or the generation was ended by somebody else's failing step.
        """
        n_taken = generation.n_taken
        with self.lock:
            generation.advance(self.engine)  # what is left of a step, if an interrupt came just after it
            if generation.ended or generation.n_taken > n_taken:
                return  # so it was, or another thread has done it
            self.check_open()
            if generation.aborted:
                raise GenerationError(
                    "the request was ended by an interrupted step that it shared with another"
                )
            self.step()

    def step(self) -> None:
        """Do what was posted, then advance everything by one step.

        What the backend raises ends every generation that was under way, and is raised again.
        """
        with self.lock:
            while self._posted:
                self._posted.popleft()()
            self.check_open()
            try:
                changed = self.engine.step()
            except BaseException as error:
                self._lose_all(error)
                raise
            advanced: dict[Generation, None] = {}
            for request in changed:
                if (generation := self.live.get(request.id)) is None:
                    self.engine.finish(request)
                else:
                    advanced[generation] = None
            for generation in advanced:
                generation.advance(self.engine)
                generation.on_advance()
            if self._works and self._works[0].advance():
                self._works.popleft()
            self._picture = self.engine.statistics()

    def run(self, pieces: Generator[None, None, Result]) -> Result:
        """Run `pieces` one by one, each under the lock and after a step of the engine, and return their result.

        Whoever steps runs them, this thread or another; so neither these nor what the engine has wait for the whole of
        the other. Of several works the first goes on until it ends: each may hold a KV cache.

        Raises
        ------
        GenerationError
            If the engine was closed, or another thread was interrupted in one of the pieces.
        Exception
            What a piece raises; and what the backend raises in a step that is run here.
        """
        work = _Work(pieces)
        self._works.append(work)
        try:
            while not work.ended:
                with self.lock:
                    if not work.ended:
                        self.step()
                if not work.ended and self.engine.has_unfinished:
                    time.sleep(TURN_S)
        finally:
            with self.lock:
                if work in self._works:
                    self._works.remove(work)
        return work.result()

    def _lose_all(self, error: BaseException) -> None:
        for generation in dict.fromkeys(self.live.values()):
            generation.lost_by = error
            generation.on_advance()

    def drop(self, generation: Generation) -> None:
        """End a generation, unless it has ended, and forget it."""
        with self.lock:
            for request in generation.requests:
                self.engine.finish(request)
                self.live.pop(request.id, None)
            self._picture = self.engine.statistics()

    def statistics(self, *, wait: bool = True) -> Statistics:
        """Requests, pages, tokens and times so far; as of the end of the last step, if one runs and `wait` is False."""
        if self.lock.acquire(blocking=wait):
            try:
                self._picture = self.engine.statistics()
            finally:
                self.lock.release()
        return self._picture

    def close(self) -> None:
        """End everything; nothing can be submitted or stepped any more."""
        with self.lock:
            self.closed = True
            for generation in list(self.live.values()):
                self.drop(generation)
            self.engine.close()

    def check_open(self) -> None:
        """Raise GenerationError if `close` was called."""
        if self.closed:
            raise GenerationError("this LLM is closed")

    def after_fork(self) -> None:
        """In a child, end what only a thread of the parent waits for."""
        self._posted.clear()
        self._works.clear()
        for generation in dict.fromkeys(self.live.values()):
            if generation.on_advance is not nothing:
                self.drop(generation)


class _Work(Generic[Result]):
    """Pieces that some thread waits for; `ended` once there are no more."""

    def __init__(self, pieces: Generator[None, None, Result]) -> None:
        self.ended = False
        self._pieces = pieces
        self._result: list[Result] = []
        self._error: Exception = GenerationError("a piece of this was interrupted in another thread")

    def advance(self) -> bool:
        """Run a piece; return whether it was the last."""
        try:
            next(self._pieces)
        except StopIteration as end:
            self.ended, self._result = True, [end.value]
        except Exception as error:
            self.ended, self._error = True, error
        except BaseException:
            self.ended = True
            raise
        return self.ended

    def result(self) -> Result:
        """What the pieces returned; or raise what they did."""
        if not self._result:
            raise self._error
        return self._result[0]


_drivers: WeakSet[Driver] = WeakSet()
_held: list[Driver] = []  # while a fork is under way


def _before_fork() -> None:
    """Wait for the steps under way: a child would find half of them done, and their locks held for ever."""
    _held[:] = list(_drivers)
    for driver in _held:
        driver.wanted = True
        driver.lock.acquire()


def _after_fork(in_child: bool) -> None:
    for driver in _held:
        if in_child:
            driver.after_fork()
        driver.wanted = driver.closed
        driver.lock.release()
    _held.clear()


os.register_at_fork(
    before=_before_fork,
    after_in_parent=lambda: _after_fork(False),
    after_in_child=lambda: _after_fork(True),
)
