"""`ropewalk verify rope`: a table, JSON, a model's own settings, and the exit status."""

import json

import numpy as np
import pytest

from ropewalk.backend import rope_check


def test_every_scheme_in_a_table(ropewalk):
    result = ropewalk("verify", "rope")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[1].split() == ["setting", "layout", "width", "slowest", "pair"] + [
        "shift",
        "zero",
        "norm",
    ] * 2 + ["rest"]
    plain = next(line for line in lines if line.startswith("none") and "halves" in line)
    assert "47,117" in plain
    assert "scores differ by 4e-14 at most" in result.stdout
    assert "the fastest takes 6.28" in result.stdout
    assert lines[-1] == "72 of 72 hold, all"


def test_json(ropewalk):
    facts = json.loads(
        ropewalk("verify", "rope", "--head-dim", 8, "--base", 500, "--seed", 2, "--json").stdout
    )
    assert facts["passed"] is True
    assert {c["width"] for c in facts["checks"]} == {8, 4}
    assert all(c["passed"] and c["reach"] == 131_072 for c in facts["checks"])


def test_the_settings_of_a_model(ropewalk, smollm2):
    result = ropewalk("verify", "rope", smollm2)
    assert result.exit_code == 0
    assert "base 100000  neighbours  64 of 64" in result.stdout
    assert "both positions move by up to 8,187" in result.stdout
    assert "2 of 2 hold, all" in result.stdout


def test_what_does_not_hold_is_named_and_ends_with_status_1(ropewalk, monkeypatch):
    monkeypatch.setattr(rope_check, "rotate_rows", lambda x, cos, sin, n: np.asarray(x) + np.float32(0.01))
    result = ropewalk("verify", "rope")
    assert result.exit_code == 1
    assert "FAILS" in result.stdout and "CHANGED" in result.stdout
    assert "36 of 72 hold" in result.stdout


@pytest.mark.parametrize(
    "arguments", [("--head-dim", "6"), ("--base", "1"), ("--seed", "-1"), ("--head-dim", "0")]
)
def test_bad_input_is_told(ropewalk, arguments):
    assert ropewalk("verify", "rope", *arguments).exit_code == 2
