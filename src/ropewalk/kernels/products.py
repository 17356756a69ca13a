"""Phases of matrix products: a product's panels shared out among the threads.

Each function is one thread's share of a phase: items are taken from a counter of `kernels.sync` until there are none.
Fields of `job` and `matrix` are named in `kernels.tables`, tiles are described in `kernels.matmul`.
"""

from ropewalk.kernels.definition import FINE_TOKEN_GROUP_BYTES, TOKEN_GROUP_BYTES
from ropewalk.kernels.jit import inline
from ropewalk.kernels.simd import call
from ropewalk.kernels.sync import chunk_of, next_of_run
from ropewalk.kernels.tables import Job, Matrix

SPAN_TOKENS, SPAN_TILES = 32, 2  # of a span at least: each one reads all weights
PREFILL_PANELS, PREFILL_BYTES = 4, 1 << 18  # of weights that wait in a cache for the tokens of the next tile
VECTOR_TILE = 16  # tokens that vector registers have room for; only with AMX there are larger tiles


@inline
def tile_size(n_rest, max_tile):
    """Tokens of the next tile, a power of two, when `n_rest` are left: the smallest that holds them all.

    Where more than an eighth of it would be empty, half of it, and the rest goes through tiles of its own: the weights
    are in a cache then, while an empty place takes as long as any other. (Not with AMX, whose tiles of 16 are quicker
    than others of 8; nor tiles of 4 and less, where time goes by the weights.)
    """
    size = 1
    while size < n_rest and size < max_tile:
        size *= 2
    if size >= 8 and max_tile <= VECTOR_TILE and 8 * n_rest < 7 * size:
        size //= 2
    return size


@inline
def tile_of(token, n_tokens, max_tile):
    """The first token of the tile that a token is in, and the tile's size."""
    first = token // max_tile * max_tile
    size = tile_size(n_tokens - first, max_tile)
    while first + size <= token:
        first += size
        size = tile_size(n_tokens - first, max_tile)
    return first, size


@inline
def panels_at_once(n_panels, panel_bytes, n_tokens, max_tile):
    """How many of `n_panels` panels to take at a time: if tokens need several tiles, few enough for a cache."""
    if n_tokens > tile_size(n_tokens, max_tile):
        return min(n_panels, max(PREFILL_PANELS, PREFILL_BYTES // panel_bytes))
    return n_panels


@inline
def log2(tile):
    power = 0
    while (1 << power) < tile:
        power += 1
    return power


@inline
def span_of(n_tokens, n_threads, max_tile):
    """Tokens of an item of a product: a thread's share, so that what is done with its outputs finds them in its caches.

    Then each thread goes through all panels: weights are read once for each span. All tokens, where they are few.
    """
    least = max(SPAN_TOKENS, SPAN_TILES * max_tile)
    spans, unit = max(1, min(n_threads, n_tokens // least)), max(16, max_tile)
    return ((n_tokens + spans - 1) // spans + unit - 1) // unit * unit


@inline
def multiply(matrix, panels, n_panels, tiles, token_bytes, n_tokens, max_tile, y, y_stride, add):
    """y (+)= some panels of a matrix x the activations of `n_tokens` tokens, tile by tile."""
    token = 0
    while token < n_tokens:
        tile = tile_size(n_tokens - token, max_tile)
        call(
            matrix[Matrix.WORKERS + log2(tile)],
            (
                panels,
                n_panels,
                matrix[Matrix.PANEL_BYTES],
                matrix[Matrix.N_GROUPS],
                tiles + token * token_bytes,
                y + token * y_stride,
                y_stride,
                min(tile, n_tokens - token),
                add,
            ),
        )
        token += tile


@inline
def tiles_of(job, matrix):
    """Address of the activations that a matrix reads, and the bytes of a token."""
    groups = matrix[Matrix.N_GROUPS]
    if matrix[Matrix.IS_FLOAT]:
        return job[Job.FLOAT_TILES], groups * 128
    return job[Job.BYTE_TILES], groups * (
        FINE_TOKEN_GROUP_BYTES if matrix[Matrix.FINE] else TOKEN_GROUP_BYTES
    )


@inline
def product(tid, n_threads, words, counter, job, matrix, n_tokens, y, y_stride, add):
    """y (+)= matrix x the activations in the tiles, for this thread's share of the panels."""
    tiles, token_bytes = tiles_of(job, matrix)
    product_of(tid, n_threads, words, counter, job, matrix, tiles, token_bytes, n_tokens, y, y_stride, add)


@inline
def product_of(tid, n_threads, words, counter, job, matrix, tiles, token_bytes, n_tokens, y, y_stride, add):
    """The same, of activations in other tiles."""
    n_panels, max_tile = matrix[Matrix.N_PANELS], job[Job.MAX_TILE]
    chunk = panels_at_once(chunk_of(n_panels, n_threads), matrix[Matrix.PANEL_BYTES], n_tokens, max_tile)
    n_chunks = (n_panels + chunk - 1) // chunk
    span = span_of(n_tokens, n_threads, max_tile)
    n_items = n_chunks * ((n_tokens + span - 1) // span)
    item, turn = next_of_run(tid, n_threads, words, counter, n_items, 0)
    while item < n_items:
        first, token = item % n_chunks * chunk, item // n_chunks * span
        count, tokens = min(chunk, n_panels - first), min(span, n_tokens - token)
        panels = matrix[Matrix.PANELS] + first * matrix[Matrix.PANEL_BYTES]
        x, out = tiles + token * token_bytes, y + token * y_stride + first * 64
        multiply(matrix, panels, count, x, token_bytes, tokens, max_tile, out, y_stride, add)
        item, turn = next_of_run(tid, n_threads, words, counter, n_items, turn)
