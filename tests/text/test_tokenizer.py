"""Encodings equal llama.cpp's on the fixture; decoding; refusals of malformed vocabularies."""

import json
import lzma
import random
import threading
import unicodedata
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers

from ropewalk.checkpoint.gguf import open_gguf
from ropewalk.errors import CheckpointError, PromptError, UnsupportedModelError
from ropewalk.text.presplit import RULES
from ropewalk.text.stream import StreamDecoder
from ropewalk.text.tokenizer import Tokenizer

FIXTURE = Path(__file__).parents[1] / "data" / "tokenization.json.xz"
MODELS = ["smollm2-135m", "gemma3-270m", "qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b"]


@pytest.fixture(scope="session")
def fixture():
    return json.loads(lzma.decompress(FIXTURE.read_bytes()))


@pytest.fixture(scope="session")
def texts(fixture):
    return [bytes.fromhex(text) for text in fixture["texts"]]


@pytest.fixture(scope="session")
def metadata_of(model_path):
    """A function from a model's name to its metadata."""
    opened: dict[str, Mapping[str, object]] = {}

    def find(name: str) -> Mapping[str, object]:
        if name not in opened:
            with open_gguf(model_path(name)) as file:
                opened[name] = dict(file.metadata)
        return opened[name]

    return find


@pytest.fixture(scope="session")
def smollm2_tokenizer(metadata_of):
    return Tokenizer.from_metadata(metadata_of("smollm2-135m"))


def assert_same_ids(tokenizer, texts, expected, **options):
    assert len(texts) == len(expected) >= 300
    different = [
        (text, ids, wanted)
        for text, wanted in zip(texts, expected, strict=True)
        if (ids := tokenizer.encode(text, **options)) != wanted
    ]
    assert different == []


@pytest.mark.filterwarnings("ignore:the prompt starts with the BOS token")
@pytest.mark.parametrize("name", MODELS)
def test_ids_equal_llama_cpp(name, metadata_of, fixture, texts):
    """The four models, without and with special tokens read in the text; and the same ends of generation."""
    tokenizer = Tokenizer.from_metadata(metadata_of(name))
    expected = fixture["models"][name]
    assert_same_ids(tokenizer, texts, expected["plain"])
    assert_same_ids(tokenizer, texts, expected["special"], parse_special=True)
    assert sorted(tokenizer.eos_ids) == expected["end_ids"]


def test_ids_equal_llama_cpp_under_every_rule(metadata_of, fixture, texts):
    """Each pre-split rule, tried on SmolLM2's vocabulary."""
    metadata = metadata_of("smollm2-135m")
    for rule, expected in fixture["smollm2_under_rules"].items():
        altered = {
            **metadata,
            "tokenizer.ggml.pre": rule,
            "tokenizer.ggml.add_bos_token": False,
        }
        tokenizer = Tokenizer.from_metadata(altered)
        kept = [i for i, text in enumerate(texts) if not reference_departs(rule, text)]
        assert_same_ids(tokenizer, [texts[i] for i in kept], [expected[i] for i in kept])


def reference_departs(rule: str, text: bytes) -> bool:
    """Where llama.cpp does not cut a text as the model's own tokenizer does.

    It hides spaces beyond ASCII from a class of deepseek-coder's rule, and in two rules that go by case it counts only
    A to Z and a to z as having one, and no marks as letters.
    """
    chars = [c for c in text.decode("utf-8", "ignore") if ord(c) > 0x7F]
    if rule in ("tekken", "gpt-4o"):
        return any(unicodedata.category(c) in ("Lu", "Ll", "Lt", "Mn", "Mc", "Me") for c in chars)
    return rule == "deepseek-coder" and any(c.isspace() and ord(c) > 0x7FF for c in chars)


def test_rules_by_case_cut_as_their_models_do():
    """The published expressions of Mistral's Tekken and of GPT-4o, on letters with and without case, and marks."""
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    lead, rest = r"[^\r\n\p{L}\p{N}]?", r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    published = {
        "tekken": rf"{lead}{upper}*{lower}+|{lead}{upper}+{lower}*|\p{{N}}|{rest}",
        "gpt-4o": rf"{lead}{upper}*{lower}+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        rf"|{lead}{upper}+{lower}*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{{N}}{{1,3}}|{rest}",
    }
    letters = list("aAbZ's'T'LL'd 019  \n\r\t.,!/{}_-ÄßéñΩжЖǅʰ中文日本のカ한국어ไทยअनुमرحبا٣½²À́\u3000…“”")
    draw = random.Random(0)
    texts = ["".join(draw.choices(letters, k=draw.randint(1, 30))) for _ in range(500)]
    texts += ["ПриветМир ДОМа", "नमस्ते दुनिया", "ÉCOLE Élysée's"]
    for name, expression in published.items():
        (ours,) = RULES[name].patterns
        cut, same = (pre_tokenizers.Split(Regex(e), "isolated") for e in (expression, ours))
        for text in texts:
            assert same.pre_tokenize_str(text) == cut.pre_tokenize_str(text), (name, text)
    assert [word for word, _ in same.pre_tokenize_str("नमस्ते दुनिया")] == ["नमस्ते", " दुनिया"]


