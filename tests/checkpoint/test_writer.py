"""Writing GGUF: two independent readers get back what was written; a failure leaves nothing behind."""

import errno
import fcntl
import os
from pathlib import Path

import gguf
import numpy as np
import pytest

from ropewalk.checkpoint.gguf import open_gguf
from ropewalk.checkpoint.quants import FORMATS
from ropewalk.checkpoint.writer import NewTensor, write_gguf
from ropewalk.errors import CheckpointError

METADATA = {
    "general.architecture": "llama",
    "a.count": 7,
    "a.negative": -3,
    "a.large": 1 << 40,
    "a.number": 0.1,
    "a.flag": True,
    "a.text": "rope é",
    "a.list": np.array([1, -2, 3], np.int32),
    "a.flags": np.array([True, False]),
    "a.halves": np.array([0.5, 1.5], np.float32),
    "a.words": ["", "walk", "日本"],
    "general.alignment": 64,
    "split.count": 3,
}
TENSORS = [
    NewTensor("x", (3, 5), FORMATS["F32"]),
    NewTensor("y", (2, 2, 64), FORMATS["Q8_0"]),
    NewTensor("z", (7,), FORMATS["F16"]),
]


def data():
    rng = np.random.default_rng(1)
    return [rng.integers(0, 100, t.n_bytes, np.uint8) for t in TENSORS]


def test_a_read_only_disk_is_told(tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "open", refuse)
    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(CheckpointError, match=r"cannot write .*m\.gguf: Read-only file system"):
        write_gguf(tmp_path / "m.gguf", METADATA, TENSORS, ([r] for r in data()))


def test_what_a_killed_process_left_is_removed_and_what_others_write_is_not(tmp_path):
    names = ("left", "locked", "fresh", "other")
    left, locked, fresh, other = (
        tmp_path / f".{'m[1]' if name != 'other' else 'n'}.gguf.{name:0>8}.part" for name in names
    )
    for path in (left, locked, fresh, other):
        path.write_bytes(b"half")
        os.utime(path, (1e9, 1e9))
    os.utime(fresh)
    with locked.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        write_gguf(tmp_path / "m[1].gguf", METADATA, TENSORS, ([r] for r in data()))
    assert set(tmp_path.iterdir()) == {tmp_path / "m[1].gguf", locked, fresh, other}


def test_our_reader_and_another_read_it(tmp_path):
    path, raw = tmp_path / "m.gguf", data()
    write_gguf(path, METADATA, TENSORS, ([r[:9], r[9:]] for r in raw))
    ours = open_gguf(path)
    assert list(ours.tensors) == ["x", "y", "z"]
    for tensor, expected in zip(TENSORS, raw, strict=True):
        assert ours.raw(tensor.name).tobytes() == expected.tobytes()
        assert ours.tensors[tensor.name].shape == tensor.shape
    assert "split.count" not in ours.metadata
    assert "general.alignment" not in ours.metadata
    for key, value in METADATA.items():
        if key in ours.metadata:
            found = ours.metadata[key]
            same = list(found) == list(value) if isinstance(value, list | np.ndarray) else found == value
            assert same or found == np.float32(value)
            assert type(found) is type(value) or not isinstance(value, int | float | str)
    theirs = gguf.GGUFReader(path)
    kinds = {k: f.types[0].name for k, f in theirs.fields.items() if k.startswith("a.")}
    assert kinds["a.count"] == "UINT32"
    assert (kinds["a.negative"], kinds["a.large"], kinds["a.number"]) == ("INT32", "UINT64", "FLOAT32")
    assert [t.data.tobytes() for t in theirs.tensors] == [r.tobytes() for r in raw]


def test_metadata_of_a_real_model_survives(tmp_path, smollm2):
    with open_gguf(smollm2) as model:
        write_gguf(tmp_path / "m.gguf", model.metadata, [], [])
        copy = open_gguf(tmp_path / "m.gguf")
        assert copy.metadata.keys() == model.metadata.keys()
        for key, value in model.metadata.items():
            found = copy.metadata[key]
            assert list(found) == list(value) if hasattr(value, "__len__") else found == value, key


def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(b"old")
    with pytest.raises(CheckpointError, match="tensor x came with 3 bytes instead of 60"):
        write_gguf(path, METADATA, TENSORS, ([r[:3]] for r in data()))

    def broken():
        yield [data()[0]]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_gguf(path, METADATA, TENSORS, broken())
    with pytest.raises(CheckpointError, match="cannot write"):
        write_gguf(tmp_path / "none" / "m.gguf", METADATA, TENSORS, ([r] for r in data()))
    with pytest.raises(CheckpointError, match=r"a\.key has a value"):
        write_gguf(path, {"a.key": object()}, [], [])
    assert [p.name for p in tmp_path.iterdir()] == ["m.gguf"]
    assert path.read_bytes() == b"old"
