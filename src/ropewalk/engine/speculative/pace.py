"""How many guesses are worth their time: a step checks as many as promise the most tokens per second.

What is promised follows from two measurements. `StepCosts` knows what a step of so many tokens takes, as seen lately:
that depends on the machine, its load, the model and the batch. `Acceptance` knows how often guesses of each class were
right, of one request and of all. With B tokens that come in any case, guess j of a draft is reached and right with
probability p1 * ... * pj, and the number of guesses that makes

    (B + sum of these) / (seconds of drafting + seconds of a step with so many more tokens)

largest is taken: none, if drafting does not pay. Nothing here can change a token; it only decides when it comes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from statistics import median
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from ropewalk.engine.speculative.drafter import Draft, Step

if TYPE_CHECKING:
    from ropewalk.engine.request import Request

Numbers = NDArray[np.float64]


class StepCosts:
    """Seconds of a step by its number of tokens: the median of the last few of that size.

    Between sizes that were measured it is interpolated, a smaller one takes its share of the smallest, and a larger one
    what the largest does: what was not tried yet looks good, and is tried. A size that was not seen for `LIFETIME` steps is forgotten: the machine may have other work now.
    """

    RECENT = 5
    LIFETIME = 400

    def __init__(self) -> None:
        self._times: dict[int, deque[float]] = {}
        self._medians: dict[int, float] = {}
        self._seen: dict[int, int] = {}
        self._n_steps = 0
        self._sizes: Numbers = np.zeros(0)
        self._seconds: Numbers = np.zeros(0)

    def record(self, n_tokens: int, seconds: float) -> None:
        """Note what a step took."""
        self._n_steps += 1
        times = self._times.setdefault(n_tokens, deque(maxlen=self.RECENT))
        times.append(seconds)
        self._medians[n_tokens], self._seen[n_tokens] = median(times), self._n_steps
        for size in [n for n, seen in self._seen.items() if seen <= self._n_steps - self.LIFETIME]:
            del self._times[size], self._medians[size], self._seen[size]
        points = np.array([(0.0, 0.0), *sorted(self._medians.items())])
        self._sizes = points[:, 0]
        # A larger step is no quicker: what says otherwise met a busy moment.
        self._seconds = np.minimum.accumulate(points[::-1, 1])[::-1]

    def knows(self, n_tokens: int) -> bool:
        """Whether a step of this size was measured lately."""
        return n_tokens in self._times

    def expect(self, n_tokens: NDArray[np.int_] | int) -> Numbers:
        """Seconds of steps with so many tokens, of the same shape; 0 before anything was measured."""
        if not len(self._sizes):
            return np.zeros(np.shape(n_tokens))
        return np.asarray(np.interp(n_tokens, self._sizes, self._seconds))

    def reading(self, n_tokens: int) -> float:
        """Seconds to read so many tokens: beyond the largest step that was measured, as many of those as it takes."""
        largest = self._sizes[-1] if len(self._sizes) else n_tokens
        return float(self.expect(n_tokens)) * max(1.0, n_tokens / largest)


class Acceptance:
    """How often guesses of each class were right: a running share over the last `memory` of them or so.

    Where little was seen yet, it leans on `base`: shares that are given, or another `Acceptance`, which is told too.
    """

    WEIGHT = 3.0  # guesses that `base` counts for

    def __init__(self, base: Sequence[float] | Acceptance, n_classes: int, memory: float) -> None:
        self._base = base
        self._keep = 1 - 1 / memory
        self._right = [0.0] * n_classes
        self._seen = [0.0] * n_classes

    def probability(self, sureness: int) -> float:
        """Expected share of right guesses in a class."""
        base = self._base
        prior = base.probability(sureness) if isinstance(base, Acceptance) else base[sureness]
        return (self._right[sureness] + self.WEIGHT * prior) / (self._seen[sureness] + self.WEIGHT)

    def record(self, sureness: int, right: bool) -> None:
        """Note a guess that was checked."""
        for c in (0, sureness):
            self._right[c] = self._keep * self._right[c] + right
            self._seen[c] = self._keep * self._seen[c] + 1
        if isinstance(self._base, Acceptance):
            self._base.record(sureness, right)


class Pace:
    """The simplest pace: every draft as long as it can be, always. `AdaptivePace` measures."""

    def continuing(
        self, drafts: Sequence[Draft], step: Step, costs: StepCosts, n_behind: Callable[[Draft], int]
    ) -> list[Draft]:
        """Return the drafts that are worth a guess more.

        Parameters
        ----------
        costs : StepCosts
            Of the drafter.
        n_behind : callable
            Tokens that the drafter has to read before it can guess the next one: 1 if it is up to date.
        """
        return [draft for draft in drafts if len(draft.tokens) < draft.most]

    def cut(self, drafts: Sequence[Draft], step: Step) -> list[int]:
        """Return how many guesses of each draft are to be checked."""
        return [len(draft.tokens) for draft in drafts]

    def observe(self, draft: Draft, right: Sequence[bool]) -> None:
        """Learn which guesses were right: a beginning of the draft, up to the first wrong one at most."""

    def measured(self, n_tokens: int, seconds: float) -> None:
        """Learn what a step of the model took of which every token's logits were wanted."""


