"""Reading packed weights into registers: one short function a shape of quants and a shape of scales.

`unpack(KIND, address)` gives the eight vectors of a group's quants; `read_scales(KIND, address, group)` gives
(d, m, s0, s1): the scale, the minimum's scale, and what further multiplies each half of the group. Layouts are
in `kernels.formats`.
"""

import numpy as np
from llvmlite import ir
from numba.extending import intrinsic, overload

from ropewalk.kernels import formats as F
from ropewalk.kernels.cpu import choose_rung
from ropewalk.kernels.jit import PART, inline
from ropewalk.kernels.simd import (
    I8,
    bytes64,
    emit_call,
    floats,
    ints,
    load_bytes,
    load_halfs,
    load_i8_as_ints,
    load_u8_as_ints,
    splat,
    to_floats,
)

# ---- quants


def _nibbles(p):
    a, b, c, d = load_bytes(p), load_bytes(p + 64), load_bytes(p + 128), load_bytes(p + 192)
    return (a & 15, a >> 4, b & 15, b >> 4, c & 15, c >> 4, d & 15, d >> 4)


def _nibbles_and_bit(p):
    bit = load_bytes(p)
    a, b, c, d = load_bytes(p + 64), load_bytes(p + 128), load_bytes(p + 192), load_bytes(p + 256)
    return (
        a & 15 | (bit << 4) & 16,
        a >> 4 | (bit << 3) & 16,
        b & 15 | (bit << 2) & 16,
        b >> 4 | (bit << 1) & 16,
        c & 15 | bit & 16,
        c >> 4 | (bit >> 1) & 16,
        d & 15 | (bit >> 2) & 16,
        d >> 4 | (bit >> 3) & 16,
    )


def _nibbles_and_two_bits(p):
    e, f = load_bytes(p), load_bytes(p + 64)
    a, b, c, d = load_bytes(p + 128), load_bytes(p + 192), load_bytes(p + 256), load_bytes(p + 320)
    return (
        a & 15 | (e << 4) & 48,
        a >> 4 | (e << 2) & 48,
        b & 15 | e & 48,
        b >> 4 | (e >> 2) & 48,
        c & 15 | (f << 4) & 48,
        c >> 4 | (f << 2) & 48,
        d & 15 | f & 48,
        d >> 4 | (f >> 2) & 48,
    )


def _two_bits(p):
    e, f = load_bytes(p), load_bytes(p + 64)
    return (e & 3, (e >> 2) & 3, (e >> 4) & 3, e >> 6, f & 3, (f >> 2) & 3, (f >> 4) & 3, f >> 6)


def _three_bits(p):
    bit, e, f = load_bytes(p), load_bytes(p + 64), load_bytes(p + 128)
    return (
        e & 3 | (bit << 2) & 4,
        (e >> 2) & 3 | (bit << 1) & 4,
        (e >> 4) & 3 | bit & 4,
        e >> 6 | (bit >> 1) & 4,
        f & 3 | (bit >> 2) & 4,
        (f >> 2) & 3 | (bit >> 3) & 4,
        (f >> 4) & 3 | (bit >> 4) & 4,
        f >> 6 | (bit >> 5) & 4,
    )


def _whole_bytes(p):
    return (
        load_bytes(p),
        load_bytes(p + 64),
        load_bytes(p + 128),
        load_bytes(p + 192),
        load_bytes(p + 256),
        load_bytes(p + 320),
        load_bytes(p + 384),
        load_bytes(p + 448),
    )


def _make_table_lookup(kind):
    values = (F.table_of_kind(kind).astype(int) + 128) % 256

    @intrinsic
    def lookup(typing_context, codes):
        """The table's values, raised by 128, for 64 codes of four bits."""

        def emit(context, builder, sig, args):
            if choose_rung().vectors == "vnni":
                return _emit_shuffle(builder, args[0], values, "llvm.x86.avx512.pshuf.b.512", 64)
            if choose_rung().vectors in ("avxvnni", "avx2"):
                return _emit_shuffle(builder, args[0], values, "llvm.x86.avx2.pshuf.b", 32)
            if choose_rung().vectors in ("i8mm", "dotprod"):
                return _emit_shuffle(builder, args[0], values, "llvm.aarch64.neon.tbl1.v16i8", 16)
            result = bytes64.constant(int(values[0]))
            for code in range(1, 16):
                hit = builder.icmp_unsigned("==", args[0], bytes64.constant(code))
                result = builder.select(hit, bytes64.constant(int(values[code])), result)
            return result

        return bytes64(bytes64), emit

    def unpack_table(p):
        a, b, c, d = load_bytes(p), load_bytes(p + 64), load_bytes(p + 128), load_bytes(p + 192)
        return (
            lookup(a & 15),
            lookup(a >> 4),
            lookup(b & 15),
            lookup(b >> 4),
            lookup(c & 15),
            lookup(c >> 4),
            lookup(d & 15),
            lookup(d >> 4),
        )

    return unpack_table


