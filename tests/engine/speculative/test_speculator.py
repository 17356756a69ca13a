"""Drafts in the engine: whatever is guessed, and however much of it, tokens are those of a run without guesses."""

import dataclasses
import os
import re
import runpy
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ropewalk.engine.draws import uniform
from ropewalk.engine.engine import Engine
from ropewalk.params import SamplingParams

schedules = runpy.run_path(str(Path(__file__).parents[1] / "test_schedules.py"))
END = 12
SCHEDULES = int(os.environ.get("ROPEWALK_SCHEDULES", "40"))
GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)


def engine_of(backend, speculator=None, **options):
    sizes = {"context_length": 64, "kv_tokens": 64, "end_ids": [END]} | options
    return Engine(backend, speculator=speculator, **sizes)


def run(engine):
    while engine.has_unfinished:
        engine.step()
        engine.check()


def ask(engine, prompt, params, **options):
    request = engine.add_request(prompt, params, **options)
    run(engine)
    return request


def story(request):
    return request.output, request.finish_reason, request.stop_reason, request.logprobs


@given(st.data())
@settings(max_examples=SCHEDULES, deadline=None, suppress_health_check=list(HealthCheck))
def test_h1_d3_randomised_schedules_with_drafts_equal_each_request_alone(toy, speculator, data):
    """Any drafter and draft length, while requests join, fork, slide, are preempted and aborted; greedy and sampled."""
    name = data.draw(st.sampled_from(["same", "random", "sometimes", "lookup"]))
    drafting = speculator(name, data.draw(st.integers(1, 8)), adaptive=data.draw(st.booleans()))
    schedules["play"](toy, data, speculator=drafting)
    if name == "same" and not hasattr(drafting.pace, "costs"):
        assert all(drafting.pace.right), "the draft model read something else than the request"


