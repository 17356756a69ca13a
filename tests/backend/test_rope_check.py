"""`verify rope`: the properties hold in both arithmetics, the published numbers come out, and a fault is seen."""

import numpy as np
import pytest

from ropewalk.backend import rope_check
from ropewalk.backend.rope_check import BOUNDS, check_all, check_setting, schemes, shift_deviation
from ropewalk.model.config import RopeConfig
from ropewalk.model.rope import YaRN, plain_frequencies, rope_table


@pytest.fixture(scope="module")
def checks():
    return check_all()


def test_everything_holds_up_to_131_072(checks):
    assert len(checks) == 2 * 2 * (7 + 2) * 2  # widths, layouts, schemes (two have two tables), arithmetics
    assert {c.setting.split(",")[0] for c in checks} == set(schemes(64))
    for check in checks:
        assert check.passed, check
        assert check.reach == 131_072
        assert max(check.near, check.far, check.zero, check.norm) <= BOUNDS[check.arithmetic]
    singles = [c for c in checks if c.arithmetic == "float32"]
    assert all(1e-9 < c.near < 1e-7 and c.far < 1e-7 for c in singles)


def test_the_published_numbers(checks):
    """Width 64, base 10,000: 4e-14 over shifts 0 ... 504 at offset 4; wavelengths of 2π to 47,117 tokens."""
    assert f"{shift_deviation():.0e}" == "4e-14"
    plain = next(c for c in checks if c.setting == "none" and c.width == 64)
    assert plain.shortest == pytest.approx(2 * np.pi)
    assert round(plain.longest) == 47_117


def test_a_rotation_by_something_else_than_the_position_is_seen(monkeypatch):
    """Positions rounded as float16 would (B9): nothing is the same any more, except at distance 0."""

    def rounded(frequencies, positions, scale=1.0):
        angles = np.asarray(positions).astype(np.float16).astype(np.float64)[:, None] * frequencies
        return (scale * np.cos(angles)).astype(np.float32), (scale * np.sin(angles)).astype(np.float32)

    rope = RopeConfig(10000.0, 64, "halves")
    monkeypatch.setattr(rope_check, "cos_sin", rounded)
    with np.errstate(over="ignore", invalid="ignore"):
        _, single = check_setting("m", rope, rope_table(rope, lambda n: None), 64, reach=60_000)
    assert not single.passed
    assert single.far > 1e-3
    assert single.zero < 1e-6


def test_a_kernel_that_touches_the_rest_or_changes_lengths_is_seen(monkeypatch):
    rope = RopeConfig(10000.0, 32, "neighbours")
    table = rope_table(rope, lambda n: None)
    true = rope_check.rotate_rows
    monkeypatch.setattr(
        rope_check, "rotate_rows", lambda x, cos, sin, n: true(x, cos, sin, n) * np.float32(1.001)
    )
    wide, single = check_setting("m", rope, table, 64)
    assert wide.passed
    assert not single.passed and not single.rest and single.norm == pytest.approx(1e-3, rel=0.01)


def test_a_forgotten_attention_factor_is_seen(monkeypatch):
    rope = RopeConfig(10000.0, 64, "halves", scaling=YaRN(4.0, 4096))
    table = rope_table(rope, lambda n: None)
    assert table.attention_scale > 1.1
    true = rope_check.cos_sin
    monkeypatch.setattr(
        rope_check, "cos_sin", lambda frequencies, positions, scale: true(frequencies, positions)
    )
    wide, single = check_setting("m", rope, table, 64)
    assert wide.passed and not single.passed


def test_wavelengths_of_a_scheme():
    table = rope_table(RopeConfig(10000.0, 64, "halves", scaling=YaRN(4.0, 8192)), lambda n: None)
    check, _ = check_setting("yarn", RopeConfig(10000.0, 64, "halves"), table, 64)
    assert check.longest == pytest.approx(4 * 2 * np.pi / plain_frequencies(1e4, 64)[-1])
