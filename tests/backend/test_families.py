"""Every family's tiny model on the CPU backend: close to the reference, and the same bits in prefill and decode."""

import gguf
import numpy as np
import pytest

from ropewalk.backend import constant_keys
from ropewalk.backend.base import StepBatch, StepRecord
from ropewalk.backend.cpu import CpuBackend
from ropewalk.checkpoint.header import TensorInfo
from ropewalk.checkpoint.quants import FORMATS, dequantize
from ropewalk.errors import UnsupportedModelError
from ropewalk.kernels.formats import PACKED
from ropewalk.kernels.tables import Layer
from ropewalk.model.config import ModelConfig
from ropewalk.model.reference import Reference


class Stored:
    """A tiny model as a file would hold it: experts in one format, other matrices as Q8_0, the rest as float32.

    As "F32" all of it is float32.
    """

    def __init__(self, model, form):
        self.metadata = model.metadata
        self.tensors, self._raw = {}, {}
        for name, values in model.tensors.items():
            is_float = (
                form == "F32"
                or values.ndim == 1
                or "norm" in name
                or "gate_inp" in name
                or name.endswith("bias")
            )
            of = "F32" if is_float else form if values.ndim == 3 else "Q8_0"
            raw = values if is_float else gguf.quants.quantize(values, gguf.GGMLQuantizationType[of])
            self._raw[name] = np.ascontiguousarray(raw).view(np.uint8).reshape(*values.shape[:-1], -1)
            self.tensors[name] = TensorInfo(name, values.shape, FORMATS[of], 0, 0)

    paths = ()

    def raw(self, name):
        return self._raw[name]

    def tensor(self, name):
        return dequantize(self._raw[name], self.tensors[name].format).reshape(self.tensors[name].shape)

    def release(self):
        pass


def run(backend, cache, tokens, start, record=None):
    n = len(tokens)
    every = np.arange(n, dtype=np.int32)
    table = np.arange(cache.n_pages, dtype=np.int32)[None]
    batch = StepBatch(tokens.astype(np.int32), every + np.int32(start), np.zeros(n, np.int32), table, every)
    return backend.forward(batch, cache, record).copy()


def divergence(expected, logits):
    """Mean KL divergence of the distributions, in nats."""
    p, q = (
        x - np.logaddexp.reduce(x, -1, keepdims=True) for x in (expected.astype(float), logits.astype(float))
    )
    return (np.exp(p) * (p - q)).sum(-1).mean()


@pytest.fixture
def start():
    """A function from a model to its backend, closed in the end."""
    backends = []

    def open_backend(model):
        config = ModelConfig.from_gguf(model.metadata, model.tensors)
        backends.append(CpuBackend(model, config, n_threads=2))
        return backends[-1]

    yield open_backend
    for backend in backends:
        backend.close()


def test_float_weights_give_the_logits_of_the_reference(family_model, start):
    """Only the cache rounds, to float16: no part of a family is missing, and the same experts are chosen."""
    model = Stored(family_model, "F32")
    backend = start(model)
    logits = run(backend, backend.new_cache(3), family_model.ids, 0)
    expected = Reference(backend.config, model).logits(family_model.ids)
    assert (logits - expected).std() < 2e-3 * expected.std()


def test_quantized_weights_are_close_and_give_the_same_bits_one_by_one(family_model, start):
    """40 tokens cross every window. A choice between two experts that are nearly equal may fall the other way."""
    model = Stored(family_model, "Q8_0")
    backend = start(model)
    prefill = run(backend, backend.new_cache(3), family_model.ids, 0)
    expected = Reference(backend.config, model).logits(family_model.ids)
    errors = (prefill - expected).std(axis=1) / expected.std()
    assert np.median(errors) < (0.1 if backend.config.experts else 0.04)
    assert divergence(expected, prefill) < (0.1 if backend.config.experts else 0.01)
    cache = backend.new_cache(3)
    parts = [run(backend, cache, family_model.ids[:17], 0)]
    parts += [run(backend, cache, family_model.ids[i : i + 1], i) for i in range(17, len(family_model.ids))]
    assert np.array_equal(np.concatenate(parts), prefill)


BIASED = ("qwen2", "llama-biases", "starcoder2", "phi2", "gptneox", "gpt-oss", "gpt2")


