"""Prefix pages on disk: what the prefix cache keeps in memory, kept across restarts.

A page is a file of its own, found by its chained hash, in a folder for everything else that its contents follow from:

    <folder>/pages/<identity>/<first two digits>/<chained hash>.page

    8 bytes     b"RWPAGE1\\n"
    32 bytes    SHA-256 of the identity and of all that follows
    8, 4, 4     bytes of the contents, bytes of the text, number of the page in its sequence; little-endian
    text        its key and its tokens and those of all pages before it
    contents    as `KVCache.read_page` gives them

A hit needs the whole text to be equal, so neither a colliding hash nor anybody's file can pass for another page; and it
needs the checksum, so a torn or damaged file cannot either: it is removed, as if it had never been there. Files are
written under another name and then renamed. Any number of processes may use one folder: they write the same bytes to
the same names, and nobody minds when a file is gone.

Writing is the business of a thread; the engine only copies the page. What the disk refuses is told once and not kept.
When the files outgrow their limit, the least recently used go first, and of those of one time the last of the sequence.

Knows bytes and files. Which pages exist, and what they are for, is the business of `engine.prefix` and `engine.tables`.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import queue
import re
import secrets
import stat
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ropewalk.backend.base import KVCache
from ropewalk.errors import InvalidParameterError

log = logging.getLogger("ropewalk")

MAGIC = b"RWPAGE1\n"
_HEAD = struct.Struct("<8s32sQII")
_NAME = re.compile(r"[0-9a-f]{32}\.page")
_LEFT_OVER = re.compile(r"[0-9a-f]{32}\.page\.[0-9a-f]{16}")

MAX_PENDING_BYTES = 1 << 26
"""Copies of pages that wait to be written; a page that comes when there are more is not kept."""

DEFAULT_DISK_BYTES = 4 << 30
"""Most bytes of all pages in a folder unless something else is said."""

SHARES = 16
"""The folder is looked through whenever so small a part of its limit was written: 1/16."""

MIN_AGE_S = 60.0
"""A page is marked as used again after so long; a file that a dead process left behind is removed then."""

RETRY_S = 60.0
"""After the disk refused a page, so long nothing is written."""


@dataclass(frozen=True)
class Mark:
    """Pages that were used now: their keys, in the order of the sequence."""

    keys: tuple[bytes, ...]


@dataclass(frozen=True, eq=False)
class Record:
    """A page to be written."""

    key: bytes
    index: int
    text: bytes
    contents: NDArray[np.uint8]


class PageStore:
    """The pages of one model and format in a folder.

    Parameters
    ----------
    folder : Path
        Made if it is not there. Nothing in it is touched but what has the names above.
    identity : bytes
        What the contents of pages follow from besides their text.
    page_bytes : int
        Bytes of a page's contents.
    limit_bytes : int
        Most bytes of all pages in the folder, those of other identities included. Several processes that write at the
        same time may exceed it by a sixteenth each.

    Attributes
    ----------
    pages_read, pages_written : int
        So far.

    Raises
    ------
    InvalidParameterError
        If there can be no such folder, or the limit is less than 16 pages.
    """

    def __init__(self, folder: Path, *, identity: bytes, page_bytes: int, limit_bytes: int) -> None:
        if limit_bytes < SHARES * page_bytes:
            raise InvalidParameterError(
                f"cache_dir_size is {limit_bytes} bytes; allowed: at least {SHARES} pages, "
                f"which are {SHARES * page_bytes} bytes"
            )
        self._all = folder / "pages"
        self._identity = identity
        self._mine = self._all / hashlib.sha256(identity).hexdigest()[:32]
        self._page_bytes = page_bytes
        self._limit_bytes = limit_bytes
        self.pages_read = self.pages_written = 0
        try:
            self._all.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.scandir(self._all).close()
        except OSError as error:
            raise InvalidParameterError(
                f"cache_dir is {str(folder)!r}, which cannot be used: {error.strerror}"
            ) from error
        self._queue: queue.SimpleQueue[Record | Mark | threading.Event | None] = queue.SimpleQueue()
        self._pending_bytes = 0
        self._lock = threading.Lock()
        self._told: set[str] = set()
        self._marked: dict[bytes, float] = {}
        self._unchecked_bytes = limit_bytes  # so that the first page makes us look
        self._refused_until = 0.0
        self._thread: threading.Thread | None = None

    def load(self, key: bytes, index: int, text: bytes) -> NDArray[np.uint8] | None:
        """Return the contents of a page, uint8 [page_bytes]; None if it is not there or not sound."""
        path = self._path(key)
        start = _HEAD.size + len(text)
        try:
            data, n_bytes = _read_regular(path, start + self._page_bytes)
        except OSError as error:
            if not isinstance(error, FileNotFoundError):
                self._tell("a page cannot be read", path, error.strerror)
            return None
        if len(data) > 8 and data[:8] not in (MAGIC, bytes(8)):
            self._tell("a file is none of ours and is left alone", path, "it begins differently")
            return None
        if not self._has_sizes(data, n_bytes) or (n_bytes == len(data) and not self._is_sound(data)):
            self._tell("a damaged page is removed", path, "it is cut short, or its checksum is wrong")
            with contextlib.suppress(OSError):
                path.unlink()
            return None
        if (
            n_bytes != start + self._page_bytes
            or data[48:start] != struct.pack("<II", len(text), index) + text
        ):
            return None  # another text of the same hash
        self.pages_read += 1
        return np.frombuffer(data, np.uint8, self._page_bytes, start)

    def save(self, key: bytes, index: int, text: bytes, contents: NDArray[np.uint8]) -> None:
        """Have a page written soon; `contents` must not change any more."""
        with self._lock:
            if self._pending_bytes + contents.nbytes > max(MAX_PENDING_BYTES, contents.nbytes):
                return
            self._pending_bytes += contents.nbytes
        self._put(Record(key, index, text, contents))

    @property
    def wants_pages(self) -> bool:
        """Whether a page given now would be written."""
        return self._pending_bytes < MAX_PENDING_BYTES and time.monotonic() >= self._refused_until

    def mark(self, keys: Sequence[bytes]) -> None:
        """Note that pages were used, the first one of a sequence first."""
        if keys:
            self._put(Mark(tuple(keys)))

    def flush(self) -> None:
        """Wait until everything is written."""
        if self._thread is not None:
            done = threading.Event()
            self._queue.put(done)
            done.wait()

    def close(self) -> None:
        """Write what waits, and end the thread."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None

    # The thread.

    def _put(self, item: Record | Mark) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="ropewalk-pages", daemon=True)
            self._thread.start()
        self._queue.put(item)

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
            else:
                self._do(item)

    def _do(self, item: Record | Mark) -> None:
        if isinstance(item, Mark):
            self._touch(item.keys)
        else:
            self._write(item)
            with self._lock:
                self._pending_bytes -= item.contents.nbytes

    def _write(self, record: Record) -> None:
        if time.monotonic() < self._refused_until:
            return
        path = self._path(record.key)
        head, digest = self._head(record)
        temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
        try:
            if not os.path.lexists(path):
                self._make_room(_HEAD.size + len(record.text) + record.contents.nbytes)
                temporary.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                with temporary.open("xb") as file:
                    file.write(head[:8] + digest + head[8:] + record.text)
                    file.write(record.contents.data)
                temporary.replace(path)
                self.pages_written += 1
            else:
                os.utime(path, follow_symlinks=False)
        except FileNotFoundError:  # another process made room meanwhile: this page, or its folder, is gone
            return
        except OSError as error:
            self._refused_until = time.monotonic() + RETRY_S
            self._tell("pages cannot be kept", self._all, error.strerror)
            with contextlib.suppress(OSError):
                temporary.unlink()

    def _touch(self, keys: Sequence[bytes]) -> None:
        """Mark files as used now, a later page of the sequence a little before those that it builds on."""
        now, tick = time.time_ns(), time.monotonic()
        if all(tick - self._marked.get(key, -MIN_AGE_S) < MIN_AGE_S for key in keys):
            return
        if len(self._marked) > 100_000:
            self._marked.clear()
        for index, key in enumerate(keys):
            self._marked[key] = tick
            with contextlib.suppress(OSError):  # it is gone, or the disk is read-only
                os.utime(self._path(key), ns=(now - 1000 * index,) * 2, follow_symlinks=False)

    def _make_room(self, n_bytes: int) -> None:
        """Now and then, remove the least recently used files beyond the limit."""
        self._unchecked_bytes += n_bytes
        share = self._limit_bytes // SHARES
        if self._unchecked_bytes < share:
            return
        self._unchecked_bytes = n_bytes
        files = sorted(self._files())
        excess = sum(size for _, size, _ in files) - (self._limit_bytes - share)
        for _, size, path in files:
            if excess <= 0:
                return
            with contextlib.suppress(OSError):  # another process was quicker
                path.unlink()
            excess -= size
            if path.parent.parent != self._mine:
                with contextlib.suppress(OSError):  # it is not empty
                    path.parent.rmdir()
                    path.parent.parent.rmdir()

    def _files(self) -> Iterator[tuple[int, int, Path]]:
        """Time of last use, size and path of every page, of all identities; removes what dead processes left."""
        for path in self._all.glob("*/??/*.page*"):
            with contextlib.suppress(OSError):
                status = path.lstat()
                if not stat.S_ISREG(status.st_mode):
                    continue
                if _NAME.fullmatch(path.name):
                    yield status.st_mtime_ns, status.st_size, path
                elif _LEFT_OVER.fullmatch(path.name) and time.time() - status.st_mtime > MIN_AGE_S:
                    path.unlink()

    # Files.

    def _path(self, key: bytes) -> Path:
        name = key.hex().ljust(32, "0")
        return self._mine / name[:2] / f"{name}.page"

    def _head(self, record: Record) -> tuple[bytes, bytes]:
        """All of the head but the checksum, and the checksum."""
        sizes = struct.pack("<QII", record.contents.nbytes, len(record.text), record.index)
        digest = hashlib.sha256(self._identity + sizes + record.text)
        digest.update(record.contents.data)
        return MAGIC + sizes, digest.digest()

    def _has_sizes(self, data: bytes, n_bytes: int) -> bool:
        if len(data) < _HEAD.size:
            return False
        magic, _, n_contents, n_text, _ = _HEAD.unpack_from(data)
        return bool(magic == MAGIC and n_bytes == _HEAD.size + n_text + n_contents)

    def _is_sound(self, data: bytes) -> bool:
        found = hashlib.sha256(self._identity)
        found.update(memoryview(data)[40:])
        return found.digest() == data[8:40]

    def _tell(self, what: str, path: Path, why: str | None) -> None:
        """Warn, once for each kind of trouble."""
        if what not in self._told:
            self._told.add(what)
            log.warning("prefix pages in %s: %s (%s: %s)", self._all, what, path.name, why)


class Shelf:
    """What of one KV cache is on disk: a `PageStore` and the cache that its pages go to and come from."""

    def __init__(self, cache: KVCache, store: PageStore) -> None:
        self.cache = cache
        self.store = store

    def save(self, key: bytes, index: int, text: bytes, page: int) -> None:
        """Keep a page that is full."""
        if self.store.wants_pages:
            self.store.save(key, index, text, self.cache.read_page(page))


def folder_of(cache_dir: str | os.PathLike[str]) -> Path:
    """Return the folder that a caller means; raises InvalidParameterError if it is the name of none."""
    if not isinstance(cache_dir, str | os.PathLike) or not os.fspath(cache_dir):
        raise InvalidParameterError(f"cache_dir is {cache_dir!r}; allowed: the path of a folder, or None")
    return Path(cache_dir).expanduser()


def _read_regular(path: Path, most: int) -> tuple[bytes, int]:
    """Read so much of a file that is one, and tell its size; never wait for a pipe, never follow a link."""
    flags = (
        os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    )
    with os.fdopen(os.open(path, flags), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError(0, "it is no regular file")
        return file.read(most), status.st_size
