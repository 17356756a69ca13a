"""How the threads of a team meet: atomic counters to share work, a barrier between phases, a bell between steps.

All of it lives in one int64 array, a cache line (8 elements) for each word, so that threads do not disturb each
other. Work is taken item by item from counters, never dealt out in advance: a thread that is held up by another
process takes less. Small work has one counter for all (`take`). Weights are streams that the memory's prefetcher
follows only while a thread reads on and on: there, each thread begins with a run of its own and then helps the
others with theirs (`next_of_run`). A thread that waits spins for a moment, then yields its core at every look.
"""

import platform
import time

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ropewalk.kernels.jit import inline
from ropewalk.kernels.simd import I32, emit_call

LINE = 8
ARRIVED, GENERATION, BELL, STOP = (LINE * i for i in range(4))
BELL_STEP = 1 << 16  # a bell is the step's number times this plus its number of threads: both in one word
WAITED = LINE * 4  # ns that member 0 waited at barriers, short spins aside; the next two words are its clock
COUNTERS = LINE * 5  # three counters, so that three products can run between two barriers
N_COUNTERS = 3
ASLEEP = COUNTERS + LINE * N_COUNTERS  # a line for each thread: whether it sleeps, and behind that the next
RUNS = (
    ASLEEP + 1
)  # [even or odd phase, counter]: its own run; those of the next phase are reset during this one
MAX_HELPED = 8  # of so many runs a thread takes work, its own included: enough to make good for a few held up
SPINS_BEFORE_YIELD = 4096
SPINS_BEFORE_SLEEP = 20_000


