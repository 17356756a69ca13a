"""A trace as an object of Chrome's trace event format, which chrome://tracing and ui.perfetto.dev open.

One process with two tracks: the steps, each divided into passes over the layers and these into parts, as the thread
that runs the steps saw them; and the tokens, each at the end of the step that drew it. Counters below show pages of
the KV cache, bytes read and speed, from step to step.

The format: "Trace Event Format", Google, https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
Times are microseconds from the beginning of the first step.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ropewalk.engine.trace import StepTrace, TextOf, TokenTrace, Trace

PROCESS, STEPS, TOKENS = 1, 1, 2
Event = dict[str, Any]


def to_chrome(trace: Trace, text_of: TextOf | None = None) -> dict[str, Any]:
    """The whole file as one object, ready for `json.dump`; `text_of` gives the texts of tokens."""
    origin_ns = trace.steps[0].start_ns if trace.steps else 0
    events = [*_names()]
    for step in trace.steps:
        events += _step(step, origin_ns)
    for token in trace.tokens:
        events.append(_token(token, origin_ns, text_of))
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _names() -> Iterator[Event]:
    yield {"ph": "M", "pid": PROCESS, "name": "process_name", "args": {"name": "ropewalk"}}
    for track, name in ((STEPS, "steps"), (TOKENS, "tokens")):
        yield {"ph": "M", "pid": PROCESS, "tid": track, "name": "thread_name", "args": {"name": name}}


def _slice(name: str, category: str, start_ns: int, end_ns: int, **args: Any) -> Event:
    times = {"ts": start_ns / 1e3, "dur": (end_ns - start_ns) / 1e3}
    return {"ph": "X", "pid": PROCESS, "tid": STEPS, "name": name, "cat": category, **times, "args": args}


def _step(step: StepTrace, origin_ns: int) -> Iterator[Event]:
    """A step, the layers in it, the parts in these, and the counters as it begins."""
    from ropewalk.engine.trace import GROUPS

    begin = step.start_ns - origin_ns
    ends = (step.ends_ns - origin_ns).tolist()
    starts = [begin, *ends[:-1]]
    yield _slice(
        f"{step.phase} {step.n_tokens}",
        "step",
        begin,
        ends[-1],
        step=step.number,
        first_position=step.first_position,
        batch_sequences=step.batch_sequences,
        batch_tokens=step.batch_tokens,
        weight_bytes=sum(step.weight_bytes.values()),
        cache_read_bytes=step.cache_read_bytes,
        cache_written_bytes=step.cache_written_bytes,
        pages=list(step.pages),
    )
    for number, (first, last) in enumerate(layers_of(step.parts)):
        yield _slice(f"layer {number}", "layer", starts[first], ends[last])
    for part, start, end in zip(step.parts, starts, ends, strict=True):
        yield _slice(part, GROUPS[part], start, end)
    for name, args in (
        ("KV cache pages", {"used": step.pages_used}),
        ("MB read", {"weights": sum(step.weight_bytes.values()) / 1e6, "cache": step.cache_read_bytes / 1e6}),
        ("GB/s", {"read": step.bytes_per_s / 1e9}),
    ):
        yield {"ph": "C", "pid": PROCESS, "name": name, "ts": begin / 1e3, "args": args}


def layers_of(parts: tuple[str, ...]) -> list[tuple[int, int]]:
    """First and last part of each layer: from the norm before q, k, v to before the next one's, or to `down`."""
    worked = [(i, part) for i, part in enumerate(parts) if part != "wait"]
    firsts = [i for (i, part), (_, follows) in pairwise(worked) if (part, follows) == ("norm", "qkv")]
    spans = []
    for first, limit in pairwise([*firsts, len(parts)]):
        downs = [i for i in range(first, limit) if parts[i] == "down"]
        if downs:
            last = downs[-1] + (downs[-1] + 1 < limit and parts[downs[-1] + 1] == "wait")
            spans.append((first, last))
    return spans


def _token(token: TokenTrace, origin_ns: int, text_of: TextOf | None) -> Event:
    end_ns = int(token.step.ends_ns[-1]) - origin_ns
    return {
        "ph": "i",
        "s": "t",
        "pid": PROCESS,
        "tid": TOKENS,
        "name": text_of(token.token_id) if text_of else str(token.token_id),
        "cat": "token",
        "ts": end_ns / 1e3,
        "args": {
            "token_id": token.token_id,
            "position": token.position,
            "probability": token.probability,
            "entropy_nats": {stage.name: stage.entropy for stage in token.stages},
        },
    }
