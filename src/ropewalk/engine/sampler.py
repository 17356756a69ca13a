"""From logits to one token: the knobs in their order, each a small function, then the draw.

The order is fixed:

1. edits of the logits: tokens that a constraint (a grammar, a schema) excludes are masked; `logit_bias`;
   `repetition_penalty` (prompt and output); `frequency_penalty` and `presence_penalty` (output only); then end and
   stop tokens are masked while `min_tokens` is not reached;
2. `temperature` divides them;
3. truncations, each on the distribution that the one before it left, renormalised: `top_k`, `top_p`,
   `min_p`, `typical_p`; every one of them keeps the most likely token, so at least one survives;
4. the draw: the number of (seed, position) in [0, 1) is looked up in the cumulative distribution of
   the survivors, laid out in ascending order of their ids.

Greedy choice is the argmax after step 1. Every tie goes to the lowest id. Nothing here depends on which other
requests run: one row of logits goes in, one token comes out. Log-probabilities (`logprob`) are of the raw
distribution, before step 1.

Probabilities are shares of whole numbers, the weights of `kernels.powers`: sums of them are exact in any order. That
is why there can be two of everything with the same results to the last bit: this module, which is meant to be read
and gives every intermediate distribution (`steps`), and `kernels.sampling`, which is meant to be fast. `choose` and
`logprob` use the fast one, `choose_plainly` and `logprob_plainly` are the same from the parts of this module.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ropewalk.engine.draws import uniform
from ropewalk.errors import GenerationError
from ropewalk.kernels.powers import LOG2E, resolution, weights
from ropewalk.params import SamplingParams

Logits = NDArray[np.float32]
Numbers = NDArray[np.float64]
Integers = NDArray[np.int64]
Edit = tuple[str, Callable[[Logits], None]]


@dataclass(frozen=True, eq=False)
class Context:
    """What the knobs may look at besides the logits: the tokens so far, and those that end a generation.

    Attributes
    ----------
    prompt, output : integer arrays [n_prompt], [n_output]
        Token ids so far.
    ends : collection of int
        Token ids that `min_tokens` keeps away: end tokens (unless ignored) and stop tokens.
    allowed : bool [vocab_size], optional
        Tokens that a constraint leaves. Default: all.
    """

    prompt: NDArray[np.int32]
    output: NDArray[np.int32]
    ends: Collection[int] = ()
    allowed: NDArray[np.bool_] | None = None


@dataclass(frozen=True, eq=False)
class Candidates:
    """Tokens that can still be drawn, c of them.

    Attributes
    ----------
    ids : int64 [c]
        Token ids, ascending.
    logits : float32 [c]
        Their logits, finite.
    largest : float
        The largest logit of all.
    temperature : float
    bits : int
        Of the largest weight; `resolution` of the vocabulary's size.
    """

    ids: Integers
    logits: Logits
    largest: float
    temperature: float
    bits: int

    @property
    def exponents(self) -> Numbers:
        """Binary logarithms of the probability relative to the largest one's, float64 [c]; at most 0.

        Subtracting first, and in float64, lets a tiny temperature overflow to probability 0, never to NaN.
        """
        return np.subtract(self.logits, self.largest, dtype=np.float64) * (LOG2E / self.temperature)

    @cached_property
    def weights(self) -> Integers:
        """Probabilities up to a common factor, int64 [c]; the largest is 2**bits."""
        return weights(self.exponents, self.bits)

    @property
    def probabilities(self) -> Numbers:
        """Probabilities, float64 [c]; they sum to 1."""
        return self.weights / float(self.weights.sum())

    @property
    def entropy(self) -> float:
        """Of the distribution, in nats."""
        shares = self.probabilities[self.weights > 0]
        return max(0.0, -float(np.sum(shares * np.log(shares))))

    def probabilities_of(self, ids: Integers) -> Numbers:
        """Probabilities of some tokens; 0 for those that cannot be drawn."""
        at = np.minimum(np.searchsorted(self.ids, ids), len(self.ids) - 1)
        return np.where(self.ids[at] == ids, self.probabilities[at], 0.0)

    def keep(self, which: NDArray[np.bool_] | Integers) -> Candidates:
        """Those at `which`: a mask, or ascending indices."""
        return replace(self, ids=self.ids[which], logits=self.logits[which])


@dataclass(frozen=True)
class Logprob:
    """Log-probability of a generated token under the raw distribution of the model.

    Attributes
    ----------
    token_id : int
    logprob : float
        Natural logarithm, finite.
    rank : int
        1 for the most likely token: one more than the number of tokens with a larger logit.
    top : tuple of (int, float)
        The most likely tokens and their log-probabilities, descending, lowest id first on a tie; tokens of
        probability 0 are left out.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


