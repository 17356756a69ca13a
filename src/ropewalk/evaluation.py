"""How well a model predicts a text: its perplexity, and how far its distributions are from another's.

A text is cut into windows, each read on its own from the model's start token on. Two ways of cutting are usual:

    without a stride   windows one after another, of which the second half is scored, so that every scored token has
                       half a window before it: what llama.cpp's perplexity tool does
    with a stride      windows that begin `stride` tokens apart, each scoring what none before it did

Numbers compare only where windows, strides and texts are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ropewalk.backend.base import Float32Array
from ropewalk.errors import InvalidParameterError, PromptError
from ropewalk.llm import LLM
from ropewalk.passes import log_softmax

Rows = Callable[[Sequence[int]], Iterable[Float32Array]]
"""From token ids to the logits of all positions, in any number of pieces: float32 [m, vocab]."""


@dataclass(frozen=True)
class Window:
    """Token ids, and the first row of logits that is scored: row i predicts token i + 1."""

    token_ids: list[int]
    first_row: int


@dataclass(frozen=True)
class Perplexity:
    """exp of the mean negative log-probability of `n_tokens` tokens, and its standard error."""

    value: float
    standard_error: float
    n_tokens: int


@dataclass(frozen=True)
class Divergence:
    """KL divergence, in nats, from a reference's distribution to a model's, over `n_positions` positions.

    Attributes
    ----------
    same_top
        Share of the positions where both have the same likeliest token.
    perplexity, reference_perplexity
        Of the same tokens under each.
    """

    mean: float
    standard_error: float
    median: float
    p99: float
    maximum: float
    same_top: float
    n_positions: int
    perplexity: Perplexity
    reference_perplexity: Perplexity


def windows_of(
    llm: LLM, text: str, *, window: int = 512, stride: int | None = None, n_windows: int | None = None
) -> list[Window]:
    """Cut a text into windows.

    Parameters
    ----------
    window : int
        Tokens of a window, its start token included; 4 ... the context length.
    stride : int, optional
        Tokens from the beginning of a window to that of the next, 1 ... window - 2.
    n_windows : int, optional
        Use so many at most. Default: all.

    Raises
    ------
    InvalidParameterError
        If a number is not allowed.
    PromptError
        If the text is shorter than a window.
    """
    if not 4 <= window <= llm.context_length:
        raise InvalidParameterError(f"window is {window}; allowed: 4 ... {llm.context_length}, the context")
    start = llm.encode("")
    body = llm.encode(text, parse_special=False)[len(start) :]
    size = window - len(start)
    if stride is not None and not 1 <= stride <= size - 1:
        raise InvalidParameterError(f"stride is {stride}; allowed: 1 ... {size - 1}")
    if n_windows is not None and n_windows < 1:
        raise InvalidParameterError(f"the number of windows is {n_windows}; allowed: at least 1")
    if len(body) < size:
        raise PromptError(f"the text has {len(body)} tokens; allowed: at least one window, which is {size}")
    if stride is None:
        starts = range(0, len(body) - size + 1, size)
        cut = [Window(start + body[i : i + size], window // 2) for i in starts]
    else:
        starts = range(0, len(body) - size + stride, stride)
        pieces = [start + body[i : i + size] for i in starts]
        cut = [Window(p, window - stride - 1 if i else 0) for i, p in enumerate(pieces)]
    return cut[:n_windows]


def perplexity(
    rows: Rows, windows: Sequence[Window], progress: Callable[[int], None] | None = None
) -> Perplexity:
    """Measure the perplexity of windows; `progress` is told how many are done."""
    losses: list[float] = []
    for done, window in enumerate(windows, 1):
        for row, logits in _scored(rows, window):
            losses.append(-float(log_softmax(logits)[window.token_ids[row + 1]]))
        if progress is not None:
            progress(done)
    return _perplexity(np.array(losses))


def divergence(
    rows: Rows,
    reference: Rows,
    windows: Sequence[Window],
    progress: Callable[[int], None] | None = None,
) -> Divergence:
    """Measure the KL divergence from `reference` to `rows` over windows (Kullback and Leibler 1951)."""
    kl: list[float] = []
    same: list[bool] = []
    losses: tuple[list[float], list[float]] = ([], [])
    for done, window in enumerate(windows, 1):
        pairs = zip(_scored(reference, window), _scored(rows, window), strict=True)
        for (row, true_logits), (_, logits) in pairs:
            truth, ours = log_softmax(true_logits), log_softmax(logits)
            with np.errstate(invalid="ignore"):
                terms = np.exp(truth) * (truth - ours)
            kl.append(float(np.where(np.isneginf(truth), 0.0, terms).sum()))
            same.append(bool(truth.argmax() == ours.argmax()))
            for each, logprobs in zip(losses, (ours, truth), strict=True):
                each.append(-float(logprobs[window.token_ids[row + 1]]))
        if progress is not None:
            progress(done)
    values = np.array(kl)
    return Divergence(
        mean=float(values.mean()),
        standard_error=_standard_error(values),
        median=float(np.median(values)),
        p99=float(np.quantile(values, 0.99)),
        maximum=float(values.max()),
        same_top=float(np.mean(same)),
        n_positions=len(values),
        perplexity=_perplexity(np.array(losses[0])),
        reference_perplexity=_perplexity(np.array(losses[1])),
    )


def _scored(rows: Rows, window: Window) -> Iterator[tuple[int, Float32Array]]:
    """Number and logits of every row that is scored."""
    row = 0
    for piece in rows(window.token_ids):
        for logits in piece:
            if window.first_row <= row < len(window.token_ids) - 1:
                yield row, logits
            row += 1


def _perplexity(losses: NDArray[np.float64]) -> Perplexity:
    value = float(np.exp(losses.mean()))
    return Perplexity(value, value * _standard_error(losses), len(losses))


def _standard_error(values: NDArray[np.float64]) -> float:
    return float(values.std() / np.sqrt(len(values)))
