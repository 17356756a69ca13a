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
PREFILL_PANELS = 4  # taken at a time by many tokens: their weights and a tile of activations share a cache


@inline
def tile_size(n_rest, max_tile):
    """The smallest tile (a power of two) for the tokens that are left, up to the largest."""
    size = 1
    while size < n_rest and size < max_tile:
        size *= 2
    return size


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
    return max(1, (n_tokens // n_threads + least - 1) // least) * least


@inline
def multiply(matrix, panels, n_panels, tiles, token_bytes, n_tokens, max_tile, y, y_stride, add):
    """y (+)= some panels of a matrix x the activations of `n_tokens` tokens, tile by tile."""
    for token in range(0, n_tokens, max_tile):
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
    chunk = chunk_of(n_panels, n_threads)
    if n_tokens > max_tile:
        chunk = min(chunk, PREFILL_PANELS)
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
