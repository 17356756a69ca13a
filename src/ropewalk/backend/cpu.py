"""The CPU backend: weights packed once into one arena, tables of addresses, and steps run by a team of threads.

Knows how pages and weights are laid out (`kernels.formats`, `kernels.pages`); knows nothing of requests.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ropewalk.backend.account import Account
from ropewalk.backend.adapters import AdapterTable
from ropewalk.backend.angles import Angles
from ropewalk.backend.base import PAGE_SIZE, Float32Array, StepBatch, StepRecord, now_ns
from ropewalk.backend.cache import CpuCache, cache_page_bytes
from ropewalk.backend.compile import attention_parts, compile_parts, parts_of_model
from ropewalk.backend.constant_keys import ConstantKeys
from ropewalk.backend.experts import ExpertTable
from ropewalk.backend.host import available_bytes
from ropewalk.backend.latent import LatentTable
from ropewalk.backend.numerics import numerics_hash
from ropewalk.backend.sources import ffn_width
from ropewalk.backend.weights import INPUTS, PackedWeights, pack_model
from ropewalk.backend.widths import check_widths
from ropewalk.checkpoint.base import Checkpoint
from ropewalk.checkpoint.fingerprint import fingerprint, stamp
from ropewalk.checkpoint.lora import LoraWeights
from ropewalk.checkpoint.quants import dequantize
from ropewalk.errors import InvalidParameterError
from ropewalk.kernels.attend import SPAN_TILES
from ropewalk.kernels.attention import (
    PARTITION,
    attention_worker,
    head_passes,
    partial_bytes,
    scores_bytes,
    tile_tokens,
)
from ropewalk.kernels.bandwidth import measure_read_bandwidth
from ropewalk.kernels.clock import PARTS, new_log, read_log
from ropewalk.kernels.cpu import choose_rung
from ropewalk.kernels.definition import FINE_TOKEN_GROUP_BYTES, TOKEN_GROUP_BYTES
from ropewalk.kernels.latent import latent_worker
from ropewalk.kernels.latent_attention import latent_attention_worker
from ropewalk.kernels.lora import lora_worker
from ropewalk.kernels.matmul import max_tile
from ropewalk.kernels.moe import expert_worker
from ropewalk.kernels.pages import query_row_bytes
from ropewalk.kernels.pointwise import GELU, GELU_TANH, RELU2, SILU, SWIGLU_OAI
from ropewalk.kernels.tables import Job, Latent
from ropewalk.kernels.team import Team, available_threads
from ropewalk.kernels.tiles import READS_FLOATS
from ropewalk.model.config import ModelConfig
from ropewalk.model.reference import output_norm

log = logging.getLogger(__name__)
ACTIVATIONS = {"silu": SILU, "gelu_tanh": GELU_TANH, "gelu": GELU, "relu2": RELU2, "swiglu_oai": SWIGLU_OAI}
OUTPUT_VECTORS = {
    Job.OUTPUT_NORM: "output_norm.weight",
    Job.OUTPUT_NORM_BIAS: "output_norm.bias",
    Job.OUTPUT_BIAS: "output.bias",
}
NUMBERS = (Job.POSITIONS, Job.SEQUENCES, Job.ANGLE_ROWS, Job.LOGIT_ROWS)  # of a step's tokens, int32
MAX_TOKENS = 512  # of one pass through the layers; a longer step is run as several
Progress = Callable[[str, float], None]


class CpuBackend:
    """One model on this machine's CPU.

    Parameters
    ----------
    checkpoint : Checkpoint
        Stays open: rows of the embedding are read from its map.
    config : ModelConfig
        Read from that checkpoint.
    n_threads : int, optional
        Default: `available_threads()`.
    progress : callable, optional
        Called with what is being done and the share that is done, 0 to 1.
    adapters : sequence of LoraWeights
        Low-rank adapters; `StepBatch.adapters` says by their place here which tokens go through one.

    Raises
    ------
    UnsupportedModelError
        A width that the kernels cannot cut into groups, a tensor type that they do not multiply, or an adapter of
        another matrix than those of attention and of feed-forward networks.
    InvalidParameterError
        `n_threads` is below 1.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: ModelConfig,
        n_threads: int | None = None,
        progress: Progress | None = None,
        adapters: Sequence[LoraWeights] = (),
    ) -> None:
        if n_threads is not None and n_threads < 1:
            raise InvalidParameterError(f"n_threads is {n_threads}; it must be at least 1")
        check_widths(config)
        self.config = config
        self.n_threads = n_threads or available_threads()
        rung = choose_rung()
        log.info("kernels for %s (%s), threads: %d", rung.name, rung.reason, self.n_threads)
        self._checkpoint = checkpoint
        self._stamp = stamp(checkpoint.paths)
        self._embedding = checkpoint.raw("token_embd.weight")
        self._embedding_format = checkpoint.tensors["token_embd.weight"].format
        self._position_rows = checkpoint.tensor("position_embd.weight") if config.learned_positions else None
        self._adapters = AdapterTable(config, adapters) if adapters else None
        compile_parts(parts_of_model(checkpoint, config, adapted=bool(adapters)), progress)
        self.weights: PackedWeights = pack_model(checkpoint, config, self.n_threads, progress)
        if adapters:
            self.weights.layers[:, list(INPUTS)] |= READS_FLOATS
        self._angles = Angles(config, checkpoint.tensor, self.weights.layers)
        self._constants = np.array(
            [
                config.norm_eps,
                config.attention_scale,
                config.attention_softcap,
                config.logit_softcap,
                config.logit_scale,
                config.residual_scale,
            ],
            np.float32,
        )
        self._constant_keys: ConstantKeys | None = None  # found when the first int8 cache is made
        self._job = np.zeros(len(Job), np.int64)
        self._buffers: dict[Job, NDArray[Any]] = {}
        self._capacity = 0
        self._logits = np.zeros((1, -(-config.vocab_size // 16) * 16), np.float32)
        self._cache: weakref.ref[CpuCache] | None = None  # of the last step
        self._partials = np.zeros(0, np.uint8)
        self._lock = threading.Lock()
        self._account = Account(self.weights, config, self._embedding[:1].nbytes)
        self._log = new_log(config.n_layers)
        self._experts = ExpertTable(config, config.experts, self.weights.layers) if config.experts else None
        self._latent = (
            LatentTable(config, config.latent, self.weights.reads_floats) if config.latent else None
        )
        self._fill_constant_fields()
        self._grow(1)
        self._angles.reach(1024)
        self._team = Team(self.n_threads, self._job, self.weights.layers, self.weights.matrices)
        checkpoint.release()

    @property
    def free_bytes(self) -> int:
        """Bytes that this process could allocate for a KV cache now."""
        return available_bytes()

    def page_bytes(self, dtype: str = "float16") -> int:
        """Bytes of one page of a KV cache over all layers."""
        return cache_page_bytes(self.config, dtype)

    def identity(self, dtype: str = "float16") -> bytes:
        """Return what the contents of a page follow from besides tokens, as 32 bytes; see `Backend.identity`.

        The first call for a state of a model file reads all of it. Raises CheckpointError if it changed meanwhile.
        """
        kind = self._checkpoint.kind  # names what the weights were quantized to while they were loaded
        facts = [
            fingerprint(self._stamp).hex(),
            kind,
            numerics_hash(),
            repr(self.config),
            dtype,
            str(PAGE_SIZE),
        ]
        facts += [f"{t.name} {t.shape} {t.format.name}" for t in self._checkpoint.tensors.values()]
        return hashlib.sha256("\0".join(facts).encode()).digest()

    def new_cache(self, n_pages: int, dtype: str = "float16") -> CpuCache:
        """Allocate a KV cache of `n_pages` pages of 16 tokens."""
        cache = CpuCache(self.config, n_pages, dtype)
        with self._lock:
            if cache.is_int8 and not self._constant_keys:
                self._constant_keys = ConstantKeys(self.config, self._checkpoint, self.weights)
                if self._constant_keys.n_terms.any():
                    self._angles.turn()
        compile_parts(attention_parts(self.config, dtype))
        return cache

    def forward(self, batch: StepBatch, cache: CpuCache, record: StepRecord | None = None) -> Float32Array:
        """Run one step; logits float32 [m, vocab] of `batch.logit_rows`, valid until the next call."""
        with self._lock:
            n, m = len(batch.tokens), len(batch.logit_rows)
            if m > len(self._logits):
                self._logits = np.zeros((m, self._logits.shape[1]), np.float32)
            done = 0
            for start in range(0, n, MAX_TOKENS):
                stop, rows = min(start + MAX_TOKENS, n), batch.logit_rows
                if n > MAX_TOKENS:
                    rows = rows[(rows >= start) & (rows < stop)] - np.int32(start)
                self._job[Job.LOGITS] = self._logits.ctypes.data + done * self._logits.strides[0]
                self._run(batch, cache, slice(start, stop), rows, record)
                done += len(rows)
            return self._logits[:m, : self.config.vocab_size]

    def hidden(self, batch: StepBatch, cache: CpuCache) -> Float32Array:
        """Run one step without logits; the last layer's output after the output norm, float32 [n, hidden_size]."""
        n, rows = len(batch.tokens), np.zeros(0, np.int32)
        outputs = np.empty((n, self.config.hidden_size), np.float32)
        with self._lock:
            for start in range(0, n, MAX_TOKENS):
                stop = min(start + MAX_TOKENS, n)
                self._run(batch, cache, slice(start, stop), rows, None)
                outputs[start:stop] = self._buffers[Job.X][: stop - start]
        return output_norm(self.config, outputs, self.weights.vectors)

    def read_bandwidth(self, n_sweeps: int = 4) -> float:
        """Bytes per second at which its threads read its weights and do nothing else: the bound of decoding."""
        with self._lock:
            return measure_read_bandwidth(self.n_threads, repeats=n_sweeps, data=self.weights.arena)

    def close(self) -> None:
        """End the threads and let go of the weights."""
        self._team.close()

    def _run(
        self,
        batch: StepBatch,
        cache: CpuCache,
        part: slice,
        rows: NDArray[np.int32],
        record: StepRecord | None,
    ) -> None:
        n, job = part.stop - part.start, self._job
        positions, sequences = batch.positions[part], batch.sequences[part]
        tables, last = np.ascontiguousarray(batch.page_tables), int(positions.max())
        self._grow(n)
        self._angles.reach(last + 1)
        x = dequantize(self._embedding[batch.tokens[part]], self._embedding_format)
        x = np.multiply(x, np.float32(self.config.embedding_scale), out=self._buffers[Job.X][:n])
        if self._position_rows is not None:
            x += self._position_rows[positions]
        self._use(cache)
        job[Job.N_TOKENS], job[Job.N_LOGITS] = n, len(rows)
        job[Job.PAGE_TABLES], job[Job.MAX_PAGES] = tables.ctypes.data, tables.shape[1]
        for buffer, values in zip(
            self._numbers, (positions, sequences, self._angles.rows(batch)[part], rows), strict=True
        ):
            buffer[: len(values)] = values
        self._split_attention(n, last)
        adapters = self._adapt(batch, part)
        if record is None:
            self._team.step()
        else:
            self._step_by_the_clock(record)
            used = self._experts.active if self._experts else None
            self._account.note(record, positions, sequences, len(rows), cache.bytes_per_page, used)
            if self._adapters and adapters is not None:
                record.weight_bytes["adapt"] = record.weight_bytes.get("adapt", 0) + self._adapters.bytes_of(
                    adapters
                )
            record.lap("trace")

    def _use(self, cache: CpuCache) -> None:
        """Fill in what follows from the cache, unless it is that of the step before."""
        if self._cache is not None and self._cache() is cache:
            return
        self._cache, job, is_int8 = weakref.ref(cache), self._job, int(cache.is_int8)
        job[Job.CACHE], job[Job.CACHE_SCALES] = cache.data.ctypes.data, cache.scales.ctypes.data
        job[Job.N_PAGES], job[Job.PAGE_BYTES] = cache.n_pages, cache.data.shape[-1]
        job[Job.CACHE_IS_INT8] = is_int8
        worker = latent_attention_worker if self._latent else attention_worker
        job[Job.ATTENTION] = worker(self._pass_heads, 1, is_int8)
        job[Job.ATTENTION_REST] = worker(self._rest_heads, 1, is_int8)
        job[Job.ATTENTION_TILE] = worker(self._pass_heads, self._tile_tokens, is_int8)
        job[Job.ATTENTION_TILE_REST] = worker(self._rest_heads, self._tile_tokens, is_int8)

    def _adapt(self, batch: StepBatch, part: slice) -> NDArray[np.int32] | None:
        """Tell the kernels which adapters the tokens have; returns them if there are any, to be kept for the step."""
        self._job[Job.LORA_WORKER] = 0
        if self._adapters is None or batch.adapters is None or (batch.adapters[part] < 0).all():
            return None
        adapters = np.ascontiguousarray(batch.adapters[part], np.int32)
        self._adapters.set_tokens(adapters)
        self._job[Job.LORA_WORKER], self._job[Job.LORA] = lora_worker(), self._adapters.table.ctypes.data
        return adapters

    def _step_by_the_clock(self, record: StepRecord) -> None:
        self._job[Job.CLOCK] = self._log.ctypes.data
        try:
            self._team.step()
        finally:
            self._job[Job.CLOCK] = 0
        returned_ns = now_ns()
        parts, ends_ns = read_log(self._log)
        record.parts += ["prepare", *(PARTS[part] for part in parts[1:]), "finish"]
        record.ends_ns += [*ends_ns.tolist(), returned_ns]

    def _split_attention(self, n: int, last_position: int) -> None:
        """Let threads share the partitions of a context where tokens and KV heads alone would leave some idle."""
        most = last_position // PARTITION + 1
        pairs = n * self.config.n_kv_heads
        self._job[Job.MAX_PARTITIONS] = 0
        if most == 1 or self.n_threads == 1 or pairs >= 4 * self.n_threads:
            return
        n_bytes = pairs * most * self.config.kv_group * partial_bytes(self.config.head_dim)
        if n_bytes > self._partials.nbytes:
            self._partials = np.zeros(2 * n_bytes, np.uint8)
        self._job[Job.MAX_PARTITIONS], self._job[Job.PARTIALS] = most, self._partials.ctypes.data

    def _fill_constant_fields(self) -> None:
        config, job = self.config, self._job
        self._pass_heads, self._rest_heads = head_passes(config.kv_group)
        job[Job.LOGIT_STRIDE] = self._logits.strides[0]
        job[Job.HIDDEN], job[Job.VOCAB] = config.hidden_size, config.vocab_size
        if self._experts:
            job[Job.MOE], job[Job.EXPERT_WORKER] = self._experts.table.ctypes.data, expert_worker()
        if self._latent:
            job[Job.LATENT], job[Job.LATENT_WORKER] = self._latent.table.ctypes.data, latent_worker()
        job[Job.N_HEADS], job[Job.N_KV_HEADS], job[Job.HEAD_DIM] = (
            config.n_heads,
            config.n_kv_heads,
            config.head_dim,
        )
        job[Job.MAX_TILE] = max_tile()
        job[Job.ACTIVATION] = ACTIVATIONS[config.activation]
        if config.rope:
            job[Job.ROPE_WIDTH] = config.rope[0].width
            job[Job.NEIGHBOURS] = config.rope[0].layout == "neighbours"
        job[Job.IS_GATED], job[Job.LAYER_NORM] = config.gated, config.layer_norm
        job[Job.HEAD_NORM_STRIDE] = 4 * config.head_dim if config.qk_norm == "each head" else 0
        job[Job.CONSTANTS] = self._constants.ctypes.data
        job[Job.PASS_HEADS] = self._pass_heads
        for field, name in OUTPUT_VECTORS.items():
            if name in self.weights.vectors:
                job[field] = self.weights.vectors[name].ctypes.data
        job[Job.OUTPUT_INPUT] = self.weights.output_input
        self._tile_tokens = tile_tokens(self._pass_heads)
        rows = self._pass_heads * self._tile_tokens
        job[Job.TILE_TOKENS], job[Job.QUERY_STEP] = self._tile_tokens, 4 * rows
        job[Job.QUERY_TILE_BYTES] = rows * query_row_bytes(config.head_dim)
        job[Job.SCORES_BYTES], job[Job.STATE_BYTES] = scores_bytes(rows), 8 * rows * SPAN_TILES
        scratch_bytes = int(job[Job.SCORES_BYTES] + job[Job.STATE_BYTES]) + rows * partial_bytes(
            config.head_dim
        )
        self._scratch = np.zeros((self.n_threads, scratch_bytes), np.uint8)
        job[Job.SCRATCH], job[Job.SCRATCH_STRIDE] = self._scratch.ctypes.data, scratch_bytes

    def _grow(self, n: int) -> None:
        """Make the buffers of a step large enough for n tokens."""
        if n <= self._capacity:
            return
        config = self.config
        padded = -(-n // max_tile()) * max_tile()
        q_width, kv_width = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
        ffn = max(ffn_width(config, layer) for layer in range(config.n_layers))
        out_width = config.n_heads * config.latent.value if config.latent else q_width
        widest = max(config.hidden_size, out_width, ffn, config.latent.q_rank if config.latent else 0)
        widths = {
            Job.X: config.hidden_size,
            Job.Y: config.hidden_size,
            Job.QUERIES: q_width,
            Job.KEYS: kv_width,
            Job.VALUES: 0 if config.latent else kv_width,
            Job.ATTENDED: q_width,
            Job.GATE: ffn,
            Job.UP: ffn,
            Job.FLOAT_TILES: widest if self.weights.reads_floats or self._adapters else 0,
        }
        for field, width in widths.items():
            self._buffers[field] = np.zeros((padded, width), np.float32)
        self._buffers[Job.BYTE_TILES] = np.zeros(padded * (widest // 32) * FINE_TOKEN_GROUP_BYTES, np.uint8)
        self._buffers[Job.DOWN_TILES] = np.zeros(padded * (ffn // 32) * TOKEN_GROUP_BYTES, np.uint8)
        n_tiles = -(-n // self._tile_tokens) * config.n_kv_heads * -(-config.kv_group // self._pass_heads)
        self._buffers[Job.QUERY_TILES] = np.zeros((n_tiles, self._job[Job.QUERY_TILE_BYTES]), np.uint8)
        self._buffers |= {field: np.zeros(padded, np.int32) for field in NUMBERS}
        self._numbers = [self._buffers[field] for field in NUMBERS]
        for field, buffer in self._buffers.items():
            self._job[field] = buffer.ctypes.data
        if self._experts:
            self._experts.grow(n)
        self._job[Job.OUT_SOURCE], self._job[Job.OUT_WIDTH] = self._job[Job.ATTENDED], out_width
        if self._latent:
            self._latent.grow(n)
            self._job[Job.OUT_SOURCE] = self._latent.table[Latent.OUT]
        if self._adapters:
            self._adapters.grow(n)
        self._capacity = n
