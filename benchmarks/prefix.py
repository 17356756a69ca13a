"""What sharing a long beginning saves: requests with one prefix, with the prefix cache and without it.

    python benchmarks/prefix.py MODEL [--requests 32] [--prefix 1024]

All requests arrive at once. Prints the mean time to the first token of both, in turns, and fails if a token differs.
"""

import argparse
import statistics
from contextlib import ExitStack

from ropewalk import LLM, SamplingParams

TEXT = (
    "A ropewalk is a long straight lane where strands of hemp were laid out before being twisted into rope. "
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--prefix", type=int, default=1024, help="tokens that all prompts share")
    parser.add_argument("--own", type=int, default=16, help="tokens of each prompt after them")
    parser.add_argument("--decode", type=int, default=8, help="tokens to generate for each")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--max-batch", type=int, default=32)
    options = parser.parse_args()

    params = SamplingParams(temperature=0, max_tokens=options.decode, ignore_eos=True)
    length = options.prefix + options.own + options.decode
    with ExitStack() as stack:
        with_cache, without = (
            stack.enter_context(
                LLM(
                    options.model,
                    context_length=length,
                    kv_tokens=options.max_batch * (length + 16),
                    max_batch=options.max_batch,
                    prefix_cache=prefix_cache,
                )
            )
            for prefix_cache in (True, False)
        )
        words = with_cache.encode(TEXT * (options.prefix // 8 + options.requests))
        waits: dict[str, list[float]] = {"with": [], "without": []}
        for number in range(options.rounds + 1):  # the first one warms up
            prefix = [words[number + 1], *words][: options.prefix]  # a new one each round
            prompts = [prefix + words[i + 1 : i + 1 + options.own] for i in range(options.requests)]
            tokens = []
            for name, llm in (("with", with_cache), ("without", without)):
                outputs = llm.generate(prompts, params)
                tokens.append([output.token_ids for output in outputs])
                if number:
                    waits[name].append(statistics.mean(o.timings.time_to_first_token_s for o in outputs))
            if tokens[0] != tokens[1]:
                raise SystemExit("a prefix hit changed a token")
        hit_rate = with_cache.statistics().hit_rate
    ours, plain = (statistics.median(waits[name]) for name in ("with", "without"))
    print(
        f"{options.requests} requests of {options.prefix} shared and {options.own} own tokens, {options.model}"
    )
    print(
        f"mean time to first token: {ours:.2f} s with the prefix cache, {plain:.2f} s without: {plain / ours:.1f} times"
    )
    print(f"{hit_rate:.0%} of the prompts' tokens were found; all generated tokens are equal")


if __name__ == "__main__":
    main()