def choose(logits: Logits, params: SamplingParams, context: Context, *, seed: int, position: int) -> int:
    """Choose the next token.

    Parameters
    ----------
    logits : float32 [vocab_size]
        Raw logits; the same again when this returns. NaN counts as minus infinity, with a warning.
    position : int
        Position of the token to be drawn in its sequence, prompt included.

    Raises
    ------
    GenerationError
        If no token can be drawn, because all logits are NaN or minus infinity.
    """
    token = -1
    with edited_in_place(logits, params, context) as after_edits:
        if params.greedy:
            return argmax(after_edits)
        token = _draw_fast(after_edits, params, uniform(seed, position))
    if token >= 0:
        return token
    return choose_plainly(logits, params, context, seed=seed, position=position)


def _draw_fast(logits: Logits, params: SamplingParams, number: float) -> int:
    """Draw in compiled code; negative for a row that it leaves to others: NaN, or no finite largest logit."""
    from ropewalk.kernels.sampling import draw, workspace  # Numba: not before a token is drawn

    logits, n = np.ascontiguousarray(logits, np.float32), len(logits)
    shares = float(params.top_p), float(params.min_p), float(params.typical_p)  # one type, one compilation
    knobs = (min(max(params.top_k, 0), n), *shares)
    return int(draw(logits, knobs, LOG2E / params.temperature, resolution(n), number, workspace(n).arrays(n)))


def choose_plainly(
    logits: Logits, params: SamplingParams, context: Context, *, seed: int, position: int
) -> int:
    """Choose the token that `choose` does, knob after knob, without compiled code."""
    logits = edited(logits, params, context)
    if params.greedy:
        return argmax(logits)
    candidates = scaled(logits, params.temperature)
    for _, truncate in truncations(params):
        candidates = truncate(candidates)
    return draw(candidates, uniform(seed, position))


def steps(logits: Logits, params: SamplingParams, context: Context) -> Iterator[tuple[str, Candidates]]:
    """Yield the distribution as the model gave it ("raw") and after each knob that is on, in order.

    The distribution named "raw" and those after edits are at temperature 1. A greedy choice ends with
    "greedy", the argmax alone.
    """
    yield "raw", scaled(logits, 1.0)
    for name, edit in edits(params, context):
        logits = logits.copy()
        edit(logits)
        yield name, scaled(logits, 1.0)
    if params.greedy:
        candidates = scaled(logits, 1.0)
        yield "greedy", candidates.keep(candidates.ids == argmax(logits))
        return
    candidates = scaled(logits, params.temperature)
    if params.temperature != 1.0:
        yield "temperature", candidates
    for name, truncate in truncations(params):
        candidates = truncate(candidates)
        yield name, candidates


# Edits of the logits, in place.


def edits(params: SamplingParams, context: Context) -> list[Edit]:
    """Return the edits that are on, by name and in order."""
    found: list[Edit] = []
    if context.allowed is not None:
        found.append(("constraint", partial(mask_excluded, allowed=context.allowed)))
    if params.logit_bias:
        found.append(("logit_bias", partial(add_bias, params=params)))
    if params.repetition_penalty != 1.0:
        found.append(("repetition_penalty", partial(penalise_repetition, params=params, context=context)))
    if params.frequency_penalty or params.presence_penalty:
        found.append(("frequency_presence_penalty", partial(penalise_output, params=params, context=context)))
    if len(context.output) < params.min_tokens and context.ends:
        found.append(("min_tokens", partial(mask_ends, context=context)))
    return found


def edited(logits: Logits, params: SamplingParams, context: Context) -> Logits:
    """Return logits after all edits that are on: the same array when there are none, else a copy."""
    found = edits(params, context)
    if found:
        logits = logits.copy()
        for _, edit in found:
            edit(logits)
    return logits


@contextmanager
def edited_in_place(logits: Logits, params: SamplingParams, context: Context) -> Iterator[Logits]:
    """Lend logits after all edits that are on, in a copy only if there is a constraint, and undo them afterwards."""
    found = edits(params, context)
    if not found or context.allowed is not None or not logits.flags.writeable:
        yield edited(logits, params, context)
        return
    named = np.array([*params.logit_bias, *context.ends], dtype=np.int64)
    touched = np.concatenate([named, context.prompt, context.output])
    before = logits[touched]
    try:
        for _, edit in found:
            edit(logits)
        yield logits
    finally:
        logits[touched] = before


