"""Which full pages are worth keeping: a tree of pages that later sequences with the same beginning can share.

The keys and values of a page follow from its own tokens, all tokens before it, and whatever else changes the model
(an adapter) or separates its users (a salt). So a page is found by its *block*, the bytes of its tokens, below the
node of the page before it; the rest goes in front of the first block. Nodes are found through a chained hash,

    key of a node = hash(key of its parent, its block)

but a hash is only where to look: a hit needs the same parent and the same bytes, so colliding hashes never matter.

Knows page numbers and bytes. Which pages are idle, and which of them goes first, is the pool's business.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b

from ropewalk.engine.pages import PagePool

Hash = Callable[[bytes, bytes], bytes]


@dataclass(eq=False)
class Node:
    """A page whose contents are kept.

    Attributes
    ----------
    page : int
    block : bytes
        Its tokens; in front of them, if it is the first page of a sequence, whatever else its values follow from.
    parent : Node or None
        The page before it.
    key : bytes
        Chained hash.
    n_children : int
        Kept pages that follow it.
    """

    page: int
    block: bytes
    parent: Node | None
    key: bytes
    n_children: int = 0


def chained_hash(parent: bytes, block: bytes) -> bytes:
    """BLAKE2b (RFC 7693) of a parent's key, which has 16 bytes or none, and a block: 16 bytes, on every machine."""
    return blake2b(parent + block, digest_size=16).digest()


class PrefixCache:
    """The kept pages of one pool.

    Parameters
    ----------
    pool : PagePool
        Tells which page it evicts.
    hash_of : callable (parent's key, block) -> key
        For tests.
    """

    def __init__(self, pool: PagePool, hash_of: Hash = chained_hash) -> None:
        self._pool = pool
        self._hash_of = hash_of
        self._buckets: dict[bytes, list[Node]] = {}
        self._nodes: dict[int, Node] = {}
        pool.on_evict = self._forget

    @property
    def n_pages(self) -> int:
        """Pages whose contents are kept, used or idle."""
        return len(self._nodes)

    def find(self, parent: Node | None, block: bytes) -> Node | None:
        """Return the page with this block after `parent`, or at the beginning of a sequence."""
        for node in self._buckets.get(self.key(parent, block), ()):
            if node.parent is parent and node.block == block:
                return node
        return None

    def add(self, parent: Node | None, block: bytes, page: int) -> Node:
        """Keep a page that is full and used; `find` has not found its block."""
        node = Node(page, block, parent, self.key(parent, block))
        self._pool.keep(page)
        self._nodes[page] = node
        self._buckets.setdefault(node.key, []).append(node)
        if parent is not None:
            parent.n_children += 1
        return node

    def key(self, parent: Node | None, block: bytes) -> bytes:
        """Return the key of a page with this block after `parent`, whether it is kept or not."""
        return self._hash_of(parent.key if parent else b"", block)

    def _forget(self, page: int) -> None:
        node = self._nodes.pop(page)
        assert node.n_children == 0, f"page {page} is evicted from under its successors"
        bucket = self._buckets[node.key]
        bucket.remove(node)
        if not bucket:
            del self._buckets[node.key]
        if node.parent is not None:
            node.parent.n_children -= 1

    def check(self) -> None:
        """Prove that the tree, the buckets and the pool speak of the same pages; raises AssertionError."""
        nodes = list(self._nodes.values())
        assert sorted(id(n) for bucket in self._buckets.values() for n in bucket) == sorted(map(id, nodes))
        assert self._nodes.keys() == self._pool._kept
        children = Counter(id(node.parent) for node in nodes)
        for page, node in self._nodes.items():
            assert node.page == page
            assert node.parent is None or self._nodes[node.parent.page] is node.parent, "an orphan"
            assert node.n_children == children[id(node)]
