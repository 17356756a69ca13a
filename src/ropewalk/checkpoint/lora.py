"""Low-rank adapters from files: GGUF's, and folders as the PEFT library writes them.

Both are presented the same way: for each matrix, by its GGUF name, A [rank, inputs] and B [outputs, rank], the latter
multiplied by the adapter's scale: alpha / rank, or alpha / sqrt(rank) with `use_rslora` (Kalajdzievski 2023).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ropewalk.checkpoint.assemble import PLAIN, Source, Transpose, to_float32
from ropewalk.checkpoint.gguf import open_gguf
from ropewalk.checkpoint.header import TensorInfo
from ropewalk.checkpoint.hf_families import FAMILIES
from ropewalk.checkpoint.names import STEPS, TABLES, TEXT_PREFIXES, Names, Sizes
from ropewalk.checkpoint.quants import FORMATS
from ropewalk.checkpoint.safetensors import open_safetensors
from ropewalk.errors import CheckpointError, ModelNotFoundError, UnsupportedModelError

Matrix = NDArray[np.float32]
Pairs = dict[str, tuple[Matrix, Matrix]]

_PEFT_NAME = re.compile(r"base_model\.model\.(.+)\.lora_(A|B)(?:\.default)?\.weight")
_NEUTRAL = {  # keys of adapter_config.json, and the values that mean "not used"
    "bias": ("none", None),
    "use_dora": (False, None),
    "modules_to_save": (None, []),
    "trainable_token_indices": (None, []),
    "lora_bias": (False, None),
    "alora_invocation_tokens": (None,),
    "layer_replication": (None,),
    "target_parameters": (None, []),
    "use_qalora": (False, None),
    "use_bdlora": (False, None),
}
MAX_ALPHA = 1e6
_TYPES = {"F32": "F32", "F16": "F16", "BF16": "BF16"}


@dataclass(frozen=True, eq=False)
class LoraWeights:
    """One adapter: `matrices` has A float32 [rank, inputs] and the scaled B float32 [outputs, rank] by tensor name."""

    path: Path
    matrices: Mapping[str, tuple[Matrix, Matrix]]

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the content, whatever kind of file it came from."""
        found = hashlib.sha256()
        for name, halves in sorted(self.matrices.items()):
            found.update(name.encode())
            for half in halves:
                found.update(repr(half.shape).encode() + half.tobytes())
        return found.hexdigest()


def open_lora(
    path: str | Path, architecture: str, sizes: Sizes, tensors: Mapping[str, TensorInfo]
) -> LoraWeights:
    """Read an adapter for a model.

    Parameters
    ----------
    path : str or Path
        A `.gguf` file, or a folder with `adapter_config.json` and `adapter_model.safetensors`.
    architecture, sizes, tensors
        Of the model that it is for.

    Raises
    ------
    ModelNotFoundError
        If there is no such file or folder.
    CheckpointError
        If it is broken, or is for another model.
    UnsupportedModelError
        If it is of a kind that is not implemented.
    """
    path = Path(path).expanduser()
    if path.is_dir():
        matrices = _read_peft(path, architecture, sizes)
    elif path.is_file():
        matrices = _read_gguf(path, architecture)
    else:
        raise ModelNotFoundError(f"there is no adapter {path}: neither a file nor a folder")
    if not matrices:
        raise CheckpointError(f"{path} has no matrices of an adapter")
    for name, (a, b) in matrices.items():
        _check(path, name, a, b, tensors)
    return LoraWeights(path, matrices)


def _check(path: Path, name: str, a: Matrix, b: Matrix, tensors: Mapping[str, TensorInfo]) -> None:
    if name not in tensors:
        raise CheckpointError(f"{path} changes the tensor {name}, which the model does not have")
    shape = tensors[name].shape
    ok = a.ndim == b.ndim == 2 and b.shape[1] == len(a) > 0 and (len(b), a.shape[1]) == tuple(shape)
    if not ok:
        raise CheckpointError(
            f"{path}: A and B for {name} have shapes {list(a.shape)} and {list(b.shape)}; the model's tensor has "
            f"{list(shape)}, which asks for [rank, {shape[-1]}] and [{shape[0]}, rank]"
        )
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        raise CheckpointError(f"{path}: A or B for {name} has values that are not finite")


def _read_gguf(path: Path, architecture: str) -> Pairs:
    with open_gguf(path) as file:
        kind = file.metadata.get("general.type"), file.metadata.get("adapter.type")
        if kind != ("adapter", "lora"):
            raise CheckpointError(
                f"{path} is no LoRA adapter: general.type is {kind[0]!r}, adapter.type {kind[1]!r}"
            )
        if (found := file.metadata.get("general.architecture")) != architecture:
            raise CheckpointError(
                f"{path} is for the architecture {found!r}; the model's is {architecture!r}"
            )
        alpha = file.metadata.get("adapter.lora.alpha")
        if not isinstance(alpha, int | float) or not abs(alpha) < MAX_ALPHA:
            raise CheckpointError(
                f"{path}: adapter.lora.alpha is {alpha!r}; allowed: a number below {MAX_ALPHA:g}"
            )
        stems = _stems(path, file.tensors, {".lora_a", ".lora_b"})
        pairs = {stem: (file.tensor(stem + ".lora_a"), file.tensor(stem + ".lora_b")) for stem in stems}
    return {stem: (a, b * np.float32(alpha / len(a) if alpha else 1.0)) for stem, (a, b) in pairs.items()}


