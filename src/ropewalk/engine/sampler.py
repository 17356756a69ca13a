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
requests run: one row of logits goes in, one token comes out. Arithmetic after step 1 is float64.
Log-probabilities (`logprob`) are of the raw distribution, before step 1.

No step sorts a large vocabulary: see `top_k` and `smallest_set`, which still find the exact sets.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ropewalk.engine.draws import uniform
from ropewalk.errors import GenerationError
from ropewalk.params import SamplingParams

Logits = NDArray[np.float32]
Numbers = NDArray[np.float64]
Indices = NDArray[np.int64]

_GROUP = 64  # scores whose maximum stands for them in the search for the k-th largest
_BLOCK = 512  # candidates that are summed together before a draw
_NEAR = 8.0  # the border of a nucleus is usually among logits this near to the largest
_SORTABLE = 2048  # and these are usually fewer than this
_N_BUCKETS = 4096  # of logits up to
_DEPTH = 64.0  # below the largest; the last one has all others


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
    """

    ids: Indices
    logits: Logits
    largest: float
    temperature: float

    @property
    def scores(self) -> Numbers:
        """Logits below the largest one, divided by the temperature, float64 [c]; at most 0.

        Subtracting first, and in float64, lets a tiny temperature overflow to probability 0, never to NaN.
        """
        scores = np.subtract(self.logits, self.largest, dtype=np.float64)
        with np.errstate(over="ignore"):
            scores /= self.temperature
        return scores

    @cached_property
    def weights(self) -> Numbers:
        """Probabilities up to a common factor, float64 [c]; the largest is 1."""
        scores = self.scores
        return np.exp(scores, out=scores)

    @property
    def probabilities(self) -> Numbers:
        """Probabilities, float64 [c]; they sum to 1."""
        return self.weights / float(self.weights.sum())

    @property
    def entropy(self) -> float:
        """Of the distribution, in nats: the logarithm of the weights' sum less the mean score."""
        mean = np.sum(self.probabilities * np.where(self.weights > 0, self.scores, 0.0))
        return float(np.log(self.weights.sum()) - mean)

    def probabilities_of(self, ids: Indices) -> Numbers:
        """Probabilities of some tokens; 0 for those that cannot be drawn."""
        at = np.minimum(np.searchsorted(self.ids, ids), len(self.ids) - 1)
        return np.where(self.ids[at] == ids, self.probabilities[at], 0.0)

    def keep(self, which: NDArray[np.bool_] | Indices) -> Candidates:
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
        Raw logits; not changed. NaN counts as minus infinity, with a warning.
    position : int
        Position of the token to be drawn in its sequence, prompt included.

    Raises
    ------
    GenerationError
        If no token can be drawn, because all logits are NaN or minus infinity.
    """
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


def edits(params: SamplingParams, context: Context) -> list[tuple[str, Callable[[Logits], None]]]:
    """Return the edits that are on, by name and in order."""
    found: list[tuple[str, Callable[[Logits], None]]] = []
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
    largest = float(logits.max())
    if largest == np.inf:
        ids = np.flatnonzero(logits == np.inf)
        return Candidates(ids, np.zeros(len(ids), dtype=np.float32), 0.0, temperature)
    if largest == -np.inf:
        raise GenerationError("no token can be drawn: every logit is NaN, minus infinity or masked")
    everything = Candidates(_first_ids(len(logits)), logits, largest, temperature)
    return everything if logits.min() > -np.inf else everything.keep(logits > -np.inf)


@lru_cache(maxsize=8)
def _first_ids(n: int) -> Indices:
    ids = np.arange(n)
    ids.flags.writeable = False
    return ids


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
    logits = candidates.logits
    if k >= len(logits):
        return candidates
    high = np.flatnonzero(logits >= _bound_of_kth(logits, k))
    cut = np.partition(logits[high], len(high) - k)[len(high) - k]
    above, tied = high[logits[high] > cut], high[logits[high] == cut]
    return candidates.keep(np.sort(np.concatenate([above, tied[: k - len(above)]])))


def _bound_of_kth(logits: Logits, k: int) -> float:
    """Return a number that the k-th largest logit is not below: the k-th largest of many groups' maxima."""
    n_groups = len(logits) // _GROUP
    if n_groups < k:
        return float(logits.min())
    maxima = logits[: n_groups * _GROUP].reshape(_GROUP, n_groups).max(axis=0)
    return float(np.partition(maxima, n_groups - k)[n_groups - k])


def top_p(candidates: Candidates, mass: float) -> Candidates:
    """Keep the smallest set of most likely tokens whose probability reaches `mass` (Holtzman et al. 2020)."""
    return candidates.keep(smallest_set(candidates.logits, candidates.weights, mass))


