"""Every family's tiny model on the CPU backend: close to the reference, and the same bits in prefill and decode."""

from types import SimpleNamespace

import gguf
import numpy as np
import pytest

from ropewalk.backend.base import StepBatch
from ropewalk.backend.cpu import CpuBackend
from ropewalk.checkpoint.quants import FORMATS, dequantize
from ropewalk.model.config import ModelConfig
from ropewalk.model.reference import Reference

Q8_0 = gguf.GGMLQuantizationType.Q8_0


class Quantized:
    """A tiny model as a file would hold it: matrices as Q8_0, the router and everything with one axis as float32."""

    def __init__(self, model):
        self.metadata = model.metadata
        self.tensors, self._raw = {}, {}
        for name, values in model.tensors.items():
            is_float = values.ndim == 1 or "norm" in name or "gate_inp" in name or name.endswith("bias")
            form = FORMATS["F32" if is_float else "Q8_0"]
            raw = values if is_float else gguf.quants.quantize(values, Q8_0)
            self._raw[name] = np.ascontiguousarray(raw).view(np.uint8).reshape(*values.shape[:-1], -1)
            self.tensors[name] = SimpleNamespace(name=name, shape=values.shape, format=form)

    paths = ()

    def raw(self, name):
        return self._raw[name]

    def tensor(self, name):
        return dequantize(self._raw[name], self.tensors[name].format).reshape(self.tensors[name].shape)

    def release(self):
        pass


def run(backend, cache, tokens, start):
    n = len(tokens)
    every = np.arange(n, dtype=np.int32)
    table = np.arange(cache.n_pages, dtype=np.int32)[None]
    batch = StepBatch(tokens.astype(np.int32), every + np.int32(start), np.zeros(n, np.int32), table, every)
    return backend.forward(batch, cache).copy()


def divergence(expected, logits):
    """Mean KL divergence of the distributions, in nats."""
    p, q = (
        x - np.logaddexp.reduce(x, -1, keepdims=True) for x in (expected.astype(float), logits.astype(float))
    )
    return (np.exp(p) * (p - q)).sum(-1).mean()


@pytest.fixture
def quantized(family_model):
    return Quantized(family_model)


@pytest.fixture
def backend(quantized):
    config = ModelConfig.from_gguf(quantized.metadata, quantized.tensors)
    backend = CpuBackend(quantized, config, n_threads=2)
    yield backend
    backend.close()


def test_close_to_the_reference_and_the_same_bits_one_by_one(family_model, quantized, backend):
    """40 tokens cross every window. Left out, no part of a family is as small as what quantized activations cost."""
    expected = Reference(backend.config, quantized).logits(family_model.ids)
    prefill = run(backend, backend.new_cache(3), family_model.ids, 0)
    assert (prefill - expected).std() < 0.04 * expected.std()
    assert divergence(expected, prefill) < 1e-2
    cache = backend.new_cache(3)
    parts = [run(backend, cache, family_model.ids[:17], 0)]
    parts += [run(backend, cache, family_model.ids[i : i + 1], i) for i in range(17, len(family_model.ids))]
    assert np.array_equal(np.concatenate(parts), prefill)
