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
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from ropewalk.engine.speculative.drafter import Draft, Step

if TYPE_CHECKING:
    from ropewalk.engine.request import Request

Numbers = NDArray[np.float64]


class StepCosts:
    """Seconds of a step by its number of tokens: the mean of the last few of that size, busy moments included.

    What was not tried yet should look good, so that it is tried: between two sizes that were measured seconds are taken
    to grow with the square of the distance from the smaller, and a larger one than all to cost no more. A size is
    forgotten when it was not seen for `LIFETIME` steps for each of its measurements: other work comes and goes, and a
    single measurement may have met a busy moment.
    """

    RECENT = 8
    LIFETIME = 50
    FRESH = 32  # steps since the last measurement of a size that is to be compared with
    MANY = 32  # tokens from which a step is a measurement of reading
    WEIGHT = 0.2  # of the newest such measurement

    def __init__(self) -> None:
        self._times: dict[int, deque[float]] = {}
        self._means: dict[int, float] = {}
        self._seen: dict[int, int] = {}
        self._n_steps = 0
        self._sizes: Numbers = np.zeros(1)
        self._seconds: Numbers = np.zeros(1)
        self._reading_s: float | None = None

    def record(self, n_tokens: int, seconds: float) -> None:
        """Note what a step took."""
        self._n_steps += 1
        times = self._times.setdefault(n_tokens, deque(maxlen=self.RECENT))
        times.append(seconds)
        self._means[n_tokens], self._seen[n_tokens] = sum(times) / len(times), self._n_steps
        for size in [n for n, seen in self._seen.items() if self._n_steps - seen >= self._life_of(n)]:
            del self._times[size], self._means[size], self._seen[size]
        points = np.array([(0.0, 0.0), *sorted(self._means.items())])
        self._sizes = points[:, 0]
        # A larger step is no quicker: what says otherwise met a busy moment.
        self._seconds = np.minimum.accumulate(points[::-1, 1])[::-1]
        if n_tokens >= self.MANY:
            each = seconds / n_tokens
            self._reading_s = (
                each if self._reading_s is None else self._reading_s + self.WEIGHT * (each - self._reading_s)
            )

    def _life_of(self, n_tokens: int) -> int:
        return self.LIFETIME * len(self._times[n_tokens])

    def is_fresh(self, n_tokens: int) -> bool:
        """Whether a step of this size was measured in one of the last few steps."""
        return n_tokens in self._seen and self._n_steps - self._seen[n_tokens] < self.FRESH

    def expect(self, n_tokens: NDArray[np.int_] | int) -> Numbers:
        """Seconds of steps with so many tokens, of the same shape; 0 before anything was measured."""
        n = np.asarray(n_tokens, np.float64)
        below = np.searchsorted(self._sizes, n, side="right") - 1
        above = np.minimum(below + 1, len(self._sizes) - 1)
        width = np.maximum(self._sizes[above] - self._sizes[below], 1.0)
        share = np.minimum((n - self._sizes[below]) / width, 1.0) ** 2
        return np.asarray(self._seconds[below] + share * (self._seconds[above] - self._seconds[below]))

    def reading(self, n_tokens: int) -> float:
        """Seconds to read many tokens, as in large steps so far; 0 before there was one."""
        return n_tokens * (self._reading_s or 0.0)


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

    TRIES = 12
    # Times as many tokens a second that must be promised, by guesses that cost nothing and by others, and times as much
    # saved as reading takes. Of many uncertain promises the best one is too good: with 1.05, 1.05 and 2 a draft model
    # that promised 1.2 to 1.3 lost up to 14 % on a busy machine.
    MARGIN, MODEL_MARGIN, READING_MARGIN = 1.1, 1.2, 3.0
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
        paying = [
            d
            for d in open_
            if d not in reading or self._saves(d, step, costs) > self.READING_MARGIN * reading[d]
        ]
        chosen = self._best_group(drafts, paying, step, costs, n_behind)
        return chosen + self._due([d for d in open_ if d not in chosen], chosen, step, reading)

    def cut(self, drafts: Sequence[Draft], step: Step) -> list[int]:
        """Return how many guesses of each draft are to be checked."""
        if not self._can_judge(step):
            return [0] * len(drafts)
        gains = [(gain, i) for i, draft in enumerate(drafts) for gain in self._gains(draft)]
        gains.sort(key=lambda pair: -pair[0])
        rates = self._rates(step, np.array([gain for gain, _ in gains]))
        if not step.drafting_s:  # else the risk was taken
            rates[0] *= self.MARGIN
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
        """Whether the step reads no prompt, and it is known what it takes without drafts: now and then one has none."""
        return step.n_tokens == step.n_drawing and self.costs.is_fresh(step.n_tokens)

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
        if not known:
            best_rate *= self.MODEL_MARGIN
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
