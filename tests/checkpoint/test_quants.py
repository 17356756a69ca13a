"""Block formats: every expansion equals the independent `gguf` package bit for bit."""

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf import quants as oracle

from ropewalk.checkpoint.quants import (
    FORMATS,
    FORMATS_BY_ID,
    REMOVED,
    UNSUPPORTED,
    BlockFormat,
    dequantize,
    format_by_id,
)
from ropewalk.errors import CheckpointError, UnsupportedModelError

NAMES = sorted(FORMATS)
# float16: zeros, both ends of the subnormals, smallest normal, one, an odd value, the largest finite.
ODD_SCALES = np.array([0x0000, 0x8000, 0x0001, 0x83FF, 0x0400, 0x3C00, 0xB555, 0x7BFF], np.uint16)
NOT_FINITE = np.array([0x7C00, 0xFC00, 0x7C01, 0xFE00], np.uint16)


def random_blocks(fmt: BlockFormat, n: int, scales: np.ndarray | None = None) -> np.ndarray:
    """uint8 [n, block_bytes]; the float16 fields are finite, or drawn from the bit patterns in `scales`."""
    rng = np.random.default_rng(fmt.ggml_id)
    blocks = rng.integers(0, 256, (n, fmt.block_bytes), np.uint8).view(fmt.layout)
    for name in fmt.layout.names or ():
        if fmt.layout[name] == np.dtype("<f2"):
            bits = rng.integers(0, 1 << 16, (n, 1), np.uint16)
            finite = np.where(bits & 0x7C00 == 0x7C00, bits & 0x83FF, bits)
            blocks[name] = (finite if scales is None else rng.choice(scales, (n, 1))).view(np.float16)
    return blocks.view(np.uint8).reshape(n, fmt.block_bytes)


def expected(raw: np.ndarray, name: str) -> np.ndarray:
    with np.errstate(all="ignore"):
        return oracle.dequantize(raw, GGMLQuantizationType[name])


@pytest.mark.parametrize("name", NAMES)
def test_random_blocks_expand_to_the_same_bits_as_the_gguf_package(name):
    raw = random_blocks(FORMATS[name], 4096)
    got = dequantize(raw, FORMATS[name])
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got.view(np.uint32), expected(raw, name).view(np.uint32))


@pytest.mark.parametrize("name", NAMES)
def test_subnormal_negative_and_huge_scales(name):
    raw = random_blocks(FORMATS[name], 2048, ODD_SCALES)
    got, want = dequantize(raw, FORMATS[name]), expected(raw, name)
    np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32))


@pytest.mark.parametrize("name", NAMES)
def test_infinite_and_nan_scales_pass_through_without_a_warning(name):
    raw = random_blocks(FORMATS[name], 512, np.concatenate([ODD_SCALES, NOT_FINITE]))
    np.testing.assert_array_equal(dequantize(raw, FORMATS[name]), expected(raw, name))


def test_every_mxfp4_exponent():
    raw = np.zeros((256, 17), np.uint8)
    raw[:, 0] = np.arange(256)
    raw[:, 1:] = np.arange(16) | (np.arange(16)[::-1] << 4)
    got = dequantize(raw, FORMATS["MXFP4"])
    np.testing.assert_array_equal(got.view(np.uint32), expected(raw, "MXFP4").view(np.uint32))
    assert got[127, 5] == 3.0  # exponent 127 is the scale 1, and code 5 stands for 3


def test_every_half_and_every_brain_float():
    raw = np.arange(1 << 16, dtype="<u2").view(np.uint8)
    with np.errstate(all="ignore"):
        halves = raw.view("<f2").astype(np.float32)
    np.testing.assert_array_equal(dequantize(raw, FORMATS["F16"]), halves)
    brains = dequantize(raw, FORMATS["BF16"]).view(np.uint32)
    np.testing.assert_array_equal(brains, np.arange(1 << 16, dtype=np.uint32) << 16)


@pytest.mark.parametrize("name", NAMES)
def test_rows_keep_their_shape_across_pieces(name):
    fmt = FORMATS[name]
    columns = 256 * 3
    raw = random_blocks(fmt, 5 * 7 * columns // fmt.block_size).reshape(5, 7, fmt.row_bytes(columns))
    got = dequantize(raw, fmt)
    assert got.shape == (5, 7, columns)
    np.testing.assert_array_equal(got[3, 2], dequantize(raw[3, 2].copy(), fmt))
    np.testing.assert_array_equal(fmt.dequantize(raw[:, ::2]), got[:, ::2])


def test_empty_rows():
    assert dequantize(np.zeros((3, 0), np.uint8), FORMATS["Q4_K"]).shape == (3, 0)


def test_the_tables_name_every_ggml_format_once_with_its_sizes():
    for kind in GGMLQuantizationType:
        if kind.value in FORMATS_BY_ID:
            fmt = FORMATS_BY_ID[kind.value]
            assert (fmt.name, (fmt.block_size, fmt.block_bytes)) == (kind.name, GGML_QUANT_SIZES[kind])
            assert FORMATS[kind.name] is fmt
        else:
            assert UNSUPPORTED[kind.value] == kind.name
    ids = [*FORMATS_BY_ID, *UNSUPPORTED, *REMOVED]
    assert len(ids) == len(set(ids))


def test_formats_that_are_not_implemented_are_refused_by_name():
    with pytest.raises(UnsupportedModelError, match="IQ2_XXS"):
        format_by_id(16)
    with pytest.raises(CheckpointError, match=r"IQ4_NL_4_4.*withdrawn"):
        format_by_id(36)
    with pytest.raises(CheckpointError, match="999"):
        format_by_id(999)


def test_broken_rows_are_refused():
    with pytest.raises(CheckpointError, match=r"19 bytes.*Q4_0.*18"):
        dequantize(np.zeros(19, np.uint8), FORMATS["Q4_0"])
    with pytest.raises(CheckpointError, match=r"100 columns.*Q4_K"):
        FORMATS["Q4_K"].row_bytes(100)
    with pytest.raises(CheckpointError, match="int8"):
        dequantize(np.zeros(18, np.int8), FORMATS["Q4_0"])
