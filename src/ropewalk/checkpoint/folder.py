"""A folder in Hugging Face's layout, presented as GGUF: `config.json`, safetensors, tokenizer and template files.

`open_folder` translates the configuration (`hf_config`), the tokenizer (`hf_tokenizer`) and the tensors'
names (`names`), joins the pieces of pre-quantized weights (`prequantized`), and gives a `Checkpoint`. Tensors
are put together when they are asked for (`assemble`); those that are stored as they are needed are views of
the file.
"""

import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ropewalk.checkpoint.assemble import F32, Assembly, Source
from ropewalk.checkpoint.cursor import show
from ropewalk.checkpoint.header import TensorInfo
from ropewalk.checkpoint.hf_config import Translated, translate
from ropewalk.checkpoint.hf_tokenizer import tokenizer_metadata
from ropewalk.checkpoint.hf_values import Config, read_object
from ropewalk.checkpoint.names import IGNORED, OTHER_SENSES, STEPS, TABLES, TEXT_PREFIXES, Names
from ropewalk.checkpoint.prequantized import join
from ropewalk.checkpoint.quants import dequantize
from ropewalk.checkpoint.safetensors import SafeTensors, open_safetensors
from ropewalk.closing import Closing
from ropewalk.errors import CheckpointError, UnsupportedModelError

_POOLINGS = {"pooling_mode_mean_tokens": 1, "pooling_mode_cls_token": 2, "pooling_mode_lasttoken": 3}
"""Keys of `1_Pooling/config.json`, and the numbers of GGUF's `pooling_type`."""
_SAMPLING = {
    "temperature": ("temp", float, 100.0),
    "top_k": ("top_k", int, 2**31 - 1),
    "top_p": ("top_p", float, 1.0),
    "min_p": ("min_p", float, 1.0),
    "repetition_penalty": ("penalty_repeat", float, 100.0),
}
"""Keys of `generation_config.json`; their names below GGUF's `general.sampling`, their types and largest values."""


class HuggingFaceFolder(Closing):
    """An open model; made by `open_folder`. See `base.Checkpoint`.

    Attributes
    ----------
    path : pathlib.Path
        The folder.
    paths : tuple of pathlib.Path
        The files with the weights.
    metadata : Mapping[str, object]
        Under GGUF's keys.
    tensors : Mapping[str, TensorInfo]
        Under GGUF's names. `offset` and `shard` are 0: a tensor may come from several places.
    """

    def __init__(
        self, path: Path, stored: SafeTensors, metadata: dict[str, object], assemblies: dict[str, Assembly]
    ) -> None:
        self.path = path
        self.paths = stored.paths
        self.metadata: Mapping[str, object] = MappingProxyType(metadata)
        self._assemblies = assemblies
        infos = {}
        for name, assembly in assemblies.items():
            shape, fmt = assembly.shape, assembly.format
            n_bytes = int(np.prod(shape[:-1], dtype=object)) * fmt.row_bytes(shape[-1])
            infos[name] = TensorInfo(name, shape, fmt, 0, n_bytes)
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(infos)
        self._stored = stored
        self.file_bytes = stored.file_bytes

    @property
    def kind(self) -> str:
        """What people call the format."""
        n = len(self.paths)
        return "safetensors" if n == 1 else f"safetensors in {n} files"

    def raw(self, name: str) -> NDArray[np.uint8]:
        """Return a tensor's rows in its format: uint8 `[*shape[:-1], row_bytes]`, a view or freshly made.

        Raises
        ------
        CheckpointError
            If there is no such tensor, or the folder was closed.
        """
        try:
            return self._assemblies[name].raw()
        except KeyError:
            raise CheckpointError(f"{self.path} has no tensor {name!r}") from None

    def tensor(self, name: str) -> NDArray[np.float32]:
        """Return a tensor expanded to float32 `shape`; raises as `raw` does."""
        raw = self.raw(name)
        return dequantize(raw, self.tensors[name].format)

    def release(self) -> None:
        """Give back the memory of the pages read so far."""
        self._stored.release()

    def close(self) -> None:
        """Unmap the files, at once or when the last view of them is gone. Metadata stays usable."""
        self._stored.close()

    def __repr__(self) -> str:
        return f"<HuggingFaceFolder {self.path.name}: {len(self.tensors)} tensors>"


