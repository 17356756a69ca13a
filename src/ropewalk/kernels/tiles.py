"""Phases between matrix products: norms, attention's output and the feed-forward's activations, into tiles.

Each function is one thread's share of a phase: items are taken from a counter of `kernels.sync` until there are none.
Fields of `job` and `layer` are named in `kernels.tables`, tiles are described in `kernels.matmul`. What is done with
the numbers is in `kernels.pointwise`.
"""

from ropewalk.kernels.definition import FINE_TOKEN_GROUP_BYTES, TOKEN_GROUP_BYTES
from ropewalk.kernels.jit import inline
from ropewalk.kernels.pointwise import (
    ONE,
    activate,
    add_scaled,
    add_to,
    norm_to_tile,
    normalise_floats,
    put_group,
)
from ropewalk.kernels.products import tile_size
from ropewalk.kernels.simd import load_f32, load_floats, splat
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
def normalise(tid, n_threads, words, job, before, norm, reads, fine):
    """Finish the branch before, then norm into tiles, unless nothing reads them.

    `before` says whether there is a branch in Y, and its bias and post-norm; `norm` is what `norm_to_tile` takes.
    """
    n_tokens, hidden = job[Job.N_TOKENS], job[Job.HIDDEN]
    eps, scale = load_f32(job[Job.CONSTANTS]), load_f32(job[Job.CONSTANTS] + 20)
    in_y, bias, post_norm = before
    chunk, n_helped = chunk_of(n_tokens, n_threads), helped(n_tokens)
    n_chunks = (n_tokens + chunk - 1) // chunk
    number, turn = next_of_run(tid, n_threads, words, 0, n_chunks, 0, n_helped)
    while number < n_chunks:
        first = number * chunk
        for token in range(first, min(first + chunk, n_tokens)):
            x = job[Job.X] + 4 * hidden * token
            if in_y:
                y = job[Job.Y] + 4 * hidden * token
                if bias != 0:
                    add_to(y, bias, hidden)
                if post_norm != 0:
                    normalise_floats(y, (post_norm, 0, job[Job.LAYER_NORM]), hidden, eps)
                add_scaled(x, y, scale, hidden)
            if reads != 0:
                as_bytes, as_floats, tile, place = destinations(
                    job, reads, fine, token, n_tokens, hidden // 32
                )
                norm_to_tile(x, norm, hidden, eps, as_bytes, fine, as_floats, tile, place)
        number, turn = next_of_run(tid, n_threads, words, 0, n_chunks, turn, n_helped)


@inline
def attended_to_tiles(tid, n_threads, words, job, reads):
    n_tokens, width = job[Job.N_TOKENS], job[Job.OUT_WIDTH]
    groups = width // 32
    chunk, n_helped = chunk_of(n_tokens * groups, n_threads), helped(n_tokens)
    n_chunks = (n_tokens * groups + chunk - 1) // chunk
    number, turn = next_of_run(tid, n_threads, words, 0, n_chunks, 0, n_helped)
    while number < n_chunks:
        first = number * chunk
        for item in range(first, min(first + chunk, n_tokens * groups)):
            token, g = item // groups, item % groups
            at = job[Job.OUT_SOURCE] + 4 * width * token + 128 * g
            as_bytes, as_floats, tile, place = destinations(job, reads, False, token, n_tokens, groups)
            put_group(load_floats(at), load_floats(at + 64), as_bytes, False, as_floats, tile, place, g)
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
def activated_to_tiles(tid, n_threads, words, job, layer):
    """activation(gate) * up, into tiles."""
    n_tokens, width, reads = job[Job.N_TOKENS], layer[Layer.FFN], layer[Layer.DOWN_INPUT]
    biases = (layer[Layer.GATE_BIAS], layer[Layer.UP_BIAS])
    groups = width // 32
    chunk, n_helped = chunk_of(n_tokens * groups, n_threads), helped(n_tokens)
    n_chunks = (n_tokens * groups + chunk - 1) // chunk
    number, turn = next_of_run(tid, n_threads, words, 0, n_chunks, 0, n_helped)
    while number < n_chunks:
        first = number * chunk
        for item in range(first, min(first + chunk, n_tokens * groups)):
            token, g = item // groups, item % groups
            at = 4 * width * token
            a, b = _activated(job, biases, at, 32 * g), _activated(job, biases, at, 32 * g + 16)
            as_bytes, as_floats, tile, place = destinations(job, reads, False, token, n_tokens, groups)
            put_group(a, b, as_bytes, False, as_floats, tile, place, g)
        number, turn = next_of_run(tid, n_threads, words, 0, n_chunks, turn, n_helped)