@dataclass
class _Record:
    """What is known of one request; `idle` counts its tokens since drafting was last worth it, `tries` what is left
    of an attempt to see whether it is again, `pause` how long to wait for the next."""

    acceptance: Acceptance
    idle: int = 0
    pause: int = 64
    tries: int = 0


class AdaptivePace(Pace):
    """Drafts as much as pays.

    A step that also reads a prompt checks nothing: it is bound by arithmetic, where every token costs its full price.
    A request for which drafting with a model does not pay gets another try later, of a few guesses, after a pause that
    grows fourfold; guesses that cost nothing are compared with what is drawn even if they were not checked.

    Parameters
    ----------
    priors : sequence of float
        Of the drafter.
    """

    TRIES = 8
    FAR_BEHIND = 32  # tokens above which reading them has to pay off over the rest of the output
    LONGEST_REST = 512  # tokens that an output is taken to have left at most

    def __init__(self, priors: Sequence[float]) -> None:
        self.costs = StepCosts()
        self._all = Acceptance(priors, len(priors), memory=400)
        self._n_classes = len(priors)
        self._records: WeakKeyDictionary[Request, _Record] = WeakKeyDictionary()

    def measured(self, n_tokens: int, seconds: float) -> None:
        """Learn what a step of the model took."""
        self.costs.record(n_tokens, seconds)

    def observe(self, draft: Draft, right: Sequence[bool]) -> None:
        """Learn which guesses were right."""
        acceptance = self._record(draft).acceptance
        for sureness, is_right in zip(draft.classes, right, strict=False):
            acceptance.record(sureness, is_right)

    def continuing(
        self, drafts: Sequence[Draft], step: Step, costs: StepCosts, n_behind: Callable[[Draft], int]
    ) -> list[Draft]:
        """Return the drafts that are worth a guess more."""
        if not self._can_judge(step):
            return []
        open_ = [draft for draft in drafts if len(draft.tokens) < draft.most]
        if any(draft.tokens for draft in drafts):
            return self._best_group(drafts, open_, step, costs, n_behind)
        reading = {draft: costs.reading(n) for draft in open_ if (n := n_behind(draft)) > self.FAR_BEHIND}
        paying = [d for d in open_ if d not in reading or self._saves(d, step, costs) > reading[d]]
        chosen = self._best_group(drafts, paying, step, costs, n_behind)
        return chosen + self._due([d for d in open_ if d not in chosen], chosen, step, reading)

    def cut(self, drafts: Sequence[Draft], step: Step) -> list[int]:
        """Return how many guesses of each draft are to be checked."""
        if not self._can_judge(step):
            return [0] * len(drafts)
        gains = [(gain, i) for i, draft in enumerate(drafts) for gain in self._gains(draft)]
        gains.sort(key=lambda pair: -pair[0])
        rates = self._rates(step, np.array([gain for gain, _ in gains]))
        best = int(np.argmax(rates))
        counts = [0] * len(drafts)
        for _, i in gains[:best]:
            counts[i] += 1
        for i, draft in enumerate(drafts):
            record = self._record(draft)
            if record.tries and draft.tokens:
                record.tries -= 1
                counts[i] = max(1, counts[i])
        return counts

    def _can_judge(self, step: Step) -> bool:
        """Whether the step reads no prompt, and it is known what it takes without drafts."""
        return step.n_tokens == step.n_drawing and self.costs.knows(step.n_tokens)

    def _record(self, draft: Draft) -> _Record:
        record = self._records.get(draft.request)
        if record is None:
            record = _Record(Acceptance(self._all, self._n_classes, memory=40))
            self._records[draft.request] = record
        return record

    def _gains(self, draft: Draft) -> Numbers:
        """Probability of each guess that it is reached and right."""
        acceptance = self._record(draft).acceptance
        return np.array(list(accumulate((acceptance.probability(c) for c in draft.classes), mul)))

    def _rates(self, step: Step, gains: Numbers) -> Numbers:
        """Tokens per second with none, one, two ... of these gains, float64 [len(gains) + 1]."""
        tokens = step.n_drawing + np.concatenate([[0.0], np.cumsum(gains)])
        seconds = step.drafting_s + self.costs.expect(step.n_tokens + np.arange(len(tokens)))
        return np.asarray(tokens / seconds)

    def _best_group(
        self,
        drafts: Sequence[Draft],
        open_: Sequence[Draft],
        step: Step,
        costs: StepCosts,
        n_behind: Callable[[Draft], int],
    ) -> list[Draft]:
        """Of the drafts that can grow, those that should: over all numbers of them and of rounds to come."""
        reached: dict[int, float] = {}
        overall: dict[int, float] = {}
        known: list[float] = []
        for draft in drafts:
            gains = self._gains(draft)
            known += gains.tolist()
            overall[id(draft)] = self._record(draft).acceptance.probability(0)
            reached[id(draft)] = float(gains[-1]) if len(gains) else 1.0
        candidates = sorted(open_, key=lambda d: -reached[id(d)] * overall[id(d)])
        best_rate = float(self._rates(step, np.sort(np.array(known))[::-1]).max())
        n_best, n_tokens, tokens = 0, step.n_tokens + len(known), step.n_drawing + sum(known)
        extra, behind = np.zeros(0), 0
        for n_growing, draft in enumerate(candidates, 1):
            rounds = min(d.most - len(d.tokens) for d in candidates[:n_growing])
            p = overall[id(draft)]
            mine = reached[id(draft)] * np.cumsum(p ** np.arange(1, rounds + 1))
            extra = mine if n_growing == 1 else extra[:rounds] + mine
            behind += n if (n := n_behind(draft)) <= self.FAR_BEHIND else 1  # or it was found to pay off
            r = np.arange(1, rounds + 1)
            drafting = costs.expect(behind) + (r - 1) * costs.expect(n_growing)
            rates = (tokens + extra) / (
                step.drafting_s + drafting + self.costs.expect(n_tokens + n_growing * r)
            )
            if (rate := float(rates.max())) > best_rate:
                n_best, best_rate = n_growing, rate
        return candidates[:n_best]

    def _saves(self, draft: Draft, step: Step, costs: StepCosts) -> float:
        """Seconds that drafting promises to save over the rest of an output, what must be read first left aside."""
        request = draft.request
        p = self._record(draft).acceptance.probability(0)
        r = np.arange(1, draft.most + 1)
        gains = np.cumsum(p**r)
        plain = float(self.costs.expect(step.n_tokens))
        more = r * costs.expect(1) + self.costs.expect(step.n_tokens + r) - plain
        saved = gains * plain / step.n_drawing - more
        n_steps = min(request.max_tokens - request.n_output, self.LONGEST_REST) / (1 + gains)
        return float((saved * n_steps).max())

    def _due(
        self, idle: Sequence[Draft], chosen: Sequence[Draft], step: Step, reading: Mapping[Draft, float]
    ) -> list[Draft]:
        """Of the drafts that were not chosen, those that get a try: a tenth of the time since may go into reading."""
        for draft in chosen:
            self._record(draft).idle = 0
        due = []
        for draft in idle:
            record = self._record(draft)
            record.idle += 1
            affordable = 0.1 * record.idle * float(self.costs.expect(step.n_tokens))
            if not record.tries and record.idle > record.pause and reading.get(draft, 0.0) <= affordable:
                record.idle, record.pause, record.tries = 0, 4 * record.pause, self.TRIES
                record.acceptance = Acceptance(self._all, self._n_classes, memory=40)
            if record.tries:
                due.append(draft)
        return due
