"""The threads that run a step: how many, how they wait, how they end.

The calling thread is member 0 of its team. The others are Python threads that stay inside compiled code, without
the GIL, from one step to the next; after a moment without work they return and block on a semaphore, so that an
idle model uses no CPU. Knows nothing of models: a team is given the tables of `kernels.forward` and runs them.
"""

import atexit
import os
import threading
import time
import warnings
import weakref
from pathlib import Path

import numpy as np
from numba import types

from ropewalk.errors import InvalidParameterError
from ropewalk.kernels import sync
from ropewalk.kernels.forward import run_steps
from ropewalk.kernels.jit import kernel

FIRST_SLEEP_S = 0.05
LONGEST_SLEEP_S = 60.0
MAX_THREADS_PER_CPU = 64


def available_threads(
    cgroup: Path = Path("/sys/fs/cgroup"), self_cgroup: Path = Path("/proc/self/cgroup")
) -> int:
    """Threads that this process may really run at once, at least 1: the least of `thread_limits`."""
    return max(1, min(thread_limits(cgroup, self_cgroup).values()))


def warn_of_too_many(n_threads: int) -> None:
    """Warn if there are more threads than CPUs: each step waits for the last of them.

    Raises
    ------
    InvalidParameterError
        There are so many more that a step would seem to hang.
    """
    n_cpus = thread_limits()["affinity"]
    if n_threads > MAX_THREADS_PER_CPU * n_cpus:
        raise InvalidParameterError(
            f"n_threads is {n_threads}; allowed: 1 ... {MAX_THREADS_PER_CPU * n_cpus}, "
            f"{MAX_THREADS_PER_CPU} for each of the {n_cpus} CPUs that this process may use"
        )
    if n_threads > n_cpus:
        warnings.warn(
            f"n_threads is {n_threads}, and this process may use {n_cpus} CPUs: it will be slow", stacklevel=3
        )


