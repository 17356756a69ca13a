"""Phases of attention: rotate, write to the cache, and attend, by token and head or by partition of a long context.

Each function is one thread's share of a phase: items are taken from a counter of `kernels.sync` until there are none.
Tokens are cut into tiles of TILE_TOKENS, by their place in the step; where all of a tile are of one sequence, one
worker serves them together, otherwise another serves each alone.
Fields of `job` and `layer` are named in `kernels.tables`; `number` is the layer's. What happens within one partition
of the context is in `kernels.attention`.
"""

import numpy as np

from ropewalk.kernels.attention import PARTIAL_FIELDS, PARTITION, begin, finish, merge
from ropewalk.kernels.clock import ATTEND, meet
from ropewalk.kernels.jit import inline
from ropewalk.kernels.latent_attention import put_latent_int8, put_latent_query_int8, value_offset
from ropewalk.kernels.pages import (
    PAGE,
    SCALES_BYTES,
    TERM_BYTES,
    put_key,
    put_key_int8,
    put_query,
    put_query_int8,
    put_terms,
    put_value,
    put_value_int8,
    terms_offset,
)
from ropewalk.kernels.pointwise import add_to, normalise_floats, rotate, scale_by
from ropewalk.kernels.simd import call, load_f32, load_i32
from ropewalk.kernels.sync import chunk_of, next_chunk, next_of_run, take
from ropewalk.kernels.tables import Job, Layer
from ropewalk.kernels.tiles import helped

SPAN_TILES = 4  # tiles that an item has at most


@inline
def _finish_head(job, x, bias, norm, cos, sin):
    """Bias, norm and rotation of one head, in place; no rotation where there are no angles."""
    head_dim = job[Job.HEAD_DIM]
    if bias != 0:
        add_to(x, bias, head_dim)
    if norm != 0:
        normalise_floats(x, (norm, 0, job[Job.LAYER_NORM]), head_dim, load_f32(job[Job.CONSTANTS]))
    if cos != 0:
        rotate(x, cos, sin, job[Job.ROPE_WIDTH], job[Job.NEIGHBOURS] != 0)


@inline
def _head_norm(job, norm, head):
    return norm + job[Job.HEAD_NORM_STRIDE] * head if norm != 0 else 0


@inline
def normalise_rows(n_threads, words, job, layer):
    """Norms of all heads of q, and of k, as one vector each, in place."""
    n_tokens, eps = job[Job.N_TOKENS], load_f32(job[Job.CONSTANTS])
    item = take(words, 0)
    while item < 2 * n_tokens:
        if item < n_tokens:
            rows, norm, n = job[Job.QUERIES], layer[Layer.Q_ROW_NORM], job[Job.N_HEADS] * job[Job.HEAD_DIM]
        else:
            rows, norm, n = job[Job.KEYS], layer[Layer.K_ROW_NORM], job[Job.N_KV_HEADS] * job[Job.HEAD_DIM]
        normalise_floats(rows + 4 * n * (item % n_tokens), (norm, 0, job[Job.LAYER_NORM]), n, eps)
        item = take(words, 0)


@inline
def _head_addresses(job, number, head, page):
    """Where a page's keys and values of one KV head of a layer are, and their scales (int8 only)."""
    n_pages, size = job[Job.N_PAGES], job[Job.PAGE_BYTES]
    before = n_pages * (number * job[Job.N_KV_HEADS] + head)
    scales = job[Job.CACHE_SCALES] + (2 * before + page) * SCALES_BYTES
    if job[Job.LATENT] != 0:  # the values are the keys' end
        keys = job[Job.CACHE] + (before + page) * size
        values = keys + value_offset(job[Job.ROPE_WIDTH], job[Job.CACHE_IS_INT8] != 0)
    else:
        keys = job[Job.CACHE] + (2 * before + page) * size
        values = keys + n_pages * size
    return keys, values, scales, scales + n_pages * SCALES_BYTES


