"""The thread that steps an engine for `AsyncEngine`, while there is work, and sleeps while there is none.

What other threads want from it is posted to the driver, and a bell is rung, which wakes it if it sleeps. Both may be
done in a `__del__`, which can interrupt any code at all: neither takes a lock that such code could hold.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import uuid
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue

from ropewalk.driver import TURN_S, Driver
from ropewalk.errors import GenerationError, InvalidParameterError
from ropewalk.generation import Generation, nothing
from ropewalk.mailbox import Mailbox


class Worker:
    """The thread, and the requests that it has.

    Parameters
    ----------
    driver : Driver
    close : callable, optional
        Called by the thread at its end.

    Attributes
    ----------
    mailboxes : dict of request_id to Mailbox
        Of the requests that have not ended. Entered by their callers, taken out by whoever steps.
    error : BaseException or None
        What the thread died of.
    """

    def __init__(self, driver: Driver, close: Callable[[], object] = nothing) -> None:
        self.mailboxes: dict[str, Mailbox] = {}
        self.error: BaseException | None = None
        self._driver, self._close = driver, close
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
        """Whether the thread runs, in this process."""
        stopped = self._stopping or self._over or self._pid != os.getpid()
        return not stopped and self._thread.is_alive()

    def submit(
        self, begin: Callable[[], Generation], request_id: str | None, *, keep_chunks: bool = True
    ) -> Mailbox:
        """Have the thread begin a request; raises InvalidParameterError, or GenerationError if it is not alive."""
        if request_id is None:
            request_id = uuid.uuid4().hex
        elif not isinstance(request_id, str):
            raise InvalidParameterError(f"request_id is {request_id!r}; allowed: a string")
        mailbox = Mailbox(request_id, keep_chunks)
        if self.mailboxes.setdefault(request_id, mailbox) is not mailbox:
            raise InvalidParameterError(f"request_id is {request_id!r}; allowed: one that is not in use")
        self._post(partial(self._begin, mailbox, begin, time.perf_counter()))
        if not self.is_alive:  # asked last: a thread that ends after this ends the request too
            self.mailboxes.pop(request_id, None)
            raise self._refusal()
        return mailbox

    def abort(self, mailbox: Mailbox) -> None:
        """End a request before the next step, unless it has ended."""
        if not mailbox.ended.done():
            self._post(partial(self._abort, mailbox))

    def stop(self) -> None:
        """Let the thread end after the step under way, and all requests with it."""
        self._stopping = True
        if self._pid == os.getpid():
            self._bell.put(None)

    def join(self) -> None:
        """Wait until the thread has ended."""
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
                if self._driver.wanted:
                    time.sleep(TURN_S)
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
        self._close()
        atexit.unregister(self._stop_at_exit)

    # Under the driver's lock, by whichever thread runs the step.

    def _begin(self, mailbox: Mailbox, begin: Callable[[], Generation], arrived_s: float) -> None:
        if mailbox.ended.done():
            return
        try:
            generation = begin()
        except Exception as error:
            mailbox.begun.set_exception(error)
            self._end(mailbox, _caused_by(error))
            return
        for request in generation.requests:
            request.arrived_s = arrived_s
        mailbox.begin(generation)
        generation.on_advance = partial(self._deliver, mailbox)

    def _deliver(self, mailbox: Mailbox) -> None:
        generation = mailbox.generation
        if generation is None or mailbox.ended.done():
            return
        mailbox.put(generation.chunks)
        generation.chunks.clear()
        if (lost_by := generation.lost_by) is not None:
            if not isinstance(lost_by, Exception) and threading.current_thread() is self._thread:
                return  # this thread dies of it, and then ends all requests
            self._end(mailbox, _caused_by(lost_by, "the step that ran the request failed: "))
        elif generation.ended:
            self._end(mailbox, None if generation.error is None else _caused_by(generation.error))

    def _abort(self, mailbox: Mailbox) -> None:
        if not mailbox.ended.done():
            self._end(mailbox, None, aborted=True)

    def _end(self, mailbox: Mailbox, error: BaseException | None, *, aborted: bool = False) -> None:
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
