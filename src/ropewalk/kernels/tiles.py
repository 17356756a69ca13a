"""Phases between matrix products: norms, attention's output and the feed-forward's activations, into tiles.

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
from ropewalk.kernels.products import tile_size
from ropewalk.kernels.rows import ROWS, stack
from ropewalk.kernels.simd import load_f32, load_floats, splat, store_floats
from ropewalk.kernels.sync import MAX_HELPED, chunk_of, next_of_run
from ropewalk.kernels.tables import Job, Layer

READS_BYTES, READS_FLOATS = 1, 2
FEW_TOKENS = 16  # up to so many, what is done between products takes microseconds: nobody is to help


@inline
def helped(n_tokens):
    """Of how many runs a thread takes work between products."""
    return 1 if n_tokens <= FEW_TOKENS else MAX_HELPED


@inline
def tile_address(base, token, n_tokens, max_tile, token_bytes):
    """Where a token's tile starts, the tile's size, and the token's place in it."""
    first = token // max_tile * max_tile
    return base + first * token_bytes, tile_size(n_tokens - first, max_tile), token - first


@inline
def destinations(job, reads, fine, token, n_tokens, groups):
    """Addresses of the byte tile and of the float tile (0 where not read), tile size, place of the token."""
    size = FINE_TOKEN_GROUP_BYTES if fine else TOKEN_GROUP_BYTES
    max_tile = job[Job.MAX_TILE]
    as_bytes, tile, place = tile_address(job[Job.BYTE_TILES], token, n_tokens, max_tile, groups * size)
    as_floats, _, _ = tile_address(job[Job.FLOAT_TILES], token, n_tokens, max_tile, groups * 128)
    if not reads & READS_BYTES:
        as_bytes = 0
    if not reads & READS_FLOATS:
        as_floats = 0
    return as_bytes, as_floats, tile, place


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
    n_chunks = (n_tokens + chunk - 1) // chunk
    number, turn = next_of_run(tid, n_threads, words, 0, n_chunks, 0, n_helped)
    while number < n_chunks:
        first = number * chunk
        _norm_tokens(job, first, min(first + chunk, n_tokens), before, norm, reads, fine)
        number, turn = next_of_run(tid, n_threads, words, 0, n_chunks, turn, n_helped)


@inline
def attended_to_tiles(tid, n_threads, words, job, reads):
    n_tokens, width = job[Job.N_TOKENS], job[Job.OUT_WIDTH]
    groups = width // 32
    n_items = (n_tokens + ROWS - 1) // ROWS * groups
    chunk, n_helped = chunk_of(n_items, n_threads), helped(n_tokens)
    n_chunks = (n_items + chunk - 1) // chunk
    number, turn = next_of_run(tid, n_threads, words, 0, n_chunks, 0, n_helped)
    while number < n_chunks:
        first = number * chunk
        for item in range(first, min(first + chunk, n_items)):
            token, g = item // groups * ROWS, item % groups
            at = job[Job.OUT_SOURCE] + 4 * width * token + 128 * g
            if token + ROWS <= n_tokens:
                to = destinations(job, reads, False, token, n_tokens, groups)
                put_rows(at, 4 * width, to, False, g, groups)
            else:
                for t in range(token, n_tokens):
                    to = destinations(job, reads, False, t, n_tokens, groups)
                    put_group(load_floats(at), load_floats(at + 64), to, False, g)
                    at += 4 * width
        number, turn = next_of_run(tid, n_threads, words, 0, n_chunks, turn, n_helped)


@inline
def with_bias(at, bias, i):
    """Sixteen floats from the i-th on, and the bias, if there is one."""
    if bias != 0:
        return load_floats(at + 4 * i) + load_floats(bias + 4 * i)
    return load_floats(at + 4 * i)


@inline
def _activated(job, biases, at, i):
    """Sixteen activations of the token whose rows of GATE and UP begin `at` bytes into them."""
    gate = with_bias(job[Job.GATE] + at, biases[0], i)
    if job[Job.IS_GATED]:
        return activate(gate, with_bias(job[Job.UP] + at, biases[1], i), job[Job.ACTIVATION])
    return activate(gate, splat(ONE), job[Job.ACTIVATION])


@inline
def _activate_rows(job, biases, width, token, g, rows):
    """A group of activations of 16 tokens, float32 [16, 32]."""
    at = 4 * width * token + 128 * g
    gate, up = job[Job.GATE] + at, job[Job.UP] + at
    is_plain = job[Job.IS_GATED] and biases[0] == 0 and biases[1] == 0
    if is_plain and job[Job.ACTIVATION] == SILU:
        silu_rows(gate, up, 4 * width, rows)
    elif is_plain and job[Job.ACTIVATION] == GELU_TANH:
        gelu_tanh_rows(gate, up, 4 * width, rows)
    else:
        for r in range(ROWS):
            for i in (0, 16):
                a = _activated(job, biases, 4 * width * (token + r), 32 * g + i)
                store_floats(rows + 128 * r + 4 * i, a)


@inline
def activated_to_tiles(tid, n_threads, words, job, layer):
    """activation(gate) * up, into tiles."""
    n_tokens, width, reads = job[Job.N_TOKENS], layer[Layer.FFN], layer[Layer.DOWN_INPUT]
    biases, rows = (layer[Layer.GATE_BIAS], layer[Layer.UP_BIAS]), stack(2048)
    groups = width // 32
    n_items = (n_tokens + ROWS - 1) // ROWS * groups
    chunk, n_helped = chunk_of(n_items, n_threads), helped(n_tokens)
    n_chunks = (n_items + chunk - 1) // chunk
    number, turn = next_of_run(tid, n_threads, words, 0, n_chunks, 0, n_helped)
    while number < n_chunks:
        first = number * chunk
        for item in range(first, min(first + chunk, n_items)):
            token, g = item // groups * ROWS, item % groups
            if token + ROWS <= n_tokens:
                _activate_rows(job, biases, width, token, g, rows)
                put_rows(
                    rows, 128, destinations(job, reads, False, token, n_tokens, groups), False, g, groups
                )
            else:
                for t in range(token, n_tokens):
                    at = 4 * width * t
                    a, b = _activated(job, biases, at, 32 * g), _activated(job, biases, at, 32 * g + 16)
                    put_group(a, b, destinations(job, reads, False, t, n_tokens, groups), False, g)
        number, turn = next_of_run(tid, n_threads, words, 0, n_chunks, turn, n_helped)
