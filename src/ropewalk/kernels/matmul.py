"""Matrix products: packed weights times quantized activations, one lane per output row.

The definition, for row n and token m, with groups g of 32 columns in ascending order and one float32
accumulator for each (n, m); x_q, s, t are what `pointwise.quantize` made of the activations:

    acc = fma(d[n,g] * s[m,g], float(sum_k (q[n,g,k] - zero) * x_q[m,g,k]), acc)       the integer sum is exact
    acc = fma(minimum[n,g], t[m,g], acc)                                               affine formats, t = s * sum x_q

Formats with two scales a group sum `s0 * (columns 0-15) + s1 * (columns 16-31)` first; products and sum stay below
2^24 for 8-bit activations, so that float32 is exact there too. Nothing depends on vector width, tile, batch or thread.

Activations are 8-bit integers, or 16-bit ones (`fine`) before the products that the logits feel most: those that
make queries, keys and values, and the output matrix. A 16-bit x_q is two signed bytes, 256 * high + low, and costs
a second pass of integer products over weights that are in registers already. On 512 positions of ordinary text this
takes the mean KL divergence of SmolLM2-135M from 2.8e-3 (all 8-bit, as in llama.cpp) to 1.3e-3.

Activations of up to 16 tokens (with AMX 64) lie in a tile. For each group: x_q int8 [TILE, 32] (fine: high bytes, then
low bytes), s float32 [TILE], t float32 [TILE], and minus the sums of x_q over columns 0-15 and 16-31, int32 [TILE]
each: 48 bytes a token and group (fine: 80). For float formats a tile is float32 [groups, TILE, 32].
"""

from functools import cache, partial

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ropewalk.kernels import formats as F
from ropewalk.kernels.amx import TILE_ROWS, tile_worker
from ropewalk.kernels.cpu import choose_rung
from ropewalk.kernels.definition import (
    FINE_TOKEN_GROUP_BYTES,
    SIGNATURE,
    TOKEN_GROUP_BYTES,
    emit_add_group,
    emit_scales,
)
from ropewalk.kernels.dot import emit_dot4
from ropewalk.kernels.jit import worker
from ropewalk.kernels.simd import (
    F32,
    I32,
    I64,
    bytes64,
    emit_fma,
    emit_half_to_float,
    emit_load,
    emit_splat,
    floats,
    halfs,
    ints,
    prefetch_near,
    store_tile,
    tile_of,
    zero_tile,
)
from ropewalk.kernels.unpack import read_scales, unpack

TILES = (1, 2, 4, 8, 16, 32, 64)


def max_tile() -> int:
    """Tokens of the largest tile: its accumulators fit the registers; with AMX, it shares unpacked weights."""
    rung = choose_rung()
    if rung.name == "amx":
        return 64
    return 16 if rung.vectors == "vnni" else 4


def tiles() -> tuple[int, ...]:
    """The tile sizes that are used on this rung."""
    return tuple(t for t in TILES if t <= max_tile())


def tile_for(n_tokens: int) -> int:
    """The tile that `n_tokens` tokens (at most `max_tile()`) go through."""
    return next(t for t in TILES if t >= n_tokens)


@intrinsic(prefer_literal=True)
def accumulate(typing_context, kind, tile, fine, acc, quants, scales, x):
    """One group of 16 rows x TILE tokens: the two lines of the definition. `x` is the address of the group's tile."""
    packed = F.FORMAT_OF_KIND[kind.literal_value]
    count = tile.literal_value
    planes = 2 if fine.literal_value else 1
    rung = choose_rung().vectors

    def emit(context, builder, sig, args):
        acc, quants, scales, x = args[3:]
        w = [builder.extract_value(quants, j) for j in range(8)]
        scales = emit_scales(builder, packed, *(builder.extract_value(scales, i) for i in range(4)))

        def at(token, field):  # a token's 4-byte value: field 0 is s, 1 is t, 2 and 3 are the sums
            return builder.add(x, I64(count * (32 * planes + 4 * field) + 4 * token))

        for token in range(count):
            x_q = [builder.add(x, I64(32 * (count * plane + token))) for plane in range(planes)]
            minus_sums = [_emit_minus_sum(builder, rung, packed, at(token, 2 + h), count) for h in (0, 1)]
            halves = _emit_dots(builder, rung, packed, w, x_q, minus_sums)
            sums = halves if packed.halves else [builder.add(*halves)]
            a = emit_add_group(
                builder, packed, builder.extract_value(acc, token), sums, scales, partial(at, token)
            )
            acc = builder.insert_value(acc, a, token)
        return acc

    result = tile_of(floats, count)
    return result(kind, tile, fine, acc, quants, scales, types.int64), emit


def _emit_minus_sum(builder, rung, packed, address, count):
    """-zero * (sum of x_q), as ints."""
    if not packed.zero:
        return ints.constant(0)
    value = emit_splat(builder, ints, emit_load(builder, I32, address, 4))
    if rung == "vnni" and count > 2:
        # LLVM would shift first and splat then: three instructions for the vector units instead of one and a load.
        hide = ir.FunctionType(ints.ir, [ints.ir])
        value = builder.call(ir.InlineAsm(hide, "", "=v,0"), [value])
    return builder.mul(value, ints.constant(packed.zero))


