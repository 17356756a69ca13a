"""Who holds which page of the KV cache: reference counts, and the order in which pages are handed out.

A page is `PAGE_SIZE` consecutive positions of one sequence. A sequence's page table is the list of its pages
in order; a page that several tables list is counted once for each.

Every page is in one of three states. *Used*: at least one table lists it. *Idle*: none does, but its contents are
kept, because the prefix cache can still hand it out. *Blank*: none does, and nobody needs its contents. Blank and
idle pages together are free. `allocate` takes blank ones first, then the idle page that was released longest ago.
Tables are released from their ends, so a page that another one builds on is always idle for less long than that
one: evicting the least recently used page never takes a page from under its successors.

Knows page numbers only: what is stored in a page, and where, is the backend's business.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from ropewalk.backend.base import PAGE_SIZE


def pages_for(n_tokens: int) -> int:
    """Pages that hold this many tokens."""
    return -(-n_tokens // PAGE_SIZE)


class PagePool:
    """Pages 0 ... n_pages - 1, each free or held by at least one table.

    Parameters
    ----------
    n_pages : int
        At least 1.

    Attributes
    ----------
    on_evict : callable (page: int), optional
        Told before an idle page is handed out; its contents are lost from then on.
    births : list of int [n_pages]
        How often each page was allocated: what somebody knows of a page's contents ends with its next birth.
    """

    def __init__(self, n_pages: int) -> None:
        self.n_pages = n_pages
        self.on_evict: Callable[[int], object] = lambda page: None
        self._blank = list(range(n_pages))[::-1]  # the last is handed out first
        self._idle: dict[int, None] = {}  # in order of release
        self._kept: set[int] = set()
        self._counts = [0] * n_pages
        self.births = [0] * n_pages

    @property
    def n_free(self) -> int:
        """Pages that no table lists, blank and idle."""
        return len(self._blank) + len(self._idle)

    @property
    def n_used(self) -> int:
        """Pages that at least one table lists."""
        return self.n_pages - self.n_free

    @property
    def n_idle(self) -> int:
        """Free pages whose contents are kept."""
        return len(self._idle)

    def is_shared(self, page: int) -> bool:
        """Whether several tables list it."""
        return self._counts[page] > 1

    def is_private(self, page: int) -> bool:
        """Whether one table lists it and nobody else needs its contents: only then may it be written."""
        return self._counts[page] == 1 and page not in self._kept

    def allocate(self, n: int) -> list[int]:
        """Take n free pages, each with one reference. The caller has made sure that there are enough."""
        if n > self.n_free:
            raise ValueError(f"{n} pages wanted, {self.n_free} of {self.n_pages} are free")
        pages = [self._blank.pop() if self._blank else self._evict() for _ in range(n)]
        for page in pages:
            self._counts[page] = 1
            self.births[page] += 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Add one reference to each of these pages, used or idle, for another table that lists them."""
        for page in pages:
            if self._counts[page] == 0:
                if page not in self._idle:
                    raise ValueError(f"page {page} is free and cannot be shared")
                del self._idle[page]
            self._counts[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Drop one reference to each page of a table or of its end, the last page first."""
        for page in reversed(pages):
            if self._counts[page] == 0:
                raise ValueError(f"page {page} is free already")
            self._counts[page] -= 1
            if self._counts[page] == 0:
                if page in self._kept:
                    self._idle[page] = None
                else:
                    self._blank.append(page)

    def keep(self, page: int) -> None:
        """Keep the contents of a used page beyond its last release, until it is evicted."""
        if self._counts[page] == 0:
            raise ValueError(f"page {page} is free and cannot be kept")
        self._kept.add(page)

    def _evict(self) -> int:
        page = next(iter(self._idle))
        self.on_evict(page)
        del self._idle[page]
        self._kept.remove(page)
        return page

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Prove that free + used = total and that the counts are those of the tables.

        Raises
        ------
        AssertionError
            Naming a page that is lost, freed twice, or counted wrongly.
        """
        listed = Counter(page for table in tables for page in table)
        free = Counter([*self._blank, *self._idle])
        for page in range(self.n_pages):
            assert free[page] == (self._counts[page] == 0), (
                f"page {page} has {self._counts[page]} references and is {free[page]} times in the free list"
            )
            assert self._counts[page] == listed[page], (
                f"page {page} has {self._counts[page]} references and is in {listed[page]} tables"
            )
        assert free.total() + sum(count > 0 for count in self._counts) == self.n_pages
        assert set(free) | set(listed) <= set(range(self.n_pages)), "a page outside the pool"
        assert set(self._idle) <= self._kept, "a page is idle and not kept"
        assert not self._kept & set(self._blank), "a page is kept and blank"
