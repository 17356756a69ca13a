"""Dot products of bytes: every rung's instructions, compiled for the CPUs that have them; exact where they can run."""

import ctypes

import llvmlite.binding as llvm
import numpy as np
import pytest
from llvmlite import ir

from ropewalk.kernels.cpu import RUNGS, cpu_features, refusal
from ropewalk.kernels.dot import emit_dot4
from ropewalk.kernels.simd import bytes64, ints

VECTOR_RUNGS = [rung for rung in RUNGS if rung != "amx"]
CPUS = {  # a CPU of each rung, its architecture, and an instruction that must be there
    "vnni": ("x86_64", "cascadelake", "vpdpbusd"),
    "avxvnni": ("x86_64", "alderlake", "vpdpbusd"),
    "avx2": ("x86_64", "haswell", "vpmaddubsw"),
    "i8mm": ("aarch64", "neoverse-v1", "usdot"),
    "dotprod": ("aarch64", "neoverse-n1", "sdot"),
    "portable": ("aarch64", "cortex-a53", "mla"),
}


def dot_module(rung, wide, triple):
    """LLVM code of `void dot(int32 acc[16], uint8 u[64], int8 x[64])`."""
    module = ir.Module()
    module.triple = triple
    pointers = [t.as_pointer() for t in (ints.ir, bytes64.ir, bytes64.ir)]
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), pointers), "dot")
    builder = ir.IRBuilder(function.append_basic_block())
    acc, u, x = (builder.load(pointer) for pointer in function.args)
    builder.store(emit_dot4(builder, rung, acc, u, x, wide), function.args[0])
    builder.ret_void()
    return llvm.parse_assembly(str(module))


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("rung", VECTOR_RUNGS)
def test_a_cpu_of_the_rung_has_the_instructions(rung, wide):
    """LLVM ends the process if it has to emit what the CPU does not have."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    architecture, cpu, instruction = CPUS[rung]
    triple = f"{architecture}-unknown-linux-gnu"
    machine = llvm.Target.from_triple(triple).create_target_machine(cpu=cpu)
    assert instruction in machine.emit_assembly(dot_module(rung, wide, triple))


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("rung", VECTOR_RUNGS)
def test_sums_are_exact(rung, wide):
    # AVX-512 has the very instruction of AVX-VNNI in an encoding of its own, which LLVM takes where it can.
    if (why := refusal(rung)) and not (rung == "avxvnni" and {"avx512vnni", "avx512vl"} <= cpu_features()):
        pytest.skip(f"{rung} cannot run here: {why}")
    rng = np.random.default_rng(5)
    u = rng.integers(0, 256 if wide else 128, 64).astype(np.uint8)
    x = rng.integers(-127, 128, 64).astype(np.int8)
    u[:4], x[:4], u[4:8], x[4:8] = (255 if wide else 127), 127, (255 if wide else 127), -127
    acc = rng.integers(-1000, 1000, 16).astype(np.int32)
    expected = acc + (u.astype(np.int64) * x).reshape(16, 4).sum(1)
    triple = llvm.get_process_triple()
    machine = llvm.Target.from_triple(triple).create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten()
    )
    engine = llvm.create_mcjit_compiler(dot_module(rung, wide, triple), machine)
    engine.finalize_object()
    aligned = [np.zeros(a.nbytes + 64, np.uint8) for a in (acc, u, x)]
    views = []
    for room, a in zip(aligned, (acc, u, x), strict=True):
        start = -room.ctypes.data % 64
        view = room[start : start + a.nbytes].view(a.dtype)
        view[:] = a
        views.append(view)
    dot = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 3)(engine.get_function_address("dot"))
    dot(*(view.ctypes.data for view in views))
    assert views[0].tolist() == expected.tolist()
