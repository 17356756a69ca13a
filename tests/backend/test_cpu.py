"""The CPU backend on the default model: close to the reference, and the same bits on every path."""

import dataclasses
import hashlib
import os
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ropewalk.backend import cpu as cpu_module
from ropewalk.backend.base import StepBatch
from ropewalk.backend.cpu import CpuBackend
from ropewalk.checkpoint.fingerprint import stamp
from ropewalk.checkpoint.gguf import open_gguf
from ropewalk.errors import InvalidParameterError
from ropewalk.model.config import ModelConfig
from ropewalk.model.reference import Reference

TOKENS = np.random.default_rng(0).integers(0, 49152, 600).astype(np.int32)
N = 40  # tokens whose bits are compared across processes


def run(backend, cache, tokens, start=0, rows=None, table=None):
    """Logits of `tokens` at positions `start` ... ; pages in order unless a table is given."""
    n = len(tokens)
    table = np.arange(cache.n_pages, dtype=np.int32) if table is None else table
    rows = np.arange(n, dtype=np.int32) if rows is None else np.array(rows, np.int32)
    positions = np.arange(start, start + n, dtype=np.int32)
    batch = StepBatch(np.asarray(tokens, np.int32), positions, np.zeros(n, np.int32), table[None], rows)
    return backend.forward(batch, cache).copy()


@pytest.fixture(scope="module")
def checkpoint(smollm2):
    with open_gguf(smollm2) as file:
        yield file


@pytest.fixture(scope="module")
def config(checkpoint):
    return ModelConfig.from_gguf(checkpoint.metadata, checkpoint.tensors)


@pytest.fixture(scope="module")
def backend(checkpoint, config):
    backend = CpuBackend(checkpoint, config, n_threads=2)
    yield backend
    backend.close()


@pytest.fixture(scope="module")
def whole(backend):
    """Logits of the first tokens, from one prefill."""
    return run(backend, backend.new_cache(40), TOKENS[:N])


def test_close_to_the_float32_reference(backend, checkpoint, config, whole):
    expected = Reference(config, checkpoint).logits(TOKENS[:N]).astype(np.float64)
    p = expected - np.logaddexp.reduce(expected, -1, keepdims=True)
    q = whole.astype(np.float64)
    q -= np.logaddexp.reduce(q, -1, keepdims=True)
    assert (np.exp(p) * (p - q)).sum(
        -1
    ).mean() < 1e-2  # random tokens; ordinary text gives 1.3e-3 (docs/fidelity.md)


@pytest.mark.parametrize("chunk", [1, 2, 7, 13, 16, 17])
def test_the_size_of_a_prefill_chunk_changes_no_bit(backend, whole, chunk):
    cache = backend.new_cache(40)
    parts = [run(backend, cache, TOKENS[i : min(i + chunk, N)], i) for i in range(0, N, chunk)]
    assert np.array_equal(np.concatenate(parts), whole)


def test_a_step_longer_than_one_pass_is_the_same_step(backend):
    rows = [0, 300, 511, 512, 599]
    long = run(backend, backend.new_cache(40), TOKENS, rows=rows)
    cache = backend.new_cache(40)
    short = [run(backend, cache, TOKENS[i : i + 100], i) for i in range(0, 600, 100)]
    assert np.array_equal(long, np.concatenate(short)[rows])


@pytest.mark.parametrize("dtype", ["float16", "int8"])
def test_splitting_a_long_context_over_threads_changes_no_bit(backend, checkpoint, config, dtype):
    """600 tokens: the last chunk of one token splits its three partitions over two threads; one thread never splits."""
    alone = CpuBackend(checkpoint, config, n_threads=1)
    results = []
    for each in (backend, alone):
        cache = each.new_cache(40, dtype)
        run(each, cache, TOKENS[:-1], rows=[])
        results.append(run(each, cache, TOKENS[-1:], len(TOKENS) - 1))
    alone.close()
    whole = run(backend, backend.new_cache(40, dtype), TOKENS, rows=[len(TOKENS) - 1])
    assert np.array_equal(results[0], results[1])
    assert np.array_equal(results[0], whole)


