"""What a drafter is: something that guesses the next tokens of requests.

A guess has a *class*, which says how sure the drafter is of it: an index into `Drafter.priors`, the shares of right
guesses to expect of each class before anything was seen. How often those of a class are really right is counted by
`pace`. Class 0 belongs to no guess: it is the share over all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from ropewalk.engine.pages import PagePool
    from ropewalk.engine.request import Request
    from ropewalk.engine.speculative.pace import Pace


@dataclass(eq=False)
class Draft:
    """Guesses for one request.

    Attributes
    ----------
    request : Request
        All of its known tokens but the last are computed, and it has pages for `most` tokens more.
    most : int
        How many guesses can be checked.
    tokens, classes : list of int
        The guesses so far, in order, and their classes.
    """

    request: Request
    most: int
    tokens: list[int] = field(default_factory=list)
    classes: list[int] = field(default_factory=list)

    def add(self, token: int, sureness: int) -> None:
        """Add a guess of a class."""
        self.tokens.append(token)
        self.classes.append(sureness)


@dataclass
class Step:
    """The step that drafts are made for.

    Attributes
    ----------
    n_tokens : int
        Its tokens without drafts.
    n_drawing : int
        Requests that get a token from it in any case.
    drafting_s : float
        Seconds that drafting has taken so far.
    """

    n_tokens: int
    n_drawing: int
    drafting_s: float = 0.0


class Drafter(Protocol):
    """Guesses tokens. Never changes a request, and cannot change its tokens."""

    priors: Sequence[float]

    def page_bytes(self, dtype: str) -> int:
        """Bytes that it keeps for each page of the KV cache."""
        ...

    def start(self, pool: PagePool, dtype: str) -> None:
        """Forget what was computed, and allocate what is needed for the pages of a pool, unless that was done."""
        ...

    def draft(self, drafts: Sequence[Draft], step: Step, pace: Pace) -> None:
        """Add guesses to drafts that have none, as many as `pace` wants of each, but at most `most`."""
        ...

    @property
    def n_bytes(self) -> int:
        """Bytes allocated for its keys and values."""
        ...

    def close(self) -> None:
        """Release what it holds."""
        ...
