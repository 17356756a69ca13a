"""Phases between matrix products: norms, attention's output and the feed-forward's activations, into tiles.

For many tokens, the products before the activations are here too: then the two are one phase.

Each function is one thread's share of a phase: items are taken from a counter of `kernels.sync` until there are none.
Fields of `job` and `layer` are named in `kernels.tables`, tiles are described in `kernels.matmul`. What is done with
the numbers is in `kernels.pointwise`.
"""

from ropewalk.kernels.definition import FINE_TOKEN_GROUP_BYTES, TOKEN_GROUP_BYTES
from ropewalk.kernels.jit import inline
from ropewalk.kernels.pointwise import (
    GELU_TANH,
    ONE,
    SILU,
    activate,
    add_scaled,
    add_to,
    gelu_tanh_rows,
    norm_rows,
    norm_to_tile,
    normalise_floats,
    put_group,
    put_rows,
    silu_rows,
)
from ropewalk.kernels.products import PREFILL_PANELS, multiply, span_of, tile_of, tiles_of
from ropewalk.kernels.rows import ROWS, stack
from ropewalk.kernels.simd import load_f32, load_floats, splat, store_floats
from ropewalk.kernels.sync import MAX_HELPED, chunk_of, next_chunk, next_of_run
from ropewalk.kernels.tables import Job, Layer, Matrix

READS_BYTES, READS_FLOATS = 1, 2
FUSED_TOKENS = 64  # of which a few panels' outputs are activated at a time
FUSED_BYTES = 64 * PREFILL_PANELS * FUSED_TOKENS
FEW_TOKENS = 16  # up to so many, what is done between products takes microseconds: nobody is to help


@inline
def helped(n_tokens):
    """Of how many runs a thread takes work between products."""
    return 1 if n_tokens <= FEW_TOKENS else MAX_HELPED


@inline
def destinations(job, reads, fine, token, n_tokens, groups):
    """Addresses of the byte tile and of the float tile (0 where not read), tile size, place of the token."""
    return _destinations(job, job[Job.BYTE_TILES], reads, fine, token, n_tokens, groups)


@inline
def _destinations(job, byte_tiles, reads, fine, token, n_tokens, groups):
    size = FINE_TOKEN_GROUP_BYTES if fine else TOKEN_GROUP_BYTES
    first, tile = tile_of(token, n_tokens, job[Job.MAX_TILE])
    as_bytes = byte_tiles + first * groups * size if reads & READS_BYTES else 0
    as_floats = job[Job.FLOAT_TILES] + first * groups * 128 if reads & READS_FLOATS else 0
    return as_bytes, as_floats, tile, token - first


@inline
def _finish_branch(job, token, bias, post_norm):
    """Add a token's branch in Y to X, after its bias and norm."""
    hidden = job[Job.HIDDEN]
    x, y = job[Job.X] + 4 * hidden * token, job[Job.Y] + 4 * hidden * token
    if bias != 0:
        add_to(y, bias, hidden)
    if post_norm != 0:
        normalise_floats(y, (post_norm, 0, job[Job.LAYER_NORM]), hidden, load_f32(job[Job.CONSTANTS]))
    add_scaled(x, y, load_f32(job[Job.CONSTANTS] + 20), hidden)


