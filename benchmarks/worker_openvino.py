"""The OpenVINO side of `peers.py`: answers its JSON lines with times. Runs in an environment of its own.

    /path/to/python worker_openvino.py OPENVINO_FOLDER N_THREADS

OpenVINO GenAI's pipeline with its defaults, greedy, on token ids; the times are those that it reports: to the first
token, and from there to the last. Knows nothing of Ropewalk.
"""

import json
import os
import sys

import numpy as np
import openvino
import openvino_genai

answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)


def generate(pipeline, prompt: list[int], n_steps: int) -> dict:
    """Prefill `prompt`, then decode `n_steps` tokens greedily; the two times in seconds."""
    ids = openvino.Tensor(np.array([prompt], np.int64))
    mask = openvino.Tensor(np.ones((1, len(prompt)), np.int64))
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens, config.ignore_eos, config.do_sample = n_steps + 1, True, False
    result = pipeline.generate(openvino_genai.TokenizedInputs(ids, mask), config)
    first = result.perf_metrics.get_ttft().mean / 1000
    whole = result.perf_metrics.get_generate_duration().mean / 1000
    return {"prefill_s": first, "decode_s": whole - first, "tokens": list(result.tokens[0])}


def main() -> None:
    folder, n_threads = sys.argv[1], int(sys.argv[2])
    pipeline = openvino_genai.LLMPipeline(folder, "CPU", INFERENCE_NUM_THREADS=n_threads)

    def answer(value: dict) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    answer({"version": f"openvino-genai {openvino_genai.__version__}", "system": folder})
    for line in sys.stdin:
        request = json.loads(line)
        answer(generate(pipeline, request["prompt"], request["n_steps"]))


main()
