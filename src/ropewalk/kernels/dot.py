"""The one instruction that differs between CPUs: sums of four products of bytes.

`emit_dot4(acc, u, x)` adds to lane r of `acc` (16 x int32) the sum of u[4r+i] * x[4r+i], i = 0..3, for unsigned
bytes u and signed bytes x. The sum is exact, so every rung gives the same bits.
"""

from llvmlite import ir

from ropewalk.kernels.simd import I8, I16, I32, emit_call, ints
from ropewalk.kernels.unpack import emit_concatenate, emit_slice


def emit_dot4(builder, rung, acc, u, x, wide):
    """Emit LLVM code for `rung`.

    Parameters
    ----------
    acc, u, x : llvmlite values
        <16 x i32>, <64 x i8> (unsigned), <64 x i8> (signed, magnitudes below 128).
    wide : bool
        Whether u may exceed 127.
    """
    if rung == "vnni":
        return emit_call(builder, "llvm.x86.avx512.vpdpbusd.512", ints.ir, [acc, u, x])
    if rung == "avxvnni":
        return _in_parts(builder, acc, u, x, 32, _vnni_256)
    if rung == "avx2":
        return _in_parts(builder, acc, u, x, 32, _avx2_wide if wide else _avx2)
    if rung == "i8mm":
        return _in_parts(builder, acc, u, x, 16, _arm_mixed)
    if rung == "dotprod":
        return _in_parts(builder, acc, u, x, 16, _arm_signed_wide if wide else _arm_signed)
    return _portable(builder, acc, u, x)


def _in_parts(builder, acc, u, x, width, emit):
    """`emit` for each `width` bytes, where registers are no longer than that."""
    parts = [
        emit(
            builder,
            emit_slice(builder, acc, start // 4, width // 4),
            emit_slice(builder, u, start, width),
            emit_slice(builder, x, start, width),
        )
        for start in range(0, 64, width)
    ]
    return emit_concatenate(builder, parts)


V8I32 = ir.VectorType(I32, 8)
V16I16 = ir.VectorType(I16, 16)
V32I8 = ir.VectorType(I8, 32)
V4I32 = ir.VectorType(I32, 4)
V16I8 = ir.VectorType(I8, 16)


def _vnni_256(builder, acc, u, x):
    return emit_call(builder, "llvm.x86.avx512.vpdpbusd.256", V8I32, [acc, u, x])


def _avx2(builder, acc, u, x):
    """u <= 127, so a pair's sum stays within 16 bits and `pmaddubsw` does not saturate."""
    pairs = emit_call(builder, "llvm.x86.avx2.pmadd.ub.sw", V16I16, [u, x])
    fours = emit_call(builder, "llvm.x86.avx2.pmadd.wd", V8I32, [pairs, ir.Constant(V16I16, [1] * 16)])
    return builder.add(acc, fours)


def _avx2_wide(builder, acc, u, x):
    """u = low seven bits + 128 * top bit, each of which is small enough by itself."""
    low = builder.and_(u, ir.Constant(V32I8, [127] * 32))
    top = builder.and_(builder.lshr(u, ir.Constant(V32I8, [7] * 32)), ir.Constant(V32I8, [1] * 32))
    pairs_low = emit_call(builder, "llvm.x86.avx2.pmadd.ub.sw", V16I16, [low, x])
    pairs_top = emit_call(builder, "llvm.x86.avx2.pmadd.ub.sw", V16I16, [top, x])
    fours = emit_call(builder, "llvm.x86.avx2.pmadd.wd", V8I32, [pairs_low, ir.Constant(V16I16, [1] * 16)])
    more = emit_call(builder, "llvm.x86.avx2.pmadd.wd", V8I32, [pairs_top, ir.Constant(V16I16, [128] * 16)])
    return builder.add(acc, builder.add(fours, more))


def _arm_mixed(builder, acc, u, x):
    return emit_call(builder, "llvm.aarch64.neon.usdot.v4i32.v16i8", V4I32, [acc, u, x])


def _arm_signed(builder, acc, u, x):
    """u <= 127 is the same number signed."""
    return emit_call(builder, "llvm.aarch64.neon.sdot.v4i32.v16i8", V4I32, [acc, u, x])


def _arm_signed_wide(builder, acc, u, x):
    """u = (u - 128) + 64 + 64, each of which a signed byte holds."""
    centred = builder.xor(u, ir.Constant(V16I8, [-128] * 16))
    for part in (centred, *[ir.Constant(V16I8, [64] * 16)] * 2):
        acc = _arm_signed(builder, acc, part, x)
    return acc


def _portable(builder, acc, u, x):
    """Byte i of each 32-bit lane in turn, by shifts."""
    u_lanes, x_lanes = builder.bitcast(u, ints.ir), builder.bitcast(x, ints.ir)
    for i in range(4):
        left = ints.constant(8 * (3 - i))
        u_i = builder.lshr(builder.shl(u_lanes, left), ints.constant(24))
        x_i = builder.ashr(builder.shl(x_lanes, left), ints.constant(24))
        acc = builder.add(acc, builder.mul(u_i, x_i))
    return acc
