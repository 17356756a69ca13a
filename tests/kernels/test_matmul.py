"""Packing and matrix products: values against NumPy, and the same bits for every tile."""

import numpy as np
import pytest

from ropewalk.checkpoint.quants import FORMATS, dequantize
from ropewalk.kernels import formats as F
from ropewalk.kernels.definition import FINE_TOKEN_GROUP_BYTES, TOKEN_GROUP_BYTES
from ropewalk.kernels.jit import kernel
from ropewalk.kernels.matmul import TILES, matmul_worker
from ropewalk.kernels.pack import packer
from ropewalk.kernels.simd import call

ROWS, COLUMNS = 40, 512


@kernel
def call_worker(address, arguments):
    call(address, arguments)


def random_blocks(name: str, rows: int = ROWS, columns: int = COLUMNS) -> np.ndarray:
    """Raw blocks whose scales are moderate float16 numbers and whose other bytes are anything."""
    rng = np.random.default_rng(sum(name.encode()))
    fmt = FORMATS[name]
    if name in ("F32", "F16", "BF16"):
        x = rng.standard_normal((rows, columns)).astype(np.float32)
        if name == "F32":
            return x.view(np.uint8)
        return (
            x.astype(np.float16).view(np.uint8)
            if name == "F16"
            else (x.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
        )
    raw = rng.integers(0, 256, (rows, columns // fmt.block_size, fmt.block_bytes), np.uint8)
    half_at = {
        "Q4_1": (0, 2),
        "Q5_1": (0, 2),
        "Q4_K": (0, 2),
        "Q5_K": (0, 2),
        "Q2_K": (80, 82),
        "Q6_K": (208,),
        "Q3_K": (108,),
        "MXFP4": (),
    }
    for at in half_at.get(name, (0,)):
        scale = rng.uniform(-0.1, 0.1, raw.shape[:2]).astype(np.float16)
        raw[:, :, at : at + 2] = scale[..., None].view(np.uint8)
    if name == "MXFP4":
        raw[:, :, 0] = rng.integers(118, 128, raw.shape[:2])
    return raw.reshape(rows, -1)


def packed_panels(name: str, raw: np.ndarray, columns: int = COLUMNS) -> np.ndarray:
    packed = F.PACKED[name]
    panels = np.zeros((-(-raw.shape[0] // 16), packed.panel_bytes(columns)), np.uint8)
    packer(packed.kind, FORMATS[name].block_bytes)(raw, panels, 0)
    return panels


def quantized_tile(x: np.ndarray, fine: int) -> tuple[np.ndarray, np.ndarray]:
    """Activations [tile, columns] as a tile's bytes, and as the numbers that those bytes stand for (float64)."""
    tile, columns = x.shape
    groups = x.reshape(tile, -1, 32)
    s = np.abs(groups).max(-1) / np.float32(32512 if fine else 127)
    q = np.rint(groups / s[..., None]).astype(np.int32)
    out = []
    for g in range(columns // 32):
        x_q = q[:, g]
        high = (x_q + 128) >> 8
        planes = [high.astype(np.int8), (x_q - 256 * high).astype(np.int8)] if fine else [x_q.astype(np.int8)]
        t = s[:, g] * x_q.sum(-1).astype(np.float32)
        sums = [-x_q[:, :16].sum(-1, dtype=np.int32), -x_q[:, 16:].sum(-1, dtype=np.int32)]
        out += [np.ascontiguousarray(f).view(np.uint8).ravel() for f in (*planes, s[:, g], t, *sums)]
    data = np.concatenate(out)
    assert data.size == columns // 32 * tile * (FINE_TOKEN_GROUP_BYTES if fine else TOKEN_GROUP_BYTES)
    return data, (q * s[..., None].astype(np.float64)).reshape(tile, columns)


def multiply(
    name: str, panels: np.ndarray, x: np.ndarray, fine: int = 0, add_to: np.ndarray | None = None
) -> np.ndarray:
    tile = x.shape[0]
    packed = F.PACKED[name]
    if packed.kind in F.FLOAT_KINDS:
        data = np.ascontiguousarray(x.reshape(tile, -1, 32).transpose(1, 0, 2))
    else:
        data, _ = quantized_tile(x, fine)
    y = np.zeros((tile, 16 * len(panels)), np.float32) if add_to is None else add_to
    call_worker(
        matmul_worker(packed.kind, tile, fine),
        (
            panels.ctypes.data,
            len(panels),
            panels.shape[1],
            COLUMNS // 32,
            data.ctypes.data,
            y.ctypes.data,
            y.strides[0],
            tile,
            int(add_to is not None),
        ),
    )
    return y[:, :ROWS]


@pytest.mark.parametrize("fine", [0, 1])
@pytest.mark.parametrize("name", F.PACKED)
def test_products_equal_the_dequantized_weights_times_the_quantized_activations(name, fine):
    raw = random_blocks(name)
    panels = packed_panels(name, raw)
    w = dequantize(raw, FORMATS[name]).astype(np.float64)
    x = np.random.default_rng(1).standard_normal((4, COLUMNS)).astype(np.float32)
    exact = x.astype(np.float64) if F.PACKED[name].kind in F.FLOAT_KINDS else quantized_tile(x, fine)[1]
    y = multiply(name, panels, x, fine)
    scale = np.abs(w) @ np.abs(exact).T
    assert np.max(np.abs(y.T - w @ exact.T) / scale) < 3e-6


@pytest.mark.parametrize("fine", [0, 1])
@pytest.mark.parametrize("name", F.PACKED)
def test_every_tile_gives_the_same_bits(name, fine):
    panels = packed_panels(name, random_blocks(name))
    x = np.random.default_rng(2).standard_normal((16, COLUMNS)).astype(np.float32)
    alone = np.concatenate([multiply(name, panels, x[i : i + 1], fine) for i in range(16)])
    for tile in TILES[1:]:
        assert np.array_equal(multiply(name, panels, x[:tile], fine), alone[:tile]), tile


def test_adding_to_the_output_is_one_more_float32_addition():
    panels = packed_panels("Q4_1", random_blocks("Q4_1"))
    rng = np.random.default_rng(3)
    x = rng.standard_normal((2, COLUMNS)).astype(np.float32)
    before = rng.standard_normal((2, 48)).astype(np.float32)
    total = multiply("Q4_1", panels, x, add_to=before.copy())
    assert np.array_equal(total, before[:, :ROWS] + multiply("Q4_1", panels, x))


@pytest.mark.parametrize("name", [n for n in F.PACKED if n not in ("F32", "F16", "BF16")])
def test_a_panel_costs_little_more_than_the_file(name):
    allowed = 1.1 if name in ("Q2_K", "Q3_K") else 1.05
    file_bytes = 16 * 2048 // FORMATS[name].block_size * FORMATS[name].block_bytes
    assert F.PACKED[name].panel_bytes(2048) <= allowed * file_bytes
