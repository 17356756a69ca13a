"""`tokenizer.json` and its neighbours: ids equal the `tokenizers` package's; ends, flags, templates; refusals."""

import importlib.util
import json
import random
import re
import struct
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from ropewalk.checkpoint.base import open_checkpoint
from ropewalk.checkpoint.files import MAX_READ_BYTES
from ropewalk.checkpoint.hf_presplit import RULE_NAMES
from ropewalk.checkpoint.hf_tokenizer import tokenizer_metadata
from ropewalk.errors import CheckpointError, UnsupportedModelError
from ropewalk.text.chat import ChatTemplate
from ropewalk.text.presplit import RULES
from ropewalk.text.tokenizer import Tokenizer

TEXTS = ("the heat and a hat", "12 345's", "  he  a\n\ta", "café 日本", "", "a</s>b")
GPT4 = r"(?i:'s|'t)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]+|\s+"


def byte_level(pre_tokenizer, **model):
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<s>", "</s>", *alphabet, "he", "Ġa", "th", "the", "Ġhe", "at"]
    merges = ["h e", "Ġ a", "t h", "t he", "Ġ he", "a t"]
    return {
        "version": "1.0",
        "added_tokens": [added(0, "<s>"), added(1, "</s>")],
        "pre_tokenizer": pre_tokenizer,
        "model": {"type": "BPE", "vocab": {t: i for i, t in enumerate(tokens)}, "merges": merges, **model},
    }


def added(i, text, special=True):
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": i, "content": text, "special": special, **flags}


def split(pattern):
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
PLAIN = BYTES | {"use_regex": True}
DIGITS = {"type": "Digits", "individual_digits": True}


def sequence(*steps):
    return {"type": "Sequence", "pretokenizers": list(steps)}


def write(folder, saved, **more):
    for stem, value in {"tokenizer": saved, **more}.items():
        (folder / f"{stem}.json").write_text(json.dumps(value))
    return folder


def read(folder, config=None, n=None):
    vocab = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    return tokenizer_metadata(folder, config or {}, n or len(vocab))


@pytest.mark.parametrize(
    ("pre", "name", "model"),
    [
        (PLAIN, "gpt-2", {}),
        (sequence(DIGITS, PLAIN), "smollm", {}),
        (sequence(split(GPT4), BYTES), "ropewalk-own", {}),
        (sequence(split(GPT4), BYTES), "ropewalk-own", {"ignore_merges": True}),
    ],
)
def test_byte_level_ids(tmp_path, pre, name, model):
    saved = byte_level(pre, **model)
    metadata = read(write(tmp_path, saved))
    assert metadata["tokenizer.ggml.pre"] == name
    ours = Tokenizer.from_metadata(metadata)
    theirs = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for text in TEXTS:
        assert ours.encode(text, add_special=False, parse_special=True) == theirs.encode(text).ids


def characters(prefix):
    """A vocabulary of SentencePiece's kind with every merge that its tokens allow."""
    bytes_ = [f"<0x{b:02X}>" for b in range(256)]
    pieces = ["▁a", "he", "th", "the", "▁the", "at", "▁", *"abcdefghijklmnopqrstuvwxyz'123\n"]
    tokens = ["<unk>", "<s>", "</s>", *bytes_, *pieces]
    merges = [["▁", "a"], ["h", "e"], ["t", "h"], ["t", "he"], ["th", "e"], ["▁", "the"], ["a", "t"]]
    space = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    first = [{"type": "Prepend", "prepend": "▁"}] if prefix else []
    return {
        "version": "1.0",
        "added_tokens": [added(i, t) for i, t in enumerate(tokens[:3])],
        "normalizer": {"type": "Sequence", "normalizers": [*first, space]},
        "model": {
            "type": "BPE",
            "vocab": {t: i for i, t in enumerate(tokens)},
            "merges": merges,
            "byte_fallback": True,
            "fuse_unk": True,
            "unk_token": "<unk>",
        },
    }


