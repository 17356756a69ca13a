"""Compiled kernels on disk: where they are, when they are still the right ones, and how they are written.

They are kept per user in a folder whose name is a hash of all kernel sources, the CPU, the rung of `kernels.cpu`
and the library versions, so nothing in it can be out of date. Each compiled function is a file of its own, whose
name says what it was compiled for: processes that start at the same time write the same bytes to the same names.
(Numba's own cache numbers its files, so two processes can give one number to different functions.)

    kernels/<hash>/<module>.<function>-<hash of signature, CPU and closure>.nbc = SHA-256 of the rest, pickled code
"""

import contextlib
import hashlib
import logging
import os
import pickle
import re
import secrets
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite
import numba
from numba.core.caching import _Cache
from numba.core.compiler import CompileResult
from numba.core.serialize import dumps

from ropewalk.kernels.cpu import choose_rung, cpu_identity

log = logging.getLogger("ropewalk")

UNUSED_S = 30 * 24 * 3600
"""A folder of kernels that no process asked for in so many seconds is removed when a new one is made."""

_SOURCE_FOLDER = Path(__file__).parent


def source_hash(folder: Path = _SOURCE_FOLDER, rung: str | None = None) -> str:
    """Hash of all that decides what the compiled kernels are: sources in `folder`, versions, CPU and rung (default:
    the one in use)."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    for fact in (
        numba.__version__,
        llvmlite.__version__,
        sys.version,
        *cpu_identity(),
        rung or choose_rung().name,
    ):
        digest.update(b"\0" + fact.encode())
    return digest.hexdigest()[:20]


@cache
def cache_folder(rung: str | None = None) -> Path:
    """The folder of compiled kernels; a temporary one, with one log line, where the user's is not writable.

    `rung` asks for another rung's folder than that of the one in use.
    """
    base = os.environ.get("ROPEWALK_HOME") or str(
        Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "ropewalk"
    )
    wanted = Path(base) / "kernels" / source_hash(rung=rung)
    try:
        _open_folder(wanted)
    except OSError as error:
        if any(wanted.glob("*.nbc")):  # filled earlier, now read-only: good enough to load from
            return wanted
        spare = _private_temporary_folder() / wanted.name
        log.warning(
            "compiled kernels go to %s, because %s cannot be written: %s", spare, wanted, error.strerror
        )
        _open_folder(spare)
        return spare
    return wanted


def cache_bytes() -> tuple[int, int]:
    """Bytes of the compiled kernels in use, and of those in all folders beside them."""
    used, everything = 0, 0
    for path in cache_folder().parent.glob("*/*.nbc"):
        with contextlib.suppress(OSError):  # another process may be removing it
            size = path.stat().st_size
            everything += size
            used += size if path.parent == cache_folder() else 0
    return used, everything


def _open_folder(folder: Path) -> None:
    """Make the folder if need be, then remove old ones; mark it as used; OSError where it cannot be written."""
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        os.utime(folder)
    if is_new:
        _remove_unused(folder)


def _remove_unused(new: Path) -> None:
    """Remove the folders beside `new` that were made for other sources, versions or CPUs and are not used any more."""
    for folder in new.parent.iterdir():
        if folder == new or not re.fullmatch("[0-9a-f]{20}", folder.name):
            continue
        with contextlib.suppress(OSError):
            if not folder.is_symlink() and time.time() - folder.stat().st_mtime > UNUSED_S:
                shutil.rmtree(folder, ignore_errors=True)


def _private_temporary_folder() -> Path:
    """A folder for this user below the system's temporary one.

    Raises
    ------
    PermissionError
        Somebody else made it, or may write to it: code is loaded from there.
    """
    folder = Path(tempfile.gettempdir()) / f"ropewalk-kernels-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise PermissionError(
            f"{folder} is not this user's alone: remove it, or set ROPEWALK_HOME to a folder that can be written"
        )
    return folder


class KernelCache(_Cache):
    """Numba's interface to a cache, for one function of any signature."""

    def __init__(self, py_func: Callable[..., Any]) -> None:
        self._py_func = py_func

    @property
    def cache_path(self) -> str:
        return str(cache_folder())

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """The compiled function, or None: not there, cut short, or not readable."""
        target_context.refresh()
        path = self._path(sig, target_context.codegen())
        try:
            content = path.read_bytes()
        except OSError:
            return None
        checksum, payload = content[:32], content[32:]
        if hashlib.sha256(payload).digest() != checksum:
            log.warning("%s is damaged: compiling it again", path)
            return None
        return CompileResult._rebuild(target_context, *pickle.loads(payload))

    def save_overload(self, sig: Any, data: Any) -> None:
        """Write it under another name first: a reader sees all of a file or none of it."""
        path = self._path(sig, data.codegen)
        payload = dumps(data._reduce())
        temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
        try:
            with temporary.open("xb") as file:
                file.write(hashlib.sha256(payload).digest() + payload)
            temporary.replace(path)
        except OSError as error:  # a full disk or a read-only folder costs time, not the run
            with contextlib.suppress(OSError):
                temporary.unlink()
            _warn_once(path.parent, error.strerror)

    def _path(self, sig: Any, codegen: Any) -> Path:
        """Named by signature, CPU, and what the function closes over: numbers, and other kernels by name."""
        cells = [cell.cell_contents for cell in self._py_func.__closure__ or ()]
        closure = [c if isinstance(c, int) else c.py_func.__qualname__ for c in cells]
        key = hashlib.sha256(repr((str(sig), codegen.magic_tuple(), closure)).encode()).hexdigest()[:20]
        name = f"{self._py_func.__module__.rpartition('.')[2]}.{self._py_func.__qualname__}"
        return cache_folder() / f"{name.replace('<locals>.', '')}-{key}.nbc"

    def enable(self) -> None:
        """Nothing to do: this cache is always on."""

    def disable(self) -> None:
        """Nothing to do: this cache is always on."""

    def flush(self) -> None:
        """Nothing to do: a file cannot be out of date."""


@cache
def _warn_once(folder: Path, error: str) -> None:
    log.warning("compiled kernels cannot be kept in %s: %s", folder, error)
