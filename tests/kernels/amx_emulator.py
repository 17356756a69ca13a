"""AMX for a CPU that has none: a handler of SIGILL that does what the instruction would have done.

    NUMBA_CPU_FEATURES=<features_with_amx()> python -c "import amx_emulator; amx_emulator.install(); ..."

Without AMX, its instructions end in SIGILL. The handler is compiled by Numba, takes no lock and no memory, and knows
the instructions of our kernels, as Intel's Software Developer's Manual describes them (volume 2, palette 1):
`ldtilecfg`, `tilezero`, `tileloadd`, `tileloaddt1`, `tilestored`, `tdpb[su][su]d` and `tilerelease`. It carries on with
whatever instructions of AMX follow, and returns behind them. Anything else, and everything that AMX itself would refuse
(tiles without a configuration, shapes that do not fit, one tile twice in a product, ...), stays what it was: SIGILL,
and the end of the process.

Every thread has tiles of its own. A thread's state, at STATE + number * STATE_BYTES:

    0    its pthread_self          16  rows of the tiles, 8 bytes                64  tiles, 8 x 16 rows x 64 bytes
    8    whether it is configured  32  bytes of a row of the tiles, 8 uint16
"""

import ctypes
import signal

import llvmlite.binding as llvm
import numpy as np
from numba import cfunc, types
from numba.extending import intrinsic

from ropewalk.kernels.jit import inline
from ropewalk.kernels.simd import (
    I32,
    I64,
    emit_call,
    load_i32,
    load_i64,
    load_ints,
    load_u8,
    load_u16,
    store_i32,
    store_i64,
    store_ints,
    store_u8,
)

