"""Promise 1: logits are at least as close to the float32 reference as llama.cpp's on the same positions.

What llama.cpp reaches is stored in `tests/data/fidelity-*.json`, written by

    python benchmarks/fidelity.py MODEL --peer-python PYTHON --window 256 --windows 1 --prompts 0 --json

The reference is computed here: it is itself held to transformers in `tests/model/test_logits.py`.
"""

import json
from pathlib import Path

import numpy as np
import pytest

from ropewalk import LLM
from ropewalk.checkpoint.gguf import open_gguf
from ropewalk.model.config import ModelConfig
from ropewalk.model.reference import Reference

DATA = Path(__file__).parent / "data"
MODELS = ("smollm2-135m", "gemma3-270m", "qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b")


def log_softmax(logits):
    wide = logits.astype(np.float64)
    wide -= wide.max()
    return wide - np.log(np.exp(wide).sum())


@pytest.mark.parametrize("name", MODELS)
def test_divergence_is_no_larger_than_llama_cpps(model_path, name):
    path = model_path(name)
    stored = json.loads((DATA / f"fidelity-{name}.json").read_text())
    assert stored["model"] == path.name
    peers = [row for engine, row in stored["engines"].items() if engine.startswith("llama.cpp")]
    assert len(peers) == 2
    with LLM(path, context_length=stored["window"]) as llm:
        text = (DATA / stored["text"]).read_text(encoding="utf-8")
        ids = llm.encode(text[: 12 * stored["window"]])[: stored["positions"]]
        logits = llm.logits(ids)
    with open_gguf(path) as checkpoint:
        config = ModelConfig.from_gguf(checkpoint.metadata, checkpoint.tensors)
        truth = Reference(config, checkpoint, keep_bytes=0).logits(ids)
    divergences, surprises, true_surprises = [], [], []
    for i, target in enumerate([*ids[1:], None]):
        ours, exact = log_softmax(logits[i]), log_softmax(truth[i])
        divergences.append(np.exp(exact) @ (exact - ours))
        if target is not None:
            surprises.append(-ours[target])
            true_surprises.append(-exact[target])
    assert len(divergences) == 256
    assert 0 < np.mean(divergences) <= min(row["kl_mean"] for row in peers)
    perplexity, exact = np.exp(np.mean(surprises)), np.exp(np.mean(true_surprises))
    assert exact == pytest.approx(stored["engines"]["float32 reference"]["perplexity"], rel=1e-4)
    assert perplexity == pytest.approx(exact, rel=0.005)
