"""One step of the model: every thread of a team runs `forward` over the same tables, and the team meets at barriers.

    norm -> q, k, v -> rotate and write to the cache -> attend -> out -> + residual
    norm -> gate, up -> activation -> down -> + residual                      for each layer
    norm -> output matrix -> logits                                           for the rows that want them

Prefill, decode and mixtures are the same: a flat list of tokens. Between two barriers the items of a phase (panels of
16 rows, tokens, heads) are taken from a counter, so who computes what varies, and what is computed does not.
Knows nothing of files or requests; the fields of the tables are named in `kernels.tables`.
"""

import numpy as np
from numba import types

from ropewalk.kernels.attention import (
    MAX_GROUP,
    PAGE,
    PARTIAL_FIELDS,
    PARTITION,
    SCALES_BYTES,
    SCORES_BYTES,
    begin,
    finish,
    merge,
    put_key,
    put_key_int8,
    put_query,
    put_value,
    put_value_int8,
)
from ropewalk.kernels.jit import inline, kernel
from ropewalk.kernels.matmul import FINE_TOKEN_GROUP_BYTES, TOKEN_GROUP_BYTES
from ropewalk.kernels.pointwise import (
    GELU_TANH,
    add_to,
    gelu_tanh,
    norm_to_tile,
    put_group,
    rms_norm,
    rotate,
    scale_by,
    silu,
    soft_cap,
)
from ropewalk.kernels.simd import (
    call,
    load_f32,
    load_floats,
    load_i32,
    store_floats,
)
from ropewalk.kernels.sync import (
    BELL,
    BELL_STEP,
    STOP,
    atomic_load,
    atomic_swap,
    barrier,
    chunk_of,
    take,
    wait_while,
)
from ropewalk.kernels.tables import DOWN, GATE, MATRICES_PER_LAYER, OUT, UP, Job, K, Layer, Matrix, Q, V

READS_BYTES, READS_FLOATS = 1, 2
PREFILL_PANELS = (
    4  # panels taken at a time by many tokens: their weights and a tile of activations share a cache
)
_ZERO = np.float32(0)


@inline
def _tile_size(n_rest, max_tile):
    """The smallest tile (a power of two) for the tokens that are left, up to the largest."""
    size = 1
    while size < n_rest and size < max_tile:
        size *= 2
    return size


@inline
def _log2(tile):
    power = 0
    while (1 << power) < tile:
        power += 1
    return power


@inline
def _tile_address(base, token, n_tokens, max_tile, token_bytes):
    """Where a token's tile starts, the tile's size, and the token's place in it."""
    first = token // max_tile * max_tile
    return base + first * token_bytes, _tile_size(n_tokens - first, max_tile), token - first


@inline
def _destinations(job, reads, fine, token, n_tokens, groups):
    """Addresses of the byte tile and of the float tile (0 where not read), tile size, place of the token."""
    size = FINE_TOKEN_GROUP_BYTES if fine else TOKEN_GROUP_BYTES
    max_tile = job[Job.MAX_TILE]
    as_bytes, tile, place = _tile_address(job[Job.BYTE_TILES], token, n_tokens, max_tile, groups * size)
    as_floats, _, _ = _tile_address(job[Job.FLOAT_TILES], token, n_tokens, max_tile, groups * 128)
    if not reads & READS_BYTES:
        as_bytes = 0
    if not reads & READS_FLOATS:
        as_floats = 0
    return as_bytes, as_floats, tile, place


