"""Prompt lookup: the text so far says what comes next, wherever it repeats itself.

The longest end of the text that also stands earlier in it is sought, the latest such place counts, and what followed
there is the guess (after "prompt lookup decoding", Saxena 2023, and LZ77). It costs microseconds and no memory, and is
often right where a text is edited, quoted or summarised. Its class says how long the common end is.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ropewalk.engine.pages import PagePool
from ropewalk.engine.speculative.drafter import Draft, Step
from ropewalk.engine.speculative.pace import Pace

LONGEST = 32
"""Tokens of a common end that are compared; longer ones count as this long."""

_BORDERS = (1, 2, 3, 4, 6, 9, 17)  # the shortest common end of each class, from 1 on


class PromptLookup:
    """Drafts from the text of the request itself."""

    priors: Sequence[float] = (0.5, 0.15, 0.3, 0.45, 0.6, 0.7, 0.8, 0.9)
    n_bytes = 0

    def page_bytes(self, dtype: str) -> int:
        """None."""
        return 0

    def start(self, pool: PagePool, dtype: str) -> None:
        """Nothing to do."""

    def draft(self, drafts: Sequence[Draft], step: Step, pace: Pace) -> None:
        """Look up every draft; `pace` cuts them afterwards, since guesses cost nothing."""
        for draft in drafts:
            request = draft.request
            length, tokens = look_up(request.tokens[: request.n_tokens], draft.most)
            for i, token in enumerate(tokens):
                draft.add(token, bisect_right(_BORDERS, length + i))

    def close(self) -> None:
        """Nothing to do."""


def look_up(tokens: NDArray[np.int32], most: int) -> tuple[int, list[int]]:
    """Find where the end of a text stands earlier in it, and what follows there.

    Parameters
    ----------
    tokens : int32 [n]
        The text, n at least 1.
    most : int
        How many tokens to return.

    Returns
    -------
    length : int
        Tokens of the longest end that stands earlier in the text, at most `LONGEST`; 0 if there is none.
    following : list of int
        What follows the latest such place: `most` tokens, or none if the length is 0. Where that place reaches the end
        of the text, the text is taken to go on in the same period.
    """
    n = len(tokens)
    ends = np.flatnonzero(tokens[:-1] == tokens[-1])  # where the common end would end
    if not len(ends):
        return 0, []
    length = 1
    while length < LONGEST:
        longer = ends[ends >= length]
        longer = longer[tokens[longer - length] == tokens[n - 1 - length]]
        if not len(longer):
            break
        ends, length = longer, length + 1
    start = int(ends[-1]) + 1
    return length, [int(tokens[start + i % (n - start)]) for i in range(most)]
