"""How many guesses are checked: from costs and acceptance that are set here, never from the time of the test."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest

from ropewalk.engine.speculative.drafter import Draft, Step
from ropewalk.engine.speculative.pace import Acceptance, AdaptivePace, StepCosts

PRIORS = (0.5, 0.1, 0.5, 0.9)
TILES = {1: 31.0, 2: 33.0, 4: 42.0, 8: 76.0, 16: 126.0}
CPU = {
    n: next(ms for tile, ms in TILES.items() if tile >= n) for n in range(1, 17)
}  # ms of a step, 1.5 B weights


class Request(SimpleNamespace):
    __hash__ = object.__hash__


def a_request(**facts):
    return Request(**({"max_tokens": 256, "n_output": 1} | facts))


def a_draft(*classes, most=7, request=None):
    return Draft(request or a_request(), most, [0] * len(classes), list(classes))


def a_pace(costs=CPU):
    pace = AdaptivePace(PRIORS)
    for n, ms in sorted(costs.items(), reverse=True):
        pace.measured(n, ms / 1e3)
    return pace


def costs_of(points):
    costs = StepCosts()
    for n, ms in points.items():
        costs.record(n, ms / 1e3)
    return costs


ALONE = {"n_tokens": 1, "n_drawing": 1}


class TestStepCosts:
    def test_means_and_a_hopeful_view_of_what_was_not_tried(self):
        costs = StepCosts()
        for n, s in [(2, 2.0), (2, 4.0), (2, 3.0), (6, 11.0)]:
            costs.record(n, s)
        assert costs.expect(np.array([1, 2, 3, 4, 6, 9])).tolist() == [0.75, 3.0, 3.5, 5.0, 11.0, 11.0]
        assert (costs.is_fresh(2), costs.is_fresh(3)) == (True, False)
        assert StepCosts().expect(np.array([1, 5])).tolist() == [0.0, 0.0]

    def test_a_larger_step_is_never_quicker(self):
        assert costs_of({1: 30, 2: 80, 4: 40}).expect(2) == pytest.approx(0.04)

    def test_only_the_last_few_count(self):
        costs = StepCosts()
        for s in [9.0] * 10 + [1.0] * 8:
            costs.record(1, s)
        assert costs.expect(1) == 1.0

    def test_what_was_seen_little_is_forgotten_soon(self):
        costs = costs_of({8: 99, 9: 99})
        costs.record(9, 0.1)
        for _ in range(StepCosts.LIFETIME):
            costs.record(1, 0.03)
        assert costs.expect(np.array([1, 9])).tolist() == pytest.approx([0.03, 0.0995])
        assert costs.expect(8) < 0.09
        for _ in range(StepCosts.LIFETIME):
            costs.record(1, 0.03)
        assert costs.expect(9) == pytest.approx(0.03)

    def test_reading_takes_what_it_took_before(self):
        assert costs_of({1: 10}).reading(100) == 0
        assert costs_of({1: 10, 100: 200}).reading(450) == pytest.approx(0.9)
        costs = costs_of({100: 200, 200: 800})  # 2 ms a token, then 4
        assert costs.reading(1000) == pytest.approx(1000 * (0.002 + 0.2 * 0.002))


class TestAcceptance:
    def test_it_begins_with_what_is_given_and_learns(self):
        acceptance = Acceptance(PRIORS, 4, memory=1e9)
        assert [acceptance.probability(c) for c in range(4)] == pytest.approx([0.5, 0.1, 0.5, 0.9])
        for right in [True] * 6 + [False]:
            acceptance.record(2, right)
        assert acceptance.probability(2) == pytest.approx((6 + 3 * 0.5) / (7 + 3))
        assert acceptance.probability(0) == acceptance.probability(2)  # of all guesses, too
        assert acceptance.probability(3) == 0.9

    def test_it_forgets(self):
        acceptance = Acceptance(PRIORS, 4, memory=10)
        for right in [False] * 200 + [True] * 40:
            acceptance.record(1, right)
        assert acceptance.probability(1) > 0.7

    def test_what_one_request_learns_the_next_begins_with(self):
        everybody = Acceptance(PRIORS, 4, memory=1e9)
        for _ in range(50):
            Acceptance(everybody, 4, memory=40).record(1, True)
        assert Acceptance(everybody, 4, memory=40).probability(1) == pytest.approx(50.3 / 53)


class TestCut:
    def test_as_many_guesses_as_make_most_tokens_a_second(self):
        """A guess of class 3 is right in 9 of 10 cases: 1 + .9 + .81 + .729 tokens in 42 ms is the best of all."""
        draft = a_draft(*[3] * 15, most=15)
        rates = [(1 + sum(0.9**i for i in range(1, k + 1))) / a_pace().costs.expect(1 + k) for k in range(16)]
        assert a_pace().cut([draft], Step(**ALONE)) == [3] == [int(np.argmax(rates))]

    def test_none_where_guesses_are_wrong_or_checking_is_dear(self):
        assert a_pace().cut([a_draft(2, 2, 2)], Step(**ALONE)) == [1]  # 1.5 tokens in 33 ms beside 1 in 31
        assert a_pace().cut([a_draft(1, 1, 1)], Step(**ALONE)) == [
            0
        ]  # 1.1 in 33 ms: 3 % are not worth a risk
        assert a_pace({1: 31, 2: 50}).cut([a_draft(1, 1, 1)], Step(**ALONE)) == [0]
        assert a_pace({1: 31, 2: 62, 3: 93, 4: 124}).cut([a_draft(3, 3, 3)], Step(**ALONE)) == [0]

    def test_in_a_full_batch_the_surest_guesses_only(self):
        """16 requests: each token more costs 2 ms, of 126 that the step takes for 16."""
        pace = a_pace({n: 126 + 2 * (n - 16) for n in range(16, 49)})
        drafts = [a_draft(*[1 + i % 3] * 2) for i in range(16)]
        counts = pace.cut(drafts, Step(n_tokens=16, n_drawing=16))
        assert [counts[i] for i in range(3)] == [0, 1, 2]
        dear = a_pace({n: 126 / 16 * n for n in range(16, 49)})
        assert dear.cut(drafts, Step(n_tokens=16, n_drawing=16)) == [0] * 16

    def test_nothing_beside_a_prompt_or_before_it_is_known_what_a_plain_step_takes(self):
        draft = a_draft(3, 3, 3)
        assert a_pace().cut([draft], Step(n_tokens=40, n_drawing=1)) == [0]
        assert a_pace({2: 33}).cut([draft], Step(**ALONE)) == [0]

    def test_time_that_drafting_took_counts(self):
        """The fewer tokens a second anyway, the more of them must come of a step."""
        assert a_pace().cut([a_draft(3, 3, 3, 3, 3, 3, 3)], Step(**ALONE, drafting_s=0.2)) == [7]

    def test_it_follows_what_is_observed(self):
        pace, request = a_pace(), a_request()
        for _ in range(40):
            pace.observe(a_draft(3, 3, request=request), [False])
        assert pace.cut([a_draft(3, 3, 3, request=request)], Step(**ALONE)) == [0]
        for _ in range(40):
            pace.observe(a_draft(1, request=request), [True])
        assert pace.cut([a_draft(1, 1, 1, request=request)], Step(**ALONE)) == [3]

    def test_now_and_then_a_step_without_any_shows_what_it_would_take(self):
        pace, counts = a_pace(), []
        for _ in range(100):
            (count,) = pace.cut([a_draft(3)], Step(**ALONE))
            pace.measured(1 + count, CPU[1 + count] / 1e3)
            counts.append(count)
        plain = [i for i, count in enumerate(counts) if not count]
        assert 2 <= len(plain) <= 5
        assert {b - a for a, b in itertools.pairwise(plain)} == {StepCosts.FRESH + 1}


class TestContinuing:
    """Rounds of a draft model that takes 12 ms for a token and 2 ms for each that it reads."""

    DRAFT = costs_of({1: 12.0, 512: 1034.0})

    def rounds(self, pace, draft, n_behind=1):
        step, count = Step(**ALONE), 0
        while pace.continuing([draft], step, self.DRAFT, lambda d: n_behind if not d.tokens else 1):
            draft.add(0, 3)
            step.drafting_s += 0.012
            count += 1
        return count

    def test_as_many_rounds_as_pay(self):
        pace = a_pace()
        assert self.rounds(pace, a_draft()) == 0  # half of them right: 1.5 tokens in 45 ms, 1 in 31 without
        for _ in range(200):
            pace.observe(a_draft(3), [True])
        assert self.rounds(pace, a_draft()) == 3
        assert self.rounds(a_pace({1: 31, 2: 50}), a_draft()) == 0

    def test_no_more_than_there_is_room_for(self):
        pace = a_pace({1: 100, 8: 101})
        for _ in range(200):
            pace.observe(a_draft(3), [True])
        assert self.rounds(pace, a_draft(most=5)) == 5

    def test_much_that_must_be_read_first_has_to_pay_off(self):
        pace = a_pace()
        for _ in range(200):
            pace.observe(a_draft(3), [True])
        assert self.rounds(pace, a_draft(), n_behind=400) == 3  # 0.8 s, and nearly 3 s to be saved
        assert self.rounds(pace, a_draft(), n_behind=600) == 0
        assert self.rounds(pace, a_draft(request=a_request(n_output=200)), n_behind=400) == 0

    def test_it_tries_again_after_a_pause_that_grows(self):
        """What does not pay is tried with one guess in 12 steps in a row, after 64, 256 ... steps without."""
        pace, request = a_pace(), a_request(max_tokens=5000)
        for _ in range(100):
            pace.observe(a_draft(3, request=request), [False])
        tried = []
        for number in range(700):
            draft, step = a_draft(request=request), Step(**ALONE)
            if pace.continuing([draft], step, self.DRAFT, lambda d: 1):
                draft.add(0, 1)
                assert not pace.continuing([draft], step, self.DRAFT, lambda d: 1)
                assert pace.cut([draft], step) == [1]
                pace.observe(draft, [False])
                tried.append(number)
        assert tried == [*range(64, 76), *range(321, 333)]

    def test_a_try_that_succeeds_turns_drafting_on(self):
        pace, request = a_pace(), a_request(max_tokens=5000)
        for _ in range(100):
            pace.observe(a_draft(3, request=request), [False])
        counts = []
        for _ in range(200):
            draft = a_draft(request=request)
            counts.append(self.rounds(pace, draft))
            pace.cut([draft], Step(**ALONE))
            pace.observe(draft, [True] * len(draft.tokens))
        assert not any(counts[:64])
        assert min(counts[100:]) >= 3

    def test_a_try_may_take_a_tenth_of_the_time_since(self):
        pace, request = a_pace(), a_request(max_tokens=5000)
        for _ in range(100):
            pace.observe(a_draft(3, request=request), [False])
        first = next(
            number
            for number in range(3000)
            if pace.continuing([a_draft(request=request)], Step(**ALONE), self.DRAFT, lambda d: 2000)
        )
        assert first == pytest.approx(10 * self.DRAFT.reading(2000) / 0.031, abs=2)
