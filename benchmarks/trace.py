"""What knowing costs: decode with a trace and without, in turns, on one model.

    python benchmarks/trace.py [MODEL] [--tokens 64] [--rounds 9]

"off": no trace is asked for; the phases of a step still test whether somebody wants to know. "times": the backend notes
the end of every phase (no sampling, no text). "trace": SamplingParams(trace=5), which also works out the distribution
after every knob. Prints medians over the rounds of the median time of a token, and what each costs beside "off". The
tokens must be the same; the command fails if they are not.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from ropewalk import LLM, SamplingParams
from ropewalk.backend.base import StepRecord
from ropewalk.kernels.cpu import cpu_identity


def timed(llm: LLM, params: SamplingParams) -> tuple[list[int], float]:
    """Tokens of one answer, and the median seconds of one after the first."""
    tokens, times = [], []
    last = time.perf_counter()
    for chunk in llm.stream("Once upon a time", params):
        now = time.perf_counter()
        tokens.append(chunk.token_id)
        times.append(now - last)
        last = now
    return tokens, median(times[1:])


def always_timed(llm: LLM) -> Callable[[], None]:
    """Let every step be timed, as for a trace, but nothing be made of it; call what this returns to undo it."""
    backend, forward = llm.backend, llm.backend.forward
    backend.forward = lambda batch, cache: forward(batch, cache, StepRecord())
    return lambda: setattr(backend, "forward", forward)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()

    ways: dict[str, list[float]] = {"off": [], "times": [], "trace": []}
    with LLM(options.model, context_length=options.tokens + 64, max_batch=1) as llm:
        for number in range(options.rounds + 1):  # the first one warms up
            seen = []
            for way, times in ways.items():
                trace = 5 if way == "trace" else None
                params = SamplingParams(
                    temperature=0.8,
                    top_k=40,
                    top_p=0.95,
                    seed=1,
                    max_tokens=options.tokens,
                    ignore_eos=True,
                    trace=trace,
                )
                undo = always_timed(llm) if way == "times" else lambda: None
                tokens, seconds = timed(llm, params)
                undo()
                seen.append(tokens)
                if number:
                    times.append(seconds)
            if any(tokens != seen[0] for tokens in seen):
                sys.exit(f"the tokens differ: {seen}")
    print(
        f"{Path(options.model).name}, {cpu_identity()[0]}, {options.rounds} rounds of {options.tokens} tokens\n"
    )
    print("| | a token | beside off |\n|---|---:|---:|")
    for way, times in ways.items():
        # Rounds are compared with the same round's "off": a busy machine changes from one to the next.
        beside = median(t / o - 1 for t, o in zip(times, ways["off"], strict=True))
        print(
            f"| {way} | {1e3 * median(times):.2f} ms | {'' if times is ways['off'] else f'{beside:+.1%}'} |"
        )


if __name__ == "__main__":
    main()
