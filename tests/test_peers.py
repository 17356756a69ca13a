"""The arithmetic of `benchmarks/peers.py`, on seconds that were made up."""

import importlib.util
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture(scope="module")
def peers():
    names = ("compare", "peers")
    for name in names:
        spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    yield sys.modules["peers"]
    for name in names:
        del sys.modules[name]


def engine(seconds, tokens=(1, 2)):
    """An engine that takes these seconds, round by round."""
    left = list(seconds)
    return lambda prompt, n_steps: {"prefill_s": left.pop(0), "decode_s": 2.0, "tokens": list(tokens)}


def test_the_first_round_does_not_count_and_the_beginner_changes(peers, monkeypatch):
    monkeypatch.setattr(peers, "share_of_cpu_in_use", lambda: 0.1)
    order = []

    def noted(name, answers):
        return lambda prompt, n_steps: order.append((prompt[0], name)) or answers(prompt, n_steps)

    engines = {name: noted(name, engine([9.0, 1.0, 2.0])) for name in ("ropewalk", "other")}
    rounds, busy = peers.run_rounds(engines, [[0], [1], [2]], 1)
    assert busy == 0.1
    assert [answer["prefill_s"] for answer in rounds["other"]] == [1.0, 2.0]
    assert order == [
        (0, "ropewalk"),
        (0, "other"),
        (1, "other"),
        (1, "ropewalk"),
        (2, "ropewalk"),
        (2, "other"),
    ]


def test_a_ratio_is_the_median_of_each_rounds_ratio(peers, capsys):
    rounds = {
        "ropewalk": [{"prefill_s": s, "decode_s": 1.0, "tokens": [1, 2]} for s in (1.0, 2.0, 4.0)],
        "other": [{"prefill_s": s, "decode_s": 0.5, "tokens": [1, 3]} for s in (3.0, 3.0, 2.0)],
    }
    found = peers.summarise(rounds, {"prefill": 12, "decode": 2})
    assert found["ropewalk"]["prefill"]["ratio"] == found["ropewalk"]["decode"]["ratio"] == 1
    assert found["other"]["prefill"] == {"tokens_per_s": 4.0, "ratio": 1.5, "seconds": [3.0, 3.0, 2.0]}
    assert found["other"]["decode"]["ratio"] == 0.5
    assert found["other"]["same_tokens"] == [1, 1, 1]
    about = {
        "model": "m",
        "threads": 2,
        "cpu": "c",
        "repeats": 3,
        "versions": ["v"],
        "others_use_of_cpu": 0.0,
    }
    peers.report(about | {"n_tokens": {"prefill": 12, "decode": 2}, "engines": found})
    assert "| other | 4.0 | 1.50 | 4.0 | 0.50 |" in capsys.readouterr().out
