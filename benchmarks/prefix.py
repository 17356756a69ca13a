"""What sharing a long beginning saves: requests with one prefix, without the prefix cache, with it, and from disk.

    python benchmarks/prefix.py MODEL [--requests 32] [--prefix 1024]

All requests arrive at once; each round has a prefix of its own. Prints the mean time to the first token

- without the prefix cache,
- with it, the prefix being new: the first request computes it,
- with it, the prefix being known: other requests had it before,
- in a new engine that finds it in `cache_dir`,

and fails if a token differs. Then it prints what writing to `cache_dir` costs: the time of a decoding step of eight
sequences, which fill eight pages every 16 steps, with and without it, in turns.
"""

import argparse
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path

from ropewalk import LLM, SamplingParams

TEXT = (
    "A ropewalk is a long straight lane where strands of hemp were laid out before being twisted into rope. "
)
KINDS = ("without prefix cache", "new prefix", "known prefix", "prefix on disk")


def compare(llm: LLM, options: argparse.Namespace, folder: str) -> None:
    params = SamplingParams(temperature=0, max_tokens=options.decode, ignore_eos=True)
    length = options.prefix + options.own + options.decode
    sizes = {
        "context_length": length,
        "kv_tokens": options.max_batch * (length + 16),
        "max_batch": options.max_batch,
    }
    words = llm.encode(TEXT * (options.prefix // 8 + 2 * options.requests))
    waits: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for number in range(options.rounds + 1):  # the first one warms up, with few requests
        n_requests = options.requests if number else 2
        prefix = [words[number + 1], *words][: options.prefix]
        others, prompts = (
            [[*prefix, word, *words[i : i + options.own - 1]] for i in range(n_requests)]
            for word in (words[3], words[7])
        )
        plain, cached, earlier, later = (
            LLM.from_parts(llm.backend, llm.tokenizer, **sizes, **more)
            for more in ({"prefix_cache": False}, {}, {"cache_dir": folder}, {"cache_dir": folder})
        )
        earlier.generate(others[:1], params)
        earlier.driver.close()  # now everything is written
        tokens = []
        for kind, one, asked in zip(
            KINDS, (plain, cached, cached, later), (prompts, others, prompts, prompts), strict=True
        ):
            outputs = one.generate(asked, params)
            if asked is prompts:
                tokens.append([output.token_ids for output in outputs])
            if number:
                waits[kind].append(statistics.mean(o.timings.time_to_first_token_s for o in outputs))
        if any(each != tokens[0] for each in tokens):
            raise SystemExit("a prefix hit changed a token")
        n_disk = later.statistics().disk_tokens
        for one in (plain, cached, later):
            one.driver.close()
    print(
        f"{options.requests} requests of {options.prefix} shared and {options.own} own tokens, {options.model}\n"
    )
    print("| | mean time to first token | |\n|---|---:|---:|")
    first = statistics.median(waits[KINDS[0]])
    for kind in KINDS:
        seconds = statistics.median(waits[kind])
        print(f"| {kind} | {seconds:.2f} s | {first / seconds:.1f} × |")
    print(
        f"\nAll generated tokens are equal; the last engine found {n_disk} tokens of its prompts on disk.\n"
    )


def cost_of_writing(llm: LLM, options: argparse.Namespace, folder: str) -> None:
    """Decode eight sequences in turns with and without a folder to write to; a new seed each time, so all is new."""
    times: dict[bool, list[float]] = {True: [], False: []}
    before = sum(1 for _ in Path(folder).rglob("*.page"))
    for number in range(2 * options.turns):
        keeps = bool(number % 2)
        more = {"cache_dir": folder} if keeps else {}
        one = LLM.from_parts(
            llm.backend, llm.tokenizer, context_length=256, kv_tokens=2048, max_batch=8, **more
        )
        engine = one.driver.engine
        for i in range(8):
            params = SamplingParams(seed=1000 * number + i, max_tokens=128, ignore_eos=True)
            engine.add_request(llm.encode(f"Story {number} {i}:"), params)
        stamps = []
        while engine.has_unfinished:
            engine.step()
            stamps.append(time.perf_counter())
        times[keeps] += [b - a for a, b in pairwise(stamps)]
        one.driver.close()
    written = sum(1 for _ in Path(folder).rglob("*.page")) - before
    page = llm.backend.page_bytes()
    print(f"Decoding eight sequences; {written} pages of {page:,} bytes were written:\n")
    print("| | median step | 90 % | 99 % | mean |\n|---|---:|---:|---:|---:|")
    for keeps, name in ((False, "memory only"), (True, "with cache_dir")):
        cuts = statistics.quantiles(times[keeps], n=100)
        cells = (statistics.median(times[keeps]), cuts[89], cuts[98], statistics.mean(times[keeps]))
        print(f"| {name} | {' | '.join(f'{1000 * cell:.2f} ms' for cell in cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--prefix", type=int, default=1024, help="tokens that all prompts share")
    parser.add_argument("--own", type=int, default=16, help="tokens of each prompt after them")
    parser.add_argument("--decode", type=int, default=8, help="tokens to generate for each")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--max-batch", type=int, default=32)
    parser.add_argument("--turns", type=int, default=3, help="of decoding with and without writing")
    options = parser.parse_args()
    with LLM(options.model) as llm, tempfile.TemporaryDirectory() as folder:
        compare(llm, options, folder)
        cost_of_writing(llm, options, folder)


if __name__ == "__main__":
    main()
