"""Rotary scaling: published values, transformers' tables, and what each scheme is defined by (cases B6, B8)."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from ropewalk.errors import CheckpointError, InvalidParameterError, UnsupportedModelError
from ropewalk.model.config import RopeConfig
from ropewalk.model.rope import (
    SCHEMES,
    DynamicNTK,
    Linear,
    Llama3,
    LongRope,
    NTKAware,
    RopeScaling,
    YaRN,
    plain_frequencies,
    rope_table,
)

CASES = json.loads((Path(__file__).parents[1] / "data" / "rope-scaling.json").read_text())
SHORT, LONG = (1.0, 1.1, 1.2, 1.3), (2.0, 4.0, 8.0, 16.0)
ONE_OF_EACH = (
    Linear(4.0),
    NTKAware(4.0),
    DynamicNTK(4.0, 4096),
    YaRN(4.0, 4096),
    Llama3(4.0, 4096),
    LongRope(4.0, 4096, SHORT, LONG),
)


def from_hf(parameters, context=4096, original=None):
    return RopeScaling.from_hf(parameters, context_length=context, original_context=original)


@pytest.mark.parametrize("name", CASES)
def test_tables_are_those_of_transformers(name):
    """Its tables are float32; ours are float64, so they agree to float32's rounding."""
    case = CASES[name]
    scaling = from_hf(case["parameters"], case["context"])
    for table in case["tables"]:
        ours = scaling.frequencies(case["base"], case["width"], table["length"] or 0)
        np.testing.assert_allclose(ours, table["frequencies"], rtol=2e-6)
        assert scaling.attention_scale == pytest.approx(table["factor"], rel=1e-12)


def test_llama3_b6_factor_32_width_64():
    """B6: pairs 0–14 unchanged, 15–17 blended, 18–31 divided by 32."""
    ratio = plain_frequencies(5e5, 64) / Llama3(32.0, 8192).frequencies(5e5, 64)
    np.testing.assert_allclose(ratio[:15], 1, rtol=1e-15)
    np.testing.assert_allclose(ratio[15:18], [1.651329, 3.292262, 9.666729], atol=5e-7)
    np.testing.assert_allclose(ratio[18:], 32, rtol=1e-14)


def test_llama3_b6_factor_8_width_128():
    """B6: pairs 0–28 unchanged, 29–34 blended, 35–63 divided by 8."""
    ratio = plain_frequencies(5e5, 128) / Llama3(8.0, 8192).frequencies(5e5, 128)
    np.testing.assert_allclose(ratio[:29], 1, rtol=1e-15)
    assert (ratio[29:35] > 1.001).all() and (ratio[29:35] < 7.999).all()
    assert ratio[29] == pytest.approx(1.207484, abs=5e-7)
    assert ratio[34] == pytest.approx(5.257327, abs=5e-7)
    np.testing.assert_allclose(ratio[35:], 8, rtol=1e-14)


def test_llama3_and_the_tensor_of_divisors_give_the_same_table_b6():
    scaling = Llama3(32.0, 8192)
    divisors = plain_frequencies(5e5, 64) / scaling.frequencies(5e5, 64)
    by_rule = rope_table(RopeConfig(5e5, 64, "halves", scaling=scaling), lambda name: None)
    by_file = rope_table(RopeConfig(5e5, 64, "halves", freq_factors=True), lambda name: np.float32(divisors))
    np.testing.assert_allclose(by_rule.frequencies, by_file.frequencies, rtol=1e-7)


def test_longrope_switches_after_the_limit_b8():
    """B8: length 4096 → short list, 4097 → long list."""
    table = rope_table(
        RopeConfig(1e4, 8, "halves", scaling=LongRope(32.0, 4096, SHORT, LONG)), lambda n: None
    )
    plain = plain_frequencies(1e4, 8)
    for length, divisors in ((1, SHORT), (4095, SHORT), (4096, SHORT), (4097, LONG), (131072, LONG)):
        np.testing.assert_array_equal(table.of_length(length), plain / divisors)
    assert table.attention_scale == pytest.approx(math.sqrt(1 + math.log(32) / math.log(4096)))
    cos, sin = table.angles(5)
    assert cos.shape == sin.shape == (10, 4)
    exact = table.attention_scale * np.cos(3 * plain / LONG)
    np.testing.assert_array_equal(cos[5 + 3], exact.astype(np.float32))


