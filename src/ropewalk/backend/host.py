"""How much memory this process may still take on its machine.

The least of what the kernel calls available and of what is left below each memory limit of the process's control
groups, version 1 or 2. A group's usage counts file pages that would be dropped first; they are taken off.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path


def available_bytes(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that can be allocated without pushing anything out; on systems that do not say, all of the memory."""
    return max(0, min([_of_machine(proc / "meminfo"), *_below_limits(proc / "self" / "cgroup", cgroup)]))


def _of_machine(meminfo: Path) -> int:
    try:
        lines = meminfo.read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _below_limits(own: Path, root: Path) -> Iterator[int]:
    """What is left in each group with a limit, from the root down to our own."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            folder, names = root, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            folder = root / "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        for part in ("", *Path(path).parts[1:]):
            folder = folder / part
            try:
                limit, used = (int((folder / name).read_text()) for name in names[:2])
                yield limit - used + _statistic(folder / "memory.stat", names[2])
            except (OSError, ValueError):  # no such file, or a limit of "max"
                continue


def _statistic(file: Path, name: str) -> int:
    return next(
        (int(line.split()[1]) for line in file.read_text().splitlines() if line.split()[0] == name), 0
    )