@pytest.mark.parametrize("prefix", [True, False])
def test_e6_e8_character_level_ids(tmp_path, prefix):
    metadata = read(write(tmp_path, characters(prefix)))
    ours = Tokenizer.from_metadata(metadata)
    theirs = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert ours.add_space_prefix is prefix
    for text in TEXTS[:4]:
        assert ours.encode(text, add_special=False) == theirs.encode(text).ids
    assert ours.encode("<0x41>", add_special=False) != [3 + 0x41]


def varint(n):
    out = b""
    while n > 127:
        out += bytes([n & 127 | 128])
        n >>= 7
    return out + bytes([n])


def message(number, data):
    return varint(number * 8 + 2) + varint(len(data)) + data


def sentencepiece(pieces, kind=2, prefix=True):
    body = b""
    for text, score, sort in pieces:
        piece = message(1, text.encode()) + b"\x15" + struct.pack("<f", score)
        body += message(1, piece + (b"\x18" + varint(sort) if sort != 1 else b""))
    return body + message(2, b"\x18" + varint(kind)) + message(3, b"\x18" + varint(int(prefix)))


PIECES = [
    ("<unk>", 0, 2),
    ("<s>", 0, 3),
    ("</s>", 0, 3),
    ("<0x41>", 0, 6),
    ("▁a", -1, 1),
    ("▁", -2, 1),
    ("a", -3, 1),
]


def test_tokenizer_model_alone(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece(PIECES, prefix=False))
    config = {"bos_token_id": 1, "eos_token_id": [2]}
    metadata = tokenizer_metadata(tmp_path, config, 9)
    assert metadata["tokenizer.ggml.tokens"][4:] == ["▁a", "▁", "a", "[PAD7]", "[PAD8]"]
    assert metadata["tokenizer.ggml.scores"][4:7].tolist() == [-1, -2, -3]
    assert metadata["tokenizer.ggml.token_type"].tolist() == [2, 3, 3, 6, 1, 1, 1, 5, 5]
    ours = Tokenizer.from_metadata(metadata)
    assert ours.encode("a a", add_special=False) == [6, 4]
    assert (ours.bos_id, ours.eos_ids, ours.add_space_prefix) == (1, {2}, False)


def test_true_scores_take_the_place_of_ranks(tmp_path):
    write(tmp_path, characters(True))
    tokens = list(characters(True)["model"]["vocab"])
    (tmp_path / "tokenizer.model").write_bytes(
        sentencepiece([(t, -7.5 - i, 1) for i, t in enumerate(tokens)])
    )
    assert read(tmp_path)["tokenizer.ggml.scores"][260] == np.float32(-267.5)


@pytest.mark.parametrize(
    ("content", "kind", "words"),
    [
        (sentencepiece(PIECES, kind=1), UnsupportedModelError, "model type 1"),
        (sentencepiece(PIECES)[:31], CheckpointError, "cut short"),
        (b"", CheckpointError, "no pieces"),
        (b"\xff" * 20, CheckpointError, "cut short or corrupt"),
    ],
)
def test_a_tokenizer_model_that_cannot_be_read(tmp_path, content, kind, words):
    (tmp_path / "tokenizer.model").write_bytes(content)
    with pytest.raises(kind, match=words):
        tokenizer_metadata(tmp_path, {}, 7)


