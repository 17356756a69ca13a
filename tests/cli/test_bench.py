"""`ropewalk bench`: options become a plan, results a table or JSON; wrong options are told."""

import json
import sys

import pytest

from ropewalk import bench
from ropewalk.bench import Case, Measurement, Plan, Work
from ropewalk.cli import bench as bench_verb

RESULTS = [
    Measurement(
        Case("prefill", 128, 1, 2048), 2, "float16", Work(80_000_000, 20_000_000, 6_400_000_000), 0.05, 20e9
    ),
    Measurement(Case("decode", 1, 4, 0), 2, "float16", Work(80_000_000, 400_000, 64_000_000), 0.00804, 20e9),
]


@pytest.fixture
def plans(monkeypatch, smollm2):
    """The plans that were run, each answered with `RESULTS`."""
    asked = []

    def run(checkpoint, config, plan, progress):
        asked.append(plan)
        return RESULTS

    monkeypatch.setattr(bench, "run", run)
    monkeypatch.setattr(bench_verb, "find", lambda model: smollm2)
    return asked


def test_options_become_the_plan(ropewalk, plans):
    result = ropewalk(
        *("bench", "--prompt", "7,9", "--depth", "0,8000", "--batch", "2", "--threads", "1"),
        *("--cache-type", "int8,float16", "--repeats", "3"),
    )
    assert result.exit_code == 0, result.stderr
    assert plans == [Plan((7, 9), (0, 8000), (2,), (1,), ("int8", "float16"), 3)]


def test_defaults_are_those_of_the_plan(ropewalk, plans):
    ropewalk("bench")
    assert plans == [Plan()]


def test_default_depths_give_way_to_the_context_and_given_ones_do_not(ropewalk, plans):
    ropewalk("bench", "--prompt", "7000")  # the model has a context of 8192
    ropewalk("bench", "--prompt", "7000", "--depth", "2048")
    assert [plan.depths for plan in plans] == [(0,), (2048,)]


def test_columns_for_people(ropewalk, plans):
    lines = ropewalk("bench").stdout.splitlines()
    rows = [line.split("  ") for line in lines]
    assert [cell.strip() for cell in rows[0] if cell.strip()] == list(bench_verb.HEADINGS[1:])
    assert " ".join(lines[1].split()) == "prefill 128 2 float16 2048 50.00 2560.0 100.0 2.0 10% 128.0"
    assert " ".join(lines[2].split()) == "decode x4 2 float16 0 8.04 497.5 80.4 10.0 50% 8.0"
    assert lines[3] == "read bandwidth with 2 threads, in the rounds with float16: 20.0 GB/s"
    assert lines[4].startswith("smollm2-135m-instruct-q4_1.gguf, ropewalk ")
    assert lines[4].endswith("medians of 5 rounds")


def test_a_table_on_a_terminal(plans, monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    bench_verb.show({"model": "m", "version": "1", "kernels": "k", "cpu": "c", "repeats": 5}, RESULTS)
    shown = capsys.readouterr().out
    assert "───" in shown
    assert "decode x4 2 float16 0 8.04 497.5 80.4 10.0 50% 8.0" in " ".join(shown.split())


def test_json(ropewalk, plans):
    facts = json.loads(ropewalk("bench", "--json").stdout)
    assert facts["model"] == "smollm2-135m-instruct-q4_1.gguf"
    assert facts["repeats"] == 5
    assert facts["results"] == [json.loads(json.dumps(result.as_dict())) for result in RESULTS]
    assert facts["results"][1]["tokens_per_s"] == pytest.approx(497.5, abs=0.1)


@pytest.mark.parametrize(
    ("options", "words", "status"),
    [
        (["--prompt", ""], "expected whole numbers", 2),
        (["--batch", "1,x"], "'1,x': expected whole numbers", 2),
        (["--repeats", "0"], "--repeats", 2),
        (["--threads", "0"], "--threads is [0]; allowed: numbers from 1", 2),
        (["--depth", "-1"], "--depth is [-1]", 2),
        (["--cache-type", "int4"], "--cache-type is ['int4']; allowed: float16, int8", 2),
    ],
)
def test_wrong_options_are_told(ropewalk, plans, options, words, status):
    result = ropewalk("bench", *options)
    assert result.exit_code == status
    assert words in result.stderr
    assert not plans


def test_a_depth_beyond_the_context_is_told(ropewalk, smollm2):
    result = ropewalk("bench", smollm2, "--depth", "8192")
    assert result.exit_code == 2
    assert result.stderr == (
        "ropewalk: prefill of 128 tokens at depth 8192 takes 8320 tokens of context; the model has 8192\n"
    )
