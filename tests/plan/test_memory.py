"""Bytes of caches and weights: the published table to the digit, and what the engine allocates, to the byte."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from ropewalk.backend import base
from ropewalk.backend.cache import CACHE_DTYPES, CpuCache, cache_page_bytes
from ropewalk.checkpoint.gguf import open_gguf
from ropewalk.engine.pages import pages_for
from ropewalk.errors import InvalidParameterError
from ropewalk.model.config import ModelConfig
from ropewalk.plan import (
    CACHE_TYPES,
    PAGE_SIZE,
    LayerShape,
    ModelShape,
    Part,
    Weights,
    cache_bytes,
    cache_read_bytes,
    cache_type,
    crossing_tokens,
    largest_batch,
    largest_context,
    make_plan,
    page_bytes,
    shape_of_gguf,
    shape_of_numbers,
    token_bytes,
    weight_type,
)

MIB, GIB = 2**20, 2**30


def uniform(kv_heads, layers=32, head_dim=128, params=6_750_000_000, **more):
    return shape_of_numbers(
        layers=layers,
        heads=32,
        kv_heads=kv_heads,
        head_dim=head_dim,
        params=params,
        weight_type=weight_type("F16"),
        **more,
    )


@pytest.mark.parametrize(
    ("kv_heads", "cache", "a_token", "at_4096", "at_32768", "batch_16"),
    [
        (32, "float16", 524_288, 2.0, 16, 32),
        (32, "int8", 262_144, 1.0, 8, 16),
        (8, "float16", 131_072, 0.5, 4, 8),
        (8, "int8", 65_536, 0.25, 2, 4),
    ],
)
def test_the_published_table(kv_heads, cache, a_token, at_4096, at_32768, batch_16):
    """32 layers of head_dim 128; the table is of elements, without the scales of an int8 cache."""
    plan = make_plan(uniform(kv_heads), cache=cache)
    scales = 32 * kv_heads * 2 * 4 if cache == "int8" else 0
    assert plan.element_bytes_per_token == a_token
    assert plan.bytes_per_token == a_token + scales
    for context, batch, gib in ((4096, 1, at_4096), (32768, 1, at_32768), (4096, 16, batch_16)):
        assert context * batch * plan.element_bytes_per_token == gib * GIB
        assert plan.cache_bytes(context, batch) == gib * GIB + context * batch * scales


def test_the_curves_cross_at_25_749_tokens():
    """13.5 GB of weights over 524,288 bytes a token; four times later with a quarter of the heads."""
    assert crossing_tokens(13.5e9, 524_288) == pytest.approx(25_749.2, abs=0.05)
    plan = make_plan(uniform(32))
    assert plan.model.weights.total.n_bytes == 13_500_000_000
    assert plan.crossing_tokens == plan.mha_crossing_tokens == 25_749
    assert plan.cache_bytes(32768, 1) == 16 * GIB > 13.5e9
    grouped = make_plan(uniform(8))
    assert grouped.crossing_tokens == 102_996
    assert grouped.mha_crossing_tokens == 25_749
    assert grouped.bytes_per_token * 4 == plan.bytes_per_token


@pytest.mark.parametrize("name", ["smollm2-135m", "gemma3-270m", "qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b"])
@pytest.mark.parametrize("cache", CACHE_DTYPES)
def test_the_plan_is_what_the_engine_allocates(model_path, name, cache):
    """To the byte, at the borders of pages too."""
    with open_gguf(model_path(name)) as checkpoint:
        config = ModelConfig.from_gguf(checkpoint.metadata, checkpoint.tensors)
        shape = shape_of_gguf(checkpoint)
        assert shape.weights.total.n_bytes == sum(t.n_bytes for t in checkpoint.tensors.values())
        assert shape.weights.total.count == sum(t.size for t in checkpoint.tensors.values())
    kind = cache_type(cache)
    assert page_bytes(shape, kind) == cache_page_bytes(config, cache)
    for context in (1, 15, 16, 17, 4096, 8191):
        allocated = CpuCache(config, pages_for(context), cache)
        assert cache_bytes(shape, kind, context) == allocated.n_bytes
        assert cache_bytes(shape, kind, context, 3) == 3 * allocated.n_bytes


def test_page_and_cache_types_are_the_engines():
    assert PAGE_SIZE == base.PAGE_SIZE
    assert tuple(name for name, kind in CACHE_TYPES.items() if kind.ours) == CACHE_DTYPES


def test_windows_bound_what_is_read_and_not_what_is_allocated():
    layers = (LayerShape(4, 1, 64, 64, window=512),) * 5 + (LayerShape(4, 1, 64, 64),)
    model = ModelShape("windows", layers, Weights(Part(1, 1)), "F16")
    kind = cache_type("float16")
    each = 2 * 64 * 2
    assert token_bytes(model, kind) == 6 * each
    assert cache_bytes(model, kind, 4096) == 4096 * 6 * each
    assert cache_read_bytes(model, kind, 512) == 512 * 6 * each
    assert cache_read_bytes(model, kind, 513) == 512 * 5 * each + 513 * each
    assert cache_read_bytes(model, kind, 4096) == 512 * 5 * each + 4096 * each


def test_layers_may_differ():
    model = ModelShape(
        "uneven", (LayerShape(8, 8, 64, 64), LayerShape(8, 2, 128, 96)), Weights(Part(1, 1)), "F16"
    )
    assert token_bytes(model, cache_type("int8")) == (8 * 128 + 64) + (2 * (128 + 96) + 16)
    assert make_plan(model).as_dict()["model"]["kv_heads"] == [8, 2]


def test_a_latent_stands_for_all_heads():
    """DeepSeek-V2: 512 + 64 elements a layer, kept once; 128 heads of their own take 71 times as much."""
    latent = LayerShape(128, 128, 192, 128, latent=576)
    model = ModelShape("latent", (latent,) * 60, Weights(Part(1, 1)), "F16")
    assert token_bytes(model, cache_type("float16")) == 60 * 576 * 2
    assert token_bytes(model, cache_type("int8")) == 60 * (576 + 2 * 4)
    engine = SimpleNamespace(
        n_layers=60, n_kv_heads=1, head_dim=576, latent=True
    )  # as a `ModelConfig` has it
    for name in CACHE_DTYPES:
        assert page_bytes(model, cache_type(name)) == cache_page_bytes(engine, name)
    heads = ModelShape("heads", (replace(latent, latent=0),) * 60, Weights(Part(1, 1)), "F16")
    ratio = token_bytes(heads, cache_type("float16")) / token_bytes(model, cache_type("float16"))
    assert ratio == pytest.approx(128 * 320 / 576)


def test_what_fits():
    model, kind = uniform(32), cache_type("float16")
    page = 16 * 524_288
    assert largest_context(model, kind, 10 * page) == 160
    assert largest_context(model, kind, 10 * page - 1) == 144
    assert largest_context(model, kind, 10 * page, batch=3) == 48
    assert largest_context(model, kind, -1.0) == 0
    assert largest_batch(model, kind, 10 * page, context=17) == 5
    assert largest_batch(model, kind, page, context=17) == 0


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("F32", 32),
        ("f16", 16),
        ("BF16", 16),
        ("bfloat16", 16),
        ("Q8_0", 8.5),
        ("q4_k", 4.5),
        ("Q6_K", 6.5625),
        ("FP8", 8),
    ],
)
def test_weight_types(name, bits):
    assert weight_type(name).bits == bits


def test_weights_as_if_they_were_of_another_type():
    assert uniform(8).with_weight_type(weight_type("Q4_K")).weights.total.n_bytes == 6_750_000_000 * 45 // 80
    assert uniform(8).with_weight_type(weight_type("Q4_K")).weight_type == "Q4_K"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: weight_type("Q4_K_M"), r"weight type is 'Q4_K_M'; did you mean Q4_K"),
        (lambda: cache_type("int4"), "cache type is 'int4'; allowed: float16, int8"),
        (
            lambda: cache_bytes(uniform(8), cache_type("int8"), -4),
            "context is -4; allowed: an integer from 1 to 1,000,000,000,000,000",
        ),
        (lambda: cache_bytes(uniform(8), cache_type("int8"), 4, 0), "batch is 0; allowed"),
        (lambda: uniform(-8), "kv_heads"),
        (lambda: uniform(5), "kv_heads is 5; allowed: a divisor of heads, which is 32"),
        (lambda: uniform(8, layers=0), "layers is 0"),
        (lambda: uniform(8, layers=10**9), "layers is 1000000000; allowed: at most 4096"),
        (lambda: uniform(8, head_dim=1.5), r"head_dim is 1\.5"),
        (lambda: uniform(8, window=-1), "window is -1; allowed: an integer from 0 to 1,000,"),
        (lambda: make_plan(uniform(8), contexts=[True]), "context is True"),
    ],
)
def test_bad_numbers_are_refused_by_name(call, message):
    with pytest.raises(InvalidParameterError, match=message):
        call()
