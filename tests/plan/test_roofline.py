"""Bounds of decode and prefill: the published ones, and sums that are written out."""

import pytest

from ropewalk.plan import (
    LayerShape,
    Machine,
    ModelShape,
    Part,
    Weights,
    cache_type,
    decode_bound,
    make_plan,
    prefill_bound,
    shape_of_numbers,
    takeover_batch,
    weight_type,
)
from ropewalk.plan.roofline import _seen

HALF = cache_type("float16")
LLAMA = shape_of_numbers(
    layers=32, kv_heads=32, head_dim=128, params=6_750_000_000, weight_type=weight_type("F16")
)


def test_seven_billion_weights_take_6_7_ms_at_2_tb_a_second():
    """13.5 GB at 2 TB/s: at least 6.7 ms a token, at most about 150 tokens a second, before the cache."""
    machine = Machine("2 TB/s", None, 2e12)
    bound = decode_bound(LLAMA, machine, HALF, context=1)
    assert bound.weight_bytes / machine.bandwidth == pytest.approx(6.75e-3)
    assert bound.seconds == pytest.approx(6.75e-3, rel=1e-4)
    assert bound.tokens_per_s == pytest.approx(148.1, abs=0.1)
    assert bound.bound_by == "memory"
    assert bound.arithmetic_s is None


def test_a_decode_step_written_out():
    machine = Machine("m", None, 1e12, {"any": 1e14})
    bound = decode_bound(LLAMA, machine, HALF, context=4096, batch=16)
    assert bound.weight_bytes == 13.5e9
    assert bound.cache_bytes == 16 * 4096 * 524_288
    assert bound.operations == 16 * (2 * 6.75e9 + 32 * 32 * 4 * 128 * 4096)
    assert bound.memory_s == (13.5e9 + 16 * 4096 * 524_288) / 1e12
    assert bound.arithmetic_s == bound.operations / 1e14
    assert bound.tokens_per_s == 16 / bound.memory_s


def test_the_batch_at_which_arithmetic_takes_over():
    """Without a cache to speak of it is bandwidth against rate: 2 operations a weight of 2 bytes."""
    machine = Machine("m", None, 1e12, {"float16": 100e12})
    batch = takeover_batch(LLAMA, machine, HALF, context=1)
    assert batch == 101
    for b, by in ((batch - 1, "memory"), (batch, "arithmetic"), (batch + 1, "arithmetic")):
        assert decode_bound(LLAMA, machine, HALF, context=1, batch=b).bound_by == by
    assert takeover_batch(LLAMA, machine, HALF, context=4096) is None
    assert takeover_batch(LLAMA, Machine("m", None, 1e12), HALF, context=1) is None


