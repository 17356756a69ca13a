"""Constraints made of schemas, expressions and grammars: what they allow is what they say, byte by byte."""

import json
import re
from pathlib import Path

import jsonschema
import numpy as np
import pytest

from ropewalk.errors import GenerationError, InvalidParameterError
from ropewalk.text.grammar import After, Grammars

END = 256
SCHEMAS = json.loads((Path(__file__).parents[1] / "data/json-schemas.json").read_text())
RFC3339_TIME = r"([01]\d|2[0-3]):[0-5]\d:([0-5]\d|60)(\.\d+)?([Zz]|[+-]([01]\d|2[0-3]):[0-5]\d)"
WORDS = [
    b'{"',
    b'": ',
    b"  ",
    b"\n",
    b"\n\n\n\n\n",
    b'", "',
    b"true",
    b"null",
    b"12",
    "é".encode(),
    b'"}',
    b"</think>",
]


class Tokens:
    """A token for each byte, an end token, and some words; none of the last stands for a byte beyond UTF-8."""

    vocab_size = 257 + len(WORDS)
    bos_id = None
    eos_ids = frozenset([END])

    def token_bytes(self, i):
        return bytes([i]) if i < 256 else b"<end>" if i == END else WORDS[i - 257]

    def is_special(self, i):
        return i == END

    def encode(self, text, *, add_special=False):
        return list(text.encode() if isinstance(text, str) else text)


TOKENS = Tokens()


@pytest.fixture(scope="module")
def grammars():
    return Grammars(TOKENS, TOKENS.vocab_size + 3)


def allows(constraint, data):
    """Whether the bytes, all of them one by one, are a whole sentence."""
    constraint = constraint.fork()
    for byte in data.encode() if isinstance(data, str) else data:
        if not constraint.mask()[byte]:
            return False
        constraint.accept(byte)
    return constraint.ended or bool(constraint.mask()[END])


def after(constraint, data):
    """Tokens that may follow, as bytes."""
    constraint = constraint.fork()
    for byte in data:
        constraint.accept(byte)
    return {TOKENS.token_bytes(int(i)) for i in np.flatnonzero(constraint.mask())}


def drawn(constraint, rng, weights, most):
    """A random sentence, or None if it does not end within `most` tokens."""
    constraint, data = constraint.fork(), b""
    for _ in range(most):
        odds = weights * constraint.mask()[: len(weights)]
        token = int(rng.choice(len(weights), p=odds / odds.sum()))
        constraint.accept(token)
        if token == END:
            return data
        data += TOKENS.token_bytes(token)
        if constraint.ended:
            return data
    return None


class TestConformance:
    def test_there_are_a_hundred_schemas(self):
        assert len(SCHEMAS) >= 100

    @pytest.mark.parametrize(("name", "schema"), SCHEMAS, ids=[name for name, _ in SCHEMAS])
    def test_whatever_is_drawn_satisfies_the_schema(self, grammars, name, schema):
        """Tokens are drawn at random, closing ones more often, so that sentences end."""
        checker = jsonschema.FormatChecker()
        checker.checks("time")(lambda text: re.fullmatch(RFC3339_TIME, text) is not None)
        checker.checks("date-time")(
            lambda text: re.fullmatch(rf"\d{{4}}-\d\d-\d\d[Tt ]{RFC3339_TIME}", text) is not None
        )
        validator = jsonschema.Draft202012Validator(schema, format_checker=checker)
        weights = np.ones(TOKENS.vocab_size)
        weights[[*b'"}],', END]] = 30
        weights[[*b" \n\t\\"]] = 0.3
        rng = np.random.default_rng(0)
        constraint = grammars.json_schema(schema)
        texts = [text for _ in range(5) if (text := drawn(constraint, rng, weights, 400)) is not None]
        assert texts
        for text in texts:
            validator.validate(json.loads(text.decode()))

    def test_a_keyword_that_cannot_be_held_is_refused_by_name(self, grammars):
        with pytest.raises(InvalidParameterError, match="uniqueItems"):
            grammars.json_schema({"type": "array", "uniqueItems": True})


