"""Models named `hf.co/owner/repo[:file]`: choose the files, fetch them through huggingface_hub, check them.

A repository's model is its `.gguf` file, or, where it has none or `:safetensors` is asked for, the folder of
`config.json`, tokenizer files and `*.safetensors`.

The library's own settings apply: HF_ENDPOINT, HF_TOKEN, proxies, offline mode. Files are fetched into the
workspace, where the library resumes interrupted downloads, compared with the SHA-256 that the hub states, and
then moved to `models/hf.co/owner/repo/`. A model that is there is used without asking the hub.

This module does not know the catalog.
"""

import errno
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from ropewalk.checkpoint.store import Progress, models_dir, publish, require_space, sha256, watched, workspace
from ropewalk.errors import DownloadError, ModelNotFoundError

if TYPE_CHECKING:
    from huggingface_hub import HfApi

PREFIX = "hf.co/"
_REFERENCE = re.compile(r"hf\.co/(?P<owner>[\w.-]+)/(?P<repo>[\w.-]+?)(:(?P<file>.+))?", re.ASCII)
# Left to `workspace`, which knows what to do about them.
_DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS}
_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")
_INDEX = "model.safetensors.index.json"
_BESIDE = {
    _INDEX,
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
}
_BELOW = re.compile(r"1_Pooling/config\.json|additional_chat_templates/[\w-]+\.jinja", re.ASCII)
FOLDER = "safetensors"
"""What stands in place of a file for the folder itself."""
_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)


@dataclass(frozen=True)
class Reference:
    """A repository on the hub and, if given, a file in it or the name of a quantization."""

    owner: str
    repo: str
    file: str | None

    @classmethod
    def parse(cls, text: str) -> "Reference":
        """Read `hf.co/owner/repo[:file]`; raises `ModelNotFoundError` for anything else."""
        match = _REFERENCE.fullmatch(text)
        if not match or {match["owner"], match["repo"]} & {".", ".."}:
            raise ModelNotFoundError(
                f"{text!r} does not name a model; write hf.co/OWNER/REPO or hf.co/OWNER/REPO:FILE"
            )
        return cls(match["owner"], match["repo"], match["file"])

    def __str__(self) -> str:
        return f"{PREFIX}{self.id}" + (f":{self.file}" if self.file else "")

    @property
    def id(self) -> str:
        """`owner/repo`, as the hub calls it."""
        return f"{self.owner}/{self.repo}"

    @property
    def folder(self) -> Path:
        """Where its files are in the cache."""
        return models_dir() / "hf.co" / self.owner / self.repo


def split_sets(files: Iterable[str]) -> dict[str, list[str]]:
    """Group the .gguf files of a list into models, each by its first file: split files belong together."""
    models: dict[str, list[str]] = {}
    for file in sorted(files):
        if file.lower().endswith(".gguf"):
            match = _SHARD.fullmatch(file)
            first = f"{match['stem']}-00001-of-{match['count']}.gguf" if match else file
            models.setdefault(first, []).append(file)
    return models


def folder_files(files: Iterable[str]) -> list[str]:
    """Choose, from all files of a repository, those of the model in Hugging Face's layout; [] if it has none.

    `config.json` comes last: where it is, everything else is.
    """
    files = set(files)
    top = {f for f in files if "/" not in f}
    weights = sorted(f for f in top if _WEIGHTS.fullmatch(f))
    if not weights:
        weights = sorted(f for f in top if f.endswith(".safetensors"))[:2]
    if "config.json" not in top or not weights or (len(weights) > 1 and _INDEX not in top):
        return []
    below = sorted(f for f in files if _BELOW.fullmatch(f))
    return [*weights, *sorted(top & _BESIDE), *below, "config.json"]


def local_folder(folder: Path) -> list[Path]:
    """Return the files of a model in Hugging Face's layout that was fetched before, `config.json` first."""
    if not (folder / "config.json").is_file():
        return []
    names = folder_files(
        p.relative_to(folder).as_posix()
        for p in [*folder.iterdir(), *folder.glob("*/*.json"), *folder.glob("*/*.jinja")]
    )
    return [folder / name for name in reversed(names)]


def _is_complete(files: list[str]) -> bool:
    match = _SHARD.fullmatch(files[0])
    return len(files) == (int(match["count"]) if match else 1)


def choose(models: Iterable[str], wanted: str | None) -> list[str]:
    """Return the models, given by their first files, that `wanted` can mean: best kind of match only.

    A match is the path, the file name with or without .gguf, or a quantization such as Q4_K_M at the end of
    the name. With nothing wanted, all models match except projectors for images.
    """
    models = list(models)
    if wanted is None:
        return [m for m in models if not PurePosixPath(m).name.startswith("mmproj")]
    want = wanted.lower().removesuffix(".gguf")

    def bare(model: str) -> str:
        match = _SHARD.fullmatch(model)
        return (match["stem"] if match else model.removesuffix(".gguf")).lower()

    exact = [m for m in models if want in (m.lower().removesuffix(".gguf"), bare(m))]
    named = [m for m in models if want in (PurePosixPath(m).stem.lower(), PurePosixPath(bare(m)).name)]
    tagged = [m for m in models if re.search(rf"[-._]{re.escape(want)}$", bare(m))]
    return exact or named or tagged


def local_models(folder: Path) -> dict[str, list[Path]]:
    """Return the complete models in a folder: the files of each, by the path of the first from the folder."""
    names = [p.relative_to(folder).as_posix() for p in folder.rglob("*.gguf")] if folder.is_dir() else []
    return {m: [folder / f for f in files] for m, files in split_sets(names).items() if _is_complete(files)}