def enlarge_key_biases(model, size):
    """Give keys a part of that size that all of them have in common, in every third dimension."""
    config = ModelConfig.from_gguf(model.metadata, model.tensors)
    q, kv = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    rng = np.random.default_rng(11)
    for layer in range(config.n_layers):
        fused = config.fused_qkv
        bias = model.tensors[f"blk.{layer}.attn_{'qkv' if fused else 'k'}.bias"]
        bias[q : q + kv : 3] += (size * rng.standard_normal(-(-kv // 3))).astype(np.float32) if fused else 0
        bias[::3] += 0 if fused else (size * rng.standard_normal(len(bias[::3]))).astype(np.float32)


@pytest.mark.parametrize("family_model", BIASED, indirect=True)
def test_an_int8_cache_leaves_out_what_keys_have_in_common(family_model, start, monkeypatch):
    """Large biases cost it no bits: both layouts of rotation, of all or a part or nothing; sinks; fused tensors."""
    enlarge_key_biases(family_model, 40)
    model = Stored(family_model, "F32")
    expected = Reference(ModelConfig.from_gguf(model.metadata, model.tensors), model).logits(family_model.ids)
    errors = []
    for limit in (constant_keys.LIMIT, np.inf):
        monkeypatch.setattr(constant_keys, "LIMIT", limit)
        backend = start(model)
        logits = run(backend, backend.new_cache(3, "int8"), family_model.ids, 0)
        errors.append(np.median((logits - expected).std(axis=1)) / expected.std())
        cache = backend.new_cache(3, "int8")
        parts = [run(backend, cache, family_model.ids[:17], 0)]
        parts += [
            run(backend, cache, family_model.ids[i : i + 1], i) for i in range(17, len(family_model.ids))
        ]
        assert np.array_equal(np.concatenate(parts), logits)
    assert errors[0] < 0.05
    assert errors[0] < errors[1] / 4 or not backend.config.rope  # without rotation there is nothing to limit


@pytest.mark.parametrize("family_model", ["llama", "gemma3", "qwen3", "deepseek2"], indirect=True)
def test_an_int8_cache_keeps_whole_keys_where_they_have_nothing_in_common(family_model, start):
    backend = start(Stored(family_model, "Q8_0"))
    backend.new_cache(1, "int8")
    fields = [Layer.K_BIAS, Layer.K_REST, Layer.K_TERMS, Layer.TURNS]
    assert not backend.weights.layers[:, fields].any()


@pytest.mark.parametrize("family_model", ["gpt-oss"], indirect=True)
def test_experts_may_be_mxfp4(family_model, start):
    """gpt-oss's files have them so. The reference is that of the same rounded weights."""
    model = Stored(family_model, "MXFP4")
    assert model.tensors["blk.0.ffn_down_exps.weight"].format.name == "MXFP4"
    backend = start(model)
    logits = run(backend, backend.new_cache(3), family_model.ids, 0)
    expected = Reference(backend.config, model).logits(family_model.ids)
    assert np.median((logits - expected).std(axis=1)) < 0.1 * expected.std()


MIXTURES = ("mixtral", "qwen2moe", "qwen3moe", "olmoe", "granitemoe", "gpt-oss")


@pytest.mark.parametrize("family_model", MIXTURES, indirect=True)
def test_decode_reads_the_chosen_experts_only(family_model, start):
    """One token goes through 2 of 6 experts in each layer; the account counts their bytes, and in prefill each once."""
    backend = start(Stored(family_model, "Q8_0"))
    cache, config = backend.new_cache(3), backend.config
    one, many = StepRecord(), StepRecord()
    run(backend, cache, family_model.ids[:1], 0, one)
    assert backend._experts.active.tolist() == [2] * config.n_layers
    run(backend, cache, family_model.ids[1:], 1, many)
    used = backend._experts.active
    assert 2 < used.max() <= 6
    hidden, width, panel = config.hidden_size, config.experts.ffn_size, PACKED["Q8_0"].panel_bytes
    expert_bytes = 2 * width // 16 * panel(hidden) + hidden // 16 * panel(width)
    if "ffn_down_exps" in config.biases:
        expert_bytes += 4 * (2 * width + hidden)
    read = many.weight_bytes["gate_up"] + many.weight_bytes["down"]
    read -= one.weight_bytes["gate_up"] + one.weight_bytes["down"]
    assert read == (used.sum() - 2 * config.n_layers) * expert_bytes


@pytest.mark.parametrize("family_model", MIXTURES, indirect=True)
def test_neighbours_in_a_batch_change_no_bit_of_a_mixture(family_model, start):
    """Tokens of many sequences fall unevenly on the experts: some get one, some more than a tile."""
    backend = start(Stored(family_model, "Q8_0"))
    tokens = family_model.ids.astype(np.int32)
    n = len(tokens)
    every, tables = np.arange(n, dtype=np.int32), np.arange(n, dtype=np.int32)[:, None]
    batch = StepBatch(tokens, np.zeros(n, np.int32), every, tables, every)
    together = backend.forward(batch, backend.new_cache(n)).copy()
    alone = [run(backend, backend.new_cache(1), tokens[i : i + 1], 0) for i in range(n)]
    assert np.array_equal(together, np.concatenate(alone))


@pytest.mark.parametrize("family_model", ["deepseek2", "deepseek3"], indirect=True)
def test_latent_attention_keeps_one_vector_a_token(family_model, start):
    """80 numbers, once, for 4 heads of 48 and 32, in pages of 16 tokens; an int8 cache has two scales a token."""
    backend = start(Stored(family_model, "Q8_0"))
    for dtype, n_bytes in (("float16", 80 * 2), ("int8", 80 + 2 * 4)):
        cache = backend.new_cache(2, dtype)
        assert cache.bytes_per_page == cache.n_bytes // 2 == 16 * backend.config.n_layers * n_bytes
    record = StepRecord()
    run(backend, backend.new_cache(1), family_model.ids[:1], 0, record)
    panel, rows = PACKED["Q8_0"].panel_bytes, 48 * 4 // 16
    of_q = rows * panel(64) + (4 * panel(64) if backend.config.latent.q_rank else 0)
    per_head = 4 * (4 * panel(32))  # K_B: 64 rows of 32 columns
    assert record.weight_bytes["qkv"] == backend.config.n_layers * (of_q + 5 * panel(64) + per_head)


@pytest.mark.parametrize("dtype", ["float16", "int8"])
@pytest.mark.parametrize("family_model", ["deepseek2", "deepseek3"], indirect=True)
def test_pages_of_a_latent_cache_can_be_moved_and_kept(family_model, start, dtype):
    """A prompt's pages, copied or read and written back elsewhere, give the next token the bits that it had."""
    backend = start(Stored(family_model, "F32"))
    cache, ids = backend.new_cache(8, dtype), family_model.ids.astype(np.int32)
    expected = run(backend, cache, ids, 0)
    exact = Reference(backend.config, Stored(family_model, "F32")).logits(family_model.ids)
    errors = (expected - exact).std(axis=1)  # one int8 cache makes near-equal experts change places
    assert np.median(errors) < (2e-3 if dtype == "float16" else 0.1) * exact.std()
    cache.copy_pages([(0, 7)])
    cache.write_page(6, cache.read_page(1))
    for page in (0, 1):
        cache.write_page(page, np.full(cache.bytes_per_page, 255, np.uint8))  # NaN
    table, last = np.array([[7, 6, 2]], np.int32), np.array([39], np.int32)
    batch = StepBatch(ids[-1:], last, np.zeros(1, np.int32), table, np.zeros(1, np.int32))
    assert np.array_equal(backend.forward(batch, cache)[0], expected[-1])


@pytest.mark.parametrize(
    ("family_model", "place"),
    [("deepseek2", "in latent attention"), ("olmo2", "before a norm over all heads")],
    indirect=["family_model"],
)
def test_biases_where_the_kernels_have_no_place_for_them_are_refused(family_model, start, place):
    for n in range(family_model.metadata[f"{family_model.metadata['general.architecture']}.block_count"]):
        rows = len(family_model.tensors[f"blk.{n}.attn_q.weight"])
        family_model.tensors[f"blk.{n}.attn_q.bias"] = np.zeros(rows, np.float32)
    with pytest.raises(UnsupportedModelError, match=place):
        start(Stored(family_model, "F32"))
