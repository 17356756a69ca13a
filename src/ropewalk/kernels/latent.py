"""Latent attention: what is done before and after the attention over one vector a token, which all heads share.

Keys and values of head h are products with matrices of its own, K_B[h] and V_B[h], of one vector c a token
(DeepSeek-V2, arXiv:2405.04434). Here the cache holds c itself, and the key's rotated part, as the one key of all
heads; the query of a head is multiplied by K_B[h] instead of every key, and V_B[h] comes after the weighted sum:

    q . (K_B[h]^T c) = (K_B[h] q) . c              sum of p (V_B[h] c) = V_B[h] (sum of p c)

A query is [rotated part, K_B[h] q], a key [rotated part, c], both `head_dim` wide, and the value is c, the key's end; a
sum begins with zeros in the rotated part's place. What lies between is the rotation of any model with one KV head, and
`kernels.latent_attention`. Inputs of the heads' products lie in tiles of
their own, one head after the other. One worker, compiled only for models that need it; the tables are those of
`kernels.tables`, of which `Latent` is its own.
"""

from functools import cache

from numba import types

from ropewalk.kernels import clock
from ropewalk.kernels.clock import meet
from ropewalk.kernels.definition import FINE_TOKEN_GROUP_BYTES, TOKEN_GROUP_BYTES
from ropewalk.kernels.jit import inline, worker
from ropewalk.kernels.pointwise import norm_to_tile, normalise_floats, put_group
from ropewalk.kernels.products import multiply, panels_at_once, product, tile_of
from ropewalk.kernels.simd import load_f32, load_floats, rows_at, store_floats, table_at
from ropewalk.kernels.sync import chunk_of, next_of_run, take
from ropewalk.kernels.tables import K_B, Q_A, V_B, Job, Latent, Layer, Matrix
from ropewalk.kernels.tiles import READS_BYTES, READS_FLOATS, destinations


@inline
def _copy(source, target, n):
    for i in range(0, n, 16):
        store_floats(target + 4 * i, load_floats(source + 4 * i))


@inline
def _put_head(job, mla, head, token, source, groups, reads, fine):
    """A head's input of one token into its tiles."""
    size = FINE_TOKEN_GROUP_BYTES if fine else TOKEN_GROUP_BYTES
    first, tile = tile_of(token, job[Job.N_TOKENS], job[Job.MAX_TILE])
    row = mla[Latent.ROWS] * head + first
    as_bytes = mla[Latent.BYTE_TILES] + row * groups * size if reads & READS_BYTES else 0
    as_floats = mla[Latent.FLOAT_TILES] + row * groups * 128 if reads & READS_FLOATS else 0
    to = (as_bytes, as_floats, tile, token - first)
    for g in range(groups):
        at = source + 128 * g
        put_group(load_floats(at), load_floats(at + 64), to, fine, g)


@inline
def _heads_product(tid, n_threads, words, job, mla, matrix, y, y_stride, head_stride):
    """y = each head's matrix x its tiles; heads are `head_stride` bytes apart in y, tokens `y_stride`."""
    n_panels, groups, panel_bytes = (
        matrix[Matrix.N_PANELS],
        matrix[Matrix.N_GROUPS],
        matrix[Matrix.PANEL_BYTES],
    )
    n_tokens, max_tile, n_heads = job[Job.N_TOKENS], job[Job.MAX_TILE], job[Job.N_HEADS]
    size = FINE_TOKEN_GROUP_BYTES if matrix[Matrix.FINE] else TOKEN_GROUP_BYTES
    tiles, token_bytes = mla[Latent.BYTE_TILES], groups * size
    if matrix[Matrix.IS_FLOAT]:
        tiles, token_bytes = mla[Latent.FLOAT_TILES], groups * 128
    chunk = min(chunk_of(n_heads * n_panels, n_threads), n_panels)
    chunk = panels_at_once(chunk, panel_bytes, n_tokens, max_tile)
    n_chunks = (n_panels + chunk - 1) // chunk
    n_items = n_heads * n_chunks
    item, turn = next_of_run(tid, n_threads, words, 0, n_items, 0)
    while item < n_items:
        head, first = item // n_chunks, item % n_chunks * chunk
        panels = matrix[Matrix.PANELS] + (head * n_panels + first) * panel_bytes
        of_head = tiles + head * mla[Latent.ROWS] * token_bytes
        count, out = min(chunk, n_panels - first), y + head * head_stride + first * 64
        multiply(matrix, panels, count, of_head, token_bytes, n_tokens, max_tile, out, y_stride, 0)
        item, turn = next_of_run(tid, n_threads, words, 0, n_items, turn)


