"""A mixture of experts: each token goes through the few that its router chooses, and only their weights are read.

    router outputs -> scores, choice and weights of each token        its experts in descending order of score
    (token, choice) pairs in groups, one for each expert in use       by one thread: a counting sort
    norm into the tiles of the group -> gate, up -> activation -> down -> output of each pair
    branch of a token = shared expert + sum of weight * output, in the order of its choices

A pair has a row in every buffer of pairs; the rows of a group are consecutive, and its tiles are those of
`kernels.matmul` for as many tokens as it has. What a token's pairs are and in which order they are added up depends
on the token alone, so its bits do not depend on the batch. All of it is one worker, compiled only for models that need
it; it knows the tables of `kernels.tables`, of which `Moe` is its own.
"""

from functools import cache

import numpy as np
from numba import types

from ropewalk.kernels import clock
from ropewalk.kernels.attention import exp_of
from ropewalk.kernels.clock import meet
from ropewalk.kernels.definition import TOKEN_GROUP_BYTES
from ropewalk.kernels.jit import inline, worker
from ropewalk.kernels.pointwise import activate, norm_to_tile, put_group
from ropewalk.kernels.products import multiply, panels_at_once, product, tile_of
from ropewalk.kernels.simd import (
    fma,
    load_f32,
    load_floats,
    load_i32,
    rows_at,
    splat,
    store_f32,
    store_floats,
    store_i32,
    table_at,
)
from ropewalk.kernels.sync import chunk_of, next_of_run, take
from ropewalk.kernels.tables import DOWN_EXPS, GATE_EXPS, ROUTER, UP_EXPS, Job, Layer, Matrix, Moe
from ropewalk.kernels.tiles import READS_BYTES, READS_FLOATS, activated_to_tiles, with_bias

SOFTMAX, SIGMOID, SOFTMAX_OF_CHOSEN = range(3)
_ZERO, _ONE, _MINUS_INFINITY = np.float32(0), np.float32(1), np.float32(-np.inf)


# ---- choice


@inline
def _score(row, n, bias, scoring):
    """Router outputs into scores, in place, and into what is chosen by, `n` floats further on."""
    if scoring == SOFTMAX:
        top, total = load_f32(row), _ZERO
        for e in range(1, n):
            top = max(top, load_f32(row + 4 * e))
        for e in range(n):
            store_f32(row + 4 * e, exp_of(load_f32(row + 4 * e) - top))
            total += load_f32(row + 4 * e)
        for e in range(n):
            store_f32(row + 4 * e, load_f32(row + 4 * e) / total)
    elif scoring == SIGMOID:
        for e in range(n):
            store_f32(row + 4 * e, _ONE / (_ONE + exp_of(-load_f32(row + 4 * e))))
    for e in range(n):
        added = load_f32(bias + 4 * e) if bias != 0 else _ZERO
        store_f32(row + 4 * (n + e), load_f32(row + 4 * e) + added)


@inline
def _keep_groups(row, n, n_groups, n_kept, sum_of_two):
    """Put -inf to all experts but those of the best groups: by their greatest score, or by the sum of the two greatest.

    `row` is what is chosen by; the scores of the groups take the place after it.
    """
    size, groups = n // n_groups, row + 4 * n
    for g in range(n_groups):
        first, second = _MINUS_INFINITY, _MINUS_INFINITY
        for e in range(g * size, (g + 1) * size):
            score = load_f32(row + 4 * e)
            if score > first:
                first, second = score, first
            elif score > second:
                second = score
        store_f32(groups + 4 * g, first + second if sum_of_two else first)
    for g in range(n_groups):
        n_before, mine = 0, load_f32(groups + 4 * g)
        for other in range(n_groups):
            score = load_f32(groups + 4 * other)
            if score > mine or (score == mine and other < g):
                n_before += 1
        if n_before >= n_kept:
            for e in range(g * size, (g + 1) * size):
                store_f32(row + 4 * e, _MINUS_INFINITY)


@inline
def _best(row, n, chosen, n_chosen):
    """The expert with the greatest score that is not chosen yet; of equal ones the first."""
    best = -1
    for e in range(n):
        is_new = True
        for j in range(n_chosen):
            if load_i32(chosen + 4 * j) == e:
                is_new = False
        if is_new and (best < 0 or load_f32(row + 4 * e) > load_f32(row + 4 * best)):
            best = e
    return best


