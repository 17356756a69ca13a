"""The prefix cache: what is kept, how it is found, what is evicted, and that a hit never changes a token."""

import pytest

from ropewalk.engine.engine import Engine
from ropewalk.engine.pages import PagePool
from ropewalk.engine.prefix import PrefixCache, chained_hash
from ropewalk.params import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def block(number):
    return bytes([number]) * 64


def engine_of(backend, **options):
    return Engine(backend, **({"context_length": 64, "kv_tokens": 320} | options))


def ask(engine, prompt, params=GREEDY, **options):
    """The finished request."""
    request = engine.add_request(prompt, params, **options)
    while engine.has_unfinished:
        engine.step()
        engine.check()
    return request


def cold(toy, prompt, params=GREEDY):
    return ask(engine_of(toy(), prefix_cache=False), prompt, params).output


def text(n, start=0):
    return [(i * i + start) % 12 for i in range(n)]


class TestTree:
    @pytest.fixture
    def pool(self):
        return PagePool(6)

    @pytest.fixture
    def prefix(self, pool):
        return PrefixCache(pool)

    def test_a_page_is_found_below_the_page_before_it(self, pool, prefix):
        table = pool.allocate(2)
        first = prefix.add(None, block(1), table[0])
        second = prefix.add(first, block(2), table[1])
        assert prefix.find(None, block(1)) is first
        assert prefix.find(first, block(2)) is second
        assert prefix.find(None, block(2)) is None
        assert prefix.find(first, block(1)) is None
        prefix.check()

    def test_c3_the_same_tokens_after_another_page_are_another_page(self, pool, prefix):
        one, other = (prefix.add(None, block(b), *pool.allocate(1)) for b in (1, 2))
        after_one = prefix.add(one, block(3), *pool.allocate(1))
        assert prefix.find(other, block(3)) is None
        assert prefix.find(one, block(3)) is after_one

    def test_c3_colliding_hashes_are_told_apart(self, pool):
        prefix = PrefixCache(pool, lambda parent, block: b"1")
        one = prefix.add(None, block(1), *pool.allocate(1))
        two = prefix.add(None, block(2), *pool.allocate(1))
        below = prefix.add(one, block(1), *pool.allocate(1))
        assert prefix.find(None, block(1)) is one
        assert prefix.find(None, block(2)) is two
        assert prefix.find(one, block(1)) is below
        assert prefix.find(two, block(1)) is None
        assert prefix.find(None, block(3)) is None

    def test_the_hash_is_the_same_in_every_process(self):
        """A constant of the format: pages kept on disk would be looked up by it."""
        assert chained_hash(b"", bytes(64)).hex() == "532fe82fc5db1ef54fd5be9ba44b69b4"
        assert chained_hash(b"a", b"b") == chained_hash(b"", b"ab")  # so keys must all be of one length

    def test_the_least_recently_used_leaf_is_evicted_first(self, pool, prefix):
        """Blank pages first, then idle ones in order of release, a table from its end."""
        long, short = pool.allocate(3), pool.allocate(1)
        node = None
        for number, page in enumerate(long):
            node = prefix.add(node, block(number), page)
        prefix.add(None, block(9), *short)
        pool.release(long)
        pool.release(short)
        assert (pool.n_free, pool.n_idle) == (6, 4)
        pool.share(long[:1])  # its first page is in use again, and then idle again
        pool.release(long[:1])
        taken = []
        for _ in range(6):
            taken += pool.allocate(1)
            pool.check([taken])
            prefix.check()
        assert taken[2:] == [long[2], long[1], short[0], long[0]]
        assert prefix.n_pages == 0

    def test_check_sees_an_orphan(self, pool, prefix):
        table = pool.allocate(2)
        prefix.add(prefix.add(None, block(1), table[0]), block(2), table[1])
        prefix._nodes[table[0]].n_children = 0
        with pytest.raises(AssertionError):
            prefix.check()