class TestTokens:
    @pytest.mark.parametrize("name", ["same", "random", "sometimes", "lookup"])
    @pytest.mark.parametrize("most", range(1, 9))
    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_h1_h2_equal_to_a_run_without_drafts(self, toy, speculator, name, most, temperature):
        for prompt in ([1], [1, 2, 3, 4] * 4, [i % 7 for i in range(31)]):
            params = SamplingParams(temperature=temperature, max_tokens=30, seed=4, ignore_eos=True)
            drafting = speculator(name, most)
            drafted = ask(engine_of(toy(), drafting), prompt, params)
            assert story(drafted) == story(ask(engine_of(toy()), prompt, params))
            assert drafted.n_drafted >= drafted.n_accepted >= sum(drafting.pace.right) - 1

    @pytest.mark.parametrize("most", range(1, 9))
    def test_the_model_itself_as_draft_is_always_right(self, toy, speculator, most):
        """30 tokens: the first from the prompt, then `most + 1` a step."""
        for params in (GREEDY, dataclasses.replace(GREEDY, temperature=1.0, top_p=0.9, seed=3)):
            backend = toy()
            engine = engine_of(backend, speculator("same", most))
            request = ask(engine, [1, 2, 3], params)
            assert len(backend.batch_sizes) == 1 + -(-29 // (most + 1))
            assert request.n_accepted == request.n_drafted == 29 - (len(backend.batch_sizes) - 1)
            found = engine.statistics()
            assert (found.drafted_tokens, found.accepted_tokens) == (request.n_drafted, request.n_accepted)
            assert (found.acceptance_rate, found.generated_tokens) == (1.0, 30)

    def test_h2_a_likely_guess_does_not_make_its_token_likelier(self, speculator, toy):
        """Target [.25, .75], draft always the unlikely token, or the likely one first: 20,000 draws; chi-square of one
        degree of freedom below 10.8 (p = 0.001), and the very tokens that the draws give."""

        class Coin(toy):
            def logits_of(self, batch, row, cache):
                return np.log(np.array([0.25, 0.75], np.float32))

        n_each, seeds = 500, range(40)
        expected = [[int(uniform(s, 1 + i) >= 0.25) for i in range(n_each)] for s in seeds]
        for guesses in (lambda r, most: [0] * most, lambda r, most: [1, 0] * (most // 2)):
            engine = engine_of(Coin(vocab_size=2), speculator(guesses), context_length=512, kv_tokens=4096)
            asked = [SamplingParams(seed=s, max_tokens=n_each, ignore_eos=True) for s in seeds]
            requests = [engine.add_request([1], params) for params in asked]
            while engine.has_unfinished:
                engine.step()
            assert [request.output for request in requests] == expected
            n, ones = 20_000, sum(sum(request.output) for request in requests)
            chi_square = (ones - 0.75 * n) ** 2 / (0.75 * n) + (ones - 0.75 * n) ** 2 / (0.25 * n)
            assert chi_square < 10.8
            assert engine.statistics().accepted_tokens > 2000

    def test_h1_a_guess_that_the_draft_prefers_less_than_the_target_is_refused_all_the_same(
        self, toy, speculator
    ):
        """Draft a, target a = .3, b = .5: greedy says b."""

        class Three(toy):
            def logits_of(self, batch, row, cache):
                return np.log(np.array([0.3, 0.5, 0.2], np.float32))

        engine = engine_of(Three(vocab_size=3), speculator(lambda r, most: [0] * most))
        request = ask(engine, [0], GREEDY)
        assert request.output == [1] * 30
        assert (request.n_accepted, request.n_drafted > 0) == (0, True)

    def test_penalties_and_logprobs_in_an_accepted_run(self, toy, speculator):
        params = SamplingParams(
            max_tokens=40, seed=5, repetition_penalty=1.3, frequency_penalty=0.6, logprobs=3, ignore_eos=True
        )
        plain = ask(engine_of(toy()), [1, 2, 3], params)
        drafted = ask(engine_of(toy(), speculator("same", 6)), [1, 2, 3], params)
        assert story(drafted) == story(plain)
        assert len(drafted.logprobs) == 40
        assert drafted.n_accepted == drafted.n_drafted > 30

    def test_a_constraint_sees_drafted_tokens_in_order(self, toy, speculator):
        class Even:
            """Every second token is even; ends after ten."""

            def __init__(self, seen=()):
                self.seen = list(seen)

            def mask(self):
                return None if len(self.seen) % 2 else np.arange(13) % 2 == 0

            def accept(self, token):
                assert len(self.seen) % 2 or token % 2 == 0
                self.seen.append(token)

            ended = property(lambda self: len(self.seen) == 10)

            def fork(self):
                return Even(self.seen)

        params = SamplingParams(seed=5, max_tokens=30, ignore_eos=True)
        plain = ask(engine_of(toy()), [1, 2], params, constraint=Even())
        for name in ("same", "lookup", "random"):
            drafted = ask(engine_of(toy(), speculator(name, 6)), [1, 2], params, constraint=Even())
            assert story(drafted) == story(plain)
            assert drafted.constraint.seen == plain.output
        assert (len(plain.output), plain.finish_reason) == (10, "stop")


class TestEnds:
    """What ends an output may stand anywhere in an accepted run."""

    @pytest.mark.parametrize("most", [1, 2, 3, 5, 8])
    def test_max_tokens_and_the_end_of_the_context(self, toy, speculator, most):
        for n in (*range(1, 12), None):
            params = SamplingParams(temperature=0, max_tokens=n, ignore_eos=True)
            request = ask(engine_of(toy(), speculator("same", most)), [1] * 50, params)
            assert (request.n_output, request.finish_reason) == (n or 14, "length")
            assert story(request) == story(ask(engine_of(toy()), [1] * 50, params))

    @pytest.mark.parametrize("most", [1, 3, 8])
    def test_end_tokens_stop_tokens_and_min_tokens(self, toy, speculator, most):
        for seed in range(20):
            for more in ({}, {"stop_token_ids": [3]}, {"min_tokens": 9}, {"ignore_eos": True}):
                params = SamplingParams(seed=seed, max_tokens=40, logprobs=0, **more)
                drafted = ask(engine_of(toy(), speculator("same", most)), [seed % 12, 1], params)
                assert story(drafted) == story(ask(engine_of(toy()), [seed % 12, 1], params))

    def test_a_failure_inside_a_run_is_that_requests_alone(self, toy, speculator):
        plain = ask(engine_of(toy()), [1, 2], GREEDY)
        bad_position = 2 + 5
        import ropewalk.engine.engine as module

        def choose(logits, params, context, *, seed, position, real=module.choose):
            if seed == 1 and position == bad_position:
                raise ZeroDivisionError
            return real(logits, params, context, seed=seed, position=position)

        engine = engine_of(toy(), speculator("same", 8), kv_tokens=128)
        bad = engine.add_request([1, 2], dataclasses.replace(GREEDY, seed=1))
        good = engine.add_request([1, 2], dataclasses.replace(GREEDY, seed=2))
        with patch.object(module, "choose", choose):
            run(engine)
        assert (bad.output, bad.finish_reason) == (plain.output[:5], "error")
        assert good.output == plain.output

    def test_an_end_from_outside_takes_back_what_stands_after_it(self, toy, speculator):
        engine = engine_of(toy(), speculator("same", 8))
        request = engine.add_request([1, 2], dataclasses.replace(GREEDY, logprobs=0))
        engine.step()
        engine.step()
        assert request.n_output == 10
        engine.finish(request, "stop", "a stop string", n_output=4)
        engine.check()
        assert request.output == ask(engine_of(toy()), [1, 2], GREEDY).output[:4]
        assert (len(request.logprobs), request.finish_reason) == (4, "stop")
        found = engine.statistics()
        assert (found.generated_tokens, found.later_tokens, found.pages_used) == (4, 3, 0)

    def test_an_interrupted_step_leaves_a_usable_engine(self, toy, speculator):
        plain = ask(engine_of(toy()), [1, 2], GREEDY)
        engine = engine_of(toy(fail_at=(3, RuntimeError("machine"))), speculator("same", 3))
        engine.add_request([1, 2], GREEDY)
        with pytest.raises(RuntimeError, match="machine"):
            run(engine)
        engine.check()
        again = ask(engine, [1, 2], GREEDY)
        assert again.output == plain.output
        assert again.n_accepted == again.n_drafted


class Failing:
    """A constraint that allows everything until it has seen three tokens; then one of its methods fails."""

    ended = False

    def __init__(self, method, n_seen=0):
        self.method, self.n_seen = method, n_seen

    def _check(self, method):
        if method == self.method and self.n_seen == 3:
            raise ZeroDivisionError(method)

    def mask(self):
        self._check("mask")

    def accept(self, token):
        self._check("accept")
        self.n_seen += 1

    def fork(self):
        self._check("fork")
        return Failing(self.method, self.n_seen)


class TestFailures:
    @pytest.mark.parametrize(("method", "n_output"), [("mask", 3), ("accept", 4), ("fork", 30)])
    def test_of_a_constraint_in_a_draft_are_that_requests_alone(self, toy, speculator, method, n_output):
        """It fails again where the engine draws; only a fork is never needed there."""
        plain = ask(engine_of(toy()), [1, 2], GREEDY)
        engine = engine_of(toy(), speculator("same", 8), kv_tokens=128)
        bad = engine.add_request([1, 2], GREEDY, constraint=Failing(method))
        good = engine.add_request([1, 2], GREEDY)
        run(engine)
        assert bad.output == plain.output[:n_output]
        assert bad.finish_reason == ("length" if method == "fork" else "error")
        assert good.output == plain.output
        assert good.n_accepted == good.n_drafted > 0

    @pytest.mark.parametrize(
        ("guess", "message"),
        [
            (lambda request, most: 1 // 0, "ZeroDivisionError"),
            (lambda request, most: [13], r"a guess is 13; allowed: 0 \.\.\. 12"),
            (lambda request, most: [-1], "a guess is -1"),
            (lambda request, most: [1] * (most + 1), "9 guesses where 8 were allowed"),
        ],
    )
    def test_of_a_drafter_end_the_drafts_and_nothing_else(self, toy, speculator, caplog, guess, message):
        plain = ask(engine_of(toy()), [1, 2], GREEDY)
        calls = []

        def guesses(request, most):
            calls.append(request)
            return guess(request, most) if len(calls) > 3 else [1]

        engine = engine_of(toy(), speculator(guesses, 8), kv_tokens=128)
        both = [engine.add_request([1, 2], GREEDY) for _ in range(2)]
        run(engine)
        assert [request.output for request in both] == [plain.output] * 2
        (told,) = caplog.messages
        assert re.search(message, told)
        assert len(calls) in (4, 5)  # what it guessed for the other one in that step is lost as well


class TestRoom:
    def test_the_budget_and_the_pages_of_others_are_left_alone(self, toy, speculator):
        """Drafts get what prompts leave, and nobody is preempted for them."""
        backend = toy()
        engine = engine_of(backend, speculator("same", 8), kv_tokens=80, max_batch=3, token_budget=6)
        requests = [engine.add_request([i] * 14, dataclasses.replace(GREEDY, max_tokens=3)) for i in range(3)]
        run(engine)
        assert max(backend.batch_sizes) == 6
        assert engine.statistics().preemptions == 0
        assert sum(r.n_drafted for r in requests) > 0
        assert engine.statistics().pages_used == 0

    def test_pages_of_wrong_guesses_are_given_back(self, toy, speculator):
        engine = engine_of(toy(), speculator(lambda r, most: [(r.tokens[r.n_tokens - 1] + 1) % 12] * most, 8))
        request = engine.add_request([1] * 14, GREEDY)
        while engine.has_unfinished:
            engine.step()
            engine.check()
            if request.finish_reason is None:
                assert len(request.pages) == -(-request.n_computed // 16)

    def test_the_prefix_cache_keeps_no_guess(self, toy, speculator):
        """Wrong guesses fill a page; the page that is kept has the tokens that were drawn."""
        backend = toy()
        engine = engine_of(backend, speculator(lambda r, most: [0] * most, 8), kv_tokens=128)
        first = ask(engine, [1] * 10, dataclasses.replace(GREEDY, max_tokens=24))
        again = engine.add_request([1] * 10 + first.output, GREEDY)
        run(engine)
        assert again.n_cached == 32
        assert again.output == ask(engine_of(toy()), [1] * 10 + first.output, GREEDY).output

    def test_without_a_cache_there_are_no_drafts(self, toy, speculator):
        engine = engine_of(toy(), speculator("same"), keep_cache=False)
        assert ask(engine, [1, 2], GREEDY).n_drafted == 0
