"""Randomised schedules over tiny pools: every request gets the tokens it gets alone, and the books are always right.

ROPEWALK_SCHEDULES sets how many schedules are tried; each has up to 60 actions, and as many steps as it then takes.
"""

import os

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ropewalk.engine.engine import Engine
from ropewalk.params import SamplingParams

END = 12
SCHEDULES = int(os.environ.get("ROPEWALK_SCHEDULES", "60"))

knobs = st.builds(
    SamplingParams,
    n=st.sampled_from([1, 1, 1, 2, 3, 5]),
    max_tokens=st.one_of(st.none(), st.integers(4, 40)),
    min_tokens=st.integers(0, 4),
    temperature=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    top_k=st.sampled_from([0, 3]),
    top_p=st.sampled_from([1.0, 0.8]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    presence_penalty=st.sampled_from([0.0, 0.7]),
    seed=st.integers(0, 2**64 - 1),
    stop_token_ids=st.sampled_from([(), (3,)]),
    ignore_eos=st.booleans(),
    logprobs=st.sampled_from([None, 0, 2]),
)


@st.composite
def prompts(draw):
    """Beginnings of one of two texts, often at the border of a page, then perhaps something else."""
    text = [[(i * i) % 12 for i in range(50)], [(i * 5) % 11 for i in range(50)]][draw(st.integers(0, 1))]
    common = draw(st.sampled_from([0, 1, 15, 16, 17, 31, 32, 33, 48]))
    rest = draw(st.lists(st.integers(0, 11), max_size=14))
    return (text[:common] + rest) or [7]


def end(engine):
    while engine.has_unfinished:
        engine.step()
        engine.check()


def alone(toy, prompt, params, request):
    """What a completion is without neighbours, prefix cache or shortage."""
    engine = Engine(toy(), context_length=64, kv_tokens=64, end_ids=[END], prefix_cache=False)
    found = engine.add_request(prompt, SamplingParams(**(vars(params) | {"n": 1, "seed": request.seed})))
    end(engine)
    return found


@given(st.data())
@settings(max_examples=SCHEDULES, deadline=None, suppress_health_check=list(HealthCheck))
def test_d3_randomised_schedules_equal_each_request_alone(toy, data):
    """Requests join, fork, hit prefixes, are preempted and aborted at any step and in any batch size."""
    max_batch = data.draw(st.integers(1, 6))
    backend = toy()
    engine = Engine(
        backend,
        context_length=64,
        kv_tokens=data.draw(st.integers(64, 200)),
        end_ids=[END],
        max_batch=max_batch,
        token_budget=data.draw(st.integers(max_batch, 80)),
        prefix_cache=data.draw(st.sampled_from([True, True, True, False])),
        keep_cache=data.draw(st.sampled_from([True] * 7 + [False])),
    )
    if engine.prefix_cache and data.draw(st.booleans()):
        engine.scheduler.tables.prefix._hash_of = lambda parent, block: b"1"
    asked, aborted = [], set()
    for _ in range(data.draw(st.integers(5, 60))):
        action = data.draw(st.sampled_from(["add", "add", "step", "step", "step", "step", "abort"]))
        if action == "add":
            prompt, params = data.draw(prompts()), data.draw(knobs)
            group = engine.add_request(prompt, params, priority=data.draw(st.integers(0, 1))).group
            asked += [(request, prompt, params) for request in group]
        elif action == "step":
            engine.step()
        elif asked:
            request = data.draw(st.sampled_from([request for request, _, _ in asked]))
            if request.finish_reason is None:
                aborted.add(request)
            engine.finish(request)
        engine.check()
    end(engine)
    assert engine.statistics().pages_used == 0
    assert max(backend.batch_sizes, default=0) <= engine.scheduler.token_budget
    for request, prompt, params in asked:
        expected = alone(toy, prompt, params, request)
        if request in aborted:
            assert request.finish_reason == "abort"
            assert request.output == expected.output[: request.n_output]
        else:
            assert (request.output, request.logprobs) == (expected.output, expected.logprobs)
            assert (request.finish_reason, request.stop_reason) == (
                expected.finish_reason,
                expected.stop_reason,
            )
