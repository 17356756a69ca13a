"""Free memory: the least of the machine's and what is left below each limit, in made-up trees."""

from ropewalk.backend.host import available_bytes


def write(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def machine(tmp_path, own, kib=1000):
    write(tmp_path / "proc", meminfo=f"MemTotal: 9999 kB\nMemAvailable:    {kib} kB\n")
    write(tmp_path / "proc" / "self", cgroup=own)
    return {"proc": tmp_path / "proc", "cgroup": tmp_path / "cgroup"}


def test_what_the_kernel_calls_available(tmp_path):
    assert available_bytes(**machine(tmp_path, "0::/\n")) == 1000 * 1024


def test_version_2_limits_of_every_group_above(tmp_path):
    places = machine(tmp_path, "0::/a/b\n")
    stat = "anon 5\ninactive_file 100\n"
    write(tmp_path / "cgroup" / "a", memory__max="9000", memory__current="4000", memory__stat=stat)
    write(tmp_path / "cgroup" / "a" / "b", memory__max="max", memory__current="4000", memory__stat=stat)
    assert available_bytes(**places) == 9000 - 4000 + 100


def test_version_1_limits(tmp_path):
    places = machine(tmp_path, "5:cpu:/x\n4:hugetlb,memory:/a\n0::/\n")
    write(
        tmp_path / "cgroup" / "memory" / "a",
        memory__limit_in_bytes="8000",
        memory__usage_in_bytes="9000",
        memory__stat="inactive_file 7\ntotal_inactive_file 300\n",
    )
    assert available_bytes(**places) == 0
    (tmp_path / "cgroup" / "memory" / "a" / "memory.usage_in_bytes").write_text("1000")
    assert available_bytes(**places) == 8000 - 1000 + 300


def test_this_machine():
    assert available_bytes() > 2**20