def min_p(candidates: Candidates, ratio: float) -> Candidates:
    """Keep tokens at least `ratio` times as likely as the most likely one (Nguyen et al. 2024)."""
    return candidates.keep(candidates.weights >= ratio)


def typical_p(candidates: Candidates, mass: float) -> Candidates:
    """Keep the tokens whose surprise is nearest to the entropy, up to `mass`, and the most likely token.

    Locally typical sampling (Meister et al. 2023), which may drop the most likely token; here it stays.
    Surprise minus entropy is the mean score minus the score.
    """
    distance = candidates.scores
    distance -= np.sum(candidates.probabilities * distance)
    keep = smallest_set(-np.abs(distance), candidates.weights, mass)
    keep[np.argmax(candidates.logits)] = True
    return candidates.keep(keep)


def smallest_set(key: NDArray[Any], weights: Numbers, mass: float) -> NDArray[np.bool_]:
    """Find the shortest prefix, in descending order of `key`, whose share of the weights reaches `mass`.

    Ties in `key` go to the lowest index; the prefix has at least one element. Nothing large is sorted. Often
    the border is among the few keys near the largest. Otherwise keys are counted into buckets: the masses of
    whole buckets tell in which one the border lies, and only that one is sorted.

    Parameters
    ----------
    key : float32 or float64 [c]
        What to sort by.
    weights : float64 [c]
        Probabilities up to a common factor.
    mass : float in 0 ... 1
        Share to reach; reaching it exactly is enough.

    Returns
    -------
    bool [c]
        True for the elements of the prefix.
    """
    missing = mass * weights.sum()
    largest = key.max()
    side = np.flatnonzero(key >= largest - _NEAR)
    if len(side) <= _SORTABLE and weights[side].sum() >= missing:
        keep = np.zeros(len(key), dtype=np.bool_)
    else:
        with np.errstate(over="ignore"):
            depth = (largest - key) * key.dtype.type(_N_BUCKETS / _DEPTH)
        bucket = np.minimum(depth, _N_BUCKETS - 1).astype(np.intp)
        reached = np.cumsum(np.bincount(bucket, weights, _N_BUCKETS))
        border = min(int(np.searchsorted(reached, missing)), int(bucket.max()))
        missing -= reached[border - 1] if border else 0.0
        keep = bucket < border
        side = np.flatnonzero(bucket == border)
    order = side[np.argsort(-key[side], kind="stable")]
    reached = np.cumsum(weights[order])
    keep[order[: int(np.searchsorted(reached, missing)) + 1]] = True
    return keep


# The choice.


def draw(candidates: Candidates, number: float) -> int:
    """Look up a number in [0, 1) in the cumulative distribution of the candidates, ids ascending.

    In two levels: the block of candidates, then the candidate in it.
    """
    weights = candidates.weights
    blocks = np.add.reduceat(weights, np.arange(0, len(weights), _BLOCK))
    block, rest = _locate(blocks, number * blocks.sum())
    index, _ = _locate(weights[block * _BLOCK : (block + 1) * _BLOCK], rest)
    return int(candidates.ids[block * _BLOCK + index])


def _locate(weights: Numbers, target: float) -> tuple[int, float]:
    """Return the first index whose running sum exceeds the target, and how far into it the target lies.

    Rounding may put the target at or past the end: then it is the last index of positive weight.
    """
    reached = np.cumsum(weights)
    last = np.searchsorted(reached, reached[-1])
    index = int(min(np.searchsorted(reached, target, side="right"), last))
    return index, target - (float(reached[index - 1]) if index else 0.0)


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


def logprob(logits: Logits, token: int, n_top: int) -> Logprob:
    """Return the log-probability of `token` and of the `n_top` most likely tokens under raw logits.

    A token whose raw probability is 0 can only be chosen when `logit_bias` cannot reach it either, so
    `logprob` of a chosen token is finite.
    """
    raw = scaled(logits, 1.0)
    log_total = np.log(raw.weights.sum())
    chosen = raw.keep(raw.ids == token)
    best = top_k(raw, n_top) if n_top else raw.keep(raw.ids[:0])
    order = np.argsort(-best.logits, kind="stable")
    log_p = best.scores - log_total
    return Logprob(
        token_id=token,
        logprob=float(chosen.scores[0] - log_total),
        rank=1 + int(np.count_nonzero(raw.logits > chosen.logits[0])),
        top=tuple((int(best.ids[i]), float(log_p[i])) for i in order),
    )
