"""Choosing a token in compiled code: from one row of float32 logits to an id, by the knobs of one request.

What is computed is defined in `engine/sampler.py`, which has the same in readable NumPy. Weights are whole numbers
(`kernels.powers`), so neither the order of a sum nor the way a set is found can change a token. What is fast:

- One vectorised pass finds the largest logit of every group of 64 tokens. Group j of a block of 1024 has its tokens
  j, j + 16, j + 32 ..., so that a group is a lane. Blocks that lie too deep are not looked at again.
- Most rows have few tokens that matter: those near the largest logit, or above the k-th largest maximum of a
  group, are listed, and it is proved that no other token can be drawn. Where that fails the list is the whole row.
- A truncation keeps the head of the list, by logit or by another key. `_cut` finds its border by counting keys into
  buckets, then the keys of the border's bucket, and so on: nothing is sorted. What is dropped gets weight 0.

A list is two or three arrays of a `Workspace`: logits, weights and, unless it is the whole row, ids, which ascend.
Knows arrays, not requests; a row with NaN or an infinite maximum is left to the caller.
"""

import threading
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ropewalk.kernels.jit import inline, kernel
from ropewalk.kernels.powers import LOG2E, SERIES
from ropewalk.kernels.simd import load_floats, max_lane, maximum, splat, store_floats

GROUP = 64  # tokens whose maximum stands for them
BLOCK = 16 * GROUP
N_BUCKETS = 2048
NEAR = 12.0  # bits: the border of a nucleus is usually this near to the largest logit
FEW = 4096  # and those are usually fewer than this
UNUSUAL = -1  # instead of a token: a NaN among the logits, or no finite largest one

_MINUS_INFINITY, _LOWEST = np.float32(-np.inf), np.float64(np.finfo(np.float32).min)
_ROUND = 1.5 * 2.0**52  # adding it rounds to a whole number, half to even, which its low bits then show
_ROUND_BITS = int(np.float64(_ROUND).view(np.int64))


# ---- weights


def _bitcast(result: Any, argument: Any, llvm_type: ir.Type) -> Any:
    @intrinsic
    def cast(typing_context, value):
        def emit(context, builder, sig, args):
            return builder.bitcast(args[0], llvm_type)

        return result(argument), emit

    return cast


_bits_of = _bitcast(types.int64, types.float64, ir.IntType(64))
_float_of_bits = _bitcast(types.float64, types.int64, ir.DoubleType())


@inline
def whole(x):
    """x rounded to an integer, half to even; |x| is at most 2**51."""
    return _bits_of(x + _ROUND) - _ROUND_BITS


@inline
def weight(exponent, bits):
    """`powers.weights` for one exponent."""
    rounded = exponent + _ROUND
    f = exponent - (rounded - _ROUND)
    p = SERIES[10] * f + SERIES[9]
    p = p * f + SERIES[8]
    p = p * f + SERIES[7]
    p = p * f + SERIES[6]
    p = p * f + SERIES[5]
    p = p * f + SERIES[4]
    p = p * f + SERIES[3]
    p = p * f + SERIES[2]
    p = p * f + SERIES[1]
    p = p * f + SERIES[0]
    scale = _float_of_bits((_bits_of(rounded) + (1023 + bits)) << 52)
    return whole(p * scale) if exponent >= -bits else 0


# ---- passes over all logits


@inline
def _block(logits, block):
    """The logits of a block: an array that starts at 0, so that Numba need not allow for negative indices in loops."""
    return logits[block * BLOCK : min(logits.shape[0], (block + 1) * BLOCK)]


