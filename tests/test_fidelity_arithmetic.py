"""The arithmetic of `benchmarks/fidelity.py`, on distributions whose divergence is known."""

import importlib.util
import math
import sys
from pathlib import Path

import numpy as np
import pytest

PATH = Path(__file__).parents[1] / "benchmarks" / "fidelity.py"


@pytest.fixture(scope="module")
def fidelity():
    spec = importlib.util.spec_from_file_location("fidelity", PATH)
    module = sys.modules["fidelity"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules["fidelity"]


def logits(*probabilities, shift=0.0):
    return (np.log(np.array(probabilities)) + shift).astype(np.float32)


def test_divergence_gap_and_perplexity(fidelity):
    """KL([1/2, 1/4, 1/4], [1/4, 1/2, 1/4]) = 1/4 ln 2, and a shift of all logits changes nothing."""
    truth = fidelity.log_softmax(logits(0.5, 0.25, 0.25))
    tally = fidelity.Tally()
    tally.add(logits(0.25, 0.5, 0.25, shift=40), truth, (0, 1), 1)
    tally.add(logits(0.5, 0.25, 0.25, shift=-9), truth, (0, 1), None)
    assert tally.kl == pytest.approx([math.log(2) / 4, 0], abs=1e-6)
    assert tally.gap_error == pytest.approx([-2 * math.log(2), 0], abs=1e-5)
    summary = tally.summary()
    assert summary["kl_mean"] == pytest.approx(math.log(2) / 8, abs=1e-6)
    assert summary["kl_max"] == pytest.approx(math.log(2) / 4, abs=1e-6)
    assert summary["kl_standard_error"] == pytest.approx(math.log(2) / 8 / math.sqrt(2), abs=1e-6)
    assert summary["perplexity"] == pytest.approx(2, rel=1e-5)
    assert summary["gap_error_rms"] == pytest.approx(math.sqrt(2) * math.log(2), abs=1e-5)


def test_equal_length_and_gap(fidelity):
    assert fidelity.equal_length([1, 2, 3], [1, 2, 3]) == 3
    assert fidelity.equal_length([1, 2, 3], [1, 9, 3]) == 1
    assert fidelity.gap(np.array([1.0, 4.0, 2.5]), (1, 2)) == 1.5


class Letters:
    """Encodes a text as its characters, after a start token if it has one."""

    def __init__(self, start):
        self.start = start

    def encode(self, text):
        return self.start + [ord(c) for c in text]


def test_windows_start_with_the_start_token_and_lose_no_text(fidelity):
    windows = fidelity.windows_of(Letters([1]), "abcdefg", size=4, count=2)
    assert windows == [[1, 97, 98, 99], [1, 100, 101, 102]]
    assert fidelity.windows_of(Letters([]), "abcd", size=2, count=2) == [[97, 98], [99, 100]]
    with pytest.raises(SystemExit, match="7 tokens, fewer than 9"):
        fidelity.windows_of(Letters([1]), "abcdefg", size=4, count=3)


def test_report_counts_sides_and_keeps_the_table_whole(fidelity, capsys):
    row = {"kl_mean": 1e-3, "kl_standard_error": 1e-5, "kl_median": 1e-3, "kl_p99": 2e-3, "kl_max": 3e-3}
    row |= {"perplexity": 20.0, "gap_error_rms": 0.1}
    parted = {"prompt": "a|b`\n", "tokens": 4, "equal": 1, "ropewalk": "x", "llama_cpp": "y"}
    parted |= {"gap_reference": -0.1, "gap_ropewalk": 0.2, "gap_llama_cpp": -0.3}
    result = {"model": "m.gguf", "positions": 8, "windows": 2, "window": 4, "threads": 1, "machine": "cpu"}
    result |= {"versions": ["a", "b"], "engines": {"float32 reference": row, "Ropewalk": row}}
    fidelity.report(result | {"greedy": [parted, {"prompt": "p", "tokens": 4, "equal": 4}]})
    printed = capsys.readouterr().out
    assert "1 continuations are identical" in printed
    assert "prefers Ropewalk's token\n0 times" in printed
    assert r"| `a\|b'\n` | 2 | `x` | `y` | -0.100 | +0.200 | -0.300 |" in printed
    assert "| Ropewalk | 1.00e-03 ± 1e-05 |" in printed