class TestWhiteSpace:
    def test_spaces_and_indentation_but_no_empty_lines(self, grammars):
        """J1."""
        constraint = grammars.json_schema(
            {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
        )
        for text in ('{"a": 1}', '{"a":1}', '{\n  "a": 1\n}', '{\n\t"a" : 1 }'):
            assert allows(constraint, text)
        for text in ('{\n\n\n\n\n"a": 1}', '{  "a": 1}', ' {"a": 1}', '{"a": 1}\n', '{"a": 1'):
            assert not allows(constraint, text)

    def test_white_space_that_is_always_preferred_comes_to_an_end(self, grammars):
        """J1: it is the most likely token wherever it is allowed."""
        schema = {
            "type": "object",
            "properties": {"a": {"type": "boolean"}, "b": {"type": "array", "items": {"enum": [1]}}},
        }
        constraint = grammars.json_schema({**schema, "required": ["a", "b"], "additionalProperties": False})
        weights = np.full(TOKENS.vocab_size, 1e-12)
        weights[[i for i in range(len(weights)) if i != END and not TOKENS.token_bytes(i).strip()]] = 1.0
        for seed in range(5):
            text = drawn(constraint, np.random.default_rng(seed), weights, 600)
            assert set(json.loads(text)) == {"a", "b"}

    def test_after_the_closing_brace_nothing_follows(self, grammars):
        """J1."""
        constraint = grammars.json_object()
        for byte in b'{"a": {}}':
            assert not constraint.ended
            constraint.accept(byte)
        assert constraint.ended
        assert constraint.complete


class TestBytes:
    def test_a_character_over_several_tokens(self, grammars):
        """J3."""
        constraint = grammars.regex("[😀-🙏]")
        assert after(constraint, b"") == {b"\xf0"}
        assert after(constraint, b"\xf0") == {b"\x9f"}
        assert after(constraint, b"\xf0\x9f") == {b"\x98", b"\x99"}
        assert after(constraint, b"\xf0\x9f\x99") == {bytes([i]) for i in range(0x80, 0x90)}
        assert allows(constraint, "🙏")
        assert not allows(constraint, "\U0001f650")

    def test_strings_take_characters_and_half_characters(self, grammars):
        """J3: as one token, as two tokens, but never as bytes that are no UTF-8."""
        constraint = grammars.json_schema({"type": "string"})
        assert "é".encode() in after(constraint, b'"')
        assert allows(constraint, b'"\xc3\xa9"')
        assert not allows(constraint, b'"\xc3"')
        assert not allows(constraint, b'"\xff"')

    def test_half_a_surrogate_pair_cannot_be_escaped(self, grammars):
        """J3."""
        constraint = grammars.json_schema({"type": "string"})
        assert not allows(constraint, r'"\ud83d"')
        assert allows(constraint, r'"\n\"\\"')

    def test_tokens_beyond_the_tokenizer_are_never_allowed(self, grammars):
        mask = grammars.regex("(.|\n)*").mask()
        assert len(mask) == TOKENS.vocab_size + 3
        assert mask[257 : TOKENS.vocab_size].all()
        assert not mask[TOKENS.vocab_size :].any()


class TestGrammars:
    def test_a_regular_expression_matches_the_whole(self, grammars):
        constraint = grammars.regex(r"\d{2}:\d{2}")
        assert allows(constraint, "12:34")
        assert not allows(constraint, "12:3")
        assert not allows(constraint, "12:345")

    def test_a_grammar(self, grammars):
        constraint = grammars.lark('start: sum\nsum: NUMBER ("+" NUMBER)*\nNUMBER: /[0-9]+/')
        assert allows(constraint, "1+23+4")
        assert not allows(constraint, "1+")

    def test_a_recursive_grammar(self, grammars):
        constraint = grammars.lark('start: nest\nnest: "(" nest? ")"')
        assert allows(constraint, "((()))")
        assert not allows(constraint, "((())")

    def test_what_breaks_it_is_an_error(self, grammars):
        constraint = grammars.regex("ab")
        with pytest.raises(GenerationError, match="token 98 breaks the grammar"):
            constraint.accept(ord("b"))

    def test_a_fork_is_independent(self, grammars):
        constraint = grammars.regex("ab|ac")
        constraint.accept(ord("a"))
        fork = constraint.fork()
        fork.accept(ord("b"))
        assert fork.ended
        assert not constraint.ended
        assert allows(constraint, "c")

    @pytest.mark.parametrize(
        ("make", "source", "message"),
        [
            ("regex", "(", "the regular expression cannot be used: .*unclosed group"),
            ("regex", "a(?=b)", "look-around"),
            ("lark", "start: nobody", 'unknown name: "nobody"'),
            ("lark", "", "the grammar cannot be used"),
            ("json_schema", {"type": "strin"}, "the JSON schema cannot be used: .*strin"),
            ("json_schema", {"$ref": "http://example.com/a"}, "example.com"),
            ("json_schema", False, "allows nothing"),
            ("json_schema", {"const": float("nan")}, "no JSON"),
            ("regex", "x" * 200_001, "has 200001 characters; allowed: at most 200000"),
        ],
    )
    def test_what_cannot_be_used_is_refused(self, grammars, make, source, message):
        with pytest.raises(InvalidParameterError, match=message):
            getattr(grammars, make)(source)

    @pytest.mark.parametrize(
        "pattern", ["(((a{1,1000}){1,1000}){1,1000})", "(.*a){60}.*", "(a|b)*a(a|b){1000}", "[a-z]{1,100000}"]
    )
    def test_a_heavy_expression_is_refused_or_bounded(self, grammars, pattern):
        """Every step is within llguidance's fuel, or an error of that request."""
        try:
            constraint = grammars.regex(pattern)
            for _ in range(30):
                constraint.accept(ord("a") if constraint.mask()[ord("a")] else END)
        except (InvalidParameterError, GenerationError) as error:
            assert "cannot be used" in str(error) or "too complex" in str(error)


class TestAfter:
    def test_everything_is_allowed_before_the_marker(self, grammars):
        constraint = After("</think>", grammars.regex("ok"), TOKENS)
        for byte in b"hm </thin":
            assert constraint.mask() is None
            constraint.accept(byte)
        fork = constraint.fork()
        for byte in b"k>":
            fork.accept(byte)
        assert constraint.mask() is None
        assert np.flatnonzero(fork.mask()).tolist() == [ord("o")]
        for byte in b"ok":
            assert not fork.ended
            fork.accept(byte)
        assert fork.ended

    def test_a_marker_that_is_one_token(self, grammars):
        constraint = After("</think>", grammars.regex("ok"), TOKENS)
        constraint.accept(257 + WORDS.index(b"</think>"))
        assert constraint.mask().sum() == 1
