"""Whether two vocabularies are the same, for a model and its draft model."""

import pytest

from ropewalk.errors import InvalidParameterError
from ropewalk.text.same import check_same_tokens
from ropewalk.text.tokenizer import Tokenizer


class Words:
    def __init__(self, words):
        self.spellings = [word.encode() for word in words]


WORDS = ["a", "b", "c", "d", "e", "f", "g", "h"]


def test_h4_a_token_that_differs_is_named_with_both_texts():
    other = [*WORDS[:5], "F", *WORDS[6:]]
    with pytest.raises(InvalidParameterError, match="token 5 is 'f' in the model and 'F' in the draft model"):
        check_same_tokens(Words(WORDS), Words(other))


def test_h4_padding_at_the_end_may_differ():
    """151,936 and 152,064 in Qwen2.5: 128 more."""
    padded = Words(WORDS + [f"[PAD{i}]" for i in range(128)])
    check_same_tokens(Words(WORDS), Words(WORDS))
    check_same_tokens(Words(WORDS), padded)
    check_same_tokens(padded, Words(WORDS))


def test_h4_a_beginning_of_another_vocabulary_is_not_the_same():
    longer = Words(WORDS + [f"more{i}" for i in range(129)])
    for pair in ((Words(WORDS), longer), (longer, Words(WORDS))):
        with pytest.raises(InvalidParameterError, match=r"(8|137) tokens, and the model has (137|8)"):
            check_same_tokens(*pair)


def test_h4_what_a_token_is_declared_to_be_does_not_matter():
    """The same spellings, one of them a control token in one file only: its id means the same in both."""
    import numpy as np

    def tokenizer(kind_of_last):
        return Tokenizer.from_metadata(
            {
                "tokenizer.ggml.model": "gpt2",
                "tokenizer.ggml.pre": "default",
                "tokenizer.ggml.tokens": ["a", "b", "<|x|>"],
                "tokenizer.ggml.token_type": np.array([1, 1, kind_of_last], np.int32),
                "tokenizer.ggml.merges": [],
            }
        )

    ordinary, control = tokenizer(1), tokenizer(3)
    assert (ordinary.is_special(2), control.is_special(2)) == (False, True)
    check_same_tokens(ordinary, control)
    check_same_tokens(control, ordinary)