def open_folder(path: Path, *, weights: Path | None = None) -> HuggingFaceFolder:
    """Open a folder.

    Parameters
    ----------
    path : pathlib.Path
        With `config.json`, a tokenizer, and `model.safetensors` or `model.safetensors.index.json` (or a single
        `*.safetensors` of another name).
    weights : pathlib.Path, optional
        Which file or index, where that is not to be found out.

    Raises
    ------
    ModelNotFoundError
        If `weights` is not there.
    CheckpointError
        If a file is missing or not sound.
    UnsupportedModelError
        If it is a model, a quantization or a tokenizer that is not implemented.

    Warns
    -----
    UserWarning
        For tensors of unknown names, and for parts of the model that see or hear, which are left out.
    """
    if not (path / "config.json").is_file():
        raise CheckpointError(f"{path} has no config.json{_what_is_there(path)}")
    values = read_object(path / "config.json")
    config = Config(values, str(path / "config.json"))
    translated = translate(config)
    stored = open_safetensors(weights or _find_weights(path))
    try:
        wanted = [name for name in stored.tensors if not IGNORED.fullmatch(name)]
        sources = join(stored, wanted, values, config.label)
        assemblies = _assemble(sources, translated, str(path), bool(config.first("num_nextn_predict_layers")))
        _settle_output(assemblies, config)
        embedding = assemblies.get("token_embd.weight")
        if embedding is None or len(embedding.shape) != 2:
            raise CheckpointError(f"{path}: the embedding matrix is missing")
        metadata = dict(translated.metadata)
        metadata["general.name"] = _name(path, values)
        metadata |= tokenizer_metadata(path, values, embedding.shape[0])
        metadata |= _pooling(path, translated.family.architecture)
        metadata |= _sampling(path / "generation_config.json")
        for name, array in translated.tensors.items():
            assemblies[name] = Assembly(name, [Source(name, array.shape, F32, lambda a=array: a)])  # type: ignore[misc]
        return HuggingFaceFolder(path, stored, metadata, assemblies)
    except BaseException:
        stored.close()
        raise


def _pooling(path: Path, architecture: str) -> dict[str, object]:
    """How a model for embeddings makes one vector of many, as sentence-transformers keeps it."""
    options = read_object(path / "1_Pooling" / "config.json")
    chosen = [number for key, number in _POOLINGS.items() if options.get(key) is True]
    if len(chosen) > 1:
        raise UnsupportedModelError(f"{path / '1_Pooling'}: several poolings at once are not supported")
    return {f"{architecture}.pooling_type": n for n in chosen}


def _sampling(path: Path) -> dict[str, object]:
    """How the model's makers suggest to draw; kept for files that are written, and for people."""
    options = read_object(path)
    if options.get("do_sample") is False:
        return {}
    found: dict[str, object] = {}
    for key, (name, kind, most) in _SAMPLING.items():
        value = options.get(key)
        if value is None:
            continue
        allowed = (int, float) if kind is float else int
        if isinstance(value, bool) or not isinstance(value, allowed) or not 0 <= value <= most:
            raise CheckpointError(f"{path}: {key} is {show(value)}; allowed: a number from 0 to {most:g}")
        found[f"general.sampling.{name}"] = kind(value)
    return found


def _find_weights(folder: Path) -> Path:
    for name in ("model.safetensors.index.json", "model.safetensors"):
        if (folder / name).is_file():
            return folder / name
    found = sorted([*folder.glob("*.safetensors.index.json"), *folder.glob("*.safetensors")])
    if len(found) == 1:
        return found[0]
    if not found:
        raise CheckpointError(f"{folder} has no .safetensors file{_what_is_there(folder)}")
    names = ", ".join(p.name for p in found[:5])
    raise CheckpointError(f"{folder} has several files with weights and no index; name one of them: {names}")


def _what_is_there(folder: Path) -> str:
    """The files of a folder that is not what was expected, for an error message."""
    try:
        names = sorted(p.name for p in folder.iterdir())
    except OSError:
        return ""
    pickled = [n for n in names if n.endswith((".bin", ".pt", ".pth"))]
    if pickled:
        return f"; {pickled[0]} is a pickled PyTorch file, which is not read: convert it to safetensors"
    return (
        f"; it contains {', '.join(names[:5])}{', …' if len(names) > 5 else ''}" if names else "; it is empty"
    )


