"""Drafts in the steps of the engine: who may draft how much, and what became of it.

Drafts never take anything from anybody. They get what a step's budget has left when prompts have got theirs, and pages
that are free; nobody is preempted for a guess. The pages of guesses that were wrong are given back at the end of
the step (`PageTables.trim`), and their slots are written again before they are read.

Nor can they harm anybody: a drafter that fails is told of once and not asked again.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from ropewalk.backend.base import PAGE_SIZE
from ropewalk.engine.pages import PagePool
from ropewalk.engine.request import Request
from ropewalk.engine.scheduler import Chunk
from ropewalk.engine.speculative.drafter import Draft, Drafter, Step
from ropewalk.engine.speculative.pace import AdaptivePace, Pace
from ropewalk.engine.tables import PageTables

log = logging.getLogger("ropewalk")

MAX_ROWS = 64
"""Rows of logits in a step with drafts: the backend keeps room for them, up to 1 MB each."""


class Speculator:
    """Adds drafts to the chunks of a step.

    Parameters
    ----------
    drafter : Drafter
    most : int
        Guesses for one request in one step, at least 1.
    pace : Pace, optional
        How many of them are made and checked. Default: `AdaptivePace`.
    """

    def __init__(self, drafter: Drafter, most: int, pace: Pace | None = None) -> None:
        self.drafter = drafter
        self.most = most
        self.pace = AdaptivePace(drafter.priors) if pace is None else pace
        self._drafts: dict[Request, Draft] = {}
        self._vocab_size = 0
        self._failed = False

    def start(self, pool: PagePool, dtype: str, vocab_size: int) -> None:
        """Begin anew with an empty pool; `vocab_size` is that of the model that checks."""
        self._drafts = {}
        self._vocab_size = vocab_size
        self.drafter.start(pool, dtype)

    def extend(self, chunks: Sequence[Chunk], tables: PageTables, token_budget: int) -> list[Chunk]:
        """Return the chunks of a step with guesses after those that decode, and pages for them."""
        self._drafts = {}
        if self._failed:
            return list(chunks)
        step = Step(
            n_tokens=sum(chunk.count for chunk in chunks),
            n_drawing=sum(chunk.count == chunk.request.n_pending for chunk in chunks),
        )
        left = min(token_budget - step.n_tokens, MAX_ROWS - step.n_drawing)
        drafts = self._open([c.request for c in chunks if c.request.n_pending == 1], tables, left)
        if drafts and not self._draft(drafts, step):
            return list(chunks)
        drafts = [draft for draft in drafts if draft.tokens]
        counts = dict(zip(drafts, self.pace.cut(drafts, step), strict=True)) if drafts else {}
        self._drafts = {draft.request: draft for draft in drafts}
        return [
            replace(chunk, guesses=tuple(draft.tokens[: counts[draft]]))
            if (draft := self._drafts.get(chunk.request))
            else chunk
            for chunk in chunks
        ]

    def _draft(self, drafts: Sequence[Draft], step: Step) -> bool:
        """Have drafts made; False, now and for ever, if the drafter fails or guesses what no model can check."""
        try:
            self.drafter.draft(drafts, step, self.pace)
            for draft in drafts:
                if not len(draft.tokens) == len(draft.classes) <= draft.most:
                    raise ValueError(f"{len(draft.tokens)} guesses where {draft.most} were allowed")
                if outside := [token for token in draft.tokens if not 0 <= token < self._vocab_size]:
                    raise ValueError(f"a guess is {outside[0]}; allowed: 0 ... {self._vocab_size - 1}")
        except Exception as error:
            self._failed = True
            log.warning("no more drafts: the drafter failed with %s: %s", type(error).__name__, error)
        return not self._failed

    def _open(self, requests: Sequence[Request], tables: PageTables, left: int) -> list[Draft]:
        """Make empty drafts for these requests as far as there is room, `left` guesses for all of them together."""
        drafts = []
        for i, request in enumerate(requests):
            most = min(self.most, request.room - 1, left // (len(requests) - i))
            known = request.n_computed + 1
            if most > 0 and not tables.extend(request, known + most):
                most = min(most, len(request.pages) * PAGE_SIZE - known)
            if most > 0:
                drafts.append(Draft(request, most))
                left -= most
        return drafts

    def settle(self, chunk: Chunk, drawn: Sequence[int]) -> int:
        """Compare a request's draft with what it drew in the step; return how many checked guesses were right."""
        draft = self._drafts.pop(chunk.request, None)
        if draft is None:
            return 0
        right = []
        for guess, token in zip(draft.tokens, drawn, strict=False):
            right.append(guess == token)
            if guess != token:
                break
        self.pace.observe(draft, right)
        n_right = sum(right[: len(chunk.guesses)])
        chunk.request.n_drafted += len(chunk.guesses)
        chunk.request.n_accepted += n_right
        return n_right
