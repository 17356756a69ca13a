"""Forks of a request, and contexts that slide: what is shared, what is computed again, what is refused."""

import numpy as np
import pytest

from ropewalk.engine.engine import Engine
from ropewalk.engine.overflow import Slide
from ropewalk.errors import InvalidParameterError
from ropewalk.params import SamplingParams

END = 12


def engine_of(backend, **options):
    return Engine(backend, **({"context_length": 64, "kv_tokens": 320, "end_ids": [END]} | options))


def run(engine):
    while engine.has_unfinished:
        engine.step()
        engine.check()


def steps(engine, n):
    for _ in range(n):
        engine.step()
        engine.check()


def drawn(seed, **options):
    return SamplingParams(**({"seed": seed, "max_tokens": 30, "ignore_eos": True} | options))


def alone(toy, prompt, params):
    engine = engine_of(toy(), prefix_cache=False)
    request = engine.add_request(prompt, params)
    run(engine)
    return request.output


class TestForks:
    @pytest.mark.parametrize("n_prompt", [1, 15, 16, 17, 30])
    @pytest.mark.parametrize("prefix_cache", [True, False])
    def test_it_goes_on_as_a_prompt_of_the_same_tokens_would(self, toy, n_prompt, prefix_cache):
        engine = engine_of(toy(), prefix_cache=prefix_cache)
        prompt = [i % 7 for i in range(n_prompt)]
        first = engine.add_request(prompt, drawn(1))
        steps(engine, 8)
        taken = first.output
        second = engine.fork(first, drawn(2))
        third = engine.fork(first, drawn(3), n_output=3)
        run(engine)
        assert first.output == alone(toy, prompt, drawn(1))
        assert second.output == taken + alone(toy, prompt + taken, drawn(2, max_tokens=30 - len(taken)))
        assert third.output == taken[:3] + alone(toy, prompt + taken[:3], drawn(3, max_tokens=27))

    @pytest.mark.parametrize("prefix_cache", [True, False])
    def test_nothing_is_computed_again_and_only_the_last_page_is_copied(self, toy, prefix_cache):
        backend = toy()
        engine = engine_of(backend, prefix_cache=prefix_cache)
        first = engine.add_request([1] * 40, drawn(1))
        steps(engine, 4)
        backend.batch_sizes.clear()
        second = engine.fork(first, drawn(2))
        steps(engine, 1)
        assert backend.batch_sizes == [2]
        assert second.pages[:2] == first.pages[:2]
        assert second.pages[2] != first.pages[2]
        assert engine.statistics().pages_used == 4
        run(engine)

    @pytest.mark.parametrize("prefix_cache", [True, False])
    def test_of_all_relatives_the_one_with_most_in_common_is_shared_with(self, toy, prefix_cache):
        backend = toy()
        engine = engine_of(backend, prefix_cache=prefix_cache)
        first = engine.add_request([1] * 36, drawn(1))
        steps(engine, 3)
        second = engine.fork(first, drawn(2))
        steps(engine, 6)
        assert first.output[:6] != second.output[:6]
        backend.batch_sizes.clear()
        engine.fork(second, drawn(3))
        steps(engine, 1)
        assert backend.batch_sizes == [3]

    def test_a_prompt_that_is_being_read_is_read_once(self, toy):
        backend = toy()
        engine = engine_of(backend, token_budget=16, prefix_cache=False)
        first = engine.add_request([i % 7 for i in range(40)], drawn(1))
        steps(engine, 1)
        second = engine.fork(first, drawn(2))
        steps(engine, 3)
        assert backend.batch_sizes == [16, 16, 8, 2]
        assert second.n_computed == 40

    def test_the_same_seed_goes_on_with_the_same_tokens(self, toy):
        engine = engine_of(toy())
        first = engine.add_request([1] * 20, drawn(1))
        steps(engine, 5)
        second = engine.fork(first, drawn(1))
        run(engine)
        assert first.output == second.output

    def test_without_parameters_only_the_seed_is_new(self, toy):
        engine = engine_of(toy())
        first = engine.add_request([1] * 20, drawn(1, n=2, temperature=2.0), priority=3)
        steps(engine, 5)
        second = engine.fork(first)
        assert second.seed != first.seed
        assert (second.params.temperature, second.params.n, second.priority) == (2.0, 1, 3)
        assert second.group == [second]
        run(engine)
        assert second.output[:4] == first.output[:4]
        assert second.output != first.output

    def test_what_was_taken_over_counts_for_limits_penalties_and_logprobs(self, toy):
        engine = engine_of(toy())
        first = engine.add_request([1], drawn(1, logprobs=1))
        steps(engine, 6)
        greedy = SamplingParams(
            temperature=0, max_tokens=8, frequency_penalty=2.0, logprobs=1, ignore_eos=True
        )
        second = engine.fork(first, greedy)
        taken = first.output
        run(engine)
        logits = toy().logits([1, *taken]) - 2 * np.bincount(taken, minlength=13)
        assert second.output[:6] == taken
        assert second.output[6] == int(np.argmax(logits))
        assert second.n_output == 8
        assert second.logprobs[:6] == first.logprobs[:6]
        assert [p.token_id for p in second.logprobs] == second.output

    def test_of_one_that_waits_and_of_one_that_has_ended(self, toy):
        engine = engine_of(toy(), max_batch=1)
        first, second = (engine.add_request([i] * 20, drawn(i)) for i in (1, 2))
        steps(engine, 5)
        waits = engine.fork(second, drawn(5))
        run(engine)
        longer = engine.fork(first, drawn(1, max_tokens=40))
        shorter = engine.fork(first, drawn(9), n_output=4)
        run(engine)
        assert waits.output == alone(toy, [2] * 20, drawn(5))
        assert longer.output == alone(toy, [1] * 20, drawn(1, max_tokens=40))
        assert longer.n_cached == 20  # all of its prompt; the rest of what is found is output
        assert shorter.output[:4] == first.output[:4]
        assert engine.statistics().pages_used == 0

    def test_the_first_one_can_go_and_the_fork_keeps_its_pages(self, toy):
        engine = engine_of(toy(), prefix_cache=False)
        first = engine.add_request([1] * 20, drawn(1))
        steps(engine, 3)
        second = engine.fork(first, drawn(1))
        steps(engine, 1)
        engine.finish(first)
        run(engine)
        assert second.output == alone(toy, [1] * 20, drawn(1))
        assert engine.statistics().computed_tokens == 20 + 2 + 2 + 26

    def test_many_forks_of_forks_in_a_pool_of_five_pages(self, toy):
        engine = engine_of(toy(), kv_tokens=80, max_batch=4)
        requests = [engine.add_request([3] * 10, drawn(0))]
        for i in range(1, 16):
            engine.step()
            engine.check()
            requests.append(engine.fork(requests[i // 2], drawn(i)))
        parts = [request.output for request in requests]
        run(engine)
        assert engine.statistics().preemptions > 0
        for i, (request, part) in enumerate(zip(requests, parts, strict=True)):
            expected = alone(toy, [3] * 10 + part, drawn(i, max_tokens=30 - len(part)))
            assert request.output == part + expected

    def test_what_cannot_be_forked(self, toy):
        engine = engine_of(toy())
        ended = engine.add_request([1], SamplingParams(logit_bias={END: 100.0}, logprobs=1))
        steps(engine, 1)
        assert ended.output == [END]
        for options, message in (
            ({}, "the output to be forked has the end token 12"),
            ({"params": drawn(1, n=2)}, "n is 2; allowed for a fork: 1"),
            ({"params": drawn(1, prompt_logprobs=1)}, "prompt_logprobs is 1; allowed for a fork: None"),
            ({"n_output": 2}, r"n_output is 2; allowed: 0 \.\.\. 1"),
            ({"n_output": -1}, "n_output is -1"),
            ({"params": drawn(1, max_tokens=1)}, "max_tokens is 1; allowed for this fork: more than the 1"),
            ({"params": drawn(1, logprobs=2)}, "logprobs is 2; allowed for this fork: 1, or None"),
            ({"params": drawn(1, logit_bias={13: 1.0})}, "logit_bias has token id 13"),
        ):
            with pytest.raises(InvalidParameterError, match=message):
                engine.fork(ended, **options)
        assert engine.fork(ended, n_output=0).n_output == 0
        assert engine.fork(ended, drawn(1)).n_output == 1


class TestSliding:
    @pytest.mark.parametrize("keep", [0, 1, 16, 20, 32])
    def test_c8_the_next_token_is_that_of_the_shortened_text(self, toy, keep):
        """Every token follows from what is left of the text, whatever number of slides brought it there."""
        engine = engine_of(toy())
        prompt = [i % 11 for i in range(40)]
        params = SamplingParams(temperature=0, max_tokens=200, slide=True, keep_tokens=keep, ignore_eos=True)
        request = engine.add_request(prompt, params)
        run(engine)
        window, dropped = list(prompt), 0
        for i, token in enumerate(request.output):
            assert token == int(np.argmax(toy().logits(window)))
            window.append(token)
            if len(window) == 64 and i < 199:  # after the last one there is nothing to make room for
                step = {0: 32, 1: 16, 16: 16, 20: 16, 32: 16}[keep]
                del window[keep : keep + step]
                dropped += step
        assert request.n_output == 200
        assert (request.n_dropped, request.finish_reason) == (dropped, "length")
        assert window[:keep] == prompt[:keep]

    def test_c8_ten_slides_of_one_step_equal_one_slide_of_ten(self, toy):
        """The draws are keyed by the position in the whole text; the window alone decides the rest."""
        engine = engine_of(toy())
        params = SamplingParams(seed=3, max_tokens=300, slide=True, keep_tokens=32, ignore_eos=True)
        request = engine.add_request([1] * 40, params)
        run(engine)
        assert request.n_dropped > 10 * 16
        n = 40 + 250
        again = engine.fork(request, params, n_output=250)  # gets there at once
        assert again.n_dropped == Slide(64, 32).dropped(n)
        run(engine)
        assert again.output == request.output

    def test_c8_it_costs_at_most_about_two_tokens_for_one(self, toy):
        backend = toy()
        engine = engine_of(backend)
        params = SamplingParams(temperature=0, max_tokens=500, slide=True, ignore_eos=True)
        engine.add_request([1], params)
        run(engine)
        assert 500 < sum(backend.batch_sizes) <= 2 * 500

    def test_a_head_of_whole_pages_is_found_in_the_prefix_cache(self, toy):
        backend = toy()
        engine = engine_of(backend)
        params = SamplingParams(temperature=0, max_tokens=40, slide=True, keep_tokens=32, ignore_eos=True)
        request = engine.add_request([i % 11 for i in range(40)], params)
        run(engine)
        # 48 tokens are left, 32 of them known; they are no hits of the prompt.
        assert backend.batch_sizes == [40] + [1] * 23 + [16] + [1] * 15
        assert request.n_cached == 0

    def test_c8_never_without_asking(self, toy):
        engine = engine_of(toy())
        request = engine.add_request([1] * 40, SamplingParams(temperature=0, max_tokens=200, ignore_eos=True))
        run(engine)
        assert (request.n_output, request.finish_reason, request.n_dropped) == (24, "length", 0)

    def test_what_leaves_no_room_is_refused(self, toy):
        for context, keep, message in (
            (64, 33, "keep_tokens is 33; allowed with slide: at most 32, in a context of 64"),
            (31, None, "slide is True in a context of 31; allowed: in one of at least 32"),
        ):
            engine = engine_of(toy(), context_length=context)
            with pytest.raises(InvalidParameterError, match=message):
                engine.add_request([1], SamplingParams(slide=True, keep_tokens=keep))
        with pytest.raises(
            InvalidParameterError, match="max_tokens is 1048577; allowed with slide: at most 1048576"
        ):
            engine_of(toy()).add_request([1], SamplingParams(slide=True, max_tokens=2**20 + 1))
        with pytest.raises(InvalidParameterError, match="max_tokens is None; allowed: with slide, a number"):
            SamplingParams(slide=True, max_tokens=None)
