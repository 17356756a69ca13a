"""Pre-quantized layouts: the numbers are those of the libraries that define them, within the stated rounding.

compressed-tensors and bitsandbytes are held to `tests/data/prequantized.npz`, which those libraries packed; GPTQ, AWQ,
MXFP4 and FP8 with blocks to packers that are written out below from their descriptions, bit by bit.
"""

import json
import warnings
from pathlib import Path

import numpy as np
import pytest

from ropewalk import LLM
from ropewalk.checkpoint.base import open_checkpoint
from ropewalk.checkpoint.prequantized import METHODS, join
from ropewalk.checkpoint.quants import MXFP4_LEVELS, dequantize
from ropewalk.checkpoint.safetensors import open_safetensors
from ropewalk.errors import CheckpointError, UnsupportedModelError
from ropewalk.model.config import ModelConfig
from ropewalk.model.reference import Reference
from ropewalk.quantize import Requantized

pytestmark = pytest.mark.filterwarnings("ignore:n_threads is 2, and this process may use 1 CPU:UserWarning")
PACKED = np.load(Path(__file__).parents[1] / "data" / "prequantized.npz")
CONFIGS = json.loads(str(PACKED["config"]))


def joined(folders, folder, tensors, method, name="x.weight"):
    """The source of one weight, as its format's name and float32 numbers."""
    path = folder / "model.safetensors"
    folders.save(path, tensors)
    stored = open_safetensors(path)
    sources = join(stored, list(stored.tensors), {"quantization_config": method}, "config.json")
    source = sources.pop(name)
    assert not sources
    raw = np.ascontiguousarray(source.fetch()).view(np.uint8)
    return source.format.name, dequantize(raw.reshape(source.shape[0], -1), source.format).reshape(
        source.shape
    )


def stored_case(case):
    tensors = {}
    for key in PACKED.files:
        owner, _, part = key.partition("|")
        if owner == case and part != "expected":
            part, _, dtype = part.partition(":")
            tensors[f"x.{part}"] = (dtype, PACKED[key]) if dtype else PACKED[key]
    return tensors, PACKED[f"{case}|expected"]


@pytest.mark.parametrize(
    ("case", "fmt", "relative"),
    [
        ("int4, groups of 32", "Q4_0", 2**-11),  # its scales are float32
        ("int4, zero points", "Q4_1", 2**-9),
        ("int8, packed", "Q8_0", 2**-11),
        ("int8", "Q8_0", 2**-11),
        ("int8, whole tensor", "Q8_0", 2**-11),
        ("fp8, rows", "F16", 2**-11),
        ("nf4", "F16", 2**-11),
        ("nf4, twice", "F16", 2**-11),
        ("fp4", "F16", 2**-11),
        ("int8, bitsandbytes", "Q8_0", 2**-11),
    ],
)
def test_what_the_libraries_packed(tmp_path, folders, case, fmt, relative):
    tensors, expected = stored_case(case)
    found, values = joined(folders, tmp_path, tensors, CONFIGS[case])
    assert found == fmt
    largest = np.abs(expected).reshape(len(expected), -1, 32).max(-1).repeat(32, axis=1)
    assert (np.abs(values - expected) <= relative * largest).all()
    assert np.abs(expected).max() > 0.1