def _emit_dots(builder, rung, packed, w, x_q, starts):
    """Exact sums over columns 0-15 and 16-31 of q * x_q, on top of `starts`, as ints.

    `x_q` are the addresses of its bytes, high ones first. The halves go in step, because of two products in a row one
    waits for the other if it adds to the same sums.
    """
    totals = [ints.constant(0)] * 2
    for plane in x_q:
        if plane is not x_q[0]:
            totals = [builder.shl(total, ints.constant(8)) for total in totals]
        if plane is x_q[-1]:
            totals = [builder.add(start, total) for start, total in zip(starts, totals, strict=True)]
        for j in range(4):
            for h in (0, 1):
                four = emit_load(builder, I32, builder.add(plane, I64(16 * h + 4 * j)), 4)
                x = builder.bitcast(emit_splat(builder, ints, four), bytes64.ir)
                totals[h] = emit_dot4(builder, rung, totals[h], w[4 * h + j], x, packed.wide)
    return totals


def _bytes_ahead(group_bytes: int, tile: int, fine: int) -> int:
    """How far ahead of the products weights are asked for, of which a group takes so many bytes; 0: not at all.

    The memory's own prefetcher goes by what is read, so it falls behind where much is done with what was read: if asked
    for, 16 tokens of Q4_K go at 151 instead of 133 GMAC/s a thread (163 with weights in a cache), 8 at 138 instead of
    122. But a core has too few requests under way for more than some 16 GB/s, and the prefetcher has more: a few tokens
    that need weights faster than that get them up to a fifth later if they ask.
    """
    return 0 if group_bytes > 60 * (tile << fine) else 2048


@cache
def matmul_worker(kind: int, tile: int, fine: int) -> int:
    """Address of the compiled worker for a format, a tile size, and 16-bit (`fine` = 1) or 8-bit activations.

    The worker's arguments, all int64: address of the first panel, number of panels, bytes of a panel, groups of
    a row, address of the tile of activations, address of the output (float32, the first panel's first row of the
    tile's first token), bytes between tokens there, tokens that are wanted, and whether to add to the output.
    """
    if kind in F.FLOAT_KINDS:
        return _float_worker(kind, tile)
    if tile >= TILE_ROWS and choose_rung().name == "amx":
        return tile_worker(kind, fine)
    packed = F.FORMAT_OF_KIND[kind]
    groups, quant_bytes = packed.block_groups, packed.quant_bytes
    scale_bytes, block_bytes = packed.scale_bytes, packed.block_bytes
    tile_bytes = (FINE_TOKEN_GROUP_BYTES if fine else TOKEN_GROUP_BYTES) * tile
    group_bytes = block_bytes // groups
    ahead, lines = _bytes_ahead(group_bytes, tile, fine), -(-group_bytes // 64)

    @worker(SIGNATURE)
    def matmul(panels, n_panels, panel_bytes, n_groups, x, y, y_stride, n_tokens, add):
        for p in range(n_panels):
            block = panels + p * panel_bytes
            acc = zero_tile(tile)
            for first in range(0, n_groups, groups):
                for g in range(groups):
                    quants = block + scale_bytes + g * quant_bytes
                    w, s = unpack(kind, quants), read_scales(kind, block, g)
                    if ahead:
                        prefetch_near(quants + ahead, lines)
                    acc = accumulate(kind, tile, fine, acc, w, s, x + (first + g) * tile_bytes)
                block += block_bytes
            store_tile(acc, y + p * 64, y_stride, n_tokens, add)

    return matmul


@intrinsic(prefer_literal=True)
def accumulate_float(typing_context, kind, tile, acc, w, x):
    """One column of 16 float weights for TILE tokens: acc = fma(w, x, acc)."""
    count = tile.literal_value
    number = kind.literal_value

    def emit(context, builder, sig, args):
        acc, w, x = args[2:]
        if number == F.F32:
            weight = emit_load(builder, floats.ir, w)
        elif number == F.F16:
            weight = emit_half_to_float(builder, emit_load(builder, halfs.ir, w))
        else:
            wide = builder.zext(emit_load(builder, halfs.ir, w), ints.ir)
            weight = builder.bitcast(builder.shl(wide, ints.constant(16)), floats.ir)
        for token in range(count):
            value = emit_load(builder, F32, builder.add(x, I64(4 * F.GROUP * token)), 4)
            previous = builder.extract_value(acc, token)
            acc = builder.insert_value(
                acc, emit_fma(builder, weight, emit_splat(builder, floats, value), previous), token
            )
        return acc

    result = tile_of(floats, count)
    return result(kind, tile, acc, types.int64, types.int64), emit


@cache
def _float_worker(kind: int, tile: int) -> int:
    column_bytes = F.FORMAT_OF_KIND[kind].quant_bytes // F.GROUP
    group = F.GROUP
    width = min(tile, 16)  # what the registers have room for

    @worker(SIGNATURE)
    def matmul(panels, n_panels, panel_bytes, n_groups, x, y, y_stride, n_tokens, add):
        for p in range(n_panels):
            for token in range(0, n_tokens, width):
                acc = zero_tile(width)
                w, at = panels + p * panel_bytes, x + token * group * 4
                for g in range(n_groups):
                    for k in range(group):
                        acc = accumulate_float(kind, width, acc, w, at + (g * tile * group + k) * 4)
                        w += column_bytes
                store_tile(acc, y + p * 64 + token * y_stride, y_stride, n_tokens - token, add)

    return matmul
