"""What an int8 KV cache saves and costs, beside a float16 one, on one model and one text.

    python benchmarks/cache_types.py MODEL [--window 2048] [--windows 2] [--json]

1. Bytes per token: by the formula, 2 · layers · KV heads · (head_dim · 2, or head_dim + 4 bytes of scale), and as
   allocated.
2. Sequences that run at once in the same memory: `--requests` requests, as many pages as `--memory` holds; counted.
3. Quality: the KL divergence from the distributions with a float16 cache to those with an int8 one, at every position
   of windows of the text, and both perplexities. The cache matters more the longer the context is, so the divergence
   is also given for each quarter of a window.

Needs no other engine. Neither part depends on the speed of the machine. Prints Markdown, or one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
from fidelity import TEXT, Tally, log_softmax, windows_of

from ropewalk import LLM, SamplingParams
from ropewalk.backend.base import PAGE_SIZE
from ropewalk.engine.budget import parse_memory
from ropewalk.engine.engine import Engine
from ropewalk.model.config import ModelConfig
from ropewalk.passes import Passes

TYPES = ("float16", "int8")


def bytes_per_token(config: ModelConfig, dtype: str) -> int:
    """The planning formula."""
    each = config.head_dim * 2 if dtype == "float16" else config.head_dim + 4
    return 2 * config.n_layers * config.n_kv_heads * each


def running_at_once(llm: LLM, dtype: str, options: argparse.Namespace) -> dict[str, float]:
    """Run the requests in a cache of a given size; the most that ran at once, and how many were preempted."""
    n_pages = parse_memory(options.memory, 0) // llm.backend.page_bytes(dtype)
    engine = Engine(
        llm.backend,
        context_length=options.prompt + options.decode,
        kv_tokens=n_pages * PAGE_SIZE,
        cache_dtype=dtype,
        max_batch=options.requests,
        prefix_cache=False,
    )
    words = llm.encode(TEXT.read_text(encoding="utf-8"))
    params = SamplingParams(temperature=0, max_tokens=options.decode, ignore_eos=True)
    for i in range(options.requests):
        engine.add_request(words[i : i + options.prompt], params)
    most = 0
    while engine.has_unfinished:
        engine.step()
        most = max(most, engine.statistics().running)
    found = engine.statistics()
    return {"pages": n_pages, "bytes": engine.cache.n_bytes, "running": most, "preempted": found.preemptions}


def quality(llm: LLM, windows: list[list[int]]) -> dict[str, object]:
    """Divergence of the int8 cache from the float16 one, and both perplexities."""
    tallies = {dtype: Tally() for dtype in TYPES}
    same = []
    for number, window in enumerate(windows):
        passes = [Passes(llm.backend, dtype, 512).logits(window) for dtype in TYPES]
        position = 0
        for rows in zip(*(map(np.array, each) for each in passes), strict=True):
            for row in zip(*rows, strict=True):
                truth = log_softmax(row[0])
                second, first = np.argpartition(truth, -2)[-2:]
                target = window[position + 1] if position + 1 < len(window) else None
                for tally, logits in zip(tallies.values(), row, strict=True):
                    tally.add(logits, truth, (first, second), target)
                same.append(bool(row[0].argmax() == row[1].argmax()))
                position += 1
        print(f"window {number + 1} of {len(windows)}", file=sys.stderr)
    kl = np.array(tallies["int8"].kl).reshape(len(windows), -1)
    borders = np.linspace(0, kl.shape[1], 5).astype(int)
    return {
        "summary": {dtype: tally.summary() for dtype, tally in tallies.items()},
        "quarters": [float(kl[:, a:b].mean()) for a, b in pairwise(borders)],
        "same_greedy": float(np.mean(same)),
    }


def report(result: dict[str, object], options: argparse.Namespace) -> None:
    costs, found = result["costs"], result["quality"]
    print(f"### {result['model']}\n\n| | float16 | int8 | ratio |\n|---|---:|---:|---:|")
    for name, key in (
        ("bytes per token, by the formula", "formula"),
        ("bytes per token, as allocated", "allocated"),
        (f"sequences of {options.prompt} + {options.decode} tokens at once in {options.memory}", "running"),
    ):
        a, b = (costs[dtype][key] for dtype in TYPES)
        print(f"| {name} | {a:,} | {b:,} | {b / a:.3f} |")
    f16, int8 = (found["summary"][dtype] for dtype in TYPES)
    print(f"| perplexity | {f16['perplexity']:.4f} | {int8['perplexity']:.4f} |", end=" ")
    print(f"{int8['perplexity'] / f16['perplexity'] - 1:+.3%} |")
    print(f"\nDivergence over {options.windows} windows of {options.window} tokens, in nats: mean", end=" ")
    print(
        f"{int8['kl_mean']:.2e} ± {int8['kl_standard_error']:.0e}, median {int8['kl_median']:.2e}, 99 %",
        end=" ",
    )
    print(f"{int8['kl_p99']:.2e}, largest {int8['kl_max']:.2e}; by quarters of a window", end=" ")
    print(
        f"{', '.join(f'{kl:.2e}' for kl in found['quarters'])}. The likeliest token is the same at", end=" "
    )
    print(f"{found['same_greedy']:.2%} of the positions.\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--text", type=Path, default=TEXT, help="UTF-8 text")
    parser.add_argument("--window", type=int, default=2048, help="tokens of a window")
    parser.add_argument("--windows", type=int, default=2)
    parser.add_argument("--memory", default="48MiB", help="for the sequences that run at once")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=96, help="tokens of each of them")
    parser.add_argument("--decode", type=int, default=32, help="tokens that each generates")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()

    with LLM(options.model, n_threads=options.threads, context_length=options.window) as llm:
        costs = {}
        for dtype in TYPES:
            costs[dtype] = running_at_once(llm, dtype, options)
            costs[dtype]["formula"] = bytes_per_token(llm.config, dtype)
            costs[dtype]["allocated"] = costs[dtype]["bytes"] // (costs[dtype]["pages"] * PAGE_SIZE)
        windows = windows_of(llm, options.text.read_text(encoding="utf-8"), options.window, options.windows)
        result = {
            "model": Path(options.model).name,
            "text": options.text.name,
            "costs": costs,
            "quality": quality(llm, windows),
        }
    if options.json:
        print(json.dumps(result, indent=1))
    else:
        report(result, options)


if __name__ == "__main__":
    main()
