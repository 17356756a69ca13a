"""Who runs when: admission, preemption, priorities, the budget, and several completions of one prompt."""

import pytest

from ropewalk.engine.draws import seed_of
from ropewalk.engine.engine import Engine
from ropewalk.errors import PromptError
from ropewalk.params import SamplingParams


def greedy(n):
    return SamplingParams(temperature=0, max_tokens=n, ignore_eos=True)


def engine_of(backend, **options):
    return Engine(backend, **({"context_length": 64, "kv_tokens": 64} | options))


def run(engine):
    while engine.has_unfinished:
        engine.step()
        engine.check()


def alone(toy, prompt, params, **options):
    engine = engine_of(toy(), **options)
    request = engine.add_request(prompt, params)
    run(engine)
    return request.output


class TestAdmission:
    def test_it_leaves_a_page_for_everybody_that_runs(self, toy):
        engine = engine_of(toy(), kv_tokens=64)
        first = engine.add_request([1] * 17, greedy(20))  # two pages, and a third one soon
        second = engine.add_request([2], greedy(20))  # one page, and a second one soon
        engine.step()
        engine.check()
        assert engine.scheduler.running == [first]
        assert [len(first.pages), len(second.pages)] == [2, 0]
        run(engine)
        assert second.output == alone(toy, [2], greedy(20))

    def test_one_that_ends_within_its_page_needs_no_other(self, toy):
        engine = engine_of(toy(), kv_tokens=64)
        requests = [engine.add_request([i], greedy(16)) for i in range(4)]
        engine.step()
        assert engine.scheduler.running == requests
        run(engine)
        assert engine.statistics().preemptions == 0

    def test_nobody_overtakes_the_first_that_waits(self, toy):
        engine = engine_of(toy(), kv_tokens=64)
        engine.add_request([1] * 17, greedy(20))
        large = engine.add_request([2] * 33, greedy(4))
        small = engine.add_request([3], greedy(2))
        engine.step()
        assert engine.scheduler.waiting == [large, small]
        run(engine)
        assert large.first_token_s < small.first_token_s

    def test_a_table_grows_with_its_sequence(self, toy):
        engine = engine_of(toy(), kv_tokens=64)
        request = engine.add_request([1] * 14, greedy(20))
        held = []
        while engine.has_unfinished:
            held.append(len(request.pages))
            engine.step()
            engine.check()
        assert held == [0, 1, 1] + [1] + [2] * 16  # 14, 15, 16 computed, then 17 ... 32

    def test_c8_what_can_never_fit_is_refused_with_both_numbers(self, toy):
        backend = toy()
        engine = engine_of(backend, kv_tokens=64)
        with pytest.raises(PromptError, match="64 tokens; at most 63 fit into a context of 64"):
            engine.add_request([1] * 64, greedy(1))
        assert not engine.has_unfinished
        assert backend.batch_sizes == []

    def test_c8_an_output_that_reaches_the_end_of_the_context_ends_with_length(self, toy):
        engine = engine_of(toy())
        request = engine.add_request([1] * 60, greedy(100))
        run(engine)
        assert (request.n_output, request.finish_reason) == (4, "length")


class TestPreemption:
    @pytest.mark.parametrize("prefix_cache", [True, False])
    def test_the_youngest_waits_and_continues_with_the_same_tokens(self, toy, prefix_cache):
        engine = engine_of(toy(), kv_tokens=80, prefix_cache=prefix_cache)
        requests = [engine.add_request([i + 1] * 3, greedy(60)) for i in range(3)]
        run(engine)
        assert [r.output for r in requests] == [alone(toy, [i + 1] * 3, greedy(60)) for i in range(3)]
        assert requests[0].n_preempted == 0
        assert requests[1].n_preempted >= 1
        assert engine.statistics().preemptions == sum(r.n_preempted for r in requests)
        ends = [r.last_token_s for r in requests]
        assert ends == sorted(ends)

    def test_what_is_still_kept_is_not_computed_again(self, toy):
        counts = []
        for prefix_cache in (True, False):
            engine = engine_of(toy(), kv_tokens=80, prefix_cache=prefix_cache)
            requests = [engine.add_request([i + 1] * 3, greedy(60)) for i in range(3)]
            run(engine)
            counts.append(engine.statistics().computed_tokens)
            assert [r.n_cached for r in requests] == [0, 0, 0]  # its own pages are no hits of its prompt
        assert 3 * 62 < counts[0] < counts[1]

    def test_everybody_ends_though_all_want_the_whole_pool(self, toy):
        engine = engine_of(toy(), max_batch=8)
        requests = [engine.add_request([i] * (5 * i + 1), greedy(64)) for i in range(10)]
        run(engine)
        for i, request in enumerate(requests):
            assert request.output == alone(toy, [i] * (5 * i + 1), greedy(64))

    def test_time_to_first_token_of_a_preempted_prompt_is_counted_once(self, toy):
        engine = engine_of(toy(), kv_tokens=80)
        requests = [engine.add_request([i + 1] * 3, greedy(60)) for i in range(3)]
        run(engine)
        found = engine.statistics()
        assert (found.first_tokens, found.prompt_tokens, found.generated_tokens) == (3, 9, 180)
        assert found.time_to_first_token_s == pytest.approx(
            sum(r.first_token_s - r.arrived_s for r in requests) / 3
        )
        assert found.time_per_token_s == pytest.approx(
            sum(r.last_token_s - r.first_token_s for r in requests) / 177
        )