def mask_excluded(logits: Logits, allowed: NDArray[np.bool_]) -> None:
    """Make every token impossible that is not allowed."""
    logits[~allowed] = -np.inf


def add_bias(logits: Logits, params: SamplingParams) -> None:
    """Add `logit_bias`."""
    logits[list(params.logit_bias.keys())] += np.array(list(params.logit_bias.values()), dtype=np.float32)


def penalise_repetition(logits: Logits, params: SamplingParams, context: Context) -> None:
    """Divide positive and multiply negative logits of tokens in prompt or output (Keskar et al. 2019)."""
    seen = np.unique(np.concatenate([context.prompt, context.output]))
    penalty = np.float32(params.repetition_penalty)
    values = logits[seen]
    logits[seen] = np.where(values > 0, values / penalty, values * penalty)


def penalise_output(logits: Logits, params: SamplingParams, context: Context) -> None:
    """Subtract `frequency_penalty` per occurrence and `presence_penalty` once from tokens of the output."""
    seen, counts = np.unique(context.output, return_counts=True)
    logits[seen] -= (params.presence_penalty + params.frequency_penalty * counts).astype(np.float32)


def mask_ends(logits: Logits, context: Context) -> None:
    """Make every token that would end the generation impossible."""
    logits[list(context.ends)] = -np.inf


# Temperature, then truncations.


def scaled(logits: Logits, temperature: float) -> Candidates:
    """Return all tokens at a temperature; masked ones (minus infinity) are dropped.

    Logits of plus infinity share all probability.
    """
    logits = without_nan(logits)
    bits, largest = resolution(len(logits)), float(logits.max())
    if largest == np.inf:
        ids = np.flatnonzero(logits == np.inf)
        return Candidates(ids, np.zeros(len(ids), dtype=np.float32), 0.0, temperature, bits)
    if largest == -np.inf:
        raise GenerationError("no token can be drawn: every logit is NaN, minus infinity or masked")
    ids = np.flatnonzero(logits > -np.inf)
    return Candidates(ids, logits[ids], largest, temperature, bits)


def truncations(params: SamplingParams) -> list[tuple[str, Callable[[Candidates], Candidates]]]:
    """Return the truncations that are on, by name and in order."""
    found: list[tuple[str, Callable[[Candidates], Candidates]]] = []
    if params.top_k > 0:
        found.append(("top_k", partial(top_k, k=params.top_k)))
    if params.top_p < 1.0:
        found.append(("top_p", partial(top_p, mass=params.top_p)))
    if params.min_p > 0.0:
        found.append(("min_p", partial(min_p, ratio=params.min_p)))
    if params.typical_p < 1.0:
        found.append(("typical_p", partial(typical_p, mass=params.typical_p)))
    return found


def top_k(candidates: Candidates, k: int) -> Candidates:
    """Keep exactly the k most likely (all, if there are fewer); of those tied at the cut, the lowest ids."""
    return candidates.keep(np.sort(descending(candidates.logits, k)))


def top_p(candidates: Candidates, mass: float) -> Candidates:
    """Keep the smallest set of most likely tokens whose probability reaches `mass` (Holtzman et al. 2020)."""
    return candidates.keep(smallest_set(candidates.logits, candidates.weights, mass))


def min_p(candidates: Candidates, ratio: float) -> Candidates:
    """Keep tokens at least `ratio` times as likely as the most likely one (Nguyen et al. 2024)."""
    return candidates.keep(candidates.weights >= ratio * 2.0**candidates.bits)


def typical_p(candidates: Candidates, mass: float) -> Candidates:
    """Keep the tokens whose surprise is nearest to the entropy, up to `mass`, and the most likely token.

    Locally typical sampling (Meister et al. 2023), which may drop the most likely token; here it stays.
    Surprise minus entropy is the mean exponent minus the exponent. Both the parts of that mean's sum and the distances
    are rounded, to whole numbers and to float32.
    """
    exponents = np.maximum(candidates.exponents, -candidates.bits - 1.0)  # those below weigh nothing
    moments = np.rint(candidates.weights * exponents).astype(np.int64)
    mean = float(moments.sum()) / float(candidates.weights.sum())
    distances = np.abs(exponents - mean).astype(np.float32)
    keep = smallest_set(-distances, candidates.weights, mass)
    keep[np.argmax(candidates.logits)] = True
    return candidates.keep(keep)


