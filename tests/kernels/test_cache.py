"""Compiled kernels on disk: when they are the right ones, where they go, and processes that share them."""

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from ropewalk.kernels import cache, cpu
from ropewalk.kernels.jit import kernel


@pytest.fixture
def home(monkeypatch, tmp_path):
    """An empty home for compiled kernels, forgotten afterwards."""
    monkeypatch.setenv("ROPEWALK_HOME", str(tmp_path))
    for function in (cache.cache_folder, cache._warn_once):
        function.cache_clear()
    yield tmp_path
    cache.cache_folder.cache_clear()


# ---- what the folder's name depends on


@pytest.fixture
def sources(tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.py").write_text(f"{name} = 1\n")
    return tmp_path


def test_the_key_is_the_same_for_the_same_sources(sources):
    assert cache.source_hash(sources) == cache.source_hash(sources)


def test_the_key_changes_with_any_source(sources):
    before = cache.source_hash(sources)
    (sources / "b.py").write_text("b = 2\n")
    edited = cache.source_hash(sources)
    (sources / "b.py").rename(sources / "c.py")
    assert len({before, edited, cache.source_hash(sources)}) == 3


@pytest.mark.parametrize(
    ("where", "name", "value"),
    [
        (cache.numba, "__version__", "0.1"),
        (cache.llvmlite, "__version__", "0.1"),
        (cache.sys, "version", "3.99"),
        (cache, "cpu_identity", lambda: ("an-other-cpu", "")),
        (cache, "choose_rung", lambda: cpu.Rung("an-other-rung", "")),
    ],
)
def test_the_key_changes_with_versions_cpu_and_rung(sources, monkeypatch, where, name, value):
    before = cache.source_hash(sources)
    monkeypatch.setattr(where, name, value)
    assert cache.source_hash(sources) != before


# ---- where the folder is


def test_a_home_that_cannot_be_written_gives_a_temporary_folder_and_one_line(
    home, monkeypatch, tmp_path, caplog
):
    (home / "file").write_text("")
    monkeypatch.setenv("ROPEWALK_HOME", str(home / "file"))  # nothing can be made below a file
    monkeypatch.setattr(cache.tempfile, "gettempdir", lambda: str(tmp_path))
    folder = cache.cache_folder()
    assert folder.parent == tmp_path / f"ropewalk-kernels-{os.getuid()}"
    assert folder.parent.stat().st_mode & 0o777 == 0o700
    assert cache.cache_folder() == folder
    assert len(caplog.records) == 1
    assert "cannot be written" in caplog.text


@pytest.mark.parametrize("spoil", ["others may write", "a link"])
def test_a_temporary_folder_that_others_control_is_refused(home, monkeypatch, tmp_path, spoil):
    monkeypatch.setattr(cache.tempfile, "gettempdir", lambda: str(tmp_path))
    folder = tmp_path / f"ropewalk-kernels-{os.getuid()}"
    if spoil == "a link":
        folder.symlink_to(tmp_path)
    else:
        folder.mkdir()
        folder.chmod(0o777)
    with pytest.raises(PermissionError, match="set ROPEWALK_HOME"):
        cache._private_temporary_folder()


def test_folders_unused_for_thirty_days_go_when_a_new_one_is_made(home):
    old, recent = (home / "kernels" / (letter * 20) for letter in "ab")
    other = home / "kernels" / "mine"
    for folder, days in ((old, 31), (recent, 29), (other, 99)):
        folder.mkdir(parents=True)
        (folder / "x.nbc").write_bytes(b"1234")
        os.utime(folder, (time.time() - 86400 * days,) * 2)
    folder = cache.cache_folder()
    assert sorted(p.name for p in (home / "kernels").iterdir()) == sorted(["b" * 20, "mine", folder.name])
    (folder / "y.nbc").write_bytes(b"12")
    assert cache.cache_bytes() == (2, 10)


def test_using_a_folder_keeps_it(home):
    folder = cache.cache_folder()
    os.utime(folder, (0, 0))
    cache.cache_folder.cache_clear()
    assert cache.cache_folder() == folder
    assert time.time() - folder.stat().st_mtime < 100


# ---- functions on disk


def compiled():
    """A new kernel of the same source each time, which knows nothing of what an earlier one compiled."""

    @kernel
    def double(x):
        return 2 * x

    return double


def files(home: Path) -> list[Path]:
    return sorted(home.rglob("*.nbc*"))


def hits(dispatcher) -> int:
    return sum(dispatcher.stats.cache_hits.values())


def test_a_compiled_function_is_loaded_again(home):
    assert compiled()(21) == 42
    assert len(files(home)) == 1
    again = compiled()
    assert again(4) == 8
    assert hits(again) == 1
    assert again(0.25) == 0.5
    assert hits(again) == 1
    assert len(files(home)) == 2


@pytest.mark.parametrize("damage", [b"", b"junk", None])
def test_a_damaged_file_is_compiled_anew(home, damage, caplog):
    compiled()(21)
    (path,) = files(home)
    path.write_bytes(path.read_bytes()[:-1] if damage is None else damage)
    again = compiled()
    assert again(21) == 42
    assert hits(again) == 0
    assert "is damaged" in caplog.text
    healed = compiled()
    assert healed(21) == 42
    assert hits(healed) == 1


def test_a_folder_that_was_filled_and_is_read_only_now_is_used(home, monkeypatch, caplog):
    compiled()(21)
    read_only(home, monkeypatch)
    again = compiled()
    assert again(21) == 42
    assert hits(again) == 1
    assert not caplog.records
    assert again(0.25) == 0.5  # a signature that is not there costs a compilation, and one line
    assert again(np.float32(0.25)) == 0.5
    assert len(caplog.records) == 1
    assert "cannot be kept" in caplog.text
    assert len(files(home)) == 1


def read_only(home, monkeypatch):
    """Make the folder read-only: by its mode, and for root, whom that does not stop, by refusing to open."""
    cache.cache_folder().chmod(0o500)
    cache.cache_folder.cache_clear()

    def refuse(*arguments, **more):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(cache.tempfile, "TemporaryFile", refuse)
    path_open = Path.open
    monkeypatch.setattr(
        Path,
        "open",
        lambda path, mode="r", **more: refuse() if "x" in mode else path_open(path, mode, **more),
    )


# ---- several processes


LOGITS = """
import sys, time
import numpy as np
from ropewalk import LLM
from ropewalk.kernels.cache import cache_folder
while time.time() < float(sys.argv[2]):
    pass
with LLM(sys.argv[1], n_threads=1) as llm:
    ready = sorted(p.name for p in cache_folder().glob("*.nbc"))
    print(llm.logits([1, 2, 3, 4, 5]).tobytes().hex())
    assert sorted(p.name for p in cache_folder().glob("*.nbc")) == ready, "a step compiled something"
"""


def test_two_processes_that_start_at_once_on_an_empty_cache(smollm2, tmp_path):
    """Both compile the same functions into the same files, and get the same bits; so does a third that loads them."""

    def start():
        environment = {**os.environ, "ROPEWALK_HOME": str(tmp_path)}
        command = [sys.executable, "-c", LOGITS, str(smollm2), str(when)]
        return subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    when = time.time() + 3
    both = [start(), start()]
    results = [process.communicate(timeout=1500) for process in both]
    names = [path.name for path in files(tmp_path)]
    assert names and all(name.endswith(".nbc") for name in names)
    results.append(start().communicate(timeout=1500))
    assert [errors for _, errors in results] == ["", "", ""]
    assert len({logits for logits, _ in results}) == 1
    assert [path.name for path in files(tmp_path)] == names
