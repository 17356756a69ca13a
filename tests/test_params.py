"""SamplingParams refuses every value that is not allowed, naming field, value and range."""

import dataclasses
import pickle

import numpy as np
import pytest

from ropewalk.errors import InvalidParameterError
from ropewalk.params import SamplingParams


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("max_tokens", 0, "at least 1"),
        ("max_tokens", 3.0, "at least 1"),
        ("max_tokens", True, "at least 1"),
        ("min_tokens", -1, "at least 0"),
        ("min_tokens", 257, "at most max_tokens, which is 256"),
        ("temperature", -0.1, "finite number of at least 0"),
        ("temperature", float("nan"), "finite number of at least 0"),
        ("temperature", float("inf"), "finite number of at least 0"),
        ("temperature", 10**400, "finite number of at least 0"),
        ("temperature", "hot", "finite number of at least 0"),
        ("top_k", -2, "at least -1"),
        ("top_k", 1.5, "at least -1"),
        ("top_p", 1.01, "0 ... 1"),
        ("top_p", -0.01, "0 ... 1"),
        ("min_p", 2, "0 ... 1"),
        ("typical_p", float("nan"), "0 ... 1"),
        ("repetition_penalty", 0, "above 0"),
        ("frequency_penalty", 2.5, "-2 ... 2"),
        ("presence_penalty", -2.5, "-2 ... 2"),
        ("logit_bias", [1, 2], "mapping"),
        ("logit_bias", {-1: 1.0}, "at least 0"),
        ("logit_bias", {"5": 1.0}, "at least 0"),
        ("logit_bias", {5: 101.0}, "-100 ... 100"),
        ("logit_bias", {5: float("nan")}, "-100 ... 100"),
        ("logit_bias", {5: 10**400}, "-100 ... 100"),
        ("n", 0, "1 ... 64"),
        ("n", 65, "1 ... 64"),
        ("seed", -1, "0 ... 18446744073709551615"),
        ("seed", 2**64, "0 ... 18446744073709551615"),
        ("stop", "", "at least one character"),
        ("stop", ["a", ""], "at least one character"),
        ("stop", [5], "at least one character"),
        ("stop", 5, "sequence of strings"),
        ("stop_token_ids", [1.0], "at least 0"),
        ("stop_token_ids", "12", "sequence of token ids"),
        ("stop_token_ids", 7, "sequence of token ids"),
        ("logprobs", -1, "at least 0"),
        ("prompt_logprobs", -1, "at least 0"),
        ("ignore_eos", 1, "True or False"),
        ("include_stop_str_in_output", None, "True or False"),
        ("skip_special_tokens", "yes", "True or False"),
    ],
)
def test_refusals_name_field_value_and_range(field, value, allowed):
    with pytest.raises(InvalidParameterError) as caught:
        SamplingParams(**{field: value})
    assert field in str(caught.value)
    assert allowed in str(caught.value)
    offending = [item for item in value if item != "a"][-1] if isinstance(value, list) else value
    assert isinstance(value, dict) or field == "logit_bias" or repr(offending) in str(caught.value)


def test_values_become_plain_python():
    params = SamplingParams(
        max_tokens=np.int64(5),
        temperature=np.float32(0.5),
        stop="end",
        stop_token_ids=np.array([3, 4]),
        logit_bias={np.int32(7): np.float64(1.5)},
    )
    assert (params.max_tokens, params.temperature) == (5, 0.5)
    assert type(params.max_tokens) is int
    assert type(params.temperature) is float
    assert (params.stop, params.stop_token_ids, params.logit_bias) == (("end",), (3, 4), {7: 1.5})
    assert [type(item) for item in params.stop_token_ids] == [int, int]


def test_off_and_edge_values_are_allowed():
    SamplingParams(
        top_k=-1, top_p=0.0, min_p=1.0, typical_p=0.0, max_tokens=None, min_tokens=10_000, seed=2**64 - 1
    )


def test_frozen_copies_and_pickles():
    params = SamplingParams(logit_bias={1: 2.0}, stop=["a"])
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.top_k = 3
    assert dataclasses.replace(params, top_k=3).top_k == 3
    assert pickle.loads(pickle.dumps(params)) == params


def test_the_callers_mapping_is_not_kept():
    bias = {1: 2.0}
    params = SamplingParams(logit_bias=bias)
    bias[1] = 3.0
    assert params.logit_bias == {1: 2.0}


@pytest.mark.parametrize(("temperature", "greedy"), [(0, True), (1e-40, True), (9e-6, True), (1e-4, False)])
def test_greedy(temperature, greedy):
    assert SamplingParams(temperature=temperature).greedy is greedy
