"""The PyTorch side of `peers.py`: answers its JSON lines with times. Runs in an environment of its own.

    /path/to/python worker_torch.py HF_FOLDER N_THREADS

transformers in bfloat16, with a cache and logits of the last token only; an argmax in place of its sampling code.
Knows nothing of Ropewalk.
"""

import json
import os
import sys
import time

import torch
import transformers

answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)


@torch.inference_mode()
def generate(model, prompt: list[int], n_steps: int) -> dict:
    """Prefill `prompt`, then decode `n_steps` tokens greedily; the two times in seconds."""
    cache = transformers.DynamicCache(config=model.config)
    start = time.perf_counter()
    step = model(torch.tensor([prompt]), cache=cache, logits_to_keep=1)
    prefill_s = time.perf_counter() - start
    tokens: list[int] = []
    start = time.perf_counter()
    for i in range(n_steps + 1):
        tokens.append(int(step.logits[0, -1].argmax()))
        if i < n_steps:
            step = model(torch.tensor([tokens[-1:]]), cache=cache)
    return {"prefill_s": prefill_s, "decode_s": time.perf_counter() - start, "tokens": tokens}


def main() -> None:
    folder, n_threads = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(n_threads)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()

    def answer(value: dict) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    version = f"torch {torch.__version__}, transformers {transformers.__version__}"
    answer({"version": version, "system": "bfloat16"})
    for line in sys.stdin:
        request = json.loads(line)
        answer(generate(model, request["prompt"], request["n_steps"]))


main()