def test_longrope_lists_may_be_tensors_of_the_file_b8():
    tensors = {"rope_factors_short.weight": np.float32(SHORT), "rope_factors_long.weight": np.float32(LONG)}
    rope = RopeConfig(1e4, 8, "halves", scaling=LongRope(32.0, 4096))
    table = rope_table(rope, tensors.__getitem__)
    plain = plain_frequencies(1e4, 8)
    np.testing.assert_array_equal(table.of_length(10), plain / np.float32(SHORT).astype(np.float64))
    np.testing.assert_array_equal(table.of_length(5000), plain / np.float32(LONG).astype(np.float64))
    with pytest.raises(CheckpointError, match=r"rope_factors_short\.weight \(shape \[3\]\) must hold 4"):
        rope_table(rope, lambda name: np.ones(3, np.float32))
    with pytest.raises(CheckpointError, match="has 4 factors in a list; a rotated width of 16 needs 8"):
        LongRope(32.0, 4096, SHORT, LONG).frequencies(1e4, 16)


def test_ntk_divides_the_slowest_pair_by_the_factor_and_the_fastest_by_one():
    ratio = plain_frequencies(1e4, 64) / NTKAware(4.0).frequencies(1e4, 64)
    assert ratio[0] == 1
    assert ratio[-1] == pytest.approx(4, rel=1e-12)
    assert (np.diff(ratio) > 0).all()
    assert NTKAware(4.0).frequencies(1e4, 2).tolist() == [1.0]


def test_dynamic_ntk_is_plain_up_to_the_trained_length_and_grows_after_it():
    scaling = DynamicNTK(2.0, 2048)
    plain = plain_frequencies(1e4, 64)
    for length in (0, 1, 2048):
        np.testing.assert_array_equal(scaling.frequencies(1e4, 64, length), plain)
    slowest = [plain[-1] / scaling.frequencies(1e4, 64, n)[-1] for n in (2049, 4096, 8192)]
    assert slowest == pytest.approx([1 + 2 / 2048, 3, 7], rel=1e-12)


def test_yarn_leaves_fast_pairs_and_divides_slow_ones():
    """Width 128, base 10,000, 4,096 tokens: 32 turns are pair 20.9, 1 turn is pair 45.03 (floor 20, ceiling 46)."""
    ratio = plain_frequencies(1e4, 128) / YaRN(16.0, 4096).frequencies(1e4, 128)
    np.testing.assert_allclose(ratio[:21], 1, rtol=1e-15)
    assert (ratio[21:46] > 1).all() and (ratio[21:46] < 16).all()
    np.testing.assert_allclose(ratio[46:], 16, rtol=1e-14)
    assert ratio[33] == pytest.approx(1 / ((1 - 0.5) + 0.5 / 16))
    assert YaRN(16.0, 4096).attention_scale == pytest.approx(1.2772588722, abs=1e-9)
    assert YaRN(1.0, 4096).attention_scale == 1


def test_a_factor_of_one_changes_nothing():
    plain = plain_frequencies(1e4, 8)
    for scaling in (Linear(1.0), NTKAware(1.0), YaRN(1.0, 64), Llama3(1.0, 64)):
        np.testing.assert_allclose(scaling.frequencies(1e4, 8, 1000), plain, rtol=1e-15)
        assert scaling.attention_scale == 1


@pytest.mark.parametrize("scaling", ONE_OF_EACH, ids=lambda s: s.name)
def test_every_scheme_says_how_far_it_reaches(scaling):
    assert SCHEMES[scaling.name] is type(scaling)
    assert scaling.effective_context(4096) == 16384
    assert scaling.switch == (4096 if scaling.name == "longrope" else 0)
    assert scaling.frequencies(1e4, 8).dtype == np.float64


