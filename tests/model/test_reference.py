"""The reference against its own formulas: attention, windows, cache, pointwise functions."""

import math

import numpy as np
import pytest

from ropewalk.errors import PromptError
from ropewalk.model.reference import (
    Reference,
    attend,
    gelu_tanh,
    rms_norm,
    silu,
    softcap,
    softmax,
    visible,
)

ALL = ("llama", "qwen2", "gemma3")


def naive_attention(q, k, v, first_position, scale, window=0, cap=0.0):
    """One query and one head at a time, in float64."""
    n_heads, n, head_dim = q.shape
    group = n_heads // len(k)
    out = np.zeros((n, n_heads, head_dim))
    for head in range(n_heads):
        for row in range(n):
            position = first_position + row
            start = max(0, position - window + 1) if window else 0
            scores = [float(q[head, row] @ k[head // group, j]) * scale for j in range(start, position + 1)]
            if cap:
                scores = [cap * math.tanh(s / cap) for s in scores]
            weights = np.exp(np.array(scores) - max(scores))
            out[row, head] = weights / weights.sum() @ v[head // group, start : position + 1]
    return out.reshape(n, -1)


@pytest.mark.parametrize("window", [0, 1, 3, 100])
@pytest.mark.parametrize("cap", [0.0, 2.0])
@pytest.mark.parametrize(("n", "m"), [(1, 1), (1, 9), (9, 9), (4, 9), (300, 300)])
def test_attention_is_the_sum_over_visible_positions(n, m, window, cap):
    rng = np.random.default_rng(n + m)
    q = rng.standard_normal((6, n, 8)).astype(np.float32)
    k, v = rng.standard_normal((2, 2, m, 8)).astype(np.float32)
    options = {"first_position": m - n, "scale": 0.3, "window": window, "cap": cap}
    mixed = attend(q, k, v, **options)
    assert mixed.dtype == np.float32
    np.testing.assert_allclose(mixed, naive_attention(q, k, v, **options), atol=2e-6)


def test_window_counts_the_current_token_c6():
    seen = [np.flatnonzero(row).tolist() for row in visible(np.arange(6), 6, 3)]
    assert seen == [[0], [0, 1], [0, 1, 2], [1, 2, 3], [2, 3, 4], [3, 4, 5]]
    assert visible(np.array([5]), 6, 3).tolist() == [[False, False, False, True, True, True]]
    assert visible(np.arange(6), 6, 0).tolist() == np.tri(6, dtype=bool).tolist()


@pytest.mark.parametrize("architecture", ALL)
@pytest.mark.parametrize("chunks", [[20], [1] * 20, [7, 1, 12], [19, 1]])
def test_cache_changes_nothing(tiny, architecture, chunks):
    """Prefill, chunked prefill and decode give the logits of the cache-free mode, past a window of 5."""
    model = tiny(architecture)
    reference = Reference(model.config(), model)
    tokens = np.random.default_rng(4).integers(0, 50, 20)
    whole = reference.logits(tokens)
    assert (whole.shape, whole.dtype) == ((20, 50), np.float32)
    cache, start, parts = reference.new_cache(), 0, []
    for size in chunks:
        parts.append(reference.forward(tokens[start : start + size], cache))
        start += size
        assert cache.length == start
    np.testing.assert_allclose(np.concatenate(parts), whole, atol=2e-5 * abs(whole).max())


@pytest.mark.parametrize("architecture", ALL)
def test_greedy_tokens_with_and_without_cache(tiny, architecture):
    model = tiny(architecture)
    reference = Reference(model.config(), model)
    free, kept = [3, 1, 4], []
    cache = reference.new_cache()
    pending = list(free)
    for _ in range(12):
        free.append(int(reference.logits(free)[-1].argmax()))
        kept.append(int(reference.forward(pending, cache)[-1].argmax()))
        pending = kept[-1:]
    assert kept == free[3:]


@pytest.mark.parametrize("architecture", ALL)
def test_logits_do_not_see_the_future(tiny, architecture):
    model = tiny(architecture)
    reference = Reference(model.config(), model)
    first = reference.logits([1, 2, 3, 4, 5, 6])
    changed = reference.logits([1, 2, 3, 4, 5, 7])
    np.testing.assert_allclose(changed[:5], first[:5], rtol=1e-5, atol=1e-5)
    assert abs(changed[5] - first[5]).max() > 0.1


def test_window_limits_what_a_local_layer_sees_c6(tiny):
    """With 4 local layers of window 2, a token reaches 4 positions on and no further."""
    changes = {"block_count": 4, "attention.sliding_window": 2}
    model = tiny("gemma3", changes)
    for name in [name for name in model.tensors if name.startswith(("blk.4.", "blk.5.", "blk.6."))]:
        del model.tensors[name]
    reference = Reference(model.config(), model)
    a, b = reference.logits([9, 2, 3, 4, 5, 6, 7]), reference.logits([8, 2, 3, 4, 5, 6, 7])
    differs = abs(a - b).max(axis=1) > 1e-4
    assert differs.tolist() == [True] * 5 + [False] * 2


def test_divisors_of_the_file_reach_the_logits_b6(tiny):
    """B6: `rope_freqs.weight` is used, not only read: divisors of 2 equal positions that are half as far."""
    ones = {"rope_freqs.weight": np.ones(4, np.float32)}
    twos = {"rope_freqs.weight": np.full(4, 2, np.float32)}
    tokens = [5, 6, 7, 8]
    plain, with_ones, with_twos = (
        Reference(model.config(), model).logits(tokens)
        for model in (tiny("llama"), tiny("llama", **ones), tiny("llama", **twos))
    )
    np.testing.assert_array_equal(plain, with_ones)
    assert abs(plain - with_twos)[1:].max() > 1e-2


def test_partial_rotary_and_head_dim_reach_the_logits_b2(tiny):
    full = tiny("qwen2")
    partial = tiny("qwen2", {"rope.dimension_count": 4})
    tokens = [5, 6, 7, 8]
    a, b = (Reference(model.config(), model).logits(tokens) for model in (full, partial))
    np.testing.assert_allclose(a[0], b[0], atol=1e-5)  # position 0 turns nothing
    assert abs(a - b)[1:].max() > 1e-2


def test_output_matrix_is_used_when_present_g5(tiny):
    tied = tiny("llama")
    doubled = tiny("llama", **{"output.weight": 2 * tied.tensors["token_embd.weight"]})
    a, b = (Reference(model.config(), model).logits([1, 2]) for model in (tied, doubled))
    np.testing.assert_allclose(b, 2 * a, rtol=1e-5)


def test_softcaps_reach_the_logits(tiny):
    capped = tiny("gemma3", {"final_logit_softcapping": 3.0})
    plain = tiny("gemma3")
    a, b = (Reference(model.config(), model).logits([1, 2, 3]) for model in (plain, capped))
    np.testing.assert_allclose(b, 3 * np.tanh(a / 3), atol=1e-5)
    model = tiny("gemma3", {"attn_logit_softcapping": 0.5})
    assert abs(Reference(model.config(), model).logits([1, 2, 3]) - a)[1:].max() > 1e-3


def test_memory_limit_changes_nothing_but_memory(tiny):
    """With nothing kept, every layer's weights are read again; only the embedding stays."""
    model = tiny("gemma3")
    reads = []

    class Counting:
        def tensor(self, name):
            reads.append(name)
            return model.tensors[name]

    frugal = Reference(model.config(), Counting(), keep_bytes=0)
    expected = Reference(model.config(), model).logits([1, 2, 3])
    np.testing.assert_array_equal(frugal.logits([1, 2, 3]), expected)
    np.testing.assert_array_equal(frugal.logits([1, 2, 3]), expected)
    assert reads.count("token_embd.weight") == 1
    assert reads.count("blk.0.attn_q.weight") == 2


@pytest.mark.parametrize("tokens", [[], [[1]], [50], [-1], [0.5], ["a"]])
def test_bad_token_ids_are_refused(tiny, tokens):
    model = tiny("llama")
    with pytest.raises(PromptError, match="token ids must be"):
        Reference(model.config(), model).logits(tokens)


def test_pointwise_functions():
    x = np.array([-200, -3, -1, 0, 0.5, 2, 30], np.float32)
    exact = x.astype(np.float64)
    with np.errstate(over="ignore"):
        np.testing.assert_allclose(silu(x), exact / (1 + np.exp(-exact)), rtol=3e-7, atol=1e-30)
    inner = np.sqrt(2 / np.pi) * (exact + 0.044715 * exact**3)
    np.testing.assert_allclose(gelu_tanh(x), exact * (1 + np.tanh(inner)) / 2, rtol=1e-5, atol=2e-7)
    erf = np.array([math.erf(v / math.sqrt(2)) for v in exact])
    np.testing.assert_allclose(gelu_tanh(x), exact * (1 + erf) / 2, atol=5e-4)
    assert softcap(x, 0.0) is x
    np.testing.assert_allclose(softcap(x, 5.0), 5 * np.tanh(exact / 5), rtol=1e-6)
    assert softmax(np.array([1e4, 1e4, -np.inf], np.float32)).tolist() == [0.5, 0.5, 0.0]
    for result in (silu(x), gelu_tanh(x), softcap(x, 5.0)):
        assert result.dtype == np.float32


def test_rms_norm():
    x = np.array([[3, 4], [0, 0]], np.float32)
    weight = np.array([2, 1], np.float32)
    expected = [[6 / np.sqrt(12.5 + 0.5), 4 / np.sqrt(13)], [0, 0]]
    np.testing.assert_allclose(rms_norm(x, weight, 0.5), expected, rtol=1e-6)
