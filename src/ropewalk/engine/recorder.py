"""Notes what a step does, for those of its requests that want a trace.

Made anew for each step that has such a request; other steps run without. It looks on: nothing that a step computes or
decides depends on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from ropewalk.backend.base import StepRecord
from ropewalk.engine.request import Request
from ropewalk.engine.sampler import Logits
from ropewalk.engine.scheduler import Chunk
from ropewalk.engine.trace import Candidate, Stage, StepTrace, TokenTrace, explain


class Recorder:
    """Of one step, from after its scheduling to its end.

    Parameters
    ----------
    record : StepRecord
        Begun when the step began.
    chunks : sequence of Chunk
        What runs, with pages for it.
    """

    def __init__(self, record: StepRecord, chunks: Sequence[Chunk]) -> None:
        self.record = record
        self._batch = len(chunks), sum(chunk.count + len(chunk.guesses) for chunk in chunks)
        self._own: list[tuple[Request, dict[str, Any]]] = []
        self._drawn: list[tuple[Request, int, int, tuple[Stage, ...], tuple[Candidate, ...]]] = []
        self._n_drawn = 0
        for chunk in chunks:
            request = chunk.request
            if request.params.trace is not None:
                own = {
                    "phase": "decode" if chunk.count == 1 and request.n_output else "prefill",
                    "first_position": request.n_computed,
                    "n_tokens": chunk.count + len(chunk.guesses),
                    "pages": tuple(request.pages),  # now: it may end in this step, and lose them
                }
                self._own.append((request, own))

    def before_draw(self) -> None:
        """Call before each draw."""
        self.record.lap("schedule")

    def after_draw(self, request: Request, logits: Logits, token: int) -> None:
        """Call after each draw, before the token is appended."""
        self.record.lap("sampling")
        self._n_drawn += 1
        if request.params.trace is not None:
            told = explain(logits, request.params, request.context, token, request.params.trace)
            self._drawn.append((request, token, request.n_tokens, *told))
            self.record.lap("trace")

    def finish(self, number: int, *, page_bytes: int, pages_used: int, pages_total: int) -> None:
        """Call at the end: hands each request its part.

        Parameters
        ----------
        number : int
            Of the step.
        page_bytes : int
            Bytes of a page of the KV cache, over all layers.
        pages_used, pages_total : int
            Of the pool, while the step ran.
        """
        self.record.lap("schedule")
        shared: dict[str, Any] = {
            "number": number,
            "page_bytes": page_bytes,
            "batch_sequences": self._batch[0],
            "batch_tokens": self._batch[1],
            "batch_drawn": self._n_drawn,
            "pages_used": pages_used,
            "pages_total": pages_total,
            "weight_bytes": self.record.weight_bytes,
            "cache_read_bytes": self.record.cache_read_bytes,
            "cache_written_bytes": self.record.cache_written_bytes,
            "start_ns": self.record.start_ns,
            "parts": _same(tuple(self.record.parts)),
            "ends_ns": np.array(self.record.ends_ns, np.int64),
        }
        step_of = {id(request): StepTrace(**own, **shared) for request, own in self._own}
        for request, _ in self._own:
            request.traced_steps.append(step_of[id(request)])
        for request, token, position, stages, candidates in self._drawn:
            step = step_of[id(request)]
            request.traced_tokens.append(TokenTrace(token, position, stages, candidates, step))


@lru_cache(maxsize=64)
def _same(parts: tuple[str, ...]) -> tuple[str, ...]:
    """One object for the many steps that do the same."""
    return parts
