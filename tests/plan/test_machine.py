"""Machines by name: every one of the table has its source, and names are found as people write them."""

import pytest

from ropewalk.errors import InvalidParameterError
from ropewalk.plan import Machine, find_machine
from ropewalk.plan.machine import ARITHMETIC_TYPES
from ropewalk.plan.machines import MACHINES


@pytest.mark.parametrize("name", MACHINES)
def test_every_machine_says_where_its_numbers_are_from(name):
    machine = MACHINES[name]
    assert machine.source.startswith("https://")
    assert machine.bandwidth > 50e9
    assert set(machine.rates) <= set(ARITHMETIC_TYPES)
    assert find_machine(name) is machine
    assert machine.memory_bytes is None or 20e9 < machine.memory_bytes < 300e9


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("a100 80gb", "A100-80GB"),
        ("A100-80", "A100-80GB"),
        ("h100sxm", "H100-SXM"),
        ("rtx4090", "RTX-4090"),
        ("4090", "RTX-4090"),
        ("mi300x", "MI300X"),
        ("m1", "M1"),
        ("M4 Max", "M4-Max"),
        ("xeon-8480+", "Xeon-8480+ (Sapphire Rapids)"),
        ("sapphire rapids", "Xeon-8480+ (Sapphire Rapids)"),
        ("genoa", "EPYC-9654 (Genoa)"),
    ],
)
def test_names_as_people_write_them(written, name):
    assert find_machine(written).name == name


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("A100", "'A100' is ambiguous; did you mean A100-40GB or A100-80GB"),
        ("H100-SMX", "'H100-SMX' is unknown; did you mean H100-SXM"),
        ("TPU-v5", "'TPU-v5' is unknown.*known: A100-40GB"),
        ("", "'' is unknown"),
    ],
)
def test_an_unknown_machine_is_refused_with_near_matches(written, message):
    with pytest.raises(InvalidParameterError, match=message):
        find_machine(written)


def test_peaks_of_a_server_cpu_are_cores_times_clock():
    """56 cores at 2 GHz with 2,048 operations a cycle of 8 bits; eight channels of DDR5-4800."""
    machine = find_machine("Sapphire Rapids")
    assert machine.rates["int8"] == pytest.approx(229.4e12, rel=1e-3)
    assert machine.bandwidth == pytest.approx(307.2e9)


def test_numbers_may_be_replaced():
    machine = find_machine("M4").with_limits(memory_bytes=16 * 10**9, rate=4e12)
    assert machine.memory_bytes == 16 * 10**9
    assert machine.rate_for("F16") == (4e12, "any")
    assert machine.bandwidth == 120e9
    assert machine.name == "M4, changed"
    assert find_machine("M4").with_limits() is not None and find_machine("M4").with_limits().name == "M4"


@pytest.mark.parametrize(("memory", "bandwidth"), [(0, 1.0), (-1, 1.0), (1, 0.0), (1, -2.0)])
def test_a_machine_of_nothing_is_refused(memory, bandwidth):
    with pytest.raises(InvalidParameterError, match="allowed: more than 0"):
        Machine("m", memory, bandwidth)
