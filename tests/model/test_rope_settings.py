"""Rotary scaling of a GGUF file's keys, and of a user who overrides it (cases B6, B8)."""

import math

import numpy as np
import pytest

from ropewalk.errors import CheckpointError, InvalidParameterError, UnsupportedModelError
from ropewalk.model.config import RopeConfig
from ropewalk.model.families import FAMILIES
from ropewalk.model.keys import Keys
from ropewalk.model.reference import Reference
from ropewalk.model.rope import DynamicNTK, Linear, Llama3, LongRope, NTKAware, YaRN
from ropewalk.model.rope_settings import override_rope, read_scaling

SHORT, LONG = np.float32([1.0, 1.1, 1.3, 2.0]), np.float32([1.0, 3.0, 9.0, 27.0])
LISTS = {"rope_factors_short.weight": SHORT, "rope_factors_long.weight": LONG}
TOKENS = np.arange(24) * 7 % 50


def scaling(tiny, keys, architecture="llama", **tensors):
    return tiny(architecture, {f"rope.{k}": v for k, v in keys.items()}, **tensors).config().rope[0].scaling


def test_keys_of_a_file(tiny):
    assert scaling(tiny, {}) is None
    assert scaling(tiny, {"scaling.type": "none", "scaling.factor": 4.0}) is None
    assert scaling(tiny, {"scaling.type": "linear", "scaling.factor": 4.0}) == Linear(4.0)
    assert scaling(tiny, {"scaling.factor": 4.0}) == scaling(tiny, {"scale_linear": 4.0}) == Linear(4.0)
    yarn = {"scaling.type": "yarn", "scaling.factor": 4.0}
    plain = scaling(tiny, yarn)
    assert (plain.factor, plain.original_context, plain.beta_fast, plain.beta_slow) == (4.0, 128, 32.0, 1.0)
    assert plain.attention_scale == 1 + 0.1 * math.log(4)
    changed = yarn | {"scaling.original_context_length": 32, "scaling.yarn_beta_fast": 16.0}
    assert scaling(tiny, changed | {"scaling.yarn_beta_slow": 2.0}).beta_slow == 2.0
    assert scaling(tiny, changed).original_context == 32
    assert scaling(tiny, changed).beta_fast == 16.0
    assert scaling(tiny, yarn | {"scaling.yarn_log_multiplier": 1.0}).attention_scale == 1.0
    assert scaling(tiny, yarn | {"scaling.attn_factor": 0.5}).attention_scale == 0.5 * plain.attention_scale


def test_keys_of_a_folder_that_gguf_does_not_have(tiny):
    yarn = scaling(tiny, {"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.yarn_truncate": False})
    assert yarn.truncate is False
    assert scaling(tiny, {"scaling.type": "dynamic", "scaling.factor": 4.0}) == DynamicNTK(4.0, 128)


def test_a_family_says_whether_the_ramp_ends_at_whole_pairs_unless_the_file_does():
    """gpt-oss's does not (its configuration has truncate = false), and GGUF has no key for it."""
    assert [name for name, family in FAMILIES.items() if not family.yarn_truncate] == ["gpt-oss"]
    values = {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}
    assert read_scaling(Keys(values, "llama"), 128, False, truncate=False).truncate is False
    stated = values | {"llama.rope.scaling.yarn_truncate": True}
    assert read_scaling(Keys(stated, "llama"), 128, False, truncate=False).truncate is True


def test_dynamic_ntk_within_its_trained_context_is_no_scaling(tiny):
    """Configurations that state it have that context, so they can be run."""
    plain, model = tiny("llama"), tiny("llama", {"rope.scaling.type": "dynamic", "rope.scaling.factor": 4.0})
    np.testing.assert_array_equal(
        Reference(model.config(), model).logits(TOKENS), Reference(plain.config(), plain).logits(TOKENS)
    )


