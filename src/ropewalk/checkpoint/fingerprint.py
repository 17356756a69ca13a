"""The identity of model files by their contents: SHA-256, computed once for each state of a file.

A digest is kept in the user's cache folder under the file's path, device, inode, size and both times in nanoseconds;
whatever changes a file's contents changes one of these. Only a file that changed within the last moments is hashed
again next time, since a clock that ticks slowly could give two states the same times.

    hashes/<hash of the above> = the digest in hexadecimal

Does not know what the bytes mean.
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import time
from collections.abc import Iterable
from pathlib import Path

from ropewalk.checkpoint.store import cache_dir
from ropewalk.errors import CheckpointError

RECENT_S = 2.0
"""A file that changed so recently has no digest kept."""

Stamp = tuple[tuple[str, int, int, int, int, int], ...]


def stamp(paths: Iterable[Path]) -> Stamp:
    """Return what tells one state of these files from another without reading them; raises OSError."""
    facts = []
    for path in paths:
        s = path.stat()
        facts.append((str(path.resolve()), s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns))
    return tuple(facts)


def fingerprint(expected: Stamp) -> bytes:
    """Return 32 bytes that follow from the contents of the files and nothing else.

    Parameters
    ----------
    expected : Stamp
        Of the files when they were opened.

    Raises
    ------
    CheckpointError
        If a file cannot be read, or is not what it was then.
    """
    whole = hashlib.sha256()
    try:
        for fact in expected:
            path = Path(fact[0])
            kept = cache_dir() / "hashes" / hashlib.sha256(repr(fact).encode()).hexdigest()[:32]
            digest = _kept_digest(kept)
            if digest is None:
                with path.open("rb") as file:
                    digest = hashlib.file_digest(file, "sha256").digest()
                if time.time() - max(fact[4:]) / 1e9 > RECENT_S:
                    _keep(kept, digest)
            whole.update(digest)
        now = stamp(Path(fact[0]) for fact in expected)
    except OSError as error:
        raise CheckpointError(
            f"{error.filename or 'a model file'} cannot be read: {error.strerror}"
        ) from error
    if now != expected:
        changed = next(old[0] for old, new in zip(expected, now, strict=True) if old != new)
        raise CheckpointError(f"{changed} was changed while it was being opened; open it again")
    return whole.digest()


def _kept_digest(path: Path) -> bytes | None:
    try:
        digest = bytes.fromhex(path.read_text("ascii"))
    except (OSError, ValueError):
        return None
    return digest if len(digest) == 32 else None


def _keep(path: Path, digest: bytes) -> None:
    """Keep a digest, where that is possible; a reader sees all of it or nothing."""
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(digest.hex(), "ascii")
        temporary.replace(path)
