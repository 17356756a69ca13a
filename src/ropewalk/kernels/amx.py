"""Matrix products of many tokens on AMX, whose unit multiplies whole tiles of bytes.

An int8 tile product takes A, 16 tokens x 32 columns of signed bytes, and B, 32 columns x 16 rows of weights, and gives
the 16 x 16 exact sums in int32. A lies ready in memory: it is what `kernels.matmul` calls x_q. B is the eight unpacked
vectors of a group, one after the other, with the format's zero taken off so that weights are signed bytes too. What is
done with the sums is `kernels.definition`, so the bits are those of every other rung. Formats with two scales a group
multiply its halves, 16 columns each, on their own; 16-bit activations (`fine`) are two products, of the high and of the
low bytes.

For each panel of 16 rows, and for 32 groups at a time so that everything stays in the first-level cache:

    once:                 unpack the groups into ROOM
    for every 16 tokens:  16 accumulators in registers; group by group: tile product into a slot, then
                          slot -> float -> scale -> accumulators
                          (and with the first 16 tokens: fetch the next 32 groups from memory meanwhile)

Sums get from tiles to registers only through memory, and are not there before some 100 cycles have passed. So there
are two slots, and two sets of tiles: the product of a group is under way while the sums of the one before are scaled.

Instructions for a block of 16 tokens x 16 rows x 32 columns, of which the vector units do one in half a cycle; the
tile unit is busy for 16 cycles with a product, beside them:

                             tiles                         vectors, a token
    one scale (Q4_0, Q8_0)   zero, 2 loads, product, store  convert (from memory), d * s, fma                  48 in all
    affine (Q4_1, Q4_K)      the same                       and an fma with the minimum                        64
    halves (Q6_K, Q3_K)      all of it twice                2 conversions, mul, fma, d * s, fma                96
    halves, affine (Q2_K)    all of it twice                and mul, fma, m * s, fma, 2 scalar conversions    220
    fine                     but B twice                    and a shift and an addition for each sum      + 32 or 64

against 176 (192, 224, 320) for the vector kernels of AVX-512 VNNI, whose eight multiplications a token are gone. So the
scales are what time is spent on, and accumulators stay in registers because to keep them in memory would cost 32 more.
Unpacking costs some 30 instructions a group, once for up to 64 tokens. No machine with AMX was at hand to measure this.

The configuration of the tiles is loaded when a worker begins and released when it ends: nothing has to be known of
threads and forks, and a thread that is switched away between two calls has no 8 kB of tiles to be saved.

Instructions are written out for the assembler (Intel SDM volume 2, "AMX"): LLVM would allocate tiles by itself only
where it knows their shapes.
"""

from functools import cache

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, overload

from ropewalk.kernels import formats as F
from ropewalk.kernels.definition import (
    FINE_TOKEN_GROUP_BYTES,
    SIGNATURE,
    TOKEN_GROUP_BYTES,
    S,
    emit_add_group,
    emit_scales,
)
from ropewalk.kernels.jit import PART, worker
from ropewalk.kernels.simd import (
    I8,
    I64,
    emit_load,
    floats,
    ints,
    prefetch,
    store_tile,
    tile_of,
    zero_tile,
)
from ropewalk.kernels.unpack import read_scales, unpack

TILE_ROWS = 16  # tokens of a block
_CHUNK = 32  # groups that ROOM holds
_VECTOR = 64

# ROOM, bytes from its start: unpacked groups, their scales (d, m, s0, s1), accumulators of up to 64 tokens between
# two chunks, and the sums of two groups.
_QUANT_BYTES, _SCALE_BYTES, _SLOT_BYTES = 8 * _VECTOR, 4 * _VECTOR, 4 * TILE_ROWS * _VECTOR
_QUANTS = 0
_SCALES = _QUANTS + _CHUNK * _QUANT_BYTES
_KEPT = _SCALES + _CHUNK * _SCALE_BYTES
_SLOTS = _KEPT + 64 * _VECTOR
ROOM_BYTES = _SLOTS + 2 * _SLOT_BYTES

# Tiles by number: sums, then activations, then weights.
_SUMS, _TOKENS, _WEIGHTS = (0, 1, 2, 3), (4, 5), (6, 7)


# ---- instructions


def _emit_asm(builder, text, *operands):
    """One instruction with operands in general registers; memory may change."""
    constraints = ",".join(["r"] * len(operands) + ["~{memory}"])
    function = ir.FunctionType(ir.VoidType(), [operand.type for operand in operands])
    builder.call(ir.InlineAsm(function, text, constraints, side_effect=True), operands)


