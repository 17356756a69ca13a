"""Safetensors: the values of sound files (the `safetensors` package is the oracle), and hostile headers (G7)."""

import json
import struct
import tracemalloc

import numpy as np
import pytest
import safetensors.numpy

from ropewalk.checkpoint.safetensors import MAX_JSON_VALUES, open_safetensors
from ropewalk.errors import CheckpointError, ModelNotFoundError, RopewalkError, UnsupportedModelError


def file(header: object, data: bytes = b"", *, length: int | None = None) -> bytes:
    """A file with this header; it may claim another length."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def row(dtype="F32", shape=(2,), begin=0, end=8, **more):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end], **more}


def refusal(path, content: bytes, kind=CheckpointError) -> str:
    path.write_bytes(content)
    with pytest.raises(kind) as caught:
        open_safetensors(path)
    assert path.name in str(caught.value)
    return str(caught.value)


def test_every_dtype_of_the_package_is_read_back(tmp_path):
    rng = np.random.default_rng(1)
    arrays = {
        "f64": rng.standard_normal((2, 3)),
        "f32": rng.standard_normal(5).astype(np.float32),
        "f16": rng.standard_normal((3, 1, 2)).astype(np.float16),
        "i64": rng.integers(-9, 9, 4),
        "i32": rng.integers(-9, 9, (2, 2), np.int32),
        "i8": rng.integers(-9, 9, 7, np.int8),
        "u8": rng.integers(0, 255, (1, 5), np.uint8),
        "bool": np.array([True, False]),
        "empty": np.zeros((0, 4), np.float32),
        "scalar": np.array(2.5, np.float32),
    }
    path = tmp_path / "m.safetensors"
    safetensors.numpy.save_file(arrays, path, metadata={"format": "pt"})
    opened = open_safetensors(path)
    assert opened.tensors.keys() == arrays.keys()
    for name, array in arrays.items():
        assert opened.array(name).tobytes() == array.tobytes()
        assert opened.array(name).shape == array.shape
    with pytest.raises(ValueError, match="read-only"):
        opened.array("f32")[0] = 1
    opened.close()
    with pytest.raises(CheckpointError, match="closed"):
        opened.array("f32")


def test_unaligned_data_is_read(tmp_path):
    path = tmp_path / "m.safetensors"
    path.write_bytes(file(json.dumps({"a": row()}).encode() + b" " * 3, struct.pack("<2f", 1.5, -2)))
    assert open_safetensors(path).array("a").tolist() == [1.5, -2]


def test_g7_length_above_the_format_s_limit(tmp_path):
    message = refusal(tmp_path / "m.safetensors", bytes.fromhex("409DDF0700000000") + b"{" + b" " * 100)
    assert "132095296" in message
    assert "100000000" in message


def test_g7_length_beyond_the_file(tmp_path):
    assert "cut short" in refusal(tmp_path / "m.safetensors", file({"a": row()}, length=5000))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"abc", "3 bytes"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "git lfs pull"),
        (b"<!DOCTYPE html><html><body>Not Found</body></html>", "web page"),
        (b"GGUF\3\0\0\0" + bytes(40), "GGUF file"),
        (b"PK\x03\x04\x14\0\0\0" + bytes(40), "zip archive"),
        (file(b"{not json}"), "not JSON"),
        (file(b"{" + b"\xff" * 8 + b"}"), "not JSON"),
        (file(b'{"a":' + b"[" * 100_000), "nested too deeply"),
        (file(b'{"a":{"a":1,"a":2}}'), "'a' twice"),
        (file(b'{"__metadata__":{"format":3}}'), "__metadata__"),
    ],
)
def test_g7_what_is_no_safetensors_file(tmp_path, content, words):
    assert words in refusal(tmp_path / "m.safetensors", content)


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (row(begin=8, end=0), "begins at 8, after its end at 0"),
        (row(end=12, shape=(3,)), "only"),
        (row(shape=(3,)), "takes 12"),
        (row(shape=(2**32, 2**32), end=8), "takes"),
        (row(shape=(2**62, 2**62)), "takes"),
        (row(shape=(2**63,)), "shape"),
        (row(shape=(-2,)), "shape"),
        (row(shape=(1,) * 9), "shape"),
        (row(shape=(2.0,)), "shape"),
        (row(shape=(True,) * 2), "shape"),
        (row(begin=-8, end=0), "data_offsets"),
        (row(extra=1), "no more"),
        ({"dtype": "F32"}, "data_offsets"),
        ([], "data_offsets"),
        (row(begin=4, end=12), "only"),
    ],
)
def test_g7_a_row_that_lies(tmp_path, tensor, words):
    message = refusal(tmp_path / "m.safetensors", file({"tensor.name": tensor}, bytes(8)))
    assert words in message
    assert "tensor.name" in message


def test_an_unknown_dtype_is_named(tmp_path):
    message = refusal(tmp_path / "m.safetensors", file({"a": row("F4")}, bytes(8)), UnsupportedModelError)
    assert "'F4'" in message
    assert "BF16" in message


@pytest.mark.parametrize(
    ("header", "n_bytes", "words"),
    [
        ({"a": row(), "b": row(begin=4, end=12)}, 12, "'b' overlaps the tensor 'a'"),
        ({"a": row(), "b": row(begin=12, end=20)}, 20, "4 bytes before the tensor 'b'"),
        ({"a": row()}, 9, "1 bytes after the last tensor"),
        ({}, 1, "1 bytes after"),
    ],
)
def test_g7_bytes_of_two_tensors_or_of_none(tmp_path, header, n_bytes, words):
    assert words in refusal(tmp_path / "m.safetensors", file(header, bytes(n_bytes)))


def test_a_header_of_millions_of_values_costs_no_memory(tmp_path):
    content = file(b'{"a":[' + b"[]," * MAX_JSON_VALUES + b"[]]}")
    tracemalloc.start()
    message = refusal(tmp_path / "m.safetensors", content)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert "values" in message
    assert peak < 3 * len(content)


def sharded(folder, index=None, **files):
    for name, tensors in files.items():
        safetensors.numpy.save_file(tensors, folder / f"{name}.safetensors")
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps(index))
    return path


def one(value):
    return np.array([value], np.float32)


def test_shards_open_as_one(tmp_path):
    places = {"a": "x.safetensors", "b": "y.safetensors"}
    path = sharded(tmp_path, {"metadata": {}, "weight_map": places}, x={"a": one(1)}, y={"b": one(2)})
    opened = open_safetensors(path)
    assert [opened.array("a")[0], opened.array("b")[0]] == [1, 2]
    assert opened.file_bytes == sum((tmp_path / f).stat().st_size for f in places.values())


@pytest.mark.parametrize(
    ("places", "words"),
    [
        ({"a": "x.safetensors", "b": "z.safetensors"}, "missing: 'z.safetensors'"),
        ({"a": "y.safetensors", "b": "y.safetensors"}, "no file has it"),
        ({"a": "y.safetensors", "b": "x.safetensors"}, "it is in"),
        ({"a": "x.safetensors"}, "does not name: 'extra'"),
        ({"a": "../x.safetensors"}, "beside it"),
        ({"a": 3}, "beside it"),
        ({}, "weight_map"),
        ([], "weight_map"),
    ],
)
def test_g7_an_index_that_lies(tmp_path, places, words):
    path = sharded(tmp_path, {"weight_map": places}, x={"a": one(1), "extra": one(3)}, y={"b": one(2)})
    with pytest.raises(CheckpointError) as caught:
        open_safetensors(path)
    assert words in str(caught.value)
    assert path.name in str(caught.value)


def test_g7_a_tensor_in_two_shards(tmp_path):
    path = sharded(
        tmp_path,
        {"weight_map": {"a": "x.safetensors", "b": "y.safetensors"}},
        x={"a": one(1)},
        y={"a": one(1), "b": one(2)},
    )
    with pytest.raises(CheckpointError, match=r"'a' is also in x\.safetensors"):
        open_safetensors(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ModelNotFoundError, match=r"none\.safetensors"):
        open_safetensors(tmp_path / "none.safetensors")


def test_random_damage_is_refused_or_harmless(tmp_path):
    """Two hundred headers with a few changed bytes: an error of ours, or a table whose tensors lie in the file."""
    rng = np.random.default_rng(0)
    tensors = {name: np.arange(4, dtype=np.float32) for name in ("a", "b", "c")}
    sound = safetensors.numpy.save(tensors)
    end = 8 + int.from_bytes(sound[:8], "little")
    path, refused = tmp_path / "m.safetensors", 0
    for _ in range(200):
        content = bytearray(sound)
        for at in rng.integers(0, end, rng.integers(1, 4)):
            content[at] = (
                rng.integers(0, 256) if rng.random() < 0.5 else ord(rng.choice(list('[]{}",:0129-')))
            )
        path.write_bytes(content)
        try:
            opened = open_safetensors(path)
        except RopewalkError:
            refused += 1
            continue
        for name in opened.tensors:
            opened.array(name).sum()
        opened.close()
    assert refused > 100
