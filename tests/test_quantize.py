"""Whole models: mixes are those of real files, files are read again, nothing is overwritten, loading quantizes."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import gguf
import numpy as np
import pytest
from typer.testing import CliRunner

from ropewalk import LLM
from ropewalk.checkpoint.base import open_checkpoint
from ropewalk.checkpoint.gguf import open_gguf
from ropewalk.checkpoint.mixes import MIXES, Place, format_for, mix_named, place_of
from ropewalk.checkpoint.quants import FORMATS, all_finite
from ropewalk.checkpoint.writer import NewTensor, header, write_gguf
from ropewalk.cli.app import build
from ropewalk.encoder import encode_rows
from ropewalk.errors import (
    CheckpointError,
    InvalidParameterError,
    ModelNotFoundError,
    PromptError,
    UnsupportedModelError,
)
from ropewalk.imatrix import Sums, collect, read_imatrix, split_windows, write_imatrix
from ropewalk.model.config import ModelConfig
from ropewalk.quantize import Requantized, plan_formats, quantize_model

KEYS = {
    "block_count": 2, "context_length": 64, "embedding_length": 256, "feed_forward_length": 512,
    "attention.head_count": 8, "attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": 1e-5,
}  # fmt: skip


def small_model(path: Path) -> Path:
    """A float32 model of random weights whose rows are long enough for blocks of 256, with a tokenizer."""
    rng = np.random.default_rng(11)
    tokens = [f"<0x{b:02X}>" for b in range(256)] + ["<s>", "</s>", "▁", "a", "b", "ab"]
    hidden, ffn, kv = 256, 512, 64
    shapes = {"token_embd.weight": (len(tokens), hidden), "output_norm.weight": (hidden,)}
    for n in range(2):
        shapes |= {
            f"blk.{n}.attn_norm.weight": (hidden,),
            f"blk.{n}.attn_q.weight": (hidden, hidden),
            f"blk.{n}.attn_k.weight": (kv, hidden),
            f"blk.{n}.attn_v.weight": (kv, hidden),
            f"blk.{n}.attn_output.weight": (hidden, hidden),
            f"blk.{n}.ffn_norm.weight": (hidden,),
            f"blk.{n}.ffn_gate.weight": (ffn, hidden),
            f"blk.{n}.ffn_up.weight": (ffn, hidden),
            f"blk.{n}.ffn_down.weight": (hidden, ffn),
        }
    arrays = {
        name: np.ones(shape, np.float32)
        if len(shape) == 1
        else (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)
        for name, shape in shapes.items()
    }
    metadata = {"general.architecture": "llama", "general.name": "small"}
    metadata |= {f"llama.{key}": value for key, value in KEYS.items()}
    metadata |= {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": np.zeros(len(tokens), np.float32),
        "tokenizer.ggml.token_type": np.array([6] * 256 + [3, 3] + [1] * 4, np.int32),
        "tokenizer.ggml.bos_token_id": 256,
        "tokenizer.ggml.eos_token_id": 257,
    }
    tensors = [NewTensor(n, a.shape, FORMATS["F32"]) for n, a in arrays.items()]
    write_gguf(path, metadata, tensors, ([a.view(np.uint8)] for a in arrays.values()))
    return path


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return small_model(tmp_path_factory.mktemp("small") / "small.gguf")


@pytest.mark.parametrize("name", ["gemma3-270m", "qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b"])
def test_q4_k_m_is_what_published_files_of_that_name_are(model_path, name):
    """By kind of tensor: where the layers counted as text (1, 10, 11, 2 …) others of them got more bits."""
    with open_gguf(model_path(name)) as model:
        chosen = plan_formats(model, MIXES["Q4_K_M"])
        kinds = {n: re.sub(r"blk\.\d+\.", "", n) for n in model.tensors}
        ours = Counter((kinds[n], f.name) for n, f in chosen.items())
        theirs = Counter((kinds[n], i.format.name) for n, i in model.tensors.items())
    assert ours == theirs


def test_rules_of_mixes():
    def chosen(mix, role, layer=10, n_layers=32, kv=1, experts=0, columns=4096):
        info = NewTensor(f"blk.{layer}.{role}.weight", (64, columns), FORMATS["F16"])
        return format_for(MIXES[mix], info, Place(role, layer, n_layers, kv, experts)).name

    assert [chosen("Q4_K_M", "ffn_down", n) for n in (3, 4, 5, 6, 27, 28)] == [
        "Q6_K",
        "Q4_K",
        "Q4_K",
        "Q6_K",
        "Q6_K",
        "Q6_K",
    ]
    assert [chosen("Q4_K_S", "ffn_down", n) for n in (3, 4)] == ["Q5_K", "Q4_K"]
    assert [chosen("Q4_K_S", "attn_v", n) for n in (3, 4)] == ["Q5_K", "Q4_K"]
    assert chosen("Q2_K", "attn_v", kv=8) == "Q4_K"
    assert chosen("Q2_K", "attn_v", kv=1) == "Q3_K"
    assert chosen("Q4_K_M", "attn_k", experts=8) == "Q8_0"
    assert chosen("Q3_K_L", "attn_output", experts=8) == "Q3_K"
    assert chosen("Q4_0", "attn_v", experts=8) == "Q8_0"
    assert chosen("Q4_0", "output") == "Q6_K"
    assert [chosen("IQ4_NL", "ffn_down", n) for n in (3, 4)] == ["Q5_K", "IQ4_NL"]
    for role in ("attn_v", "attn_qkv"):  # what they are in files of llama.cpp's quantizer
        assert [chosen("Q4_K_M", role, n) for n in (3, 4)] == ["Q6_K", "Q4_K"]
        assert [chosen("Q5_K_M", role, n) for n in (3, 4)] == ["Q6_K", "Q5_K"]
        assert [chosen("Q3_K_M", role, n) for n in (1, 2)] == ["Q5_K", "Q4_K"]
        assert chosen("Q3_K_L", role) == "Q5_K"
        large = {"n_layers": 80, "kv": 8, "layer": 11}
        mixes = ("Q2_K", "Q3_K_S", "Q3_K_M", "Q4_K_S", "Q4_K_M")
        assert {chosen(mix, role, **large) for mix in mixes} == {"Q5_K"}
    assert chosen("Q4_K_M", "ffn_up", columns=576) == "Q5_0"
    assert chosen("Q6_K", "ffn_up", columns=80) == "F16"
    for role in ("ffn_gate_inp", "attn_norm", "attn_q_norm"):
        assert chosen("Q4_K_M", role) == "F16"


def test_of_tied_models_the_embedding_is_the_output():
    metadata = {
        "general.architecture": "llama",
        "llama.attention.head_count": 8,
        "llama.attention.head_count_kv": 2,
    }
    assert place_of("token_embd.weight", metadata, tied=True).role == "output"
    assert place_of("token_embd.weight", metadata, tied=False).role == "token_embd"
    place = place_of("blk.12.ffn_down_exps.weight", metadata, tied=False)
    assert (place.role, place.layer, place.n_heads_per_kv) == ("ffn_down", 12, 4)


@pytest.mark.parametrize("mix", MIXES)
def test_every_mix_makes_a_file_that_runs(tmp_path, small, mix):
    path = tmp_path / "out.gguf"
    with open_checkpoint(small) as model:
        report = quantize_model(model, path, MIXES[mix], n_threads=2)
        original = {n: model.tensor(n) for n in model.tensors}
        keys = set(model.metadata)
    assert not report.requantized
    with open_gguf(path) as made:
        assert set(made.metadata) == keys | {"general.file_type", "general.quantization_version"}
        assert made.metadata["general.file_type"] == MIXES[mix].file_type
        assert {n: i.shape for n, i in made.tensors.items()} == {n: a.shape for n, a in original.items()}
        assert report.bytes_after == sum(i.n_bytes for i in made.tensors.values())
        for name, array in original.items():
            found, bits = made.tensor(name), made.tensors[name].format.bits_per_weight
            error = np.sqrt(((found - array) ** 2).mean() / (array**2).mean())
            assert error < {16: 2.0**-8, 32: 2.0**-30}.get(bits, 2.0 ** (2.0 - bits))
        ModelConfig.from_gguf(made.metadata, made.tensors)


def test_experts_are_quantized_one_after_the_other(tmp_path):
    rng = np.random.default_rng(2)
    experts = (rng.standard_normal((3, 8, 64)) * 0.1).astype(np.float32)
    name, importance = "blk.0.ffn_up_exps.weight", rng.random((3, 64)).astype(np.float32)
    tensor = NewTensor(name, experts.shape, FORMATS["F32"])
    write_gguf(tmp_path / "a.gguf", {"general.architecture": "x"}, [tensor], [[experts.view(np.uint8)]])
    for target, given in (
        ("b.gguf", importance),
        ("c.gguf", importance.ravel()),
    ):  # the second as in .dat files
        with open_gguf(tmp_path / "a.gguf") as model:
            quantize_model(model, tmp_path / target, MIXES["Q4_0"], importance={name: given})
        found = open_gguf(tmp_path / target).raw(name)
        for i in range(3):
            assert np.array_equal(found[i], encode_rows(experts[i], FORMATS["Q4_0"], importance[i]))
    assert not np.array_equal(found[0], encode_rows(experts[0], FORMATS["Q4_0"]))


def test_progress_is_told_within_a_tensor(tmp_path):
    sparse_model(tmp_path / "m.gguf", 2, 1024, 1024)
    told = []
    with open_checkpoint(tmp_path / "m.gguf") as model:
        quantize_model(model, tmp_path / "o.gguf", MIXES["Q8_0"], progress=lambda *p: told.append(p))
    assert {(what, total) for what, _, total in told} == {("quantizing m.gguf", 4 << 20)}
    assert [done for _, done, _ in told] == [n << 19 for n in range(9)]  # pieces of 256 rows


def test_threads_do_not_show(tmp_path, small):
    with open_checkpoint(small) as model:
        for threads in (1, 3):
            quantize_model(model, tmp_path / f"{threads}.gguf", MIXES["Q4_K_M"], n_threads=threads)
    assert (tmp_path / "1.gguf").read_bytes() == (tmp_path / "3.gguf").read_bytes()


def test_it_never_overwrites_its_source_nor_anything_unasked(tmp_path, small):
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(small.read_bytes())
    link = tmp_path / "link.gguf"
    link.symlink_to(copy)
    with open_checkpoint(copy) as model:
        for path in (copy, link):
            with pytest.raises(InvalidParameterError, match="is the model itself"):
                quantize_model(model, path, MIXES["Q8_0"], overwrite=True)
        there = tmp_path / "there.gguf"
        there.write_bytes(b"precious")
        with pytest.raises(InvalidParameterError, match="is there already"):
            quantize_model(model, there, MIXES["Q8_0"])
        assert there.read_bytes() == b"precious"
        with pytest.raises(InvalidParameterError, match="is a folder"):
            quantize_model(model, tmp_path, MIXES["Q8_0"])
        with pytest.raises(InvalidParameterError, match="there is no folder"):
            quantize_model(model, tmp_path / "none" / "m.gguf", MIXES["Q8_0"])
        quantize_model(model, there, MIXES["Q8_0"], overwrite=True)
    assert open_gguf(there).tensors["blk.0.attn_q.weight"].format.name == "Q8_0"
    assert copy.read_bytes() == small.read_bytes()


def test_what_a_format_cannot_hold_is_refused_by_the_tensors_name(tmp_path, small):
    with open_checkpoint(small) as model:
        arrays = {n: model.tensor(n).copy() for n in model.tensors}
        metadata = dict(model.metadata)
    arrays["blk.1.ffn_up.weight"][3, 5] = 70000
    path, out = tmp_path / "m.gguf", tmp_path / "o.gguf"
    tensors = [NewTensor(n, a.shape, FORMATS["F32"]) for n, a in arrays.items()]
    write_gguf(path, metadata, tensors, ([a.view(np.uint8)] for a in arrays.values()))
    with open_checkpoint(path) as model:
        with pytest.raises(
            UnsupportedModelError, match=r"blk\.1\.ffn_up\.weight: .* 70000 .*F16 holds.*BF16"
        ):
            quantize_model(model, out, MIXES["F16"])
        assert list(tmp_path.iterdir()) == [path]
        quantize_model(model, out, MIXES["Q4_K_M"])
    assert abs(open_gguf(out).tensor("blk.1.ffn_up.weight")[3, 5] / 70000 - 1) < 0.01


@pytest.mark.parametrize(
    ("name", "field"), [("F32", "x"), ("F16", "x"), ("BF16", "x"), ("Q4_1", "m"), ("Q6_K", "d")]
)
def test_numbers_that_are_copied_must_be_finite(tmp_path, name, field):
    """What is quantized anew is looked at as well; of what stays as it is nothing was."""
    fmt = FORMATS[name]
    blocks = np.zeros((3, 256 // fmt.block_size), fmt.layout)
    path, out = tmp_path / "m.gguf", tmp_path / "o.gguf"
    tensor = NewTensor("blk.0.ffn_up.weight", (3, 256), fmt)
    for nan in (False, True):
        if nan:
            blocks[field][2, 0] = 0x7FC0 if name == "BF16" else np.nan
        rows = blocks.view(np.uint8)
        assert all_finite(rows, fmt) is not nan
        write_gguf(path, {"general.architecture": "llama"}, [tensor], [[rows]])
        refusal = pytest.raises(UnsupportedModelError, match=r"tensor blk\.0\.ffn_up\.weight: NaN or an inf")
        with open_checkpoint(path) as model, refusal if nan else contextlib.nullcontext():
            quantize_model(model, out, MIXES[name], overwrite=True)
    assert np.array_equal(open_gguf(out).tensor(tensor.name), np.zeros((3, 256)))


def test_devices_and_the_model_itself_are_never_replaced(tmp_path, small):
    text = tmp_path / "t.txt"
    text.write_text("ab ab " * 40)
    before, device = small.read_bytes(), Path(os.devnull)
    runner, app = CliRunner(), build()
    for verb in (["quantize", str(small)], ["imatrix", str(small), str(text), "--window", "16"]):
        for target, words in ((device, "device or pipe"), (small, "is the model itself")):
            result = runner.invoke(app, [*verb, "-o", str(target), "--overwrite"])
            assert (result.exit_code, words in result.stderr) == (2, True)
    with pytest.raises(CheckpointError, match="device or pipe"):
        write_gguf(device, {}, [], [])
    assert device.is_char_device()
    assert small.read_bytes() == before


def sparse_model(path: Path, n: int, rows: int, columns: int) -> None:
    """A file of n float16 matrices of zeros, which takes no room on the disk."""
    tensors = [NewTensor(f"blk.{i}.ffn_up.weight", (rows, columns), FORMATS["F16"]) for i in range(n)]
    start = header({"general.architecture": "llama", "llama.block_count": n}, tensors)
    with path.open("wb") as f:
        f.write(start)
        f.truncate(len(start) + sum(t.n_bytes for t in tensors))


CHILD = """
import resource, sys
from pathlib import Path
from ropewalk.checkpoint.base import open_checkpoint
from ropewalk.checkpoint.mixes import MIXES
from ropewalk.quantize import quantize_model
peaks = []
for source in sys.argv[1:]:
    with open_checkpoint(Path(source)) as model:
        quantize_model(model, Path(source + ".out"), MIXES["Q8_0"], n_threads=2)
    peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