class TestHits:
    @pytest.mark.parametrize(
        ("n", "hit"), [(1, 0), (15, 0), (16, 15), (17, 16), (31, 16), (32, 31), (33, 32), (48, 47)]
    )
    def test_c1_c2_a_prompt_that_comes_twice(self, toy, n, hit):
        """Whole pages are found, but the last token is always evaluated; what is reported was really skipped."""
        backend = toy()
        engine = engine_of(backend)
        prompt = text(n)
        first = ask(engine, prompt)
        backend.batch_sizes.clear()
        second = engine.add_request(prompt, GREEDY)
        engine.step()
        engine.check()
        assert second.n_computed == n  # not n + 1
        assert backend.batch_sizes == [n - hit]
        while engine.has_unfinished:
            engine.step()
            engine.check()
        assert first.output == second.output == cold(toy, prompt)
        assert (first.n_cached, second.n_cached) == (0, hit)
        found = engine.statistics()
        assert (found.prompt_tokens, found.cached_tokens, found.hit_rate) == (2 * n, hit, hit / (2 * n))
        assert found.computed_tokens == 2 * (n + 5) - hit

    @pytest.mark.parametrize("n", [1, 15, 16, 17, 32, 40])
    def test_c1_a_shorter_prompt_than_the_cached_one(self, toy, n):
        engine = engine_of(toy())
        whole = text(48)
        ask(engine, whole)
        assert ask(engine, whole[:n]).output == cold(toy, whole[:n])

    def test_c2_prompts_that_part_after_a_page(self, toy):
        engine = engine_of(toy())
        one, other = text(16) + [1] * 10, text(16) + [2] * 10
        for prompt, hit in ((one, 0), (other, 16), (one, 16), ([5, *one], 0)):
            request = ask(engine, prompt)
            assert (request.n_cached, request.output) == (hit, cold(toy, prompt))

    def test_output_is_found_by_the_next_turn_of_a_conversation(self, toy):
        engine = engine_of(toy())
        first = ask(engine, text(20), SamplingParams(temperature=0, max_tokens=16, ignore_eos=True))
        turn = text(20) + first.output + [1, 2, 3]
        assert ask(engine, turn).n_cached == 32  # 35 of its tokens were computed: the last output never is
        assert ask(engine, turn).output == cold(toy, turn)

    @pytest.mark.parametrize("n", [15, 16, 17, 31, 32, 33])
    def test_c3_a_hash_that_is_always_1(self, toy, n):
        engine = engine_of(toy())
        engine.scheduler.tables.prefix._hash_of = lambda parent, block: b"1"
        for start in (0, 1, 0, 2, 1, 0):
            prompt = text(n, start)
            assert ask(engine, prompt).output == cold(toy, prompt)
        assert engine.statistics().hit_rate > 0 or n == 15

    def test_c3_an_adapter_and_a_salt_of_the_same_name_share_nothing(self, toy):
        engine = engine_of(toy())
        keys = [
            (),
            [("adapter", "X")],
            [("salt", "X")],
            [("adapter", "X"), ("salt", "X")],
            [("adapter", "X"), ("salt", "")],
            [("adapter", 'X"], ["salt", "X')],
            [("adapterX", "")],
        ]
        for hit in (0, 32):
            assert [ask(engine, text(40), cache_key=key).n_cached for key in keys] == [hit] * len(keys)

    def test_c3_what_a_caller_calls_an_adapter_is_none(self, toy):
        engine = engine_of(toy(), adapters={"x": "X"})
        adapted = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, adapter="x")
        key = [("adapter", "X")]
        for hit in (0, 32):
            assert ask(engine, text(40), adapted).n_cached == hit
            assert ask(engine, text(40), cache_key=key).n_cached == hit
            assert ask(engine, text(40), adapted, cache_key=key).n_cached == hit
            assert ask(engine, text(40)).n_cached == hit

    def test_requests_that_arrive_together_compute_their_common_beginning_once(self, toy):
        backend = toy()
        engine = engine_of(backend, max_batch=8, token_budget=16)
        requests = [engine.add_request([*text(48), i], GREEDY) for i in range(5)]
        while engine.has_unfinished:
            engine.step()
            engine.check()
        assert [r.n_cached for r in requests] == [0, 48, 48, 48, 48]
        assert [r.output for r in requests] == [cold(toy, [*text(48), i]) for i in range(5)]

    def test_equal_pages_that_were_computed_at_once_are_kept_once(self, toy):
        engine = engine_of(toy())
        requests = [engine.add_request(text(40), GREEDY) for _ in range(4)]
        engine.step()
        engine.check()
        assert [r.n_cached for r in requests] == [0, 0, 0, 0]
        assert engine.statistics().pages_used == 2 + 4
        assert len({tuple(r.pages[:2]) for r in requests}) == 1

    def test_it_gives_way_to_requests(self, toy):
        engine = engine_of(toy(), kv_tokens=64)
        for start in range(6):
            assert ask(engine, text(50, start)).output == cold(toy, text(50, start))
        assert engine.statistics().preemptions == 0

    def test_off(self, toy):
        for options in ({"prefix_cache": False}, {"keep_cache": False}):
            engine = engine_of(toy(), **options)
            assert [ask(engine, text(40)).n_cached for _ in range(2)] == [0, 0]
            assert engine.statistics().pages_cached == 0
