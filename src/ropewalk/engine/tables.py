"""The page tables of requests: pages on demand, shared beginnings, copies on write.

A request holds exactly the pages of its computed positions, so it wastes less than one. The table grows just
before a step (`extend`) and counts as computed just after it (`commit`); `reuse` instead takes over pages that are
computed already, of the prefix cache or of a relative that begins with the same tokens: another completion of the
prompt, or a fork. A page is written only while one table lists it and the prefix cache does not keep it; otherwise
`extend` puts a copy in its place first.

This is the one place that moves a request's `n_computed`. It does not decide who runs.
"""

from __future__ import annotations

from collections.abc import Iterable

from ropewalk.backend.base import PAGE_SIZE
from ropewalk.engine.pages import PagePool, pages_for
from ropewalk.engine.persist import Shelf
from ropewalk.engine.prefix import Node, PrefixCache
from ropewalk.engine.request import Request


class PageTables:
    """Tables over one pool.

    Parameters
    ----------
    pool : PagePool
    prefix : PrefixCache, optional
        Where full pages are kept for later requests.
    shelf : Shelf, optional
        Where they are kept for later processes; not without `prefix`.
    """

    def __init__(self, pool: PagePool, prefix: PrefixCache | None = None, shelf: Shelf | None = None) -> None:
        self.pool = pool
        self.prefix = prefix
        self.shelf = shelf
        self._copies: list[tuple[int, int]] = []

    def reuse(self, request: Request, *, from_disk: bool = False) -> int:
        """Take over pages with the next tokens of a request; return how many tokens that spares.

        The last known token is always left to be computed, since its logits are not kept, and so is all of a prompt
        that is scored. With `from_disk` free pages are filled with what was kept there.
        """
        before = request.n_computed
        if before % PAGE_SIZE == 0 and not request.n_unscored:
            self._reuse_kept(request, from_disk)
            self._reuse_shared(request)
        return request.n_computed - before

    def _reuse_kept(self, request: Request, from_disk: bool) -> None:
        """Take over what the prefix cache has, page after page."""
        if self.prefix is None:
            return
        nodes, pages = list(request.nodes), request.pages
        for i in range(len(nodes), request.n_window // PAGE_SIZE):
            parent = nodes[-1] if nodes else None
            node = self.prefix.find(parent, request.block(i))
            if node is not None:
                self.pool.share([node.page])
            elif not from_disk or (node := self._load(request, i, parent)) is None:
                break
            pages.append(node.page)
            nodes.append(node)
        request.n_computed = max(request.n_computed, min(len(nodes) * PAGE_SIZE, request.n_window - 1))
        request.nodes = nodes[: request.n_computed // PAGE_SIZE]

    def _load(self, request: Request, i: int, parent: Node | None) -> Node | None:
        """Bring page i of a request from the disk, if it is there and a page of the pool is free."""
        if self.shelf is None or self.prefix is None or not self.pool.n_free:
            return None
        block = request.block(i)
        contents = self.shelf.store.load(self.prefix.key(parent, block), i, request.text(i))
        if contents is None:
            return None
        (page,) = self.pool.allocate(1)
        if self._copies:  # the page may be the source of one
            self.shelf.cache.copy_pages(self.take_copies())
        self.shelf.cache.write_page(page, contents)
        if request.is_new:
            request.n_from_disk += PAGE_SIZE
        return self.prefix.add(parent, block, page)

    def note_use(self, request: Request) -> None:
        """Tell the disk which of its pages a request uses."""
        if self.shelf is not None:
            self.shelf.store.mark([node.key for node in request.nodes])

    def _reuse_shared(self, request: Request) -> None:
        """Take over what a relative has computed of the same tokens, the page in which they part included.

        Where there is a prefix cache it has all other pages, so `nodes` is complete already.
        """
        others = [other for other in request.family if other is not request and other.pages]
        if not others:
            return
        other = max(others, key=request.common)
        if (common := request.common(other)) > request.n_computed:
            pages = other.pages[len(request.pages) : pages_for(common)]
            self.pool.share(pages)
            request.pages += pages
            request.n_computed = common

    def missing(self, request: Request, n_pages: int) -> int:
        """Return how many free pages it takes until a request has `n_pages`, the last of them its own to write.

        A page that the prefix cache keeps is free in exchange for its copy, or is taken from the cache: only a
        page that another table lists costs one more.
        """
        copied = request.n_computed % PAGE_SIZE and self.pool.is_shared(request.pages[-1])
        return n_pages - len(request.pages) + bool(copied)

    def extend(self, request: Request, n_tokens: int) -> bool:
        """Make room for positions n_computed ... n_tokens - 1; return False if there are too few free pages."""
        if self.missing(request, pages_for(n_tokens)) > self.pool.n_free:
            return False
        if request.n_computed % PAGE_SIZE and not self.pool.is_private(request.pages[-1]):
            source = request.pages.pop()
            self.pool.release([source])
            (target,) = self.pool.allocate(1)
            request.pages.append(target)
            if target != source:  # else it was the last free page, and is not kept any more
                self._copies.append((source, target))
        request.pages += self.pool.allocate(pages_for(n_tokens) - len(request.pages))
        return True

    def take_copies(self) -> list[tuple[int, int]]:
        """Return the (source, target) pages to be copied, in this order, before anything else is written."""
        copies, self._copies = self._copies, []
        return copies

    def commit(self, request: Request, count: int) -> None:
        """Count the next `count` positions as computed, and keep the pages that this fills.

        A page of the same contents that is kept already takes the place of the request's own.
        """
        request.n_computed += count
        if self.prefix is None:
            return
        for i in range(len(request.nodes), request.n_computed // PAGE_SIZE):
            parent, own = request.nodes[-1] if i else None, request.pages[i]
            node = self.prefix.find(parent, request.block(i))
            if node is None:
                node = self.prefix.add(parent, request.block(i), own)
                if self.shelf is not None:
                    self.shelf.save(node.key, i, request.text(i), own)
            else:
                self.pool.share([node.page])
                self.pool.release([own])
                request.pages[i] = node.page
            request.nodes.append(node)

    def trim(self, request: Request) -> None:
        """Give back pages that were made room for and then not needed: those of wrong guesses."""
        n_pages = pages_for(request.n_computed)
        self.pool.release(request.pages[n_pages:])
        del request.pages[n_pages:]

    def drop(self, request: Request) -> None:
        """Give up all pages; what the request needs of them has to be computed, or found, again."""
        self.pool.release(request.pages)
        request.pages, request.nodes, request.n_computed = [], [], 0

    def check(self, requests: Iterable[Request]) -> None:
        """Prove the promises of this module between steps; raises AssertionError."""
        requests = list(requests)
        self.pool.check([request.pages for request in requests])
        assert not self._copies, "pages that were not copied"
        for request in requests:
            assert len(request.pages) == pages_for(request.n_computed)
            assert [node.page for node in request.nodes] == request.pages[: len(request.nodes)]
            assert len(request.nodes) == (request.n_computed // PAGE_SIZE if self.prefix else 0)
        if self.prefix is not None:
            self.prefix.check()
