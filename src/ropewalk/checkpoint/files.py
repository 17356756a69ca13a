"""Model files as read-only memory maps, small files beside them, and what a file that is no model file seems to be.

The files must not be cut short while they are open: reading a mapped page that no longer exists stops the
process, as with any memory map. This module does not know what the bytes mean.
"""

import mmap
import stat
from pathlib import Path

from ropewalk.checkpoint.cursor import show
from ropewalk.errors import CheckpointError, ModelNotFoundError

MAX_READ_BYTES = 1 << 27


def read_file(path: Path) -> bytes:
    """Read all of a file that is not mapped: a tokenizer, a configuration, a template.

    Raises
    ------
    CheckpointError
        If it has more than `MAX_READ_BYTES`, or cannot be read.
    """
    try:
        if (n_bytes := path.stat().st_size) > MAX_READ_BYTES:
            raise CheckpointError(f"{path} has {n_bytes} bytes; allowed: up to {MAX_READ_BYTES}")
        return path.read_bytes()
    except OSError as e:
        raise CheckpointError(f"{path} cannot be read: {e.strerror or e}") from e


def map_file(path: Path, kind: str) -> mmap.mmap:
    """Map a file of some `kind` ("GGUF", "safetensors") for reading.

    Raises
    ------
    ModelNotFoundError
        If there is no such file.
    CheckpointError
        If it is a folder, empty, no regular file, or cannot be read.
    """
    try:
        status = path.stat()
        if stat.S_ISREG(status.st_mode) and status.st_size:
            with path.open("rb") as f:
                return mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise ModelNotFoundError(f"there is no file {path}") from None
    except (OSError, ValueError) as e:
        raise CheckpointError(f"{path} cannot be read: {getattr(e, 'strerror', None) or e}") from e
    if stat.S_ISDIR(status.st_mode):
        raise CheckpointError(f"{path} is a folder, not a {kind} file{_files_within(path)}")
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{path} is not a regular file, so it cannot be mapped")
    raise CheckpointError(f"{path} is an empty file, not a {kind} file")


def _files_within(folder: Path) -> str:
    try:
        names = sorted(p.name for p in folder.iterdir() if p.suffix == ".gguf")
    except OSError:
        return ""
    return f"; it contains {', '.join(names[:5])}{', …' if len(names) > 5 else ''}" if names else ""


def release_map(data: mmap.mmap) -> None:
    """Give back the memory of the pages read so far; they are read again from the file when needed."""
    if hasattr(mmap, "MADV_DONTNEED"):
        data.madvise(mmap.MADV_DONTNEED)


def what_else(start: bytes) -> str:
    """Say what a file that is not of the expected kind seems to be, from its first bytes (512 are plenty)."""
    text = start.lstrip().lower()
    if start.startswith(b"version https://git-lfs"):
        return "it is a Git LFS pointer; fetch the real file with `git lfs pull`"
    if text.startswith((b"<!doctype", b"<html", b"<?xml")):
        return "it is a web page, probably an error page saved under the model's name; download it again"
    if start.startswith(b"GGUF"):
        return "it is a GGUF file; give it a name that ends in .gguf"
    if start[8:10] == b'{"' and int.from_bytes(start[:8], "little") < 1 << 32:
        return "it is a safetensors file; give the folder that holds it, with its config.json"
    if text.startswith(b"{"):
        return "it is JSON; give the folder that holds it, with its weights"
    if start.startswith(b"PK\x03\x04"):
        return "it is a zip archive (a PyTorch checkpoint, or a wheel that still holds the model)"
    if start[:4] in (b"lmgg", b"fmgg", b"tjgg", b"algg"):
        return "it is a GGML file from before GGUF; convert the model again"
    if start[:4] == b"FUGG":
        return "its magic is reversed: a big-endian file; only little-endian files are read"
    return f"it starts with {show(start[:8])}"