@pytest.mark.filterwarnings("ignore:the prompt starts with the BOS token")
def test_e6_a_space_is_put_before_text_and_after_special_tokens(metadata_of, fixture, texts):
    """E6, with Gemma 3's vocabulary told to add it: ids equal llama.cpp's, and decoding removes it."""
    altered = {**metadata_of("gemma3-270m"), "tokenizer.ggml.add_space_prefix": True}
    tokenizer = Tokenizer.from_metadata(altered)
    assert_same_ids(tokenizer, texts, fixture["gemma3_with_space_prefix"], parse_special=True)
    for text in ("hello", " hello", "  hello", "<bos>hello", "a<bos>  b", "\n x", "<eos><eos> x"):
        ids = tokenizer.encode(text, add_special=False, parse_special=True)
        assert tokenizer.decode(ids, skip_special=False) == text


@pytest.mark.parametrize("name", MODELS)
def test_decoding_gives_the_text_back(name, metadata_of, texts):
    """Every valid text of the fixture; ▁ stands for a space in SentencePiece and cannot come back."""
    tokenizer = Tokenizer.from_metadata(metadata_of(name))
    known_bytes = {tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)}
    for text in texts:
        try:
            expected = text.decode()
        except UnicodeDecodeError:
            continue
        if "▁" in expected and name == "gemma3-270m":
            expected = expected.replace("▁", " ")
        if not all(bytes([byte]) in known_bytes for byte in text):
            continue  # SmolLM2 has no tokens for a few bytes
        ids = tokenizer.encode(text, add_special=False)
        assert tokenizer.decode(ids, skip_special=False) == expected


@pytest.fixture(scope="session")
def smollm2_bytes(smollm2_tokenizer):
    """The bytes that SmolLM2 has tokens for: no F1 to FF, and none of the bytes that UTF-8 never uses."""
    parts = [smollm2_tokenizer.token_bytes(i) for i in range(smollm2_tokenizer.vocab_size)]
    return {part[0] for part in parts if len(part) == 1}


@settings(max_examples=150, deadline=None)
@given(text=st.text())
def test_round_trip_of_any_text(smollm2_tokenizer, smollm2_bytes, text):
    """Byte-level BPE loses nothing but bytes without a token; control tokens never come from plain text."""
    ids = smollm2_tokenizer.encode(text)
    kept = bytes(byte for byte in text.encode() if byte in smollm2_bytes)
    assert b"".join(map(smollm2_tokenizer.token_bytes, ids)) == kept
    assert not any(map(smollm2_tokenizer.is_special, ids))


@settings(max_examples=100, deadline=None)
@given(data=st.binary(max_size=40))
def test_any_bytes_have_ids(smollm2_tokenizer, data):
    """Bytes that are not UTF-8 are never an error."""
    assert all(0 <= i < smollm2_tokenizer.vocab_size for i in smollm2_tokenizer.encode(data))


def test_lone_surrogates_are_encoded_as_their_three_bytes(smollm2_tokenizer):
    """JSON can smuggle "\\ud83d" into a str."""
    assert smollm2_tokenizer.encode("a\ud83db") == smollm2_tokenizer.encode(b"a\xed\xa0\xbdb")


@pytest.mark.parametrize("name", MODELS)
def test_e1_a_stream_of_random_ids_equals_decoding_all_at_once(name, metadata_of):
    """E1: whatever the ids; of these, most runs hold broken characters, and some hold control tokens."""
    tokenizer = Tokenizer.from_metadata(metadata_of(name))
    rng = np.random.default_rng(6)
    special = [i for i in range(tokenizer.vocab_size) if tokenizer.is_special(i)]
    partial = [i for i in range(tokenizer.vocab_size) if not is_utf8(tokenizer.token_bytes(i))]
    for _ in range(60):
        ids = [int(i) for pool in (tokenizer.vocab_size, partial, special) for i in rng.choice(pool, 12)]
        rng.shuffle(ids)
        for skip in (True, False):
            stream = StreamDecoder(tokenizer, skip_special=skip)
            texts = [stream.push(i) for i in ids] + [stream.finish()]
            assert "".join(texts) == tokenizer.decode(ids, skip_special=skip, continuation=True)


