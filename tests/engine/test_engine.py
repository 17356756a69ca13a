"""Many requests through one toy model: tokens equal each request alone, pages and queues stay consistent."""

import dataclasses
import json
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ropewalk.engine.engine import Engine
from ropewalk.engine.sampler import logprob
from ropewalk.errors import GenerationError, InvalidParameterError, PromptError
from ropewalk.params import SamplingParams

END = 12


def engine_of(backend, **options):
    sizes = {"context_length": 64, "kv_tokens": 64, "end_ids": [END]} | options
    return Engine(backend, **sizes)


def run(engine):
    while engine.has_unfinished:
        engine.step()
        engine.check()


def alone(toy, prompt, params, **options):
    engine = engine_of(toy(), **options)
    request = engine.add_request(prompt, params)
    run(engine)
    return request


def by_hand(toy, prompt, n):
    """Greedy tokens without an engine."""
    tokens = list(prompt)
    for _ in range(n):
        tokens.append(int(np.argmax(toy().logits(tokens))))
    return tokens[len(prompt) :]


GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)

prompts = st.lists(st.integers(0, 11), min_size=1, max_size=40)
knobs = st.builds(
    SamplingParams,
    max_tokens=st.one_of(st.none(), st.integers(4, 30)),
    min_tokens=st.integers(0, 4),
    temperature=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    top_k=st.sampled_from([0, 3]),
    top_p=st.sampled_from([1.0, 0.8]),
    min_p=st.sampled_from([0.0, 0.1]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    presence_penalty=st.sampled_from([0.0, 0.7]),
    seed=st.integers(0, 2**64 - 1),
    stop_token_ids=st.sampled_from([(), (3,)]),
    ignore_eos=st.booleans(),
    logprobs=st.sampled_from([None, 0, 2]),
)


class TestTokens:
    def test_greedy_equals_a_loop_by_hand(self, toy):
        assert alone(toy, [1, 2, 3], GREEDY).output == by_hand(toy, [1, 2, 3], 20)

    @pytest.mark.parametrize("n_prompt", [1, 15, 16, 17, 31, 32, 33])
    @pytest.mark.parametrize("budget", [2, 16, 17, 512])
    def test_page_borders_and_chunks_do_not_show(self, toy, n_prompt, budget):
        prompt = [i % 12 for i in range(n_prompt)]
        request = alone(toy, prompt, GREEDY, max_batch=2, token_budget=budget)
        assert request.output == by_hand(toy, prompt, 20)

    @pytest.mark.parametrize("n", [1, 7, 8, 64])
    def test_a6_ties_at_the_top_k_cut_alone_and_in_a_batch(self, toy, n):
        """Logits [2, 1, 1, 1, 0], k = 2: of ids 0 and 1 alone, and the same ones, whatever the batch."""
        tied = np.array([2, 1, 1, 1, 0], np.float32)

        class Tied(toy):
            def logits(self, tokens):
                return tied if tokens[0] == 0 else super().logits(tokens)

        backend = Tied(vocab_size=5)
        engine = engine_of(backend, max_batch=64, kv_tokens=64 * 64, end_ids=[])
        asked = [SamplingParams(top_k=2, seed=s, max_tokens=20, ignore_eos=True) for s in range(n)]
        requests = [engine.add_request([0 if s == n // 2 else 1], p) for s, p in enumerate(asked)]
        run(engine)
        assert max(backend.batch_sizes) == n
        mine = requests[n // 2]
        assert set(mine.output) == {0, 1}
        assert mine.output == alone(lambda: Tied(vocab_size=5), [0], asked[n // 2], end_ids=[]).output

    @given(prompts, knobs)
    @settings(max_examples=40)
    def test_without_a_cache_the_same_tokens(self, toy, prompt, params):
        kept = alone(toy, prompt, params)
        recomputed = alone(toy, prompt, params, keep_cache=False, token_budget=24)
        assert (kept.output, kept.finish_reason) == (recomputed.output, recomputed.finish_reason)

    def test_without_a_cache_every_token_costs_the_whole_sequence(self, toy):
        for keep_cache, sizes in ((True, [5, 1, 1, 1]), (False, [5, 6, 7, 8])):
            backend = toy()
            engine = engine_of(backend, keep_cache=keep_cache)
            engine.add_request([1, 2, 3, 4, 5], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
            run(engine)
            assert backend.batch_sizes == sizes


class TestBatches:
    def test_d1_sequences_of_different_lengths_have_positions_of_their_own(self, toy):
        """There is no padding: lengths 3 and 5 are eight tokens, and decoding goes on at 3 and at 5."""
        seen = []

        class Watched(toy):
            def forward(self, batch, cache):
                seen.append((batch.positions.tolist(), batch.sequences.tolist(), batch.logit_rows.tolist()))
                return super().forward(batch, cache)

        engine = engine_of(Watched(), kv_tokens=128)
        short, long = engine.add_request([1, 2, 3], GREEDY), engine.add_request([1, 2, 3, 4, 5], GREEDY)
        run(engine)
        assert seen[0] == ([0, 1, 2, 0, 1, 2, 3, 4], [0] * 3 + [1] * 5, [2, 7])
        assert seen[1] == ([3, 5], [0, 1], [0, 1])
        assert seen[2] == ([4, 6], [0, 1], [0, 1])
        assert short.output == by_hand(toy, [1, 2, 3], 20)
        assert long.output == by_hand(toy, [1, 2, 3, 4, 5], 20)


class TestEndings:
    def test_max_tokens(self, toy):
        request = alone(toy, [1, 2], GREEDY)
        assert (request.n_output, request.finish_reason, request.stop_reason) == (20, "length", None)

    def test_the_end_of_the_context(self, toy):
        params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
        request = alone(toy, [1] * 50, params)
        assert (request.n_output, request.finish_reason) == (14, "length")
        assert alone(toy, [1] * 63, params).n_output == 1

    def test_end_tokens_stop_tokens_and_min_tokens(self, toy):
        bias = {END: 100.0}
        request = alone(toy, [1, 2], SamplingParams(logit_bias=bias))
        assert (request.output, request.finish_reason, request.stop_reason) == ([END], "stop", None)
        request = alone(toy, [1, 2], SamplingParams(logit_bias=bias, stop_token_ids=[END], ignore_eos=True))
        assert (request.output, request.finish_reason, request.stop_reason) == ([END], "stop", END)
        request = alone(toy, [1, 2], SamplingParams(logit_bias=bias, ignore_eos=True, max_tokens=3))
        assert (request.output, request.finish_reason) == ([END] * 3, "length")
        request = alone(toy, [1, 2], SamplingParams(logit_bias=bias, min_tokens=3))
        assert request.output.index(END) == 3
        both = SamplingParams(logit_bias={END: 100.0, 3: 80.0}, stop_token_ids=[3], min_tokens=3)
        request = alone(toy, [1, 2], both)
        assert request.output[3:] == [END]
        assert not {3, END} & set(request.output[:3])

    def test_finish_from_outside_happens_once(self, toy):
        engine = engine_of(toy())
        request = engine.add_request([1, 2], GREEDY)
        engine.step()
        engine.finish(request, "stop", "a stop string")
        engine.finish(request)
        engine.check()
        assert (request.finish_reason, request.stop_reason, request.n_output) == ("stop", "a stop string", 1)
        assert not engine.has_unfinished
        assert engine.statistics().pages_used == 0


class TestScheduling:
    def test_a_decoding_neighbour_gets_a_token_in_every_step_of_a_long_prefill(self, toy):
        engine = engine_of(toy(), context_length=400, kv_tokens=800, max_batch=2, token_budget=10)
        first = engine.add_request([1], GREEDY)
        engine.step()
        long = engine.add_request([2] * 90, GREEDY)
        for step in range(1, 11):
            assert long.n_output == 0
            engine.step()
            assert first.n_output == 1 + step
        assert long.n_output == 1  # nine of each ten tokens were its own

    def test_a_token_that_is_never_computed_needs_no_page(self, toy):
        engine = engine_of(toy())
        exact = engine.add_request([1] * 13, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
        engine.step()
        assert len(exact.pages) == 1
        run(engine)
        assert exact.n_output == 4

    def test_max_batch(self, toy):
        engine = engine_of(toy(), kv_tokens=640, max_batch=3)
        for _ in range(5):
            engine.add_request([1], GREEDY)
        engine.step()
        assert (len(engine.scheduler.running), len(engine.scheduler.waiting)) == (3, 2)
        run(engine)


class TestFailures:
    @pytest.mark.filterwarnings("ignore:.*logits are NaN")
    def test_a12_a_request_whose_logits_are_all_nan_fails_alone(self, toy):
        backend = toy(poison={11: np.nan})
        engine = engine_of(backend)
        never_11 = SamplingParams(max_tokens=20, ignore_eos=True, seed=5, logit_bias={11: -100.0})
        good = engine.add_request([1, 2, 3], never_11)
        bad = engine.add_request([1, 11], GREEDY)
        run(engine)
        assert bad.finish_reason == "error"
        assert isinstance(bad.error, GenerationError)
        assert bad.output == []
        assert good.finish_reason == "length"
        assert good.output == alone(toy, [1, 2, 3], never_11).output

    def test_any_exception_in_sampling_fails_its_request_alone(self, toy):
        engine = engine_of(toy())
        good, bad = engine.add_request([1], GREEDY), engine.add_request([2], GREEDY)
        from ropewalk.engine import engine as module

        def choose(logits, params, context, **where):
            if context.prompt[0] == 2 and len(context.output) == 5:
                raise ZeroDivisionError("a fault of ours")
            return original(logits, params, context, **where)

        original = module.choose
        with patch.object(module, "choose", choose):
            run(engine)
        assert (bad.n_output, bad.finish_reason, type(bad.error)) == (5, "error", ZeroDivisionError)
        assert good.output == by_hand(toy, [1], 20)

    @pytest.mark.parametrize("failure", [KeyboardInterrupt(), RuntimeError("machine")])
    def test_an_interrupted_step_ends_all_requests_and_leaves_a_usable_engine(self, toy, failure):
        engine = engine_of(toy(fail_at=(3, failure)), max_batch=2)
        requests = [engine.add_request([n], GREEDY) for n in range(4)]
        with pytest.raises(type(failure)):
            run(engine)
        assert [r.finish_reason for r in requests] == ["abort"] * 4
        assert not engine.has_unfinished
        engine.check()
        again = engine.add_request([1], GREEDY)
        run(engine)
        assert again.output == by_hand(toy, [1], 20)

    def test_prompts_that_cannot_be_used(self, toy):
        engine = engine_of(toy())
        for prompt, message in (
            ([], "no tokens"),
            ([1] * 64, "64 tokens; at most 63 fit into a context of 64"),
            ([1, 13], "token id 13; allowed: 0 ... 12"),
            ([-1], "token id -1"),
            ([1.0], "1.0 among its token ids"),
            ([True], "True among its token ids"),
            (["1"], "'1' among its token ids"),
        ):
            with pytest.raises(PromptError, match=message):
                engine.add_request(prompt, GREEDY)
        assert not engine.has_unfinished
        assert engine.add_request(np.array([1, 2]), GREEDY).n_prompt == 2

    def test_parameters_that_do_not_fit_the_model(self, toy):
        engine = engine_of(toy())
        for params, message in (
            (SamplingParams(logit_bias={13: 1.0}), "logit_bias has token id 13; allowed: 0 ... 12"),
            (SamplingParams(stop_token_ids=[99]), "stop_token_ids has token id 99"),
        ):
            with pytest.raises(InvalidParameterError, match=message):
                engine.add_request([1], params)

    def test_sizes_that_contradict_each_other(self, toy):
        for options, message in (
            ({"kv_tokens": 63}, "kv_tokens is 63; allowed: at least context_length, which is 64"),
            ({"max_batch": 0}, "max_batch is 0"),
            (
                {"max_batch": 9, "token_budget": 8},
                "token_budget is 8; allowed: at least max_batch, which is 9",
            ),
        ):
            with pytest.raises(InvalidParameterError, match=message):
                engine_of(toy(), **options)


class TestReports:
    def test_a_fresh_seed_is_drawn_and_can_be_used_again(self, toy):
        params = SamplingParams(max_tokens=20, ignore_eos=True)
        first, second = alone(toy, [1], params), alone(toy, [1], params)
        assert first.seed != second.seed
        again = alone(toy, [1], SamplingParams(max_tokens=20, ignore_eos=True, seed=first.seed))
        assert again.output == first.output

    def test_a11_logprobs_are_of_the_raw_distribution(self, toy):
        raw = toy().logits([1, 2]).astype(float)
        expected = raw - np.log(np.exp(raw).sum())
        params = SamplingParams(max_tokens=1, temperature=0.3, top_k=1, logit_bias={5: 50.0}, logprobs=2)
        (found,) = alone(toy, [1, 2], params).logprobs
        assert found.token_id == 5
        assert found.logprob == pytest.approx(expected[5])
        assert [v for _, v in found.top] == pytest.approx(sorted(expected)[::-1][:2])
        json.dumps(found.top, allow_nan=False)

    def test_a_prompt_is_scored_whatever_is_cached_and_so_many_rows_in_a_step(self, toy):
        prompt = [(i * 7) % 11 for i in range(150)]
        params = SamplingParams(max_tokens=2, ignore_eos=True, temperature=0, prompt_logprobs=1)
        backend = toy()
        engine = engine_of(backend, context_length=256, kv_tokens=512, token_budget=512)
        engine.add_request(prompt, GREEDY)
        run(engine)
        backend.batch_sizes.clear()
        requests = [engine.add_request(prompt, params) for _ in range(2)]
        run(engine)
        assert backend.batch_sizes == [64, 64, 22 + 42, 1 + 64, 44, 1]
        expected = [logprob(backend.logits(prompt[:i]), prompt[i], 1) for i in range(1, 150)]
        for request in requests:
            assert (request.prompt_logprobs, request.n_cached) == (expected, 0)
            assert request.output == by_hand(toy, prompt, 2)

    def test_a_prompt_that_cannot_be_scored_fails_alone(self, toy):
        engine = engine_of(toy(poison={5: np.nan}), token_budget=16)
        failing = engine.add_request(
            [1] * 20 + [5] + [2] * 20, dataclasses.replace(GREEDY, prompt_logprobs=0)
        )
        at_its_end = engine.add_request([3, 5, 4], dataclasses.replace(GREEDY, prompt_logprobs=0))
        other = engine.add_request([1, 2], SamplingParams(temperature=0, max_tokens=1))
        with pytest.warns(RuntimeWarning, match="13 of 13 logits are NaN"):
            run(engine)
        for request, n in ((failing, 20), (at_its_end, 1)):
            assert (request.finish_reason, request.output, len(request.prompt_logprobs)) == ("error", [], n)
            assert isinstance(request.error, GenerationError)
            assert request.arrived_s < request.started_s < request.first_token_s
        assert other.output == by_hand(toy, [1, 2], 1)
        assert engine.statistics().pages_used == 0

    def test_times_ascend(self, toy):
        r = alone(toy, [1, 2], GREEDY)
        assert 0 < r.arrived_s <= r.started_s < r.first_token_s < r.last_token_s
