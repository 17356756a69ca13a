"""One step of the model: every thread of a team runs `forward` over the same tables, and the team meets at barriers.

    norm -> q, k, v -> rotate and write to the cache -> attend -> out -> + residual
    norm -> gate, up -> activation -> down -> + residual                      for each layer
    norm -> output matrix -> logits                                           for the rows that want them

Prefill, decode and mixtures are the same: a flat list of tokens. Between two barriers the items of a phase (panels of
16 rows, tokens, heads) are taken from a counter, so who computes what varies, and what is computed does not. The
phases themselves are in `kernels.products`, `kernels.tiles` and `kernels.attend`.
Knows nothing of files or requests; the fields of the tables are named in `kernels.tables`.
"""

import numpy as np
from numba import types

from ropewalk.kernels import clock
from ropewalk.kernels.attend import attend, attend_split, normalise_rows, rotate_and_store
from ropewalk.kernels.clock import lap, meet
from ropewalk.kernels.jit import inline, kernel
from ropewalk.kernels.pointwise import norm_to_tile, soft_cap
from ropewalk.kernels.products import product, product_of, tiles_of
from ropewalk.kernels.simd import call, load_f32, load_floats, load_i32, rows_at, store_floats, table_at
from ropewalk.kernels.sync import (
    BELL,
    BELL_STEP,
    STOP,
    atomic_load,
    atomic_swap,
    reset_runs,
    take,
    wait_while,
)
from ropewalk.kernels.tables import (
    DOWN,
    EXPERT_MATRICES_PER_LAYER,
    GATE,
    MATRICES_PER_LAYER,
    ONTO_Y,
    OUT,
    TO_X,
    TO_Y,
    UP,
    Job,
    K,
    Layer,
    Q,
    V,
)
from ropewalk.kernels.tiles import (
    activated_to_tiles,
    attended_to_tiles,
    destinations,
    is_fused,
    multiply_and_activate,
    normalise,
)

_ZERO, _ONE = np.float32(0), np.float32(1)


@inline
def _adapt(tid, n_threads, words, job, first, count, width, outputs):
    """Add what the tokens' adapters say to the outputs of up to three matrices that read the same activations."""
    table, shared = words.ctypes.data, job.ctypes.data
    call(job[Job.LORA_WORKER], (tid, n_threads, table, shared, first, count, width, *outputs))


@inline
def _latent(tid, n_threads, words, job, layer, matrices, base, after):
    """What latent attention does in place of the products that make q, k and v, and (`after`) with what comes out."""
    table, shared, row = words.ctypes.data, job.ctypes.data, layer.ctypes.data
    first, fields = matrices[base + Q].ctypes.data, matrices.shape[1]
    call(job[Job.LATENT_WORKER], (tid, n_threads, table, shared, row, first, fields, after))


@inline
def _attention_block(tid, n_threads, words, job, layer, matrices, number):
    """The first half of a layer; its input is in the tiles, its output is added to X or left in Y."""
    n_tokens, head_bytes = job[Job.N_TOKENS], 4 * job[Job.HEAD_DIM]
    base = MATRICES_PER_LAYER * number
    q_stride, kv_stride = head_bytes * job[Job.N_HEADS], head_bytes * job[Job.N_KV_HEADS]
    if job[Job.LATENT] != 0:
        _latent(tid, n_threads, words, job, layer, matrices, base, 0)
    else:
        product(tid, n_threads, words, 0, job, matrices[base + Q], n_tokens, job[Job.QUERIES], q_stride, 0)
        product(tid, n_threads, words, 1, job, matrices[base + K], n_tokens, job[Job.KEYS], kv_stride, 0)
        product(tid, n_threads, words, 2, job, matrices[base + V], n_tokens, job[Job.VALUES], kv_stride, 0)
        meet(tid, words, n_threads, job, clock.QKV)
    if job[Job.LORA_WORKER] != 0:
        qkv = (job[Job.QUERIES], q_stride, job[Job.KEYS], kv_stride, job[Job.VALUES], kv_stride)
        _adapt(tid, n_threads, words, job, base + Q, 3, job[Job.HIDDEN], qkv)
    if layer[Layer.Q_ROW_NORM] != 0:
        normalise_rows(n_threads, words, job, layer)
        meet(tid, words, n_threads, job, clock.ROTATE)
    rotate_and_store(tid, n_threads, words, job, layer, number)
    meet(tid, words, n_threads, job, clock.ROTATE)
    if job[Job.MAX_PARTITIONS] > 0:
        attend_split(tid, n_threads, words, job, layer, number)
    else:
        attend(tid, n_threads, words, job, layer, number)
    meet(tid, words, n_threads, job, clock.ATTEND)
    if job[Job.LATENT] != 0:
        _latent(tid, n_threads, words, job, layer, matrices, base, 1)
    attended_to_tiles(tid, n_threads, words, job, layer[Layer.OUT_INPUT])
    meet(tid, words, n_threads, job, clock.POINTWISE)
    width, end = job[Job.OUT_WIDTH], layer[Layer.ATTN_END]
    _branch_end(tid, n_threads, words, job, matrices, base + OUT, 0, width, end, clock.OUT)


