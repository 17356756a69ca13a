"""Malformed GGUF files: always an error that names the problem, never a crash, a hang or much memory."""

import os
import struct
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ropewalk.checkpoint import cursor
from ropewalk.checkpoint.gguf import open_gguf
from ropewalk.errors import CheckpointError, RopewalkError, UnsupportedModelError

HUGE = 1 << 63
ENDLESS = (1 << 64) - 1

# What is wrong, what the error must say, and how to write the file.
CASES: dict[str, tuple[str, Callable]] = {
    "dims 2^32 x 2^32": (
        "would end at byte",
        lambda c: c.gguf([], [c.tensor("t", [1 << 32, 1 << 32])], b"x"),
    ),
    "dims 2^63 x 2": ("would end at byte", lambda c: c.gguf([], [c.tensor("t", [HUGE, 2])], b"x")),
    "four dims of 2^64 - 1": (
        "would end at byte",
        lambda c: c.gguf([], [c.tensor("t", [ENDLESS] * 4)], b"x"),
    ),
    "an empty dimension": ("is empty", lambda c: c.gguf([], [c.tensor("t", [0, 4])])),
    "0 dims": ("'t' has 0 dimensions", lambda c: c.gguf([], [c.tensor("t", [], n_dims=0) + bytes(8)])),
    "5 dims": ("has 5 dimensions", lambda c: c.gguf([], [c.tensor("t", [1] * 5)], b"x")),
    "2^32 - 1 dims": ("has 4294967295 dim", lambda c: c.gguf([], [c.tensor("t", [1], n_dims=(1 << 32) - 1)])),
    "end past the file": (
        "would end at byte 96, .*only 95",
        lambda c: c.gguf([], [c.tensor("t", [8])], bytes(31)),
    ),
    "offset past the file": ("would end", lambda c: c.gguf([], [c.tensor("t", [8], 0, 1 << 20)], bytes(64))),
    "offset 2^64 - 32": ("would end", lambda c: c.gguf([], [c.tensor("t", [8], 0, ENDLESS - 31)], bytes(64))),
    "offset off the alignment": ("no multiple", lambda c: c.gguf([], [c.tensor("t", [1], 0, 4)], bytes(64))),
    "two tensors in one place": (
        "'a' and 'b' overlap",
        lambda c: c.gguf([], [c.tensor("a", [8]), c.tensor("b", [8])], bytes(64)),
    ),
    "overlap by part": (
        "'b' and 'a' overlap",
        lambda c: c.gguf([], [c.tensor("a", [8], 0, 32), c.tensor("b", [9])], bytes(64)),
    ),
    "a tensor twice": (
        "'a' appears twice",
        lambda c: c.gguf([], [c.tensor("a", [8]), c.tensor("a", [8], 0, 32)], bytes(64)),
    ),
    "format 36": ("'t': .*IQ4_NL_4_4", lambda c: c.gguf([], [c.tensor("t", [32], 36)], bytes(64))),
    "format 999": ("'t': 999", lambda c: c.gguf([], [c.tensor("t", [32], 999)], bytes(64))),
    "columns that fill no block": ("33 columns", lambda c: c.gguf([], [c.tensor("t", [33], 2)], bytes(64))),
    "a tensor without a name": (
        "name of tensor 0 is 0",
        lambda c: c.gguf([], [c.tensor("", [8])], bytes(64)),
    ),
    "a name that is not UTF-8": (
        "tensor 0 is not UTF-8",
        lambda c: c.gguf([], [c.tensor(b"\xff", [8])], b"x" * 64),
    ),
    "2^63 tensors": (f"tensors is {HUGE}", lambda c: c.gguf(n_tensors=HUGE)),
    "more tensors than the file can hold": (
        "tensors is 4, .*at most 3",
        lambda c: c.gguf(n_tensors=4) + bytes(107),
    ),
    "2^63 pairs": (f"pairs is {HUGE}", lambda c: c.gguf(n_pairs=HUGE)),
    "one pair too many": (
        "name of metadata pair 1",
        lambda c: c.gguf([("k" * 20, c.number("u8", 1))], n_pairs=2),
    ),
    "a key of 2^63 bytes": (
        f"pair 0 is {HUGE}",
        lambda c: c.gguf(n_pairs=1) + c.text("k", HUGE) + bytes(64),
    ),
    "a key twice": ("'k' appears twice", lambda c: c.gguf([("k", c.number("u8", 1))] * 2)),
    "a key that is not UTF-8": ("pair 0 is not UTF-8", lambda c: c.gguf([(b"\xff\xff", c.number("u8", 1))])),
    "a value of type 13": ("'k' has the unknown type 13", lambda c: c.gguf([("k", c.u32(13) + bytes(8))])),
    "elements of type 13": (
        "unknown type 13",
        lambda c: c.gguf([("k", c.u32(9) + c.u32(13) + c.u64(1) + b"x")]),
    ),
    "an array of arrays": (
        "'k' is an array of arrays",
        lambda c: c.gguf([("k", c.u32(9) + c.u32(9) + c.u64(1) + c.numbers("u8", [1])[4:])]),
    ),
    "arrays nested 10,000 deep": (
        "array of arrays",
        lambda c: c.gguf([("k", c.u32(9) + (c.u32(9) + c.u64(1)) * 10_000)]),
    ),
    "the boolean 2": ("'k' is the boolean 2", lambda c: c.gguf([("k", c.number("bool", 2))])),
    "the boolean 7 in an array": (
        "'k' has the boolean 7",
        lambda c: c.gguf([("k", c.numbers("bool", [1, 7]))]),
    ),
    "2^63 bytes": (f"'k' is {HUGE}", lambda c: c.gguf([("k", c.numbers("u8", [1] * 9, HUGE))])),
    "2^61 doubles": ("at most 2", lambda c: c.gguf([("k", c.numbers("f64", [1, 2], 1 << 61))])),
    "2^64 - 1 strings": (f"'k' is {ENDLESS}", lambda c: c.gguf([("k", c.strings(["a", "b"], ENDLESS))])),
    "one string too many": (
        "string 2 of the value of 'k' would start",
        lambda c: c.gguf([("k", c.strings(["a", "bcdefghijkl"], 3))]),
    ),
    "a string of 2^63 bytes": (f"'k' is {HUGE}", lambda c: c.gguf([("k", c.string("abc", HUGE))])),
    "a string past the end": ("'k' needs 99 bytes", lambda c: c.gguf([("k", c.string("abc", 99))])),
    "a string of 2^63 bytes in an array": (
        "string 1 of the value of 'k' would start at byte 9223",
        lambda c: c.gguf([("k", c.u32(9) + c.u32(8) + c.u64(2) + c.text("a", HUGE) + c.text("b"))]),
    ),
    "a last string of 2^64 - 1 bytes in an array": (
        "strings of the value of 'k' would end at byte 18446744",
        lambda c: c.gguf([("k", c.u32(9) + c.u32(8) + c.u64(1) + c.text("a", ENDLESS))]),
    ),
    "strings whose lengths come back to where they started": (
        "would start at byte 184467",
        lambda c: c.gguf([("k", c.u32(9) + c.u32(8) + c.u64(9) + c.u64(ENDLESS - 7) * 9)]),
    ),
    "big-endian": ("big-endian", lambda c: b"GGUF" + struct.pack(">IQQ", 3, 0, 0)),
    "a reversed magic": ("big-endian", lambda c: b"FUGG" + struct.pack(">IQQ", 3, 0, 0)),
    "version 1": ("version 1", lambda c: c.gguf(version=1)),
    "version 0": ("version 0 is unknown; allowed: 2, 3", lambda c: c.gguf(version=0)),
    "version 4": ("version 4 is unknown; allowed: 2, 3", lambda c: c.gguf(version=4)),
    "a Git LFS pointer": (
        "git lfs pull",
        lambda c: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
    ),
    "a web page": ("web page", lambda c: b"\n<!DOCTYPE html><html><body>404</body></html>"),
    "safetensors": ("safetensors", lambda c: c.u64(30) + b'{"__metadata__":{"format":"pt"}}'),
    "a zip archive": ("zip archive", lambda c: b"PK\x03\x04" + bytes(100)),
    "a GGML file": ("before GGUF", lambda c: b"tjgg" + bytes(100)),
    "three bytes": ("starts with 'GGU'", lambda c: b"GGU"),
    "anything else": (r"starts with '\\x00\\x01hello,'", lambda c: b"\0\1hello, world"),
}
for bad in (0, 1, 3, 4, 24, 1 << 30):
    CASES[f"alignment {bad}"] = (
        f"alignment is {bad}; allowed: powers of two",
        lambda c, bad=bad: c.gguf([("general.alignment", c.number("u32", bad))]),
    )
