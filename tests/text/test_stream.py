"""Streaming: whole characters, stop strings, nothing leaked and nothing lost (cases E1, E3)."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ropewalk.errors import InvalidParameterError
from ropewalk.text.stream import StreamDecoder

END = 9999


class Pieces:
    """A stand-in for a tokenizer: token i is piece i; END is a control token."""

    def __init__(self, *pieces: bytes | str) -> None:
        self.pieces = [piece.encode() if isinstance(piece, str) else piece for piece in pieces]

    def token_bytes(self, i: int) -> bytes:
        return b"<end>" if i == END else self.pieces[i]

    def is_special(self, i: int) -> bool:
        return i == END


def stream(*pieces, stop=(), **options):
    """Emitted texts, one a token and one at the finish; and the decoder."""
    decoder = StreamDecoder(Pieces(*pieces), stop, **options)
    texts = [decoder.push(i) for i in range(len(pieces))]
    return [*texts, decoder.finish()], decoder


@pytest.mark.parametrize("cuts", [(2,), (1, 2, 3), (3,), (1,)])
def test_e1_a_character_comes_out_whole(cuts):
    """E1: 😀 in any pieces: nothing until its last byte."""
    data = "😀".encode()
    pieces = [data[a:b] for a, b in zip((0, *cuts), (*cuts, len(data)), strict=True)]
    texts, decoder = stream(*pieces)
    assert texts == [""] * (len(pieces) - 1) + ["😀", ""]
    assert decoder.text == "😀"


def test_e1_two_tokens_make_one_han_character():
    assert stream(b"\xe6\xad", b"\xaa")[0] == ["", "歪", ""]


def test_e1_a_broken_character_becomes_one_replacement_and_loses_nothing():
    """E1: E6 followed by " a" is one U+FFFD, then " a"."""
    assert stream(b"\xe6", " a")[0] == ["", "\ufffd a", ""]
    assert stream(b"\xe6")[0] == ["", "\ufffd"]
    assert stream(b"\xf0\x9f", b"\x98")[0] == ["", "", "\ufffd"]


def test_control_tokens_are_left_out_or_spelled():
    decoder = StreamDecoder(Pieces("a"))
    assert [decoder.push(0), decoder.push(END), decoder.push(0)] == ["a", "", "a"]
    assert StreamDecoder(Pieces(), skip_special=False).push(END) == "<end>"


def test_e3_a_stop_string_inside_a_token():
    texts, decoder = stream("Paris", stop=["Pari"])
    assert (texts, decoder.stop_hit) == (["", ""], "Pari")


def test_e3_a_stop_string_over_several_tokens_does_not_leak():
    texts, decoder = stream("DEF", "G", "HI", "J", stop=["DEFGHIJ"])
    assert (texts, decoder.stop_hit, decoder.text) == ([""] * 5, "DEFGHIJ", "")


def test_e3_held_text_is_released_once_it_cannot_match():
    assert stream("DEF", "G", "X", stop=["DEFGHIJ"])[0] == ["", "", "DEFGX", ""]


def test_e3_held_text_is_delivered_at_the_end():
    decoder = StreamDecoder(Pieces("DEF"), ["DEFGHIJ"])
    assert [decoder.push(0), decoder.push(END), decoder.finish()] == ["", "", "DEF"]
    assert decoder.stop_hit is None


def test_e3_text_before_a_stop_string_in_the_same_token():
    assert stream("?\n", stop=["\n"])[0] == ["?", ""]


def test_e3_the_stop_string_that_is_complete_first_wins():
    texts, decoder = stream("xhello", stop=["lo", "hell"])
    assert (texts, decoder.stop_hit) == (["x", ""], "hell")
    for pieces in (["abcd"], ["a", "b", "c", "d"]):
        texts, decoder = stream(*pieces, stop=["abcd", "bc"])
        assert (decoder.text, decoder.stop_hit) == ("a", "bc")
    assert stream("xab", stop=["b", "ab"])[1].stop_hit == "ab"


def test_e3_a_stop_string_that_overlaps_its_own_beginning():
    texts, decoder = stream("a", "a", "a", "b", stop=["aab"])
    assert (decoder.text, decoder.stop_hit) == ("a", "aab")
    assert texts == ["", "", "a", "", ""]


def test_nothing_comes_after_a_stop_string():
    texts, decoder = stream("a", "STOP", "b", stop="STOP")
    assert (texts, decoder.text) == (["a", "", "", ""], "a")


def test_the_stop_string_can_be_kept():
    texts, decoder = stream("a", "ST", "OPb", stop=["STOP"], include_stop=True)
    assert (texts, decoder.stop_hit) == (["a", "", "STOP", ""], "STOP")


def test_stop_strings_do_not_count_in_the_first_tokens():
    """Tokens before `min_tokens`: a stop string neither ends the text there nor begins there."""
    decoder = StreamDecoder(Pieces("END", "EN", "D", "E", "ND"), ["END"])
    assert decoder.push(0, match_stops=False) == "END"
    assert decoder.push(1, match_stops=False) == "EN"
    assert decoder.push(2) == "D"
    assert decoder.push(3) == ""
    assert decoder.push(0, match_stops=False) == "EEND"
    assert [decoder.push(3), decoder.push(4)] == ["", ""]
    assert (decoder.text, decoder.stop_hit) == ("ENDENDEEND", "END")


def test_an_empty_stop_string_is_refused():
    with pytest.raises(InvalidParameterError, match="stop string is empty"):
        StreamDecoder(Pieces(), ["a", ""])


def test_work_grows_with_the_text_alone():
    """A stop string of 20 000 letters, all but met again and again, in 200 000 tokens."""
    decoder = StreamDecoder(Pieces("a", "c"), ["a" * 20_000 + "b"])
    started = time.process_time()
    emitted = sum(len(decoder.push(i % 20_001 == 20_000)) for i in range(200_000))
    assert emitted + len(decoder.finish()) == 200_000
    assert time.process_time() - started < 60  # quadratic work would take minutes


ALPHABET = st.sampled_from(["a", "b", "ab", "é", "😀", "歪", " "])
TEXT = st.lists(ALPHABET, max_size=30).map("".join)


@st.composite
def cut_bytes(draw, data):
    """The same bytes in random pieces."""
    data = draw(data)
    marks = sorted(draw(st.sets(st.integers(0, len(data)), max_size=12)))
    return data, [data[a:b] for a, b in zip((0, *marks), (*marks, len(data)), strict=True)]


@given(cut_bytes(st.one_of(TEXT.map(str.encode), st.binary(max_size=30))))
def test_e1_joined_stream_equals_decoding_at_once(case):
    data, pieces = case
    texts, decoder = stream(*pieces)
    assert "".join(texts) == decoder.text == data.decode("utf-8", "replace")


@given(cut_bytes(TEXT.map(str.encode)))
def test_e1_no_half_character_is_ever_shown(case):
    data, pieces = case
    shown = ""
    for text in stream(*pieces)[0]:
        shown += text
        assert "\ufffd" not in text and data.decode().startswith(shown)


def first_complete(text: str, stops: list[str]) -> tuple[int, int]:
    """Where the first complete stop string begins and ends, by plain search; without any, the text's end."""
    found = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    end, start = min(found, default=(len(text), len(text)))
    return start, end


@given(
    cut_bytes(TEXT.map(str.encode)),
    st.lists(st.lists(ALPHABET, min_size=1, max_size=4).map("".join), max_size=3),
    st.booleans(),
)
def test_e3_streamed_text_equals_text_cut_afterwards(case, stops, include):
    """Whatever the tokens; and no part of a stop string that is met is ever shown before."""
    data, pieces = case
    whole = data.decode()
    start, end = first_complete(whole, stops)
    texts, decoder = stream(*pieces, stop=stops, include_stop=include)
    assert "".join(texts) == decoder.text == whole[: end if include else start]
    assert (decoder.stop_hit is None) == (not any(stop in whole for stop in stops))
