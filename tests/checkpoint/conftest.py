"""A writer of GGUF files that checks nothing, so that tests can write files that lie; and one of HF folders."""

import json
import lzma
import struct
import zlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

# Metadata value types by name, with their number and struct code.
KINDS = {
    "u8": (0, "B"), "i8": (1, "b"), "u16": (2, "H"), "i16": (3, "h"), "u32": (4, "I"), "i32": (5, "i"),
    "f32": (6, "f"), "bool": (7, "B"), "u64": (10, "Q"), "i64": (11, "q"), "f64": (12, "d"),
}  # fmt: skip


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


def u64(value: int) -> bytes:
    return struct.pack("<Q", value)


def text(value: bytes | str, length: int | None = None) -> bytes:
    """A GGUF string, which may claim another `length` than it has."""
    value = value.encode() if isinstance(value, str) else value
    return u64(len(value) if length is None else length) + value


def number(kind: str, value: float) -> bytes:
    """A metadata value: type and number."""
    code, fmt = KINDS[kind]
    return u32(code) + struct.pack("<" + fmt, value)


def string(value: bytes | str, length: int | None = None) -> bytes:
    """A metadata value: type and string."""
    return u32(8) + text(value, length)


def numbers(kind: str, values: list[float], count: int | None = None) -> bytes:
    """A metadata value: an array of numbers, which may claim another `count`."""
    code, fmt = KINDS[kind]
    n = len(values) if count is None else count
    return u32(9) + u32(code) + u64(n) + struct.pack(f"<{len(values)}{fmt}", *values)


def strings(values: list[bytes | str], count: int | None = None) -> bytes:
    """A metadata value: an array of strings, which may claim another `count`."""
    n = len(values) if count is None else count
    return u32(9) + u32(8) + u64(n) + b"".join(text(v) for v in values)


def tensor(
    name: bytes | str, dims: list[int], kind: int = 0, offset: int = 0, n_dims: int | None = None
) -> bytes:
    """A row of the tensor table, `dims` in GGUF's order: columns first."""
    n = len(dims) if n_dims is None else n_dims
    return text(name) + u32(n) + b"".join(u64(d) for d in dims) + u32(kind) + u64(offset)


def gguf(
    pairs: list[tuple[bytes | str, bytes]] | None = None,
    rows: list[bytes] | None = None,
    data: bytes = b"",
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    n_tensors: int | None = None,
    n_pairs: int | None = None,
    alignment: int = 32,
) -> bytes:
    """A whole file; the counts may be other than the numbers of `rows` and `pairs`."""
    pairs, rows = pairs or [], rows or []
    head = magic + u32(version)
    head += u64(len(rows) if n_tensors is None else n_tensors)
    head += u64(len(pairs) if n_pairs is None else n_pairs)
    head += b"".join(text(key) + value for key, value in pairs) + b"".join(rows)
    return head + bytes(-len(head) % alignment if data else 0) + data


def every_kind() -> bytes:
    """A small sound file with every type of metadata, three tensors, and no byte to spare at the end."""
    pairs = [(f"a.{kind}", number(kind, 1)) for kind in KINDS]
    pairs += [(f"list.{kind}", numbers(kind, [1, 0, 1])) for kind in KINDS]
    pairs += [("a.text", string("rope")), ("list.text", strings(["", "walk", b"\xff\xfe", "é"]))]
    rows = [
        tensor("f32", [3, 2], 0, 0),
        tensor("q8_0", [32, 1, 2], 8, 32),
        tensor("q4_k", [256], 12, 128),
    ]
    return gguf(pairs, rows, bytes(range(256)) + bytes(16))


@pytest.fixture(scope="session")
def craft() -> SimpleNamespace:
    """The functions above."""
    return SimpleNamespace(
        gguf=gguf, tensor=tensor, number=number, numbers=numbers, string=string, strings=strings,
        text=text, u32=u32, u64=u64, every_kind=every_kind, KINDS=KINDS,
    )  # fmt: skip


def byte_level_tokenizer(n_tokens: int) -> dict:
    """A `tokenizer.json` of GPT-2's kind: `<pad>`, `<s>`, `</s>`, then letters, and two merges."""
    letters = [*map(chr, range(0x21, 0x7F)), "Ġ"]
    tokens = [*["<pad>", "<s>", "</s>", *letters][: n_tokens - 2], "he", "Ġa"]
    special = [
        {"id": i, "content": t, "special": True, "normalized": False} for i, t in enumerate(tokens[:3])
    ]
    return {
        "added_tokens": special,
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True},
        "post_processor": None,
        "decoder": {"type": "ByteLevel"},
        "model": {
            "type": "BPE",
            "vocab": {t: i for i, t in enumerate(tokens)},
            "merges": ["h e", ["Ġ", "a"]],
        },
    }


def tiny_weights(name: str, shape: list[int]) -> np.ndarray:
    """The weights that `tools/fixtures/hf_families.py` gave the tensor of this name."""
    words = np.random.PCG64(zlib.crc32(name.encode())).random_raw(int(np.prod(shape)))
    values = ((np.asarray(words) >> np.uint64(40)).astype(np.float32) / np.float32(2**23) - 1).reshape(shape)
    if name.endswith("bias") or "sinks" in name:
        return values * np.float32(0.3)
    if len(shape) == 1 or "norm" in name:
        return values * np.float32(0.2) + np.float32(0.8)
    return values * np.float32(2.5 / np.sqrt(shape[-1]))


def save_tensors(path: Path, tensors: dict) -> None:
    """Write arrays by name; a pair (dtype, array of its bits) is for types that NumPy lacks."""
    names = {"float32": "F32", "float16": "F16", "int32": "I32", "int8": "I8", "uint8": "U8", "int64": "I64"}
    header, data = {}, b""
    for name, array in tensors.items():
        dtype, array = array if isinstance(array, tuple) else (names[array.dtype.name], array)
        raw = np.ascontiguousarray(array).tobytes()
        header[name] = {
            "dtype": dtype,
            "shape": list(array.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


class FolderMaker:
    """Writes folders in Hugging Face's layout; tests change what they like before `write`."""

    save = staticmethod(save_tensors)

    def __init__(self) -> None:
        path = Path(__file__).parents[1] / "data" / "hf-families.json.xz"
        self.families = json.loads(lzma.decompress(path.read_bytes()))

    def parts(self, family: str) -> SimpleNamespace:
        """`config`, `tensors` (arrays by stored name) and `tokenizer` of a tiny model."""
        made = self.families[family]
        tensors = {n: tiny_weights(n, s) for n, s in made["tensors"].items()}
        return SimpleNamespace(
            config=dict(made["config"]),
            tensors=tensors,
            tokenizer=byte_level_tokenizer(made["config"]["vocab_size"]),
        )

    def write(self, folder: Path, parts: SimpleNamespace, **more: object) -> Path:
        """Write the parts; `more` are further JSON files by stem."""
        folder.mkdir(exist_ok=True)
        files = {"config": parts.config, "tokenizer": parts.tokenizer, **more}
        for stem, value in files.items():
            (folder / f"{stem}.json").write_text(json.dumps(value))
        save_tensors(folder / "model.safetensors", parts.tensors)
        return folder


@pytest.fixture(scope="session")
def folders() -> FolderMaker:
    return FolderMaker()