def configuration(halves: bool) -> bytes:
    """The 64 bytes that `ldtilecfg` reads: palette 1, and the bytes of a row and the rows of each tile."""
    columns = 16 if halves else 32
    row_bytes = [64] * 4 + [columns] * 2 + [64] * 2
    rows = [TILE_ROWS] * 6 + [columns // 4] * 2
    wide = b"".join(n.to_bytes(2, "little") for n in row_bytes)
    return bytes([1]) + bytes(15) + wide + bytes(16) + bytes(rows) + bytes(8)


@intrinsic(prefer_literal=True)
def load_configuration(typing_context, halves):
    """Make the tiles of this thread usable, and zero."""
    content = configuration(bool(halves.literal_value))

    def emit(context, builder, sig, args):
        value = ir.Constant(ir.ArrayType(I8, 64), bytearray(content))
        name = f"tile_configuration_{halves.literal_value}"
        _emit_asm(builder, "ldtilecfg ($0)", cgutils.global_constant(builder, name, value))
        return context.get_dummy_value()

    return types.void(halves), emit


@intrinsic
def release_tiles(typing_context):
    """Give the tiles up: this thread's state is small again."""

    def emit(context, builder, sig, args):
        _emit_asm(builder, "tilerelease")
        return context.get_dummy_value()

    return types.void(), emit


@intrinsic
def room(typing_context):
    """Address of ROOM_BYTES bytes of this call's stack."""

    def emit(context, builder, sig, args):
        with builder.goto_entry_block():
            memory = builder.alloca(ir.ArrayType(I8, ROOM_BYTES))
            memory.align = 64
        return builder.ptrtoint(memory, I64)

    return types.int64(), emit


@intrinsic(prefer_literal=True)
def multiply(typing_context, kind, fine, parity, x, plane_bytes, weights, slot):
    """Exact sums of one group for 16 tokens, into 1, 2 or 4 tiles of int32 at `slot`: planes, and in each the halves.

    `x` is the address of the first token's x_q, `plane_bytes` how far its low bytes are from the high ones. Two groups
    of different parity use different tiles, as far as there are enough.
    """
    halves = (0, 1) if F.FORMAT_OF_KIND[kind.literal_value].halves else (0,)
    products = [(plane, half) for plane in range(1 + fine.literal_value) for half in halves]
    odd = parity.literal_value

    def emit(context, builder, sig, args):
        x, plane_bytes, weights, slot = args[3:]
        if len(halves) == 1:
            b = [_WEIGHTS[odd]]
        else:
            b = _WEIGHTS
        for half in halves:
            at = builder.add(weights, I64(4 * _VECTOR * half))
            _emit_asm(builder, f"tileloadd ($0,$1,1), %tmm{b[half]}", at, I64(_VECTOR))
        for i, (plane, half) in enumerate(products):
            c, a = _SUMS[(len(products) * odd + i) % 4], _TOKENS[(odd + i) % 2]
            at = builder.add(x, I64(16 * half))
            if plane:
                at = builder.add(at, plane_bytes)
            _emit_asm(builder, f"tileloadd ($0,$1,1), %tmm{a}", at, I64(F.GROUP))
            _emit_asm(builder, f"tilezero %tmm{c}")
            _emit_asm(builder, f"tdpbssd %tmm{b[half]}, %tmm{a}, %tmm{c}")
            at = builder.add(slot, I64(TILE_ROWS * _VECTOR * i))
            _emit_asm(builder, f"tilestored %tmm{c}, ($0,$1,1)", at, I64(_VECTOR))
        return context.get_dummy_value()

    integers = [types.int64] * 4
    return types.void(kind, fine, parity, *integers), emit


# ---- around them


@intrinsic(prefer_literal=True)
def store_group(typing_context, kind, quants, scales, quants_at, scales_at):
    """Put an unpacked group into ROOM: signed weights, and what it is scaled with."""
    packed = F.FORMAT_OF_KIND[kind.literal_value]

    def emit(context, builder, sig, args):
        quants, scales, quants_at, scales_at = args[1:]

        def store(value, at, i):
            address = builder.add(at, I64(_VECTOR * i))
            builder.store(value, builder.inttoptr(address, value.type.as_pointer())).align = _VECTOR

        for j in range(8):
            w = builder.extract_value(quants, j)
            store(builder.sub(w, ir.Constant(w.type, [packed.zero] * 64)), quants_at, j)
        for i in range(4):
            store(builder.extract_value(scales, i), scales_at, i)
        return context.get_dummy_value()

    return types.void(kind, quants, scales, types.int64, types.int64), emit


@intrinsic(prefer_literal=True)
def add_group(typing_context, kind, fine, acc, slot, scales, fields, field_bytes):
    """Scale the sums of one group for 16 tokens and add them to the accumulators.

    `fields` is the address of the first token's scale, `field_bytes` how far its next number is from that.
    """
    packed = F.FORMAT_OF_KIND[kind.literal_value]
    n_halves, n_planes = 1 + packed.halves, 1 + fine.literal_value

    def emit(context, builder, sig, args):
        acc, slot, scales, fields, field_bytes = args[2:]
        stored = [_emit_aligned(builder, floats, scales, i) for i in range(4)]
        all_scales = emit_scales(builder, packed, *stored)
        fields = [builder.add(fields, builder.mul(field_bytes, I64(field))) for field in range(S, 4)]

        for token in range(TILE_ROWS):

            def total(half, token=token):
                planes = [
                    _emit_aligned(builder, ints, slot, TILE_ROWS * (n_halves * plane + half) + token)
                    for plane in range(n_planes)
                ]
                if n_planes == 1:
                    return planes[0]
                return builder.add(builder.shl(planes[0], ints.constant(8)), planes[1])

            def at(field, token=token):
                return builder.add(fields[field], I64(4 * token))

            previous = builder.extract_value(acc, token)
            sums = [total(half) for half in range(n_halves)]
            value = emit_add_group(builder, packed, previous, sums, all_scales, at)
            acc = builder.insert_value(acc, value, token)
        return acc

    tile = tile_of(floats, TILE_ROWS)
    return tile(kind, fine, tile, *[types.int64] * 4), emit


def _emit_aligned(builder, vector, address, i):
    return emit_load(builder, vector.ir, builder.add(address, I64(_VECTOR * i)), _VECTOR)


@intrinsic
def load_kept(typing_context, address):
    """The 16 accumulators at an address."""
    tile = tile_of(floats, TILE_ROWS)

    def emit(context, builder, sig, args):
        value = ir.Constant(ir.ArrayType(floats.ir, TILE_ROWS), ir.Undefined)
        for token in range(TILE_ROWS):
            value = builder.insert_value(value, _emit_aligned(builder, floats, args[0], token), token)
        return value

    return tile(types.int64), emit


def prepare(kind, panel, group, memory, place):
    """Unpack a panel's group into ROOM, at a place of its chunk."""
    raise NotImplementedError("only inside kernels")


@overload(prepare, jit_options=PART, prefer_literal=True)
def _overload_prepare(kind, panel, group, memory, place):
    number = kind.literal_value
    packed = F.FORMAT_OF_KIND[number]
    groups, quant_bytes = packed.block_groups, packed.quant_bytes
    scale_bytes, block_bytes = packed.scale_bytes, packed.block_bytes

    def put(kind, panel, group, memory, place):
        block, g = panel + group // groups * block_bytes, group % groups
        w, s = unpack(number, block + scale_bytes + g * quant_bytes), read_scales(number, block, g)
        store_group(
            number, w, s, memory + _QUANTS + place * _QUANT_BYTES, memory + _SCALES + place * _SCALE_BYTES
        )

    return put


@cache
def tile_worker(kind: int, fine: int) -> int:
    """Address of the compiled worker for tiles of 16, 32 and 64 tokens of an integer format.

    Its arguments are those of `matmul.matmul_worker`; the tile is the smallest of the three that holds its tokens.
    """
    packed = F.FORMAT_OF_KIND[kind]
    halves = int(packed.halves)
    token_bytes = FINE_TOKEN_GROUP_BYTES if fine else TOKEN_GROUP_BYTES
    quant_bytes = F.GROUP * (1 + fine)
    groups, block_bytes = packed.block_groups, packed.block_bytes
    ahead_lines = -(-2 * block_bytes // groups // 64)  # of two groups

    @worker(SIGNATURE)
    def amx_matmul(panels, n_panels, panel_bytes, n_groups, x, y, y_stride, n_tokens, add):
        memory = room()
        load_configuration(halves)
        tile = TILE_ROWS
        while tile < n_tokens:
            tile *= 2
        group_bytes, plane_bytes, field_bytes = token_bytes * tile, F.GROUP * tile, 4 * tile
        even, odd = memory + _SLOTS, memory + _SLOTS + _SLOT_BYTES
        for p in range(n_panels):
            panel = panels + p * panel_bytes
            for first in range(0, n_groups, _CHUNK):
                n = min(_CHUNK, n_groups - first)
                for g in range(n):
                    prepare(kind, panel, first + g, memory, g)
                for token in range(0, n_tokens, TILE_ROWS):
                    kept = memory + _KEPT + token * _VECTOR
                    acc = zero_tile(TILE_ROWS) if first == 0 else load_kept(kept)
                    q = x + first * group_bytes + F.GROUP * token
                    fields = x + first * group_bytes + quant_bytes * tile + 4 * token
                    w, scales = memory + _QUANTS, memory + _SCALES
                    multiply(kind, fine, 0, q, plane_bytes, w, even)
                    for g in range(0, n - 1, 2):
                        if token == 0:
                            prefetch(panel + (first + _CHUNK + g) * block_bytes // groups, ahead_lines)
                        multiply(kind, fine, 1, q + group_bytes, plane_bytes, w + _QUANT_BYTES, odd)
                        acc = add_group(kind, fine, acc, even, scales, fields, field_bytes)
                        w += 2 * _QUANT_BYTES
                        if g + 2 < n:  # else this group once more, in vain
                            q += 2 * group_bytes
                        multiply(kind, fine, 0, q, plane_bytes, w, even)
                        fields, scales = fields + group_bytes, scales + _SCALE_BYTES
                        acc = add_group(kind, fine, acc, odd, scales, fields, field_bytes)
                        fields, scales = fields + group_bytes, scales + _SCALE_BYTES
                    if n % 2:
                        acc = add_group(kind, fine, acc, even, scales, fields, field_bytes)
                    if first + n < n_groups:
                        store_tile(acc, kept, _VECTOR, TILE_ROWS, 0)
                    else:
                        store_tile(acc, y + p * 64 + token * y_stride, y_stride, n_tokens - token, add)
        release_tiles()

    return amx_matmul