print(*peaks)
"""


def test_memory_does_not_grow_with_the_model_or_its_tensors(tmp_path):
    sparse_model(tmp_path / "small.gguf", 1, 256, 256)
    sparse_model(tmp_path / "large.gguf", 2, 12288, 4096)  # 96 MiB each
    paths = [str(tmp_path / name) for name in ("small.gguf", "large.gguf")]
    done = subprocess.run([sys.executable, "-c", CHILD, *paths], capture_output=True, text=True, check=True)
    first, second = map(int, done.stdout.split())
    unit = 1 if sys.platform == "darwin" else 1024
    assert (second - first) * unit < 64 << 20


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_leaves_no_file(tmp_path, name):
    source = tmp_path / "m.gguf"
    sparse_model(source, 400, 2048, 4096)  # it would be at work for long
    command = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    command += "from ropewalk.cli import main; main()"
    arguments = ["quantize", str(source), "-o", str(tmp_path / "o.gguf"), "--type", "Q4_0", "--threads", "1"]
    child = subprocess.Popen([sys.executable, "-c", command, *arguments], stderr=subprocess.PIPE, text=True)
    while child.poll() is None and not list(tmp_path.glob(".o.gguf.*.part")):
        time.sleep(0.02)
    child.send_signal(getattr(signal, name))
    _, errors = child.communicate(timeout=300)
    assert child.returncode == 130
    assert "Traceback" not in errors
    assert list(tmp_path.iterdir()) == [source]


def test_quantizing_twice_is_told_and_unchanged_tensors_are_copied(tmp_path, small):
    with open_checkpoint(small) as model:
        quantize_model(model, tmp_path / "a.gguf", MIXES["Q4_K_M"])
    with open_checkpoint(tmp_path / "a.gguf") as model:
        with pytest.warns(UserWarning, match=r"quantized already \(.*Q4_K"):
            report = quantize_model(model, tmp_path / "b.gguf", MIXES["Q4_0"])
        same = quantize_model(model, tmp_path / "c.gguf", MIXES["Q4_K_M"])
    assert "blk.0.attn_q.weight" in report.requantized
    assert not same.requantized
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "c.gguf").read_bytes()


def test_unknown_types_are_refused_with_near_ones():
    with pytest.raises(InvalidParameterError, match="'Q4_KM'; did you mean Q4_K_M or"):
        mix_named("Q4_KM")
    assert mix_named("q4_k_s") is MIXES["Q4_K_S"]
    assert mix_named("q5") is MIXES["Q5_K_M"]


def test_loading_quantizes_what_becomes_smaller(tmp_path, small):
    with open_checkpoint(small) as model:
        quantize_model(model, tmp_path / "m.gguf", MIXES["Q4_K_M"])
    with (
        Requantized(open_checkpoint(small), "q4", n_threads=2) as quantized,
        open_gguf(tmp_path / "m.gguf") as file,
    ):
        assert {n: i.format for n, i in quantized.tensors.items()} == {
            n: i.format for n, i in file.tensors.items()
        }
        for name in file.tensors:
            assert np.array_equal(quantized.raw(name), file.raw(name))
        assert quantized.raw("token_embd.weight") is quantized.raw("token_embd.weight")
        assert quantized.kind == "GGUF version 3, quantized to Q4_K_M"
    with (
        pytest.warns(UserWarning, match="nothing becomes smaller as Q8_0"),
        Requantized(open_gguf(tmp_path / "m.gguf"), "q8") as quantized,
    ):
        assert not [n for n, i in quantized.tensors.items() if i.format.name == "Q8_0"]
    with pytest.raises(InvalidParameterError, match="there is no quantization 'q3'"):
        Requantized(open_checkpoint(small), "q3")


def test_a_model_quantized_while_loading_is_the_quantized_file(tmp_path, small):
    with open_checkpoint(small) as model:
        quantize_model(model, tmp_path / "m.gguf", MIXES["Q8_0"])
    ids = [256, 259, 260, 261, 65]
    logits = []
    for path, options in ((small, {"quantize": "q8"}), (tmp_path / "m.gguf", {})):
        with LLM(path, n_threads=1, **options) as llm:
            logits.append(llm.logits(ids))
    assert np.array_equal(*logits)


# Importance matrices.


def test_importance_is_the_mean_square_of_the_inputs(small):
    with open_checkpoint(small) as model:
        config = ModelConfig.from_gguf(model.metadata, model.tensors)
        sums = collect(model, config, [[256, 259, 260, 261], [256, 5, 6, 7]])
        norms = model.tensor("token_embd.weight")[[256, 259, 260, 261, 256, 5, 6, 7]]
    matrices = {n for n, i in model.tensors.items() if len(i.shape) > 1}
    assert sums.keys() == matrices
    normed = norms / np.sqrt((norms**2).mean(1, keepdims=True) + np.float32(1e-5))
    expected = (normed**2).mean(0)
    for part in "qkv":
        assert np.allclose(sums[f"blk.0.attn_{part}.weight"].importance(), expected, rtol=1e-5)
    assert all(s.counts.tolist() == [8] for s in sums.values())


def test_importance_files_go_round(tmp_path, small):
    rng = np.random.default_rng(1)
    sums = {
        "blk.0.attn_q.weight": Sums(rng.random((1, 256)), np.array([10.0])),
        "blk.0.ffn_up_exps.weight": Sums(rng.random((3, 256)), np.array([4.0, 0.0, 6.0])),
    }
    write_imatrix(tmp_path / "i.gguf", sums, text="t", n_windows=2, window=5)
    other = {t.name: t for t in gguf.GGUFReader(tmp_path / "i.gguf").tensors}
    assert other["blk.0.ffn_up_exps.weight.in_sum2"].shape.tolist() == [256, 3]
    assert other["blk.0.ffn_up_exps.weight.counts"].data.tolist() == [[4], [0], [6]]
    found = read_imatrix(tmp_path / "i.gguf")
    assert np.allclose(found["blk.0.attn_q.weight"], sums["blk.0.attn_q.weight"].squares[0] / 10)
    experts = found["blk.0.ffn_up_exps.weight"]
    assert (experts[1] == 1).all()
    assert np.allclose(experts[2], sums["blk.0.ffn_up_exps.weight"].squares[2] / 6)


def old_layout(entries):
    data = np.int32(len(entries)).tobytes()
    for name, calls, values in entries:
        data += np.int32(len(name)).tobytes() + name.encode() + np.int32([calls, len(values)]).tobytes()
        data += np.asarray(values, "<f4").tobytes()
    return data


def test_the_older_layout_is_read(tmp_path):
    path = tmp_path / "i.dat"
    path.write_bytes(old_layout([("blk.0.attn_q.weight", 4, [4, 8, 12])]))
    assert read_imatrix(path)["blk.0.attn_q.weight"].tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "cut short"),
        (old_layout([("x", 1, [1.0])])[:-2], "cut short"),
        (old_layout([]), "holds no importance"),
        (old_layout([("x", 1, [-1.0])]), "not all finite and from 0"),
        (old_layout([("x", 1, [np.nan])]), "not all finite"),
        (np.int32(-5).tobytes(), "no importance matrix"),
        (b"<!DOCTYPE html><html>", "no importance matrix"),
    ],
)
def test_files_that_are_no_importance_matrix(tmp_path, content, words):
    path = tmp_path / "i.dat"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=words):
        read_imatrix(path)
    with pytest.raises(ModelNotFoundError):
        read_imatrix(tmp_path / "none.dat")


def test_importance_must_fit_the_model(tmp_path, small):
    with open_checkpoint(small) as model:
        for importance, words in (
            ({"blk.9.attn_q.weight": np.ones(256, np.float32)}, "which the model does not have"),
            ({"blk.0.attn_q.weight": np.ones(255, np.float32)}, r"has shape \[255\]"),
            ({"blk.0.attn_q.weight": -np.ones(256, np.float32)}, "not finite and at least 0"),
            ({"blk.0.attn_q.weight": np.full(256, np.nan, np.float32)}, "not finite and at least 0"),
        ):
            with pytest.raises(InvalidParameterError, match=words):
                quantize_model(model, tmp_path / "m.gguf", MIXES["Q4_0"], importance=importance)
        plain, weighted = tmp_path / "p.gguf", tmp_path / "w.gguf"
        importance = {"blk.0.attn_q.weight": np.where(np.arange(256) % 8, 0.01, 9).astype(np.float32)}
        quantize_model(model, plain, MIXES["Q4_0"])
        quantize_model(model, weighted, MIXES["Q4_0"], importance=importance)
        x = model.tensor("blk.0.attn_q.weight")[:, ::8]
    errors = [
        ((open_gguf(p).tensor("blk.0.attn_q.weight")[:, ::8] - x) ** 2).sum() for p in (plain, weighted)
    ]
    assert errors[1] < 0.6 * errors[0]


def test_windows_of_a_text():
    assert split_windows(list(range(10)), [99], 4, None) == [[99, 0, 1, 2], [99, 3, 4, 5], [99, 6, 7, 8]]
    assert split_windows(list(range(10)), [], 4, 1) == [[0, 1, 2, 3]]
    assert split_windows([1, 2], [99], 4, None) == []
    with pytest.raises(PromptError, match="too short"):
        collect(None, None, [])


# The verbs.


def test_the_verbs(tmp_path, small):
    runner, app = CliRunner(), build()

    def ropewalk(*arguments):
        return runner.invoke(app, [str(a) for a in arguments])

    text = tmp_path / "t.txt"
    text.write_text("ab ab " * 40)
    matrix, out = tmp_path / "i.gguf", tmp_path / "o.gguf"
    result = ropewalk("imatrix", small, text, "-o", matrix, "--window", 16)
    assert (result.exit_code, "15 matrices" in result.stdout) == (0, True)
    options = (small, "-o", out, "--type", "q4_0", "--imatrix", matrix)
    result = ropewalk("quantize", *options)
    assert (result.exit_code, "bits a weight" in result.stdout) == (0, True)
    result = ropewalk("quantize", *options)
    assert (result.exit_code, "--overwrite" in result.stderr) == (2, True)
    assert ropewalk("quantize", *options, "--overwrite").exit_code == 0
    result = ropewalk("quantize", small, "-o", tmp_path / "x.gguf", "--type", "Q9")
    assert (result.exit_code, "there is no quantization 'Q9'" in result.stderr) == (2, True)
    assert json.loads(ropewalk("inspect", out, "--json").stdout)["tensor_types"]["Q4_0"]["tensors"] == 14
    result = ropewalk("imatrix", small, tmp_path / "none.txt", "-o", matrix)
    assert (result.exit_code, "none.txt cannot be read" in result.stderr) == (1, True)