def test_a_prompt_is_bound_by_arithmetic():
    machine = Machine("m", None, 1e12, {"any": 1e14})
    bound = prefill_bound(LLAMA, machine, HALF, prompt=512)
    assert bound.operations == 2 * 6.75e9 * 512 + 32 * 32 * 4 * 128 * (512 * 513 // 2)
    assert bound.bound_by == "arithmetic"
    assert bound.weight_bytes == 13.5e9 and bound.cache_bytes == 0
    two_passes = prefill_bound(LLAMA, machine, HALF, prompt=513)
    assert two_passes.weight_bytes == 2 * 13.5e9
    assert two_passes.cache_bytes == 512 * 524_288
    one = prefill_bound(LLAMA, Machine("slow memory", None, 1e9, {"any": 1e14}), HALF, prompt=1)
    assert one.bound_by == "memory"


@pytest.mark.parametrize("window", [0, 1, 3, 7, 100])
def test_pairs_that_see_each_other(window):
    layer = LayerShape(1, 1, 8, 8, window)
    for context in range(1, 12):
        for n_queries in range(1, context + 1):
            positions = range(context - n_queries, context)
            expected = sum(min(p + 1, window or p + 1) for p in positions)
            assert _seen(layer, context, n_queries) == expected


def test_the_output_matrix_counts_once_a_prompt_and_once_a_decoded_token():
    weights = Weights(dense=Part(1000, 2000), output=Part(500, 1000), embedding=Part(500, 1000))
    model = ModelShape("m", (LayerShape(1, 1, 16, 16),), weights, "F16")
    machine = Machine("m", None, 1e9, {"any": 1e9})
    assert prefill_bound(model, machine, HALF, prompt=10).operations == 2 * (10 * 1000 + 500) + 4 * 16 * 55
    assert decode_bound(model, machine, HALF, context=1, batch=2).operations == 2 * (2 * 1500 + 4 * 16)
    assert decode_bound(model, machine, HALF, context=1, batch=2).weight_bytes == 3000
    assert weights.total == Part(2000, 4000)


def test_experts_are_read_as_far_as_they_are_used():
    """8 experts of which 2 are used: a quarter for one token, and nearly all for a large batch."""
    weights = Weights(dense=Part(100, 200), experts=Part(800, 1600), n_experts=8, n_used=2)
    assert weights.read_bytes(1) == 200 + 400
    assert weights.read_bytes(2) == pytest.approx(200 + 1600 * (1 - 0.75**2))
    assert weights.read_bytes(1000) == pytest.approx(1800)
    assert weights.used_count() == 300


def test_arithmetic_follows_the_weights():
    machine = Machine("m", None, 1e12, {"float32": 1e12, "float16": 2e12, "int8": 4e12})
    assert machine.rate_for("F32") == (1e12, "float32")
    assert machine.rate_for("BF16") == (2e12, "float16")
    assert machine.rate_for("Q4_K and Q6_K") == (2e12, "float16")
    assert machine.rate_for("INT8") == (4e12, "int8")
    assert machine.rate_for("FP8") == (2e12, "float16")
    assert Machine("m", None, 1e12).rate_for("F16") == (None, "unknown")
    assert Machine("m", None, 1e12, {"any": 3e12}).rate_for("F16") == (3e12, "any")


def test_a_plan_is_json_with_every_answer():
    plan = make_plan(
        LLAMA,
        Machine("m", 80 * 10**9, 2e12, {"any": 312e12}),
        contexts=[4096, 32768],
        batches=[1, 16],
        prompts=[512],
    )
    facts = plan.as_dict()
    assert facts["cache"]["crossing_tokens"] == 25_749
    assert facts["fits"]["free_bytes"] == 66_500_000_000
    assert facts["fits"]["largest_batch"] == [
        {"context": 4096, "batch": 30},
        {"context": 32768, "batch": 3},
    ]
    assert facts["fits"]["largest_context"][1] == {"batch": 16, "context": 7920}
    sizes = {(row["context"], row["batch"]): row for row in facts["cache"]["sizes"]}
    assert sizes[32768, 16]["bytes"] == 256 * 2**30 and sizes[32768, 16]["fits"] is False
    assert sizes[4096, 16]["fits"] is True
    decode = {(row["context"], row["batch"]): row for row in facts["decode"]}
    assert decode[4096, 1]["seconds"] == pytest.approx((13.5e9 + 2 * 2**30) / 2e12)
    assert facts["prefill"][0]["by"] == "arithmetic"
    assert facts["takeover_batch"][0] == {"context": 4096, "batch": None}
    assert "machine" not in make_plan(LLAMA).as_dict()


def test_defaults_stay_within_the_model_and_given_numbers_do_not_change():
    small = ModelShape("small", LLAMA.layers, LLAMA.weights, "F16", context_length=1000)
    assert make_plan(small).contexts == (1000,)
    assert make_plan(small).prompts == (512, 1000)
    assert make_plan(small, prompts=[5000]).prompts == (5000,)
    assert make_plan(LLAMA).contexts == (4096, 32768)
    assert make_plan(LLAMA).batches == (1, 4, 16)