def test_e4_bos_and_eos(tmp_path):
    """The options decide; without them the template of the post-processor does."""
    saved = byte_level(PLAIN)
    template = [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    processor = {"type": "TemplateProcessing", "single": template, "pair": [], "special_tokens": {}}
    options = {"bos_token": "<s>", "eos_token": {"content": "</s>"}}

    def flags(post_processor, **more):
        write(tmp_path, saved | {"post_processor": post_processor}, tokenizer_config=options | more)
        tokenizer = Tokenizer.from_metadata(read(tmp_path))
        return tokenizer.add_bos, tokenizer.add_eos

    assert flags(None) == (False, False)
    assert flags(processor) == (True, False)
    assert flags({"type": "Sequence", "processors": [BYTES, processor]}) == (True, False)
    assert flags(processor, add_bos_token=False) == (False, False)
    assert flags(None, add_bos_token=True, add_eos_token=True) == (True, True)
    assert flags(processor, bos_token=None) == (False, False)


def test_every_end_of_generation_config_counts(tmp_path):
    saved = byte_level(PLAIN)
    write(tmp_path, saved, generation_config={"eos_token_id": [1, 5, 6, 7, 8]}, config={})
    assert Tokenizer.from_metadata(read(tmp_path, {"eos_token_id": 3})).eos_ids == {1, 5, 6, 7, 8}
    write(tmp_path, saved, generation_config={})
    assert Tokenizer.from_metadata(read(tmp_path, {"eos_token_id": 3})).eos_ids == {1, 3}  # </s> always


def test_added_tokens_gaps_and_what_lies_beyond_the_embedding(tmp_path):
    saved = byte_level(PLAIN)
    n = len(saved["model"]["vocab"])
    saved["added_tokens"] += [added(n + 1, "<tool>", special=False), added(n + 2, "<image>")]
    metadata = read(write(tmp_path, saved), n=n + 2)
    assert metadata["tokenizer.ggml.tokens"][n:] == [f"[PAD{n}]", "<tool>"]
    assert metadata["tokenizer.ggml.token_type"][n:].tolist() == [5, 4]
    ours = Tokenizer.from_metadata(metadata)
    assert ours.encode("a<tool>", add_special=False)[-1] == n + 1
    with pytest.raises(CheckpointError, match=rf"token {n - 1} \('at'\) is beyond the {n - 1} rows"):
        read(tmp_path, n=n - 1)


def test_chat_templates(tmp_path):
    saved = byte_level(PLAIN)
    named = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
    write(tmp_path, saved, tokenizer_config={"chat_template": named})
    metadata = read(tmp_path)
    assert metadata["tokenizer.chat_template"] == "D"
    assert metadata["tokenizer.chat_template.tool_use"] == "T"
    write(tmp_path, saved, chat_template={"chat_template": "J"})
    assert read(tmp_path)["tokenizer.chat_template"] == "J"
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    template = ChatTemplate.from_metadata(read(tmp_path))
    assert template.render([{"role": "user", "content": "hi"}]) == "hi!"
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("<tool_call>")
    assert ChatTemplate.from_metadata(read(tmp_path)).tool_use.source == "<tool_call>"
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match=r"rag\.jinja cannot be read"):
        read(tmp_path)
    (tmp_path / "additional_chat_templates" / "rag.jinja").unlink()
    write(tmp_path, saved, tokenizer_config={"chat_template": 3})
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "chat_template.json").unlink()
    with pytest.raises(CheckpointError, match="chat template is 3"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        ({"model": {"type": "Unigram"}}, UnsupportedModelError, "'Unigram' is not supported"),
        ({"model": None}, UnsupportedModelError, "None is not supported"),
        ({"normalizer": {"type": "Lowercase"}}, UnsupportedModelError, "'Lowercase'"),
        ({"pre_tokenizer": {"type": "Whitespace"}}, UnsupportedModelError, "Whitespace"),
        ({"pre_tokenizer": PLAIN | {"add_prefix_space": True}}, UnsupportedModelError, "ByteLevel"),
        ({"pre_tokenizer": None}, UnsupportedModelError, "neither bytes nor"),
        (
            {"pre_tokenizer": {"type": "Sequence", "pretokenizers": 3}},
            UnsupportedModelError,
            "neither bytes nor",
        ),
        ({"model": {"vocab": {"a": 0}, "merges": None}}, CheckpointError, r"model\.merges is None"),
        ({"added_tokens": [{"id": 2}]}, CheckpointError, "lacks id or content"),
        ({"added_tokens": [added(2, "x")]}, CheckpointError, "token 2 is '!' and, as an added token, 'x'"),
    ],
)
def test_a_tokenizer_that_cannot_be_used(tmp_path, changes, kind, words):
    write(tmp_path, byte_level(PLAIN) | changes)
    with pytest.raises(kind, match=words) as caught:
        tokenizer_metadata(tmp_path, {}, 264)
    assert "tokenizer.json" in str(caught.value)


