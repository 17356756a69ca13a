"""Every family's tiny model: the reference gives the logits of transformers."""

import re
from pathlib import Path

import numpy as np
import pytest

from ropewalk.errors import CheckpointError
from ropewalk.model.config import ModelConfig
from ropewalk.model.families import FAMILIES
from ropewalk.model.reference import Reference
from ropewalk.model.shapes import tensor_shapes

FAMILY_FIXTURES = (Path(__file__).parents[1] / "data" / "families").glob("*.npz")


def relative(ours, theirs):
    """Largest error relative to the largest logit."""
    return abs(ours - theirs).max() / abs(theirs).max()


def config_of(model):
    return ModelConfig.from_gguf(model.metadata, model.tensors)


def test_prefill_gives_the_logits_of_transformers(family_model):
    """40 tokens cross windows of 9, experts are chosen unevenly; the tensors are exactly those that we read."""
    config = config_of(family_model)
    assert set(tensor_shapes(config)) == set(family_model.tensors)
    logits = Reference(config, family_model).logits(family_model.ids)
    assert relative(logits[family_model.rows], family_model.logits) < 5e-6


def test_decode_gives_the_same(family_model):
    reference = Reference(config_of(family_model), family_model)
    cache = reference.new_cache()
    parts = [reference.forward(family_model.ids[:21], cache)]
    parts += [reference.forward(family_model.ids[i : i + 1], cache) for i in range(21, len(family_model.ids))]
    assert relative(np.concatenate(parts)[family_model.rows], family_model.logits) < 5e-6


def test_every_missing_tensor_is_refused_by_name_g5(family_model):
    """Without its router a layer is an ordinary one, whose tensors are missed then."""
    optional = ("output.weight", "output.bias")
    for name in sorted(family_model.tensors):
        if not name.startswith(("blk.1.", "output")) or name in optional:
            continue
        kept = family_model.tensors.pop(name)
        missed = name if "ffn_gate_inp.weight" not in name else "blk.1.ffn_gate.weight"
        with pytest.raises(CheckpointError, match=f"tensor {re.escape(missed)} is missing"):
            config_of(family_model)
        family_model.tensors[name] = kept


def test_there_is_a_fixture_for_every_row():
    assert set(FAMILIES) <= {path.stem for path in FAMILY_FIXTURES}
