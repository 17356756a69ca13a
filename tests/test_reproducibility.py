"""Sixteen requests to the real model get the tokens that each gets alone, whatever happens around them.

Each schedule draws the order and the times of arrival, sizes of batches and chunks, and adds requests that are aborted.
ROPEWALK_ROUNDS sets how many schedules of each kind are tried.
"""

import dataclasses
import os
import random

import pytest

from ropewalk import LLM, SamplingParams
from ropewalk.engine.engine import Engine
from ropewalk.engine.speculative.lookup import PromptLookup
from ropewalk.engine.speculative.pace import Pace
from ropewalk.engine.speculative.speculator import Speculator

pytestmark = pytest.mark.filterwarnings("ignore:n_threads is 2, and this process may use 1 CPU:UserWarning")
ROUNDS = int(os.environ.get("ROPEWALK_ROUNDS", "1"))
CONTEXT = 128
TEXTS = (
    "The rope maker walked backwards all day, paying out hemp from the bundle around his waist, and his boy turned "
    "the wheel. The rope maker walked backwards all day, and in the evening the rope was as long as the lane was. ",
    "def area(width, height):\n    return width * height\n\n\ndef perimeter(width, height):\n    return 2 * (width + ",
)


@pytest.fixture(scope="module")
def models(smollm2):
    """The model on one thread and on two."""
    with LLM(smollm2, context_length=CONTEXT, n_threads=1) as one, LLM(smollm2, n_threads=2) as two:
        yield {1: one, 2: two}


@pytest.fixture(scope="module")
def tasks(models):
    """Sixteen prompts, most with a beginning that others have too, and their parameters."""
    chance = random.Random(7)
    texts = [models[1].encode(text) for text in TEXTS]
    made = []
    for i in range(16):
        text = texts[i % 3 // 2]
        prompt = text[: chance.choice([3, 15, 16, 17, 33, len(text)])] + text[: chance.choice([0, 0, 2])]
        params = SamplingParams(
            n=2 if i == 5 else 1,
            temperature=0.0 if i % 3 == 0 else 0.9,
            top_p=0.95 if i % 2 else 1.0,
            repetition_penalty=1.2 if i % 5 == 0 else 1.0,
            seed=chance.randrange(2**64),
            max_tokens=96 if i in (4, 8) else chance.randrange(6, 24),
            slide=i in (4, 8),
            keep_tokens=16 if i == 8 else None,
            ignore_eos=True,
            logprobs=1 if i % 4 == 0 else None,
        )
        made.append((prompt, params))
    return made


@pytest.fixture(scope="module")
def alone(models, tasks):
    """What each gets by itself: one thread, no prefix cache, nobody else."""
    engine = Engine(
        models[1].backend, context_length=CONTEXT, kv_tokens=CONTEXT, max_batch=1, prefix_cache=False
    )
    found = []
    for prompt, params in tasks:
        group = engine.add_request(prompt, params).group
        while engine.has_unfinished:
            engine.step()
        found.append([(r.output, r.logprobs) for r in group])
    assert len({tuple(output) for task in found for output, _ in task}) > 12  # they are no easy match
    return found


def play(engine, tasks, chance, *, burst=False):
    """Run the tasks in a random order, among others that are aborted; their groups, and forks of some."""
    order = random.Random(chance.random()).sample(range(len(tasks)), len(tasks))
    groups, forks, strangers = {}, [], []
    while order or engine.has_unfinished:
        if order and (burst or chance.random() < 0.3):
            i = order.pop()
            groups[i] = engine.add_request(*tasks[i], priority=chance.randrange(2)).group
            if chance.random() < 0.2:
                strangers.append(engine.add_request(tasks[i][0] * 2, SamplingParams(seed=i, max_tokens=40)))
            if burst:
                continue
        if strangers and chance.random() < 0.1:
            engine.finish(strangers.pop())
        known = [i for i, group in groups.items() if group[0].n_output and group[0].finish_reason is None]
        if known and chance.random() < 0.05:
            i = chance.choice(known)
            first = groups[i][0]
            forks.append((i, engine.fork(first, dataclasses.replace(first.params, n=1))))
        engine.step()
        engine.check()
    return groups, forks


def check(played, alone):
    groups, forks = played
    for i, expected in enumerate(alone):
        assert [(r.output, r.logprobs) for r in groups[i]] == expected
    for i, fork in forks:  # with the same seed: what it would have drawn, it draws
        assert (fork.output, fork.logprobs) == alone[i][0]


KINDS = {
    "all at once": ({"max_batch": 16, "kv_tokens": 4096}, 2),
    "small chunks": ({"max_batch": 6, "kv_tokens": 1024}, 1),
    "no prefix cache": ({"max_batch": 16, "kv_tokens": 2048, "prefix_cache": False}, 2),
    "few pages": ({"max_batch": 5, "kv_tokens": 192}, 2),
    "few pages, no prefix cache": ({"max_batch": 8, "kv_tokens": 144, "prefix_cache": False}, 1),
    "drafts": ({"max_batch": 8, "kv_tokens": 1024, "speculator": PromptLookup}, 2),
    "drafts, few pages": ({"max_batch": 4, "kv_tokens": CONTEXT, "speculator": PromptLookup}, 1),
}


@pytest.mark.parametrize("kind", KINDS)
def test_d3_every_request_gets_its_own_tokens(models, tasks, alone, kind):
    options, n_threads = KINDS[kind]
    for number in range(ROUNDS):
        chance = random.Random(f"{kind} {number}")
        made = dict(options)
        if "speculator" in made:
            pace = (
                Pace() if kind == "drafts" else None
            )  # every guess is checked, or those that pay at the moment
            made["speculator"] = Speculator(PromptLookup(), chance.randrange(1, 16), pace)
        budget = 512 if kind == "all at once" else chance.randrange(options["max_batch"], 48)
        engine = Engine(models[n_threads].backend, context_length=CONTEXT, token_budget=budget, **made)
        check(play(engine, tasks, chance, burst=kind == "all at once"), alone)
        found = engine.statistics()
        assert found.pages_used == 0
        assert found.preemptions > 0 or not kind.startswith("few pages")
        assert found.cached_tokens > 0 or not engine.prefix_cache
        assert found.accepted_tokens > 0 or kind != "drafts"


@pytest.mark.parametrize("cache_dtype", ["float16", "int8"])
def test_d3_so_do_those_that_find_their_beginnings_on_disk(models, tasks, cache_dtype, tmp_path):
    """An int8 cache has other tokens than a float16 one, and always the same."""
    outputs = []
    for n_threads in (1, 2):
        engine = Engine(
            models[n_threads].backend,
            context_length=CONTEXT,
            kv_tokens=1024,
            token_budget=32,
            cache_dtype=cache_dtype,
            cache_dir=tmp_path,
        )
        groups, _ = play(engine, tasks[:8], random.Random(n_threads))
        outputs.append([[(r.output, r.logprobs) for r in groups[i]] for i in range(8)])
        found = engine.statistics()
        engine.close()
    assert outputs[0] == outputs[1]
    assert found.disk_tokens > 0
    plain = Engine(
        models[1].backend, context_length=CONTEXT, kv_tokens=1024, prefix_cache=False, cache_dtype=cache_dtype
    )
    for (prompt, params), expected in zip(tasks[:3], outputs[0], strict=False):
        group = plain.add_request(prompt, params).group
        while plain.has_unfinished:
            plain.step()
        assert [(r.output, r.logprobs) for r in group] == expected