class TestPriorities:
    def test_smaller_ones_first_then_in_order_of_arrival(self, toy):
        engine = engine_of(toy(), max_batch=1)
        order = [engine.add_request([1], greedy(2), priority=p) for p in (1, 0, 1, -5, 0)]
        engine.step()
        engine.check()
        run(engine)
        by_end = sorted(order, key=lambda r: r.last_token_s)
        assert [order.index(r) for r in by_end] == [3, 1, 4, 0, 2]

    def test_the_pages_of_the_last_in_rank_go_first(self, toy):
        engine = engine_of(toy(), kv_tokens=80)
        low = engine.add_request([1] * 3, greedy(60), priority=1)
        engine.step()
        high = engine.add_request([2] * 3, greedy(60), priority=0)
        run(engine)
        assert (high.n_preempted, low.n_preempted) == (0, 1)
        assert high.last_token_s < low.last_token_s
        assert low.output == alone(toy, [1] * 3, greedy(60))


class TestBudget:
    def test_neither_a_long_prompt_nor_its_neighbour_starves(self, toy):
        """No step is larger than the budget, the neighbour gets a token in each, the prompt all the rest."""
        backend = toy()
        backend.config.context_length = 5000
        engine = engine_of(backend, context_length=4600, kv_tokens=6000, max_batch=4, token_budget=256)
        neighbour = engine.add_request([1], greedy(100))
        engine.step()
        long = engine.add_request([i % 12 for i in range(4096)], greedy(2))
        steps = 0
        while not long.n_output:
            engine.step()
            steps += 1
            assert neighbour.n_output == 1 + steps
        engine.check()
        assert steps == -(-4096 // 255)
        assert max(backend.batch_sizes) == 256

    def test_prompts_that_keep_coming_do_not_hold_up_an_older_long_one(self, toy):
        engine = engine_of(toy(), context_length=512, kv_tokens=2048, max_batch=8, token_budget=16)
        long = engine.add_request([i % 11 for i in range(400)], greedy(2))
        steps = 0
        while not long.n_output:
            engine.add_request([steps % 12] * 10, greedy(8))
            engine.step()
            engine.check()
            steps += 1
        assert steps <= 400 // 5, "half of what seven that decode leave of 16"

    def test_a_short_prompt_is_read_beside_an_older_long_one(self, toy):
        backend = toy()
        backend.config.context_length = 5000
        engine = engine_of(backend, context_length=4600, kv_tokens=9000, max_batch=4, token_budget=256)
        long = engine.add_request([i % 12 for i in range(4096)], greedy(2))
        engine.step()
        short = engine.add_request([3] * 60, greedy(2))
        less = engine.add_request([4] * 8, greedy(2), priority=1)
        engine.step()
        engine.check()
        assert (short.n_output, long.n_computed, less.n_computed) == (1, 256 + 196, 0)
        run(engine)
        assert max(backend.batch_sizes) == 256
        assert less.first_token_s > long.first_token_s, "its priority is not theirs"
        assert short.output == alone(toy, [3] * 60, greedy(2))

    def test_equally_long_prompts_are_read_one_after_the_other(self, toy):
        """In turns, all of them would wait as long as the last one."""
        engine = engine_of(toy(), kv_tokens=640, max_batch=4, token_budget=16)
        requests = [engine.add_request([i] * 40, greedy(1)) for i in range(3)]
        n_steps = []
        while not all(request.n_output for request in requests):
            engine.step()
            n_steps.append([request.n_output for request in requests])
        assert n_steps.index([1, 0, 0]) == 2 and n_steps.index([1, 1, 0]) == 4 and len(n_steps) == 8

    def test_a_budget_that_decoding_uses_up_still_lets_a_prompt_advance(self, toy):
        engine = engine_of(toy(), kv_tokens=640, max_batch=4, token_budget=4)
        for i in range(3):
            engine.add_request([i], greedy(60))
        engine.step()
        engine.step()
        late = engine.add_request([5] * 20, greedy(2))
        for _ in range(20):
            engine.step()
        assert late.n_output == 1


class TestCompletions:
    PARAMS = SamplingParams(n=4, seed=11, max_tokens=24, ignore_eos=True, logprobs=1)

    def one(self, toy, prompt, seed):
        return alone(toy, prompt, SamplingParams(seed=seed, max_tokens=24, ignore_eos=True))

    @pytest.mark.parametrize("n_prompt", [1, 2, 16, 17, 30, 32])
    @pytest.mark.parametrize(
        "options", [{}, {"prefix_cache": False}, {"keep_cache": False}, {"max_batch": 2}]
    )
    def test_each_is_the_completion_of_its_own_seed(self, toy, n_prompt, options):
        engine = engine_of(toy(), kv_tokens=320, **options)
        prompt = [i % 7 for i in range(n_prompt)]
        group = engine.add_request(prompt, self.PARAMS).group
        run(engine)
        assert [r.index for r in group] == [0, 1, 2, 3]
        assert [r.seed for r in group] == [11] + [seed_of(11, i) for i in (1, 2, 3)]
        assert [r.output for r in group] == [self.one(toy, prompt, r.seed) for r in group]
        assert len({tuple(r.output) for r in group}) == 4

    @pytest.mark.parametrize("prefix_cache", [True, False])
    def test_they_share_the_pages_of_the_prompt_until_they_write(self, toy, prefix_cache):
        backend = toy()
        engine = engine_of(backend, kv_tokens=320, prefix_cache=prefix_cache)
        group = engine.add_request([i % 7 for i in range(40)], self.PARAMS).group
        engine.step()
        engine.check()
        assert engine.statistics().pages_used == 3
        engine.step()
        engine.check()
        assert backend.batch_sizes == [40, 4]  # the others evaluate the prompt's last token
        assert engine.statistics().pages_used == 2 + 4
        assert len({tuple(r.pages[:2]) for r in group}) == 1
        run(engine)

    def test_a_prompt_that_is_read_in_chunks_is_read_once(self, toy):
        backend = toy()
        engine = engine_of(backend, kv_tokens=320, token_budget=16, prefix_cache=False)
        engine.add_request([i % 7 for i in range(40)], self.PARAMS)
        for _ in range(4):
            engine.step()
            engine.check()
        assert backend.batch_sizes == [16, 16, 8, 4]
        run(engine)

    def test_64_of_them_in_a_small_batch_and_a_small_pool(self, toy):
        engine = engine_of(toy(), kv_tokens=80, max_batch=5)
        params = SamplingParams(n=64, seed=2, max_tokens=24, ignore_eos=True)
        group = engine.add_request([1, 2, 3], params).group
        run(engine)
        assert [r.output for r in group] == [self.one(toy, [1, 2, 3], r.seed) for r in group]

    def test_one_that_is_aborted_leaves_the_others_alone(self, toy):
        engine = engine_of(toy(), kv_tokens=320)
        group = engine.add_request([1] * 20, self.PARAMS).group
        for request in (group[0], group[2]):
            engine.step()
            engine.step()
            engine.finish(request)
            engine.check()
        run(engine)
        assert [r.finish_reason for r in group] == ["abort", "length", "abort", "length"]
        for request in (group[1], group[3]):
            assert request.output == self.one(toy, [1] * 20, request.seed)

    def test_seeds_are_words_of_the_generator_that_no_draw_uses(self):
        assert seed_of(7, 0) == 7
        assert len({seed_of(s, i) for s in range(50) for i in range(1, 64)}) == 50 * 63
        assert seed_of(0, 1) == 0xD037F8C3F9A1D176
