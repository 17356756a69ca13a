"""The user's cache folder, and how files get into it whole or not at all.

    $ROPEWALK_HOME, or `ropewalk` in the platform's cache folder for this user
      models/       finished models; a file that is there is complete and was checked
      downloads/    work in progress, one folder and one lock file for each model

A file is written in `downloads`, checked, flushed to disk, and moved to `models` by one rename, so a crash at
any moment leaves at worst some work in progress. This module does not know where files come from.
"""

import contextlib
import hashlib
import os
import shutil
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from ropewalk.errors import DownloadError

_CHUNK_BYTES = 1 << 22
_POLL_S = 0.1


class Progress(Protocol):
    """Called now and then while something is fetched; from another thread at times."""

    def __call__(self, what: str, done: int, total: int) -> None:
        """`what` is happening, and `done` of `total` bytes are there; a total of 0 means unknown."""


def no_progress(what: str, done: int, total: int) -> None:
    """A `Progress` that shows nothing."""


def cache_dir() -> Path:
    """Return the folder for everything that Ropewalk keeps: $ROPEWALK_HOME or the platform's cache folder."""
    if home := os.environ.get("ROPEWALK_HOME"):
        return Path(home).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "ropewalk"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "ropewalk"
    # The XDG specification says that a relative path is to be ignored.
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "ropewalk"


def models_dir() -> Path:
    """The folder of models in the user's cache."""
    return cache_dir() / "models"


@contextlib.contextmanager
def workspace(key: str, progress: Progress) -> Iterator[Path]:
    """Give the folder for fetching the model `key` to one process at a time.

    What is left in the folder at the end is there again next time. Errors of the disk become `DownloadError`s
    that say what to do.
    """
    import fcntl

    folder = cache_dir() / "downloads" / key
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with folder.with_name(folder.name + ".lock").open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                progress(f"waiting for another process that fetches {key}", 0, 0)
                fcntl.flock(lock, fcntl.LOCK_EX)
            folder.mkdir(parents=True, exist_ok=True)
            yield folder
    except DownloadError:
        raise
    except OSError as e:
        raise DownloadError(
            f"cannot write to {cache_dir()}: {e.strerror or e}; make room or give permission there, "
            f"or set ROPEWALK_HOME to another folder"
        ) from e


def require_space(folder: Path, n_bytes: int) -> None:
    """Refuse early when the disk of `folder` has less than `n_bytes` free."""
    free = shutil.disk_usage(folder).free
    if free < n_bytes:
        raise DownloadError(
            f"the disk of {folder} has {free / 1e6:.0f} MB free and {n_bytes / 1e6:.0f} MB are needed; "
            f"make room, or set ROPEWALK_HOME to a folder on another disk"
        )


def sha256(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def join(parts: list[Path], target: Path, what: str, progress: Progress) -> str:
    """Write the concatenation of `parts` to `target`, and return its SHA-256."""
    digest = hashlib.sha256()
    total = sum(p.stat().st_size for p in parts)
    done = 0
    with target.open("wb") as out:
        for part in parts:
            with part.open("rb") as f:
                while block := f.read(_CHUNK_BYTES):
                    digest.update(block)
                    out.write(block)
                    done += len(block)
                    progress(what, done, total)
    return digest.hexdigest()


def publish(source: Path, target: Path) -> None:
    """Flush `source` to the disk, then move it to `target` in one step."""
    with source.open("rb") as f:
        os.fsync(f.fileno())
    target.parent.mkdir(parents=True, exist_ok=True)
    source.replace(target)


@contextlib.contextmanager
def watched(folder: Path, what: str, start: int, size: int, total: int, progress: Progress) -> Iterator[None]:
    """Report the growth of `folder` while the body runs, as `start` plus at most `size` of `total` bytes.

    Some other program writes the files, so their size on the disk is all there is to see.
    """
    before = _bytes_in(folder)
    ended = threading.Event()

    def report() -> None:
        most = 0
        while not ended.wait(_POLL_S):
            most = max(most, min(_bytes_in(folder) - before, size))
            progress(what, start + most, total)

    thread = threading.Thread(target=report, daemon=True)
    progress(what, start, total)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    progress(what, start + size, total)


def _bytes_in(folder: Path) -> int:
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            # Files come and go meanwhile.
            with contextlib.suppress(OSError):
                total += (Path(root) / name).stat().st_size
    return total
