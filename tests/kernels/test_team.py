"""Threads: how many (K2), idle, fork, end."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ropewalk.errors import InvalidParameterError
from ropewalk.kernels import sync, team


@pytest.fixture
def eight_cpus(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    monkeypatch.setattr(team, "_physical_cores", lambda cpus: len(cpus))
    (tmp_path / "self").write_text("0::/\n")
    return tmp_path


@pytest.mark.parametrize(
    ("cpu_max", "expected"),
    [("400000 100000", 4), ("765000 100000", 7), ("max 100000", 8), ("50000 100000", 1), ("junk", 8)],
)
def test_k2_cgroup_2_quota_rounds_down(eight_cpus, cpu_max, expected):
    (eight_cpus / "cpu.max").write_text(cpu_max + "\n")
    assert team.available_threads(eight_cpus, eight_cpus / "self") == expected


def test_k2_the_least_limit_along_the_path_holds(eight_cpus):
    inner = eight_cpus / "a" / "b"
    inner.mkdir(parents=True)
    (eight_cpus / "self").write_text("0::/a/b\n")
    (eight_cpus / "a" / "cpu.max").write_text("300000 100000\n")
    (inner / "cpu.max").write_text("max 100000\n")
    assert team.available_threads(eight_cpus, eight_cpus / "self") == 3


def test_k2_cgroup_1_quota(eight_cpus):
    (eight_cpus / "cpu").mkdir()
    (eight_cpus / "cpu" / "cpu.cfs_quota_us").write_text("250000\n")
    (eight_cpus / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert team.available_threads(eight_cpus, eight_cpus / "self") == 2
    (eight_cpus / "cpu" / "cpu.cfs_quota_us").write_text("-1\n")
    assert team.available_threads(eight_cpus, eight_cpus / "self") == 8


def test_k2_affinity_and_hyper_threads(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3}, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    assert team.available_threads(tmp_path, tmp_path / "none") <= 4
    for cpu in range(4):
        (tmp_path / f"cpu{cpu}" / "topology").mkdir(parents=True)
        (tmp_path / f"cpu{cpu}" / "topology" / "thread_siblings_list").write_text(
            f"{cpu % 2},{cpu % 2 + 2}\n"
        )
    assert team._physical_cores([0, 1, 2, 3], tmp_path) == 2
    assert team._physical_cores([0, 1, 7], tmp_path) == 3


LIFE = """
import os, sys, time
import numpy as np
from ropewalk.backend.base import StepBatch
from ropewalk.backend.cpu import CpuBackend
from ropewalk.checkpoint.gguf import open_gguf
from ropewalk.model.config import ModelConfig
file = open_gguf(sys.argv[1])
backend = CpuBackend(file, ModelConfig.from_gguf(file.metadata, file.tensors), n_threads=2)
cache = backend.new_cache(1)
one = np.zeros(1, np.int32)
def step():
    return backend.forward(StepBatch(one, one, one, one[None], one), cache).copy()
first = step()
"""


def live(model: Path, code: str) -> str:
    run = subprocess.run(
        [sys.executable, "-c", LIFE + code, str(model)], capture_output=True, text=True, timeout=1500
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


def test_an_idle_team_uses_no_cpu(smollm2):
    """Once its threads have given up waiting, which may take them a while on a busy machine."""
    code = """
for _ in range(100):
    before = time.process_time()
    time.sleep(0.5)
    used = time.process_time() - before
    if used < 0.01:
        break
print(used)
"""
    assert float(live(smollm2, code)) < 0.01


def test_an_idle_member_wakes_less_and_less_often(monkeypatch):
    words = sync.new_sync(2)
    sleeps = []

    class Wake:
        def acquire(self, timeout):
            sleeps.append(timeout)
            words[sync.STOP] = len(sleeps) == 13
            return False

    monkeypatch.setattr(team, "run_steps", lambda tid, words, bell, spins: bell)
    team._serve(1, words, Wake(), ())
    assert sleeps == [min(0.05 * 2**i, 60.0) for i in range(13)]


def test_a_team_wakes_with_the_same_bits(smollm2):
    assert live(smollm2, "time.sleep(0.3); print(np.array_equal(step(), first))") == "True"


def test_a_forked_process_gets_threads_of_its_own(smollm2):
    code = """
pid = os.fork()
if pid == 0:
    os._exit(0 if np.array_equal(step(), first) else 1)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), np.array_equal(step(), first))
"""
    assert live(smollm2, code) == "0 True"


def test_a_team_that_is_dropped_ends_its_threads(smollm2):
    code = """
import threading
members = [t for t in threading.enumerate() if t.name.startswith("ropewalk")]
del backend
[member.join(300) for member in members]
print(len(members) > 0, any(member.is_alive() for member in members))
"""
    assert live(smollm2, code) == "True False"


@pytest.mark.parametrize(
    "end", ["raise SystemExit(0)", "sys.stdout.flush(); del backend", "backend.close(); backend.close()"]
)
def test_the_interpreter_ends_without_a_hang(smollm2, end):
    assert live(smollm2, end) == ""


def test_a_crowded_team_shrinks_and_tries_again(monkeypatch):
    """Steps spent waiting at barriers shrink the team; after a pause the full team is tried, ever more rarely."""
    clock = [0.0]
    monkeypatch.setattr(team.time, "monotonic", lambda: clock[0])
    crowding = team._Crowding(2)
    assert crowding.team_size() == 2
    crowding.note(2, 10, 100)  # a short wait is nothing
    assert crowding.team_size() == 2
    for _ in range(5):
        crowding.note(2, 90, 100)
    assert crowding.team_size() == 1
    pauses = []
    for _ in range(8):
        start = clock[0]
        while crowding.team_size() == 1:
            clock[0] += 0.05
        pauses.append(clock[0] - start)
        crowding.note(2, 90, 100)  # still crowded
    assert all(a <= b + 0.1 for a, b in itertools.pairwise(pauses))
    assert pauses[-1] == pytest.approx(team._Crowding.LONGEST_PAUSE_S, abs=0.1)
    while crowding.team_size() == 1:
        clock[0] += 0.05
    for _ in range(10):
        crowding.note(2, 0, 100)  # the neighbour has gone
    assert crowding.team_size() == 2


def test_more_threads_than_cpus_are_warned_of(monkeypatch):
    monkeypatch.setattr(team, "thread_limits", lambda: {"affinity": 4})
    team.warn_of_too_many(4)
    with pytest.warns(UserWarning, match="n_threads is 5, and this process may use 4 CPUs: it will be slow"):
        team.warn_of_too_many(5)
    most = team.MAX_THREADS_PER_CPU * 4
    with pytest.warns(UserWarning, match="it will be slow"):
        team.warn_of_too_many(most)
    with pytest.raises(InvalidParameterError, match=r"n_threads is 257; allowed: 1 \.\.\. 256"):
        team.warn_of_too_many(most + 1)