MAX_THREADS, STATE_BYTES, TILES = 256, 64 + 8 * 1024, 64
OWNER, CONFIGURED, ROWS, ROW_BYTES = 0, 8, 16, 32
_state = np.zeros(MAX_THREADS * STATE_BYTES // 8 + 8, np.int64)
STATE = (_state.ctypes.data + 63) // 64 * 64
COUNTS = np.zeros(3, np.int64)
"""Threads so far, tile products, and what is added to one sum of each product, to be wrong on purpose."""
_COUNTS = COUNTS.ctypes.data

# ucontext_t of x86-64 Linux: general registers from byte 40 on, in this order for rax, rcx, rdx, rbx, rsp, ... r15.
REGISTERS, RIP = 40, 16
_PLACES = sum(
    place << 4 * n for n, place in enumerate((13, 14, 12, 11, 15, 10, 9, 8, 0, 1, 2, 3, 4, 5, 6, 7))
)
_NOT, _66, _F3, _F2 = range(4)  # the prefix that VEX stands for


@intrinsic
def this_thread(typing_context):
    def emit(context, builder, sig, args):
        return emit_call(builder, "pthread_self", I64, [])

    return types.int64(), emit


@intrinsic
def restore_default(typing_context):
    """Let SIGILL end the process from now on."""

    def emit(context, builder, sig, args):
        emit_call(builder, "signal", I64, [I32(signal.SIGILL), I64(0)])
        return context.get_dummy_value()

    return types.void(), emit


@intrinsic
def next_number(typing_context):
    """The next thread's number."""

    def emit(context, builder, sig, args):
        at = builder.inttoptr(I64(_COUNTS), I64.as_pointer())
        return builder.atomic_rmw("add", at, I64(1), "seq_cst")

    return types.int64(), emit


@inline
def state_of_thread():
    """Address of this thread's state; 0 if there are too many threads."""
    me, n = this_thread(), load_i64(_COUNTS)
    for number in range(min(n, MAX_THREADS)):
        if load_i64(STATE + number * STATE_BYTES + OWNER) == me:
            return STATE + number * STATE_BYTES
    number = next_number()
    if number >= MAX_THREADS:
        return 0
    store_i64(STATE + number * STATE_BYTES + OWNER, me)
    return STATE + number * STATE_BYTES


@inline
def rows_of(state, tile):
    return np.int64(load_u8(state + ROWS + tile))


@inline
def bytes_of(state, tile):
    return np.int64(load_u16(state + ROW_BYTES + 2 * tile))


@inline
def tile_at(state, tile):
    return state + TILES + 1024 * tile


@inline
def is_usable(state, tile):
    return load_i64(state + CONFIGURED) != 0 and tile < 8 and rows_of(state, tile) > 0


@inline
def clear(at, n):
    for i in range(0, n, 8):
        store_i64(at + i, 0)


@inline
def configure(state, source):
    """LDTILECFG; False for what it refuses. A start row, of a load that was interrupted, is refused too."""
    palette = load_u8(source)
    if palette > 1:
        return False
    n_reserved = 0
    for i in range(1, 64):
        if palette == 1 and (16 <= i < 32 or 48 <= i < 56):
            continue
        n_reserved += load_u8(source + i) != 0 and palette == 1
    if n_reserved > 0:
        return False
    for tile in range(8):
        rows, columns = load_u8(source + 48 + tile), load_u16(source + 16 + 2 * tile)
        if palette == 1 and (rows > 16 or columns > 64 or (rows == 0) != (columns == 0)):
            return False
    clear(state + CONFIGURED, STATE_BYTES - CONFIGURED)
    if palette == 1:
        store_i64(state + CONFIGURED, 1)
        store_i64(state + ROWS, load_i64(source + 48))
        store_i64(state + ROW_BYTES, load_i64(source + 16))
        store_i64(state + ROW_BYTES + 8, load_i64(source + 24))
    return True


@inline
def copy(target, source, n):
    if n % 8 == 0:
        for i in range(0, n, 8):
            store_i64(target + i, load_i64(source + i))
    else:
        for i in range(n):
            store_u8(target + i, load_u8(source + i))


@inline
def load_tile(state, tile, source, stride):
    clear(tile_at(state, tile), 1024)
    for row in range(rows_of(state, tile)):
        copy(tile_at(state, tile) + 64 * row, source + stride * row, bytes_of(state, tile))


@inline
def store_tile(state, tile, target, stride):
    for row in range(rows_of(state, tile)):
        copy(target + stride * row, tile_at(state, tile) + 64 * row, bytes_of(state, tile))


@inline
def extended(byte, is_signed):
    value = np.int32(byte)
    return value - np.int32(256) if is_signed and value > 127 else value


@inline
def byte_of_lanes(lanes, i, is_signed):
    """Byte i of each of 16 lanes, as an integer."""
    value = (lanes >> (8 * i)) & 255
    return value - ((value >> 7) << 8) if is_signed else value


@inline
def multiply(state, c, a, b, signed_a, signed_b):
    """TDPB..D: c += a b, bytes in fours; False for what it refuses."""
    if not (is_usable(state, c) and is_usable(state, a) and is_usable(state, b)) or c in (a, b) or a == b:
        return False
    n_rows, inner, n_columns = rows_of(state, c), bytes_of(state, a), bytes_of(state, c)
    if n_columns % 4 or inner % 4 or rows_of(state, a) != n_rows:
        return False
    if rows_of(state, b) * 4 != inner or bytes_of(state, b) != n_columns:
        return False
    for k in range(0, inner, 4):  # bytes beyond a row of b are zero
        lanes = load_ints(tile_at(state, b) + 16 * k)
        for i in range(4):
            v = byte_of_lanes(lanes, i, signed_b)
            for m in range(n_rows):
                u = extended(load_u8(tile_at(state, a) + 64 * m + k + i), signed_a)
                at = tile_at(state, c) + 64 * m
                store_ints(at, load_ints(at) + v * u)
    store_i32(tile_at(state, c), np.int32(load_i32(tile_at(state, c)) + load_i64(_COUNTS + 16)))
    store_i64(_COUNTS + 8, load_i64(_COUNTS + 8) + 1)
    return True


@inline
def register(registers, number):
    return load_i64(registers + 8 * ((_PLACES >> (4 * number)) & 15))


@inline
def operand(rip, registers, x, b):
    """Memory operand of the instruction at `rip`: address, stride (index register times scale) and length."""
    modrm = np.int64(load_u8(rip + 4))
    mode, rm, length, stride = modrm >> 6, modrm & 7, 5, 0
    base, has_base = rm | (b << 3), True
    if rm == 4:
        sib = np.int64(load_u8(rip + 5))
        length, rm, base = 6, sib & 7, (sib & 7) | (b << 3)
        index = ((sib >> 3) & 7) | (x << 3)
        if index != 4:
            stride = register(registers, index) << (sib >> 6)
        has_base = not (mode == 0 and rm == 5)
    address = register(registers, base) if has_base else 0
    if mode == 1:
        byte = np.int64(load_u8(rip + length))
        return address + byte - 256 * (byte >> 7), stride, length + 1
    if mode == 2 or (mode == 0 and rm == 5):
        offset = np.int64(load_i32(rip + length))
        if mode == 0 and modrm & 7 == 5:  # relative to the next instruction
            return rip + 9 + offset, 0, 9
        return address + offset, stride, length + 4
    return address, stride, length


@inline
def step(rip, registers, state):
    """Do the instruction at `rip`; its length, or 0 for one that is not ours or not allowed."""
    if load_u8(rip) != 0xC4:
        return 0
    first, second, code = np.int64(load_u8(rip + 1)), np.int64(load_u8(rip + 2)), load_u8(rip + 3)
    modrm = np.int64(load_u8(rip + 4))
    if first & 31 != 2 or second & 0x84 or first & 0x80 == 0:  # map 0F38, W0, L0, and tiles 0 to 7 only
        return 0
    x, b, v, prefix = (~first >> 6) & 1, (~first >> 5) & 1, (~second >> 3) & 15, second & 3
    mode, tile, rm = modrm >> 6, (modrm >> 3) & 7, modrm & 7
    if code == 0x5E:
        if mode != 3 or b or v > 7:
            return 0
        signed_a, signed_b = prefix in (_F2, _F3), prefix in (_F2, _66)
        return 5 if multiply(state, tile, rm, v, signed_a, signed_b) else 0
    if v != 0 or code not in (0x49, 0x4B):
        return 0
    if mode == 3:
        if code == 0x49 and prefix == _NOT and modrm == 0xC0:
            clear(state + CONFIGURED, STATE_BYTES - CONFIGURED)
            return 5
        if code == 0x49 and prefix == _F2 and rm == 0 and is_usable(state, tile):
            clear(tile_at(state, tile), 1024)
            return 5
        return 0
    address, stride, length = operand(rip, registers, x, b)
    if code == 0x49:
        return length if prefix == _NOT and tile == 0 and configure(state, address + stride) else 0
    if rm != 4 or not is_usable(state, tile):
        return 0
    if prefix in (_F2, _66):
        load_tile(state, tile, address, stride)
        return length
    if prefix == _F3:
        store_tile(state, tile, address, stride)
        return length
    return 0


def _handle(number, info, context):
    registers, rip = context + REGISTERS, load_i64(context + REGISTERS + 8 * RIP)
    state, at = state_of_thread(), rip
    if state != 0:
        length = step(at, registers, state)
        while length > 0:
            at += length
            length = step(at, registers, state)
    if at == rip:
        restore_default()
    store_i64(registers + 8 * RIP, at)


class _Action(ctypes.Structure):
    """glibc's struct sigaction."""

    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_uint64 * 16),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


_SA_SIGINFO, _keep = 4, []


def install() -> None:
    """Compile the handler and set it; for as long as the process lives."""
    compiled = cfunc(types.void(types.int32, types.int64, types.int64), error_model="numpy")(_handle)
    _keep.append(compiled)
    action = _Action(handler=compiled.address, flags=_SA_SIGINFO)
    if ctypes.CDLL(None, use_errno=True).sigaction(signal.SIGILL, ctypes.byref(action), None):
        raise OSError(ctypes.get_errno(), "sigaction")


def configured_threads() -> int:
    """Threads that have tiles now."""
    states = np.frombuffer((ctypes.c_uint8 * (MAX_THREADS * STATE_BYTES)).from_address(STATE), np.int64)
    return int(np.count_nonzero(states.reshape(MAX_THREADS, -1)[:, CONFIGURED // 8]))


def features_with_amx() -> str:
    """What NUMBA_CPU_FEATURES has to be, so that LLVM lets AMX through: those of this CPU, and the tiles."""
    features = dict(llvm.get_host_cpu_features()) | {"amx-tile": True, "amx-int8": True}
    return ",".join(("+" if on else "-") + name for name, on in sorted(features.items()))
