"""Compilation: the one place that owns Numba's flags and its on-disk cache.

`kernel` compiles a function that Python or another kernel calls; `worker` compiles a C-callable function
whose address goes into a table, so that a kernel can be picked at run time without compiling its caller
again. Neither uses `fastmath`: a reordered sum would change bits from one CPU to the next.

Compiled code is kept per user in a folder whose name carries a hash of all kernel sources, the CPU, the rung
of `kernels.cpu` and the library versions, because Numba's own cache does not notice an edit in another file.
"""

import hashlib
import logging
import os
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite
import numba
from numba.core.caching import CompileResultCacheImpl, FunctionCache, _CacheLocator

from ropewalk.kernels.cpu import choose_rung, cpu_identity

log = logging.getLogger("ropewalk")

_SOURCE_FOLDER = Path(__file__).parent


def source_hash() -> str:
    """Hash of everything that decides what the compiled kernels are: sources, versions, CPU and rung."""
    digest = hashlib.sha256()
    for path in sorted(_SOURCE_FOLDER.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    for fact in (numba.__version__, llvmlite.__version__, sys.version, *cpu_identity(), choose_rung().name):
        digest.update(b"\0" + fact.encode())
    return digest.hexdigest()[:20]


@cache
def cache_folder() -> Path:
    """The folder of compiled kernels; a temporary one, with one log line, where the user's is not writable."""
    base = os.environ.get("ROPEWALK_HOME") or str(
        Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "ropewalk"
    )
    wanted = Path(base) / "kernels" / source_hash()
    try:
        wanted.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=wanted):
            return wanted
    except OSError as error:
        if any(wanted.glob("*.nbi")):  # filled earlier, now read-only: good enough to load from
            return wanted
        spare = Path(tempfile.gettempdir()) / f"ropewalk-kernels-{os.getuid()}" / source_hash()
        log.warning("compiled kernels go to %s, because %s cannot be written: %s", spare, wanted, error)
        spare.mkdir(parents=True, exist_ok=True, mode=0o700)
        if spare.stat().st_uid != os.getuid():
            raise PermissionError(
                f"{spare} belongs to another user: set ROPEWALK_HOME to a folder of yours"
            ) from error
        return spare


class _Locator(_CacheLocator):
    """Tells Numba where our cache is. The folder's name says what is in it, so there is no stamp to compare."""

    def __init__(self, py_func: Callable[..., Any], py_file: str) -> None:
        pass

    def get_cache_path(self) -> str:
        return str(cache_folder())

    def get_source_stamp(self) -> str:
        return source_hash_once()

    def get_disambiguator(self) -> str:
        return ""

    def ensure_cache_path(self) -> None:
        cache_folder()

    @classmethod
    def from_function(cls, py_func: Callable[..., Any], py_file: str) -> "_Locator":
        return cls(py_func, py_file)


source_hash_once = cache(source_hash)


class _CacheImpl(CompileResultCacheImpl):
    _locator_classes = [_Locator]  # noqa: RUF012 (Numba's own type)


class _KernelCache(FunctionCache):
    _impl_class = _CacheImpl

    def _index_key(self, sig, codegen):
        """Signature, CPU, and what the function closes over: numbers, and other kernels by name.

        Numba's own key pickles what a closure holds, and a pickled kernel is different in each process.
        """
        cells = [cell.cell_contents for cell in self._py_func.__closure__ or ()]
        return (
            sig,
            codegen.magic_tuple(),
            tuple(c if isinstance(c, int) else c.py_func.__qualname__ for c in cells),
        )

    def _save_overload(self, sig, data):
        try:
            super()._save_overload(sig, data)
        except OSError as error:  # a full disk or a read-only folder costs time, not the run
            log.warning("a compiled kernel could not be kept: %s", error)


_FLAGS: dict[str, Any] = {
    "nopython": True,
    "nogil": True,
    "error_model": "numpy",
    "fastmath": False,
    "boundscheck": False,
}


def kernel(py_func: Callable[..., Any]) -> Any:
    """Compile for calls from Python (without the GIL) and from other kernels, kept on disk."""
    dispatcher = numba.jit(**_FLAGS)(py_func)
    dispatcher._cache = _KernelCache(py_func)
    return dispatcher


def inline(py_func: Callable[..., Any]) -> Any:
    """Compile as a part of the kernels that call it; never called from Python and never kept by itself."""
    return numba.jit(**_FLAGS)(py_func)


def worker(signature: Any) -> Callable[[Callable[..., Any]], int]:
    """Compile to C-callable code at once and give its address.

    Parameters
    ----------
    signature : numba signature
        Of integers only, such as `types.void(types.int64, types.int64)`.
    """

    def compile_now(py_func: Callable[..., Any]) -> int:
        from numba.core import sigutils
        from numba.core.ccallback import CFunc

        options = {"error_model": "numpy"}
        compiled: Any = CFunc(py_func, sigutils.normalize_signature(signature), locals={}, options=options)
        compiled._cache = _KernelCache(py_func)
        compiled.compile()
        _keep.append(compiled)
        return int(compiled.address)

    return compile_now


_keep: list[Any] = []  # compiled workers live as long as the process: tables hold their addresses
