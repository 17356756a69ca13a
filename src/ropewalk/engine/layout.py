"""One flat batch for the backend, made of the chunks that a step is to compute."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ropewalk.backend.base import StepBatch
from ropewalk.engine.scheduler import Chunk


def lay_out(chunks: Sequence[Chunk]) -> StepBatch:
    """Lay chunks out one after another.

    A chunk wants the logits that score its request's prompt, then, if it ends the request's tokens, those of the last
    token and of the guesses after it.
    """
    counts = [chunk.count + len(chunk.guesses) for chunk in chunks]
    tokens, positions = [], []
    wanted: list[int] = []
    tables = np.zeros((len(chunks), max(len(chunk.request.pages) for chunk in chunks)), dtype=np.int32)
    for row, (chunk, count) in enumerate(zip(chunks, counts, strict=True)):
        request, start = chunk.request, chunk.request.n_computed
        tokens += [request.window[start : start + chunk.count], np.array(chunk.guesses, np.int32)]
        positions.append(np.arange(start, start + count, dtype=np.int32))
        tables[row, : len(request.pages)] = request.pages
        end = sum(counts[: row + 1])
        wanted += (end - count + position - start for position in request.unscored(chunk.count))
        if chunk.count == request.n_pending:
            wanted += range(end - 1 - len(chunk.guesses), end)
    return StepBatch(
        tokens=np.concatenate(tokens),
        positions=np.concatenate(positions),
        sequences=np.repeat(np.arange(len(chunks), dtype=np.int32), counts),
        page_tables=tables,
        logit_rows=np.array(wanted, dtype=np.int32),
        lengths=np.array([c.request.n_window + len(c.guesses) for c in chunks], dtype=np.int32),
        adapters=np.repeat(np.array([c.request.adapter for c in chunks], dtype=np.int32), counts),
    )