def find(reference: Reference) -> Path | None:
    """Return the first file of the model, or its folder, if it was fetched before and only one can be meant."""
    models = local_models(reference.folder)
    matches = choose(models, reference.file) if reference.file != FOLDER else []
    if len(matches) == 1:
        return models[matches[0]][0]
    as_folder = reference.file == FOLDER or (reference.file is None and not models)
    return reference.folder if as_folder and local_folder(reference.folder) else None


def fetch(reference: Reference, progress: Progress) -> Path:
    """Fetch a model from the hub, all files of it, and return the first one or, in HF's layout, the folder.

    Raises
    ------
    ModelNotFoundError
        If the repository does not exist, has no model that can be read, or has several that can be meant.
    DownloadError
        If the hub cannot be reached or refuses, or what came is not what the hub announced.
    """
    with workspace(f"hf.co/{reference.owner}/{reference.repo}", progress) as work, _hub_errors(reference):
        from huggingface_hub import HfApi

        api = HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None)
        info = api.model_info(reference.id, files_metadata=True)
        known = {s.rfilename: s for s in info.siblings or []}
        files = (
            _one_model(reference, split_sets(known)) if _wants_gguf(reference, known) else folder_files(known)
        )
        if not files:
            raise ModelNotFoundError(_no_model(reference, known))
        targets = [reference.folder / f for f in files]
        missing = [(f, t) for f, t in zip(files, targets, strict=True) if not t.exists()]
        total = sum(known[f].size or 0 for f, _ in missing)
        require_space(work, total)
        done = 0
        for file, target in missing:
            size = known[file].size or 0
            with watched(work, f"downloading {reference}", done, size, total, progress):
                path = _download(api, reference, file, info.sha, work)
            lfs = known[file].lfs
            _check(path, reference, file, known[file].size, lfs.sha256 if lfs else None)
            publish(path, target)
            done += size
        # All there: the library's records of what it had fetched are of no more use.
        shutil.rmtree(work, ignore_errors=True)
        return targets[0] if files[-1] != "config.json" else reference.folder


def _wants_gguf(reference: Reference, files: Iterable[str]) -> bool:
    has_gguf = any(f.lower().endswith(".gguf") for f in files)
    return reference.file != FOLDER and (has_gguf or reference.file is not None)


def _no_model(reference: Reference, files: Iterable[str]) -> str:
    """Why a repository has nothing for us."""
    name = f"{PREFIX}{reference.id}"
    if any(f.endswith((".bin", ".pt", ".pth")) and "/" not in f for f in files):
        return f"{name} has only pickled PyTorch weights, which are not read; look for a repository with safetensors"
    return f"{name} has neither a .gguf file nor config.json with model.safetensors"


def _one_model(reference: Reference, models: dict[str, list[str]]) -> list[str]:
    complete = {m: files for m, files in models.items() if _is_complete(files) and _is_safe(m)}
    if not complete:
        raise ModelNotFoundError(f"{PREFIX}{reference.id} has no .gguf file; other formats are not read")
    matches = choose(complete, reference.file)
    if len(matches) == 1:
        return complete[matches[0]]
    what = f"no file matches {reference.file!r}" if reference.file else "it has several .gguf files"
    if matches and reference.file:
        what = f"several files match {reference.file!r}"
    choices = "\n  ".join(f"{PREFIX}{reference.id}:{m}" for m in matches or complete)
    raise ModelNotFoundError(f"{reference}: {what}; choose one of\n  {choices}")


def _is_safe(file: str) -> bool:
    """Whether a name from the hub stays inside the folder it is put in."""
    path = PurePosixPath(file)
    return not path.is_absolute() and ".." not in path.parts and "\\" not in file and ":" not in file


def _download(api: "HfApi", reference: Reference, file: str, revision: str | None, work: Path) -> Path:
    from huggingface_hub.utils.tqdm import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    quiet = are_progress_bars_disabled()
    if not quiet:
        disable_progress_bars()
    try:
        return Path(api.hf_hub_download(reference.id, file, revision=revision, local_dir=work))
    finally:
        if not quiet:
            enable_progress_bars()


def _check(path: Path, reference: Reference, file: str, size: int | None, digest: str | None) -> None:
    n_bytes = path.stat().st_size
    problem = None
    if size is not None and n_bytes != size:
        problem = f"{n_bytes} bytes instead of {size}"
    elif digest and (got := sha256(path)) != digest:
        problem = f"SHA-256 {got} instead of {digest}"
    if problem:
        path.unlink()
        raise DownloadError(
            f"{file} of {PREFIX}{reference.id} came with {problem}; the download was discarded: try again"
        )


@contextmanager
def _hub_errors(reference: Reference) -> Iterator[None]:
    """Turn the many errors of huggingface_hub and its HTTP library into ours."""
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    try:
        yield
    except (DownloadError, ModelNotFoundError):
        raise
    except GatedRepoError as e:
        raise DownloadError(
            f"{PREFIX}{reference.id} asks its users to accept conditions: do so on its web page, "
            f"then set HF_TOKEN to a token of that account"
        ) from e
    except RepositoryNotFoundError as e:
        raise ModelNotFoundError(
            f"the hub has no repository {reference.id}, or it is private: then set HF_TOKEN"
        ) from e
    except Exception as e:
        if isinstance(e, OSError) and e.errno in _DISK_ERRORS:
            raise
        raise DownloadError(f"{PREFIX}{reference.id} could not be fetched: {type(e).__name__}: {e}") from e