def smallest_set(key: NDArray[Any], weights: Integers, mass: float) -> NDArray[np.bool_]:
    """Find the shortest prefix, in descending order of `key`, whose share of the weights reaches `mass`.

    Ties in `key` go to the lowest index; the prefix has at least one element that weighs something.

    Parameters
    ----------
    key : float32 [c]
        What to sort by.
    weights : int64 [c]
        Probabilities up to a common factor.
    mass : float in 0 ... 1
        Share to reach; reaching it exactly is enough.

    Returns
    -------
    bool [c]
        True for the elements of the prefix.
    """
    total = int(weights.sum())
    need = max(1, min(total, math.ceil(mass * float(total))))
    order = descending(key)
    count = int(np.searchsorted(np.cumsum(weights[order]), need)) + 1
    keep = np.zeros(len(key), dtype=np.bool_)
    keep[order[:count]] = True
    return keep


def descending(key: NDArray[Any], n: int | None = None) -> Integers:
    """Return the indices that sort by key, largest first, ties by index; only the first `n` of them, if it is given."""
    if n is None or n >= len(key):
        return np.argsort(-key, kind="stable")
    if n == 0:
        return np.zeros(0, np.int64)
    high = np.flatnonzero(key >= np.partition(key, len(key) - n)[len(key) - n])
    return high[np.argsort(-key[high], kind="stable")[:n]]


# The choice.


def draw(candidates: Candidates, number: float) -> int:
    """Look up a number in [0, 1) in the cumulative distribution of the candidates, ids ascending."""
    reached = np.cumsum(candidates.weights)
    target = int(number * float(reached[-1]))
    return int(candidates.ids[np.searchsorted(reached, target, side="right")])


def argmax(logits: Logits) -> int:
    """Return the id of the largest logit, the lowest id on a tie."""
    token = int(np.argmax(logits))  # a NaN, if there is one
    if np.isnan(logits[token]):
        logits = without_nan(logits)
        token = int(np.argmax(logits))
    if logits[token] == -np.inf:
        raise GenerationError("no token can be chosen: every logit is NaN, minus infinity or masked")
    return token


def without_nan(logits: Logits) -> Logits:
    """Return logits with NaN replaced by minus infinity, and warn if there was one."""
    if not np.isnan(logits.max()):
        return logits
    nan = np.isnan(logits)
    warnings.warn(f"{np.count_nonzero(nan)} of {len(logits)} logits are NaN", RuntimeWarning, stacklevel=2)
    return np.where(nan, np.float32(-np.inf), logits)


# Log-probabilities.


def logprob(logits: Logits, token: int, n_top: int) -> Logprob:
    """Return the log-probability of `token` and of the `n_top` most likely tokens under raw logits.

    Raises
    ------
    GenerationError
        If the model gave `token` no probability: its logit is NaN or minus infinity, or others are plus infinity and
        were masked. Log-probabilities are finite.
    """
    from ropewalk.kernels.sampling import survey, workspace

    logits, n = np.ascontiguousarray(logits, np.float32), len(logits)
    work = workspace(n)
    total, largest, rank, count = survey(logits, token, min(n_top, n), resolution(n), work.arrays(n))
    if total == 0 or logits[token] == -np.inf:
        return logprob_plainly(logits, token, n_top)
    log_total = _log_total(total, resolution(n))
    kept = np.flatnonzero(work.weights[:count])
    ids, values = work.ids[kept].astype(np.int64), work.values[kept]
    return Logprob(
        token, float(logits[token]) - largest - log_total, rank, _top(ids, values, largest, log_total)
    )


def logprob_plainly(logits: Logits, token: int, n_top: int) -> Logprob:
    """Return what `logprob` does, without compiled code."""
    raw = scaled(logits, 1.0)
    chosen = raw.keep(raw.ids == token)
    if len(chosen.ids) == 0:
        raise GenerationError(
            f"token {token} has no log-probability: its raw logit is {logits[token]:g}, the largest {logits.max():g}"
        )
    log_total = _log_total(int(raw.weights.sum()), raw.bits)
    best = top_k(raw, n_top)
    return Logprob(
        token_id=token,
        logprob=float(chosen.logits[0]) - raw.largest - log_total,
        rank=1 + int(np.count_nonzero(raw.logits > chosen.logits[0])),
        top=_top(best.ids, best.logits, raw.largest, log_total),
    )


def _log_total(total: int, bits: int) -> float:
    """Natural logarithm of a sum of weights, where the most likely token counts as 1."""
    return math.log(math.ldexp(total, -bits))


def _top(ids: Integers, logits: Logits, largest: float, log_total: float) -> tuple[tuple[int, float], ...]:
    return tuple((int(ids[i]), float(logits[i]) - largest - log_total) for i in descending(logits))
