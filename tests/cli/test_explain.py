"""`ropewalk explain`: the story on stdout, as text or JSON, and the timeline in a file."""

import json
import re

import pytest


@pytest.fixture(scope="module")
def told(smollm2, tmp_path_factory):
    """One run as text and one as JSON, both with a timeline; `(text, json, timeline)`."""
    from typer.testing import CliRunner

    from ropewalk.cli.app import build

    file = tmp_path_factory.mktemp("explain") / "trace.json"
    common = [
        "explain",
        str(smollm2),
        "Name three rivers.",
        "--seed",
        "1",
        "--max-tokens",
        "3",
        "--context",
        "128",
    ]
    text = CliRunner().invoke(build(), [*common, "--repetition-penalty", "1.1", "--trace", str(file)])
    assert text.exit_code == 0, text.stderr
    assert "perfetto" in text.stderr
    as_json = CliRunner().invoke(build(), [*common, "--json", "--candidates", "2"])
    assert as_json.exit_code == 0, as_json.stderr
    return text.stdout, json.loads(as_json.stdout), json.loads(file.read_text())


def test_the_account_of_the_cache(told):
    """34 tokens of prompt are 3 pages of 16; each token is 2 x 30 x 3 x 64 x 2 bytes."""
    text, _, _ = told
    assert (
        "KV cache  23,040 bytes a token: 30 layers x 3 KV heads x 64 x 2 (keys, values), float16; pages of 16"
        in text
    )
    assert "cache: 36 positions in 3 pages (0, 1, 2), 829,440 bytes used of 1,105,920" in text
    assert re.search(r"^ +0  prefill 34 +0-33 +3 +\d+\.\d\d +783\.4 +783\.4 ", text, re.M)
    assert re.search(r"^ +1  decode 1 +34 +3 +\d+\.\d\d +806\.4 +23\.0 ", text, re.M)


def test_bytes_of_the_steps_add_up_to_the_whole(told):
    _, found, _ = told
    assert sum(step["read_bytes"] for step in found["steps"]) == found["read_bytes"]
    for step in found["steps"]:
        assert sum(step["weight_bytes"].values()) + step["cache_read_bytes"] == step["read_bytes"]
        assert sum(step["part_s"].values()) - step["part_s"]["trace"] == pytest.approx(
            step["seconds"], rel=0.02
        )


def test_every_knob_has_its_row(told):
    text, found, _ = told
    token = text.split("\nToken ")[1]
    assert [line.split("  ")[1] for line in token.splitlines()[2:8]] == [
        "raw",
        "repetition_penalty 1.1",
        "temperature 0.8",
        "top_k 40",
        "top_p 0.95",
        "min_p 0.05",
    ]
    stages = found["tokens"][0]["stages"]
    assert [s["name"] for s in stages] == ["raw", "temperature", "top_k", "top_p", "min_p"]
    assert stages[2]["n_candidates"] == 40
    assert stages[2]["n_removed"] == 49152 - 40
    assert len(found["tokens"][0]["candidates"]) <= 5


def test_the_percentages_of_the_parts_are_the_whole(told):
    text, _, _ = told
    rows = text.split("\nWhere the time went\n")[1].split("\n\n")[0].splitlines()[1:]
    groups = [row.split() for row in rows if not row.startswith(("  ", "all"))]
    for column in (2, 4):
        assert sum(float(row[column].rstrip("%")) for row in groups) == pytest.approx(100, abs=0.5)
    assert {row[0] for row in groups} == {"matmul", "attention", "pointwise", "sampling", "overhead"}
    whole = next(row.split() for row in rows if row.startswith("all parts"))
    assert (whole[3], whole[5]) == ("100.0%", "100.0%")
    assert sum(float(row[3]) for row in groups) == pytest.approx(float(whole[4]), abs=0.005)
    assert sum(float(row[5]) for row in groups) == pytest.approx(float(whole[6]), abs=0.005)


def test_the_timeline_is_of_the_same_run(told):
    _, _, timeline = told
    assert [e["name"] for e in timeline["traceEvents"] if e.get("cat") == "step"] == [
        "prefill 34",
        "decode 1",
        "decode 1",
    ]


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (("--raw", "--system", "x"), 2, "--raw is without a chat template"),
        (("--candidates", "-1"), 2, "'--candidates': -1; allowed: a whole number of at least 0"),
        (("--trace", "/no/such/t.json"), 2, "--trace /no/such/t.json: there is no folder /no/such"),
        (("--temperature", "-1"), 2, "temperature is -1.0; allowed: a finite number of at least 0"),
    ],
)
def test_wrong_usage(ropewalk, arguments, status, message):
    result = ropewalk("explain", "smollm2-135m", "Hi", *arguments)
    assert result.exit_code == status
    assert message in " ".join(result.stderr.replace("│", " ").split())


def test_a_model_that_is_not_there(ropewalk):
    result = ropewalk("explain", "smollm2-135n", "Hi")
    assert result.exit_code == 1
    assert "smollm2-135m" in result.stderr


def test_a_timeline_that_cannot_be_written(ropewalk, smollm2, tmp_path):
    result = ropewalk(
        "explain",
        smollm2,
        "Hi",
        "--max-tokens",
        "1",
        "--context",
        "128",
        "--trace",
        tmp_path,
    )
    assert result.exit_code == 1
    assert re.search(r"--trace .*: Is a directory", result.stderr)
