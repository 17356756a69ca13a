"""Phases around the matrix products: activations into tiles, and a product's panels shared out among the threads.

Each function is one thread's share of a phase: items are taken from a counter of `kernels.sync` until there are none.
Fields of `job`, `layer` and `matrix` are named in `kernels.tables`, tiles are described in `kernels.matmul`.
"""

from ropewalk.kernels.jit import inline
from ropewalk.kernels.matmul import FINE_TOKEN_GROUP_BYTES, TOKEN_GROUP_BYTES
from ropewalk.kernels.pointwise import GELU_TANH, add_to, gelu_tanh, norm_to_tile, put_group, rms_norm, silu
from ropewalk.kernels.simd import call, load_f32, load_floats
from ropewalk.kernels.sync import chunk_of, take
from ropewalk.kernels.tables import Job, Matrix

READS_BYTES, READS_FLOATS = 1, 2
PREFILL_PANELS = 4  # taken at a time by many tokens: their weights and a tile of activations share a cache


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
def destinations(job, reads, fine, token, n_tokens, groups):
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
def product(n_threads, words, counter, job, matrix, n_tokens, y, y_stride, add):
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
def normalise(n_threads, words, job, post_norm, norm, reads, fine):
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
                as_bytes, as_floats, tile, place = destinations(
                    job, reads, fine, token, n_tokens, hidden // 32
                )
                norm_to_tile(x, norm, hidden, eps, as_bytes, fine, as_floats, tile, place)
        first = take(words, 0) * chunk


@inline
def attended_to_tiles(n_threads, words, job, reads):
    n_tokens, width = job[Job.N_TOKENS], job[Job.N_HEADS] * job[Job.HEAD_DIM]
    groups = width // 32
    chunk = chunk_of(n_tokens * groups, n_threads)
    first = take(words, 0) * chunk
    while first < n_tokens * groups:
        for item in range(first, min(first + chunk, n_tokens * groups)):
            token, g = item // groups, item % groups
            at = job[Job.ATTENDED] + 4 * width * token + 128 * g
            as_bytes, as_floats, tile, place = destinations(job, reads, False, token, n_tokens, groups)
            put_group(load_floats(at), load_floats(at + 64), as_bytes, False, as_floats, tile, place, g)
        first = take(words, 0) * chunk


@inline
def _activate(gate, up, kind):
    g = load_floats(gate)
    if kind == GELU_TANH:
        return gelu_tanh(g) * load_floats(up)
    return silu(g) * load_floats(up)


@inline
def activated_to_tiles(n_threads, words, job, reads):
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
            as_bytes, as_floats, tile, place = destinations(job, reads, False, token, n_tokens, groups)
            put_group(a, b, as_bytes, False, as_floats, tile, place, g)
        first = take(words, 0) * chunk
