"""What the KV cache saves: the same generation with and without it, one time for each token.

    python benchmarks/loop.py [MODEL] [--tokens 192] [--every 16]

Without the cache, each new token needs the keys and values of the whole sequence again, so n tokens cost
n (n + 1) / 2 token passes beside n with it. The two runs must give the same tokens; the command fails if they
do not. Prints a Markdown table: time of the n-th token and of all n tokens, both ways.
"""

from __future__ import annotations

import argparse
import platform
import sys
import time

from ropewalk import LLM, SamplingParams


def timed(model: str, n_tokens: int, *, kv_cache: bool) -> tuple[list[int], list[float]]:
    """Greedy tokens after a one-token prompt, and the seconds that each took."""
    with LLM(model, context_length=n_tokens + 1, max_batch=1, kv_cache=kv_cache) as llm:
        params = SamplingParams(temperature=0, max_tokens=n_tokens, ignore_eos=True)
        prompt = llm.encode("Once")[-1:]
        llm.generate(
            [prompt], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        )  # compile, warm up
        tokens, times = [], []
        last = time.perf_counter()
        for chunk in llm.stream(prompt, params):
            now = time.perf_counter()
            tokens.append(chunk.token_id)
            times.append(now - last)
            last = now
    return tokens, times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--every", type=int, default=16, help="lines of the table")
    options = parser.parse_args()

    tokens, cached = timed(options.model, options.tokens, kv_cache=True)
    again, recomputed = timed(options.model, options.tokens, kv_cache=False)
    if tokens != again:
        first = next(i for i, (a, b) in enumerate(zip(tokens, again, strict=True)) if a != b)
        sys.exit(f"the two runs differ from token {first} on: {tokens[first]} and {again[first]}")

    print(f"{options.model}, {len(tokens)} tokens, Python {platform.python_version()}, {platform.machine()}.")
    print("Both runs gave the same tokens.\n")
    print("| n | n-th token, cache | n-th token, none | n tokens, cache | n tokens, none | passes | ratio |")
    print("|---:|---:|---:|---:|---:|---:|---:|")
    for n in range(options.every, len(tokens) + 1, options.every):
        window = slice(n - min(8, options.every), n)  # the mean of a few neighbours: one token is noise
        with_ms, without_ms = (1e3 * sum(t[window]) / len(t[window]) for t in (cached, recomputed))
        with_s, without_s = sum(cached[:n]), sum(recomputed[:n])
        print(
            f"| {n} | {with_ms:.1f} ms | {without_ms:.1f} ms | {with_s:.2f} s | {without_s:.2f} s "
            f"| {n} : {n * (n + 1) // 2} | {without_s / with_s:.1f} |"
        )


if __name__ == "__main__":
    main()
