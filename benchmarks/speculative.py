"""What guessing ahead gains: the same prompts without drafts, with a draft model, and with prompt lookup.

    python benchmarks/speculative.py MODEL [--draft-model MODEL] [--tokens 160] [--rounds 3]

Three kinds of prompts of our own: code to be written, something to be edited (the answer repeats most of the prompt),
and prose to be written. Every round runs every prompt in all ways, one after another, and the command fails if one
token differs. Prints tokens per second of decoding, the median of the speed-ups of all prompts and rounds, and how many
guesses were right; first greedy, then sampled. Nothing is kept between prompts but what was learned of the machine and
of the drafter; the first round, in which that is learned, is thrown away.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import time
from contextlib import ExitStack
from pathlib import Path

from ropewalk import LLM, SamplingParams
from ropewalk.kernels.team import available_threads

INVENTORY = '''\
class Inventory:
    """Counts of parts by name."""

    def __init__(self):
        self.counts = {}

    def add(self, name, count=1):
        if count < 1:
            raise ValueError("count must be positive")
        self.counts[name] = self.counts.get(name, 0) + count

    def remove(self, name, count=1):
        if self.counts.get(name, 0) < count:
            raise KeyError(name)
        self.counts[name] -= count
        if self.counts[name] == 0:
            del self.counts[name]

    def total(self):
        return sum(self.counts.values())
'''

SHAPES = """\
import math

def area(shape, width, height=None):
    if shape == "circle":
        return math.pi * width ** 2 / 4
    if height is None:
        height = width
    if shape == "rectangle":
        return width * height
    if shape == "triangle":
        return width * height / 2
    if shape == "ellipse":
        return math.pi * width * height / 4
    raise ValueError(f"unknown shape: {shape}")
"""

ROPE = """\
A ropewalk is a long lane or a covered building in which strands of hemp were laid out and twisted into rope. The rope
maker wrapped a bundle of fibre around his waist and walked backwards, feeding it out while a boy turned the wheel at
the other end. A rope could be no longer then the lane that it was made in, and so the lanes of the navies ran for a
quarter of a mile. The finished ropes was tarred against the weather and rolled up in the yard.
"""

PROMPTS = {
    "code": [
        "Write a Python class for a binary search tree with insert, find and in-order iteration.",
        "Write a Python function that parses a CSV line with quoted fields, and a few tests for it.",
    ],
    "edit": [
        f"Rename `Inventory` to `Stock` and `counts` to `parts`. Reply with the whole code only.\n\n{INVENTORY}",
        f"Add type hints to this function. Reply with the whole code only.\n\n{SHAPES}",
        f"Correct the two mistakes in this text. Reply with the whole text only.\n\n{ROPE}",
    ],
    "prose": [
        "Tell a short story of a lighthouse keeper who finds a letter.",
    ],
}


def busy_share(before: tuple[float, float], after: tuple[float, float]) -> float:
    """Share of the machine's processor time that went to other processes meanwhile."""
    total, own = after[0] - before[0], after[1] - before[1]
    return max(0.0, (total - own) / total) if total > 0 else 0.0


def processor_seconds() -> tuple[float, float]:
    """Busy seconds of all processors together, and of this process; (0, ...) where the system does not say."""
    own = sum(os.times()[:2])
    try:
        fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    except OSError:
        return 0.0, own
    return (sum(fields[:8]) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK"), own


def run(llm: LLM, prompt: str, params: SamplingParams) -> tuple[list[int], float, int, int]:
    """Tokens, seconds from the first to the last, guesses and right guesses."""
    (output,) = llm.chat([{"role": "user", "content": prompt}], params)
    t = output.timings
    return output.token_ids, t.decode_s, t.drafted_tokens, t.accepted_tokens


def table(llms: dict[str, LLM], params: SamplingParams, rounds: int) -> None:
    """Print the rows of one way to choose tokens."""
    for kind, prompts in PROMPTS.items():
        seconds: dict[str, list[list[float]]] = {way: [[] for _ in prompts] for way in llms}
        guesses = {way: [0, 0] for way in llms}
        n_tokens = 0
        for number in range(rounds + 1):
            for i, prompt in enumerate(prompts):
                runs = {way: run(llm, prompt, params) for way, llm in llms.items()}
                tokens = runs["none"][0]
                for way, (found, decode_s, drafted, accepted) in runs.items():
                    if found != tokens:
                        sys.exit(f"{way} changed a token of {prompt!r}")
                    if number:
                        seconds[way][i].append(decode_s)
                        guesses[way][0] += drafted
                        guesses[way][1] += accepted
                n_tokens += len(tokens) - 1 if number else 0
        for way in llms:
            speed = n_tokens / sum(map(sum, seconds[way]))
            ratios = [
                plain / mine
                for all_plain, all_mine in zip(seconds["none"], seconds[way], strict=True)
                for plain, mine in zip(all_plain, all_mine, strict=True)
            ]
            drafted, accepted = guesses[way]
            share = f"{accepted / drafted:.0%} of {drafted / n_tokens:.2f}" if drafted else ""
            print(
                f"| {kind} | {way} | {speed:.1f} | {statistics.median(ratios):.2f} "
                f"| {min(ratios):.2f} ... {max(ratios):.2f} | {share} |",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--draft-model", help="a smaller model of the same vocabulary")
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--greedy-only", action="store_true")
    options = parser.parse_args()

    greedy = SamplingParams(temperature=0, max_tokens=options.tokens)
    sampled = SamplingParams(temperature=0.7, top_p=0.9, seed=1, max_tokens=options.tokens)
    sizes = {"context_length": 1024, "max_batch": 1, "prefix_cache": False}
    with ExitStack() as stack:
        plain = stack.enter_context(LLM(options.model, n_threads=options.threads, **sizes))
        parts = plain.backend, plain.tokenizer, plain.chat_template  # the weights are there once
        llms = {"none": plain}
        for way, draft in (("lookup", "lookup"), ("model", options.draft_model)):
            if draft:
                llms[way] = stack.enter_context(LLM.from_parts(*parts, draft=draft, **sizes))
        threads = options.threads or available_threads()
        draft = f", draft model {Path(options.draft_model).name}" if options.draft_model else ""
        print(f"{Path(options.model).name}{draft}; {threads} threads, {platform.machine()}")
        before, started_s = processor_seconds(), time.perf_counter()
        for name, params in (("greedy", greedy), ("temperature 0.7, top-p 0.9", sampled)):
            if params is sampled and options.greedy_only:
                break
            print(f"\n{name}, up to {options.tokens} tokens:\n")
            print("| prompts | drafts | tok/s | speed-up | range | guesses right, of so many a token |")
            print("|---|---|---:|---:|---:|---:|")
            table(llms, params, options.rounds)
        elapsed_s = time.perf_counter() - started_s
        print(
            f"\nAll tokens are those without drafts. Of the processor time in use, "
            f"{busy_share(before, processor_seconds()):.0%} was other processes' ({elapsed_s:.0f} s)."
        )


if __name__ == "__main__":
    main()