CASES["alignment -8"] = ("is -8", lambda c: c.gguf([("general.alignment", c.number("i32", -8))]))
CASES["alignment 32.0"] = (r"is 32\.0", lambda c: c.gguf([("general.alignment", c.number("f32", 32))]))
CASES["alignment true"] = ("is True", lambda c: c.gguf([("general.alignment", c.number("bool", 1))]))
CASES["alignment '32'"] = ("is '32'", lambda c: c.gguf([("general.alignment", c.string("32"))]))


def open_and_read(path: Path) -> None:
    """Do all that can be done with a file."""
    with open_gguf(path) as m:
        for value in m.metadata.values():
            if isinstance(value, cursor.StringArray):
                assert len(list(value)) == len(value) == len(value.raw_items())
        for name in m.tensors:
            m.tensor(name)


@pytest.mark.parametrize("name", CASES)
def test_g1_g3_lies_are_refused_by_name_at_once_in_flat_memory(craft, tmp_path, name):
    message, build = CASES[name]
    path = tmp_path / "m.gguf"
    path.write_bytes(build(craft))
    tracemalloc.start()
    started = time.process_time()
    try:
        with pytest.raises(CheckpointError, match=message) as caught:
            open_gguf(path)
        assert time.process_time() - started < 20
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 500