def is_utf8(data):
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


# Small vocabularies of our own


def spm(tokens: list[tuple[str, float, int]], **keys: object) -> dict[str, object]:
    """Metadata of a SentencePiece-style vocabulary of (text, score, kind)."""
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [text for text, _, _ in tokens],
        "tokenizer.ggml.scores": np.array([score for _, score, _ in tokens], np.float32),
        "tokenizer.ggml.token_type": np.array([kind for _, _, kind in tokens], np.int32),
    } | {f"tokenizer.ggml.{key}": value for key, value in keys.items()}


UNKNOWN, BOS, EOS = ("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3)
BYTES = [(f"<0x{b:02X}>", 0.0, 6) for b in range(256)]
WORDS = [("▁hello", -1.0, 1), ("▁world", -2.0, 1), ("▁", -50.0, 1)]
LETTERS = [(c, -100.0, 1) for c in "helowrd<>0xEA"]
PARTS = [(t, -20.0 - i, 1) for i, t in enumerate(["he", "ll", "hell", "hello", "wo", "rl", "world", "worl"])]
SMALL = [UNKNOWN, BOS, EOS, *BYTES, *WORDS, *LETTERS, *PARTS]


def small_spm(**keys: object) -> dict[str, object]:
    return spm(SMALL, **keys)


def id_of(metadata: dict[str, object], text: str) -> int:
    return metadata["tokenizer.ggml.tokens"].index(text)


def test_e6_leading_space():
    """E6: encode adds a space, full decode takes it away, generated ids keep theirs."""
    metadata = spm(SMALL)
    tokenizer = Tokenizer.from_metadata(metadata)
    hello, world = id_of(metadata, "▁hello"), id_of(metadata, "▁world")
    assert tokenizer.encode("hello") == [1, hello]
    assert tokenizer.decode([1, hello]) == "hello"
    assert tokenizer.decode([1, hello], skip_special=False) == "<s>hello"
    assert tokenizer.decode([hello, world]) == "hello world"
    assert tokenizer.decode([world], continuation=True) == " world"
    assert tokenizer.encode("hello") + tokenizer.encode(" world", add_special=False, continuation=True) == (
        tokenizer.encode("hello world")
    )
    plain = Tokenizer.from_metadata(spm(SMALL, add_space_prefix=False))
    assert plain.encode("hello", add_special=False) == [id_of(metadata, "hello")]
    assert plain.decode([world]) == " world"


def test_e8_bytes_stand_in_for_characters_outside_the_vocabulary():
    """E8: 깰 is spelled in bytes and comes back; "<0xEA>" typed by a user stays six characters."""
    metadata = spm(SMALL, add_space_prefix=False, add_bos_token=False)
    tokenizer = Tokenizer.from_metadata(metadata)
    spelled = [id_of(metadata, f"<0x{b:02X}>") for b in (0xEA, 0xB9, 0xB0)]
    assert tokenizer.encode("깰") == spelled
    assert tokenizer.decode(spelled) == "깰"
    assert [tokenizer.token_bytes(i) for i in spelled] == [b"\xea", b"\xb9", b"\xb0"]
    typed = tokenizer.encode("<0xEA>")
    assert [tokenizer.token_text(i) for i in typed] == list("<0xEA>")


def test_e8_typed_text_does_not_merge_into_byte_or_control_tokens():
    """Even where halves of <0xEA> and of </s> are tokens whose merge would have the best score."""
    halves = [
        ("<0x", -1.0, 1),
        ("EA>", -1.0, 1),
        ("</", -1.0, 1),
        ("s>", -1.0, 1),
        ("<0", -1.0, 1),
        ("EA", -1.0, 1),
    ]
    extra = [*halves, ("/", -9.0, 1), ("s", -9.0, 1)]
    tokenizer = Tokenizer.from_metadata(spm([*SMALL, *extra], add_space_prefix=False, add_bos_token=False))
    assert [tokenizer.token_text(i) for i in tokenizer.encode("<0xEA></s>")] == ["<0x", "EA>", "</", "s>"]


def test_e8_without_byte_tokens_a_strange_character_is_unknown():
    tokens = [UNKNOWN, BOS, EOS, *WORDS, *LETTERS, *PARTS]
    tokenizer = Tokenizer.from_metadata(spm(tokens, add_space_prefix=False, add_bos_token=False))
    metadata = spm(tokens)
    assert tokenizer.encode("h깰ll") == [id_of(metadata, "h"), 0, id_of(metadata, "ll")]


def test_equal_scores_merge_from_the_left():
    """Three a's with aa: the left pair goes first, whatever else could be built."""
    tokens = [UNKNOWN, BOS, EOS, ("a", -9.0, 1), ("aa", -1.0, 1), ("aaa", -1.0, 1)]
    tokenizer = Tokenizer.from_metadata(spm(tokens, add_space_prefix=False, add_bos_token=False))
    assert tokenizer.encode("aaa") == [5]
    assert tokenizer.encode("aaaa") == [5, 3]  # aa a a -> aaa a: the merge on the left is never undone
    assert tokenizer.encode("aaaaa") == [5, 4]


def test_words_are_cut_only_where_no_token_reaches_across():
    """A token such as ">▁<" holds a space inside: text after ">" belongs to the same word."""
    tokens = [*SMALL, (">▁<", -1.0, 1), (">▁", -1.0, 1)]
    metadata = spm(tokens, add_space_prefix=False, add_bos_token=False)
    tokenizer = Tokenizer.from_metadata(metadata)
    assert tokenizer.encode("> <") == [id_of(metadata, ">▁<")]
    assert [tokenizer.token_text(i) for i in tokenizer.encode("hello> <world")] == ["hello", "> <", "world"]


def bpe(**keys: object) -> dict[str, object]:
    """Metadata of a byte-level BPE vocabulary: all bytes, then two merges and an end token."""
    from ropewalk.text.bytelevel import ALPHABET

    tokens = [*ALPHABET.values(), "ab", "abc", "<|im_end|>"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": ["a b", "ab c"],
        "tokenizer.ggml.token_type": np.array([1] * 258 + [3], np.int32),
    } | {f"tokenizer.ggml.{key}": value for key, value in keys.items()}


def test_a_small_byte_level_vocabulary():
    tokenizer = Tokenizer.from_metadata(bpe())
    abc, end = 257, 258
    assert tokenizer.encode("abcab<|im_end|>", parse_special=True) == [abc, 256, end]
    assert tokenizer.eos_ids == {end}
    assert tokenizer.decode([abc, end]) == "abc"
    assert tokenizer.decode([abc, end], skip_special=False) == "abc<|im_end|>"
    assert str(tokenizer.description) == "byte-level BPE, pre-split gpt-2, 259 tokens, 1 special"


@pytest.mark.parametrize(
    ("build", "keys", "named"),
    [
        (bpe, {"token_type": np.ones(5, np.int32)}, "token_type has 5 items, but there are 259 tokens"),
        (bpe, {"token_type": "x"}, "token_type"),
        (bpe, {"token_type": np.ones(259, np.float32)}, "token_type"),
        (bpe, {"tokens": []}, "tokens is empty"),
        (bpe, {"tokens": ["a", "b", "a"]}, "tokens holds 'a' twice"),
        (bpe, {"tokens": 5}, "tokens"),
        (bpe, {"tokens": "abc"}, "tokens"),
        (bpe, {"tokens": [1, 2]}, "tokens"),
        (bpe, {"merges": None}, "merges is missing"),
        (bpe, {"merges": ["a b", "ab q", "abq c"]}, "merges holds 'ab q', but 'abq' is not a token"),
        (bpe, {"merges": ["ab"]}, "merges holds 'ab'"),
        (bpe, {"merges": ["a b c"]}, "merges holds 'a b c'"),
        (bpe, {"merges": ["a "]}, "merges holds 'a '"),
        (bpe, {"merges": [""]}, "merges holds ''"),
        (bpe, {"pre": 3}, "pre is 3"),
        (bpe, {"bos_token_id": 259}, "bos_token_id is 259"),
        (bpe, {"bos_token_id": -1}, "bos_token_id is -1"),
        (bpe, {"eos_token_id": 2**32 - 1}, "eos_token_id is 4294967295"),
        (bpe, {"eot_token_id": 999}, "eot_token_id is 999"),
        (bpe, {"eom_token_id": 999}, "eom_token_id is 999"),
        (bpe, {"fim_pad_token_id": 999}, "fim_pad_token_id is 999"),
        (bpe, {"eos_token_id": "2"}, "eos_token_id"),
        (bpe, {"eos_token_id": True}, "eos_token_id"),
        (bpe, {"add_bos_token": 1}, "add_bos_token"),
        (bpe, {"add_bos_token": True}, "bos_token_id is missing"),
        (bpe, {"add_eos_token": True}, "eos_token_id is missing"),
        (bpe, {"model": None}, "model is missing"),
        (small_spm, {"scores": None}, "scores is missing"),
        (small_spm, {"scores": np.zeros(3, np.float32)}, "scores has 3 items"),
        (small_spm, {"scores": np.full(len(SMALL), np.nan, np.float32)}, "scores is not a number at 0"),
        (small_spm, {"token_type": np.full(len(SMALL), 6, np.int32)}, "token_type calls b'<unk>' a byte"),
        (small_spm, {"add_space_prefix": "yes"}, "add_space_prefix"),
    ],
)
def test_malformed_vocabularies_are_refused_by_key(build, keys, named):
    metadata = {key: value for key, value in build(**keys).items() if value is not None}
    with pytest.raises(CheckpointError, match=r"^tokenizer\.ggml\.") as caught:
        Tokenizer.from_metadata(metadata)
    assert named in str(caught.value)


def test_unknown_kinds_and_rules_are_refused_by_name():
    with pytest.raises(UnsupportedModelError, match="'bert'"):
        Tokenizer.from_metadata(bpe(model="bert"))
    with pytest.raises(UnsupportedModelError, match="'no-such-rule'"):
        Tokenizer.from_metadata(bpe(pre="no-such-rule"))


def test_ids_outside_the_vocabulary_are_refused():
    tokenizer = Tokenizer.from_metadata(bpe())
    for i in (-1, 259):
        with pytest.raises(PromptError, match=f"token id {i} is outside"):
            tokenizer.decode([i])


def test_what_is_no_text_or_no_ids_is_refused():
    tokenizer = Tokenizer.from_metadata(bpe())
    for text in (3, None, ["a"]):
        with pytest.raises(PromptError, match=r"a text is .*; allowed: a string"):
            tokenizer.encode(text)
    for ids in (3, None, "x", b"x"):
        with pytest.raises(PromptError, match=r"token ids are .*; allowed: a sequence of integers"):
            tokenizer.decode(ids)
    for ids in ([1.0], ["a"], [True]):
        with pytest.raises(PromptError, match=r"token id .* is no integer"):
            tokenizer.decode(ids)
    assert tokenizer.decode(np.array([1, 2], np.int32)) == tokenizer.decode([1, 2])


def test_e4_a_prompt_that_brings_its_own_start_token_gets_another_and_a_warning():
    """E4: what the user typed is kept, as llama.cpp keeps it, but not in silence."""
    tokenizer = Tokenizer.from_metadata(spm(SMALL))
    with pytest.warns(UserWarning, match="starts with the BOS token"):
        ids = tokenizer.encode("<s>hello", parse_special=True)
    assert ids[:2] == [1, 1]
    assert tokenizer.encode("<s>hello", parse_special=True, add_special=False)[:2] == [1, ids[2]]


def test_harmony_messages_do_not_end_a_generation():
    """With <|return|> and <|call|> in the vocabulary, <|end|> closes one message of many and is shown."""
    texts = [*bpe()["tokenizer.ggml.tokens"], "<|return|>", "<|call|>", "<|end|>", "<|channel|>"]
    kinds = np.array([1] * 258 + [3] * 5, np.int32)
    tokenizer = Tokenizer.from_metadata(bpe(tokens=texts, token_type=kinds))
    assert tokenizer.eos_ids == {258, 259, 260}
    assert tokenizer.encode("<|end|><|channel|>") == [261, 262]
    without = Tokenizer.from_metadata(bpe(tokens=[*texts[:260], "<|end|>"], token_type=kinds[:261]))
    assert without.eos_ids == {258, 259, 260}


def test_tokens_found_by_their_text_become_control_tokens():
    """A file that calls <|im_end|> ordinary text still has it end generations, and hides it."""
    tokenizer = Tokenizer.from_metadata(bpe(token_type=np.ones(259, np.int32)))
    assert tokenizer.eos_ids == {258}
    assert tokenizer.is_special(258)


def test_other_threads_run_while_a_long_text_is_encoded(smollm2_tokenizer):
    """A server's steps and streams go on; the interpreter was held for seconds by a text of megabytes."""
    ticks = most = 0
    done = threading.Event()

    def tick():
        nonlocal ticks
        while not done.wait(0.001):
            ticks += 1

    ticking = threading.Thread(target=tick)
    ticking.start()
    for _ in range(100):  # a busy machine may have no time for the other thread just now
        before = ticks
        ids = smollm2_tokenizer.encode("the quick brown fox " * 30_000)
        most = max(most, ticks - before)
        if most >= 5:
            break
    done.set()
    ticking.join()
    assert len(ids) == 120_001  # the last space is a token of its own
    assert most >= 5  # a text that held the interpreter would leave one or two
