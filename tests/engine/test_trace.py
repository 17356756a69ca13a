"""What a trace tells of steps and draws, on a toy model and on the real one, and that nothing depends on it."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from ropewalk import LLM, SamplingParams
from ropewalk.engine.draws import uniform
from ropewalk.engine.engine import Engine
from ropewalk.engine.sampler import Candidates, Context, choose, descending, draw, scaled, steps
from ropewalk.engine.speculative.lookup import PromptLookup
from ropewalk.engine.speculative.pace import Pace
from ropewalk.engine.speculative.speculator import Speculator
from ropewalk.engine.trace import GROUPS, explain
from ropewalk.errors import InvalidParameterError
from ropewalk.kernels.clock import PARTS

KNOBS = SamplingParams(
    temperature=0.7,
    top_k=9,
    top_p=0.9,
    min_p=0.02,
    typical_p=0.95,
    repetition_penalty=1.2,
    frequency_penalty=0.1,
    logit_bias={3: 1.0},
    min_tokens=2,
    max_tokens=20,
    seed=5,
)
CONTEXT = Context(np.array([1, 2], np.int32), np.array([4], np.int32), ends=[0])


def logits(seed=0, n=40):
    return np.random.default_rng(seed).normal(0, 3, n).astype(np.float32)


# ---- a draw


def test_stages_are_the_samplers_own_in_their_order():
    stages, _ = explain(logits(), KNOBS, CONTEXT, 7, 3)
    assert [stage.name for stage in stages] == [
        "raw",
        "logit_bias",
        "repetition_penalty",
        "frequency_presence_penalty",
        "min_tokens",
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "typical_p",
    ]


def test_entropy_and_what_was_removed():
    """p = 1/2, 1/4, 1/8, 1/8: 1.75 bits; top-k 2 takes 1/4 away and leaves 2/3 and 1/3."""
    p = np.array([0.5, 0.25, 0.125, 0.125])
    params = SamplingParams(top_k=2)
    nothing = Context(np.zeros(0, np.int32), np.zeros(0, np.int32))
    (raw, cut), candidates = explain(np.log(p).astype(np.float32), params, nothing, 1, 3)
    assert raw.entropy == pytest.approx(1.75 * math.log(2))
    assert (raw.n_candidates, raw.n_removed, raw.removed_probability) == (4, 0, 0)
    assert cut.entropy == pytest.approx(-(2 / 3 * math.log(2 / 3) + 1 / 3 * math.log(1 / 3)))
    assert (cut.n_candidates, cut.n_removed) == (2, 2)
    assert cut.removed_probability == pytest.approx(0.25)
    assert [c.token_id for c in candidates] == [0, 1, 2]
    assert [c.probabilities for c in candidates] == [
        pytest.approx((0.5, 2 / 3)),
        pytest.approx((0.25, 1 / 3)),
        pytest.approx((0.125, 0)),
    ]


def test_a_masked_token_has_no_probability_afterwards():
    (_, masked), candidates = explain(logits(), SamplingParams(min_tokens=3), CONTEXT, 7, 40)
    p = dict.fromkeys(range(40), 0.0) | {c.token_id: c.probabilities for c in candidates}
    assert masked.name == "min_tokens"
    assert masked.n_removed == 1
    assert masked.removed_probability == pytest.approx(p[0][0])
    assert p[0][1] == 0
    assert sum(q[1] for q in p.values()) == pytest.approx(1)


def test_the_drawn_token_is_told_however_unlikely_and_each_stage_adds_up():
    rarest = int(np.argmin(logits()))
    stages, candidates = explain(logits(), SamplingParams(temperature=2.0), CONTEXT, rarest, 40)
    assert len(candidates) == 40
    for i in range(len(stages)):
        assert sum(c.probabilities[i] for c in candidates) == pytest.approx(1)
    _, few = explain(logits(), SamplingParams(temperature=2.0), CONTEXT, rarest, 0)
    assert [c.token_id for c in few] == [rarest]


def test_greedy_ends_with_one_token_of_no_entropy():
    stages, candidates = explain(logits(), SamplingParams(temperature=0), CONTEXT, int(logits().argmax()), 2)
    assert (stages[-1].name, stages[-1].entropy, stages[-1].n_candidates) == ("greedy", 0, 1)
    assert candidates[0].probabilities[-1] == 1


def test_entropy_of_what_cannot_be_drawn_any_more():
    """A12: a tiny temperature leaves one probability of 1."""
    sharp = scaled(np.array([1.0, 0.0, -1.0], np.float32), 1e-30)
    assert isinstance(sharp, Candidates)
    assert sharp.entropy == 0


@pytest.mark.parametrize("seed", range(20))
def test_the_last_stage_is_what_is_drawn_from(seed):
    """The explanation and the choice share their stages: drawing from the last one gives the token chosen."""
    row = logits(seed, 3000)
    *_, (_, last) = steps(row, KNOBS, CONTEXT)
    assert draw(last, uniform(5, 3)) == choose(row, KNOBS, CONTEXT, seed=5, position=3)


# ---- steps


@pytest.fixture
def engine(toy):
    class Recorded(toy):
        def forward(self, batch, cache, record=None):
            if record is not None:
                record.lap("prepare")
                record.weight_bytes["qkv"] = 1000
                record.cache_read_bytes += int(batch.positions.max()) + 1
                record.cache_written_bytes += len(batch.tokens)
            return super().forward(batch, cache)

    return Engine(Recorded(), context_length=128, kv_tokens=256, max_batch=4, token_budget=16)


def finish(engine):
    while engine.has_unfinished:
        engine.step()
        engine.check()


def test_steps_of_a_request_and_its_growing_pages(engine):
    request = engine.add_request(list(range(1, 13)) * 2, replace(KNOBS, trace=2))
    finish(engine)
    traced = request.traced_steps
    assert [(s.phase, s.first_position, s.n_tokens) for s in traced[:4]] == [
        ("prefill", 0, 16),
        ("prefill", 16, 8),
        ("decode", 24, 1),
        ("decode", 25, 1),
    ]
    assert [s.number for s in traced] == list(range(21))
    for step in traced:
        assert len(step.pages) == (step.first_position + step.n_tokens + 15) // 16 == step.pages_used
        assert (step.page_bytes, step.pages_total) == (256, 16)
        assert step.read_bytes == 1000 + step.first_position + step.n_tokens
        assert step.cache_written_bytes == step.n_tokens
    assert [t.token_id for t in request.traced_tokens] == request.output
    assert [t.position for t in request.traced_tokens] == list(range(24, 44))
    assert [t.step.number for t in request.traced_tokens] == list(range(1, 21))


def test_nothing_depends_on_a_trace_and_others_are_not_traced(engine, toy):
    plain, other = (engine.add_request([2, 3, 4], KNOBS) for _ in range(2))
    traced = engine.add_request([2, 3, 4], replace(KNOBS, trace=3))
    finish(engine)
    assert plain.output == traced.output == other.output
    assert not plain.traced_steps
    assert not plain.traced_tokens
    first = traced.traced_steps[0]
    assert (first.batch_sequences, first.batch_tokens, first.batch_drawn, first.n_tokens) == (3, 9, 3, 3)
    alone = Engine(toy(), context_length=128, kv_tokens=256)  # whose forward takes no record
    again = alone.add_request([2, 3, 4], KNOBS)
    finish(alone)
    assert again.output == plain.output


def test_parts_follow_each_other_and_are_the_whole(engine):
    request = engine.add_request([5, 6], replace(KNOBS, trace=1))
    finish(engine)
    for step in request.traced_steps:
        ends = [step.start_ns, *step.ends_ns.tolist()]
        assert ends == sorted(ends)
        assert set(step.parts) == {"schedule", "prepare", "finish", "sampling", "trace"}
        assert sum(step.part_s.values()) == pytest.approx((ends[-1] - ends[0]) / 1e9)
        assert sum(step.group_s.values()) == pytest.approx(sum(step.part_s.values()))


def test_waits_belong_to_the_parts_before_them(traced):
    _, _, output = traced
    for step in output.trace.steps:
        assert sum(step.wait_s.values()) == pytest.approx(step.part_s["wait"])
        assert {"qkv", "attend", "gate_up", "output"} <= set(step.wait_s)
        assert "sampling" not in step.wait_s


def test_every_part_of_the_kernels_has_a_group():
    assert set(PARTS) - set(GROUPS) == {"start"}


@pytest.mark.parametrize("value", [-1, 1.5, True, "all"])
def test_a_bad_trace_is_refused(value):
    with pytest.raises(InvalidParameterError, match=r"trace is .*allowed: an integer of at least 0, or None"):
        SamplingParams(trace=value)


# ---- the real model


@pytest.fixture(scope="module")
def traced(smollm2):
    """SmolLM2, 40 tokens with a trace and without, and with a batch around them; `(llm, outputs)`."""
    params = SamplingParams(
        temperature=0.8, top_k=40, top_p=0.95, min_p=0.05, seed=11, max_tokens=40, ignore_eos=True
    )
    with LLM(smollm2, context_length=512) as llm:
        prompt = llm.encode("Once upon a time, in a town of ropes,")
        plain = llm.generate([prompt, "The sea"], params)
        yield llm, plain, llm.generate(prompt, replace(params, trace=4))[0]


def test_the_same_tokens_with_and_without_a_trace(traced):
    _, plain, output = traced
    assert output.token_ids == plain[0].token_ids
    assert plain[0].trace is None
    assert [t.token_id for t in output.trace.tokens] == output.token_ids


def test_bytes_of_each_step_add_up(traced):
    """Weights are the same in each step; the cache grows by what one token takes; all steps together are the whole."""
    llm, _, output = traced
    config, steps = llm.config, output.trace.steps
    token_bytes = 2 * config.n_layers * config.n_kv_heads * config.head_dim * 2
    assert token_bytes == 23_040
    decode = steps[-39:]
    assert {s.phase for s in decode} == {"decode"}
    assert len({json.dumps(s.weight_bytes) for s in decode}) == 1
    for step in decode:
        assert step.cache_read_bytes == (step.first_position + 1) * token_bytes
        assert step.cache_written_bytes == token_bytes
        assert len(step.pages) * step.page_bytes == -(-(step.first_position + 1) // 16) * 16 * token_bytes
    weights = sum(decode[0].weight_bytes.values())
    assert weights == pytest.approx(llm.backend.weights.n_bytes, rel=1e-3)
    contexts = sum(range(decode[0].first_position + 1, decode[-1].first_position + 2))
    assert sum(s.read_bytes for s in decode) == 39 * weights + contexts * token_bytes
    assert output.trace.read_bytes == sum(s.read_bytes for s in steps)


def test_times_of_the_parts_against_the_clock_outside(traced):
    """The parts of all steps are at most what passed outside, and at least most of it: nothing is counted twice."""
    _, _, output = traced
    steps, timings = output.trace.steps, output.timings
    parts_s = sum(sum(s.part_s.values()) for s in steps)
    spans_s = sum((int(s.ends_ns[-1]) - s.start_ns) / 1e9 for s in steps)
    assert parts_s == pytest.approx(spans_s, rel=0.02)
    assert parts_s <= 1.02 * (timings.prefill_s + timings.decode_s) + 0.01
    groups = output.trace.group_s
    assert set(groups) == {"matmul", "attention", "pointwise", "wait", "sampling", "overhead", "trace"}
    assert all(seconds > 0 for seconds in groups.values())
    assert sum(groups.values()) - groups["trace"] == pytest.approx(output.trace.seconds, rel=0.02)


def test_chunks_of_a_stream_carry_their_token(traced):
    llm, _, output = traced
    params = SamplingParams(temperature=0, max_tokens=5, trace=2)
    chunks = list(llm.stream(output.prompt_token_ids, params))
    assert [c.trace.token_id for c in chunks] == [c.token_id for c in chunks]
    assert [c.trace.step.phase for c in chunks] == ["prefill"] + ["decode"] * 4
    assert all(c.trace is None for c in llm.stream("Hello", replace(params, trace=None)))


def test_as_json(traced):
    llm, _, output = traced
    found = json.loads(json.dumps(output.trace.to_dict(lambda t: llm.decode([t])), allow_nan=False))
    assert "".join(t["text"] for t in found["tokens"]) == output.text
    assert found["steps"][0]["start_s"] == 0
    assert found["steps"][-1]["read_bytes"] == output.trace.steps[-1].read_bytes
    assert [s["name"] for s in found["tokens"][0]["stages"]] == [
        "raw",
        "temperature",
        "top_k",
        "top_p",
        "min_p",
    ]
    assert len(found["tokens"][0]["candidates"][0]["probabilities"]) == 5


def test_steps_that_check_guesses(smollm2):
    """A step of several tokens draws several: fewer bytes a token, the same tokens, none left out of the trace."""
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, trace=2)
    prompt = "one two three four one two three four one two three four one two"
    eager = Speculator(
        PromptLookup(), 15, Pace()
    )  # checks every guess, whatever that takes on a busy machine
    with LLM(smollm2, context_length=128, draft=eager) as llm:
        (output,) = llm.generate(prompt, params)
    trace = output.trace
    assert [t.token_id for t in trace.tokens] == output.token_ids
    n_prompt = len(output.prompt_token_ids)
    assert [t.position for t in trace.tokens] == list(range(n_prompt, n_prompt + 16))
    assert sum(s.batch_drawn for s in trace.steps) == 16
    assert len(trace.steps) < 16
    assert any(s.phase == "decode" and s.n_tokens > 1 for s in trace.steps)
    assert trace.bytes_per_token < trace.steps[1].read_bytes


@pytest.mark.parametrize("seed", range(30))
def test_the_first_of_a_descending_order_without_sorting_all(seed):
    """Ties by index, minus infinity last, for every length of the beginning."""
    rng = np.random.default_rng(seed)
    key = rng.integers(-3, 4, int(rng.integers(1, 60))).astype(np.float32)
    key[rng.integers(0, len(key))] = -np.inf
    whole = np.argsort(-key, kind="stable").tolist()
    for n in range(len(key) + 2):
        assert descending(key, n).tolist() == whole[:n]
