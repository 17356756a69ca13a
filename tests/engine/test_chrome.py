"""A trace file against the rules of Chrome's trace event format."""

import json

import pytest

from ropewalk import LLM, SamplingParams
from ropewalk.engine.chrome import layers_of

REQUIRED = {
    "X": {"name", "cat", "ph", "ts", "dur", "pid", "tid", "args"},
    "C": {"name", "ph", "ts", "pid", "args"},
    "i": {"name", "ph", "ts", "pid", "tid", "s"},
    "M": {"name", "ph", "pid", "args"},
}


@pytest.fixture(scope="module")
def output(smollm2):
    """A prompt of three chunks and twelve tokens; `(trace, events as read back from the file's text)`."""
    params = SamplingParams(temperature=0.9, top_k=20, seed=3, max_tokens=12, ignore_eos=True, trace=3)
    with LLM(smollm2, context_length=256, token_budget=16) as llm:
        output = llm.generate("A ropewalk is a long straight narrow lane, where strands are " * 3, params)[0]
        whole = output.trace.to_chrome(lambda token: llm.decode([token]))
        return output, json.loads(json.dumps(whole, allow_nan=False))


def test_the_object_form_and_the_fields_of_every_event(output):
    _, file = output
    assert set(file) == {"traceEvents", "displayTimeUnit"}
    assert file["displayTimeUnit"] in ("ms", "ns")
    for event in file["traceEvents"]:
        assert REQUIRED[event["ph"]] <= set(event), event
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        if event["ph"] == "X":
            assert event["ts"] >= 0
            assert event["dur"] >= 0
        if event["ph"] == "C":
            assert all(isinstance(v, int | float) for v in event["args"].values())
        if event["ph"] == "i":
            assert event["s"] in ("g", "p", "t")
    names = {e["name"] for e in file["traceEvents"] if e["ph"] == "M"}
    assert names == {"process_name", "thread_name"}


def test_slices_of_a_track_lie_within_each_other_or_apart(output):
    """What overlaps in part is drawn wrongly; times in nanoseconds, since microseconds are not whole."""
    _, file = output
    slices = [e for e in file["traceEvents"] if e["ph"] == "X"]
    spans = [(round(1e3 * e["ts"]), round(1e3 * (e["ts"] + e["dur"]))) for e in slices]
    open_ends = []
    for start, end in sorted(spans, key=lambda s: (s[0], -s[1])):
        while open_ends and open_ends[-1] <= start:
            open_ends.pop()
        assert not open_ends or end <= open_ends[-1]
        open_ends.append(end)


def test_steps_layers_and_tokens_are_those_of_the_run(output):
    result, file = output
    by_category = {}
    for event in file["traceEvents"]:
        by_category.setdefault(event.get("cat"), []).append(event)
    steps, layers, tokens = (by_category[c] for c in ("step", "layer", "token"))
    assert [s["args"]["step"] for s in steps] == [s.number for s in result.trace.steps]
    assert len(layers) == 30 * len(steps)
    assert "".join(t["name"] for t in tokens) == result.text
    assert [t["args"]["token_id"] for t in tokens] == result.token_ids
    assert sum(s["args"]["cache_read_bytes"] for s in steps) == sum(
        s.cache_read_bytes for s in result.trace.steps
    )
    assert [t["ts"] for t in tokens] == [pytest.approx(s["ts"] + s["dur"]) for s in steps[-12:]]
    for group, seconds in result.trace.group_s.items():
        assert sum(e["dur"] for e in by_category[group]) == pytest.approx(1e6 * seconds)


def test_layers_of_models_with_and_without_post_norms():
    layer = ("norm", "wait", "qkv", "wait", "attend", "wait", "norm", "gate_up", "wait", "down", "wait")
    parts = ("prepare", *layer, *layer, "norm", "wait", "norm", "output", "wait", "finish")
    assert layers_of(parts) == [(1, 11), (12, 22)]
    assert layers_of(("schedule", "prepare", "finish")) == []