def thread_limits(
    cgroup: Path = Path("/sys/fs/cgroup"), self_cgroup: Path = Path("/proc/self/cgroup")
) -> dict[str, int]:
    """What bounds the threads of this process, by name.

    The CPUs of its affinity mask; the physical cores among them (two hyper-threads share one memory pipeline);
    its cgroup's CPU quota (version 1 or 2), rounded down, if there is one.
    """
    cpus = (
        sorted(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else list(range(os.cpu_count() or 1))
    )
    limits = {"affinity": len(cpus), "physical cores": _physical_cores(cpus)}
    quota = _cgroup_quota(cgroup, self_cgroup)
    if quota is not None:
        limits["cgroup quota"] = int(quota)
    return limits


def _physical_cores(cpus: list[int], root: Path = Path("/sys/devices/system/cpu")) -> int:
    """Distinct cores among the CPUs; all of them where the system does not say."""
    cores = set()
    for cpu in cpus:
        try:
            cores.add((root / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text())
        except OSError:
            return len(cpus)
    return len(cores)


def _cgroup_quota(root: Path, self_cgroup: Path) -> float | None:
    """CPUs' worth of time that the cgroup may use: the least along its path; None without a limit."""
    quotas = []
    for folder in _cgroup_folders(root, self_cgroup):
        try:
            limit, period = (folder / "cpu.max").read_text().split()
        except (OSError, ValueError):
            try:
                limit = (folder / "cpu.cfs_quota_us").read_text().strip()
                period = (folder / "cpu.cfs_period_us").read_text().strip()
            except OSError:
                continue
        try:
            if limit != "max" and int(limit) > 0 and int(period) > 0:
                quotas.append(int(limit) / int(period))
        except ValueError:
            continue
    return min(quotas, default=None)


def _cgroup_folders(root: Path, self_cgroup: Path) -> list[Path]:
    """Folders whose limits hold for this process: its own cgroup and every one above, in both versions' trees."""
    folders = {root, root / "cpu", root / "cpu,cpuacct"}
    try:
        lines = self_cgroup.read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        tree = root if not controllers else root / controllers
        if controllers and "cpu" not in controllers.split(","):
            continue
        folder = tree
        for part in Path(path).parts[1:]:
            if part == "..":
                break
            folder = folder / part
            folders.add(folder)
    return sorted(folders)


@kernel
def swap_word(words, index, value):
    """Set a shared word and give what it held before."""
    return sync.atomic_swap(words, index, value)


@kernel
def read_word(words, index):
    return sync.atomic_load(words, index)


def compile_words() -> None:
    """Compile (or load) the two above ahead of their first call."""
    words = types.Array(types.int64, 1, "C")
    swap_word.compile((words, types.int64, types.int64))
    read_word.compile((words, types.int64))


class _Crowding:
    """Notices that other processes hold some of our cores, and makes do with fewer threads for a while.

    At a barrier everybody waits for the thread whose core was taken away, often for a whole time slice. When most of
    the last steps went by in such waits, fewer threads are faster; the full team is tried again after a pause that
    doubles up to `LONGEST_PAUSE_S`. Results do not depend on the number of threads.
    """

    CROWDED = 0.3  # share of the time waited, above which a smaller team is tried
    LONGEST_PAUSE_S = 4.0

    def __init__(self, n_threads: int) -> None:
        self.n_threads = n_threads
        self._waiting = 0.0  # running mean of the share of time waited
        self._pause_s = 0.25
        self._alone_until = 0.0

    def team_size(self) -> int:
        if self._waiting <= self.CROWDED:
            return self.n_threads
        if time.monotonic() < self._alone_until:
            return max(1, self.n_threads // 2)
        self._waiting = self.CROWDED  # try the full team: the next steps decide
        return self.n_threads

    def note(self, active: int, waited_ns: int, elapsed_ns: int) -> None:
        if active < self.n_threads or elapsed_ns <= 0:
            return
        self._waiting += 0.3 * (waited_ns / elapsed_ns - self._waiting)
        if self._waiting > self.CROWDED:
            self._alone_until = time.monotonic() + self._pause_s
            self._pause_s = min(2 * self._pause_s, self.LONGEST_PAUSE_S)
        elif self._waiting < self.CROWDED / 3:
            self._pause_s = 0.25


class Team:
    """`n_threads` threads, the caller included, over one set of tables.

    Parameters
    ----------
    n_threads : int
        At least 1.
    job, layers, matrices : int64 arrays
        The tables of `kernels.tables`; `job` is filled in anew by the caller before each `step`.
    """

    def __init__(self, n_threads: int, job: np.ndarray, layers: np.ndarray, matrices: np.ndarray) -> None:
        self.n_threads = n_threads
        self._tables = (job, layers, matrices)
        self._threads: list[threading.Thread] = []
        self._start()
        _teams.add(self)

    def _start(self) -> None:
        self._pid = os.getpid()
        self._crowding = _Crowding(self.n_threads)
        self._words = sync.new_sync(self.n_threads)
        self._steps = 0
        self._wake = [threading.Semaphore(0) for _ in range(self.n_threads)]
        self._threads = []
        for tid in range(1, self.n_threads):
            thread = threading.Thread(
                target=_serve,
                args=(tid, self._words, self._wake[tid], self._tables),
                name=f"ropewalk-{tid}",
                daemon=True,
            )
            thread.start()
            self._threads.append(thread)

    def step(self) -> None:
        """Run one step to its end. Only one thread may call this at a time."""
        if self._pid != os.getpid():  # threads do not survive a fork
            self._start()
        active = self._crowding.team_size()
        self._steps += 1
        self._words[sync.WAITED] = 0
        self._wake_sleepers(active)
        start = time.perf_counter_ns()
        run_steps(0, self._words, *self._tables, self._steps * sync.BELL_STEP + active, 0)
        self._crowding.note(active, int(self._words[sync.WAITED]), time.perf_counter_ns() - start)

    def close(self) -> None:
        """End the threads; harmless when called twice."""
        for thread in self._dismiss():
            thread.join(timeout=10)
        _teams.discard(self)

    def __del__(self) -> None:
        self._dismiss()  # without waiting: the garbage may be collected by one of the threads themselves

    def _dismiss(self) -> list[threading.Thread]:
        """Tell the threads to end, and return those that were told now."""
        threads, self._threads = self._threads, []
        if not threads or self._pid != os.getpid():
            return []
        swap_word(self._words, sync.STOP, 1)
        self._wake_sleepers(self.n_threads)
        return threads

    def _wake_sleepers(self, active: int) -> None:
        for tid in range(1, active):
            if swap_word(self._words, sync.ASLEEP + sync.LINE * tid, 0):
                self._wake[tid].release()


def _serve(tid, words, wake, tables):
    """A member's life: steps in compiled code, sleep when there are none.

    The bell rings in compiled code, so that an interrupt can never come between it and the caller's own part. A member
    that fell asleep after the caller looked for sleepers finds the bell when its sleep times out: sleeps double, so
    that the step waits about as long as the caller took from looking to ringing, and an idle team hardly wakes.
    """
    asleep = sync.ASLEEP + sync.LINE * tid
    bell = 0
    while not read_word(words, sync.STOP):
        bell = run_steps(tid, words, *tables, bell, sync.SPINS_BEFORE_SLEEP)
        swap_word(words, asleep, 1)
        sleep_s = FIRST_SLEEP_S
        while read_word(words, sync.BELL) == bell and not read_word(words, sync.STOP):
            if wake.acquire(timeout=sleep_s):
                break
            sleep_s = min(2 * sleep_s, LONGEST_SLEEP_S)
        swap_word(words, asleep, 0)


_teams: "weakref.WeakSet[Team]" = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for team in list(_teams):
        team.close()