@inline
def _maxima(logits, maxima):
    """The largest logit of each group, NaN not counted; gives the largest of all, and the number of NaN."""
    largest, n_nan = _MINUS_INFINITY, 0
    for block in range(maxima.shape[0] // 16):
        part, groups = _block(logits, block), maxima[16 * block : 16 * block + 16]
        n = part.shape[0]
        lanes, at = splat(_MINUS_INFINITY), part.ctypes.data
        for i in range(0, n - 15, 16):
            lanes = maximum(load_floats(at + 4 * i), lanes)
        store_floats(groups.ctypes.data, lanes)
        for i in range(n % 16):
            x = part[n - n % 16 + i]
            groups[i] = x if x > groups[i] else groups[i]
        for i in range(n):
            n_nan += part[i] != part[i]
        largest = max(largest, _block_maximum(maxima, block))
    return largest, n_nan


@inline
def _block_maximum(maxima, block):
    return max_lane(load_floats(maxima.ctypes.data + 64 * block))


@inline
def _sum_weights(logits, maxima, sums, largest, per, bits):
    """The weights of each block, and of all; `per` is log2(e) / temperature."""
    total = 0
    for block in range(sums.shape[0]):
        of_block = 0
        if (_block_maximum(maxima, block) - largest) * per >= -bits:
            part = _block(logits, block)
            for i in range(part.shape[0]):
                of_block += weight((part[i] - largest) * per, bits)
        sums[block] = of_block
        total += of_block
    return total


@inline
def _draw_of_all(logits, sums, largest, per, bits, target):
    """The first token at which the running sum of weights exceeds `target`."""
    block = 0
    while sums[block] <= target:
        target -= sums[block]
        block += 1
    token = block * BLOCK
    while True:
        target -= weight((logits[token] - largest) * per, bits)
        if target < 0:
            return token
        token += 1


@inline
def _collect(logits, maxima, bound, limit, ids, values):
    """List the tokens of logits not below `bound`; gives how many, or more than `limit` if there are too many."""
    count = 0
    for block in range(maxima.shape[0] // 16):
        if _block_maximum(maxima, block) >= bound:
            part = _block(logits, block)
            for i in range(part.shape[0]):
                if part[i] >= bound:
                    ids[count], values[count] = block * BLOCK + i, part[i]
                    count += 1
            if count > limit:
                break
    return count


@inline
def _weigh(values, weights, count, largest, per, bits):
    """Weights of a list; gives their sum."""
    total = 0
    for j in range(count):
        weights[j] = weight((values[j] - largest) * per, bits)
        total += weights[j]
    return total


@inline
def _moment(exponent, w):
    """A token's part of the sum of weight * exponent, as a whole number."""
    return whole(w * exponent)


@inline
def _all_moments(logits, maxima, largest, per, bits):
    """The sums of weights and of weight * exponent over all tokens."""
    total, moment = 0, 0
    for block in range(maxima.shape[0] // 16):
        if (_block_maximum(maxima, block) - largest) * per >= -bits:
            part = _block(logits, block)
            for i in range(part.shape[0]):
                exponent = (part[i] - largest) * per
                w = weight(exponent, bits)
                total += w
                moment += _moment(max(exponent, -bits), w)
    return total, moment


# ---- truncations of a list


@inline
def _share(mass, total):
    """The whole number that a share of `total` is not below, at least 1."""
    return max(1, min(total, np.int64(np.ceil(mass * np.float64(total)))))


@inline
def _cut(keys, weights, count, need, counting, top, bottom, scratch):
    """Where the running sum of weights, keys descending and ties by position, reaches `need`.

    Gives the key of the border, how many of those that have this key are within, and how many have it. With
    `counting` every weight is 1. No key is above `top`; those below `bottom`, which is finite, weigh nothing or do not
    count. The sum of the others does reach `need`, which is at least 1.
    """
    buckets, rest_keys, rest_weights, histogram = scratch
    while bottom < top:
        scale = N_BUCKETS / (top - bottom)
        for j in range(count):
            buckets[j] = np.int32(min((top - keys[j]) * scale, N_BUCKETS - 1.0))
        histogram[:] = 0
        for j in range(count):
            histogram[buckets[j]] += 1 if counting else weights[j]
        border = 0
        while histogram[border] < need:
            need -= histogram[border]
            border += 1
        kept, low, high = 0, top, bottom
        for j in range(count):
            if buckets[j] == border and keys[j] >= bottom:
                key = np.float64(keys[j])
                rest_keys[kept], rest_weights[kept] = key, weights[j]
                low, high = min(low, key), max(high, key)
                kept += 1
        keys, weights, count, top, bottom = rest_keys, rest_weights, kept, high, low
    within = 0
    while need > 0:
        need -= 1 if counting else weights[within]
        within += 1
    return top, within, count


@inline
def _keep_head(keys, weights, count, border):
    """Take the weight of what lies behind the border that `_cut` found."""
    key, within, tied = border
    for j in range(count):
        weights[j] = weights[j] if keys[j] >= key else 0
    if within < tied:
        for j in range(count):
            if keys[j] == key:
                within -= 1
                weights[j] = weights[j] if within >= 0 else 0


@inline
def _keep_likely(weights, count, least):
    """Take the weight of what weighs less than `least`."""
    for j in range(count):
        weights[j] = weights[j] if weights[j] >= least else 0


@inline
def _keep_typical(values, weights, count, mass, total, moment, largest, per, bits, keys, scratch):
    """Take the weight of the tokens of least typical surprise, except of the most likely one."""
    mean = np.float64(moment) / np.float64(total)
    for j in range(count):
        keys[j] = -abs((values[j] - largest) * per - mean)
    border = _cut(keys, weights, count, _share(mass, total), False, 0.0, -bits - 2.0, scratch)
    _keep_head(keys, weights, count, border)
    best = 0
    while values[best] < largest:
        best += 1
    weights[best] = 1 << bits


# ---- the list


@inline
def _bound_of_kth(maxima, k, largest, floor, weights, scratch):
    """A number that the k-th largest logit is not below: the k-th largest maximum of a group, or else `floor`."""
    count = 0
    for group in range(maxima.shape[0]):
        count += maxima[group] >= floor
    if count < k:
        return floor
    return _cut(maxima, weights, maxima.shape[0], k, True, largest, floor, scratch)[0]


@inline
def _list(logits, knobs, per, bits, largest, floor, work):
    """List every token that can be drawn, and its weight.

    Gives how many (0: the list is the whole row); the lowest logit that counts; and, where tokens have been left out
    that the first truncation counts, the sums of weights and of weight * exponent with them, else 0 and 0.
    """
    top_k, top_p, min_p, typical_p = knobs
    maxima, sums, ids, values, weights, _, scratch = work
    if top_k > 0:
        bound = _bound_of_kth(maxima, top_k, largest, floor, weights, scratch)
        return _collect(logits, maxima, bound, logits.shape[0], ids, values), bound, 0, 0
    if top_p < 1.0:
        near = max(floor, largest - NEAR / per)
        count = _collect(logits, maxima, near, FEW, ids, values)
        if count <= FEW:
            mass = _weigh(values, weights, count, largest, per, bits)
            total = _sum_weights(logits, maxima, sums, largest, per, bits)
            if mass >= _share(top_p, total):
                return count, near, total, 0
    elif min_p > 0.0:
        near = max(floor, largest + (np.log2(min_p) - 1.0) / per)
        count = _collect(logits, maxima, near, logits.shape[0] // 4, ids, values)
        if count <= logits.shape[0] // 4:
            return count, near, 0, 0
    else:
        total, moment = _all_moments(logits, maxima, largest, per, bits)
        mean = np.float64(moment) / np.float64(total)
        near = max(floor, largest + (mean - NEAR) / per)
        count = _collect(logits, maxima, near, FEW, ids, values)
        if count <= FEW:
            _weigh(values, weights, count, largest, per, bits)
            mass = 0
            for j in range(count):  # tokens that are left out are further from the mean than these
                mass += weights[j] if abs((values[j] - largest) * per - mean) < NEAR - 1 else 0
            if mass >= _share(typical_p, total):
                return count, near, total, moment
    return 0, floor, 0, 0


# ---- the choice


@inline
def _sum(weights, count):
    total = 0
    for j in range(count):
        total += weights[j]
    return total


@inline
def _truncate(values, weights, count, knobs, bottom, total, moment, largest, per, bits, keys, scratch):
    """Take the weight of every token of the list that the knobs drop, one knob after the other."""
    top_k, top_p, min_p, typical_p = knobs
    if 0 < top_k < count:
        border = _cut(values, weights, count, top_k, True, largest, bottom, scratch)
        _keep_head(values, weights, count, border)
    if top_p < 1.0:
        need = _share(top_p, total if total > 0 else _sum(weights, count))
        border = _cut(values, weights, count, need, False, largest, bottom, scratch)
        _keep_head(values, weights, count, border)
        total = 0
    if min_p > 0.0:
        _keep_likely(weights, count, min_p * 2.0**bits)
    if typical_p < 1.0:
        if total == 0:
            total = _sum(weights, count)
            for j in range(count):
                moment += _moment(max((values[j] - largest) * per, -bits), weights[j])
        _keep_typical(values, weights, count, typical_p, total, moment, largest, per, bits, keys, scratch)


@inline
def _draw(weights, count, number):
    """The first position at which the running sum of weights exceeds its share `number` of the whole."""
    target = np.int64(number * np.float64(_sum(weights, count)))
    for j in range(count):
        target -= weights[j]
        if target < 0:
            return j
    return UNUSUAL


@kernel
def draw(logits, knobs, per, bits, number, work):
    """Draw a token at temperature, after truncations.

    Parameters
    ----------
    logits : float32 [n]
    knobs : (int64, float64, float64, float64)
        top_k (0 is off), top_p, min_p, typical_p.
    per : float64
        log2(e) / temperature.
    bits : int64
        `powers.resolution(n)`.
    number : float64
        In [0, 1).
    work : tuple of arrays
        `Workspace.arrays(n)`.

    Returns
    -------
    int64
        A token id, or UNUSUAL.
    """
    top_k, top_p, min_p, typical_p = knobs
    maxima, sums, ids, values, weights, keys, scratch = work
    single, n_nan = _maxima(logits, maxima)
    if n_nan > 0 or single == np.inf or single == -np.inf:
        return UNUSUAL
    largest = np.float64(single)
    if top_k <= 0 and top_p >= 1.0 and min_p <= 0.0 and typical_p >= 1.0:
        total = _sum_weights(logits, maxima, sums, largest, per, bits)
        return _draw_of_all(logits, sums, largest, per, bits, np.int64(number * np.float64(total)))
    floor = max(_LOWEST, largest - (bits + 1) / per)
    count, bottom, total, moment = _list(logits, knobs, per, bits, largest, floor, work)
    is_row = count == 0
    if is_row:
        values, count = logits, logits.shape[0]
    _weigh(values, weights, count, largest, per, bits)
    _truncate(values, weights, count, knobs, bottom, total, moment, largest, per, bits, keys, scratch)
    chosen = _draw(weights, count, number)
    return chosen if is_row else np.int64(ids[chosen])


@kernel
def survey(logits, token, n_top, bits, work):
    """What log-probabilities need to know of a row: `token`, and the `n_top` most likely ones.

    Returns
    -------
    total, largest, rank, count : int64, float64, int64, int64
        Sum of all weights at temperature 1 (0: the row is UNUSUAL); the largest logit; one more than the number of
        logits above the token's; how many tokens `ids`, `values` and `weights` of the workspace hold now: those of
        weight 1 are the most likely ones.
    """
    maxima, sums, ids, values, weights, _, scratch = work
    single, n_nan = _maxima(logits, maxima)
    if n_nan > 0 or single == np.inf or single == -np.inf:
        return 0, 0.0, 0, 0
    n, largest = logits.shape[0], np.float64(single)
    total = _sum_weights(logits, maxima, sums, largest, LOG2E, bits)
    rank = 1
    for i in range(n):
        rank += logits[i] > logits[token]
    if n_top == 0:
        return total, largest, rank, 0
    bound = _bound_of_kth(maxima, n_top, largest, _LOWEST, weights, scratch)
    count = _collect(logits, maxima, bound, n, ids, values)
    weights[:count] = 1
    if n_top < count:
        border = _cut(values, weights, count, n_top, True, largest, bound, scratch)
        _keep_head(values, weights, count, border)
    return total, largest, rank, count


class Workspace:
    """Arrays for rows of up to `n` logits, used again and again; what is never touched takes no memory."""

    def __init__(self, n: int) -> None:
        n_blocks = -(-n // BLOCK)
        self.n = n
        self.maxima = np.empty(16 * n_blocks, np.float32)
        self.sums = np.empty(n_blocks, np.int64)
        self.ids = np.empty(n, np.int32)
        self.values = np.empty(n, np.float32)
        self.weights = np.empty(n, np.int64)
        self.keys = np.empty(n, np.float32)
        n = max(n, len(self.maxima))
        self.scratch = (
            np.empty(n, np.int32),
            np.empty(n, np.float32),
            np.empty(n, np.int64),
            np.empty(N_BUCKETS, np.int64),
        )

    def arrays(self, n: int) -> tuple[Any, ...]:
        """What kernels get for a row of n logits.

        Maxima of the groups; sums of the blocks; the list: ids, logits, weights; keys of it to sort by; and for `_cut`
        buckets, the keys and weights that it still looks at, and a histogram.
        """
        n_blocks = -(-n // BLOCK)
        maxima, sums = self.maxima[: 16 * n_blocks], self.sums[:n_blocks]
        return maxima, sums, self.ids, self.values, self.weights, self.keys, self.scratch


_of_thread = threading.local()


def workspace(n: int) -> Workspace:
    """Return this thread's workspace, for rows of at least n logits."""
    found: Workspace | None = getattr(_of_thread, "workspace", None)
    if found is None or found.n < n:
        found = _of_thread.workspace = Workspace(n)
    return found


def compile_sampling() -> None:
    """Compile (or load) both kernels ahead of their first call."""
    row, work = np.zeros(2, np.float32), Workspace(2).arrays(2)
    draw(row, (0, 1.0, 0.0, 1.0), LOG2E, 1, 0.5, work)
    survey(row, 0, 1, 1, work)
