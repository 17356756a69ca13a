"""A sequence that outgrows its rotary list: every key is computed anew, and nothing else changes (case B8)."""

import numpy as np
import pytest

from ropewalk.engine.engine import Engine
from ropewalk.params import SamplingParams

SWITCH = 20


def alone(toy, prompt, n):
    """Greedy tokens by the definition: the list follows the number of known tokens."""
    backend = toy()
    tokens = list(prompt)
    for _ in range(n):
        tokens.append(int(np.argmax(backend.logits(tokens, long=len(tokens) > SWITCH))))
    return tokens[len(prompt) :]


def engine_of(toy, **options):
    options = {"context_length": 128, "kv_tokens": 256, "token_budget": 16, "max_batch": 4} | options
    return Engine(toy(rope_switch=SWITCH), **options)


def run(engine, requests):
    while engine.has_unfinished:
        engine.step()
        engine.check()
    return [request.output for request in requests]


def greedy(n, **more):
    return SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, **more)


@pytest.mark.parametrize("length", [1, 15, 16, 19, 20, 21, 40])
@pytest.mark.parametrize("options", [{}, {"prefix_cache": False}, {"keep_cache": False}], ids=str)
def test_tokens_are_those_of_the_definition_b8(toy, length, options):
    """Prompts below, at and beyond the limit, whose outputs cross it or not."""
    prompt = [i * 5 % 13 for i in range(length)]
    engine = engine_of(toy, **options)
    assert run(engine, [engine.add_request(prompt, greedy(30))]) == [alone(toy, prompt, 30)]
    assert run(engine, [engine.add_request(prompt, greedy(30))]) == [alone(toy, prompt, 30)]


def test_short_and_long_sequences_share_a_batch_but_no_pages_b8(toy):
    """All begin with the same sixteen tokens, a page; those beyond the limit have other keys for them."""
    start = [i * 5 % 13 for i in range(16)]
    prompts = [start + more for more in ([1], [1, 2, 3, 4], [1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6] * 3)]
    engine = engine_of(toy)
    requests = [engine.add_request(prompt, greedy(25)) for prompt in prompts]
    assert run(engine, requests) == [alone(toy, prompt, 25) for prompt in prompts]


def test_completions_of_one_prompt_that_cross_at_different_times_b8(toy):
    prompt = [i * 5 % 13 for i in range(18)]
    engine = engine_of(toy, kv_tokens=128)
    together = engine.add_request(
        prompt, SamplingParams(temperature=1.0, seed=3, n=3, max_tokens=20, ignore_eos=True)
    )
    outputs = run(engine, together.group)
    for request, output in zip(together.group, outputs, strict=True):
        single = engine_of(toy, prefix_cache=False)
        params = SamplingParams(temperature=1.0, seed=request.seed, max_tokens=20, ignore_eos=True)
        again = single.add_request(prompt, params)
        again.seed = request.seed
        assert run(single, [again]) == [output]


def test_preemption_beyond_the_limit_changes_nothing_b8(toy):
    """A pool for one context: the second request waits, or gives up its pages, again and again."""
    engine = engine_of(toy, context_length=64, kv_tokens=64)
    prompts = [[i * 5 % 13 for i in range(n)] for n in (14, 18, 30)]
    requests = [engine.add_request(prompt, greedy(30)) for prompt in prompts]
    assert run(engine, requests) == [alone(toy, prompt, 30) for prompt in prompts]
    assert engine.scheduler.n_preempted > 0


def test_a_fork_from_before_the_limit_of_a_request_beyond_it_b8(toy):
    """The keys that the fork could take over are of the other list, so it computes its own."""
    prompt = [i * 5 % 13 for i in range(16)]
    engine = engine_of(toy)
    request = engine.add_request(prompt, greedy(20))
    while request.n_output < 10:
        engine.step()
    fork = engine.fork(request, greedy(20), n_output=2)
    assert run(engine, [request, fork]) == [alone(toy, prompt, 20)] * 2


def test_a_window_that_slides_back_below_the_limit_b8(toy):
    """A context of 32 drops half of itself when it is full: then the short list holds again, for other positions."""
    prompt = [i * 5 % 13 for i in range(12)]
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, slide=True)
    options = {"context_length": 32, "kv_tokens": 64}
    kept = engine_of(toy, **options)
    fresh = engine_of(toy, keep_cache=False, **options)
    requests = [engine.add_request(prompt, params) for engine in (kept, fresh)]
    window_sizes = set()
    while kept.has_unfinished:
        kept.step()
        kept.check()
        window_sizes.add(requests[0].n_window)
    run(fresh, [])
    assert requests[0].n_dropped > 0
    assert min(window_sizes) <= SWITCH < max(window_sizes)
    assert requests[0].output == requests[1].output