@inline
def _feed_forward_block(tid, n_threads, words, job, layer, matrices, number):
    """The second half of a layer; its input is in the tiles, its output is added to X or left in Y."""
    n_tokens, width, stride = job[Job.N_TOKENS], layer[Layer.FFN], 4 * layer[Layer.FFN]
    base, tiles = MATRICES_PER_LAYER * number, 0
    if is_fused(job, layer):
        gate, up = matrices[base + GATE], matrices[base + UP]
        multiply_and_activate(tid, n_threads, words, job, layer, gate, up)
        meet(tid, words, n_threads, job, clock.GATE_UP)
        tiles = job[Job.DOWN_TILES]
    else:
        product(tid, n_threads, words, 0, job, matrices[base + GATE], n_tokens, job[Job.GATE], stride, 0)
        product(tid, n_threads, words, 1, job, matrices[base + UP], n_tokens, job[Job.UP], stride, 0)
        meet(tid, words, n_threads, job, clock.GATE_UP)
        if job[Job.LORA_WORKER] != 0:
            gate_up = (job[Job.GATE], stride, job[Job.UP], stride, 0, 0)
            _adapt(tid, n_threads, words, job, base + GATE, 2, job[Job.HIDDEN], gate_up)
        activated_to_tiles(tid, n_threads, words, job, layer)
        meet(tid, words, n_threads, job, clock.POINTWISE)
    end, part = layer[Layer.FFN_END], clock.DOWN
    _branch_end(tid, n_threads, words, job, matrices, base + DOWN, tiles, width, end, part)


@inline
def _experts_block(tid, n_threads, words, job, layer, matrices, n_layers, number):
    """The second half of a layer that has experts; its input is in the tiles, its output is left in Y."""
    own = MATRICES_PER_LAYER * n_layers + 1 + EXPERT_MATRICES_PER_LAYER * number
    call(
        job[Job.EXPERT_WORKER],
        (
            tid,
            n_threads,
            words.ctypes.data,
            job.ctypes.data,
            layer.ctypes.data,
            matrices[MATRICES_PER_LAYER * number + GATE].ctypes.data,
            matrices[own].ctypes.data,
            matrices.shape[1],
            number,
        ),
    )


@inline
def _branch_end(tid, n_threads, words, job, matrices, number, tiles, width, end, part):
    """The last product of a branch, of `width` inputs: added to X, or put into or onto Y where more is to be done.

    Its inputs are in `tiles`, if that is not 0.
    """
    n_tokens, stride, matrix = job[Job.N_TOKENS], 4 * job[Job.HIDDEN], matrices[number]
    y, add = job[Job.X] if end == TO_X else job[Job.Y], 0 if end == TO_Y else 1
    usual, token_bytes = tiles_of(job, matrix)
    tiles = tiles if tiles != 0 else usual
    product_of(tid, n_threads, words, 0, job, matrix, tiles, token_bytes, n_tokens, y, stride, add)
    meet(tid, words, n_threads, job, part)
    if job[Job.LORA_WORKER] != 0:
        _adapt(tid, n_threads, words, job, number, 1, width, (y, stride, 0, 0, 0, 0))


