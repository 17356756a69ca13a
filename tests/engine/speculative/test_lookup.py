"""Prompt lookup: the longest end of the text that stands earlier in it, and what follows there."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ropewalk.engine.speculative.lookup import LONGEST, look_up


def found(text, most=3):
    length, following = look_up(np.array([ord(c) for c in text], np.int32), most)
    return length, "".join(map(chr, following))


@pytest.mark.parametrize(
    ("text", "length", "following"),
    [
        ("a", 0, ""),
        ("abc", 0, ""),
        ("abca", 1, "bca"),
        ("xabcd yabc", 3, "d y"),  # "abc", not the later "c"
        ("ab abx aby ab", 3, "y a"),  # the latest of equally long ones
        ("abcde bcx abc", 3, "de "),  # a longer one that is earlier
        ("aaaa", 3, "aaa"),  # it reaches the end of the text: the period goes on
        ("ababab", 4, "aba"),
        ("xyzxy", 2, "zxy"),
    ],
)
def test_by_hand(text, length, following):
    assert found(text) == (length, following)


def test_no_guess_is_asked_for():
    assert found("abca", most=0) == (1, "")


@given(st.lists(st.integers(0, 2), min_size=1, max_size=120), st.integers(1, 8))
def test_equal_to_a_search_by_hand(tokens, most):
    n, best = len(tokens), (0, [])
    for end in range(1, n):  # tokens[:end] ends as the text does, in `length` tokens
        length = 0
        while length < min(end, LONGEST) and tokens[end - 1 - length] == tokens[n - 1 - length]:
            length += 1
        if length and length >= best[0]:
            guess = list(tokens)
            for i in range(most):
                guess.append(guess[end + i])
            best = length, guess[n:]
    assert look_up(np.array(tokens, np.int32), most) == best