@inline
def _norm_tokens(job, first, last, before, norm, reads, fine):
    """`normalise` for some tokens; 16 at once where there are so many."""
    n_tokens, hidden, eps = job[Job.N_TOKENS], job[Job.HIDDEN], load_f32(job[Job.CONSTANTS])
    in_y, bias, post_norm = before
    if in_y:
        for token in range(first, last):
            _finish_branch(job, token, bias, post_norm)
    if reads == 0:
        return
    token = first
    while token < last:
        x = job[Job.X] + 4 * hidden * token
        to = destinations(job, reads, fine, token, n_tokens, hidden // 32)
        if token % ROWS == 0 and token + ROWS <= last:
            norm_rows(x, norm, hidden, eps, fine, to)
            token += ROWS
        else:
            norm_to_tile(x, norm, hidden, eps, fine, to)
            token += 1


@inline
def normalise(tid, n_threads, words, job, before, norm, reads, fine):
    """Finish the branch before, then norm into tiles, unless nothing reads them.

    `before` says whether there is a branch in Y, and its bias and post-norm; `norm` is what `norm_to_tile` takes.
    """
    n_tokens = job[Job.N_TOKENS]
    chunk, n_helped = chunk_of(n_tokens, n_threads), helped(n_tokens)
    if n_tokens >= ROWS * n_threads:
        chunk = (chunk + ROWS - 1) // ROWS * ROWS
    first, end, turn = next_chunk(tid, n_threads, words, 0, n_tokens, chunk, 0, n_helped)
    while first < n_tokens:
        _norm_tokens(job, first, end, before, norm, reads, fine)
        first, end, turn = next_chunk(tid, n_threads, words, 0, n_tokens, chunk, turn, n_helped)


@inline
def attended_to_tiles(tid, n_threads, words, job, reads):
    """Attention's output, into tiles; an item is a group of 16 tokens."""
    n_tokens, stride, groups = job[Job.N_TOKENS], 4 * job[Job.OUT_WIDTH], job[Job.OUT_WIDTH] // 32
    n_items = (n_tokens + ROWS - 1) // ROWS * groups
    chunk, n_helped = chunk_of(n_items, n_threads), helped(n_tokens)
    item, end, turn = next_chunk(tid, n_threads, words, 0, n_items, chunk, 0, n_helped)
    while item < n_items:
        while item < end:
            token, g = item // groups * ROWS, item % groups
            last = min(groups, g + end - item)
            _put_attended(job, reads, stride, token, n_tokens, g, last)
            item += last - g
        item, end, turn = next_chunk(tid, n_threads, words, 0, n_items, chunk, turn, n_helped)


@inline
def _put_attended(job, reads, stride, token, n_tokens, first, last):
    """Groups first ... last - 1 of `token` and of up to 15 tokens after it."""
    at, groups = job[Job.OUT_SOURCE] + stride * token, stride // 128
    if token + ROWS <= n_tokens:
        to = destinations(job, reads, False, token, n_tokens, groups)
        for g in range(first, last):
            put_rows(at + 128 * g, stride, to, False, g, groups)
        return
    for t in range(token, n_tokens):
        to = destinations(job, reads, False, t, n_tokens, groups)
        for g in range(first, last):
            put_group(load_floats(at + 128 * g), load_floats(at + 128 * g + 64), to, False, g)
        at += stride


@inline
def with_bias(at, bias, i):
    """Sixteen floats from the i-th on, and the bias, if there is one."""
    if bias != 0:
        return load_floats(at + 4 * i) + load_floats(bias + 4 * i)
    return load_floats(at + 4 * i)


@inline
def _activated(job, biases, gate, up, i):
    """Sixteen activations of a token, whose rows begin at `gate` and `up`."""
    g = with_bias(gate, biases[0], i)
    if job[Job.IS_GATED]:
        return activate(g, with_bias(up, biases[1], i), job[Job.ACTIVATION])
    return activate(g, splat(ONE), job[Job.ACTIVATION])


@inline
def _activate_rows(job, biases, gate, up, stride, n, g, rows):
    """A group of activations of n tokens, whose rows begin at `gate` and `up`, as float32 [n, 32]."""
    is_plain = job[Job.IS_GATED] and biases[0] == 0 and biases[1] == 0
    if is_plain and job[Job.ACTIVATION] == SILU:
        silu_rows(gate + 128 * g, up + 128 * g, stride, n, rows)
    elif is_plain and job[Job.ACTIVATION] == GELU_TANH:
        gelu_tanh_rows(gate + 128 * g, up + 128 * g, stride, n, rows)
    else:
        for r in range(n):
            for i in (0, 16):
                a = _activated(job, biases, gate + stride * r, up + stride * r, 32 * g + i)
                store_floats(rows + 128 * r + 4 * i, a)


@inline
def _put_activations(job, layer, gate, up, stride, byte_tiles, token, n_tokens, first, last):
    """Groups first ... last - 1 of `token` and of up to 15 tokens after it, whose rows follow `gate` and `up`."""
    biases, reads = (layer[Layer.GATE_BIAS], layer[Layer.UP_BIAS]), layer[Layer.DOWN_INPUT]
    groups, rows = layer[Layer.FFN] // 32, stack(2048)
    if token + ROWS <= n_tokens:
        to = _destinations(job, byte_tiles, reads, False, token, n_tokens, groups)
        for g in range(first, last):
            _activate_rows(job, biases, gate, up, stride, ROWS, g, rows)
            put_rows(rows, 128, to, False, g, groups)
        return
    for t in range(token, n_tokens):
        to = _destinations(job, byte_tiles, reads, False, t, n_tokens, groups)
        for g in range(first, last):
            _activate_rows(job, biases, gate, up, stride, 1, g, rows)
            put_group(load_floats(rows), load_floats(rows + 64), to, False, g)
        gate, up = gate + stride, up + stride


@inline
def activated_to_tiles(tid, n_threads, words, job, layer):
    """activation(gate) * up, into tiles; an item is a group of 16 tokens."""
    n_tokens, groups, stride = job[Job.N_TOKENS], layer[Layer.FFN] // 32, 4 * layer[Layer.FFN]
    n_items = (n_tokens + ROWS - 1) // ROWS * groups
    chunk, n_helped = chunk_of(n_items, n_threads), helped(n_tokens)
    item, end, turn = next_chunk(tid, n_threads, words, 0, n_items, chunk, 0, n_helped)
    while item < n_items:
        while item < end:
            token, g = item // groups * ROWS, item % groups
            last = min(groups, g + end - item)
            gate, up = job[Job.GATE] + stride * token, job[Job.UP] + stride * token
            tiles = job[Job.BYTE_TILES]
            _put_activations(job, layer, gate, up, stride, tiles, token, n_tokens, g, last)
            item += last - g
        item, end, turn = next_chunk(tid, n_threads, words, 0, n_items, chunk, turn, n_helped)


@inline
def is_fused(job, layer):
    """Whether `multiply_and_activate` does what two products and `activated_to_tiles` do: many tokens, only bytes."""
    is_plain = job[Job.IS_GATED] != 0 and job[Job.LORA_WORKER] == 0 and layer[Layer.DOWN_INPUT] == READS_BYTES
    return is_plain and job[Job.N_TOKENS] > FEW_TOKENS


@inline
def multiply_and_activate(tid, n_threads, words, job, layer, gate_matrix, up_matrix):
    """The products with GATE and UP, and activation(gate) * up into DOWN_TILES: a few panels and tokens at a time.

    The products' outputs never leave the caches; all at once, they are 37 MB for 512 tokens of a 1.5B model.
    """
    n_tokens, n_panels = job[Job.N_TOKENS], gate_matrix[Matrix.N_PANELS]
    n_chunks = (n_panels + PREFILL_PANELS - 1) // PREFILL_PANELS
    span = span_of(n_tokens, n_threads, job[Job.MAX_TILE])
    n_items = n_chunks * ((n_tokens + span - 1) // span)
    item, turn = next_of_run(tid, n_threads, words, 0, n_items, 0)
    while item < n_items:
        panel, first = item % n_chunks * PREFILL_PANELS, item // n_chunks * span
        count, last = min(PREFILL_PANELS, n_panels - panel), min(first + span, n_tokens)
        for token in range(first, last, FUSED_TOKENS):
            end = min(token + FUSED_TOKENS, last)
            _fused_part(job, layer, gate_matrix, up_matrix, panel, count, token, end)
        item, turn = next_of_run(tid, n_threads, words, 0, n_items, turn)


@inline
def _fused_part(job, layer, gate_matrix, up_matrix, panel, count, token, end):
    """Some panels of both matrices and tokens `token` ... `end` - 1, at most FUSED_TOKENS."""
    gate, up, stride = stack(FUSED_BYTES), stack(FUSED_BYTES), 64 * PREFILL_PANELS
    _multiply_some(job, gate_matrix, panel, count, token, end, gate, stride)
    _multiply_some(job, up_matrix, panel, count, token, end, up, stride)
    gate, up = gate - 64 * panel, up - 64 * panel  # where the first column would be
    for t in range(token, end, ROWS):
        tiles, n_tokens = job[Job.DOWN_TILES], job[Job.N_TOKENS]
        _put_activations(job, layer, gate, up, stride, tiles, t, n_tokens, panel // 2, (panel + count) // 2)
        gate, up = gate + stride * ROWS, up + stride * ROWS


@inline
def _multiply_some(job, matrix, panel, count, token, end, y, stride):
    tiles, token_bytes = tiles_of(job, matrix)
    panels, x = matrix[Matrix.PANELS] + panel * matrix[Matrix.PANEL_BYTES], tiles + token * token_bytes
    multiply(matrix, panels, count, x, token_bytes, end - token, job[Job.MAX_TILE], y, stride, 0)
