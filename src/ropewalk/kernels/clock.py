"""Where the time of a step goes: when each phase ended for member 0 of the team, and for the whole team.

The log is an int64 array, whose address stands in the job table while somebody wants to know; with no address, a
phase costs one load and one branch more, and nothing that is computed depends on it:

    [entries, capacity, part, seconds, nanoseconds, part, seconds, nanoseconds, ...]

An entry says that `part` ended at that moment of POSIX's monotonic clock, the one of `time.perf_counter`. It began at
the entry before it. What member 0 waits for the others at a barrier is a part of its own, and ends when the last one
comes, who writes it down: member 0 itself may notice later, when the next phase is half done without it. A log that is
full takes no more entries.
"""

import time

import numpy as np
from numba import types
from numba.extending import intrinsic

from ropewalk.kernels.jit import inline
from ropewalk.kernels.simd import I32, I64, emit_call, load_i64, store_i64
from ropewalk.kernels.sync import GENERATION, atomic_load, is_last, release, wait_for_release
from ropewalk.kernels.tables import Job

# A new part gets the next number, and its name the same place in PARTS.
START, WAIT, NORM, QKV, ROTATE, ATTEND, POINTWISE, OUT, GATE_UP, DOWN, OUTPUT, ROUTE, ADAPT = range(13)
PARTS = (
    "start",
    "wait",
    "norm",
    "qkv",
    "rotate",
    "attend",
    "pointwise",
    "out",
    "gate_up",
    "down",
    "output",
    "route",
    "adapt",
)
HEADER, ENTRY = 2, 3


@intrinsic
def write_clock(typing_context, address):
    """Write seconds and nanoseconds of POSIX's monotonic clock to an address."""

    def emit(context, builder, sig, args):
        at = builder.inttoptr(args[0], I64.as_pointer())
        emit_call(builder, "clock_gettime", I32, [I32(time.CLOCK_MONOTONIC), at])
        return context.get_dummy_value()

    return types.void(types.int64), emit


@inline
def lap(job, part):
    """Note that a part ends now."""
    log = job[Job.CLOCK]
    if log != 0:
        n = load_i64(log)
        if n < load_i64(log + 8):
            entry = log + 8 * (HEADER + ENTRY * n)
            store_i64(entry, part)
            write_clock(entry + 8)
            store_i64(log, n + 1)


@inline
def meet(tid, words, n_threads, job, part):
    """The end of a phase: a barrier, and two entries in the log: as member 0 comes, and as the last one has come."""
    if tid == 0:
        lap(job, part)
    generation = atomic_load(words, GENERATION)
    if is_last(tid, words, n_threads, generation):
        lap(job, WAIT)
        release(words)
    else:
        wait_for_release(tid, words, generation)


def new_log(n_layers: int) -> np.ndarray:
    """A log with room for one pass through `n_layers` layers."""
    capacity = 64 * (n_layers + 1)
    log = np.zeros(HEADER + ENTRY * capacity, np.int64)
    log[1] = capacity
    return log


def read_log(log: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Part and end of every entry, in nanoseconds: int64 [n], int64 [n]; the log is empty afterwards."""
    n = int(log[0])
    entries = log[HEADER : HEADER + ENTRY * n].reshape(n, ENTRY)
    log[0] = 0
    return entries[:, 0].copy(), entries[:, 1] * 1_000_000_000 + entries[:, 2]