@inline
def _product(n_threads, words, counter, job, matrix, n_tokens, y, y_stride, add):
    """y (+)= matrix x the activations in the tiles, for this thread's share of the panels."""
    n_panels, groups = matrix[Matrix.N_PANELS], matrix[Matrix.N_GROUPS]
    panel_bytes, max_tile = matrix[Matrix.PANEL_BYTES], job[Job.MAX_TILE]
    chunk = chunk_of(n_panels, n_threads)
    if n_tokens > max_tile:
        chunk = min(chunk, PREFILL_PANELS)
    if matrix[Matrix.IS_FLOAT]:
        tiles, token_bytes = job[Job.FLOAT_TILES], groups * 128
    else:
        size = FINE_TOKEN_GROUP_BYTES if matrix[Matrix.FINE] else TOKEN_GROUP_BYTES
        tiles, token_bytes = job[Job.BYTE_TILES], groups * size
    first = take(words, counter) * chunk
    while first < n_panels:
        count = min(chunk, n_panels - first)
        panels = matrix[Matrix.PANELS] + first * panel_bytes
        for token in range(0, n_tokens, max_tile):
            tile = _tile_size(n_tokens - token, max_tile)
            out = y + token * y_stride + first * 64
            call(
                matrix[Matrix.WORKERS + _log2(tile)],
                (
                    panels,
                    count,
                    panel_bytes,
                    groups,
                    tiles + token * token_bytes,
                    out,
                    y_stride,
                    min(tile, n_tokens - token),
                    add,
                ),
            )
        first = take(words, counter) * chunk


@inline
def _normalise(n_threads, words, job, post_norm, norm, reads, fine):
    """Finish the branch before (post-norm, if any, and its residual addition), then norm into tiles."""
    n_tokens, hidden = job[Job.N_TOKENS], job[Job.HIDDEN]
    eps = load_f32(job[Job.CONSTANTS])
    chunk = chunk_of(n_tokens, n_threads)
    first = take(words, 0) * chunk
    while first < n_tokens:
        for token in range(first, min(first + chunk, n_tokens)):
            x = job[Job.X] + 4 * hidden * token
            if post_norm != 0:
                y = job[Job.Y] + 4 * hidden * token
                rms_norm(y, post_norm, y, hidden, eps)
                add_to(x, y, hidden)
            if norm != 0:
                as_bytes, as_floats, tile, place = _destinations(
                    job, reads, fine, token, n_tokens, hidden // 32
                )
                norm_to_tile(x, norm, hidden, eps, as_bytes, fine, as_floats, tile, place)
        first = take(words, 0) * chunk


@inline
def _finish_head(job, x, bias, norm, cos, sin):
    """Bias, norm and rotation of one head, in place."""
    head_dim = job[Job.HEAD_DIM]
    if bias != 0:
        add_to(x, bias, head_dim)
    if norm != 0:
        rms_norm(x, norm, x, head_dim, load_f32(job[Job.CONSTANTS]))
    rotate(x, cos, sin, job[Job.ROPE_WIDTH], job[Job.NEIGHBOURS] != 0)


@inline
def _head_addresses(job, number, head, page):
    """Where a page's keys and values of one KV head of a layer are, and their scales (int8 only)."""
    n_pages = job[Job.N_PAGES]
    keys = 2 * n_pages * (number * job[Job.N_KV_HEADS] + head) + page
    values = keys + n_pages
    size = job[Job.PAGE_BYTES]
    return (
        job[Job.CACHE] + keys * size,
        job[Job.CACHE] + values * size,
        job[Job.CACHE_SCALES] + keys * SCALES_BYTES,
        job[Job.CACHE_SCALES] + values * SCALES_BYTES,
    )


@inline
def _store_head(job, layer, number, token, h, page, slot, cos, sin):
    """One KV head of one token: its key rotated, key and value written to their page."""
    n_kv, head_dim = job[Job.N_KV_HEADS], job[Job.HEAD_DIM]
    k = job[Job.KEYS] + 4 * head_dim * (n_kv * token + h)
    v = job[Job.VALUES] + 4 * head_dim * (n_kv * token + h)
    bias = layer[Layer.K_BIAS] + 4 * head_dim * h if layer[Layer.K_BIAS] != 0 else 0
    _finish_head(job, k, bias, layer[Layer.K_NORM], cos, sin)
    if layer[Layer.V_BIAS] != 0:
        add_to(v, layer[Layer.V_BIAS] + 4 * head_dim * h, head_dim)
    keys, values, key_scales, value_scales = _head_addresses(job, number, h, page)
    if job[Job.CACHE_IS_INT8]:
        put_key_int8(keys, key_scales, slot, k, head_dim)
        put_value_int8(values, value_scales, slot, v, head_dim)
    else:
        put_key(keys, slot, k, head_dim)
        put_value(values, slot, v, head_dim)


