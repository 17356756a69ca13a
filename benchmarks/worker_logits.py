"""The llama.cpp side of `fidelity.py`: one job in, logits and greedy tokens out. Knows nothing of Ropewalk.

    /path/to/python worker_logits.py < JOB.json > ANSWER.json

runs in an environment that has llama-cpp-python. The job names `model`, `threads`, `context`, `flash`, and
  `all`:     lists of token ids; the logits of every position go to `out`/all-<i>.npy, float32 [n, vocab];
  `last`:    pairs of lists, a prompt and what was generated so far; only the last position's logits, as they
             were when the next token was chosen, `out`/last-<i>.npy, float32 [vocab];
  `greedy`:  lists of token ids, each continued by `steps` tokens; the answer holds the tokens.
Prompts are evaluated in batches of up to 512 tokens, what is generated one token at a time.
"""

import json
import os
import sys

import llama_cpp
import numpy as np

# Everything the library prints goes to stderr; the answer alone goes to the original stdout.
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)


def logits(model, ids):
    """Logits of every position, a view that the next call overwrites."""
    model.reset()
    model.eval(ids)
    return model.scores[: len(ids)]


def greedy(model, ids, n_steps):
    tokens = [int(logits(model, ids)[-1].argmax())]
    while len(tokens) < n_steps:
        model.eval(tokens[-1:])
        tokens.append(int(model.scores[model.n_tokens - 1].argmax()))
    return tokens


def main():
    job = json.load(sys.stdin)
    model = llama_cpp.Llama(
        job["model"],
        logits_all=True,
        n_ctx=job["context"],
        n_batch=512,
        n_ubatch=512,
        n_threads=job["threads"],
        n_threads_batch=job["threads"],
        flash_attn=job["flash"],
        verbose=False,
    )
    for number, ids in enumerate(job["all"]):
        np.save(f"{job['out']}/all-{number}.npy", logits(model, ids).astype(np.float32))
    for number, (prompt, generated) in enumerate(job["last"]):
        logits(model, prompt)
        for token in generated:
            model.eval([token])
        np.save(f"{job['out']}/last-{number}.npy", model.scores[model.n_tokens - 1].astype(np.float32))
    tokens = [greedy(model, ids, job["steps"]) for ids in job["greedy"]]
    json.dump({"version": f"llama-cpp-python {llama_cpp.__version__}", "greedy": tokens}, answers)
    answers.close()


main()