def test_a_merge_that_is_none(tmp_path):
    saved = byte_level(PLAIN)
    saved["model"]["merges"].append(["a", "b", "c"])
    with pytest.raises(CheckpointError, match=r"merge \['a', 'b', 'c'\]"):
        read(write(tmp_path, saved))


def test_an_expression_that_is_none_is_refused(tmp_path):
    metadata = read(write(tmp_path, byte_level(sequence(split("("), BYTES))))
    with pytest.raises(CheckpointError, match=r"tokenizer\.ropewalk\.pre_split"):
        Tokenizer.from_metadata(metadata)


def test_the_default_model_exported_and_read_again(tmp_path, smollm2):
    """Real vocabulary, template and weights through Hugging Face's layout: nothing of the text changes."""
    path = Path(__file__).parents[2] / "benchmarks" / "export_hf.py"
    spec = importlib.util.spec_from_file_location("export_hf", path)
    export_hf = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(export_hf)
    export_hf.export(smollm2, tmp_path, "F16")
    with open_checkpoint(smollm2) as original, open_checkpoint(tmp_path) as read_again:
        assert read_again.tensors.keys() == original.tensors.keys()
        for name in (
            "blk.0.attn_q.weight",
            "blk.29.attn_k.weight",
            "blk.7.ffn_down.weight",
            "output_norm.weight",
        ):
            expected = original.tensor(name)
            tolerance = 2.0**-11 * np.abs(expected).max()
            assert np.abs(read_again.tensor(name) - expected).max() <= tolerance
        a, b = (Tokenizer.from_metadata(c.metadata) for c in (original, read_again))
        text = (Path(__file__).parents[1] / "data" / "alice.txt").read_text()
        assert a.encode(text) == b.encode(text)
        assert (a.eos_ids, a.add_bos) == (b.eos_ids, b.add_bos)
        key = "tokenizer.chat_template"
        assert original.metadata[key] == read_again.metadata[key]


@pytest.mark.parametrize(("rule", "name"), RULE_NAMES.items(), ids=RULE_NAMES.values())
def test_a_rule_that_is_named_cuts_as_the_expressions_it_was_named_for(rule, name):
    """On 300 texts of letters with and without case, marks, digits, signs and spaces of many scripts."""
    letters = list(
        "aAbZ's'T'LL'd 019  \n\r\t.,!/{}_-ÄßéñΩжЖǅʰ中文日本のカ한국어ไทยअनुمرحبا٣½²À\u0301\u3000…“”$+`~"
    )
    expressions, whole_words = rule
    cuts = [
        tokenizers.pre_tokenizers.Sequence(
            [tokenizers.pre_tokenizers.Split(tokenizers.Regex(e), "isolated") for e in of]
        )
        for of in (expressions, RULES[name].patterns)
    ]
    assert RULES[name].ignore_merges == whole_words
    draw = random.Random(0)
    for _ in range(300):
        text = "".join(draw.choices(letters, k=draw.randint(1, 30)))
        theirs, ours = (cut.pre_tokenize_str(text) for cut in cuts)
        assert theirs == ours, text


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model", "chat_template.jinja"])
def test_files_that_are_too_long_are_not_read(tmp_path, name):
    """A hole costs the disk nothing, and a reader all its memory."""
    if name == "chat_template.jinja":
        (tmp_path / "tokenizer.json").write_text(json.dumps(byte_level(PLAIN)))
    with (tmp_path / name).open("wb") as file:
        file.truncate(MAX_READ_BYTES + 1)
    with pytest.raises(CheckpointError, match=rf"{re.escape(name)} has 134217729 bytes; allowed: up to"):
        tokenizer_metadata(tmp_path, {}, 300)
