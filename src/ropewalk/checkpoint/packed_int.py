"""Integer weights with scales and zero points: GPTQ, AWQ and compressed-tensors, as Q4_0, Q4_1, Q8_0 or F16.

A weight is s (q − z), with a scale s and a zero point z for each group of columns of a row. Layouts ("in" are
columns, "out" rows; of several codes in an int32 the lowest bits come first):

    GPTQ    qweight [in / k, out], k codes an int32 along "in"; qzeros [groups, out / k] hold z − 1 (in
            `checkpoint_format` gptq_v2: z); scales [groups, out]; g_idx [in] is the group of each column
    AWQ     qweight [in, out / 8] with the codes of an int32 in the order 0 2 4 6 1 3 5 7; qzeros [groups, out / 8]
            likewise; scales [groups, out]
    compressed-tensors
            weight_packed [out, in / k] hold q + 2^(bits − 1), or weight int8 [out, in]; weight_scale [out, groups]
            or [out, 1] or [1]; weight_zero_point [out, groups], packed along "out" where the weight is packed

Sources: AutoGPTQ's and AutoAWQ's packing code and compressed-tensors' compressors, restated. This module does not
know what tensors mean.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ropewalk.checkpoint.assemble import Source
from ropewalk.checkpoint.cursor import show
from ropewalk.checkpoint.encode import q4_rows, q8_rows
from ropewalk.checkpoint.float8 import float8_source, floats, half_format, to_half
from ropewalk.checkpoint.quants import FORMATS
from ropewalk.checkpoint.safetensors import SafeTensors
from ropewalk.errors import CheckpointError, UnsupportedModelError

Array = NDArray[Any]
Floats = NDArray[np.float32]
Joined = tuple[dict[str, Source], set[str]]
_AWQ_ORDER = np.array([0, 4, 1, 5, 2, 6, 3, 7])
"""Which of the eight places of an int32 holds column 0, 1, …"""


@dataclass(frozen=True)
class Affine:
    """One weight. What is large is fetched when it is needed and not kept.

    Attributes
    ----------
    shape : (rows, columns)
    bits : of a code; codes are unsigned.
    factors : fetches scales float32 [rows, groups], and zero points int32 [rows, groups], subtracted from codes.
    group_of : int [columns], or None where equal runs of columns are the groups.
    codes : fetches uint8 [rows, columns].
    """

    name: str
    shape: tuple[int, int]
    bits: int
    factors: Callable[[], tuple[Floats, Array]]
    group_of: Array | None
    codes: Callable[[], Array]

    def source(self, label: str) -> Source:
        """The weight in the format that holds it best."""
        rows, columns = self.shape
        scales, zeros = self.factors()
        groups = scales.shape[1]
        if scales.shape != zeros.shape or len(scales) != rows or not groups or columns % groups:
            raise CheckpointError(
                f"{label}: {self.name} of shape {[rows, columns]} has scales of shape {list(scales.shape)} "
                f"and zero points of shape {list(zeros.shape)}"
            )
        if not np.isfinite(scales).all():
            raise CheckpointError(f"{label}: the scales of {self.name} are not all finite")
        order = self.group_of
        in_order = order is None or bool((order == np.arange(columns) // (columns // groups)).all())
        largest = float(np.abs(scales).max()) * 2**self.bits
        centred = bool((zeros == 2 ** (self.bits - 1)).all())
        fits = in_order and (columns // groups) % 32 == 0 and largest < 60000
        if fits and self.bits <= 4:
            exact = self.bits == 4 and centred
            return Source(
                self.name, self.shape, FORMATS["Q4_0" if exact else "Q4_1"], lambda: self._q4(exact)
            )
        if fits and centred:
            return Source(self.name, self.shape, FORMATS["Q8_0"], self._q8)
        return Source(self.name, self.shape, half_format(largest), lambda: self._half(largest))

    def _spread(self, values: Array) -> Array:
        """[rows, groups] for each block of 32 columns."""
        return np.repeat(values, self.shape[1] // values.shape[1] // 32, axis=1)

    def _q4(self, exact: bool) -> Array:
        scales, zeros = self.factors()
        minima = None if exact else self._spread(-scales * zeros)
        return q4_rows(self.codes(), self._spread(scales), minima)

    def _q8(self) -> Array:
        return q8_rows((self.codes() ^ np.uint8(128)).view(np.int8), self._spread(self.factors()[0]))

    def _half(self, largest: float) -> Array:
        scales, zeros = self.factors()
        columns = self.shape[1]
        groups = (
            np.arange(columns) // (columns // scales.shape[1]) if self.group_of is None else self.group_of
        )
        fmt = half_format(largest)
        out = np.empty(self.shape, "<f2" if fmt.name == "F16" else "<u2")
        codes = self.codes()
        for start in range(0, len(codes), 1024):
            rows = slice(start, start + 1024)
            numbers = (codes[rows] - zeros[rows][:, groups]).astype(np.float32) * scales[rows][:, groups]
            out[rows] = to_half(numbers, fmt)
        return out


def unpack(words: Array, bits: int, axis: int) -> NDArray[np.uint8]:
    """Codes of `bits` bits from int32 words: `axis` becomes 32 / bits times as long, lowest bits first."""
    words = np.moveaxis(words, axis, -1).view(np.uint32)
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    codes = ((words[..., None] >> shifts) & np.uint32(2**bits - 1)).astype(np.uint8)
    return np.moveaxis(codes.reshape(*words.shape[:-1], -1), -1, axis)


def _stems(wanted: Sequence[str], ending: str) -> list[str]:
    return [n.removesuffix(ending) for n in wanted if n.endswith(ending)]


def _need(stored: SafeTensors, label: str, *names: str) -> None:
    for name in names:
        if name not in stored.tensors:
            raise CheckpointError(f"{label}: the tensor {name} is missing")


def _expect(stored: SafeTensors, name: str, dtype: str, shape: tuple[int, ...], label: str) -> None:
    tensor = stored.tensors[name]
    if tensor.dtype != dtype or tensor.shape != shape:
        raise CheckpointError(
            f"{label}: {name} is {tensor.dtype} {list(tensor.shape)}; it must be {dtype} {list(shape)}"
        )


def _matrix(stored: SafeTensors, name: str, label: str) -> tuple[int, int]:
    shape = stored.tensors[name].shape
    if len(shape) != 2 or 0 in shape:
        raise CheckpointError(f"{label}: {name} has shape {list(shape)}; it must be a matrix")
    return shape[0], shape[1]


def _bits(config: Mapping[str, Any], key: str, allowed: tuple[int, ...], label: str) -> int:
    bits = config.get(key)
    if bits not in allowed:
        raise UnsupportedModelError(
            f"{label}: {key} = {show(bits)} of the quantization is not supported; "
            f"supported: {', '.join(map(str, allowed))}"
        )
    return int(bits)


def gptq(stored: SafeTensors, wanted: Sequence[str], config: Mapping[str, Any], label: str) -> Joined:
    """GPTQ of 2, 4 or 8 bits."""
    bits = _bits(config, "bits", (2, 4, 8), label)
    layout = config.get("checkpoint_format", "gptq")
    if layout not in ("gptq", "gptq_v2"):
        raise UnsupportedModelError(
            f"{label}: checkpoint_format = {show(layout)} is not supported; supported: gptq, gptq_v2"
        )
    per_word = 32 // bits
    sources: dict[str, Source] = {}
    used: set[str] = set()
    for stem in _stems(wanted, ".qweight"):
        parts = [f"{stem}.{part}" for part in ("qweight", "qzeros", "scales")]
        _need(stored, label, *parts)
        columns = _matrix(stored, parts[0], label)[0] * per_word
        groups, rows = _matrix(stored, parts[2], label)
        _expect(stored, parts[0], "I32", (columns // per_word, rows), label)
        _expect(stored, parts[1], "I32", (groups, rows // per_word), label)
        group_of = None
        if f"{stem}.g_idx" in stored.tensors:
            _expect(stored, f"{stem}.g_idx", "I32", (columns,), label)
            group_of = stored.array(f"{stem}.g_idx")
            if columns and not 0 <= group_of.min() <= group_of.max() < groups:
                raise CheckpointError(f"{label}: {stem}.g_idx names groups outside 0 to {groups - 1}")
            used.add(f"{stem}.g_idx")
        affine = Affine(
            f"{stem}.weight",
            (rows, columns),
            bits,
            partial(_gptq_factors, stored, parts[2], parts[1], bits, int(layout == "gptq")),
            group_of,
            lambda name=parts[0]: np.ascontiguousarray(unpack(stored.array(name), bits, 0).T),  # type: ignore[misc]
        )
        sources[affine.name] = affine.source(label)
        used.update(parts)
    return sources, used


def _gptq_factors(
    stored: SafeTensors, scales: str, zeros: str, bits: int, offset: int
) -> tuple[Floats, Array]:
    points = unpack(stored.array(zeros), bits, 1).astype(np.int32) + offset
    return np.ascontiguousarray(floats(stored, scales).T), np.ascontiguousarray(points.T)


def awq(stored: SafeTensors, wanted: Sequence[str], config: Mapping[str, Any], label: str) -> Joined:
    """AWQ of 4 bits in the layout "gemm"."""
    _bits(config, "bits" if "bits" in config else "w_bit", (4,), label)
    if str(config.get("version", "gemm")).lower() != "gemm":
        raise UnsupportedModelError(
            f"{label}: the AWQ layout {show(config['version'])} is not supported; supported: gemm"
        )
    sources: dict[str, Source] = {}
    used: set[str] = set()
    for stem in _stems(wanted, ".qweight"):
        parts = [f"{stem}.{part}" for part in ("qweight", "qzeros", "scales")]
        _need(stored, label, *parts)
        columns = _matrix(stored, parts[0], label)[0]
        groups, rows = _matrix(stored, parts[2], label)
        _expect(stored, parts[0], "I32", (columns, rows // 8), label)
        _expect(stored, parts[1], "I32", (groups, rows // 8), label)
        affine = Affine(
            f"{stem}.weight",
            (rows, columns),
            4,
            partial(_awq_factors, stored, parts[2], parts[1]),
            None,
            lambda name=parts[0]: np.ascontiguousarray(_awq_codes(stored.array(name)).T),  # type: ignore[misc]
        )
        sources[affine.name] = affine.source(label)
        used.update(parts)
    return sources, used


def _awq_factors(stored: SafeTensors, scales: str, zeros: str) -> tuple[Floats, Array]:
    points = _awq_codes(stored.array(zeros)).astype(np.int32)
    return np.ascontiguousarray(floats(stored, scales).T), np.ascontiguousarray(points.T)


def _awq_codes(words: Array) -> NDArray[np.uint8]:
    """uint8 [n, out] from int32 [n, out / 8]."""
    codes = unpack(words, 4, 1).reshape(len(words), -1, 8)
    return codes[..., _AWQ_ORDER].reshape(len(words), -1)


def compressed_tensors(
    stored: SafeTensors, wanted: Sequence[str], config: Mapping[str, Any], label: str
) -> Joined:
    """Integers of 4 and 8 bits, packed or not, and 8-bit floats."""
    layout = config.get("format")
    if layout not in ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized"):
        raise UnsupportedModelError(
            f"{label}: the format {show(layout)} of compressed-tensors is not supported; "
            "supported: pack-quantized, int-quantized, float-quantized, naive-quantized"
        )
    bits = _weight_bits(config, label)
    sources: dict[str, Source] = {}
    used = {n for n in wanted if n.endswith((".input_scale", ".output_scale", ".k_scale", ".v_scale"))}
    used |= {n for n in wanted if n.endswith((".input_zero_point", ".weight_shape"))}
    for stem in _stems(wanted, ".weight_scale"):
        parts = {
            p: f"{stem}.{p}"
            for p in ("weight", "weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx")
        }
        found = {p: n for p, n in parts.items() if n in stored.tensors}
        used.update(found.values())
        name = f"{stem}.weight"
        if "weight" in found and stored.tensors[name].dtype.startswith("F8"):
            sources[name] = float8_source(stored, name, parts["weight_scale"], _block(config), label)
        else:
            sources[name] = _integers(stored, found, name, bits, label).source(label)
    return sources, used


def _weight_bits(config: Mapping[str, Any], label: str) -> int:
    """The width that all groups of the configuration share."""
    groups = config.get("config_groups")
    weights = [g.get("weights") or {} for g in groups.values()] if isinstance(groups, Mapping) else []
    widths = {w.get("num_bits") for w in weights if isinstance(w, Mapping)}
    if len(widths) == 1 and (bits := widths.pop()) in (4, 8):
        return int(bits)
    raise UnsupportedModelError(
        f"{label}: num_bits of the quantization is {show(sorted(map(str, widths)))}; supported: all 4, or all 8"
    )


def _block(config: Mapping[str, Any]) -> object:
    groups = config.get("config_groups", {})
    return next((g["weights"].get("block_structure") for g in groups.values() if g.get("weights")), None)


def _integers(stored: SafeTensors, parts: Mapping[str, str], name: str, bits: int, label: str) -> Affine:
    per_word = 32 // bits
    packed = "weight_packed" in parts
    codes_name = parts.get("weight_packed") or parts.get("weight")
    if codes_name is None:
        raise CheckpointError(f"{label}: the tensor {name} is missing")
    rows, columns = _matrix(stored, codes_name, label)
    if packed and f"{name}_shape" in stored.tensors:
        _expect(stored, f"{name}_shape", "I64", (2,), label)
        width = int(stored.array(f"{name}_shape")[1])
        if not columns * per_word - per_word < width <= columns * per_word:
            raise CheckpointError(
                f"{label}: {name}_shape does not fit {codes_name} of shape {[rows, columns]}"
            )
    else:
        width = columns * per_word if packed else columns
    _expect(stored, codes_name, "I32" if packed else "I8", (rows, columns), label)
    scale_name, zero_name = parts["weight_scale"], parts.get("weight_zero_point")

    def factors() -> tuple[Floats, Array]:
        scales = floats(stored, scale_name)
        scales = np.broadcast_to(scales.reshape(-1, 1), (rows, 1)) if scales.size in (1, rows) else scales
        return scales, _zero_points(stored, zero_name, scales.shape, bits, name, label)

    n_groups = factors()[0].shape[-1]
    group_of = _groups_of_columns(stored, parts.get("weight_g_idx"), width, n_groups, name, label)

    def codes() -> Array:
        raw = stored.array(codes_name)
        if packed:
            return np.ascontiguousarray(unpack(raw, bits, 1)[:, :width])
        return (raw.view(np.uint8) ^ np.uint8(128)) if bits == 8 else (raw + np.int8(8)).view(np.uint8)

    return Affine(name, (rows, width), bits, factors, group_of, codes)


def _zero_points(
    stored: SafeTensors, part: str | None, shape: tuple[int, ...], bits: int, name: str, label: str
) -> Array:
    """What is subtracted from unsigned codes, one number a scale."""
    middle = 2 ** (bits - 1)
    if part is None:
        return np.full(shape, middle, np.int32)
    if stored.tensors[part].dtype == "I32":
        zeros = unpack(stored.array(part), bits, 0)[: shape[0]].astype(np.int32)
    else:
        zeros = stored.array(part).astype(np.int32) + middle
    if zeros.size not in (1, int(np.prod(shape))):
        raise CheckpointError(
            f"{label}: {name} has {zeros.size} zero points for scales of shape {list(shape)}"
        )
    spread: Array = np.broadcast_to(zeros.reshape(1, 1) if zeros.size == 1 else zeros.reshape(shape), shape)
    return spread


def _groups_of_columns(
    stored: SafeTensors, part: str | None, columns: int, n_groups: int, name: str, label: str
) -> Array | None:
    """The group of each column; -1 everywhere means that they are in order."""
    if part is None:
        return None
    groups = stored.array(part)
    if groups.size and (groups == -1).all():
        return None
    if groups.shape != (columns,) or not 0 <= groups.min() <= groups.max() < n_groups:
        raise CheckpointError(
            f"{label}: {name}_g_idx does not fit the {n_groups} groups of {columns} columns"
        )
    return groups