def _emit_shuffle(builder, codes, values, instruction, width):
    """Table look-up by the byte shuffle that works within 16 bytes, `width` bytes at a time."""
    part = ir.VectorType(I8, width)
    table = ir.Constant(part, [int(v) for v in values] * (width // 16))
    parts = [
        emit_call(builder, instruction, part, [table, emit_slice(builder, codes, start, width)])
        for start in range(0, 64, width)
    ]
    return emit_concatenate(builder, parts)


def emit_slice(builder, vector, start, width):
    """Elements start .. start + width of an LLVM vector."""
    if vector.type.count == width:
        return vector
    lanes = ir.Constant(ir.VectorType(ir.IntType(32), width), list(range(start, start + width)))
    return builder.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined), lanes)


def emit_concatenate(builder, parts):
    """One LLVM vector out of one, two or four equal ones."""
    while len(parts) > 1:
        width = parts[0].type.count
        lanes = ir.Constant(ir.VectorType(ir.IntType(32), 2 * width), list(range(2 * width)))
        parts = [builder.shuffle_vector(a, b, lanes) for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


_UNPACK = {
    F.Q4_0: _nibbles,
    F.Q4_1: _nibbles,
    F.Q4_K: _nibbles,
    F.Q5_0: _nibbles_and_bit,
    F.Q5_1: _nibbles_and_bit,
    F.Q5_K: _nibbles_and_bit,
    F.Q6_K: _nibbles_and_two_bits,
    F.Q8_0: _whole_bytes,
    F.Q2_K: _two_bits,
    F.Q3_K: _three_bits,
    F.IQ4_NL: _make_table_lookup(F.IQ4_NL),
    F.IQ4_XS: _make_table_lookup(F.IQ4_XS),
    F.MXFP4: _make_table_lookup(F.MXFP4),
}


# ---- scales: (d, m, s0, s1) of group g of the block at p


def _scale(p, g):
    d = load_halfs(p)
    return d, d, d, d


def _scale_and_minimum(p, g):
    d = load_halfs(p)
    return d, load_halfs(p + 32), d, d


def _exponent(p, g):
    """2^(e - 128): half of 2^(e - 127), because the table holds twice the values."""
    d = _power_of_two(load_u8_as_ints(p))
    return d, d, d, d


@intrinsic
def _power_of_two(typing_context, e):
    """2^(e - 128) for 0 <= e < 256; the first two are subnormal."""

    def emit(context, builder, sig, args):
        normal = builder.shl(builder.sub(args[0], ints.constant(1)), ints.constant(23))
        subnormal = builder.shl(ints.constant(0x00200000), args[0])
        small = builder.icmp_unsigned("<", args[0], ints.constant(2))
        return builder.bitcast(builder.select(small, subnormal, normal), floats.ir)

    return floats(ints), emit


def _block_scale_and_minimum(p, g):
    d = load_halfs(p) * to_floats(load_u8_as_ints(p + 64 + 32 * g))
    m = load_halfs(p + 32) * to_floats(load_u8_as_ints(p + 80 + 32 * g))
    return d, splat(np.float32(0)) - m, d, d


def _block_scale(p, g):
    d = load_halfs(p) * to_floats(load_i8_as_ints(p + 64 + 16 * g))
    return d, d, d, d


def _block_half_scales(p, g):
    d = load_halfs(p)
    return d, d, to_floats(load_i8_as_ints(p + 64 + 32 * g)), to_floats(load_i8_as_ints(p + 80 + 32 * g))


def _block_half_nibbles(p, g):
    """Q2_K: s0 and s1 hold the bytes themselves; `accumulate` splits scale and minimum."""
    m = splat(np.float32(0)) - load_halfs(p + 32)
    return (
        load_halfs(p),
        m,
        to_floats(load_u8_as_ints(p + 64 + 32 * g)),
        to_floats(load_u8_as_ints(p + 80 + 32 * g)),
    )


_SCALES = {
    F.Q4_0: _scale,
    F.Q5_0: _scale,
    F.Q8_0: _scale,
    F.IQ4_NL: _scale,
    F.Q4_1: _scale_and_minimum,
    F.Q5_1: _scale_and_minimum,
    F.MXFP4: _exponent,
    F.Q4_K: _block_scale_and_minimum,
    F.Q5_K: _block_scale_and_minimum,
    F.IQ4_XS: _block_scale,
    F.Q6_K: _block_half_scales,
    F.Q3_K: _block_half_scales,
    F.Q2_K: _block_half_nibbles,
}


def unpack(kind, address):
    """Eight vectors of 64 unsigned bytes: the quants of 16 rows x 32 columns of the format `kind`."""
    raise NotImplementedError("only inside kernels")


def read_scales(kind, address, group):
    """(d, m, s0, s1) of group `group` of the block at `address`, floats each."""
    raise NotImplementedError("only inside kernels")


@overload(unpack, jit_options=PART, prefer_literal=True)
def _overload_unpack(kind, address):
    read = inline(_UNPACK[kind.literal_value])
    return lambda kind, address: read(address)


@overload(read_scales, jit_options=PART, prefer_literal=True)
def _overload_read_scales(kind, address, group):
    read = inline(_SCALES[kind.literal_value])
    return lambda kind, address, group: read(address, group)