def pack(codes, bits, order=None):
    """int32 words along the last axis, lowest bits first; `order` says which code each place holds."""
    per_word = 32 // bits
    words = np.zeros((*codes.shape[:-1], codes.shape[-1] // per_word), np.int64)
    for place in range(per_word):
        words |= codes[..., (order or range(per_word))[place] :: per_word].astype(np.int64) << (bits * place)
    return words.astype(np.uint32).view(np.int32)


def affine(bits, rows, columns, group, zero):
    """Random codes, scales and zero points, and the weights that they stand for."""
    rng = np.random.default_rng(bits + group)
    codes = rng.integers(0, 2**bits, (rows, columns))
    scales = (rng.random((rows, columns // group)) * 0.01 + 0.001).astype(np.float16)
    zeros = np.full(scales.shape, zero) if zero is not None else rng.integers(1, 2**bits, scales.shape)
    groups = np.arange(columns) // group
    exact = scales.astype(np.float64)[:, groups] * (codes - zeros[:, groups])
    return codes, scales, zeros, exact


@pytest.mark.parametrize("layout", ["gptq", "gptq_v2"])
@pytest.mark.parametrize(
    ("bits", "group", "zero", "fmt", "steps"),
    [(4, 32, 8, "Q4_0", 0), (4, 128, None, "Q4_1", 2**-7), (8, 64, 128, "Q8_0", 0), (2, 32, None, "Q4_1", 2**-7),
     (8, 64, None, "F16", 2**-3)],
)  # fmt: skip
def test_gptq(tmp_path, folders, layout, bits, group, zero, fmt, steps):
    codes, scales, zeros, exact = affine(bits, 32, 256, group, zero)
    tensors = {
        "x.qweight": pack(codes, bits).T.copy(),
        "x.qzeros": pack((zeros - (layout == "gptq")).T % 2**bits, bits),
        "x.scales": scales.T.copy(),
        "x.g_idx": (np.arange(256) // group).astype(np.int32),
    }
    method = {"quant_method": "gptq", "bits": bits, "group_size": group, "checkpoint_format": layout}
    found, values = joined(folders, tmp_path, tensors, method)
    assert found == fmt
    step = scales.astype(np.float64).repeat(group, axis=1)
    assert (np.abs(values - exact) <= steps * step).all()


def pack_down(codes, bits):
    """int32 words along the first axis."""
    return pack(codes.T, bits).T.copy()


def test_gptq_with_columns_out_of_order(tmp_path, folders):
    codes, scales, _, _ = affine(4, 32, 128, 32, 8)
    order = np.random.default_rng(1).permutation(128) // 32
    tensors = {
        "x.qweight": pack_down(codes.T, 4),
        "x.qzeros": pack(np.full((4, 32), 7), 4),
        "x.scales": scales.T.copy(),
        "x.g_idx": order.astype(np.int32),
    }
    found, values = joined(folders, tmp_path, tensors, {"quant_method": "gptq", "bits": 4})
    exact = scales.astype(np.float64)[:, order] * (codes - 8)
    assert found == "F16"
    assert np.abs(values - exact).max() <= 2**-11 * np.abs(exact).max()
    tensors["x.g_idx"] = np.full(128, 4, np.int32)
    with pytest.raises(CheckpointError, match=r"x\.g_idx names groups outside 0 to 3"):
        joined(folders, tmp_path, tensors, {"quant_method": "gptq", "bits": 4})


@pytest.mark.parametrize(("zero", "fmt"), [(8, "Q4_0"), (None, "Q4_1")])
def test_awq(tmp_path, folders, zero, fmt):
    codes, scales, zeros, exact = affine(4, 32, 256, 128, zero)
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    tensors = {
        "x.qweight": pack(codes.T, 4, order),
        "x.qzeros": pack(zeros.T, 4, order),
        "x.scales": scales.T.copy(),
    }
    found, values = joined(folders, tmp_path, tensors, {"quant_method": "awq", "bits": 4, "version": "gemm"})
    assert found == fmt
    assert (np.abs(values - exact) <= (0 if zero else 2**-7) * scales.astype(float).repeat(128, axis=1)).all()


def test_fp8_with_blocks(tmp_path, folders):
    """E4M3 bit by bit: (1 + m / 8) 2^(e − 7), subnormal m / 8 · 2^−6; blocks that reach over the edge."""
    rng = np.random.default_rng(2)
    codes = rng.integers(0, 127, (200, 160)).astype(np.uint8) | (rng.integers(0, 2, (200, 160)) << 7).astype(
        np.uint8
    )
    scales = (rng.random((2, 2)) * 0.001).astype(np.float32)
    exact = np.empty(codes.shape)
    for (i, j), code in np.ndenumerate(codes):
        exponent, mantissa = (int(code) >> 3) & 15, int(code) & 7
        size = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
        exact[i, j] = (-size if code > 127 else size) * float(scales[i // 128, j // 128])
    tensors = {"x.weight": ("F8_E4M3", codes), "x.weight_scale_inv": scales}
    method = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    found, values = joined(folders, tmp_path, tensors, method)
    assert found == "F16"
    assert (np.abs(values - exact) <= 2**-11 * np.abs(exact) + 2**-25).all()
    found, values = joined(
        folders, tmp_path, tensors | {"x.weight_scale_inv": scales * np.float32(1e6)}, method
    )
    assert found == "BF16"
    assert (np.abs(values - exact * 1e6) <= 2**-8 * np.abs(exact * 1e6)).all()
    with pytest.raises(CheckpointError, match=r"x\.weight_scale_inv has shape \[2, 2\], which does not fit"):
        joined(folders, tmp_path, tensors, method | {"weight_block_size": [64, 64]})


def test_mxfp4_is_exact(tmp_path, folders):
    rng = np.random.default_rng(4)
    codes = rng.integers(0, 16, (3, 8, 64)).astype(np.uint8)
    exponents = rng.integers(110, 130, (3, 8, 2)).astype(np.uint8)
    pairs = codes.reshape(3, 8, 2, 16, 2)
    tensors = {"x_blocks": pairs[..., 0] | (pairs[..., 1] << 4), "x_scales": exponents}
    path = tmp_path / "model.safetensors"
    folders.save(path, tensors)
    stored = open_safetensors(path)
    source = join(stored, list(stored.tensors), {"quantization_config": {"quant_method": "mxfp4"}}, "c")[
        "x.weight"
    ]
    exact = MXFP4_LEVELS[codes] / 2 * 2.0 ** (exponents.astype(float) - 127).repeat(32, axis=-1)
    assert source.shape == (3, 8, 64)
    assert np.array_equal(dequantize(source.fetch(), source.format), exact.astype(np.float32))


def test_b1_quantized_rows_are_permuted_as_they_are(tmp_path, folders):
    """A model with GPTQ matrices has the logits of the same model with the numbers written out."""
    parts = folders.parts("llama")
    plain = folders.parts("llama")
    for name in [n for n in parts.tensors if n.endswith("_proj.weight")]:
        rows, columns = parts.tensors[name].shape
        codes, scales, _, exact = affine(4, rows, columns, 32, 8)
        stem = name.removesuffix("weight")
        del parts.tensors[name]
        parts.tensors |= {
            stem + "qweight": pack_down(codes.T, 4),
            stem + "qzeros": pack(np.full((columns // 32, rows), 7), 4),
            stem + "scales": scales.T.copy(),
        }
        plain.tensors[name] = exact.astype(np.float32)
    parts.config["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    logits = []
    for each in (parts, plain):
        checkpoint = open_checkpoint(folders.write(tmp_path / "m", each))
        config = ModelConfig.from_gguf(checkpoint.metadata, checkpoint.tensors)
        logits.append(Reference(config, checkpoint).logits([5, 9, 7, 8]))
    assert np.array_equal(*logits)


def test_gpt_oss_with_mxfp4_experts_is_gpt_oss_with_the_numbers_written_out(tmp_path, folders):
    """Rows of gate and up alternate; what is stored in plain numbers is stored the other way round."""
    rng = np.random.default_rng(6)
    packed, plain = folders.parts("gpt_oss"), folders.parts("gpt_oss")
    for name in [n for n in packed.tensors if n.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = packed.tensors.pop(name).shape
        codes = rng.integers(0, 16, (experts, rows, columns)).astype(np.uint8)
        exponents = rng.integers(122, 126, (experts, rows, columns // 32)).astype(np.uint8)
        pairs = codes.reshape(experts, rows, columns // 32, 16, 2)
        packed.tensors[name + "_blocks"] = pairs[..., 0] | (pairs[..., 1] << 4)
        packed.tensors[name + "_scales"] = exponents
        exact = MXFP4_LEVELS[codes] / 2 * 2.0 ** (exponents.astype(float) - 127).repeat(32, axis=-1)
        plain.tensors[name] = exact.swapaxes(1, 2).astype(np.float32).copy()
    packed.config["quantization_config"] = {"quant_method": "mxfp4"}
    logits = []
    for each in (packed, plain):
        checkpoint = open_checkpoint(folders.write(tmp_path / "m", each))
        config = ModelConfig.from_gguf(checkpoint.metadata, checkpoint.tensors)
        logits.append(Reference(config, checkpoint).logits([5, 9, 7, 8]))
    assert np.array_equal(*logits)


# Through the engine's kernels.


def gptq(rows, columns, zero=8):
    codes, scales, zeros, _ = affine(4, rows, columns, 32, zero)
    return {
        "qweight": pack_down(codes.T, 4),
        "qzeros": pack((zeros.T - 1) % 16, 4),
        "scales": scales.T.copy(),
    }


def awq(rows, columns):
    codes, scales, zeros, _ = affine(4, rows, columns, 32, None)
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    return {
        "qweight": pack(codes.T, 4, order),
        "qzeros": pack(zeros.T, 4, order),
        "scales": scales.T.copy(),
    }


def int8(rows, columns, scales="weight_scale"):
    rng = np.random.default_rng(rows + columns)
    codes = rng.integers(-127, 128, (rows, columns)).astype(np.int8)
    if scales == "SCB":
        return {"weight": codes, "SCB": rng.random(rows, np.float32) + np.float32(0.3)}
    return {"weight": codes, scales: (rng.random((rows, 1), np.float32) + np.float32(0.3)) / np.float32(127)}


def fp8(rows, columns):
    rng = np.random.default_rng(rows + columns)
    codes = rng.integers(0, 120, (rows, columns)) | (rng.integers(0, 2, (rows, columns)) << 7)
    return {
        "weight": ("F8_E4M3", codes.astype(np.uint8)),
        "weight_scale_inv": np.full((1, 1), 0.004, np.float32),
    }


def nf4(rows, columns):
    rng = np.random.default_rng(rows + columns)
    parts, _ = stored_case("nf4")
    state = json.loads(bytes(parts["x.weight.quant_state.bitsandbytes__nf4"])) | {"shape": [rows, columns]}
    return {
        "weight": rng.integers(0, 256, (rows * columns // 2, 1)).astype(np.uint8),
        "weight.absmax": rng.random(rows * columns // state["blocksize"], np.float32) + np.float32(0.2),
        "weight.quant_map": parts["x.weight.quant_map"],
        "weight.quant_state.bitsandbytes__nf4": np.frombuffer(json.dumps(state).encode(), np.uint8),
    }


FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


@pytest.mark.parametrize(
    ("packer", "method", "fmt", "smaller"),
    [
        (gptq, {"quant_method": "gptq", "bits": 4, "group_size": 32}, "Q4_0", None),
        (lambda *n: gptq(*n, None), {"quant_method": "gptq", "bits": 4, "group_size": 32}, "Q4_1", None),
        (awq, {"quant_method": "awq", "bits": 4, "version": "gemm"}, "Q4_1", None),
        (int8, CONFIGS["int8"], "Q8_0", "Q5_0"),
        (lambda *n: int8(*n, "SCB"), CONFIGS["int8, bitsandbytes"], "Q8_0", "Q5_0"),
        (nf4, CONFIGS["nf4"], "F16", "Q5_0"),
        (fp8, FP8, "F16", "Q5_0"),
    ],
    ids=["gptq", "gptq, zero points", "awq", "int8", "int8, bitsandbytes", "nf4", "fp8"],
)
@pytest.mark.filterwarnings("ignore:nothing becomes smaller")
def test_the_kernels_compute_with_them(tmp_path, folders, packer, method, fmt, smaller):
    """Their logits are the reference's, also where loading quantizes what is larger once more."""
    parts = folders.parts("llama, wide heads")
    for name in [n for n in parts.tensors if n.endswith("_proj.weight")]:
        packed = packer(*parts.tensors.pop(name).shape)
        parts.tensors |= {name.removesuffix("weight") + part: array for part, array in packed.items()}
    parts.config["quantization_config"] = method
    folder = folders.write(tmp_path / "m", parts)
    held_to_the_reference(open_checkpoint(folder), LLM(folder, n_threads=2), fmt)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        again = Requantized(open_checkpoint(folder), "q4")
    held_to_the_reference(again, LLM(folder, n_threads=2, quantize="q4"), smaller or fmt)


def test_the_kernels_compute_with_mxfp4_experts(tmp_path, folders):
    parts, rng = folders.parts("gpt_oss"), np.random.default_rng(6)
    for name in [n for n in parts.tensors if n.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = parts.tensors.pop(name).shape
        blocks = rng.integers(0, 256, (experts, rows, columns // 32, 16))
        parts.tensors[name + "_blocks"] = blocks.astype(np.uint8)
        exponents = rng.integers(121, 125, (experts, rows, columns // 32))
        parts.tensors[name + "_scales"] = exponents.astype(np.uint8)
    parts.config["quantization_config"] = {"quant_method": "mxfp4"}
    folder = folders.write(tmp_path / "m", parts)
    held_to_the_reference(open_checkpoint(folder), LLM(folder, n_threads=2), "MXFP4", "ffn_up_exps")


def held_to_the_reference(checkpoint, llm, fmt, stem="ffn_up"):
    ids = [5, 9, 7, 8, 3, 60, 44, 21, 17]
    with checkpoint, llm:
        assert checkpoint.tensors[f"blk.1.{stem}.weight"].format.name == fmt
        config = ModelConfig.from_gguf(checkpoint.metadata, checkpoint.tensors)
        expected, found = Reference(config, checkpoint).logits(ids), llm.logits(ids)
    assert np.abs(found - expected).std() < 0.01 * expected.std()


@pytest.mark.parametrize(
    ("method", "kind", "words"),
    [
        ({"quant_method": "gptk"}, UnsupportedModelError, "'gptk' is not supported; did you mean gptq"),
        ({"quant_method": None}, UnsupportedModelError, "supported are gptq, awq"),
        ("gptq", UnsupportedModelError, "quant_method"),
        ({"quant_method": "gptq", "bits": 3}, UnsupportedModelError, "bits = 3"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, UnsupportedModelError, "'marlin'"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, UnsupportedModelError, "'gemv'"),
        ({"quant_method": "compressed-tensors", "format": "marlin-24"}, UnsupportedModelError, "'marlin-24'"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized",
          "config_groups": {"a": {"weights": {"num_bits": 3}}}}, UnsupportedModelError, "num_bits"),
        ({"quant_method": "gptq", "bits": 4}, CheckpointError, r"x\.qzeros is missing"),
        ({"quant_method": "awq", "bits": 4}, CheckpointError, r"x\.qzeros is missing"),
    ],
)  # fmt: skip
def test_a_quantization_that_cannot_be_read(tmp_path, folders, method, kind, words):
    tensors = {"x.qweight": np.zeros((4, 32), np.int32), "x.scales": np.ones((1, 32), np.float16)}
    with pytest.raises(kind, match=words):
        joined(folders, tmp_path, tensors, method)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"x.qzeros": np.zeros((1, 3), np.int32)}, r"x\.qzeros is I32 \[1, 3\]; it must be I32 \[1, 4\]"),
        ({"x.qweight": np.zeros((4, 31), np.int32)}, r"x\.qweight"),
        ({"x.scales": np.full((1, 32), np.inf, np.float16)}, "not all finite"),
        (
            {"x.scales": np.zeros((3, 32), np.float16), "x.qzeros": np.zeros((3, 4), np.int32)},
            "scales of shape",
        ),
        ({"x.g_idx": np.zeros(5, np.int32)}, r"x\.g_idx"),
    ],
)
def test_parts_that_do_not_fit(tmp_path, folders, changes, words):
    tensors = {
        "x.qweight": np.zeros((4, 32), np.int32),
        "x.qzeros": np.zeros((1, 4), np.int32),
        "x.scales": np.ones((1, 32), np.float16),
    }
    with pytest.raises(CheckpointError, match=words):
        joined(folders, tmp_path, tensors | changes, {"quant_method": "gptq", "bits": 4})


@pytest.mark.parametrize("case", ["nf4", "nf4, twice"])
def test_four_bit_parts_that_do_not_fit(tmp_path, folders, case):
    tensors, _ = stored_case(case)
    state = "x.weight.quant_state.bitsandbytes__nf4"
    for name, value, words in (
        (state, np.frombuffer(b"{", np.uint8), "must state a shape"),
        (state, np.frombuffer(b'{"shape": [16, 128], "blocksize": 0}', np.uint8), "must state a shape"),
        ("x.weight", np.zeros((3, 1), np.uint8), "must have 1024 bytes"),
        ("x.weight.quant_map", np.zeros(15, np.float32), "do not fit"),
        ("x.weight.absmax", tensors["x.weight.absmax"][:5], "do not fit"),
    ):
        with pytest.raises(CheckpointError, match=words):
            joined(folders, tmp_path, tensors | {name: value}, CONFIGS[case])


def test_every_method_has_a_case():
    tested = {c["quant_method"] for c in CONFIGS.values()} | {"gptq", "awq", "fp8", "mxfp4"}
    assert tested | {"fbgemm_fp8"} == METHODS.keys()
