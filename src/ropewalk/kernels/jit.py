"""Compilation: the one place that owns Numba's flags.

`kernel` compiles a function that Python or another kernel calls; `worker` compiles a C-callable function
whose address goes into a table, so that a kernel can be picked at run time without compiling its caller
again. Neither uses `fastmath`: a reordered sum would change bits from one CPU to the next. Compiled code is kept
on disk by `kernels.cache`.

`inline` makes the parts that both are written with. Numba would optimise each part and make machine code of it before
it is linked into the function that calls it, where all of that is done again, and it would compile a part anew for
each number that somebody passes it. Parts are only translated, once for each set of types.
"""

from collections.abc import Callable
from typing import Any

import numba
from numba import types
from numba._dynfunc import make_function
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import CompilerBase, DefaultPassBuilder
from numba.core.compiler_machinery import PassManager, register_pass
from numba.core.typed_passes import NativeLowering

from ropewalk.kernels.cache import KernelCache


class _PartLibrary(JITCodeLibrary):
    """Code that is there to be linked into other code: as it was translated, and no machine code."""

    def finalize(self) -> None:
        for library in dict.fromkeys(self._linking_libraries):
            self._reload_init.update(library._reload_init)
            self._final_module.link_in(library._get_module_for_linking(), preserve=True)
        self._finalized = True


@register_pass(mutates_CFG=True, analysis_only=False)
class _LowerPart(NativeLowering):
    """Numba's translation to LLVM's language, into a `_PartLibrary`."""

    _name = "lower_part"

    def run_pass(self, state: Any) -> bool:
        codegen = state.targetctx.codegen()
        state.library = _PartLibrary(codegen, state.func_id.func_qualname)
        state.flags.no_compile = True
        super().run_pass(state)
        result, name = state["cr"], state.func_id.func_name
        # What Python would call; here only the key under which callers find the part.
        entry = make_function(result.fndesc.lookup_module(), name, "", 0, result.env, ())
        state.targetctx.insert_user_function(entry, result.fndesc, [state.library])
        state["cr"] = result._replace(cfunc=entry)
        return True


class _PartCompiler(CompilerBase):
    """Numba's compiler with `_LowerPart` in the place of its own translation."""

    def define_pipelines(self) -> list[PassManager]:
        passes = DefaultPassBuilder.define_nopython_pipeline(self.state)
        passes.passes = [
            (_LowerPart if step is NativeLowering else step, what) for step, what in passes.passes
        ]
        passes.finalize()
        return [passes]


_FLAGS: dict[str, Any] = {
    "nopython": True,
    "nogil": True,
    "error_model": "numpy",
    "fastmath": False,
    "boundscheck": False,
}
PART: Any = {  # what Numba is told besides, of parts
    "no_cpython_wrapper": True,
    "no_cfunc_wrapper": True,
    "pipeline_class": _PartCompiler,
}


def kernel(py_func: Callable[..., Any]) -> Any:
    """Compile for calls from Python (without the GIL) and from other kernels, kept on disk."""
    dispatcher = numba.jit(**_FLAGS)(py_func)
    dispatcher._cache = KernelCache(py_func)
    return dispatcher


def inline(py_func: Callable[..., Any]) -> Any:
    """Compile as a part of the kernels that call it; never called from Python and never kept by itself."""
    dispatcher = numba.jit(**_FLAGS, **PART)(py_func)
    resolve = dispatcher.get_call_template
    dispatcher.get_call_template = lambda args, kws: resolve(
        [types.unliteral(a) for a in args], {name: types.unliteral(a) for name, a in kws.items()}
    )
    return dispatcher


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
