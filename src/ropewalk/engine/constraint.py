"""What the tokens of one output must follow, such as a JSON schema: the engine's view of it.

A constraint is the state of one output. Before each draw the engine asks for `mask`, which is applied to the logits
before every sampling knob, and after it, it tells the token; so a constraint sees exactly the tokens of its output, in
order, whatever was computed again or drafted meanwhile. `ropewalk.text.grammar` makes constraints.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Mask = NDArray[np.bool_]


class Constraint(Protocol):
    """Which tokens may come next in one output."""

    def mask(self) -> Mask | None:
        """Tokens that may come next, bool [vocab_size]; None allows all. Asking does not change anything."""
        ...

    def accept(self, token: int) -> None:
        """Take the next token; raises GenerationError if it cannot be used."""
        ...

    @property
    def ended(self) -> bool:
        """Whether nothing may follow: the output then ends with "stop", without an end token."""
        ...

    def fork(self) -> Constraint:
        """Return an independent copy in the same state."""
        ...
