"""A full context: which tokens leave it so that the output can go on.

Nothing is moved: keys are stored rotated by their positions, so a token that stays is computed anew at its new
position. The next token is then exactly what a request for the shortened text would get, in every cache type, and after
any number of slides; what it costs is one prefill of what stays, spread over the tokens that it makes room for.

Which tokens have left follows from the length of the sequence alone, so it is the same alone and among others.
"""

from __future__ import annotations

from dataclasses import dataclass

from ropewalk.backend.base import PAGE_SIZE

MIN_ROOM = 2 * PAGE_SIZE
"""Tokens of the context that must be left beside those that are kept for good."""

MAX_TOKENS = 1 << 20
"""Most tokens of an output that slides: nothing else bounds the memory that its token ids take."""


@dataclass(frozen=True)
class Slide:
    """Drop the older half of all that is not kept, in whole pages, whenever the context is full.

    Attributes
    ----------
    context_length : int
        A sequence of so many tokens is full.
    keep : int
        Tokens at the beginning that always stay; at most context_length - MIN_ROOM.
    """

    context_length: int
    keep: int

    @property
    def step(self) -> int:
        """Tokens that leave at a time."""
        return (self.context_length - self.keep) // 2 // PAGE_SIZE * PAGE_SIZE

    def dropped(self, n_tokens: int) -> int:
        """Tokens that have left a sequence which has had so many, those after the first `keep`."""
        excess = n_tokens - self.context_length + 1
        return max(0, -(-excess // self.step) * self.step)