@inline
def _weigh(moe, row, chosen, weights):
    """Weights of the chosen experts."""
    n_used, scoring = moe[Moe.N_USED], moe[Moe.SCORING]
    top, total = load_f32(row + 4 * np.int64(load_i32(chosen))), _ZERO
    for j in range(n_used):
        w = load_f32(row + 4 * np.int64(load_i32(chosen + 4 * j)))
        if scoring == SOFTMAX_OF_CHOSEN:
            w = exp_of(w - top)
        store_f32(weights + 4 * j, w)
        total += w
    scale = load_f32(moe[Moe.WEIGHT_SCALE])
    for j in range(n_used):
        w = load_f32(weights + 4 * j)
        if moe[Moe.NORMALISE] or scoring == SOFTMAX_OF_CHOSEN:
            w = w / total
        store_f32(weights + 4 * j, w * scale)


@inline
def _choose(words, job, moe, layer):
    """Experts and weights of each token."""
    n, n_used = moe[Moe.N_EXPERTS], moe[Moe.N_USED]
    token = take(words, 1)
    while token < job[Job.N_TOKENS]:
        row = moe[Moe.SCORES] + moe[Moe.SCORES_STRIDE] * token
        shared = moe[Moe.SHARED_GATES] + 4 * token
        store_f32(shared, _ONE)
        if moe[Moe.HAS_SHARED_GATE]:  # the last row of the router matrix
            store_f32(shared, _ONE / (_ONE + exp_of(-load_f32(row + 4 * n))))
        if layer[Layer.ROUTER_BIAS] != 0:
            for e in range(n):
                store_f32(row + 4 * e, load_f32(row + 4 * e) + load_f32(layer[Layer.ROUTER_BIAS] + 4 * e))
        _score(row, n, layer[Layer.CHOICE_BIAS], moe[Moe.SCORING])
        if moe[Moe.N_GROUPS] > 1:
            by_sums = moe[Moe.SCORING] == SIGMOID
            _keep_groups(row + 4 * n, n, moe[Moe.N_GROUPS], moe[Moe.N_GROUPS_USED], by_sums)
        chosen, weights = moe[Moe.CHOSEN] + 4 * n_used * token, moe[Moe.WEIGHTS] + 4 * n_used * token
        for j in range(n_used):
            store_i32(chosen + 4 * j, np.int32(_best(row + 4 * n, n, chosen, j)))
        _weigh(moe, row, chosen, weights)
        token = take(words, 1)


@inline
def _group(job, moe, number):
    """Rows of the pairs: experts ascending, in each its tokens ascending; done by one thread."""
    n_pairs, max_tile, row, n_active = job[Job.N_TOKENS] * moe[Moe.N_USED], job[Job.MAX_TILE], 0, 0
    for e in range(moe[Moe.N_EXPERTS]):
        store_i32(moe[Moe.COUNTS] + 4 * e, np.int32(0))
    for pair in range(n_pairs):
        count = moe[Moe.COUNTS] + 4 * np.int64(load_i32(moe[Moe.CHOSEN] + 4 * pair))
        store_i32(moe[Moe.ROWS] + 4 * pair, load_i32(count))
        store_i32(count, load_i32(count) + np.int32(1))
    for e in range(moe[Moe.N_EXPERTS]):
        count = np.int64(load_i32(moe[Moe.COUNTS] + 4 * e))
        store_i32(moe[Moe.FIRSTS] + 4 * e, np.int32(row))
        if count > 0:
            store_i32(moe[Moe.ACTIVE] + 4 * n_active, np.int32(e))
            n_active += 1
            first, size = tile_of(count - 1, count, max_tile)
            row += first + size
    moe[Moe.N_ACTIVE] = n_active
    store_i32(moe[Moe.ACTIVE_OF_LAYERS] + 4 * number, np.int32(n_active))


# ---- the experts' products


