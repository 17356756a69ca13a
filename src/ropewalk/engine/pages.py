"""Who holds which page of the KV cache: a free list and reference counts.

A page is `PAGE_SIZE` consecutive positions of one sequence. A sequence's page table is the list of its pages
in order; a page that several tables list is counted once for each. Knows page numbers only: what is stored in
a page, and where, is the backend's business.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

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
    """

    def __init__(self, n_pages: int) -> None:
        self.n_pages = n_pages
        self._free = list(range(n_pages))[::-1]  # the last is handed out first
        self._counts = [0] * n_pages

    @property
    def n_free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    def allocate(self, n: int) -> list[int]:
        """Take n free pages, each with one reference. The caller has made sure that there are enough."""
        if n > len(self._free):
            raise ValueError(f"{n} pages wanted, {len(self._free)} of {self.n_pages} are free")
        pages = [self._free.pop() for _ in range(n)]
        for page in pages:
            self._counts[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Add one reference to each of these pages, for another table that lists them."""
        for page in pages:
            if self._counts[page] == 0:
                raise ValueError(f"page {page} is free and cannot be shared")
            self._counts[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Drop one reference to each of these pages; those without any become free."""
        for page in pages:
            if self._counts[page] == 0:
                raise ValueError(f"page {page} is free already")
            self._counts[page] -= 1
            if self._counts[page] == 0:
                self._free.append(page)

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Prove that free + used = total and that the counts are those of the tables.

        Raises
        ------
        AssertionError
            Naming a page that is lost, freed twice, or counted wrongly.
        """
        listed = Counter(page for table in tables for page in table)
        free = Counter(self._free)
        for page in range(self.n_pages):
            assert free[page] == (self._counts[page] == 0), (
                f"page {page} has {self._counts[page]} references and is {free[page]} times in the free list"
            )
            assert self._counts[page] == listed[page], (
                f"page {page} has {self._counts[page]} references and is in {listed[page]} tables"
            )
        assert free.total() + sum(count > 0 for count in self._counts) == self.n_pages
        assert set(free) | set(listed) <= set(range(self.n_pages)), "a page outside the pool"
