"""The Ropewalk side of `compare.py`: answers its JSON lines with times, through the public `LLM` class.

python worker_ropewalk.py MODEL N_THREADS N_CTX
"""

import json
import os
import sys

from ropewalk import LLM, SamplingParams, __version__
from ropewalk.kernels.bandwidth import measure_read_bandwidth
from ropewalk.kernels.cpu import choose_rung

answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)


def generate(llm: LLM, prompt: list[int], n_steps: int) -> dict:
    """Prefill `prompt`, then decode `n_steps` tokens greedily; the two times in seconds."""
    params = SamplingParams(temperature=0, max_tokens=n_steps + 1, ignore_eos=True)
    (output,) = llm.generate([prompt], params)
    timings = output.timings
    return {"prefill_s": timings.prefill_s, "decode_s": timings.decode_s, "tokens": list(output.token_ids)}


def main() -> None:
    path, n_threads, n_ctx = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])

    def answer(value: dict) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    with LLM(path, n_threads=n_threads, context_length=n_ctx, max_batch=1) as llm:
        answer({"version": f"ropewalk {__version__}", "system": choose_rung().name})
        for line in sys.stdin:
            request = json.loads(line)
            if "bandwidth" in request:
                answer({"bytes_per_s": measure_read_bandwidth(n_threads)})
            elif "encode" in request:
                answer({"ids": llm.encode(request["encode"])})
            else:
                answer(generate(llm, request["prompt"], request["n_steps"]))


main()