@inline
def _logits(tid, n_threads, words, job, matrix):
    """Output norm and output matrix for the wanted rows."""
    n_logits, hidden = job[Job.N_LOGITS], job[Job.HIDDEN]
    eps = load_f32(job[Job.CONSTANTS])
    row = take(words, 0)
    while row < n_logits:
        x = job[Job.X] + 4 * hidden * load_i32(job[Job.LOGIT_ROWS] + 4 * row)
        to = destinations(job, job[Job.OUTPUT_INPUT], True, row, n_logits, hidden // 32)
        norm = (job[Job.OUTPUT_NORM], job[Job.OUTPUT_NORM_BIAS], job[Job.LAYER_NORM])
        norm_to_tile(x, norm, hidden, eps, True, to)
        row = take(words, 0)
    meet(tid, words, n_threads, job, clock.NORM)
    product(tid, n_threads, words, 0, job, matrix, n_logits, job[Job.LOGITS], job[Job.LOGIT_STRIDE], 0)
    meet(tid, words, n_threads, job, clock.OUTPUT)
    cap, scale = load_f32(job[Job.CONSTANTS] + 12), load_f32(job[Job.CONSTANTS] + 16)
    if cap > _ZERO or scale != _ONE or job[Job.OUTPUT_BIAS] != 0:
        row = take(words, 0)
        while row < n_logits:
            for i in range(0, job[Job.LOGIT_STRIDE], 64):
                at = job[Job.LOGITS] + job[Job.LOGIT_STRIDE] * row + i
                y = load_floats(at)
                if job[Job.OUTPUT_BIAS] != 0:
                    y = y + load_floats(job[Job.OUTPUT_BIAS] + i)
                y = y * scale
                store_floats(at, soft_cap(y, cap) if cap > _ZERO else y)
            row = take(words, 0)
        meet(tid, words, n_threads, job, clock.POINTWISE)


@inline
def forward(tid, n_threads, words, job, layers, matrices):
    """One step as thread `tid` of `n_threads`; all of them return when the logits are complete."""
    n_layers = layers.shape[0]
    n_logits = job[Job.N_LOGITS]  # read now: after the last barrier the caller may fill in the next step
    before = (0, 0, 0)
    if tid == 0:
        lap(job, clock.START)
    for number in range(n_layers):
        layer = layers[number]
        norm = (layer[Layer.ATTN_NORM], layer[Layer.ATTN_NORM_BIAS], job[Job.LAYER_NORM])
        normalise(tid, n_threads, words, job, before, norm, layer[Layer.QKV_INPUT], True)
        meet(tid, words, n_threads, job, clock.NORM)
        _attention_block(tid, n_threads, words, job, layer, matrices, number)
        before = (0, 0, 0)
        if layer[Layer.ATTN_END] == TO_Y and layer[Layer.FFN_END] != ONTO_Y:  # parallel branches end together
            before = (1, layer[Layer.OUT_BIAS], layer[Layer.POST_ATTN_NORM])
        norm = (layer[Layer.FFN_NORM], layer[Layer.FFN_NORM_BIAS], job[Job.LAYER_NORM])
        normalise(tid, n_threads, words, job, before, norm, layer[Layer.FFN_INPUT], False)
        meet(tid, words, n_threads, job, clock.NORM)
        if layer[Layer.HAS_EXPERTS] != 0:
            _experts_block(tid, n_threads, words, job, layer, matrices, n_layers, number)
        else:
            _feed_forward_block(tid, n_threads, words, job, layer, matrices, number)
        before = (0, 0, 0)
        if layer[Layer.FFN_END] != TO_X:
            before = (1, layer[Layer.DOWN_BIAS], layer[Layer.POST_FFN_NORM])
    if before[0]:
        normalise(tid, n_threads, words, job, before, (0, 0, 0), 0, False)
        meet(tid, words, n_threads, job, clock.NORM)
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
        for member in range(bell % BELL_STEP):
            reset_runs(words, member, 0)
            reset_runs(words, member, 1)
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
        forward(
            tid,
            n_threads,
            table_at(words.ctypes.data),
            table_at(job.ctypes.data),
            rows_at(layers.ctypes.data, layers.shape[0], layers.shape[1]),
            rows_at(matrices.ctypes.data, matrices.shape[0], matrices.shape[1]),
        )
        if patience == 0:
            return bell


def compile_steps() -> None:
    """Compile (or load) `run_steps` ahead of its first call."""
    table = types.Array(types.int64, 2, "C")
    row = types.Array(types.int64, 1, "C")
    run_steps.compile((types.int64, row, row, table, table, types.int64, types.int64))