def test_the_attention_factor_multiplies_cosines_and_sines():
    table = rope_table(RopeConfig(1e4, 8, "halves", scaling=YaRN(4.0, 64)), lambda name: None)
    cos, sin = table.angles(3)
    np.testing.assert_allclose(np.hypot(cos, sin), 1 + 0.1 * math.log(4), rtol=1e-6)


def test_older_and_newer_configurations_are_read():
    assert from_hf(None) is None
    assert from_hf({}) is None
    assert from_hf({"rope_type": "default", "rope_theta": 1e4}) is None
    assert from_hf({"type": "linear", "factor": 2}) == Linear(2)
    assert from_hf({"rope_type": "dynamic", "factor": 2.0}, 2048) == DynamicNTK(2.0, 2048)
    assert from_hf({"rope_type": "yarn", "factor": 4.0, "mscale": None}, 4096) == YaRN(4.0, 4096)
    assert from_hf({"rope_type": "yarn"}, 16384, 4096) == YaRN(4.0, 4096)
    phi = {"type": "su", "short_factor": list(SHORT), "long_factor": list(LONG)}
    assert from_hf(phi, 131072, 4096) == LongRope(32.0, 4096, SHORT, LONG)
    llama = {
        "rope_type": "llama3",
        "factor": 8.0,
        "original_max_position_embeddings": 8192,
        "rope_theta": 5e5,
    }
    assert from_hf(llama, 131072) == Llama3(8.0, 8192)


@pytest.mark.parametrize(
    ("parameters", "error", "message"),
    [
        (
            {"rope_type": "yarm", "factor": 2.0},
            UnsupportedModelError,
            "'yarm' is not supported; did you mean 'yarn'",
        ),
        (
            {"rope_type": "axial"},
            UnsupportedModelError,
            "supported: default, linear, ntk, dynamic, yarn, llama3",
        ),
        ({"rope_type": "default", "mrope_section": [1, 2]}, UnsupportedModelError, "with mrope_section = "),
        (
            {"rope_type": "longrope", "short_mscale": 1.2},
            UnsupportedModelError,
            "with short_mscale = 1.2 is not",
        ),
        ({"rope_type": "linear"}, CheckpointError, "rope scaling 'linear' lacks 'factor'"),
        (
            {"rope_type": "linear", "factor": 0.5},
            CheckpointError,
            "factor is 0.5; allowed: a number from 1 to",
        ),
        ({"rope_type": "linear", "factor": math.nan}, CheckpointError, "factor is nan"),
        ({"rope_type": "linear", "factor": True}, CheckpointError, "factor is True"),
        (
            {"rope_type": "llama3", "factor": 8.0, "high_freq_factor": 1.0},
            CheckpointError,
            "more than low_freq",
        ),
        (
            {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 1.5},
            CheckpointError,
            "original_context is 1.5; allowed: an integer",
        ),
        (
            {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0, 2.0]},
            CheckpointError,
            "equally many",
        ),
        (
            {"rope_type": "longrope", "short_factor": "12", "long_factor": [1.0]},
            CheckpointError,
            "allowed: a list",
        ),
        (
            {"rope_type": "longrope", "short_factor": [0.0], "long_factor": [1.0]},
            CheckpointError,
            "short_factors is 0",
        ),
    ],
)
def test_what_cannot_be_computed_is_refused_by_name(parameters, error, message):
    with pytest.raises(error, match=message):
        from_hf(parameters, 4096)


def test_a_user_is_told_what_is_allowed():
    with pytest.raises(InvalidParameterError, match=r"beta_fast is 0\.5; allowed: a number from 1 to"):
        YaRN(4.0, 4096, beta_fast=0.5)
    with pytest.raises(InvalidParameterError, match="truncate is 1; allowed: a bool"):
        YaRN(4.0, 4096, truncate=1)
