"""Low-rank adapters beside the matrices (Hu et al. 2021): y += B (A x), for the tokens that have one.

    t = A x     one number for each of the adapter's ranks; x as floats, from the tiles that the product has read
    y += B t    B already multiplied by the adapter's scale

in float32, after the product itself. What a token gets depends on the token and its adapter alone; to others nothing is
added. The worker is compiled only for models that have adapters; the tables are those of `kernels.tables`, of which
`Lora` and `LoraMatrix` are its own. A is float32 [rank, inputs], B float32 [rank, outputs], so that lanes are outputs.
"""

from functools import cache

import numpy as np
from numba import types

from ropewalk.kernels import clock
from ropewalk.kernels.clock import meet
from ropewalk.kernels.jit import inline, worker
from ropewalk.kernels.simd import (
    fma,
    load_f32,
    load_floats,
    load_i32,
    load_i64,
    splat,
    store_f32,
    store_floats,
    sum_tree,
    table_at,
)
from ropewalk.kernels.sync import take
from ropewalk.kernels.tables import LORA_MATRIX_FIELDS, Job, Lora, LoraMatrix
from ropewalk.kernels.tiles import READS_FLOATS, destinations

_ZERO = np.float32(0)


@inline
def _matrix_of(lora, token, number):
    """Address of a token's row of `LoraMatrix` for matrix `number` of the model; 0 if nothing is added to it."""
    adapter = np.int64(load_i32(lora[Lora.TOKEN_ADAPTERS] + 4 * token))
    if adapter < 0:
        return 0
    row = lora[Lora.MATRICES] + 8 * LORA_MATRIX_FIELDS * (adapter * lora[Lora.N_MATRICES] + number)
    return row if load_i64(row + 8 * LoraMatrix.RANK) > 0 else 0


@inline
def _shrink(job, lora, row, token, width, out):
    """t = A x for one token; x is `width` floats in the tiles."""
    groups = width // 32
    _, x, tile, place = destinations(job, READS_FLOATS, False, token, job[Job.N_TOKENS], groups)
    a = load_i64(row + 8 * LoraMatrix.A)
    for r in range(load_i64(row + 8 * LoraMatrix.RANK)):
        total = splat(_ZERO)
        for g in range(groups):
            at, weight = x + 128 * (g * tile + place), a + 4 * (width * r + 32 * g)
            total = fma(load_floats(at), load_floats(weight), total)
            total = fma(load_floats(at + 64), load_floats(weight + 64), total)
        store_f32(out + 4 * r, sum_tree(total))


@inline
def _expand(row, t, y):
    """y += B t for one token."""
    b, n = load_i64(row + 8 * LoraMatrix.B), load_i64(row + 8 * LoraMatrix.OUTPUTS)
    for i in range(0, n, 16):
        total = splat(_ZERO)
        for r in range(load_i64(row + 8 * LoraMatrix.RANK)):
            total = fma(splat(load_f32(t + 4 * r)), load_floats(b + 4 * (n * r + i)), total)
        store_floats(y + 4 * i, load_floats(y + 4 * i) + total)


@cache
def lora_worker() -> int:
    """Address of the compiled worker for up to three matrices that read the same activations.

    Its arguments, all int64: this thread's number and how many there are; addresses of the team's words and of `job`;
    the number of the first matrix in the model's table, and how many there are; how many activations they read; and
    for each of three the address of its output and the bytes between two tokens there.
    """

    @worker(types.void(*[types.int64] * 13))
    def adapt(tid, n_threads, words_at, job_at, first, count, width, y0, s0, y1, s1, y2, s2):
        words, job = table_at(words_at), table_at(job_at)
        lora = table_at(job[Job.LORA])
        n_items = count * job[Job.N_TOKENS]
        t_bytes = 4 * lora[Lora.MAX_RANK]
        item = take(words, 0)
        while item < n_items:
            row = _matrix_of(lora, item // count, first + item % count)
            if row != 0:
                _shrink(job, lora, row, item // count, width, lora[Lora.SHRUNK] + item * t_bytes)
            item = take(words, 0)
        meet(tid, words, n_threads, job, clock.ADAPT)
        item = take(words, 0)
        while item < n_items:
            token, which = item // count, item % count
            row = _matrix_of(lora, token, first + which)
            if row != 0:
                y, stride = (y0, s0) if which == 0 else ((y1, s1) if which == 1 else (y2, s2))
                _expand(row, lora[Lora.SHRUNK] + item * t_bytes, y + token * stride)
            item = take(words, 0)
        meet(tid, words, n_threads, job, clock.ADAPT)

    return adapt