def new_sync(n_threads: int) -> np.ndarray:
    """The shared words of a team, int64, aligned to cache lines."""
    words = np.zeros(ASLEEP + LINE * (n_threads + 1), np.int64)
    offset = -(words.ctypes.data // 8) % LINE
    return words[offset : offset + ASLEEP + LINE * n_threads]


def _word(context, builder, array_type, array, index):
    return builder.gep(context.make_array(array_type)(context, builder, array).data, [index])


@intrinsic
def atomic_add(typing_context, words, index, amount):
    """Add to a word and give what it held before."""

    def emit(context, builder, sig, args):
        return builder.atomic_rmw(
            "add", _word(context, builder, sig.args[0], args[0], args[1]), args[2], "seq_cst"
        )

    return types.int64(words, types.int64, types.int64), emit


@intrinsic
def atomic_swap(typing_context, words, index, value):
    """Set a word and give what it held before."""

    def emit(context, builder, sig, args):
        return builder.atomic_rmw(
            "xchg", _word(context, builder, sig.args[0], args[0], args[1]), args[2], "seq_cst"
        )

    return types.int64(words, types.int64, types.int64), emit


@intrinsic
def atomic_load(typing_context, words, index):
    def emit(context, builder, sig, args):
        return builder.load_atomic(_word(context, builder, sig.args[0], args[0], args[1]), "seq_cst", 8)

    return types.int64(words, types.int64), emit


@intrinsic
def relax(typing_context):
    """Tell the core that this is a spin loop."""

    def emit(context, builder, sig, args):
        machine = platform.machine().lower()
        if machine in ("x86_64", "amd64"):
            emit_call(builder, "llvm.x86.sse2.pause", ir.VoidType(), [])
        elif machine in ("aarch64", "arm64"):
            emit_call(builder, "llvm.aarch64.hint", ir.VoidType(), [I32(1)])
        return context.get_dummy_value()

    return types.void(), emit


@intrinsic
def yield_core(typing_context):
    """Let another thread or process run on this core (POSIX sched_yield)."""

    def emit(context, builder, sig, args):
        emit_call(builder, "sched_yield", I32, [])
        return context.get_dummy_value()

    return types.void(), emit


@inline
def wait_while(words, index, value, limit):
    """Wait until a word is no longer `value`, or for `limit` looks; gives what it holds."""
    looks = 0
    seen = atomic_load(words, index)
    while seen == value and looks < limit:
        if looks < SPINS_BEFORE_YIELD:
            relax()
        else:
            yield_core()
        looks += 1
        seen = atomic_load(words, index)
    return seen


@intrinsic
def _read_clock(typing_context, words, index):
    """Write seconds and nanoseconds of POSIX's monotonic clock to two words."""

    def emit(context, builder, sig, args):
        at = _word(context, builder, sig.args[0], args[0], args[1])
        emit_call(builder, "clock_gettime", I32, [I32(time.CLOCK_MONOTONIC), at])
        return context.get_dummy_value()

    return types.void(words, types.int64), emit


@inline
def _now(words):
    _read_clock(words, WAITED + 1)
    return words[WAITED + 1] * 1_000_000_000 + words[WAITED + 2]


@inline
def reset_runs(words, tid, phase):
    """Make the counters of a thread's run ready for phases of this parity."""
    for c in range(N_COUNTERS):
        words[RUNS + LINE * tid + N_COUNTERS * phase + c] = 0


@inline
def is_last(tid, words, n_threads, generation):
    """Arrive at a barrier; True for the last of the team, who has to `release` the others."""
    reset_runs(words, tid, (generation + 1) & 1)  # nobody looks at them before the release
    return atomic_add(words, ARRIVED, 1) == n_threads - 1


@inline
def release(words):
    """Reset the work counters and let the team go on."""
    for c in range(N_COUNTERS):
        atomic_swap(words, COUNTERS + LINE * c, 0)
    atomic_swap(words, ARRIVED, 0)
    atomic_add(words, GENERATION, 1)


@inline
def wait_for_release(tid, words, generation):
    """Wait until the last one has come. Member 0 keeps account of long waits."""
    if wait_while(words, GENERATION, generation, SPINS_BEFORE_YIELD) == generation:
        start = _now(words) if tid == 0 else 0
        while atomic_load(words, GENERATION) == generation:
            yield_core()
        if tid == 0:
            words[WAITED] += _now(words) - start


@inline
def barrier(tid, words, n_threads):
    """Wait for the whole team; the last to arrive resets the work counters."""
    generation = atomic_load(words, GENERATION)
    if is_last(tid, words, n_threads, generation):
        release(words)
    else:
        wait_for_release(tid, words, generation)


@inline
def take(words, counter):
    """The next item of work of a counter."""
    return atomic_add(words, COUNTERS + LINE * counter, 1)


@inline
def next_of_run(tid, n_threads, words, counter, n_items, turn, n_helped=MAX_HELPED):
    """The next item for thread `tid`, and its `turn`: 0 at first, while it is busy with its own run of items.

    Items are cut into a run for each thread. There are none left for this one if the item is `n_items`. With
    `n_helped` = 1 nobody helps: for work that is over before help could come.
    """
    phase = N_COUNTERS * (atomic_load(words, GENERATION) & 1)
    while turn < min(n_threads, n_helped):
        owner = (tid + turn) % n_threads
        start, end = owner * n_items // n_threads, (owner + 1) * n_items // n_threads
        item = start + atomic_add(words, RUNS + LINE * owner + phase + counter, 1)
        if item < end:
            return item, turn
        turn += 1
    return n_items, turn


@inline
def next_chunk(tid, n_threads, words, counter, n_items, chunk, turn, n_helped=MAX_HELPED):
    """The same, `chunk` items at a time: the first, the one after the last, and the `turn`."""
    n_chunks = (n_items + chunk - 1) // chunk
    number, turn = next_of_run(tid, n_threads, words, counter, n_chunks, turn, n_helped)
    first = min(number * chunk, n_items)
    return first, min(first + chunk, n_items), turn


@inline
def chunk_of(n_items, n_threads):
    """Items to take at a time: an eighth of a thread's fair share."""
    return max(1, n_items // (8 * n_threads))