@inline
def _store_head(job, layer, number, token, h, page, slot, cos, sin):
    """One KV head of one token: its key rotated, key and value written to their page."""
    n_kv, head_dim = job[Job.N_KV_HEADS], job[Job.HEAD_DIM]
    k = job[Job.KEYS] + 4 * head_dim * (n_kv * token + h)
    v = job[Job.VALUES] + 4 * head_dim * (n_kv * token + h)
    biases = layer[Layer.K_REST] if job[Job.CACHE_IS_INT8] else layer[Layer.K_BIAS]
    bias = biases + 4 * head_dim * h if biases != 0 else 0
    _finish_head(job, k, bias, _head_norm(job, layer[Layer.K_NORM], h), cos, sin)
    if layer[Layer.V_BIAS] != 0:
        add_to(v, layer[Layer.V_BIAS] + 4 * head_dim * h, head_dim)
    keys, values, key_scales, value_scales = _head_addresses(job, number, h, page)
    if job[Job.LATENT] != 0:
        if job[Job.CACHE_IS_INT8]:
            put_latent_int8(keys, key_scales, value_scales, slot, k, job[Job.ROPE_WIDTH], head_dim)
        else:
            put_key(keys, slot, k, head_dim)
    elif job[Job.CACHE_IS_INT8]:
        put_key_int8(keys, key_scales, slot, k, head_dim)
        put_value_int8(values, value_scales, slot, v, head_dim)
    else:
        put_key(keys, slot, k, head_dim)
        put_value(values, slot, v, head_dim)