def test_a_format_of_ggml_that_is_not_implemented_is_named(craft, tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(craft.gguf([], [craft.tensor("t", [256], 16)], bytes(66)))
    with pytest.raises(UnsupportedModelError, match=r"m\.gguf: tensor 't': .*IQ2_XXS"):
        open_gguf(path)


def test_long_names_and_control_characters_do_not_reach_the_terminal(craft, tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(craft.gguf([], [craft.tensor("\x1b[2J" + "x" * 9999, [1] * 5)], b"x"))
    with pytest.raises(CheckpointError, match="has 5 dimensions") as caught:
        open_gguf(path)
    assert "\x1b" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_a_file_cut_short_at_any_byte_is_refused(craft, tmp_path):
    whole = craft.every_kind()
    path = tmp_path / "m.gguf"
    for n in range(len(whole)):
        path.write_bytes(whole[:n])
        with pytest.raises(CheckpointError):
            open_gguf(path)
    path.write_bytes(whole)
    open_and_read(path)


def test_a_huge_file_behind_a_huge_count_costs_little(craft, tmp_path):
    """The counts would fit a sparse file of 1 TiB: only the limits of the header stop them."""
    path = tmp_path / "m.gguf"
    lies = {
        "tensors is 1048576; at most 262144": craft.gguf(n_tensors=1 << 20),
        "pairs is 131072; at most 65536": craft.gguf(n_pairs=1 << 17),
        "'k' is 8388608; at most 4194304": craft.gguf([("k", craft.strings([], 1 << 23))]),
        "'k' is 1073741824; allowed: 0 to 16777216": craft.gguf([("k", craft.string("", 1 << 30))]),
        "'k' is 1073741824, but the rest of a header holds": craft.gguf(
            [("k", craft.numbers("u64", [], 1 << 30))]
        ),
    }
    for message, start in lies.items():
        path.write_bytes(start)
        os.truncate(path, 1 << 40)
        tracemalloc.start()
        try:
            with pytest.raises(CheckpointError, match=message):
                open_gguf(path)
            assert tracemalloc.get_traced_memory()[1] < 1 << 20
        finally:
            tracemalloc.stop()


def test_a_header_that_never_ends_is_refused(craft, tmp_path, monkeypatch):
    monkeypatch.setattr(cursor, "HEADER_LIMIT", 50_000)
    path = tmp_path / "m.gguf"
    path.write_bytes(craft.gguf([(f"k{i}", craft.string(b"x" * 9000)) for i in range(9)]))
    with pytest.raises(CheckpointError, match=r"'k5' needs 9000 bytes.*passes the 50000 bytes"):
        open_gguf(path)
    path.write_bytes(craft.gguf([(f"k{i}", craft.strings([b"x" * 1000] * 9)) for i in range(9)]))
    with pytest.raises(CheckpointError, match=r"'k5' would end at byte.*passes the 50000 bytes"):
        open_gguf(path)


NASTY = [0, 1, 2, 7, 8, 9, 13, 31, 32, 33, 255, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32]
NASTY += [1 << 40, (1 << 61) - 1, (1 << 63) - 1, HUGE, ENDLESS - 31, ENDLESS - 7, ENDLESS]

edits = st.lists(
    st.one_of(
        st.tuples(st.just("byte"), st.integers(0, 1 << 12), st.integers(0, 255)),
        st.tuples(st.just("u32"), st.integers(0, 1 << 12), st.sampled_from(NASTY)),
        st.tuples(st.just("u64"), st.integers(0, 1 << 12), st.sampled_from(NASTY)),
        st.tuples(st.just("cut"), st.integers(0, 1 << 12), st.integers(1, 64)),
        st.tuples(st.just("repeat"), st.integers(0, 1 << 12), st.integers(1, 64)),
        st.tuples(st.just("end"), st.integers(0, 1 << 12), st.just(0)),
    ),
    min_size=1,
    max_size=6,
)


def mutate(data: bytes, changes: list[tuple[str, int, int]]) -> bytes:
    for kind, where, value in changes:
        at = where % (len(data) + 1)
        if kind == "byte":
            data = data[:at] + bytes([value]) + data[at + 1 :]
        elif kind == "u32":
            data = data[:at] + struct.pack("<I", value & 0xFFFFFFFF) + data[at + 4 :]
        elif kind == "u64":
            data = data[:at] + struct.pack("<Q", value) + data[at + 8 :]
        elif kind == "cut":
            data = data[:at] + data[at + value :]
        elif kind == "repeat":
            data = data[: at + value] + data[at:]
        else:
            data = data[:at]
    return data


# A long run: ROPEWALK_FUZZ_EXAMPLES=500000 pytest tests/checkpoint/test_hostile_gguf.py -k fuzz
@settings(
    max_examples=int(os.environ.get("ROPEWALK_FUZZ_EXAMPLES", "500")),
    deadline=None,
    derandomize="ROPEWALK_FUZZ_EXAMPLES" not in os.environ,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(edits)
def test_fuzz_any_edit_gives_a_model_or_an_error_of_ours(craft, tmp_path_factory, changes):
    folder = tmp_path_factory.getbasetemp()
    path = folder / "fuzz.gguf"
    path.write_bytes(mutate(craft.every_kind(), changes))
    tracemalloc.start()
    try:
        open_and_read(path)
    except RopewalkError as e:
        assert str(e)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 1 << 22
