"""Choosing a token in compiled code: from one row of float32 logits to an id, by the knobs of one request.

What is computed is defined in `engine/sampler.py`, which has the same in readable NumPy. Weights are whole numbers
(`kernels.powers`), so neither the order of a sum nor the way a set is found can change a token. What is fast:

- One vectorised pass finds the largest logit of every group of 64 tokens. Group j of a block of 1024 has its tokens
  j, j + 16, j + 32 ..., so that a group is a lane. Blocks that lie too deep are not looked at again.
- Most rows have few tokens that matter: those near the largest logit, or above the k-th largest maximum of a
  group, go to a short list, and it is proved that no other token can be drawn. Otherwise the list is long.
- A truncation keeps the head of the list, by logit or by another key. `_cut` finds its border by counting keys into
  buckets, then the keys of the border's bucket, and so on: nothing is sorted.

A list has ids in ascending order; its arrays are those of a `Workspace`. Tokens of weight 0 may be in it or not.
Knows arrays, not requests; a row with NaN or an infinite maximum is left to the caller.
"""

import threading
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

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
def _maxima(logits, maxima):
    """The largest logit of each group, NaN not counted; gives the largest of all, and the number of NaN."""
    n, at, to = logits.shape[0], logits.ctypes.data, maxima.ctypes.data
    largest, n_nan = _MINUS_INFINITY, 0
    for block in range((n + BLOCK - 1) // BLOCK):
        start, end = block * BLOCK, min(n, (block + 1) * BLOCK)
        tail = end - end % 16
        lanes = splat(_MINUS_INFINITY)
        for i in range(start, tail, 16):
            lanes = maximum(load_floats(at + 4 * i), lanes)
        store_floats(to + 64 * block, lanes)
        for i in range(tail, end):
            group = 16 * block + i - tail
            maxima[group] = max(maxima[group], logits[i]) if logits[i] == logits[i] else maxima[group]
        for i in range(start, end):
            n_nan += logits[i] != logits[i]
        largest = max(largest, _block_maximum(maxima, block))
    return largest, n_nan


@inline
def _block_maximum(maxima, block):
    return max_lane(load_floats(maxima.ctypes.data + 64 * block))


@inline
def _sum_weights(logits, maxima, sums, largest, per, bits):
    """The weights of each block, and of all; `per` is log2(e) / temperature."""
    n, total = logits.shape[0], 0
    for block in range((n + BLOCK - 1) // BLOCK):
        sums[block] = 0
        if (_block_maximum(maxima, block) - largest) * per >= -bits:
            for i in range(block * BLOCK, min(n, (block + 1) * BLOCK)):
                sums[block] += weight((logits[i] - largest) * per, bits)
        total += sums[block]
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
    n, count = logits.shape[0], 0
    for block in range((n + BLOCK - 1) // BLOCK):
        if _block_maximum(maxima, block) >= bound:
            for i in range(block * BLOCK, min(n, (block + 1) * BLOCK)):
                ids[count], values[count] = i, logits[i]
                count += logits[i] >= bound
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
    n, total, moment = logits.shape[0], 0, 0
    for block in range((n + BLOCK - 1) // BLOCK):
        if (_block_maximum(maxima, block) - largest) * per >= -bits:
            for i in range(block * BLOCK, min(n, (block + 1) * BLOCK)):
                exponent = (logits[i] - largest) * per
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
def _cut(keys, weights, count, need, counting, top, bottom, rest, histogram):
    """Where the running sum of weights, keys descending and ties by position, reaches `need`.

    Gives the key of the border and how many of those that have this key are within. With `counting` every weight is
    1. All keys are in bottom ... top, which are finite; the sum does reach `need`, at least 1.
    """
    for j in range(count):
        rest[j] = j
    while bottom < top:
        scale = N_BUCKETS / (top - bottom)
        histogram[:] = 0
        for j in range(count):
            bucket = min(N_BUCKETS - 1, np.int64((top - keys[rest[j]]) * scale))
            histogram[bucket] += 1 if counting else weights[rest[j]]
        border = 0
        while histogram[border] < need:
            need -= histogram[border]
            border += 1
        kept = 0
        low, high = top, bottom
        for j in range(count):
            key = np.float64(keys[rest[j]])
            if min(N_BUCKETS - 1, np.int64((top - key) * scale)) == border:
                rest[kept] = rest[j]
                kept += 1
                low, high = min(low, key), max(high, key)
        count, top, bottom = kept, high, low
    within = 0
    while need > 0:
        need -= 1 if counting else weights[rest[within]]
        within += 1
    return top, within


@inline
def _keep_head(keys, key, within, count, ids, values, weights):
    """Keep what is above `key`, and the first `within` of those at it; gives how many."""
    kept = 0
    for j in range(count):
        tied = keys[j] == key
        ids[kept], values[kept], weights[kept] = ids[j], values[j], weights[j]
        kept += keys[j] > key or (tied and within > 0)
        within -= tied
    return kept


@inline
def _keep_likely(least, count, ids, values, weights):
    """Keep weights of at least `least` (min-p)."""
    kept = 0
    for j in range(count):
        ids[kept], values[kept], weights[kept] = ids[j], values[j], weights[j]
        kept += weights[j] >= least
    return kept


@inline
def _typical_keys(values, keys, count, largest, per, mean):
    """Minus the distance of each exponent from the mean one."""
    for j in range(count):
        keys[j] = np.float32(-abs((values[j] - largest) * per - mean))


@inline
def _keep_typical(key, within, largest, count, ids, values, weights, keys):
    """`_keep_head` by typicality, and the most likely token whatever its own is."""
    kept, missing = 0, True
    for j in range(count):
        tied = keys[j] == key
        best = missing and values[j] == largest
        ids[kept], values[kept], weights[kept] = ids[j], values[j], weights[j]
        kept += keys[j] > key or (tied and within > 0) or best
        within -= tied
        missing = missing and not best
    return kept


# ---- the short list


@inline
def _bound_of_kth(maxima, n_groups, k, largest, floor, keys, weights, rest, histogram):
    """A number that the k-th largest logit is not below: the k-th largest maximum of a group, or else `floor`."""
    count = 0
    for group in range(n_groups):
        keys[count] = maxima[group]
        count += maxima[group] >= floor
    if count < k:
        return floor
    return _cut(keys, weights, count, k, True, largest, floor, rest, histogram)[0]


@inline
def _list(logits, knobs, per, bits, largest, work):
    """List every token that can be drawn, and its weight.

    Gives how many; and, where tokens have been left out that the next truncation counts, the sums of weights and of
    weight * exponent with them, else 0 and 0; and the lowest logit that may be in the list.
    """
    top_k, top_p, min_p, typical_p = knobs
    maxima, sums, ids, values, keys, weights, rest, histogram = work
    n = logits.shape[0]
    floor = max(_LOWEST, largest - (bits + 1) / per)
    bound = floor
    if top_k > 0:
        n_groups = 16 * ((n + BLOCK - 1) // BLOCK)
        bound = _bound_of_kth(maxima, n_groups, top_k, largest, floor, keys, weights, rest, histogram)
    elif top_p < 1.0:
        near = max(floor, largest - NEAR / per)
        count = _collect(logits, maxima, near, FEW, ids, values)
        if count <= FEW:
            mass = _weigh(values, weights, count, largest, per, bits)
            total = _sum_weights(logits, maxima, sums, largest, per, bits)
            if mass >= _share(top_p, total):
                return count, total, 0, near
    elif min_p > 0.0:
        bound = max(floor, largest + (np.log2(min_p) - 1.0) / per)
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
                return count, total, moment, near
    count = _collect(logits, maxima, bound, n, ids, values)
    _weigh(values, weights, count, largest, per, bits)
    return count, 0, 0, bound


# ---- the choice


@inline
def _sum(weights, count):
    total = 0
    for j in range(count):
        total += weights[j]
    return total


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
        `Workspace.arrays`, for at least n tokens.

    Returns
    -------
    int64
        A token id, or UNUSUAL.
    """
    top_k, top_p, min_p, typical_p = knobs
    maxima, sums, ids, values, keys, weights, rest, histogram = work
    single, n_nan = _maxima(logits, maxima)
    if n_nan > 0 or single == np.inf or single == -np.inf:
        return UNUSUAL
    largest = np.float64(single)
    if top_k <= 0 and top_p >= 1.0 and min_p <= 0.0 and typical_p >= 1.0:
        total = _sum_weights(logits, maxima, sums, largest, per, bits)
        return _draw_of_all(logits, sums, largest, per, bits, np.int64(number * np.float64(total)))

    count, total, moment, bottom = _list(logits, knobs, per, bits, largest, work)
    if 0 < top_k < count:
        key, within = _cut(values, weights, count, top_k, True, largest, bottom, rest, histogram)
        count = _keep_head(values, key, within, count, ids, values, weights)
    if top_p < 1.0:
        need = _share(top_p, total if total > 0 else _sum(weights, count))
        key, within = _cut(values, weights, count, need, False, largest, bottom, rest, histogram)
        count, total = _keep_head(values, key, within, count, ids, values, weights), 0
    if min_p > 0.0:
        count = _keep_likely(min_p * 2.0**bits, count, ids, values, weights)
    if typical_p < 1.0:
        if total == 0:
            total = _sum(weights, count)
            for j in range(count):
                moment += _moment(max((values[j] - largest) * per, -bits), weights[j])
        _typical_keys(values, keys, count, largest, per, np.float64(moment) / np.float64(total))
        need = _share(typical_p, total)
        key, within = _cut(keys, weights, count, need, False, 0.0, -bits - 2.0, rest, histogram)
        count = _keep_typical(key, within, single, count, ids, values, weights, keys)

    target = np.int64(number * np.float64(_sum(weights, count)))
    for j in range(count):
        target -= weights[j]
        if target < 0:
            return ids[j]
    return UNUSUAL


@kernel
def survey(logits, token, n_top, bits, work):
    """What log-probabilities need to know of a row: `token`, and the `n_top` most likely ones.

    Returns
    -------
    total, largest, rank, count : int64, float64, int64, int64
        Sum of all weights at temperature 1 (0: the row is UNUSUAL); the largest logit; one more than the number of
        logits above the token's; how many of the most likely tokens `ids` and `values` of the workspace hold now.
    """
    maxima, sums, ids, values, keys, weights, rest, histogram = work
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
    n_groups = 16 * ((n + BLOCK - 1) // BLOCK)
    bound = _bound_of_kth(maxima, n_groups, n_top, largest, _LOWEST, keys, weights, rest, histogram)
    count = _collect(logits, maxima, bound, n, ids, values)
    if n_top < count:
        key, within = _cut(values, weights, count, n_top, True, largest, bound, rest, histogram)
        count = _keep_head(values, key, within, count, ids, values, weights)
    return total, largest, rank, count


class Workspace:
    """Arrays for rows of up to `n` logits, used again and again; what is never touched takes no memory."""

    def __init__(self, n: int) -> None:
        self.n = n
        n_blocks, room = -(-n // BLOCK), n + BLOCK
        self.ids = np.empty(room, np.int64)
        self.values = np.empty(room, np.float32)
        self.arrays = (
            np.empty(16 * n_blocks, np.float32),  # maxima of the groups
            np.empty(n_blocks, np.int64),  # sums of the blocks
            self.ids,  # the list: ids, logits, keys to sort by, weights
            self.values,
            np.empty(room, np.float32),
            np.empty(room, np.int64),
            np.empty(room, np.int32),  # positions in the list that `_cut` still looks at
            np.empty(N_BUCKETS, np.int64),
        )


_of_thread = threading.local()


def workspace(n: int) -> Workspace:
    """Return this thread's workspace, for rows of at least n logits."""
    found: Workspace | None = getattr(_of_thread, "workspace", None)
    if found is None or found.n < n:
        found = _of_thread.workspace = Workspace(n)
    return found