def test_longrope_of_a_file_b8(tiny):
    """Its lists are tensors, with or without a key that says so; the factor is how far the context is extended."""
    keys = {"scaling.original_context_length": 8}
    found = scaling(tiny, keys, **LISTS)
    assert found == scaling(tiny, keys | {"scaling.type": "longrope"}, **LISTS) == LongRope(16.0, 8)
    assert found.attention_scale == math.sqrt(1 + math.log(16) / math.log(8))
    assert scaling(tiny, keys | {"scaling.attn_factor": 1.25}, **LISTS).attention_scale == 1.25
    config = tiny("llama", {f"rope.{k}": v for k, v in keys.items()}, **LISTS).config()
    assert config.rope_switch == 8
    assert tiny("llama").config().rope_switch == 0
    with pytest.raises(CheckpointError, match=r"rope_factors_long\.weight is missing"):
        scaling(tiny, keys, **{"rope_factors_short.weight": SHORT})
    with pytest.raises(CheckpointError, match=r"rope_factors_short\.weight has shape \[3\].*\[4\]"):
        scaling(tiny, keys, **LISTS | {"rope_factors_short.weight": SHORT[:3]})
    with pytest.raises(CheckpointError, match=r"rope_factors_short\.weight is missing"):
        scaling(tiny, keys | {"scaling.type": "longrope"})


def test_layers_with_a_setting_of_their_own_are_not_scaled(tiny):
    config = tiny("gemma3", {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}).config()
    assert config.rope == (
        RopeConfig(10000.0, 8, "halves", scaling=Linear(8.0)),
        RopeConfig(10000.0, 8, "halves"),
    )


@pytest.mark.parametrize(
    ("keys", "tensors", "error", "message"),
    [
        (
            {"scaling.type": "yarm"},
            {},
            UnsupportedModelError,
            "type = 'yarm' is not supported; supported: none, linear, ",
        ),
        (
            {"scaling.type": "linear"},
            LISTS,
            UnsupportedModelError,
            "'linear' is not supported beside rope_factors",
        ),
        (
            {"scaling.type": "linear", "scaling.attn_factor": 2.0},
            {},
            UnsupportedModelError,
            "attn_factor = 2 is not",
        ),
        (
            {"scaling.type": "yarn", "scaling.yarn_ext_factor": 0.5},
            {},
            UnsupportedModelError,
            "ext_factor = 0.5 is not",
        ),
        (
            {"scaling.type": "yarn", "scaling.yarn_attn_factor": 2.0},
            {},
            UnsupportedModelError,
            "attn_factor = 2 is not",
        ),
        (
            {"scaling.type": "linear", "scaling.yarn_beta_fast": 8.0},
            {},
            UnsupportedModelError,
            "yarn_beta_fast = 8.0",
        ),
        (
            {"scaling.type": "yarn", "scaling.factor": -2.0},
            {},
            CheckpointError,
            "factor = -2.0 is not allowed",
        ),
        ({"scaling.type": "linear", "scaling.factor": 0.5}, {}, CheckpointError, "factor is 0.5; allowed"),
        ({"scaling.factor": math.inf}, {}, CheckpointError, "factor = inf is not allowed"),
        (
            {"scaling.type": "yarn", "scaling.yarn_beta_fast": 0.5},
            {},
            CheckpointError,
            "beta_fast is 0.5; allowed",
        ),
        (
            {"scaling.type": "yarn", "scaling.original_context_length": -1},
            {},
            CheckpointError,
            "length = -1 is not",
        ),
    ],
)
def test_keys_that_cannot_be_computed_are_refused(tiny, keys, tensors, error, message):
    with pytest.raises(error, match=message.replace(".", r"\.")):
        scaling(tiny, keys, **tensors)


def test_divisors_of_the_file_stay_beside_a_factor_b6(tiny):
    config = tiny("llama", {"rope.scaling.factor": 2.0}, **{"rope_freqs.weight": SHORT}).config()
    assert config.rope == (RopeConfig(10000.0, 8, "neighbours", True, Linear(2.0)),)


