"""What the KV cache saves: the same generation with and without it, one time for each token.

    python benchmarks/loop.py [MODEL] [--tokens 192] [--every 16] [--repeats 3]

Without the cache, each new token needs the keys and values of the whole sequence again, so n tokens cost
n (n + 1) / 2 token passes beside n with it. The two runs must give the same tokens; the command fails if they
do not. Prints a Markdown table: time of the n-th token (mean of the 8 up to it) and of all n tokens, both
ways. Each token's time is the median of the repeats, which take turns.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
import time
from contextlib import ExitStack
from pathlib import Path

from ropewalk import LLM, SamplingParams
from ropewalk.kernels.team import available_threads


def timed(llm: LLM, prompt: list[int], n_tokens: int) -> tuple[list[int], list[float]]:
    """Greedy tokens, and the seconds that each took."""
    tokens, times = [], []
    last = time.perf_counter()
    for chunk in llm.stream(prompt, SamplingParams(temperature=0, max_tokens=n_tokens, ignore_eos=True)):
        now = time.perf_counter()
        tokens.append(chunk.token_id)
        times.append(now - last)
        last = now
    return tokens, times


def both(model: str, n_tokens: int, repeats: int) -> tuple[list[float], list[float]]:
    """Median seconds of each token with a cache and without; ends the program if the tokens differ."""
    rounds: tuple[list[list[float]], list[list[float]]] = ([], [])
    with ExitStack() as stack:
        llms = [
            stack.enter_context(LLM(model, context_length=n_tokens + 1, max_batch=1, kv_cache=kv_cache))
            for kv_cache in (True, False)
        ]
        prompt = llms[0].encode("Once")[-1:]
        for llm in llms:
            timed(llm, prompt, 8)  # compile, warm up
        for _ in range(repeats):
            runs = [timed(llm, prompt, n_tokens) for llm in llms]
            if runs[0][0] != runs[1][0]:
                sys.exit(f"the two runs differ: {runs[0][0]} and {runs[1][0]}")
            for times, run in zip(rounds, runs, strict=True):
                times.append(run[1])
    with_cache, without = (
        [statistics.median(token) for token in zip(*times, strict=True)] for times in rounds
    )
    return with_cache, without


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--every", type=int, default=16, help="a line of the table for every so many tokens")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()

    cached, recomputed = both(options.model, options.tokens, options.repeats)
    print(f"{Path(options.model).name}, {available_threads()} threads, {platform.machine()}.")
    print("Both ways gave the same tokens.\n")
    print("| n | n-th token, cache | n-th token, none | n tokens, cache | n tokens, none | passes | times |")
    print("|---:|---:|---:|---:|---:|---:|---:|")
    for n in range(options.every, options.tokens + 1, options.every):
        window = slice(max(0, n - 8), n)  # the mean of a few neighbours: one token is noise
        with_ms, without_ms = (1e3 * statistics.mean(times[window]) for times in (cached, recomputed))
        with_s, without_s = sum(cached[:n]), sum(recomputed[:n])
        print(
            f"| {n} | {with_ms:.1f} ms | {without_ms:.1f} ms | {with_s:.2f} s | {without_s:.2f} s "
            f"| {n} : {n * (n + 1) // 2} | {without_s / with_s:.1f} |"
        )


if __name__ == "__main__":
    main()
