"""What every matrix product shares: the layout of activations, and the float32 part of the definition.

The formulas are in `kernels.matmul`. How the exact integer sum of a group comes about is each kernel's own business
(vector instructions there, tiles in `kernels.amx`); what is done with it is said once, here, so that the bits agree.
"""

from numba import types

from ropewalk.kernels import formats as F
from ropewalk.kernels.simd import F32, I32, emit_fma, emit_load, emit_splat, floats, ints

TOKEN_GROUP_BYTES = 48
FINE_TOKEN_GROUP_BYTES = 80

SMALLEST = 1e-34
"""Activations are zeros where all of a group are smaller: the reciprocal of a scale is to be a finite number."""

S, T, MINUS_SUM_A, MINUS_SUM_B = range(4)
"""A token's four numbers in a group of activations: scale, t, and minus the sums over columns 0-15 and 16-31."""

SIGNATURE = types.void(*[types.int64] * 9)
"""Of every worker that multiplies, see `kernels.matmul.matmul_worker`."""


def emit_scales(builder, packed, d, m, s0, s1):
    """The scales that `unpack.read_scales` gave, as (d, m, s0, s1, m0, m1); m0 and m1 are Q2_K's."""
    if packed.kind != F.Q2_K:
        return d, m, s0, s1, None, None
    s0, m0 = _emit_split_nibbles(builder, s0)
    s1, m1 = _emit_split_nibbles(builder, s1)
    return d, m, s0, s1, m0, m1


def _emit_split_nibbles(builder, value):
    """Floats that hold a byte: its low and its high nibble, as floats."""
    whole = builder.fptosi(value, ints.ir)
    low, high = builder.and_(whole, ints.constant(15)), builder.lshr(whole, ints.constant(4))
    return builder.sitofp(low, floats.ir), builder.sitofp(high, floats.ir)


def emit_add_group(builder, packed, acc, sums, scales, at):
    """Add one group of one token to its 16 accumulators: the two lines of the definition.

    Parameters
    ----------
    packed : PackedFormat
    acc : llvmlite value, <16 x float>
    sums : list of llvmlite values, <16 x i32>
        Exact sums of (q - zero) * x_q over the group; over its halves, for formats with `halves`.
    scales : tuple
        What `emit_scales` gave.
    at : callable
        From a field (S, T, ...) to the address of the token's number.
    """
    d, m, s0, s1, m0, m1 = scales
    scale = emit_splat(builder, floats, emit_load(builder, F32, at(S), 4))
    totals = [builder.sitofp(total, floats.ir) for total in sums]
    total = emit_fma(builder, totals[1], s1, builder.fmul(totals[0], s0)) if packed.halves else totals[0]
    acc = emit_fma(builder, builder.fmul(d, scale), total, acc)
    if packed.affine and packed.halves:
        minus = [
            emit_splat(builder, floats, builder.sitofp(emit_load(builder, I32, at(field), 4), F32))
            for field in (MINUS_SUM_A, MINUS_SUM_B)
        ]
        total = emit_fma(builder, minus[1], m1, builder.fmul(minus[0], m0))  # minus the sum, hence fneg
        return emit_fma(builder, builder.fmul(m, scale), builder.fneg(total), acc)
    if packed.affine:
        return emit_fma(builder, m, emit_splat(builder, floats, emit_load(builder, F32, at(T), 4)), acc)
    return acc
