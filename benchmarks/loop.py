"""What the KV cache saves: the same generation with and without it, one time for each token.

    python benchmarks/loop.py [MODEL] [--tokens 192] [--every 16] [--repeats 3]

Without the cache, each new token needs the keys and values of the whole sequence again, so n tokens cost
n (n + 1) / 2 token passes beside n with it. The two runs must give the same tokens; the command fails if they
do not. Prints a Markdown table: time of the n-th token (mean of the 8 up to it) and of all n tokens, both
ways. Each token's time is the median of the repeats, which take turns. `ropewalk figure loop` draws the same.
"""

from __future__ import annotations

import argparse
import platform
import statistics
from pathlib import Path

from ropewalk.figures.loop import measure
from ropewalk.kernels.team import available_threads


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--every", type=int, default=16, help="a line of the table for every so many tokens")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()

    loop = measure(options.model, options.tokens, options.repeats)
    cached, recomputed = loop.with_cache, loop.without
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