@inline
def _pair(job, moe, pair, groups, reads):
    """A pair's expert, its row, and where its tiles are, for `put_group`."""
    e = np.int64(load_i32(moe[Moe.CHOSEN] + 4 * pair))
    count, first = np.int64(load_i32(moe[Moe.COUNTS] + 4 * e)), np.int64(load_i32(moe[Moe.FIRSTS] + 4 * e))
    local = np.int64(load_i32(moe[Moe.ROWS] + 4 * pair))
    start, tile = tile_of(local, count, job[Job.MAX_TILE])
    at = (first + start) * groups
    as_bytes = moe[Moe.BYTE_TILES] + at * TOKEN_GROUP_BYTES if reads & READS_BYTES else 0
    as_floats = moe[Moe.FLOAT_TILES] + at * 128 if reads & READS_FLOATS else 0
    return e, first + local, (as_bytes, as_floats, tile, local - start)


@inline
def _normalise(n_threads, words, job, moe, layer):
    """The input of each pair into the tiles of its group."""
    hidden, eps, n_used = job[Job.HIDDEN], load_f32(job[Job.CONSTANTS]), moe[Moe.N_USED]
    norm = (layer[Layer.FFN_NORM], layer[Layer.FFN_NORM_BIAS], job[Job.LAYER_NORM])
    n_pairs = job[Job.N_TOKENS] * n_used
    pair = take(words, 0)
    while pair < n_pairs:
        x = job[Job.X] + 4 * hidden * (pair // n_used)
        _, _, to = _pair(job, moe, pair, hidden // 32, layer[Layer.EXPERT_INPUT])
        norm_to_tile(x, norm, hidden, eps, False, to)
        pair = take(words, 0)


@inline
def _product(tid, n_threads, words, counter, job, moe, matrix, y):
    """y = matrix of each expert in use x the activations of its pairs; y has a row for each pair."""
    n_panels, groups, panel_bytes = (
        matrix[Matrix.N_PANELS],
        matrix[Matrix.N_GROUPS],
        matrix[Matrix.PANEL_BYTES],
    )
    max_tile, y_stride = job[Job.MAX_TILE], 64 * n_panels
    tiles, token_bytes = moe[Moe.BYTE_TILES], groups * TOKEN_GROUP_BYTES
    if matrix[Matrix.IS_FLOAT]:
        tiles, token_bytes = moe[Moe.FLOAT_TILES], groups * 128
    chunk = min(chunk_of(moe[Moe.N_ACTIVE] * n_panels, n_threads), n_panels)
    chunk = panels_at_once(chunk, panel_bytes, job[Job.N_TOKENS], max_tile)
    n_chunks = (n_panels + chunk - 1) // chunk
    n_items = moe[Moe.N_ACTIVE] * n_chunks
    item, turn = next_of_run(tid, n_threads, words, counter, n_items, 0)
    while item < n_items:
        e = np.int64(load_i32(moe[Moe.ACTIVE] + 4 * (item // n_chunks)))
        first = item % n_chunks * chunk
        count, row = np.int64(load_i32(moe[Moe.COUNTS] + 4 * e)), np.int64(load_i32(moe[Moe.FIRSTS] + 4 * e))
        panels = matrix[Matrix.PANELS] + (e * n_panels + first) * panel_bytes
        of_expert, out = tiles + row * token_bytes, y + row * y_stride + first * 64
        some = min(chunk, n_panels - first)
        multiply(matrix, panels, some, of_expert, token_bytes, count, max_tile, out, y_stride, 0)
        item, turn = next_of_run(tid, n_threads, words, counter, n_items, turn)


@inline
def _activate(n_threads, words, job, moe, layer):
    """activation(gate) * up of each pair, into the tiles of its group."""
    width, kind, groups = moe[Moe.FFN], job[Job.ACTIVATION], moe[Moe.FFN] // 32
    n_items = job[Job.N_TOKENS] * moe[Moe.N_USED] * groups
    chunk = chunk_of(n_items, n_threads)
    first = take(words, 0) * chunk
    while first < n_items:
        for item in range(first, min(first + chunk, n_items)):
            pair, g = item // groups, item % groups
            e, row, to = _pair(job, moe, pair, groups, layer[Layer.EXPERT_DOWN_INPUT])
            gate, up, at = moe[Moe.GATE] + 4 * width * row, moe[Moe.UP] + 4 * width * row, 32 * g
            gate_bias = (
                layer[Layer.EXPERT_GATE_BIAS] + 4 * width * e if layer[Layer.EXPERT_GATE_BIAS] != 0 else 0
            )
            up_bias = layer[Layer.EXPERT_UP_BIAS] + 4 * width * e if layer[Layer.EXPERT_UP_BIAS] != 0 else 0
            a = activate(with_bias(gate, gate_bias, at), with_bias(up, up_bias, at), kind)
            b = activate(with_bias(gate, gate_bias, at + 16), with_bias(up, up_bias, at + 16), kind)
            put_group(a, b, to, False, g)
        first = take(words, 0) * chunk


@inline
def _combine(words, job, moe, layer, has_shared):
    """The branch of each token, into Y: the shared expert's output is there already."""
    hidden, n_used = job[Job.HIDDEN], moe[Moe.N_USED]
    token = take(words, 0)
    while token < job[Job.N_TOKENS]:
        y = job[Job.Y] + 4 * hidden * token
        shared = load_f32(moe[Moe.SHARED_GATES] + 4 * token)
        for i in range(0, hidden, 16):
            total = load_floats(y + 4 * i) * shared if has_shared else splat(_ZERO)
            for j in range(n_used):
                pair = n_used * token + j
                e = np.int64(load_i32(moe[Moe.CHOSEN] + 4 * pair))
                row = np.int64(load_i32(moe[Moe.FIRSTS] + 4 * e)) + np.int64(
                    load_i32(moe[Moe.ROWS] + 4 * pair)
                )
                bias = layer[Layer.EXPERT_DOWN_BIAS]
                out = with_bias(moe[Moe.OUT] + 4 * hidden * row, bias + 4 * hidden * e if bias != 0 else 0, i)
                total = fma(splat(load_f32(moe[Moe.WEIGHTS] + 4 * pair)), out, total)
            store_floats(y + 4 * i, total)
        token = take(words, 0)


@cache
def expert_worker() -> int:
    """Address of the compiled worker for the second half of a layer that has experts.

    Its input is in the tiles, its output is left in Y. Its arguments, all int64: this thread's number and how many
    there are; addresses of the team's words, of `job`, of the layer's row, and of the rows of its shared expert's GATE,
    UP and DOWN and of its own four matrices; fields of a matrix's row; the layer's number.
    """

    @worker(types.void(*[types.int64] * 9))
    def experts(tid, n_threads, words_at, job_at, layer_at, shared_at, own_at, fields, number):
        words, job, layer = table_at(words_at), table_at(job_at), table_at(layer_at)
        moe = table_at(job[Job.MOE])
        shared = rows_at(shared_at, 3, fields)
        own = rows_at(own_at, 4, fields)
        n_tokens, stride, has_shared = (
            job[Job.N_TOKENS],
            4 * layer[Layer.FFN],
            shared[2, Matrix.N_PANELS] != 0,
        )
        scores_stride = moe[Moe.SCORES_STRIDE]
        product(tid, n_threads, words, 0, job, own[ROUTER], n_tokens, moe[Moe.SCORES], scores_stride, 0)
        product(tid, n_threads, words, 1, job, shared[0], n_tokens, job[Job.GATE], stride, 0)
        product(tid, n_threads, words, 2, job, shared[1], n_tokens, job[Job.UP], stride, 0)
        meet(tid, words, n_threads, job, clock.GATE_UP)
        _choose(words, job, moe, layer)
        if has_shared:
            activated_to_tiles(tid, n_threads, words, job, layer)
        meet(tid, words, n_threads, job, clock.ROUTE)
        product(tid, n_threads, words, 0, job, shared[2], n_tokens, job[Job.Y], 4 * job[Job.HIDDEN], 0)
        if take(words, 1) == 0:
            _group(job, moe, number)
        meet(tid, words, n_threads, job, clock.ROUTE)
        _normalise(n_threads, words, job, moe, layer)
        meet(tid, words, n_threads, job, clock.NORM)
        _product(tid, n_threads, words, 0, job, moe, own[GATE_EXPS], moe[Moe.GATE])
        _product(tid, n_threads, words, 1, job, moe, own[UP_EXPS], moe[Moe.UP])
        meet(tid, words, n_threads, job, clock.GATE_UP)
        _activate(n_threads, words, job, moe, layer)
        meet(tid, words, n_threads, job, clock.POINTWISE)
        _product(tid, n_threads, words, 0, job, moe, own[DOWN_EXPS], moe[Moe.OUT])
        meet(tid, words, n_threads, job, clock.DOWN)
        _combine(words, job, moe, layer, has_shared)
        meet(tid, words, n_threads, job, clock.DOWN)

    return experts