@pytest.mark.parametrize("n_threads", [1, 3])
def test_the_number_of_threads_changes_no_bit(checkpoint, config, whole, n_threads):
    backend = CpuBackend(checkpoint, config, n_threads=n_threads)
    assert np.array_equal(run(backend, backend.new_cache(40), TOKENS[:N]), whole)
    backend.close()


@pytest.mark.parametrize("n_sequences", [1, 2, 7, 13, 16, 17])
def test_neighbours_in_a_decode_batch_change_no_bit(backend, whole, n_sequences):
    """Sequence s holds the first s + 1 tokens; then all take their next token in one step."""
    cache = backend.new_cache(2 * n_sequences)
    tables = np.random.default_rng(1).permutation(2 * n_sequences).astype(np.int32).reshape(-1, 2)
    for s in range(n_sequences):
        run(backend, cache, TOKENS[: s + 1], table=tables[s])
    every = np.arange(n_sequences, dtype=np.int32)
    batch = StepBatch(TOKENS[every + 1], every + 1, every, tables, every)
    assert np.array_equal(backend.forward(batch, cache), whole[every + 1])


ELSEWHERE = [
    {"ROPEWALK_RUNG": "portable"},
    {"NUMBA_CPU_NAME": "haswell"},
    {"NUMBA_CPU_NAME": "skylake-avx512"},
    {"NUMBA_CPU_NAME": "x86-64"},
]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="names x86 CPUs")
@pytest.mark.parametrize("environment", ELSEWHERE, ids=lambda e: "-".join(e.values()))
def test_other_cpus_get_the_same_bits(smollm2, whole, environment):
    """Compiled for older CPUs in a process of its own; K1: every level agrees, here to the last bit."""
    code = (
        "import sys, hashlib; sys.path.insert(0, sys.argv[2]); import test_cpu as t\n"
        "file = t.open_gguf(sys.argv[1])\n"
        "backend = t.CpuBackend(file, t.ModelConfig.from_gguf(file.metadata, file.tensors), n_threads=2)\n"
        "logits = t.run(backend, backend.new_cache(40), t.TOKENS[: t.N])\n"
        "print(hashlib.sha256(logits.tobytes()).hexdigest())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(smollm2), str(Path(__file__).parent)],
        capture_output=True,
        text=True,
        timeout=1500,
        env=os.environ | environment,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == hashlib.sha256(whole.tobytes()).hexdigest()


def test_k1_a_rung_that_cannot_be_used_is_refused(monkeypatch):
    from ropewalk.kernels import cpu

    for value, message in (
        ("avx512", "allowed: amx, vnni"),
        ("avxvnni", "lacks avxvnni; usable here: avx2, portable"),
    ):
        monkeypatch.setenv("ROPEWALK_RUNG", value)
        monkeypatch.setattr(cpu, "cpu_features", lambda: frozenset({"avx2", "f16c", "fma"}))
        cpu.choose_rung.cache_clear()
        with pytest.raises(InvalidParameterError, match=message):
            cpu.choose_rung()
    monkeypatch.delenv("ROPEWALK_RUNG")
    assert cpu.choose_rung().name == "avx2"
    cpu.choose_rung.cache_clear()
    monkeypatch.setattr(cpu, "cpu_features", frozenset)
    assert cpu.choose_rung().name == "portable"
    cpu.choose_rung.cache_clear()


@pytest.mark.parametrize(("dtype", "head_bytes"), [("float16", 2 * 64), ("int8", 64 + 4)])
def test_a_cache_has_the_bytes_of_the_formula(backend, config, dtype, head_bytes):
    cache = backend.new_cache(3, dtype)
    assert cache.n_bytes == 3 * 16 * 2 * config.n_layers * config.n_kv_heads * head_bytes
    assert cache.data.nbytes + cache.scales.nbytes == cache.n_pages * cache.bytes_per_page == cache.n_bytes


def test_an_int8_cache_is_close_and_its_bits_do_not_depend_on_chunks(backend, whole):
    cache = backend.new_cache(40, "int8")
    prefill = run(backend, cache, TOKENS[:N])
    one_by_one = [run(backend, cache, TOKENS[i : i + 1], i) for i in range(N)]
    assert np.array_equal(prefill, np.concatenate(one_by_one))
    assert not np.array_equal(prefill, whole)
    assert np.abs(prefill - whole).max() < 0.1 * np.abs(whole).max()


@pytest.mark.parametrize("dtype", ["float16", "int8"])
def test_a_copied_page_continues_like_the_original(backend, dtype):
    cache = backend.new_cache(6, dtype)
    table = np.array([4, 1, 2], np.int32)
    run(backend, cache, TOKENS[:20], table=table, rows=[19])
    cache.copy_pages([(1, 3), (3, 5), (2, 3)])
    branch = run(backend, cache, TOKENS[30:40], 20, table=np.array([4, 5, 0], np.int32))
    expected = run(backend, cache, TOKENS[30:40], 20, table=table)
    assert np.array_equal(branch, expected)


@pytest.mark.parametrize("dtype", ["float16", "int8"])
def test_a_page_that_is_read_and_written_elsewhere_continues_like_the_original(backend, dtype):
    cache, other = backend.new_cache(3, dtype), backend.new_cache(5, dtype)
    run(backend, cache, TOKENS[:20], rows=[19])
    contents = cache.read_page(0)
    assert (contents.dtype, contents.shape) == (np.uint8, (cache.bytes_per_page,))
    for start in range(0, 16, 5):  # the same bytes, however they were computed
        run(backend, other, TOKENS[start : min(start + 5, 16)], start)
    assert np.array_equal(other.read_page(0), contents)
    other.write_page(4, contents)
    other.write_page(2, cache.read_page(1))
    assert np.array_equal(other.read_page(4), contents)
    branch = run(backend, other, TOKENS[30:40], 20, table=np.array([4, 2], np.int32))
    assert np.array_equal(branch, run(backend, cache, TOKENS[30:40], 20))


def test_an_identity_follows_from_the_file_the_model_and_the_format(backend, checkpoint, config, monkeypatch):
    mine = backend.identity()
    assert len(mine) == 32
    assert mine == backend.identity("float16") != backend.identity("int8")
    for name, value in (
        ("config", dataclasses.replace(config, norm_eps=2e-5)),
        ("_stamp", stamp([Path(__file__)])),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(backend, name, value)
            assert backend.identity() != mine
    with monkeypatch.context() as patched:
        patched.setattr(cpu_module, "numerics_hash", lambda: "other arithmetic")
        assert backend.identity() != mine
    assert backend.identity() == mine


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_a_cache_takes_memory_where_it_is_written_only(backend, whole):
    """Huge pages would take 2 MB for each of 180 streams, 360 MB for one page of ours."""

    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before = resident()
    cache = backend.new_cache(4000)
    run(backend, cache, TOKENS[:4])
    assert cache.n_bytes > 10**9
    assert resident() - before < 20 * 2**20


@pytest.mark.parametrize("dtype", ["float16", "int8"])
def test_a_page_has_the_bytes_that_were_said_before(backend, dtype):
    assert backend.page_bytes(dtype) == backend.new_cache(1, dtype).bytes_per_page


def test_an_unknown_cache_type_is_refused(backend):
    with pytest.raises(InvalidParameterError, match="float16"):
        backend.new_cache(1, "float8")


def test_k1_the_log_names_the_level_that_was_chosen(checkpoint, config, caplog):
    with caplog.at_level("INFO", logger="ropewalk"):
        CpuBackend(checkpoint, config, n_threads=2).close()
    rung = cpu_module.choose_rung()
    assert f"kernels for {rung.name} ({rung.reason}), threads: 2" in caplog.messages