@inline
def _rotate_and_store(n_threads, words, job, layer, number):
    """Queries rotated and scaled in place; keys rotated, keys and values written to their pages."""
    n_tokens, n_heads, head_dim = job[Job.N_TOKENS], job[Job.N_HEADS], job[Job.HEAD_DIM]
    angles_bytes = 2 * job[Job.ROPE_WIDTH]
    per_token = n_heads + job[Job.N_KV_HEADS]
    n_items = n_tokens * per_token
    chunk = chunk_of(n_items, n_threads)
    first = take(words, 0) * chunk
    while first < n_items:
        for item in range(first, min(first + chunk, n_items)):
            token, head = item // per_token, item % per_token
            position = load_i32(job[Job.POSITIONS] + 4 * token)
            cos, sin = layer[Layer.COS] + angles_bytes * position, layer[Layer.SIN] + angles_bytes * position
            if head < n_heads:
                q = job[Job.QUERIES] + 4 * head_dim * (n_heads * token + head)
                bias = layer[Layer.Q_BIAS] + 4 * head_dim * head if layer[Layer.Q_BIAS] != 0 else 0
                _finish_head(job, q, bias, layer[Layer.Q_NORM], cos, sin)
                scale_by(q, load_f32(job[Job.CONSTANTS] + 4), head_dim)
                if job[Job.CACHE_IS_INT8]:
                    put_query(
                        q, head_dim, job[Job.QUERY_BYTES] + (2 * head_dim + 16) * (n_heads * token + head)
                    )
            else:
                page = load_i32(_page_table(job, token) + 4 * (position // PAGE))
                _store_head(job, layer, number, token, head - n_heads, page, position % PAGE, cos, sin)
        first = take(words, 0) * chunk


@inline
def _page_table(job, token):
    sequence = load_i32(job[Job.SEQUENCES] + 4 * token)
    return job[Job.PAGE_TABLES] + 4 * job[Job.MAX_PAGES] * sequence


@inline
def _attend_partition(job, layer, number, token, h, first_head, partition, partial, scores):
    """Partial result of one partition, for the heads of one pass: `first_head` of the group of KV head h, and on."""
    group, head_dim = job[Job.N_HEADS] // job[Job.N_KV_HEADS], job[Job.HEAD_DIM]
    position = np.int64(load_i32(job[Job.POSITIONS] + 4 * token))
    seen = max(0, position - layer[Layer.WINDOW] + 1) if layer[Layer.WINDOW] > 0 else 0
    start = partition * PARTITION
    keys, values, key_scales, value_scales = _head_addresses(job, number, h, 0)
    head = job[Job.N_HEADS] * token + group * h + first_head
    if job[Job.CACHE_IS_INT8]:
        q = job[Job.QUERY_BYTES] + (2 * head_dim + 16) * head
    else:
        q = job[Job.QUERIES] + 4 * head_dim * head
    is_full = group - first_head >= job[Job.PASS_HEADS]
    call(
        job[Job.ATTENTION] if is_full else job[Job.ATTENTION_REST],
        (
            q,
            keys,
            values,
            key_scales,
            value_scales,
            job[Job.PAGE_BYTES],
            _page_table(job, token) + 4 * (start // PAGE),
            max(seen - start, 0),
            min(position + 1 - start, PARTITION),
            head_dim,
            job[Job.CONSTANTS] + 8,
            partial,
            scores,
        ),
    )


@inline
def _partitions(job, layer, token):
    """The first partition that a token sees, and the one after the last."""
    position = np.int64(load_i32(job[Job.POSITIONS] + 4 * token))
    seen = max(0, position - layer[Layer.WINDOW] + 1) if layer[Layer.WINDOW] > 0 else 0
    return seen // PARTITION, position // PARTITION + 1


@inline
def _attend(tid, n_threads, words, job, layer, number):
    """Each token's query heads against the cache; an item is a token and one of its KV heads."""
    n_tokens, n_heads, n_kv = job[Job.N_TOKENS], job[Job.N_HEADS], job[Job.N_KV_HEADS]
    head_dim, pass_heads, group = (
        job[Job.HEAD_DIM],
        job[Job.PASS_HEADS],
        job[Job.N_HEADS] // job[Job.N_KV_HEADS],
    )
    scores = job[Job.SCRATCH] + tid * job[Job.SCRATCH_STRIDE]
    state = scores + SCORES_BYTES
    partial = state + 8 * MAX_GROUP
    n_items = n_tokens * n_kv
    chunk = chunk_of(n_items, n_threads)
    first = take(words, 0) * chunk
    while first < n_items:
        for item in range(first, min(first + chunk, n_items)):
            token, h = item // n_kv, item % n_kv
            begin_part, end_part = _partitions(job, layer, token)
            for g in range(0, group, pass_heads):
                heads = min(pass_heads, group - g)
                out = job[Job.ATTENDED] + 4 * head_dim * (n_heads * token + group * h + g)
                begin(out, state, heads, head_dim)
                for partition in range(begin_part, end_part):
                    _attend_partition(job, layer, number, token, h, g, partition, partial, scores)
                    merge(out, state, partial, heads, head_dim)
                finish(out, state, heads, head_dim)
        first = take(words, 0) * chunk


@inline
def _attend_split(tid, n_threads, words, job, layer, number):
    """The same for few tokens with a long context: an item is a token, a KV head and a partition; then a merge."""
    n_tokens, n_heads, n_kv = job[Job.N_TOKENS], job[Job.N_HEADS], job[Job.N_KV_HEADS]
    head_dim, pass_heads, group = (
        job[Job.HEAD_DIM],
        job[Job.PASS_HEADS],
        job[Job.N_HEADS] // job[Job.N_KV_HEADS],
    )
    scores = job[Job.SCRATCH] + tid * job[Job.SCRATCH_STRIDE]
    state = scores + SCORES_BYTES
    most, stride = job[Job.MAX_PARTITIONS], 4 * (PARTIAL_FIELDS + head_dim)
    item = take(words, 0)
    while item < n_tokens * n_kv * most:
        pair, partition = item // most, item % most
        token, h = pair // n_kv, pair % n_kv
        begin_part, end_part = _partitions(job, layer, token)
        if begin_part <= partition and partition < end_part:
            for g in range(0, group, pass_heads):
                partial = job[Job.PARTIALS] + stride * ((pair * most + partition) * group + g)
                _attend_partition(job, layer, number, token, h, g, partition, partial, scores)
        item = take(words, 0)
    barrier(tid, words, n_threads)
    pair = take(words, 0)
    while pair < n_tokens * n_kv:
        token, h = pair // n_kv, pair % n_kv
        begin_part, end_part = _partitions(job, layer, token)
        for g in range(0, group, pass_heads):
            heads = min(pass_heads, group - g)
            out = job[Job.ATTENDED] + 4 * head_dim * (n_heads * token + group * h + g)
            begin(out, state, heads, head_dim)
            for partition in range(begin_part, end_part):
                partial = job[Job.PARTIALS] + stride * ((pair * most + partition) * group + g)
                merge(out, state, partial, heads, head_dim)
            finish(out, state, heads, head_dim)
        pair = take(words, 0)


@inline
def _attended_to_tiles(n_threads, words, job, reads):
    n_tokens, width = job[Job.N_TOKENS], job[Job.N_HEADS] * job[Job.HEAD_DIM]
    groups = width // 32
    chunk = chunk_of(n_tokens * groups, n_threads)
    first = take(words, 0) * chunk
    while first < n_tokens * groups:
        for item in range(first, min(first + chunk, n_tokens * groups)):
            token, g = item // groups, item % groups
            at = job[Job.ATTENDED] + 4 * width * token + 128 * g
            as_bytes, as_floats, tile, place = _destinations(job, reads, False, token, n_tokens, groups)
            put_group(load_floats(at), load_floats(at + 64), as_bytes, False, as_floats, tile, place, g)
        first = take(words, 0) * chunk


@inline
def _activate(gate, up, kind):
    g = load_floats(gate)
    if kind == GELU_TANH:
        return gelu_tanh(g) * load_floats(up)
    return silu(g) * load_floats(up)


@inline
def _activated_to_tiles(n_threads, words, job, reads):
    """activation(gate) * up, into tiles."""
    n_tokens, width, kind = job[Job.N_TOKENS], job[Job.FFN], job[Job.ACTIVATION]
    groups = width // 32
    chunk = chunk_of(n_tokens * groups, n_threads)
    first = take(words, 0) * chunk
    while first < n_tokens * groups:
        for item in range(first, min(first + chunk, n_tokens * groups)):
            token, g = item // groups, item % groups
            at = 4 * width * token + 128 * g
            a = _activate(job[Job.GATE] + at, job[Job.UP] + at, kind)
            b = _activate(job[Job.GATE] + at + 64, job[Job.UP] + at + 64, kind)
            as_bytes, as_floats, tile, place = _destinations(job, reads, False, token, n_tokens, groups)
            put_group(a, b, as_bytes, False, as_floats, tile, place, g)
        first = take(words, 0) * chunk


@inline
def _attention_block(tid, n_threads, words, job, layer, matrices, number):
    """The first half of a layer; its input is in the tiles, its output is added to X or left in Y."""
    n_tokens, head_bytes = job[Job.N_TOKENS], 4 * job[Job.HEAD_DIM]
    base = MATRICES_PER_LAYER * number
    q_stride, kv_stride = head_bytes * job[Job.N_HEADS], head_bytes * job[Job.N_KV_HEADS]
    _product(n_threads, words, 0, job, matrices[base + Q], n_tokens, job[Job.QUERIES], q_stride, 0)
    _product(n_threads, words, 1, job, matrices[base + K], n_tokens, job[Job.KEYS], kv_stride, 0)
    _product(n_threads, words, 2, job, matrices[base + V], n_tokens, job[Job.VALUES], kv_stride, 0)
    barrier(tid, words, n_threads)
    _rotate_and_store(n_threads, words, job, layer, number)
    barrier(tid, words, n_threads)
    if job[Job.MAX_PARTITIONS] > 0:
        _attend_split(tid, n_threads, words, job, layer, number)
    else:
        _attend(tid, n_threads, words, job, layer, number)
    barrier(tid, words, n_threads)
    _attended_to_tiles(n_threads, words, job, layer[Layer.OUT_INPUT])
    barrier(tid, words, n_threads)
    _branch_end(tid, n_threads, words, job, matrices[base + OUT], layer[Layer.POST_ATTN_NORM])


@inline
def _feed_forward_block(tid, n_threads, words, job, layer, matrices, number):
    """The second half of a layer; its input is in the tiles, its output is added to X or left in Y."""
    n_tokens, stride = job[Job.N_TOKENS], 4 * job[Job.FFN]
    base = MATRICES_PER_LAYER * number
    _product(n_threads, words, 0, job, matrices[base + GATE], n_tokens, job[Job.GATE], stride, 0)
    _product(n_threads, words, 1, job, matrices[base + UP], n_tokens, job[Job.UP], stride, 0)
    barrier(tid, words, n_threads)
    _activated_to_tiles(n_threads, words, job, layer[Layer.DOWN_INPUT])
    barrier(tid, words, n_threads)
    _branch_end(tid, n_threads, words, job, matrices[base + DOWN], layer[Layer.POST_FFN_NORM])


@inline
def _branch_end(tid, n_threads, words, job, matrix, post_norm):
    """The last product of a branch: added to X, or put into Y where a norm follows."""
    stride = 4 * job[Job.HIDDEN]
    y = job[Job.Y] if post_norm != 0 else job[Job.X]
    _product(n_threads, words, 0, job, matrix, job[Job.N_TOKENS], y, stride, 1 if post_norm == 0 else 0)
    barrier(tid, words, n_threads)


@inline
def _logits(tid, n_threads, words, job, matrix):
    """Output norm and output matrix for the wanted rows."""
    n_logits, hidden = job[Job.N_LOGITS], job[Job.HIDDEN]
    eps = load_f32(job[Job.CONSTANTS])
    row = take(words, 0)
    while row < n_logits:
        x = job[Job.X] + 4 * hidden * load_i32(job[Job.LOGIT_ROWS] + 4 * row)
        as_bytes, as_floats, tile, place = _destinations(
            job, job[Job.OUTPUT_INPUT], True, row, n_logits, hidden // 32
        )
        norm_to_tile(x, job[Job.OUTPUT_NORM], hidden, eps, as_bytes, True, as_floats, tile, place)
        row = take(words, 0)
    barrier(tid, words, n_threads)
    _product(n_threads, words, 0, job, matrix, n_logits, job[Job.LOGITS], job[Job.LOGIT_STRIDE], 0)
    barrier(tid, words, n_threads)
    cap = load_f32(job[Job.CONSTANTS] + 12)
    if cap > _ZERO:
        row = take(words, 0)
        while row < n_logits:
            for i in range(0, job[Job.LOGIT_STRIDE], 64):
                at = job[Job.LOGITS] + job[Job.LOGIT_STRIDE] * row + i
                store_floats(at, soft_cap(load_floats(at), cap))
            row = take(words, 0)
        barrier(tid, words, n_threads)


@inline
def forward(tid, n_threads, words, job, layers, matrices):
    """One step as thread `tid` of `n_threads`; all of them return when the logits are complete."""
    n_layers = layers.shape[0]
    n_logits = job[Job.N_LOGITS]  # read now: after the last barrier the caller may fill in the next step
    post_norm = 0
    for number in range(n_layers):
        layer = layers[number]
        _normalise(n_threads, words, job, post_norm, layer[Layer.ATTN_NORM], layer[Layer.QKV_INPUT], True)
        barrier(tid, words, n_threads)
        _attention_block(tid, n_threads, words, job, layer, matrices, number)
        _normalise(
            n_threads,
            words,
            job,
            layer[Layer.POST_ATTN_NORM],
            layer[Layer.FFN_NORM],
            layer[Layer.FFN_INPUT],
            False,
        )
        barrier(tid, words, n_threads)
        _feed_forward_block(tid, n_threads, words, job, layer, matrices, number)
        post_norm = layer[Layer.POST_FFN_NORM]
    if post_norm != 0:
        _normalise(n_threads, words, job, post_norm, 0, 0, False)
        barrier(tid, words, n_threads)
    if n_logits > 0:
        _logits(tid, n_threads, words, job, matrices[MATRICES_PER_LAYER * n_layers])


@kernel
def run_steps(tid, words, job, layers, matrices, bell, patience):
    """Run one step (`patience` = 0), or every step that is rung for until nothing happened for `patience` looks.

    Parameters
    ----------
    tid : int
        This thread's number.
    words : int64 [...]
        The team's shared words (`kernels.sync`). The thread that runs one step rings for the others by setting BELL;
        a STOP that is not 0 ends their service. A thread returns at once from a step that it takes no part in.
    job, layers, matrices : int64 [...], int64 [n_layers, ...], int64 [7 * n_layers + 1, ...]
        See `kernels.tables`.
    bell : int
        What the BELL word held when this thread last looked; with `patience` = 0, the bell of the step to run.

    Returns
    -------
    int
        What the BELL word held at the last look.
    """
    if patience == 0:
        atomic_swap(words, BELL, bell)
    while True:
        if patience > 0:
            now = wait_while(words, BELL, bell, patience)
            if now == bell or atomic_load(words, STOP) != 0:
                return bell
            bell = now
        n_threads = bell % BELL_STEP
        if tid >= n_threads:
            return bell
        forward(tid, n_threads, words, job, layers, matrices)
        if patience == 0:
            return bell


def compile_steps() -> None:
    """Compile (or load) `run_steps` ahead of its first call."""
    table = types.Array(types.int64, 2, "C")
    row = types.Array(types.int64, 1, "C")
    run_steps.compile((types.int64, row, row, table, table, types.int64, types.int64))
