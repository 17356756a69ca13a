"""The arithmetic of `benchmarks/compare.py`, on seconds that were made up."""

import importlib.util
import json
import sys
import xml.etree.ElementTree
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def load(name: str):
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def compare():
    yield load("compare")
    del sys.modules["compare"]


def rounds(*seconds: tuple[float, float], tokens: tuple[int, ...] = (5, 6, 7)) -> list[dict]:
    return [{"prefill_s": p, "decode_s": d, "tokens": list(tokens)} for p, d in seconds]


@pytest.fixture
def summary(compare):
    measured = {
        "rounds": {
            "ropewalk": rounds((1.0, 1.0), (2.0, 0.5), (4.0, 2.0)),
            "off": rounds((2.0, 2.0), (2.0, 2.0), (2.0, 2.0), tokens=(5, 6, 8)),
            "on": rounds((1.0, 4.0), (4.0, 4.0), (4.0, 4.0)),
        },
        "bandwidth": [90.0, 100.0, 110.0, 100.0],
        "busy": 0.02,
    }
    return compare.summarise(measured, 8, 4, compare.Traffic(weights=9, cache=1))


def test_medians_and_the_better_flash_attention_setting(summary):
    prefill, decode = summary["prefill"], summary["decode"]
    assert (prefill["ropewalk_tokens_per_s"], prefill["llama_cpp_tokens_per_s"]) == (4.0, 4.0)
    assert (decode["ropewalk_tokens_per_s"], decode["llama_cpp_tokens_per_s"]) == (4.0, 2.0)
    assert (prefill["llama_cpp_flash_attention"], decode["llama_cpp_flash_attention"]) == ("off", "off")


def test_the_ratio_is_the_median_of_the_rounds_ratios(summary):
    assert summary["prefill"]["ratio"] == 1.0  # of 2, 1 and 0.5
    assert summary["decode"]["ratio"] == 2.0  # of 2, 4 and 1


def test_share_of_the_bandwidth(summary):
    assert summary["read_bandwidth_bytes_per_s"] == 100.0
    assert summary["decode"]["ropewalk_bandwidth_share"] == 4.0 * 10 / 100
    assert summary["decode"]["llama_cpp_bandwidth_share"] == 2.0 * 10 / 100


def test_how_busy_the_machine_was(compare, summary):
    assert summary["others_use_of_cpu"] == 0.02
    assert 0 <= compare.share_of_cpu_in_use(0.1) <= 1


def test_no_round_sees_a_prompt_that_begins_like_an_earlier_one(compare):
    """Or a prefix cache would answer, and its look-ups would be measured as prefill."""
    prompts = compare.different_prompts(list(range(1000)), 100, 8)
    assert [len(prompt) for prompt in prompts] == [100] * 8
    assert len({prompt[0] for prompt in prompts}) == 8
    with pytest.raises(SystemExit, match="begin with the same 16 tokens"):
        compare.different_prompts([7] * 1000, 100, 8)
    with pytest.raises(SystemExit, match="only 50 tokens"):
        compare.different_prompts([7] * 50, 100, 8)


def test_how_far_the_greedy_tokens_agree(summary):
    assert (summary["same_tokens"], summary["compared_tokens"]) == ([2, 2, 2], 5)


def test_bytes_that_a_step_reads(compare, smollm2):
    """Every tensor, since the output shares the embedding; 30 layers with 3 heads of 64, keys and values."""
    read = compare.traffic(smollm2, 100)
    assert read.weights == 66_355_200 + 30_081_024 + 140_544
    assert read.cache == 100 * 2 * 30 * 3 * 64 * 2


def test_a_window_bounds_the_cache_and_a_separate_embedding_is_not_read(compare, model_path):
    gemma = compare.traffic(model_path("gemma3-270m"), 600)
    assert gemma.cache == (15 * 512 + 3 * 600) * 2 * 1 * 256 * 2
    embedding = 151_936 * 896 // 32 * 22  # Q5_0
    assert compare.traffic(model_path("qwen2.5-coder-0.5b"), 1).weights == 485_452_288 - embedding


def test_the_chart_shows_every_number(summary, tmp_path, monkeypatch):
    result = summary | {
        "prefill_tokens": 8,
        "threads": 2,
        "repeats": 3,
        "cpu": "Some <CPU>",
        "versions": ["ropewalk 1", "llama-cpp-python 2"],
    }
    (tmp_path / "r.json").write_text(json.dumps(result))
    svg = tmp_path / "speed.svg"
    monkeypatch.setattr("sys.argv", ["chart.py", f"Model A={tmp_path / 'r.json'}", "--output", str(svg)])
    load("chart").main()
    del sys.modules["chart"]
    shown = [e.text for e in xml.etree.ElementTree.parse(svg).iter() if e.tag.endswith("text")]
    assert {"Model A", "4 tok/s, 40%", "2 tok/s, 20%"} <= set(shown)
    assert any("Some <CPU>, 2 threads" in text for text in shown)
