"""The account of a generation beside the machine's bound: windows of sweeps, shares, totals; and a real one."""

from types import SimpleNamespace

import numpy as np
import pytest

from ropewalk import LLM, SamplingParams
from ropewalk.engine.trace import StepTrace, Trace
from ropewalk.errors import InvalidParameterError, PromptError
from ropewalk.explain import Story, Sweep, explain


def step(number, phase="decode", n_tokens=1, ms=1.0, n_bytes=1_000_000):
    """A step of `ms` milliseconds of `qkv` and then as much again for the trace."""
    start_ns = 10_000_000 * number
    ends = start_ns + np.array([ms * 1e6, 2 * ms * 1e6], np.int64)
    return StepTrace(
        number,
        phase,
        first_position=number,
        n_tokens=n_tokens,
        pages=(0,),
        page_bytes=160,
        batch_sequences=1,
        batch_tokens=n_tokens,
        batch_drawn=1,
        pages_used=1,
        pages_total=4,
        weight_bytes={"qkv": n_bytes - 100},
        cache_read_bytes=100,
        cache_written_bytes=10,
        start_ns=start_ns,
        parts=("qkv", "trace"),
        ends_ns=ends,
    )


def story(steps, sweeps):
    output = SimpleNamespace(trace=Trace(tuple(steps), ()))
    return Story(output, SamplingParams(), {}, {}, tuple(Sweep(*sweep) for sweep in sweeps))


def test_a_step_is_compared_with_the_best_of_the_sweeps_around_it():
    """The two measured last before it began, and the two after that; steps begin at 0, 10, 20, 30 ms."""
    steps = [step(i) for i in range(4)]
    s = story(
        steps,
        [(-5, 3e9), (-1, 1e9), (5_000_000, 2e9), (15_000_000, 8e9), (16_000_000, 1e9), (40_000_000, 4e9)],
    )
    assert s.bounds == [8e9, 8e9, 8e9, 8e9]
    s = story(steps, [(-5, 9e9), (15_000_000, 2e9), (25_000_000, 1e9), (35_000_000, 3e9)])
    assert s.bounds == [9e9, 9e9, 9e9, 3e9]
    assert s.shares == [pytest.approx(1e9 / bound) for bound in s.bounds]  # 1 MB in 1 ms
    assert story(steps, [(-5, 7e9)]).bounds == [7e9] * 4


def test_totals_of_a_phase():
    steps = [step(0, "prefill", 10, ms=4), step(1, ms=1), step(2, ms=2), step(3, ms=5)]
    s = story(steps, [(0, 1e9)])
    assert s.phase("prefill")["tokens_per_s"] == pytest.approx(10 / 4e-3)
    decode = s.phase("decode")
    assert (decode["steps"], decode["tokens"], decode["read_bytes"]) == (3, 3, 3_000_000)
    assert decode["seconds"] == pytest.approx(8e-3)  # the making of the trace is nobody's time
    assert decode["step_s"] == pytest.approx(2e-3)
    assert decode["bytes_per_s"] == pytest.approx(5e8)
    assert decode["bound_share"] == pytest.approx(0.5)
    assert s.part_s("decode") == {"qkv": pytest.approx(8e-3)}
    assert story(steps[:1], [(0, 1e9)]).phase("decode") == {}


@pytest.fixture(scope="module")
def llm(smollm2):
    with LLM(smollm2, context_length=256, max_batch=1, token_budget=16) as llm:
        yield llm


@pytest.fixture(scope="module")
def real(llm):
    """Three chunks of prompt and six tokens."""
    prompt = "A ropewalk is a long straight narrow lane, where long strands of material are laid. " * 2
    return explain(llm, prompt, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, n=3))


def test_a_real_generation(real, llm):
    output = real.output
    assert len(output.outputs) == 1
    assert len(output.token_ids) == 6
    assert [s.phase for s in real.trace.steps] == ["prefill"] * 3 + ["decode"] * 5
    assert real.sweeps[0].at_ns < real.trace.steps[0].start_ns
    assert real.sweeps[-1].at_ns > int(real.trace.steps[-1].ends_ns[-1])
    assert real.model["cache_token_bytes"] == 23_040
    assert real.model["weight_bytes"] == llm.backend.weights.n_bytes
    assert all(0 < sweep.bytes_per_s < 1e13 for sweep in real.sweeps)
    assert all(share > 0 for share in real.shares)


def test_its_sums(real):
    """Bytes of the steps are the whole's; the parts of each phase are its time, within 2 %."""
    prefill, decode = real.phase("prefill"), real.phase("decode")
    assert prefill["read_bytes"] + decode["read_bytes"] == real.trace.read_bytes
    assert prefill["tokens"] == len(real.output.prompt_token_ids)
    for name, totals in (("prefill", prefill), ("decode", decode)):
        assert sum(real.part_s(name).values()) == pytest.approx(totals["seconds"], rel=0.02)


def test_it_as_json(real, llm):
    found = real.to_dict(llm)
    assert found["text"] == real.output.text
    assert [s["bound_share"] for s in found["steps"]] == real.shares
    assert len(found["tokens"][0]["candidates"]) == 5
    assert found["decode"]["steps"] == 5


def test_a_conversation_goes_through_the_template(llm):
    told = explain(llm, [{"role": "user", "content": "Hi"}], SamplingParams(max_tokens=1, trace=1))
    assert "<|im_start|>user\nHi" in told.output.prompt
    assert len(told.trace.tokens[0].candidates) <= 3


def test_what_cannot_be_told_is_refused_as_elsewhere(llm):
    with pytest.raises(PromptError, match="no tokens"):
        explain(llm, [], SamplingParams())
    with pytest.raises(InvalidParameterError, match="token id 99999"):
        explain(llm, "Hi", SamplingParams(logit_bias={99999: 1.0}))
