"""What every model file looks like from above, whatever its format, and how to open one.

A `Checkpoint` has metadata under GGUF's keys and tensors under GGUF's names, each in a block format of
`quants`. GGUF files are that already; a folder in Hugging Face's layout is presented so by `folder`. So
nothing above this package knows which of the two a model came in.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

from ropewalk.checkpoint.gguf import open_gguf
from ropewalk.checkpoint.header import TensorInfo
from ropewalk.errors import CheckpointError

__all__ = ["Checkpoint", "TensorInfo", "open_checkpoint"]


class Checkpoint(Protocol):
    """An open model, in GGUF's terms whatever its format is; a context manager. `gguf.GGUF` was the first."""

    @property
    def path(self) -> Path:
        """What was opened: a file, the first of several, or a folder."""

    @property
    def paths(self) -> tuple[Path, ...]:
        """All files with weights."""

    @property
    def metadata(self) -> Mapping[str, object]:
        """Values by GGUF's keys: numbers, booleans, text, and arrays of them."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """What is known of each tensor, by GGUF's names."""

    @property
    def file_bytes(self) -> int:
        """Size of all of `paths`."""

    @property
    def kind(self) -> str:
        """The format, for people: "GGUF version 3"."""

    def raw(self, name: str) -> NDArray[np.uint8]:
        """Blocks of a tensor as they are stored, uint8 [rows, bytes of a row]."""

    def tensor(self, name: str) -> NDArray[np.float32]:
        """A tensor as float32, in its own shape (slowest axis first)."""

    def release(self) -> None:
        """Give back memory of what was read so far; it is read again when needed."""

    def close(self) -> None:
        """Close the files; arrays that `raw` gave must not be used any more."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Open a GGUF file, a folder in Hugging Face's layout, or the weights in such a folder.

    Parameters
    ----------
    path : str or os.PathLike
        A `.gguf` file; a folder with `config.json` and `*.safetensors`; a `.safetensors` file or a
        `.safetensors.index.json` beside a `config.json`; or a folder that holds exactly one GGUF model.

    Raises
    ------
    ModelNotFoundError, CheckpointError, UnsupportedModelError
        As `open_gguf` and `open_folder` do.
    """
    path = Path(path)
    if path.is_dir():
        if (path / "config.json").is_file() or not (found := _gguf_files(path)):
            from ropewalk.checkpoint.folder import open_folder

            return open_folder(path)
        if len(found) > 1:
            names = ", ".join(p.name for p in found[:5])
            raise CheckpointError(f"{path} is a folder with several GGUF models; name one of them: {names}")
        return open_gguf(found[0])
    if path.name.endswith((".safetensors", ".safetensors.index.json")):
        from ropewalk.checkpoint.folder import open_folder

        return open_folder(path.parent, weights=path)
    return open_gguf(path)


def _gguf_files(folder: Path) -> list[Path]:
    """The GGUF models of a folder: whole files, and the first part of split ones."""
    files = sorted(folder.glob("*.gguf"))
    return [p for p in files if "-of-" not in p.stem or "-00001-of-" in p.stem]
