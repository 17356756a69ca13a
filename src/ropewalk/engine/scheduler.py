"""Which tokens run in the next step: continuous batching by rank, with pages on demand.

Requests are ranked by priority, then by arrival. The first in rank that waits joins as soon as there is room in the
batch and there are pages for its known tokens and one page more, beyond what those that run will need so soon; nobody
overtakes it. When pages run out all the same, the last in rank gives up its pages and waits. It continues later by
computing them again, or finding them in the prefix cache, and since the model gives the same bits whatever shares a
step, it continues with the same tokens.

A step has a budget of tokens. Every request that decodes gets its one token, the rest goes to prompts in chunks: half
of it to the first in rank, the other half to the shortest first. So a long prompt delays its neighbours' tokens by at
most one budget a step, a short one that comes after it is read beside it, and since the budget is no smaller than the
batch, the first in rank always advances, at half its speed or more. Prompts that are scored have so many tokens in a
step together as it may have rows of logits for them; they get these in order of rank.

The first in rank never waits for pages: all others would give up theirs first, and a sequence longer than the pool
is refused before it gets here. So every step computes something, and everybody ends.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass
from operator import attrgetter

from ropewalk.engine.request import Request
from ropewalk.engine.tables import PageTables
from ropewalk.errors import InvalidParameterError

MAX_SCORED = 64
"""Tokens of prompts that are scored in one step: the backend keeps room for their logits, 1 MB each at most."""
_BY_RANK = attrgetter("rank")


@dataclass(frozen=True)
class Chunk:
    """The next `count` pending tokens of a request, then guesses of those after them (see `engine.speculative`)."""

    request: Request
    count: int
    guesses: tuple[int, ...] = ()


class Scheduler:
    """Waiting and running requests over the pages of one pool.

    Parameters
    ----------
    tables : PageTables
    max_batch : int
        Most requests that run at the same time, at least 1.
    token_budget : int
        Most tokens in one step, at least `max_batch`.

    Attributes
    ----------
    waiting, running : list of Request
        In order of rank.
    n_preempted : int
        How often a request had to give up its pages.
    """

    def __init__(self, tables: PageTables, *, max_batch: int, token_budget: int) -> None:
        if max_batch < 1:
            raise InvalidParameterError(f"max_batch is {max_batch}; allowed: at least 1")
        if token_budget < max_batch:
            raise InvalidParameterError(
                f"token_budget is {token_budget}; allowed: at least max_batch, which is {max_batch}"
            )
        self.tables = tables
        self.max_batch = max_batch
        self.token_budget = token_budget
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.n_preempted = 0

    def add(self, request: Request) -> None:
        """Put a request into the queue."""
        insort(self.waiting, request, key=_BY_RANK)

    def remove(self, request: Request) -> None:
        """Take a request out, waiting or running, and free its pages."""
        (self.running if request in self.running else self.waiting).remove(request)
        self.tables.note_use(request)
        self.tables.drop(request)

    def schedule(self) -> list[Chunk]:
        """Admit what fits, then share out the budget. Empty only if there are no requests.

        Whoever is preempted comes later in rank than everybody who has got a chunk already.
        """
        self._admit()
        prompts = [request for request in self.running if request.n_pending > 1]
        counts = dict.fromkeys(self.running, 1)
        for request in prompts:
            self._reuse(request)
        counts |= _shares(prompts, self.token_budget - (len(self.running) - len(prompts)))
        chunks = []
        for index, request in enumerate(tuple(self.running)):
            if index >= len(self.running):
                break
            if (count := counts[request]) and self._make_room(request, count):
                chunks.append(Chunk(request, count))
        return chunks

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.max_batch:
            request = self.waiting[0]
            if self._prompt_is_under_way(request):
                return
            found = self.tables.reuse(request)
            if self._missing(request) > self.tables.pool.n_free - sum(map(self._missing, self.running)):
                self.tables.drop(request)
                return
            self._count(request, found)
            insort(self.running, request, key=_BY_RANK)
            del self.waiting[0]

    def _missing(self, request: Request) -> int:
        return self.tables.missing(request, request.pages_soon)

    def _prompt_is_under_way(self, request: Request) -> bool:
        """Whether a relative of the same prompt is about to have pages that this one can share."""
        return any(r in self.running and r.n_computed < r.n_prompt - 1 for r in request.family)

    def _reuse(self, request: Request) -> None:
        self._count(request, self.tables.reuse(request, from_disk=True))

    def _count(self, request: Request, n_found: int) -> None:
        if request.is_new:
            request.n_cached = min(request.n_cached + n_found, request.n_prompt)

    def _make_room(self, request: Request, count: int) -> bool:
        """Get the pages for a chunk, from the last in rank if need be; False if that is the request itself."""
        while not self.tables.extend(request, request.n_computed + count):
            assert len(self.running) > 1, "a request does not fit into the pool"
            victim = self.running[-1]
            self.tables.drop(victim)
            victim.n_preempted += 1
            self.n_preempted += 1
            insort(self.waiting, victim, key=_BY_RANK)
            del self.running[-1]
            if victim is request:
                return False
        return True

    def check(self) -> None:
        """Prove the promises of this module; raises AssertionError."""
        self.tables.check([*self.running, *self.waiting])
        assert len(self.running) <= self.max_batch
        for requests in (self.running, self.waiting):
            assert requests == sorted(requests, key=_BY_RANK), "out of order"
        everybody = [*self.running, *self.waiting]
        assert len(set(everybody)) == len(everybody), "a request is queued twice"
        for request in everybody:
            assert request.finish_reason is None
            assert request.pages or request in self.running or not request.n_computed
            assert 0 <= request.n_computed < request.n_window < len(request.window)
            assert request.slide is None or request.n_window < request.slide.context_length
        for request in self.waiting:
            assert not request.pages, "a waiting request holds pages"


def _shares(prompts: list[Request], budget: int) -> dict[Request, int]:
    """Tokens of each prompt in a step: of prompts of the same priority the shortest first, after half for the first."""
    counts, most, rows = dict.fromkeys(prompts, 0), {}, MAX_SCORED
    for request in prompts:
        most[request] = min(request.n_pending, rows) if request.n_unscored else request.n_pending
        rows -= most[request] if request.n_unscored else 0
    if prompts:
        counts[prompts[0]] = min(most[prompts[0]], -(-budget // 2))
    left = budget - sum(counts.values())
    for request in sorted(prompts, key=lambda request: (request.rank[0], request.n_pending)):
        more = min(most[request] - counts[request], left)
        counts[request] += more
        left -= more
    return counts
