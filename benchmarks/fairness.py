"""How long a decoding request waits for its neighbour's long prompt, for several sizes of chunks.

    python benchmarks/fairness.py MODEL [--prompt 4096] [--budgets 32 64 128 256 512]

One request decodes. Another one with a long prompt arrives; until its first token, each step reads a chunk of it, and
the first request gets its token in each. For every `token_budget` the table has the time of a step alone, the median
and the longest one meanwhile, how many there were, and the time to the first token of the long prompt.
"""

import argparse
import statistics
import time

from ropewalk import LLM, SamplingParams

TEXT = "The rope was laid out along the lane, strand by strand, and twisted. "


def measure(llm: LLM, budget: int, n_prompt: int) -> list[str]:
    """One row."""
    one = LLM.from_parts(
        llm.backend,
        llm.tokenizer,
        context_length=n_prompt + 8,
        kv_tokens=2 * (n_prompt + 16),
        max_batch=2,
        token_budget=budget,
        prefix_cache=False,
    )
    engine = one.driver.engine
    words = llm.encode(TEXT * (n_prompt // 8))
    steps = -(-n_prompt // (budget - 1))
    decoding = engine.add_request(
        words[:64], SamplingParams(temperature=0, max_tokens=steps + 40, ignore_eos=True)
    )

    def step() -> float:
        started = time.perf_counter()
        n_output = decoding.n_output
        engine.step()
        assert decoding.n_output == n_output + 1, "the decoding request did not get its token"
        return time.perf_counter() - started

    for _ in range(8):
        engine.step()
    alone = [step() for _ in range(16)]
    long = engine.add_request(words[:n_prompt], SamplingParams(temperature=0, max_tokens=1))
    meanwhile = []
    while not long.n_output:
        meanwhile.append(step())
    one.driver.close()
    seconds = (statistics.median(alone), statistics.median(meanwhile), max(meanwhile))
    return [
        str(budget),
        *(f"{1000 * s:.0f} ms" for s in seconds),
        str(len(meanwhile)),
        f"{sum(meanwhile):.1f} s",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--prompt", type=int, default=4096, help="tokens of the long prompt")
    parser.add_argument("--budgets", type=int, nargs="+", default=[32, 64, 128, 256, 512])
    options = parser.parse_args()
    print(
        "| token_budget | step alone | median beside the prompt | longest | steps | the prompt's first token |"
    )
    print("|---:|---:|---:|---:|---:|---:|")
    with LLM(options.model, context_length=options.prompt + 8) as llm:
        for budget in options.budgets:
            print(f"| {' | '.join(measure(llm, budget, options.prompt))} |", flush=True)


if __name__ == "__main__":
    main()
