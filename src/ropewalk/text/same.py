"""Whether two tokenizers mean the same by their ids, as a model and its draft model must.

Compared are the texts of the tokens as their files spell them. What a file declares a token to be (ordinary, control,
unused) is not: that only decides how text is cut and shown, which the model's own tokenizer does. Sizes may differ by
padding at the end, as those of Qwen2.5's models do (151,936 and 152,064).
"""

from __future__ import annotations

from typing import Protocol

from ropewalk.errors import InvalidParameterError

MOST_PADDING = 128
"""By how many tokens two vocabularies may differ in size."""


class Tokens(Protocol):
    """What is asked of a tokenizer."""

    @property
    def spellings(self) -> list[bytes]:
        """Text of each token as its file spells it."""
        ...


def check_same_tokens(
    model: Tokens, other: Tokens, what: str = "draft model", most_padding: int = MOST_PADDING
) -> None:
    """Raise InvalidParameterError unless the tokens of another model are those of the model.

    The message calls the other model `what`, and names the first id that differs, and both texts.
    """
    ours, theirs = model.spellings, other.spellings
    n = min(len(ours), len(theirs))
    if ours[:n] != theirs[:n]:
        i = next(i for i in range(n) if ours[i] != theirs[i])
        texts = [tokens[i].decode("utf-8", "replace") for tokens in (ours, theirs)]
        raise InvalidParameterError(
            f"the {what} has another vocabulary: token {i} is {texts[0]!r} in the model and {texts[1]!r} in "
            f"the {what}; allowed: a {what} with the same tokens"
        )
    if abs(len(ours) - len(theirs)) > most_padding:
        padding = (
            f", and a difference of at most {most_padding} of padding at the end" if most_padding else ""
        )
        raise InvalidParameterError(
            f"the {what} has another vocabulary: {len(theirs)} tokens, and the model has {len(ours)}; allowed: "
            f"the same tokens{padding}"
        )
