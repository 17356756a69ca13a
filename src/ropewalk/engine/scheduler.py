"""Which tokens run in the next step: continuous batching, first come first served.

A request joins as soon as there is room in the batch and pages for the longest it can become, so nothing that
runs can ever run out of pages. A step has a budget of tokens: every request that decodes gets its one token
first, the rest goes to prompts in order of arrival, in chunks. So a long prompt delays its neighbours' tokens
by at most one budget a step, and since the budget is no smaller than the batch, prompts always advance.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from ropewalk.engine.pages import PagePool
from ropewalk.engine.request import Request
from ropewalk.errors import InvalidParameterError


@dataclass(frozen=True)
class Chunk:
    """The next `count` pending tokens of a request."""

    request: Request
    count: int


class Scheduler:
    """Waiting and running requests over one pool of pages.

    Parameters
    ----------
    pool : PagePool
    max_batch : int
        Most requests that run at the same time, at least 1.
    token_budget : int
        Most tokens in one step, at least `max_batch`.
    """

    def __init__(self, pool: PagePool, *, max_batch: int, token_budget: int) -> None:
        if max_batch < 1:
            raise InvalidParameterError(f"max_batch is {max_batch}; allowed: at least 1")
        if token_budget < max_batch:
            raise InvalidParameterError(
                f"token_budget is {token_budget}; allowed: at least max_batch, which is {max_batch}"
            )
        self.pool = pool
        self.max_batch = max_batch
        self.token_budget = token_budget
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    def add(self, request: Request) -> None:
        """Put a request at the end of the queue."""
        self.waiting.append(request)

    def remove(self, request: Request) -> None:
        """Take a request out, waiting or running, and free its pages."""
        (self.running if request in self.running else self.waiting).remove(request)
        self.pool.release(request.pages)
        request.pages = []

    def schedule(self) -> list[Chunk]:
        """Admit what fits, then share out the budget. Empty only if there are no requests."""
        self._admit()
        decoding = [request for request in self.running if request.n_pending == 1]
        chunks = [Chunk(request, 1) for request in decoding]
        left = self.token_budget - len(decoding)
        for request in self.running:
            if request.n_pending > 1 and left > 0:
                count = min(request.n_pending, left)
                chunks.append(Chunk(request, count))
                left -= count
        return chunks

    def _admit(self) -> None:
        while (
            self.waiting
            and len(self.running) < self.max_batch
            and self.waiting[0].pages_at_most <= self.pool.n_free
        ):
            request = self.waiting.popleft()
            request.pages = self.pool.allocate(request.pages_at_most)
            self.running.append(request)

    def tables(self) -> Iterable[list[int]]:
        """Page tables of all requests."""
        return [request.pages for request in (*self.running, *self.waiting)]

    def check(self) -> None:
        """Prove the promises of this module; raises AssertionError."""
        self.pool.check(self.tables())
        assert len(self.running) <= self.max_batch
        assert len({request.id for request in (*self.running, *self.waiting)}) == len(self.running) + len(
            self.waiting
        ), "a request is queued twice"
        for request in self.running:
            assert len(request.pages) == request.pages_at_most
            assert 0 <= request.n_computed < request.n_tokens <= len(request.tokens)
            assert request.finish_reason is None
        for request in self.waiting:
            assert not request.pages
            assert request.n_computed == 0
        assert [r.id for r in self.waiting] == sorted(r.id for r in self.waiting), (
            "not first come first served"
        )
