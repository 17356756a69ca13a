"""Phases of attention: rotate, write to the cache, and attend, by token and head or by partition of a long context.

Each function is one thread's share of a phase: items are taken from a counter of `kernels.sync` until there are none.
Fields of `job` and `layer` are named in `kernels.tables`; `number` is the layer's. What happens within one partition
of the context is in `kernels.attention`.
"""

import numpy as np

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
from ropewalk.kernels.clock import ATTEND, meet
from ropewalk.kernels.jit import inline
from ropewalk.kernels.pointwise import add_to, rms_norm, rotate, scale_by
from ropewalk.kernels.simd import call, load_f32, load_i32
from ropewalk.kernels.sync import chunk_of, take
from ropewalk.kernels.tables import Job, Layer


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
def rotate_and_store(n_threads, words, job, layer, number):
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
def attend(tid, n_threads, words, job, layer, number):
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
def attend_split(tid, n_threads, words, job, layer, number):
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
    meet(tid, words, n_threads, job, ATTEND)
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
