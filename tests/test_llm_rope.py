"""`LLM(rope_scaling=..., rope_base=...)` on the real model."""

import numpy as np
import pytest

from ropewalk import LLM
from ropewalk.errors import InvalidParameterError, UnsupportedModelError

TOKENS = list(range(100, 130))


def test_rope_scaling_and_base_reach_the_logits(smollm2):
    """A factor of one changes nothing, YaRN by four extends the context by four, another base is another model."""
    rows = {}
    settings = {
        "plain": {},
        "one": {"rope_scaling": {"rope_type": "linear", "factor": 1.0}},
        "yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        "base": {"rope_base": 10_000.0},
    }
    for name, options in settings.items():
        with LLM(smollm2, kv_tokens=64, context_length=64, **options) as llm:
            rows[name] = llm.logits(TOKENS)
            assert llm.config.context_length == (32768 if name == "yarn" else 8192)
    np.testing.assert_array_equal(rows["plain"], rows["one"])
    for name in ("yarn", "base"):
        assert abs(rows[name] - rows["plain"]).max() > 0.1 * rows["plain"].std()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"rope_scaling": {"rope_type": "yarm", "factor": 4}}, UnsupportedModelError, "did you mean 'yarn'"),
        ({"rope_scaling": {"rope_type": "yarn"}}, InvalidParameterError, "lacks 'factor'"),
        (
            {"rope_scaling": {"rope_type": "longrope", "factor": 4}},
            InvalidParameterError,
            "lacks 'short_factor'",
        ),
        (
            {"rope_scaling": {"rope_type": "dynamic", "factor": 4}},
            UnsupportedModelError,
            "'dynamic' is not supported",
        ),
        ({"rope_base": -1.0}, InvalidParameterError, r"rope_base is -1\.0"),
    ],
)
def test_settings_that_cannot_be_used_are_refused(smollm2, options, error, message):
    with pytest.raises(error, match=message):
        LLM(smollm2, kv_tokens=64, context_length=64, **options)
