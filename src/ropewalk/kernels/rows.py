"""Sixteen rows at once: a number for each row is a lane, so that one tree of lanes serves all of them.

A row is 32 floats (a group) of one token; the next one is `stride` bytes further on. What comes out for a row has the
bits of the same thing done with the row alone (`simd.sum_tree`, `pointwise.quantize_group`): sums go by the same tree,
everything else is exact or lane by lane. Knows nothing of tokens' places in tiles but what it is told.
"""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ropewalk.kernels.cpu import choose_rung
from ropewalk.kernels.definition import SMALLEST
from ropewalk.kernels.dot import emit_dot4
from ropewalk.kernels.matmul import max_tile
from ropewalk.kernels.simd import (
    I8,
    I32,
    I64,
    LANES,
    ROUNDER,
    bytes64,
    emit_call,
    emit_greater,
    emit_load,
    floats,
    ints,
)

ROWS = 16
TILE_ROWS = min(ROWS, max_tile())  # of 16 rows in as many tiles as that takes


@intrinsic(prefer_literal=True)
def stack(typing_context, n_bytes):
    """Address of so many bytes on the stack, of the calling function's own, aligned to 64."""
    size = n_bytes.literal_value

    def emit(context, builder, sig, args):
        place = cgutils.alloca_once(builder, ir.ArrayType(I8, size))
        place.align = 64
        return builder.ptrtoint(place, I64)

    return types.int64(n_bytes), emit


def _shuffle(builder, x, y, lanes):
    return builder.shuffle_vector(x, y, ir.Constant(ir.VectorType(I32, len(lanes)), lanes))


