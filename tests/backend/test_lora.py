"""Low-rank adapters on the CPU backend, against the reference with the adapter added to the weights."""

import runpy
from pathlib import Path

import numpy as np
import pytest

from ropewalk.backend.adapters import AdapterTable
from ropewalk.backend.base import StepBatch, StepRecord
from ropewalk.backend.cpu import CpuBackend
from ropewalk.checkpoint.lora import LoraWeights
from ropewalk.errors import UnsupportedModelError
from ropewalk.model.config import ModelConfig
from ropewalk.model.reference import Reference

Stored = runpy.run_path(str(Path(__file__).parent / "test_families.py"))["Stored"]
DENSE = ("llama", "gemma3", "phi3", "gpt2", "gptneox", "granite", "olmo2")


def adapter(model, rank, seed, keep=lambda name: True):
    """A random adapter of every matrix of a layer but those of experts."""
    rng, matrices = np.random.default_rng(seed), {}
    for name, info in model.tensors.items():
        part = name.split(".")[2] if name.startswith("blk.") else ""
        if len(info.shape) != 2 or "inp" in part or "norm" in part or not keep(name):
            continue
        rows, columns = info.shape
        size = np.std(model.tensor(name)) * np.sqrt(1 / rank)
        a = rng.standard_normal((rank, columns)).astype(np.float32)
        matrices[name] = a, (size * rng.standard_normal((rows, rank))).astype(np.float32)
    return LoraWeights(Path(f"adapter-{seed}"), {n: m for n, m in matrices.items() if n.startswith("blk.")})


class Merged:
    """A model with an adapter added to its weights."""

    def __init__(self, model, lora):
        self.metadata, self.tensors, self.paths = model.metadata, model.tensors, ()
        self._model, self._lora = model, lora

    def tensor(self, name):
        weight = self._model.tensor(name)
        if name in self._lora.matrices:
            a, b = self._lora.matrices[name]
            weight = weight + b @ a
        return weight

    def release(self):
        pass


@pytest.fixture
def start():
    backends = []

    def open_backend(model, adapters=(), n_threads=2):
        config = ModelConfig.from_gguf(model.metadata, model.tensors)
        backends.append(CpuBackend(model, config, n_threads=n_threads, adapters=adapters))
        return backends[-1]

    yield open_backend
    for backend in backends:
        backend.close()


def run(backend, cache, tokens, first, number, record=None, page=0):
    n = len(tokens)
    every = np.arange(n, dtype=np.int32)
    table = np.arange(page, page + 3, dtype=np.int32)[None]
    adapters = np.full(n, number, np.int32)
    batch = StepBatch(
        tokens.astype(np.int32),
        every + np.int32(first),
        np.zeros(n, np.int32),
        table,
        every,
        adapters=adapters,
    )
    return backend.forward(batch, cache, record).copy()


@pytest.mark.parametrize("family_model", DENSE, indirect=True)
def test_an_adapter_gives_the_logits_of_the_merged_weights(family_model, start):
    model = Stored(family_model, "F32")
    small, large = adapter(model, 1, 1), adapter(model, 8, 2)
    backend = start(model, [small, large])
    plain = run(start(model), backend.new_cache(3), family_model.ids, 0, -1)
    assert np.array_equal(run(backend, backend.new_cache(3), family_model.ids, 0, -1), plain)
    for number, lora in enumerate((small, large)):
        expected = Reference(backend.config, Merged(model, lora)).logits(family_model.ids)
        logits = run(backend, backend.new_cache(3), family_model.ids, 0, number)
        assert (expected - plain).std() > 0.1 * expected.std()
        assert (logits - expected).std() < 5e-3 * expected.std()


@pytest.mark.parametrize("family_model", ["qwen3moe"], indirect=True)
def test_attention_of_a_mixture_may_have_an_adapter_and_its_experts_not(family_model, start):
    model = Stored(family_model, "F32")
    lora = adapter(model, 4, 3, lambda name: ".attn_" in name)
    backend = start(model, [lora])
    logits = run(backend, backend.new_cache(3), family_model.ids, 0, 0)
    expected = Reference(backend.config, Merged(model, lora)).logits(family_model.ids)
    assert np.median((logits - expected).std(axis=1)) < 5e-3 * expected.std()
    wrong = LoraWeights(Path("wrong"), {"blk.0.ffn_gate_inp.weight": (np.ones((1, 4)), np.ones((4, 1)))})
    with pytest.raises(
        UnsupportedModelError, match=r"wrong changes blk\.0\.ffn_gate_inp\.weight; supported are"
    ):
        AdapterTable(backend.config, [wrong])


@pytest.mark.parametrize("family_model", ["llama"], indirect=True)
@pytest.mark.parametrize("n_threads", [1, 2])
def test_requests_with_different_adapters_in_one_step_have_the_bits_of_each_alone(
    family_model, start, n_threads
):
    model = Stored(family_model, "Q8_0")
    backend = start(model, [adapter(model, 3, 4), adapter(model, 8, 5)], n_threads)
    ids, cache = family_model.ids, backend.new_cache(9)
    alone = [run(backend, backend.new_cache(3), ids, 0, number) for number in (-1, 0, 1)]
    for i, number in enumerate((-1, 0, 1)):
        run(backend, cache, ids[:-2], 0, number, page=3 * i)
    for back in (2, 1):
        at = len(ids) - back
        rows = np.arange(3, dtype=np.int32)
        batch = StepBatch(
            np.full(3, ids[at], np.int32), np.full(3, at, np.int32), rows, np.arange(9, dtype=np.int32).reshape(3, 3),
            rows, adapters=np.array([-1, 0, 1], np.int32),
        )  # fmt: skip
        together = backend.forward(batch, cache).copy()
        assert np.array_equal(together, [logits[at] for logits in alone])


@pytest.mark.parametrize("family_model", ["llama"], indirect=True)
def test_the_account_counts_adapters_in_use(family_model, start):
    model = Stored(family_model, "Q8_0")
    loras = [adapter(model, 3, 4), adapter(model, 8, 5)]
    backend = start(model, loras)
    for number in (-1, 0, 1):
        record = StepRecord()
        run(backend, backend.new_cache(3), family_model.ids, 0, number, record)
        held = sum(a.nbytes + b.nbytes for a, b in loras[number].matrices.values())
        assert record.weight_bytes.get("adapt", 0) == (held if number >= 0 else 0)