def test_override(tiny):
    """The context becomes what the scheme reaches; the file's own scaling and divisors go."""
    config = tiny("llama").config()
    assert override_rope(config) is config
    yarn = override_rope(config, {"rope_type": "yarn", "factor": 4.0})
    assert yarn.rope[0].scaling == YaRN(4.0, 128)
    assert yarn.context_length == 512
    given = {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 64}
    assert override_rope(config, given).rope[0].scaling == YaRN(4, 64)
    assert override_rope(config, given).context_length == 256
    assert override_rope(config, {"rope_type": "ntk", "factor": 2.0}).rope[0].scaling == NTKAware(2.0)
    llama3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 32}
    assert override_rope(config, llama3).rope[0].scaling == Llama3(8.0, 32)
    assert override_rope(config, base=5e5).rope[0] == RopeConfig(5e5, 8, "neighbours")
    scaled = tiny("llama", {"rope.scaling.type": "yarn", "rope.scaling.original_context_length": 32}).config()
    assert override_rope(scaled, {"rope_type": "linear", "factor": 2.0}).context_length == 64
    with_divisors = tiny("llama", **{"rope_freqs.weight": SHORT}).config()
    assert override_rope(with_divisors, {"rope_type": "none"}).rope == (RopeConfig(10000.0, 8, "neighbours"),)
    local = tiny("gemma3").config()
    assert override_rope(local, {"rope_type": "linear", "factor": 2.0}).rope[1] == local.rope[1]


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"scaling": {"rope_type": "yarn"}}, InvalidParameterError, "'yarn' lacks 'factor'"),
        ({"scaling": {"rope_type": "yarn", "factor": "4"}}, InvalidParameterError, "factor is '4'"),
        ({"scaling": {"factor": 4}}, InvalidParameterError, "rope_type None; allowed"),
        ({"scaling": "yarn"}, InvalidParameterError, "rope_scaling is 'yarn'; allowed: a mapping"),
        ({"scaling": {"rope_type": "yarm", "factor": 4}}, UnsupportedModelError, "did you mean 'yarn'"),
        ({"base": 0}, InvalidParameterError, "rope_base is 0; allowed"),
        ({"base": True}, InvalidParameterError, "rope_base is True"),
        ({"base": math.nan}, InvalidParameterError, "rope_base is nan"),
    ],
)
def test_override_with_nonsense_is_refused(tiny, given, error, message):
    with pytest.raises(error, match=message):
        override_rope(tiny("llama").config(), **given)


def test_dynamic_ntk_is_refused_where_it_would_change_with_every_token(tiny):
    model = tiny("llama")
    dynamic = override_rope(model.config(), {"rope_type": "dynamic", "factor": 2.0})
    with pytest.raises(
        UnsupportedModelError, match="'dynamic' is not supported in a context of 256: beyond 128"
    ):
        Reference(dynamic, model)


@pytest.mark.parametrize(
    "keys",
    [
        {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
        {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 16},
    ],
)
def test_scaling_reaches_the_logits_of_the_reference(tiny, keys):
    plain, model = tiny("llama"), tiny("llama", keys)
    far = Reference(plain.config(), plain).logits(TOKENS)
    ours = Reference(model.config(), model).logits(TOKENS)
    assert abs(ours - far).max() > 0.01 * far.std()
    same = override_rope(plain.config(), {"rope_type": "linear", "factor": 4.0})
    if keys["rope.scaling.type"] == "linear":
        np.testing.assert_array_equal(Reference(same, plain).logits(TOKENS), ours)


def test_the_reference_computes_everything_anew_when_a_sequence_outgrows_its_list_b8(tiny):
    """Limit 8: 8 tokens have the short list, 9 the long one for all, however the tokens came."""
    keys = {"rope.scaling.original_context_length": 8, "rope.scaling.attn_factor": 1.25}

    def reference_of(**lists):
        model = tiny("llama", keys, **LISTS | lists)
        return Reference(model.config(), model)

    reference = reference_of()
    short = reference_of(**{"rope_factors_long.weight": SHORT})
    long = reference_of(**{"rope_factors_short.weight": LONG})
    np.testing.assert_array_equal(reference.logits(TOKENS[:8]), short.logits(TOKENS[:8]))
    np.testing.assert_array_equal(reference.logits(TOKENS[:9]), long.logits(TOKENS[:9]))
    assert abs(short.logits(TOKENS[:9]) - long.logits(TOKENS[:9])).max() > 0.01
    whole = reference.logits(TOKENS)
    for first in (4, 8, 9, 20):
        cache = reference.new_cache()
        reference.forward(TOKENS[:first], cache)
        rest = reference.forward(TOKENS[first:], cache)
        np.testing.assert_allclose(rest, whole[first:], atol=2e-5)
        assert cache.length == len(TOKENS)