def _stems(path: Path, names: Iterable[str], ends: set[str]) -> list[str]:
    """What the names of both halves begin with."""
    found: dict[str, set[str]] = {}
    for name in names:
        end = next((e for e in ends if name.endswith(e)), None)
        if end is None:
            raise UnsupportedModelError(f"{path}: the tensor {name} is not supported in an adapter")
        found.setdefault(name.removesuffix(end), set()).add(end)
    for stem, has in found.items():
        if has != ends:
            raise CheckpointError(f"{path}: {stem} has only one of its two halves")
    return list(found)


def _read_peft(path: Path, architecture: str, sizes: Sizes) -> Pairs:
    config = _peft_config(path / "adapter_config.json")
    weights = path / "adapter_model.safetensors"
    if not weights.is_file():
        raise ModelNotFoundError(f"{path} has no adapter_model.safetensors")
    halves: dict[str, dict[str, Matrix]] = {}
    with closing(open_safetensors(weights)) as file:
        for name, stored in file.tensors.items():
            match = _PEFT_NAME.fullmatch(name)
            if not match or stored.dtype not in _TYPES:
                raise UnsupportedModelError(f"{weights}: the tensor {name} ({stored.dtype}) is not supported")
            array = file.array(name)
            fmt = FORMATS[_TYPES[stored.dtype]]
            halves.setdefault(match[1], {})[match[2]] = to_float32(array.view(PLAIN[fmt.name]), fmt).copy()
    for module, found in halves.items():
        if len(found) != 2:
            raise CheckpointError(f"{weights}: {module} has only one of lora_A and lora_B")
    names = _table_for(path, architecture, list(halves)) if halves else {}
    pairs: Pairs = {}
    for module, found in halves.items():
        a, b = found["A"], found["B"]
        if a.ndim != 2 or b.ndim != 2 or not b.shape[1] == len(a) > 0:
            raise CheckpointError(
                f"{weights}: lora_A and lora_B of {module} have shapes {list(a.shape)} and {list(b.shape)}; "
                "they must be [rank, inputs] and [outputs, rank]"
            )
        scale = _scale(config, module, len(a), str(path / "adapter_config.json"))
        for target, steps in names[module]:
            b = found["B"]
            shape = b.shape
            source = Source(f"{module}.lora_B", shape, FORMATS["F32"], found["B"].copy)
            for word in steps:
                step = STEPS[word](sizes)
                if isinstance(step, Transpose):
                    continue  # an adapter is stored as [outputs, rank] even where its matrix is not
                shape = step.shape(source, shape)
                b = step.apply(b, True)
            with np.errstate(over="ignore"):  # what is not finite is refused in the end
                pairs[target] = (found["A"], b * np.float32(scale))
    return pairs


def _peft_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ModelNotFoundError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from None
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise UnsupportedModelError(f"{path}: peft_type is not LORA, the only kind that is supported")
    if config.get("use_rslora") not in (True, False, None):
        raise CheckpointError(f"{path}: use_rslora is {config['use_rslora']!r:.80}; allowed: true, false")
    for key, neutral in _NEUTRAL.items():
        if config.get(key) not in neutral:
            raise UnsupportedModelError(
                f"{path}: {key} = {config[key]!r} is not supported; allowed: {neutral[0]!r}"
            )
    return config


def _scale(config: Mapping[str, Any], module: str, rank: int, label: str) -> float:
    """alpha / rank; patterns give some modules an alpha of their own (their ranks show in the shapes)."""
    patterns = config.get("alpha_pattern") or {}
    if not isinstance(patterns, Mapping):
        raise CheckpointError(f"{label}: alpha_pattern is {patterns!r:.80}; allowed: an object")
    chosen = (own for pattern, own in patterns.items() if _module_pattern(pattern, label).fullmatch(module))
    alpha = next(chosen, config.get("lora_alpha", rank))
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not abs(alpha) < MAX_ALPHA:
        raise CheckpointError(f"{label}: lora_alpha is {alpha!r:.80}; allowed: a number below {MAX_ALPHA:g}")
    return float(alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank)


def _module_pattern(pattern: str, label: str) -> re.Pattern[str]:
    """What PEFT looks for at the end of a module's name; expressions that could take for ever are refused."""
    quantifiers = re.findall(r"[*+{]", pattern)
    if len(pattern) <= 200 and len(quantifiers) <= 3 and not re.search(r"\)[*+{]", pattern):
        with contextlib.suppress(re.error):
            return re.compile(rf"(?:.*\.)?(?:{pattern})")
    raise UnsupportedModelError(
        f"{label}: the alpha_pattern {pattern!r:.80} is not supported; supported: names of modules, and expressions "
        "of up to 200 characters with three of * + {, none of them behind a bracket"
    )


def _text_name(module: str) -> str:
    """The name that a module has in a model of text alone."""
    for prefix, replacement in TEXT_PREFIXES:
        if module.startswith(prefix):
            return replacement + module.removeprefix(prefix)
    return module


def _table_for(
    path: Path, architecture: str, modules: list[str]
) -> dict[str, list[tuple[str, tuple[str, ...]]]]:
    """Targets and steps of every module, by the first table of the architecture that knows them all."""
    fewest = modules
    for kind in dict.fromkeys(f.table for f in FAMILIES.values() if f.architecture == architecture):
        names = Names(TABLES[kind])
        found = {module: names.find(_text_name(module) + ".weight") for module in modules}
        missing = [module for module, targets in found.items() if targets is None]
        if not missing:
            return {m: [(name, steps) for name, steps, _ in targets or ()] for m, targets in found.items()}
        fewest = min(fewest, missing, key=len)
    raise UnsupportedModelError(
        f"{path}: the module {fewest[0]} is unknown in the architecture {architecture}"
    )
