"""Sound GGUF files: everything that an independent writer puts in comes out; split files; the memory map."""

import os
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest

from ropewalk.checkpoint.gguf import StringArray, open_gguf
from ropewalk.checkpoint.header import align
from ropewalk.checkpoint.quants import FORMATS
from ropewalk.errors import CheckpointError, ModelNotFoundError


def write(path: Path, tensors: dict[str, np.ndarray], **options: int) -> None:
    writer = gguf.GGUFWriter(path, "llama", **options)
    writer.add_uint32("n", 7)
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def shards(tmp_path) -> list[Path]:
    write(
        tmp_path / "m.gguf",
        {f"t{i}": np.full((2, i + 1), i, np.float32) for i in range(5)},
        split_max_tensors=2,
    )
    return sorted(tmp_path.glob("m-*.gguf"))


def test_metadata_of_every_type_equals_what_the_gguf_package_wrote(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    numbers = {
        "uint8": 255, "int8": -128, "uint16": 65535, "int16": -32768, "uint32": 2**32 - 1, "int32": -(2**31),
        "uint64": 2**64 - 1, "int64": -(2**63), "float32": 0.15625, "float64": 0.1, "bool": True,
    }  # fmt: skip
    for kind, value in numbers.items():
        getattr(writer, f"add_{kind}")(f"x.{kind}", value)
    writer.add_string("x.string", "naïve ▁ 😀")
    writer.add_array("x.floats", [0.5, -1.25])
    writer.add_array("x.ints", [1, -2, 3])
    writer.add_array("x.bools", [True, False])
    writer.add_array("x.strings", ["<s>", "", "▁the"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    with open_gguf(tmp_path / "m.gguf") as m:
        assert m.version == 3
        assert m.metadata["general.architecture"] == "llama"
        for kind, value in numbers.items():
            got = m.metadata[f"x.{kind}"]
            assert (got, type(got)) == (value, type(value)), kind
        assert m.metadata["x.string"] == "naïve ▁ 😀"
        assert m.metadata["x.floats"].tolist() == [0.5, -1.25]
        assert m.metadata["x.ints"].tolist() == [1, -2, 3]
        assert m.metadata["x.bools"].tolist() == [True, False]
        assert m.metadata["x.bools"].dtype == np.bool_
        assert list(m.metadata["x.strings"]) == ["<s>", "", "▁the"]
        with pytest.raises(ValueError, match="read-only"):
            m.metadata["x.ints"][0] = 5
        with pytest.raises(TypeError):
            m.metadata["x.ints"] = 5


def test_every_number_type_and_version_2(craft, tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(craft.every_kind().replace(b"GGUF\x03", b"GGUF\x02", 1))
    with open_gguf(path) as m:
        assert m.version == 2
        for kind in craft.KINDS:
            assert m.metadata[f"a.{kind}"] == 1
            assert m.metadata[f"list.{kind}"].tolist() == [1, 0, 1]
        assert m.metadata["list.u16"].dtype == np.uint16
        assert m.metadata["list.f64"].dtype == np.float64


def test_strings_that_are_not_utf8_keep_their_bytes(craft, tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(craft.every_kind())
    with open_gguf(path) as m:
        words = m.metadata["list.text"]
    assert isinstance(words, StringArray)  # and it outlives the map
    assert words.raw_items() == [b"", b"walk", b"\xff\xfe", "é".encode()]
    assert [words.raw(i) for i in range(4)] == words.raw_items()
    assert words.raw(-3) == b"walk"
    assert words[2] == "\ufffd\ufffd"
    assert words[1:] == ["walk", "\ufffd\ufffd", "é"]
    assert (words.index("é"), "rope" in words, len(words)) == (3, False, 4)
    assert repr(words).startswith("<StringArray of 4: '', 'walk',")
    for i in (4, -5):
        with pytest.raises(IndexError):
            words.raw(i)


def test_tensors_equal_the_gguf_package(tmp_path):
    rng = np.random.default_rng(1)
    plain = rng.standard_normal((3, 5, 7)).astype(np.float32)
    source = rng.standard_normal((2, 64)).astype(np.float32)
    kinds = ("F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("plain", plain)
    for kind in kinds:
        value = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(kind, gguf.quants.quantize(source, value), raw_dtype=value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    with open_gguf(tmp_path / "m.gguf") as m:
        assert list(m.tensors) == ["plain", *kinds] == [t.name for t in reader.tensors]
        for theirs in reader.tensors:
            ours = m.tensors[theirs.name]
            assert ours.shape == tuple(int(n) for n in reversed(theirs.shape))
            assert (ours.offset, ours.n_bytes) == (theirs.data_offset, theirs.n_bytes)
            assert ours.size == theirs.n_elements
        np.testing.assert_array_equal(m.tensor("plain"), plain)
        for kind in kinds:
            assert m.tensors[kind].format is FORMATS[kind]
            assert m.raw(kind).shape == (2, FORMATS[kind].row_bytes(64))
            want = gguf.quants.dequantize(m.raw(kind), gguf.GGMLQuantizationType[kind])
            np.testing.assert_array_equal(m.tensor(kind), want)
            assert np.abs(m.tensor(kind) - source).max() < 0.5


@pytest.mark.parametrize(("end", "start"), [(0, 0), (64, 64), (65, 96), (95, 96), (96, 96)])
def test_g3_tensor_data_starts_at_the_next_multiple_of_the_alignment(end, start):
    assert align(end, 32) == start


@pytest.mark.parametrize("alignment", [8, 64, 4096])
def test_g3_the_file_chooses_the_alignment(craft, tmp_path, alignment):
    pairs = [("general.alignment", craft.number("u32", alignment))]
    data = np.arange(4, dtype="<f4").tobytes()
    path = tmp_path / "m.gguf"
    path.write_bytes(craft.gguf(pairs, [craft.tensor("t", [4])], data, alignment=alignment))
    with open_gguf(path) as m:
        assert m.tensors["t"].offset % alignment == 0
        assert m.tensor("t").tolist() == [0, 1, 2, 3]


def test_raw_bytes_are_a_read_only_view(craft, tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(craft.every_kind())
    m = open_gguf(path)
    raw = m.raw("f32")
    with pytest.raises(ValueError, match="read-only"):
        raw[0] = 1
    assert raw.tobytes() == bytes(range(24))
    with pytest.raises(CheckpointError, match="no tensor 'nonsense'"):
        m.raw("nonsense")
    m.close()
    assert raw.tobytes() == bytes(range(24))  # the view keeps the map alive
    with pytest.raises(CheckpointError, match="closed"):
        m.raw("f32")
    m.close()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_k3_release_gives_back_the_pages_that_were_read(craft, tmp_path):
    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    path = tmp_path / "m.gguf"
    n_bytes = 64 << 20
    path.write_bytes(craft.gguf([], [craft.tensor("t", [n_bytes // 4])], bytes(n_bytes)))
    with open_gguf(path) as m:
        before = resident_bytes()
        assert m.raw("t").max() == 0
        read = resident_bytes() - before
        m.release()
        kept = resident_bytes() - before
        assert m.raw("t")[-1] == 0  # still readable
    assert read > 0.9 * n_bytes
    assert kept < 0.1 * n_bytes


def test_a_split_model_opens_by_any_of_its_files(shards):
    assert [p.name for p in shards] == [f"m-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    for path in shards:
        with open_gguf(path) as m:
            assert m.paths == tuple(shards)
            assert m.metadata["n"] == 7
            assert list(m.tensors) == ["t0", "t1", "t2", "t3", "t4"]
            assert [t.shard for t in m.tensors.values()] == [0, 0, 1, 1, 2]
            assert m.file_bytes == sum(p.stat().st_size for p in shards)
            for i in range(5):
                np.testing.assert_array_equal(m.tensor(f"t{i}"), np.full((2, i + 1), i))


def test_a_missing_part_of_a_split_model_is_named(shards):
    shards[1].unlink()
    with pytest.raises(CheckpointError, match=r"1 of 3 files are missing: m-00002-of-00003\.gguf"):
        open_gguf(shards[0])


def test_a_renamed_part_of_a_split_model_says_what_the_name_must_be(shards):
    alone = shards[0].rename(shards[0].with_name("model.gguf"))
    with pytest.raises(CheckpointError, match=r"split into 3 files.*00001-of-00003"):
        open_gguf(alone)


def test_parts_in_the_wrong_order_are_refused(shards):
    content = [p.read_bytes() for p in shards]
    shards[1].write_bytes(content[2])
    with pytest.raises(CheckpointError, match=r"split\.no is 2; part 2 of 3 must have 1"):
        open_gguf(shards[0])


def split_file(craft, path: Path, no: int, tensor: str, *, total: int, count: int = 2) -> None:
    pairs = [
        ("split.no", craft.number("u16", no)),
        ("split.count", craft.number("u16", count)),
        ("split.tensors.count", craft.number("i32", total)),
    ]
    path.write_bytes(craft.gguf(pairs, [craft.tensor(tensor, [1])], bytes(4)))


def test_a_tensor_in_two_parts_is_refused(craft, tmp_path):
    paths = [tmp_path / f"m-0000{i}-of-00002.gguf" for i in (1, 2)]
    for no, path in enumerate(paths):
        split_file(craft, path, no, "same", total=2)
    with pytest.raises(CheckpointError, match="'same' is also in another part"):
        open_gguf(paths[0])


def test_a_split_model_must_have_as_many_tensors_as_it_says(craft, tmp_path):
    paths = [tmp_path / f"m-0000{i}-of-00002.gguf" for i in (1, 2)]
    for no, path in enumerate(paths):
        split_file(craft, path, no, f"t{no}", total=3)
    with pytest.raises(CheckpointError, match=r"split\.tensors\.count is 3, but the 2 files have 2"):
        open_gguf(paths[0])


def test_a_split_count_that_is_no_number_is_refused(craft, tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(craft.gguf([("split.count", craft.string("two"))]))
    with pytest.raises(CheckpointError, match=r"split\.count is 'two'"):
        open_gguf(path)


def test_files_that_are_not_there_or_cannot_be_mapped(craft, tmp_path):
    with pytest.raises(ModelNotFoundError, match=r"no file .*none\.gguf"):
        open_gguf(tmp_path / "none.gguf")
    (tmp_path / "inside.gguf").write_bytes(craft.gguf())
    with pytest.raises(CheckpointError, match=r"is a folder.*contains inside\.gguf"):
        open_gguf(tmp_path)
    (tmp_path / "empty.gguf").touch()
    with pytest.raises(CheckpointError, match="empty file"):
        open_gguf(tmp_path / "empty.gguf")
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(CheckpointError, match="not a regular file"):
        open_gguf(tmp_path / "pipe.gguf")


def test_a_file_without_tensors_opens(craft, tmp_path):
    path = tmp_path / "vocabulary.gguf"
    path.write_bytes(craft.gguf([("a", craft.number("u8", 1))]))
    with open_gguf(str(path)) as m:
        assert (dict(m.metadata), dict(m.tensors)) == ({"a": 1}, {})


def test_the_default_model(smollm2):
    with open_gguf(smollm2) as m:
        assert m.metadata["general.architecture"] == "llama"
        assert len(m.metadata["tokenizer.ggml.tokens"]) == 49152
        assert m.metadata["tokenizer.ggml.tokens"][1] == "<|im_start|>"
        assert len(m.metadata["tokenizer.ggml.merges"]) == 48900
        assert len(m.tensors) == 272
        assert m.tensors["token_embd.weight"].shape == (49152, 576)
        assert {t.format.name for t in m.tensors.values()} == {"F32", "Q4_1", "Q8_0"}
        theirs = gguf.quants.dequantize(m.raw("blk.7.ffn_down.weight"), gguf.GGMLQuantizationType.Q4_1)
        np.testing.assert_array_equal(m.tensor("blk.7.ffn_down.weight"), theirs)


@pytest.mark.parametrize(
    ("name", "n_tokens", "n_tensors"),
    [("gemma3-270m", 262144, 236), ("qwen2.5-coder-0.5b", 151936, 291), ("qwen2.5-coder-1.5b", 151936, 339)],
)
def test_the_other_real_models(model_path, name, n_tokens, n_tensors):
    with open_gguf(model_path(name)) as m:
        tokens = m.metadata["tokenizer.ggml.tokens"]
        assert (len(tokens), len(m.tensors)) == (n_tokens, n_tensors)
        assert len(m.metadata["tokenizer.ggml.token_type"]) == n_tokens
        assert m.tensors["output_norm.weight"].format.name == "F32"
        assert np.isfinite(m.tensor("output_norm.weight")).all()
