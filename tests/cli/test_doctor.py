"""`ropewalk doctor`: what it says is what the kernels will do."""

import json

import pytest

from ropewalk.kernels import bandwidth, cache, cpu, team


@pytest.fixture
def measured(monkeypatch):
    """The thread counts with which the bandwidth was measured; it is 12.5 GB/s."""
    counts = []

    def measure(n_threads):
        counts.append(n_threads)
        return 12.5e9

    monkeypatch.setattr(bandwidth, "measure_read_bandwidth", measure)
    return counts


def test_json_says_what_the_kernels_will_do(ropewalk, measured, monkeypatch, tmp_path):
    monkeypatch.setenv("ROPEWALK_HOME", str(tmp_path))
    facts = json.loads(ropewalk("doctor", "--json").stdout)
    assert facts["kernels"]["chosen"] == cpu.choose_rung().name
    assert facts["kernels"]["chosen"] in facts["kernels"]["usable"]
    assert facts["kernels"]["usable"][-1] == "portable"
    refused = {name: why for name in cpu.RUNGS if (why := cpu.refusal(name))}
    assert facts["kernels"]["not_usable"] == refused
    assert {*facts["kernels"]["usable"], *refused} == set(cpu.RUNGS)
    assert facts["cpu"]["features"] == sorted(cpu.cpu_features())
    assert facts["threads"]["default"] == team.available_threads() == min(facts["threads"]["limits"].values())
    assert facts["folders"]["cache"] == str(tmp_path)
    assert facts["folders"]["kernels"] == str(cache.cache_folder())
    assert facts["read_bandwidth_bytes_per_s"] == 12.5e9
    assert measured == [team.available_threads()]


def test_for_people(ropewalk, measured, monkeypatch):
    monkeypatch.setattr(team, "thread_limits", lambda: {"affinity": 8, "cgroup quota": 3})
    monkeypatch.setattr(team, "available_threads", lambda: 3)
    result = ropewalk("doctor", "--threads", "1")
    lines = dict(line.split("  ", 1) for line in result.stdout.splitlines())
    assert lines["threads"].strip().startswith("3, the least of affinity 8, cgroup quota 3 (")
    assert lines["read bandwidth"].strip() == "12.5 GB/s with 1 threads"
    assert lines["kernels"].strip().startswith(cpu.choose_rung().name)
    assert measured == [1]
    assert result.stderr == "measuring the read bandwidth ...\n"


def test_a_forced_rung_that_does_not_exist_is_told_in_one_line(ropewalk, measured, monkeypatch):
    monkeypatch.setenv("ROPEWALK_RUNG", "altivec")
    cpu.choose_rung.cache_clear()
    result = ropewalk("doctor")
    cpu.choose_rung.cache_clear()
    assert result.exit_code == 2
    assert result.stderr.startswith("ropewalk: ROPEWALK_RUNG is 'altivec'; allowed: amx, vnni")