def _fold_rows(builder, rows, combine):
    """Fold each of 16 vectors by the tree of `simd`; lane r of the result is the r-th."""
    size = LANES  # lanes that are left of a row
    while len(rows) > 1:
        low = [k + i for k in range(0, 2 * LANES, size) for i in range(size // 2)]
        high = [i + size // 2 for i in low]
        rows = [
            combine(builder, _shuffle(builder, x, y, low), _shuffle(builder, x, y, high))
            for x, y in zip(rows[::2], rows[1::2], strict=True)
        ]
        size //= 2
    return rows[0]


@intrinsic
def sum_rows(typing_context, at):
    """Lane r: the sum of the r-th of 16 vectors that follow each other at an address."""

    def emit(context, builder, sig, args):
        rows = [emit_load(builder, floats.ir, builder.add(args[0], I64(64 * r)), 4) for r in range(ROWS)]
        return _fold_rows(builder, rows, lambda b, x, y: b.fadd(x, y))

    return floats(types.int64), emit


def _load_pair(builder, rows, stride, r):
    at = builder.add(rows, builder.mul(stride, I64(r)))
    return [emit_load(builder, floats.ir, builder.add(at, I64(64 * half)), 4) for half in range(2)]


def _emit_scales(builder, rows, stride, limit):
    """Scales of 16 rows, and what to multiply them by: lane by lane what `pointwise` computes for one."""
    largest = []
    for r in range(ROWS):
        sizes = [
            emit_call(builder, "llvm.fabs.v16f32", floats.ir, [v])
            for v in _load_pair(builder, rows, stride, r)
        ]
        largest.append(emit_greater(builder, *sizes))
    top = _fold_rows(builder, largest, emit_greater)
    limits, zero = floats.constant(limit), floats.constant(0.0)
    fits = builder.fcmp_ordered(">", top, floats.constant(SMALLEST))
    inverse = builder.select(fits, builder.fdiv(limits, top), zero)
    return builder.fdiv(top, limits), inverse


def _emit_bytes(builder, vectors, byte):
    """One byte of each lane of four vectors, <64 x i8>."""
    parts = [builder.bitcast(v, bytes64.ir) for v in vectors]
    lanes = list(range(byte, 128, 4))
    halves = [_shuffle(builder, x, y, lanes) for x, y in (parts[:2], parts[2:])]
    return _shuffle(builder, *halves, list(range(64)))


def _emit_rounded(builder, rows, stride, inverse, r, planes):
    """Rows r and r + 1 as bytes, <64 x i8> for each plane: `pointwise.quantize_group` says how."""
    x = []
    for row in (r, r + 1):
        factor = _shuffle(builder, inverse, inverse, [row] * LANES)
        for v in _load_pair(builder, rows, stride, row):
            whole = builder.fadd(builder.fmul(v, factor), floats.constant(ROUNDER))
            x.append(builder.bitcast(whole, ints.ir))
    low = _emit_bytes(builder, x, 0)
    if planes == 1:
        return [low]
    return [_emit_bytes(builder, [builder.add(v, ints.constant(128)) for v in x], 1), low]


def _emit_dot(builder, planes):
    """Sums of four bytes each, of the planes as one number."""
    total = ints.constant(0)
    for values in planes:
        start = builder.shl(total, ints.constant(8))
        total = emit_dot4(builder, choose_rung().vectors, start, bytes64.constant(1), values, False)
    return total


def _emit_sums(builder, dots):
    """Sums over columns 0-15 and over 16-31 of 16 rows, of 8 vectors [halves of row 2r, halves of row 2r + 1][4]."""
    for step in (2, 1):  # lanes of a quarter: i and i + step of one vector, then of the next
        low = [4 * k + LANES * v + i for k in range(4) for v in (0, 1) for i in (0, 3 - step)]
        high = [lane + step for lane in low]
        dots = [
            builder.add(_shuffle(builder, x, y, low), _shuffle(builder, x, y, high))
            for x, y in zip(dots[::2], dots[1::2], strict=True)
        ]
    # Now two vectors of quarters: first halves of 4 even rows, their second halves, then those of the odd rows.
    lanes = [LANES * v + i + 8 * odd for v in (0, 1) for i in range(4) for odd in (0, 1)]
    return _shuffle(builder, *dots, lanes), _shuffle(builder, *dots, [lane + 4 for lane in lanes])


def _make_quantize(limit, planes):
    @intrinsic
    def quantize(typing_context, rows, stride, at, tile, place, next_tile):
        """Put 16 rows into a group of a tile of activations, as the tokens `place` and on.

        Of small tiles into several: that many bytes lie between a group in one tile and the same group in the next.
        """

        def emit(context, builder, sig, args):
            rows, stride, at, tile, place, next_tile = args
            scales, inverse = _emit_scales(builder, rows, stride, limit)
            plane_bytes = builder.mul(tile, I64(32))
            fields = builder.mul(plane_bytes, I64(planes))

            def address(r, offset, size):  # of the `size` bytes of row r, behind what is `offset` bytes long
                row = builder.mul(builder.add(place, I64(r % TILE_ROWS)), I64(size))
                of_tile = builder.add(at, builder.mul(next_tile, I64(r // TILE_ROWS)))
                return builder.add(builder.add(of_tile, offset), row)

            def store(value, address):
                builder.store(value, builder.inttoptr(address, value.type.as_pointer())).align = 1

            dots = []
            for r in range(0, ROWS, 2):
                data = _emit_rounded(builder, rows, stride, inverse, r, planes)
                for plane, values in enumerate(data):
                    store(values, address(r, plane_bytes if plane else I64(0), 32))
                dots.append(_emit_dot(builder, data))
            a, b = _emit_sums(builder, dots)
            t = builder.fmul(scales, builder.sitofp(builder.add(a, b), floats.ir))
            for field, value in enumerate((scales, t, builder.neg(a), builder.neg(b))):
                offset = builder.add(fields, builder.mul(tile, I64(4 * field)))
                for r in range(0, ROWS, TILE_ROWS):
                    part = _shuffle(builder, value, value, list(range(r, r + TILE_ROWS)))
                    store(part, address(r, offset, 4))
            return context.get_dummy_value()

        return types.void(*[types.int64] * 6), emit

    return quantize


quantize_rows, quantize_rows_fine = _make_quantize(127.0, 1), _make_quantize(32512.0, 2)