def _name(path: Path, values: Mapping[str, Any]) -> str:
    given = values.get("_name_or_path")
    looks_like_a_repository = (
        isinstance(given, str) and given.count("/") == 1 and not given.startswith((".", "/"))
    )
    return str(given).rpartition("/")[2] if looks_like_a_repository else path.resolve().name


def _assemble(
    sources: Mapping[str, Source], translated: Translated, label: str, extra_layers: bool
) -> dict[str, Assembly]:
    """Sort the stored tensors under the names of GGUF."""
    names = Names(TABLES[translated.family.table])
    n_layers = translated.metadata[f"{translated.family.architecture}.block_count"]
    found: dict[str, dict[int | None, tuple[Source, tuple[str, ...]]]] = {}
    left_out, unknown = [], []
    for name, source in sources.items():
        text_name = _text_name(name)
        if text_name is None:
            left_out.append(name)
            continue
        targets = names.find(text_name)
        if targets is None:
            unknown.append(name)
            continue
        if _is_beyond(targets, n_layers):
            if not extra_layers:
                unknown.append(name)
            continue
        for target, steps, number in targets:
            place = found.setdefault(target, {})
            if number in place:
                raise CheckpointError(f"{label}: {name} and {place[number][0].name} are both {target}")
            place[number] = (source, steps)
    if left_out:
        warnings.warn(
            f"{label}: {len(left_out)} tensors of other senses are not used ({left_out[0]}, …)", stacklevel=3
        )
    for name in unknown:
        if name.endswith((".g_idx", ".qzeros", ".scales", "_scale", "_zero_point", ".absmax", ".SCB")):
            raise UnsupportedModelError(f"{label}: the tensor {show(name)} belongs to no known quantization")
        warnings.warn(f"{label}: the tensor {show(name)} is unknown and not used", stacklevel=3)
    return {target: _one(target, parts, translated, label) for target, parts in found.items()}


def _is_beyond(targets: Iterable[tuple[str, tuple[str, ...], int | None]], n_layers: object) -> bool:
    """Whether a tensor belongs to a layer after the last one: those guess further tokens, and are not run."""
    numbers = (t[0].split(".")[1] for t in targets if t[0].startswith("blk."))
    return isinstance(n_layers, int) and any(int(n) >= n_layers for n in numbers)


def _text_name(name: str) -> str | None:
    """The name as a text model has it; None for tensors of other parts."""
    for prefix, replacement in TEXT_PREFIXES:
        if name.startswith(prefix):
            return replacement + name.removeprefix(prefix)
    if name.removeprefix("model.").startswith(OTHER_SENSES):
        return None
    return name


def _one(
    target: str,
    parts: Mapping[int | None, tuple[Source, tuple[str, ...]]],
    translated: Translated,
    label: str,
) -> Assembly:
    numbers = sorted(n for n in parts if n is not None)
    if None in parts and numbers:
        raise CheckpointError(f"{label}: {target} is stored both whole and in parts")
    if numbers != list(range(len(numbers))):
        missing = next(n for n in range(len(numbers) + 1) if n not in parts)
        raise CheckpointError(f"{label}: part {missing} of {target} is missing")
    ordered = [parts[n] for n in numbers] if numbers else [parts[None]]
    steps = tuple(STEPS[word](translated.sizes) for word in ordered[0][1])
    return Assembly(target, [source for source, _ in ordered], steps, stacked=bool(numbers))


def _settle_output(assemblies: dict[str, Assembly], config: Config) -> None:
    """Leave out an output matrix that is the embedding matrix once more (G5)."""
    output, embedding = assemblies.get("output.weight"), assemblies.get("token_embd.weight")
    if output is None or embedding is None or config.flag("tie_word_embeddings") is not True:
        return
    same_kind = output.shape == embedding.shape and output.format is embedding.format
    if same_kind and np.array_equal(output.raw(), embedding.raw()):
        del assemblies["output.weight"]
        return
    warnings.warn(
        f"{config.label}: tie_word_embeddings is true, but the file has an output matrix of its own, which is used",
        stacklevel=4,
    )
