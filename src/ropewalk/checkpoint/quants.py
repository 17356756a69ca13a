"""Block formats of GGUF tensors as data, and their exact expansion to float32 in NumPy.

A quantized row is a run of equal blocks; a block holds the scales and the packed integers of `block_size`
consecutive columns. Each format here is one row of data: its ggml number, its block as a NumPy structured
dtype (the byte layout, field by field, as ggml's block structs define it), and a function from blocks
`[n]` of that dtype to float32 `[n, block_size]`.

This module does not know files, tensors' names or kernels. Blocks come from untrusted files: any bytes are
legal input, and infinities and NaNs among the scales pass through without a warning.

Throughout, `n` is a number of blocks. Products and sums are taken in the order that ggml takes them, so the
float32 results are the same bit for bit.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ropewalk.errors import CheckpointError, UnsupportedModelError

Blocks = NDArray[np.void]
Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

# Elements expanded at a time: the temporaries of one piece stay in the L2 cache.
_PIECE = 1 << 16


@dataclass(frozen=True)
class BlockFormat:
    """One way to store numbers in blocks.

    Attributes
    ----------
    name : str
        The name in ggml, such as "Q4_K".
    ggml_id : int
        The number that stands for the format in GGUF files.
    block_size : int
        Columns per block; 1 for plain numbers.
    block_bytes : int
        Bytes per block.
    layout : numpy.dtype
        The fields of one block.
    expand : callable
        From blocks `[n]` of dtype `layout` to float32 `[n, block_size]`.
    """

    name: str
    ggml_id: int
    block_size: int
    layout: np.dtype[np.void] = field(repr=False)
    expand: Callable[[Blocks], Floats] = field(repr=False, compare=False)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        return self.layout.itemsize

    @property
    def bits_per_weight(self) -> float:
        """Bits that a number takes, its share of the scales included."""
        return 8 * self.block_bytes / self.block_size

    def row_bytes(self, columns: int) -> int:
        """Bytes of one row; raises `CheckpointError` if `columns` does not fill whole blocks."""
        blocks, rest = divmod(columns, self.block_size)
        if rest:
            raise CheckpointError(
                f"{columns} columns do not fill whole {self.name} blocks of {self.block_size}"
            )
        return blocks * self.block_bytes

    def dequantize(self, raw: Bytes) -> Floats:
        """Expand uint8 `[..., row_bytes]` to float32 `[..., columns]`; see `dequantize`."""
        return dequantize(raw, self)


def dequantize(raw: Bytes, fmt: BlockFormat) -> Floats:
    """Expand quantized rows to float32.

    Parameters
    ----------
    raw : numpy.ndarray
        uint8 `[..., row_bytes]`, the last axis a whole number of blocks.
    fmt : BlockFormat
        The format of the blocks.

    Returns
    -------
    numpy.ndarray
        float32 `[..., columns]`, freshly allocated.

    Raises
    ------
    CheckpointError
        If a row is not a whole number of blocks.
    """
    if raw.dtype != np.uint8 or raw.ndim == 0:
        raise CheckpointError(f"{fmt.name} data must be uint8 rows, not {raw.dtype} of shape {raw.shape}")
    n_row_blocks, rest = divmod(raw.shape[-1], fmt.block_bytes)
    if rest:
        raise CheckpointError(
            f"{raw.shape[-1]} bytes are no whole number of {fmt.name} blocks of {fmt.block_bytes}"
        )
    blocks = np.ascontiguousarray(raw).reshape(-1).view(fmt.layout)
    out = np.empty((blocks.size, fmt.block_size), np.float32)
    step = _PIECE // fmt.block_size
    with np.errstate(all="ignore"):
        for start in range(0, blocks.size, step):
            piece = slice(start, start + step)
            out[piece] = fmt.expand(blocks[piece])
    return out.reshape(*raw.shape[:-1], n_row_blocks * fmt.block_size)


def all_finite(raw: Bytes, fmt: BlockFormat) -> bool:
    """Whether no number in uint8 rows `[..., row_bytes]` is NaN or infinite.

    Of blocks the scales alone are looked at: all else in them are whole numbers.
    """
    scales = [name for name in fmt.layout.names or () if fmt.layout[name].kind == "f"]
    if not scales:
        return bool(np.isfinite(dequantize(raw, fmt)).all())
    blocks = np.ascontiguousarray(raw).reshape(-1).view(fmt.layout)
    return all(bool(np.isfinite(blocks[name]).all()) for name in scales)


# Unpacking. `bits` below turns bytes [n, ...] into small integers; the layouts differ only in which
# shifts apply and in how many bytes a run has before the next shift.


def _runs(packed: Bytes, run: int, width: int) -> Bytes:
    """Split bytes [n, k] into uint8 [n, k * 8 / width]: runs of `run` bytes, each read once per shift.

    Within a run, the low `width` bits of all bytes come first, then the next bits of all bytes, and so on.
    """
    shifts = np.arange(0, 8, width, dtype=np.uint8)[:, None]
    values = packed.reshape(len(packed), -1, 1, run) >> shifts
    values &= np.uint8((1 << width) - 1)
    return values.reshape(len(packed), -1)


def _grouped(values: NDArray[Any], groups: int) -> NDArray[Any]:
    grouped: NDArray[Any] = values.reshape(len(values), groups, -1)
    return grouped


def _f32(scales: NDArray[Any]) -> Floats:
    """float16 or integer [n] or [n, k] as a float32 column that broadcasts over the last axis."""
    return scales.astype(np.float32)[..., None]


def _plain(blocks: Blocks) -> Floats:
    return blocks["x"].astype(np.float32)[:, None]


def _bf16(blocks: Blocks) -> Floats:
    return (blocks["x"].astype(np.uint32) << np.uint32(16)).view(np.float32)[:, None]


def _q4_0(blocks: Blocks) -> Floats:
    q = _runs(blocks["qs"], 16, 4).view(np.int8) - np.int8(8)
    return _f32(blocks["d"]) * q.astype(np.float32)


def _q4_1(blocks: Blocks) -> Floats:
    q = _runs(blocks["qs"], 16, 4).astype(np.float32)
    return _f32(blocks["d"]) * q + _f32(blocks["m"])


def _q5_bits(blocks: Blocks) -> Bytes:
    fifth = np.unpackbits(blocks["qh"], axis=-1, bitorder="little")
    return _runs(blocks["qs"], 16, 4) | (fifth << np.uint8(4))


def _q5_0(blocks: Blocks) -> Floats:
    q = _q5_bits(blocks).view(np.int8) - np.int8(16)
    return _f32(blocks["d"]) * q.astype(np.float32)


def _q5_1(blocks: Blocks) -> Floats:
    return _f32(blocks["d"]) * _q5_bits(blocks).astype(np.float32) + _f32(blocks["m"])


def _q8_0(blocks: Blocks) -> Floats:
    return blocks["qs"].astype(np.float32) * _f32(blocks["d"])


def _q2_k(blocks: Blocks) -> Floats:
    scales = blocks["scales"]
    d = _f32(blocks["d"]) * (scales & np.uint8(15)).astype(np.float32)
    m = _f32(blocks["dmin"]) * (scales >> np.uint8(4)).astype(np.float32)
    q = _grouped(_runs(blocks["qs"], 32, 2), 16).astype(np.float32)
    return (d[..., None] * q - m[..., None]).reshape(-1, 256)


def _q3_k(blocks: Blocks) -> Floats:
    # Sixteen 6-bit scales: eight bytes hold the low four bits, four bytes the high two.
    low = _runs(blocks["scales"][:, :8], 8, 4)
    high = _runs(blocks["scales"][:, 8:], 4, 2)
    scales = (low | (high << np.uint8(4))).view(np.int8) - np.int8(32)
    d = _f32(blocks["d"]) * scales.astype(np.float32)
    # The third bit is stored inverted: where it is clear, 4 is subtracted.
    clear = _runs(blocks["hmask"], 32, 1) ^ np.uint8(1)
    q = _runs(blocks["qs"], 32, 2).view(np.int8) - (clear << np.uint8(2)).view(np.int8)
    return (d[..., None] * _grouped(q, 16).astype(np.float32)).reshape(-1, 256)


def k_scales(packed: Bytes) -> tuple[Bytes, Bytes]:
    """Unpack the eight 6-bit scales and eight 6-bit minima of Q4_K and Q5_K blocks.

    Bytes 0-3 hold scales 0-3 and bytes 4-7 minima 0-3 in their low six bits; bytes 8-11 hold the low four
    bits of scales 4-7 (low nibble) and minima 4-7 (high nibble), whose high two bits sit on top of bytes 0-7.

    Parameters
    ----------
    packed : numpy.ndarray
        uint8 `[n, 12]`.

    Returns
    -------
    scales, minima : numpy.ndarray
        uint8 `[n, 8]` each, from 0 to 63.
    """
    first, second, rest = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    six, four, top = np.uint8(0x3F), np.uint8(0x0F), np.uint8(0x30)
    scales = np.concatenate([first & six, (rest & four) | ((first >> np.uint8(2)) & top)], axis=1)
    minima = np.concatenate([second & six, (rest >> np.uint8(4)) | ((second >> np.uint8(2)) & top)], axis=1)
    return scales, minima


def _k_affine(blocks: Blocks, q: Bytes) -> Floats:
    scales, minima = k_scales(blocks["scales"])
    d = _f32(blocks["d"]) * scales.astype(np.float32)
    m = _f32(blocks["dmin"]) * minima.astype(np.float32)
    return (d[..., None] * _grouped(q, 8).astype(np.float32) - m[..., None]).reshape(-1, 256)


def _q4_k(blocks: Blocks) -> Floats:
    return _k_affine(blocks, _runs(blocks["qs"], 32, 4))


def _q5_k(blocks: Blocks) -> Floats:
    fifth = _runs(blocks["qh"], 32, 1)
    return _k_affine(blocks, _runs(blocks["qs"], 32, 4) | (fifth << np.uint8(4)))


def _q6_k(blocks: Blocks) -> Floats:
    d = _f32(blocks["d"]) * blocks["scales"].astype(np.float32)
    high = _runs(blocks["qh"], 32, 2)
    q = (_runs(blocks["ql"], 64, 4) | (high << np.uint8(4))).view(np.int8) - np.int8(32)
    return (d[..., None] * _grouped(q, 16).astype(np.float32)).reshape(-1, 256)


# The sixteen levels of the non-linear 4-bit formats.
IQ4_LEVELS = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)
# Twice the sixteen values of the E2M1 floats of the OCP Microscaling specification 1.0, section 5.3.3.
MXFP4_LEVELS = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)


def _iq4_nl(blocks: Blocks) -> Floats:
    levels = IQ4_LEVELS.astype(np.float32)
    return _f32(blocks["d"]) * levels[_runs(blocks["qs"], 16, 4)]


def _iq4_xs(blocks: Blocks) -> Floats:
    # Eight 6-bit scales: the low four bits as nibbles in turn, the high two in a 16-bit word.
    low = _runs(blocks["scales_l"], 1, 4)
    words = blocks["scales_h"][:, None] >> np.arange(0, 16, 2, dtype=np.uint16)
    high = words.astype(np.uint8) & np.uint8(3)
    scales = (low | (high << np.uint8(4))).view(np.int8) - np.int8(32)
    d = _f32(blocks["d"]) * scales.astype(np.float32)
    levels = IQ4_LEVELS.astype(np.float32)
    q: Floats = _grouped(levels[_runs(blocks["qs"], 16, 4)], 8)
    return (d[..., None] * q).reshape(-1, 256)


def _mxfp4(blocks: Blocks) -> Floats:
    # The scale is 2 ** (e - 127), halved since the levels are doubled: 2 ** (e - 128), subnormal for e < 2.
    e = blocks["e"].astype(np.uint32)
    bits = np.where(e < 2, np.uint32(1 << 21) << e, (e - np.uint32(1)) << np.uint32(23))
    levels = MXFP4_LEVELS.astype(np.float32)
    scales: Floats = bits.view(np.float32)[:, None]
    return scales * levels[_runs(blocks["qs"], 16, 4)]


def _format(
    name: str, ggml_id: int, block_size: int, expand: Callable[[Blocks], Floats], **fields: str
) -> BlockFormat:
    layout = np.dtype(list(fields.items()))
    return BlockFormat(name, ggml_id, block_size, layout, expand)


_ALL = (
    _format("F32", 0, 1, _plain, x="<f4"),
    _format("F16", 1, 1, _plain, x="<f2"),
    _format("Q4_0", 2, 32, _q4_0, d="<f2", qs="16u1"),
    _format("Q4_1", 3, 32, _q4_1, d="<f2", m="<f2", qs="16u1"),
    _format("Q5_0", 6, 32, _q5_0, d="<f2", qh="4u1", qs="16u1"),
    _format("Q5_1", 7, 32, _q5_1, d="<f2", m="<f2", qh="4u1", qs="16u1"),
    _format("Q8_0", 8, 32, _q8_0, d="<f2", qs="32i1"),
    _format("Q2_K", 10, 256, _q2_k, scales="16u1", qs="64u1", d="<f2", dmin="<f2"),
    _format("Q3_K", 11, 256, _q3_k, hmask="32u1", qs="64u1", scales="12u1", d="<f2"),
    _format("Q4_K", 12, 256, _q4_k, d="<f2", dmin="<f2", scales="12u1", qs="128u1"),
    _format("Q5_K", 13, 256, _q5_k, d="<f2", dmin="<f2", scales="12u1", qh="32u1", qs="128u1"),
    _format("Q6_K", 14, 256, _q6_k, ql="128u1", qh="64u1", scales="16i1", d="<f2"),
    _format("IQ4_NL", 20, 32, _iq4_nl, d="<f2", qs="16u1"),
    _format("IQ4_XS", 23, 256, _iq4_xs, d="<f2", scales_h="<u2", scales_l="4u1", qs="128u1"),
    _format("BF16", 30, 1, _bf16, x="<u2"),
    _format("MXFP4", 39, 32, _mxfp4, e="u1", qs="16u1"),
)

FORMATS: Mapping[str, BlockFormat] = MappingProxyType({f.name: f for f in _ALL})
"""Every format that Ropewalk reads, by name."""

FORMATS_BY_ID: Mapping[int, BlockFormat] = MappingProxyType({f.ggml_id: f for f in _ALL})
"""Every format that Ropewalk reads, by ggml number."""

UNSUPPORTED: Mapping[int, str] = MappingProxyType(
    {
        9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S",
        22: "IQ2_S", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0",
        35: "TQ2_0", 40: "NVFP4", 41: "Q1_0",
    }
)  # fmt: skip
"""Formats that ggml has and Ropewalk does not, by ggml number."""

REMOVED: Mapping[int, str] = MappingProxyType(
    {
        4: "Q4_2", 5: "Q4_3", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8",
        36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8",
    }
)  # fmt: skip
"""Formats that ggml itself no longer reads, by their former ggml number."""


def format_by_id(ggml_id: int) -> BlockFormat:
    """Return the format with a ggml number.

    Raises
    ------
    UnsupportedModelError
        If ggml knows the format and Ropewalk does not; the message names it.
    CheckpointError
        If no format has this number, or ggml dropped it.
    """
    if found := FORMATS_BY_ID.get(ggml_id):
        return found
    allowed = ", ".join(FORMATS)
    if name := UNSUPPORTED.get(ggml_id):
        raise UnsupportedModelError(f"the tensor format {name} is not implemented; allowed: {allowed}")
    if name := REMOVED.get(ggml_id):
        raise CheckpointError(
            f"the tensor format {name} (number {ggml_id}) was withdrawn from ggml; allowed: {allowed}"
        )
    raise CheckpointError(f"{ggml_id} is not the number of a ggml tensor format; allowed: {allowed}")