@inline
def _compressed_to_tiles(words, job, mla, layer):
    """The vectors that queries are made from, normalised, into the tiles of ordinary products."""
    n_tokens, width, eps = job[Job.N_TOKENS], mla[Latent.Q_RANK], load_f32(job[Job.CONSTANTS])
    token = take(words, 0)
    while token < n_tokens:
        to = destinations(job, layer[Layer.LATENT_Q_INPUT], True, token, n_tokens, width // 32)
        x = mla[Latent.COMPRESSED] + 4 * width * token
        norm_to_tile(x, (layer[Layer.Q_A_NORM], 0, 0), width, eps, True, to)
        token = take(words, 0)


@inline
def _split(n_threads, words, job, mla, layer):
    """Queries: one part to its place, the other into tiles; the key to its place, c normalised."""
    n_heads, head_dim, nope, rope = job[Job.N_HEADS], job[Job.HEAD_DIM], mla[Latent.NOPE], job[Job.ROPE_WIDTH]
    rank = head_dim - rope
    n_items = job[Job.N_TOKENS] * (n_heads + 1)
    item = take(words, 0)
    while item < n_items:
        token, head = item // (n_heads + 1), item % (n_heads + 1)
        if head < n_heads:
            q = mla[Latent.QUERIES] + 4 * (nope + rope) * (n_heads * token + head)
            _put_head(job, mla, head, token, q, nope // 32, layer[Layer.LATENT_KEY_INPUT], True)
            _copy(q + 4 * nope, job[Job.QUERIES] + 4 * head_dim * (n_heads * token + head), rope)
        else:
            kv = mla[Latent.KEY_VALUES] + 4 * head_dim * token
            key = job[Job.KEYS] + 4 * head_dim * token
            normalise_floats(kv, (layer[Layer.KV_A_NORM], 0, 0), rank, load_f32(job[Job.CONSTANTS]))
            _copy(kv + 4 * rank, key, rope)
            _copy(kv, key + 4 * rope, rank)
        item = take(words, 0)


@inline
def _sums_to_tiles(words, job, mla, layer):
    """The weighted sums of c of each head into its tiles."""
    n_heads, head_dim, rope = job[Job.N_HEADS], job[Job.HEAD_DIM], job[Job.ROPE_WIDTH]
    item = take(words, 0)
    while item < job[Job.N_TOKENS] * n_heads:
        token, head = item // n_heads, item % n_heads
        c = job[Job.ATTENDED] + 4 * (head_dim * item + rope)
        _put_head(job, mla, head, token, c, (head_dim - rope) // 32, layer[Layer.LATENT_VALUE_INPUT], False)
        item = take(words, 0)


@cache
def latent_worker() -> int:
    """Address of the compiled worker.

    Before attention (`after` = 0) its input is in the tiles, and QUERIES and KEYS are its output; after it, the
    input is ATTENDED and the output `Latent.OUT`. Its arguments, all int64: this thread's number and how many there
    are; addresses of the team's words, of `job`, of the layer's row and of the rows of its Q and K; fields of a
    matrix's row; `after`.
    """

    @worker(types.void(*[types.int64] * 8))
    def latent(tid, n_threads, words_at, job_at, layer_at, rows_of_layer, fields, after):
        words, job, layer = table_at(words_at), table_at(job_at), table_at(layer_at)
        mla, rows = table_at(job[Job.LATENT]), rows_at(rows_of_layer, 2, fields)
        own = rows_at(layer[Layer.LATENT_MATRICES], 3, fields)
        n_tokens, n_heads, row = job[Job.N_TOKENS], job[Job.N_HEADS], 4 * job[Job.HEAD_DIM]
        if after:
            width = 4 * mla[Latent.VALUE]
            _sums_to_tiles(words, job, mla, layer)
            meet(tid, words, n_threads, job, clock.POINTWISE)
            _heads_product(tid, n_threads, words, job, mla, own[V_B], mla[Latent.OUT], n_heads * width, width)
            meet(tid, words, n_threads, job, clock.OUT)
            return
        rank, queries = mla[Latent.Q_RANK], mla[Latent.QUERIES]
        q_stride = 4 * n_heads * (mla[Latent.NOPE] + job[Job.ROPE_WIDTH])
        product(tid, n_threads, words, 1, job, rows[1], n_tokens, mla[Latent.KEY_VALUES], row, 0)
        if rank > 0:
            product(tid, n_threads, words, 0, job, own[Q_A], n_tokens, mla[Latent.COMPRESSED], 4 * rank, 0)
            meet(tid, words, n_threads, job, clock.QKV)
            _compressed_to_tiles(words, job, mla, layer)
            meet(tid, words, n_threads, job, clock.NORM)
        product(tid, n_threads, words, 0, job, rows[0], n_tokens, queries, q_stride, 0)
        meet(tid, words, n_threads, job, clock.QKV)
        _split(n_threads, words, job, mla, layer)
        meet(tid, words, n_threads, job, clock.POINTWISE)
        start = job[Job.QUERIES] + 4 * job[Job.ROPE_WIDTH]
        _heads_product(tid, n_threads, words, job, mla, own[K_B], start, n_heads * row, row)
        meet(tid, words, n_threads, job, clock.QKV)

    return latent
