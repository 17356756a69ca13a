"""What a step is said to read and write, against the formulas; and that its parts are the whole."""

from types import SimpleNamespace

import numpy as np
import pytest

from ropewalk.backend.account import Account
from ropewalk.backend.base import StepBatch, StepRecord, now_ns
from ropewalk.backend.cpu import CpuBackend
from ropewalk.bench import Case, batch_of, work_of
from ropewalk.checkpoint.gguf import open_gguf
from ropewalk.kernels.tables import MATRICES_PER_LAYER, MATRIX_FIELDS, Matrix
from ropewalk.model.config import ModelConfig


def account(windows=(0, 4)):
    """Matrix i of each layer has i + 1 panels of 100 bytes, the output matrix 5 of 1000."""
    n_layers = len(windows)
    matrices = np.zeros((MATRICES_PER_LAYER * n_layers + 1, MATRIX_FIELDS), np.int64)
    matrices[:-1, Matrix.N_PANELS] = np.tile(np.arange(1, MATRICES_PER_LAYER + 1), n_layers)
    matrices[:-1, Matrix.PANEL_BYTES] = 100
    matrices[-1, Matrix.N_PANELS], matrices[-1, Matrix.PANEL_BYTES] = 5, 1000
    weights = SimpleNamespace(matrices=matrices, vectors={"a": np.zeros(3, np.float32)})
    return Account(weights, SimpleNamespace(n_layers=n_layers, layer_window=windows, latent=None), 36)


def test_weights_by_part():
    assert account().weight_bytes(3, 1) == {
        "qkv": 2 * 600,
        "out": 2 * 400,
        "gate_up": 2 * 1100,
        "down": 2 * 700,
        "norm": 12,
        "output": 5000,
        "embedding": 3 * 36,
    }
    assert "output" not in account().weight_bytes(3, 0)


def positions_read(positions, sequences, windows):
    """The same counted out: the set of positions that any token of a sequence sees, in each layer."""
    total = 0
    for window in windows:
        seen = set()
        for p, s in zip(positions, sequences, strict=True):
            seen |= {(s, q) for q in range(max(0, p - window + 1) if window else 0, p + 1)}
        total += len(seen)
    return total


@pytest.mark.parametrize(
    ("positions", "sequences"),
    [([0], [0]), ([9], [0]), ([3, 4, 5, 6], [0] * 4), ([9, 0, 1, 2, 30], [0, 1, 1, 1, 2]), ([7, 7], [0, 1])],
)
def test_positions_that_are_read_with_sliding_windows(positions, sequences):
    """C6: the window counts the current token."""
    a = account((0, 4, 4, 1))
    as_arrays = np.array(positions, np.int32), np.array(sequences, np.int32)
    assert a.cached_positions(*as_arrays) == positions_read(positions, sequences, (0, 4, 4, 1))


def test_a_record_adds_passes_up():
    record = StepRecord()
    for _ in range(2):
        account().note(record, np.array([4, 5], np.int32), np.zeros(2, np.int32), 1, page_bytes=2 * 16 * 10)
    assert record.weight_bytes["output"] == 10_000
    assert record.cache_written_bytes == 2 * 2 * 2 * 10
    assert record.cache_read_bytes == 2 * (6 + 5) * 10  # 0 ... 5, and with a window of 4 from 1 on


@pytest.fixture(scope="module")
def backend(smollm2):
    with open_gguf(smollm2) as checkpoint:
        config = ModelConfig.from_gguf(checkpoint.metadata, checkpoint.tensors)
        backend = CpuBackend(checkpoint, config)
        yield backend
        backend.close()


@pytest.mark.parametrize("dtype", ["float16", "int8"])
def test_bytes_are_those_of_bench(backend, dtype):
    case = Case("decode", 1, 3, 40)
    cache, record = backend.new_cache(case.n_pages, dtype), StepRecord()
    step = (case.steps - 1) // 2
    backend.forward(batch_of(case, step, backend.config.vocab_size), cache, record)
    work = work_of(case, backend.config, backend.weights, cache.bytes_per_page)
    assert record.cache_read_bytes == work.cache_bytes
    embedding = record.weight_bytes.pop("embedding")
    assert embedding == 3 * backend.config.hidden_size // 32 * 34  # Q8_0 has 34 bytes for 32 weights
    assert sum(record.weight_bytes.values()) == work.weight_bytes
    assert record.cache_written_bytes == 3 * cache.bytes_per_page // 16


def test_every_phase_is_timed_once_and_no_bit_changes(backend):
    """Two passes, of 512 tokens and of 8; the parts follow each other within the call."""
    cache = backend.new_cache(33)
    n = 520
    positions = np.arange(n, dtype=np.int32)
    batch = StepBatch(
        tokens=positions % 1000,
        positions=positions,
        sequences=np.zeros(n, np.int32),
        page_tables=np.arange(33, dtype=np.int32)[None],
        logit_rows=np.array([n - 1], np.int32),
    )
    plain = backend.forward(batch, cache).copy()
    record = StepRecord()
    logits = backend.forward(batch, cache, record)
    assert logits.tobytes() == plain.tobytes()
    end_ns = now_ns()
    layer = ["norm", "qkv", "rotate", "attend", "pointwise", "out", "norm", "gate_up", "down"]
    many = ["prepare", *layer * backend.config.n_layers]  # activations are a part of gate_up there
    few = ["prepare", *[*layer[:-1], "pointwise", "down"] * backend.config.n_layers]
    worked = [part for part in record.parts if part != "wait"]
    assert worked == [*many, "finish", "trace", *few, "norm", "output", "finish", "trace"]
    assert record.parts.count("wait") == len(worked) - 6  # every phase in the kernels ends at a barrier
    times = [record.start_ns, *record.ends_ns, end_ns]
    assert times == sorted(times)
    assert len(record.ends_ns) == len(record.parts)


def test_the_clock_is_off_again_afterwards(backend):
    cache = backend.new_cache(1)
    record = StepRecord()
    backend.forward(batch_of(Case("prefill", 3, 1, 0), 0, 100), cache, record)
    n = len(record.parts)
    backend.forward(batch_of(Case("prefill", 3, 1, 0), 0, 100), cache)
    assert (len(record.parts), backend._log[0]) == (n, 0)
