"""What choosing a token costs, and its share of a decode step.

    python benchmarks/sampler.py [MODEL] [--repeats 50] [--plain]

With a model (anything `ropewalk run` takes): real logits of its own vocabulary, and the decode time of the
same run beside it. Without one: a synthetic vocabulary of 262,144 tokens. Prints medians of the time that the
calling thread computed for, so that other work on the machine shows less; a decode step is wall time. `--plain`
measures the readable sampler too.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np

from ropewalk import LLM, SamplingParams
from ropewalk.engine.sampler import Context, choose, choose_plainly, logprob, logprob_plainly

PROMPT = "The sea was calm that morning, and the old man said to the boy:"
KNOBS = [
    {"temperature": 0.0},
    {"temperature": 0.0, "repetition_penalty": 1.1},
    {},
    {"top_k": 40},
    {"top_p": 0.95},
    {"min_p": 0.05},
    {"typical_p": 0.9},
    {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05},
    {
        "temperature": 0.8,
        "top_k": 40,
        "top_p": 0.95,
        "min_p": 0.05,
        "repetition_penalty": 1.1,
        "frequency_penalty": 0.2,
        "presence_penalty": 0.2,
    },
    {"temperature": 2.0, "top_p": 0.95},
    {"temperature": 2.0, "typical_p": 0.95},
]


def synthetic(vocab_size: int) -> np.ndarray:
    """Logits with a few hundred likely tokens above a wide bulk, as models give them."""
    rng = np.random.default_rng(0)
    logits = rng.standard_normal(vocab_size, dtype=np.float32) * np.float32(2.5)
    logits[rng.integers(0, vocab_size, 200)] += rng.uniform(5, 15, 200).astype(np.float32)
    return logits


def median_ms(work, repeats: int) -> float:
    times = []
    for number in range(repeats):
        start = time.thread_time()
        work(number)
        times.append(time.thread_time() - start)
    return statistics.median(times) * 1e3


def rows_of(logits: np.ndarray, context: Context, choose, logprob, repeats: int) -> dict[str, float]:
    """Cost in ms by what is asked for."""
    rows = {}
    for knobs in KNOBS:
        params = SamplingParams(**knobs)

        def draw(number: int, params: SamplingParams = params) -> None:
            choose(logits, params, context, seed=1, position=number)

        name = ", ".join(f"{key} {value}" for key, value in knobs.items()) or "temperature 1.0"
        rows[name] = median_ms(draw, repeats)
    rows["logprobs of 5, in addition"] = median_ms(lambda _: logprob(logits, 7, 5), repeats)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?")
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--plain", action="store_true", help="measure the readable sampler too")
    options = parser.parse_args()
    step_ms = None
    if options.model:
        with LLM(options.model, context_length=256, max_batch=1) as llm:
            logits = llm.logits(llm.encode(PROMPT))[-1]
            greedy = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
            runs = [llm.generate(PROMPT, greedy)[0].timings for _ in range(3)]
            step_ms = statistics.median(run.decode_s / (run.generated_tokens - 1) for run in runs) * 1e3
    else:
        logits = synthetic(262_144)
    context = Context(np.arange(100, dtype=np.int32), np.arange(50, dtype=np.int32))
    start = time.perf_counter()
    choose(logits, SamplingParams(), context, seed=1, position=0)
    logprob(logits, 7, 5)
    ready_s = time.perf_counter() - start

    step = f"; one decode step {step_ms:.2f} ms" if step_ms else ""
    print(f"{options.model or 'synthetic logits'}, {len(logits):,} tokens in the vocabulary{step}")
    print(f"compiling, or loading what was compiled before: {ready_s:.2f} s")
    rows = rows_of(logits, context, choose, logprob, options.repeats)
    plain = rows_of(logits, context, choose_plainly, logprob_plainly, 5) if options.plain else {}
    width = max(len(name) for name in rows)
    for name, cost_ms in rows.items():
        share = f"  {cost_ms / step_ms:6.1%} of a step" if step_ms else ""
        readable = f"  {plain[name]:8.2f} ms plainly" if plain else ""
        print(f"{name:<{width}}  {cost_ms:7.3f} ms{share}{readable}")


if __name__ == "__main__":
    main()
