"""Randomised schedules over tiny pools: every request gets the tokens it gets alone, and the books are always right.

ROPEWALK_SCHEDULES sets how many schedules are tried; each has up to 60 actions, and as many steps as it then takes.
"""

import dataclasses
import os
import tempfile
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ropewalk.engine.engine import Engine
from ropewalk.engine.persist import PageStore
from ropewalk.engine.sampler import Context, choose, logprob
from ropewalk.errors import InvalidParameterError
from ropewalk.params import SamplingParams

END = 12
CONTEXT = 64
SCHEDULES = int(os.environ.get("ROPEWALK_SCHEDULES", "60"))

knobs = st.builds(
    SamplingParams,
    n=st.sampled_from([1, 1, 1, 2, 3, 5]),
    max_tokens=st.integers(4, 40),
    min_tokens=st.integers(0, 4),
    slide=st.sampled_from([False, False, True]),
    keep_tokens=st.sampled_from([None, 1, 16, 20, 32]),
    temperature=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    top_k=st.sampled_from([0, 3]),
    top_p=st.sampled_from([1.0, 0.8]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    presence_penalty=st.sampled_from([0.0, 0.7]),
    seed=st.integers(0, 2**64 - 1),
    stop_token_ids=st.sampled_from([(), (3,)]),
    ignore_eos=st.booleans(),
    logprobs=st.sampled_from([None, 0, 2]),
    prompt_logprobs=st.sampled_from([None, None, None, 0, 2]),
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


@dataclasses.dataclass
class ByHand:
    """What a request is without an engine: a loop over the model and the sampler, after `n_forced` tokens of output."""

    output: list
    logprobs: list
    finish_reason: str
    stop_reason: int | None = None

    @classmethod
    def run(cls, model, request, n_forced):
        params, n_prompt = request.params, request.n_prompt
        ends = frozenset() if params.ignore_eos else frozenset([END])
        tokens = request.tokens[: n_prompt + n_forced].tolist()
        made = cls([], request.logprobs[:n_forced], "")
        window, keep = [], min(params.keep_tokens or 0, n_prompt)
        for token in tokens:
            window = cls.after(window, token, keep)
        while not made.finish_reason:
            logits = model.logits(window)
            prompt, output = np.split(np.array(tokens, np.int32), [n_prompt])
            context = Context(prompt, output, ends | params.stop_ids)
            token = choose(logits, params, context, seed=request.seed, position=len(tokens))
            if params.logprobs is not None:
                made.logprobs.append(logprob(logits, token, params.logprobs))
            tokens.append(token)
            window = cls.after(window, token, keep)
            if token in ends:
                made.finish_reason = "stop"
            elif token in params.stop_ids:
                made.finish_reason, made.stop_reason = "stop", token
            elif len(tokens) - n_prompt == params.max_tokens or (len(tokens) == CONTEXT and not params.slide):
                made.finish_reason = "length"
        made.output = tokens[n_prompt:]
        return made

    @staticmethod
    def prompt_logprobs(model, request):
        """What is told of the prompt: nothing unless it was asked for, and of the first completion alone."""
        prompt, n_top = request.tokens[: request.n_prompt].tolist(), request.params.prompt_logprobs
        if n_top is None or request.index:
            return []
        return [logprob(model.logits(prompt[:i]), prompt[i], n_top) for i in range(1, len(prompt))]

    @staticmethod
    def after(window, token, keep):
        """What the model sees once a token is added: with half of what is not kept gone if the context was full."""
        window = [*window, token]
        if len(window) == CONTEXT:
            del window[keep : keep + (CONTEXT - keep) // 2 // 16 * 16]
        return window


def fork(engine, data, request):
    """Fork a request in any state where it, or any earlier part of it, can be forked."""
    params = dataclasses.replace(
        data.draw(st.sampled_from([request.params, data.draw(knobs)])),
        n=1,
        seed=data.draw(st.integers(0, 2**64 - 1)),
        logprobs=data.draw(st.sampled_from([None, request.params.logprobs])),
        prompt_logprobs=None,
    )
    n_output = data.draw(st.one_of(st.none(), st.integers(0, request.n_output)))
    taken = request.output if n_output is None else request.output[:n_output]
    ends = {*params.stop_ids, *([] if params.ignore_eos else [END])}
    room = params.max_tokens if params.slide else min(params.max_tokens, CONTEXT - request.n_prompt)
    if len(taken) >= room or ends & set(taken):
        with pytest.raises(InvalidParameterError):
            engine.fork(request, params, n_output=n_output)
        return []
    return [(engine.fork(request, params, n_output=n_output), len(taken))]


@given(st.data())
@settings(max_examples=SCHEDULES, deadline=None, suppress_health_check=list(HealthCheck))
def test_d3_randomised_schedules_equal_each_request_alone(toy, data):
    """Requests join, fork, slide, hit prefixes, are preempted and aborted at any step and in any batch size."""
    play(toy, data)


@given(st.data())
@settings(max_examples=max(1, SCHEDULES // 4), deadline=None, suppress_health_check=list(HealthCheck))
def test_d3_randomised_schedules_with_pages_on_disk_equal_each_request_alone(toy, data):
    """Pages that the small pool forgets come back from a folder; what is written is there at once."""
    with tempfile.TemporaryDirectory() as folder, patch.object(PageStore, "_put", PageStore._do):
        engine = play(toy, data, cache_dir=folder, prefix_cache=True, keep_cache=True)
        engine.close()


def play(toy, data, **options):
    """Play a schedule, and return its engine; `options` are of the engine."""
    max_batch = data.draw(st.integers(1, 6))
    backend = toy()
    chosen = {
        "kv_tokens": data.draw(st.integers(CONTEXT, 200)),
        "token_budget": data.draw(st.integers(max_batch, 80)),
        "prefix_cache": data.draw(st.sampled_from([True, True, True, False])),
        "keep_cache": data.draw(st.sampled_from([True] * 7 + [False])),
    }
    engine = Engine(backend, context_length=CONTEXT, end_ids=[END], max_batch=max_batch, **(chosen | options))
    if engine.prefix_cache and data.draw(st.booleans()):
        engine.scheduler.tables.prefix._hash_of = lambda parent, block: b"1"
    asked, aborted = [], set()
    for _ in range(data.draw(st.integers(5, 60))):
        action = data.draw(st.sampled_from(["add", "add", *["step"] * 5, "fork", "fork", "abort"]))
        if action == "add":
            group = engine.add_request(
                data.draw(prompts()), data.draw(knobs), priority=data.draw(st.integers(0, 1))
            ).group
            asked += [(request, 0) for request in group]
        elif action == "step":
            engine.step()
        elif asked and action == "fork":
            asked += fork(engine, data, data.draw(st.sampled_from(asked))[0])
        elif asked:
            request = data.draw(st.sampled_from(asked))[0]
            if request.finish_reason is None:
                aborted.add(request)
            engine.finish(request)
        engine.check()
    end(engine)
    assert engine.statistics().pages_used == 0
    assert max(backend.batch_sizes, default=0) <= engine.scheduler.token_budget
    for request, n_forced in asked:
        expected = ByHand.run(backend, request, n_forced)
        scored = ByHand.prompt_logprobs(backend, request)
        if request in aborted:
            assert request.prompt_logprobs == scored[: len(request.prompt_logprobs)]
            assert request.finish_reason == "abort"
            assert request.output == expected.output[: request.n_output]
        else:
            assert (request.output, request.logprobs) == (expected.output, expected.logprobs)
            assert request.prompt_logprobs == scored
            assert (request.finish_reason, request.stop_reason) == (
                expected.finish_reason,
                expected.stop_reason,
            )
    return engine
