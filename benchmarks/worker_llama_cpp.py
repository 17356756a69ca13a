"""The llama.cpp side of `compare.py`: answers its JSON lines with times. Runs in an environment of its own.

    /path/to/python worker_llama_cpp.py MODEL.gguf N_THREADS N_CTX

Uses llama.cpp's C interface through llama-cpp-python, with a batch of one token and an argmax in NumPy, so
that no Python sampling code is charged to it. Knows nothing of Ropewalk. Two contexts share the weights:
flash attention off and on.
"""

import ctypes
import json
import os
import sys
import time

import llama_cpp
import llama_cpp.llama_cpp as llama
import numpy as np

# Everything the library prints goes to stderr; the answers alone go to the original stdout.
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)


@llama.llama_log_callback
def only_errors(level, text, user_data):
    if level == 4:
        sys.stderr.write(text.decode(errors="replace"))


def open_context(model, n_threads: int, n_ctx: int, flash: int):
    params = llama.llama_context_default_params()
    params.n_ctx = n_ctx
    params.n_batch = params.n_ubatch = 512
    params.n_threads = params.n_threads_batch = n_threads
    params.flash_attn_type = flash
    params.no_perf = True
    context = llama.llama_init_from_model(model, params)
    if not context:
        raise SystemExit("llama.cpp refused the context")
    return context


def evaluate(context, tokens: np.ndarray) -> None:
    for start in range(0, len(tokens), 512):
        chunk = np.ascontiguousarray(tokens[start : start + 512], dtype=np.int32)
        batch = llama.llama_batch_get_one(chunk.ctypes.data_as(ctypes.POINTER(ctypes.c_int32)), len(chunk))
        if llama.llama_decode(context, batch):
            raise SystemExit("llama_decode failed")
    llama.llama_synchronize(context)


def generate(context, n_vocab: int, prompt: list[int], n_steps: int) -> dict:
    """Prefill `prompt`, then decode `n_steps` tokens greedily; the two times in seconds."""
    llama.llama_memory_clear(llama.llama_get_memory(context), True)
    start = time.perf_counter()
    evaluate(context, np.array(prompt))
    prefill_s = time.perf_counter() - start
    token = np.empty(1, dtype=np.int32)
    batch = llama.llama_batch_get_one(token.ctypes.data_as(ctypes.POINTER(ctypes.c_int32)), 1)
    tokens: list[int] = []
    start = time.perf_counter()
    for step in range(n_steps + 1):
        logits = np.ctypeslib.as_array(llama.llama_get_logits_ith(context, -1), shape=(n_vocab,))
        tokens.append(int(logits.argmax()))
        if step < n_steps:
            token[0] = tokens[-1]
            if llama.llama_decode(context, batch):
                raise SystemExit("llama_decode failed")
            llama.llama_synchronize(context)
    return {"prefill_s": prefill_s, "decode_s": time.perf_counter() - start, "tokens": tokens}


def main() -> None:
    path, n_threads, n_ctx = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    llama.llama_log_set(only_errors, None)
    llama.llama_backend_init()
    model = llama.llama_model_load_from_file(path.encode(), llama.llama_model_default_params())
    if not model:
        raise SystemExit(f"llama.cpp cannot load {path}")
    n_vocab = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
    contexts = {
        "off": open_context(model, n_threads, n_ctx, llama.LLAMA_FLASH_ATTN_TYPE_DISABLED),
        "on": open_context(model, n_threads, n_ctx, llama.LLAMA_FLASH_ATTN_TYPE_ENABLED),
    }
    system = llama.llama_print_system_info().decode().strip()

    def answer(value: dict) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    answer({"version": f"llama-cpp-python {llama_cpp.__version__}", "system": system})
    for line in sys.stdin:
        request = json.loads(line)
        context = contexts[request["flash"]]
        answer(generate(context, n_vocab, request["prompt"], request["n_steps"]))


main()
