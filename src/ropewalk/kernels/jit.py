"""Compilation: the one place that owns Numba's flags.

`kernel` compiles a function that Python or another kernel calls; `worker` compiles a C-callable function
whose address goes into a table, so that a kernel can be picked at run time without compiling its caller
again. Neither uses `fastmath`: a reordered sum would change bits from one CPU to the next. Compiled code is kept
on disk by `kernels.cache`.
"""

from collections.abc import Callable
from typing import Any

import numba

from ropewalk.kernels.cache import KernelCache

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
    dispatcher._cache = KernelCache(py_func)
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
        compiled._cache = KernelCache(py_func)
        compiled.compile()
        _keep.append(compiled)
        return int(compiled.address)

    return compile_now


_keep: list[Any] = []  # compiled workers live as long as the process: tables hold their addresses
