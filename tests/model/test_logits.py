"""The reference agrees with transformers on the real models (fixtures of `tools/fixtures/logits.py`)."""

from pathlib import Path

import numpy as np
import pytest

from ropewalk.checkpoint.gguf import open_gguf
from ropewalk.model.config import ModelConfig
from ropewalk.model.reference import Reference

DATA = Path(__file__).parents[1] / "data"

# Largest difference of a logit allowed, relative to the largest logit of its position: about three times what
# was seen (2.0e-6, 1.9e-6, 2.2e-6, 5.4e-6). Both sides are float32 and add in different orders.
TOLERANCES = {
    "smollm2-135m": 6e-6,
    "gemma3-270m": 6e-6,
    "qwen2.5-coder-0.5b": 7e-6,
    "qwen2.5-coder-1.5b": 1.6e-5,
}


def relative_error(logits, fixture):
    """Largest difference of the stored logits at each position, over the largest stored logit there."""
    rows = np.arange(len(logits))[:, None]
    top = abs(logits[rows, fixture["top_ids"]] - fixture["top_logits"]).max(axis=1)
    some = abs(logits[:, fixture["some_ids"]] - fixture["some_logits"]).max(axis=1)
    return np.maximum(top, some) / abs(fixture["top_logits"]).max(axis=1)


def logsumexp(logits):
    wide = logits.astype(np.float64)
    highest = wide.max(axis=1)
    return highest + np.log(np.exp(wide - highest[:, None]).sum(axis=1))


@pytest.mark.parametrize("name", TOLERANCES)
def test_reference_agrees_with_transformers(model_path, name):
    with np.load(DATA / f"logits-{name}.npz") as stored:
        fixture = dict(stored)
    with open_gguf(model_path(name)) as checkpoint:
        config = ModelConfig.from_gguf(checkpoint.metadata, checkpoint.tensors)
        logits = Reference(config, checkpoint, keep_bytes=0).logits(fixture["ids"])[fixture["positions"]]
    error = relative_error(logits, fixture)
    print(f"\n{name}: relative error {error.max():.1e} (median of positions {np.median(error):.1e})")
    assert error.max() < TOLERANCES[name]
    np.testing.assert_allclose(logsumexp(logits), fixture["logsumexp"], rtol=TOLERANCES[name])
    first, second = fixture["top_logits"][:, 0], fixture["top_logits"][:, 1]
    clear = (first - second) > 1e-3 * abs(first)
    assert (logits.argmax(axis=1) == fixture["top_ids"][:, 0])[clear].all()
    assert clear.sum() >= 10