@inline
def _terms(job, layer, h):
    """Address of what an int8 cache leaves out of the keys of a KV head; 0: nothing."""
    if layer[Layer.K_TERMS] == 0:
        return 0
    return layer[Layer.K_TERMS] + TERM_BYTES * (1 + job[Job.ROPE_WIDTH] // 2) * h


@inline
def _put_query_int8(job, layer, head, q, row, step):
    """A query and what it has of the keys' terms into its row."""
    head_dim, terms = job[Job.HEAD_DIM], _terms(job, layer, head * job[Job.N_KV_HEADS] // job[Job.N_HEADS])
    if terms != 0:
        out = row + step * terms_offset(head_dim)
        put_terms(q, terms, job[Job.ROPE_WIDTH] // 2, job[Job.NEIGHBOURS] != 0, out, step)
    put_query_int8(q, head_dim, row, step)


@inline
def rotate_and_store(tid, n_threads, words, job, layer, number):
    """Queries rotated and scaled in place; keys rotated, keys and values written to their pages."""
    n_tokens, n_heads, head_dim = job[Job.N_TOKENS], job[Job.N_HEADS], job[Job.HEAD_DIM]
    angles_bytes = 2 * job[Job.ROPE_WIDTH]
    per_token = n_heads + job[Job.N_KV_HEADS]
    n_items = n_tokens * per_token
    chunk, n_helped = chunk_of(n_items, n_threads), helped(n_tokens)
    first, end, turn = next_chunk(tid, n_threads, words, 0, n_items, chunk, 0, n_helped)
    while first < n_items:
        for item in range(first, end):
            token, head = item // per_token, item % per_token
            position = load_i32(job[Job.POSITIONS] + 4 * token)
            cos, sin = layer[Layer.COS], layer[Layer.SIN]
            if cos != 0:
                turns = angles_bytes * load_i32(job[Job.ANGLE_ROWS] + 4 * token)
                cos, sin = cos + turns, sin + turns
            if head < n_heads:
                q = job[Job.QUERIES] + 4 * head_dim * (n_heads * token + head)
                bias = layer[Layer.Q_BIAS] + 4 * head_dim * head if layer[Layer.Q_BIAS] != 0 else 0
                _finish_head(job, q, bias, _head_norm(job, layer[Layer.Q_NORM], head), cos, sin)
                scale_by(q, load_f32(job[Job.CONSTANTS] + 4), head_dim)
                step, row = job[Job.QUERY_STEP], _query_row(job, token, head)
                if not job[Job.CACHE_IS_INT8]:
                    put_query(q, head_dim, row, step)
                elif job[Job.LATENT] != 0:
                    put_latent_query_int8(q, job[Job.ROPE_WIDTH], head_dim, row, step)
                else:
                    _put_query_int8(job, layer, head, q, row, step)
            else:
                page = load_i32(_page_table(job, token) + 4 * (position // PAGE))
                _store_head(job, layer, number, token, head - n_heads, page, position % PAGE, cos, sin)
        first, end, turn = next_chunk(tid, n_threads, words, 0, n_items, chunk, turn, n_helped)


@inline
def _page_table(job, token):
    sequence = load_i32(job[Job.SEQUENCES] + 4 * token)
    return job[Job.PAGE_TABLES] + 4 * job[Job.MAX_PAGES] * sequence


@inline
def _query_row(job, token, head):
    """Address of the first element of a query head's row. Tiles are in the order of tokens, KV heads, and passes."""
    group, most, tokens = job[Job.N_HEADS] // job[Job.N_KV_HEADS], job[Job.PASS_HEADS], job[Job.TILE_TOKENS]
    n_passes = (group + most - 1) // most
    h, number = head // group, head % group // most
    heads = min(most, group - number * most)
    tile = ((token // tokens) * job[Job.N_KV_HEADS] + h) * n_passes + number
    row = token % tokens * heads + head % group % most
    return job[Job.QUERY_TILES] + tile * job[Job.QUERY_TILE_BYTES] + 4 * row


@inline
def _attend_partition(job, layer, number, token, h, first_head, partition, whole_tile, partial, scores):
    """Partial results of one partition, for one pass: `first_head` of the group of KV head h, and on.

    For `token` alone, or for the whole tile that begins with it.
    """
    group = job[Job.N_HEADS] // job[Job.N_KV_HEADS]
    start, position = partition * PARTITION, np.int64(load_i32(job[Job.POSITIONS] + 4 * token))
    # Rows of angles from the token's position to those that its sequence has: not 0 in a long context of two tables.
    other_angles = load_i32(job[Job.ANGLE_ROWS] + 4 * token) - position
    keys, values, key_scales, value_scales = _head_addresses(job, number, h, 0)
    worker = job[Job.ATTENTION_TILE] if whole_tile else job[Job.ATTENTION]
    if group - first_head < job[Job.PASS_HEADS]:
        worker = job[Job.ATTENTION_TILE_REST] if whole_tile else job[Job.ATTENTION_REST]
    call(
        worker,
        (
            _query_row(job, token, group * h + first_head),
            job[Job.QUERY_STEP],
            keys,
            values,
            key_scales,
            value_scales,
            job[Job.PAGE_BYTES],
            _page_table(job, token) + 4 * (start // PAGE),
            position - start,
            layer[Layer.WINDOW],
            job[Job.HEAD_DIM],
            job[Job.CONSTANTS] + 8,
            _terms(job, layer, h),
            layer[Layer.TURNS] + 4 * (start + other_angles),
            layer[Layer.TURN_BYTES],
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
def _is_whole_tile(job, token):
    """Whether a tile begins with this token, and all its tokens are of one sequence."""
    tokens = job[Job.TILE_TOKENS]
    last = token + tokens - 1
    if tokens == 1 or token % tokens != 0 or last >= job[Job.N_TOKENS]:
        return False
    return load_i32(job[Job.SEQUENCES] + 4 * token) == load_i32(job[Job.SEQUENCES] + 4 * last)


@inline
def _sinks(layer, head):
    return layer[Layer.SINKS] + 4 * head if layer[Layer.SINKS] != 0 else 0


@inline
def _out(job, token, head):
    return job[Job.ATTENDED] + 4 * job[Job.HEAD_DIM] * (job[Job.N_HEADS] * token + head)


@inline
def _merge_tokens(job, layer, first, token, end, head, heads, partition, partial, state):
    """Add the partial results of tokens `token` ... `end` - 1 to theirs; `state` begins with that of `first`."""
    head_dim = job[Job.HEAD_DIM]
    for t in range(token, end):
        low, high = _partitions(job, layer, t)
        if low <= partition and partition < high:
            rows = partial + 4 * (PARTIAL_FIELDS + head_dim) * heads * (t - token)
            merge(_out(job, t, head), state + 8 * heads * (t - first), rows, heads, head_dim)


@inline
def _attend_span(job, layer, number, first, last, h, g, partial, scores, state):
    """One pass over tokens first ... last - 1: partition by partition, so that all of them find it in the caches."""
    head_dim, group = job[Job.HEAD_DIM], job[Job.N_HEADS] // job[Job.N_KV_HEADS]
    heads, head = min(job[Job.PASS_HEADS], group - g), group * h + g
    begin_part, end_part = _partitions(job, layer, first)
    for token in range(first, last):
        begin(
            _out(job, token, head), state + 8 * heads * (token - first), _sinks(layer, head), heads, head_dim
        )
        low, high = _partitions(job, layer, token)
        begin_part, end_part = min(begin_part, low), max(end_part, high)
    for partition in range(begin_part, end_part):
        token = first
        while token < last:
            whole = _is_whole_tile(job, token)
            end = token + (job[Job.TILE_TOKENS] if whole else 1)
            low, _ = _partitions(job, layer, token)
            _, high = _partitions(job, layer, end - 1)
            if low <= partition and partition < high:
                _attend_partition(job, layer, number, token, h, g, partition, whole, partial, scores)
                _merge_tokens(job, layer, first, token, end, head, heads, partition, partial, state)
            token = end
    for token in range(first, last):
        finish(_out(job, token, head), state + 8 * heads * (token - first), heads, head_dim)


@inline
def attend(tid, n_threads, words, job, layer, number):
    """Each token's query heads against the cache; an item is a KV head and a few tiles of tokens."""
    n_tokens, n_kv, tokens = job[Job.N_TOKENS], job[Job.N_KV_HEADS], job[Job.TILE_TOKENS]
    scores = job[Job.SCRATCH] + tid * job[Job.SCRATCH_STRIDE]
    state = scores + job[Job.SCORES_BYTES]
    partial = state + job[Job.STATE_BYTES]
    tiles_per_item = n_tokens * n_kv // (16 * n_threads * tokens)
    span = tokens * max(1, min(tiles_per_item, SPAN_TILES))
    n_spans = (n_tokens + span - 1) // span
    item, turn = next_of_run(tid, n_threads, words, 0, n_spans * n_kv, 0)
    while item < n_spans * n_kv:
        h, first = item // n_spans, item % n_spans * span
        last = min(first + span, n_tokens)
        for g in range(0, job[Job.N_HEADS] // n_kv, job[Job.PASS_HEADS]):
            _attend_span(job, layer, number, first, last, h, g, partial, scores, state)
        item, turn = next_of_run(tid, n_threads, words, 0, n_spans * n_kv, turn)


@inline
def attend_split(tid, n_threads, words, job, layer, number):
    """The same for few tokens with a long context: an item is a token, a KV head and a partition; then a merge."""
    n_tokens, n_heads, n_kv = job[Job.N_TOKENS], job[Job.N_HEADS], job[Job.N_KV_HEADS]
    head_dim, pass_heads, group = (
        job[Job.HEAD_DIM],
        job[Job.PASS_HEADS],
        job[Job.N_HEADS] // job[Job.N_KV_HEADS],
    )
    scores = job[Job.SCRATCH] + tid * job[Job.SCRATCH_STRIDE]
    state = scores + job[Job.SCORES_BYTES]
    most, stride = job[Job.MAX_PARTITIONS], 4 * (PARTIAL_FIELDS + head_dim)
    n_items = n_tokens * n_kv * most
    item, turn = next_of_run(tid, n_threads, words, 0, n_items, 0)
    while item < n_items:
        pair, partition = item // most, item % most
        token, h = pair // n_kv, pair % n_kv
        begin_part, end_part = _partitions(job, layer, token)
        if begin_part <= partition and partition < end_part:
            for g in range(0, group, pass_heads):
                partial = job[Job.PARTIALS] + stride * ((pair * most + partition) * group + g)
                _attend_partition(job, layer, number, token, h, g, partition, False, partial, scores)
        item, turn = next_of_run(tid, n_threads, words, 0, n_items, turn)
    meet(tid, words, n_threads, job, ATTEND)
    pair = take(words, 0)
    while pair < n_tokens * n_kv:
        token, h = pair // n_kv, pair % n_kv
        begin_part, end_part = _partitions(job, layer, token)
        for g in range(0, group, pass_heads):
            heads = min(pass_heads, group - g)
            out = job[Job.ATTENDED] + 4 * head_dim * (n_heads * token + group * h + g)
            begin(out, state, _sinks(layer, group * h + g), heads, head_dim)
            for partition in range(begin_part, end_part):
                partial = job[Job.PARTIALS] + stride * ((pair * most + partition) * group + g)
                merge(out, state, partial, heads, head_dim)
            finish(out, state, heads, head_dim)
        pair = take(words, 0)
