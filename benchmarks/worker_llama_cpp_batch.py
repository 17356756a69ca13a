"""The llama.cpp side of `throughput.py`: many sequences through one context, or one after another.

    /path/to/python worker_llama_cpp_batch.py MODEL.gguf N_THREADS N_CTX_SEQ

llama-cpp-python's own classes run one sequence at a time, so this drives llama.cpp's batch interface the way its server
does: every sequence that decodes has one token in a step, prompts fill the step up to 512 tokens, and a sequence that
ends makes room for the next at once. The next token is an argmax in NumPy: no Python sampling code is charged to it.
Knows nothing of Ropewalk.
"""

import json
import os
import sys
import time
from collections import deque
from dataclasses import dataclass, field

import llama_cpp
import llama_cpp.llama_cpp as llama
import numpy as np

STEP_TOKENS = 512

# Everything the library prints goes to stderr; the answers alone go to the original stdout.
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)


@llama.llama_log_callback
def only_errors(level, text, user_data):
    if level == 4:
        sys.stderr.write(text.decode(errors="replace"))


@dataclass
class Sequence:
    prompt: list[int]
    n_output: int
    slot: int = -1
    n_read: int = 0
    output: list[int] = field(default_factory=list)


class Context:
    """One context for `n_slots` sequences; `unified` shares one buffer of keys and values among them."""

    def __init__(
        self, model, n_threads: int, n_ctx_seq: int, n_slots: int, flash: bool, unified: bool
    ) -> None:
        params = llama.llama_context_default_params()
        params.n_ctx = n_ctx_seq * n_slots
        params.n_seq_max = n_slots
        params.n_batch = params.n_ubatch = STEP_TOKENS
        params.n_threads = params.n_threads_batch = n_threads
        params.flash_attn_type = (
            llama.LLAMA_FLASH_ATTN_TYPE_ENABLED if flash else llama.LLAMA_FLASH_ATTN_TYPE_DISABLED
        )
        params.kv_unified = unified
        params.no_perf = True
        self.context = llama.llama_init_from_model(model, params)
        if not self.context:
            raise SystemExit("llama.cpp refused the context")
        self.memory = llama.llama_get_memory(self.context)
        self.n_slots = n_slots
        self.n_vocab = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
        self.batch = llama.llama_batch_init(STEP_TOKENS, 0, 1)

    def run(self, sequences: list[Sequence]) -> float:
        """Seconds that all of them take."""
        llama.llama_memory_clear(self.memory, True)
        waiting, running, free = deque(sequences), [], list(range(self.n_slots))
        start = time.perf_counter()
        while waiting or running:
            while waiting and free:
                running.append(waiting.popleft())
                running[-1].slot = free.pop()
            for sequence in self.step(running):
                llama.llama_memory_seq_rm(self.memory, sequence.slot, -1, -1)
                free.append(sequence.slot)
                running.remove(sequence)
        return time.perf_counter() - start

    def step(self, running: list[Sequence]) -> list[Sequence]:
        """One token of each that decodes, and prompts up to the size of a step; returns those that ended."""
        batch, wanted = self.batch, []
        batch.n_tokens = 0
        for sequence in sorted(running, key=lambda s: not s.output):  # those that decode come first
            if sequence.output:
                tokens, position = sequence.output[-1:], len(sequence.prompt) + len(sequence.output) - 1
            else:
                room = STEP_TOKENS - batch.n_tokens
                tokens, position = sequence.prompt[sequence.n_read :][:room], sequence.n_read
                sequence.n_read += len(tokens)
            for offset, token in enumerate(tokens):
                i = batch.n_tokens
                batch.token[i], batch.pos[i] = token, position + offset
                batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = 1, sequence.slot, False
                batch.n_tokens += 1
            if tokens and sequence.n_read == len(sequence.prompt):
                batch.logits[batch.n_tokens - 1] = True
                wanted.append((sequence, batch.n_tokens - 1))
        if llama.llama_decode(self.context, batch):
            raise SystemExit("llama_decode failed")
        for sequence, row in wanted:
            logits = np.ctypeslib.as_array(
                llama.llama_get_logits_ith(self.context, row), shape=(self.n_vocab,)
            )
            sequence.output.append(int(logits.argmax()))
        return [sequence for sequence, _ in wanted if len(sequence.output) == sequence.n_output]

    def close(self) -> None:
        llama.llama_batch_free(self.batch)
        llama.llama_free(self.context)


def main() -> None:
    path, n_threads, n_ctx_seq = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    llama.llama_log_set(only_errors, None)
    llama.llama_backend_init()
    model = llama.llama_model_load_from_file(path.encode(), llama.llama_model_default_params())
    if not model:
        raise SystemExit(f"llama.cpp cannot load {path}")

    def answer(value: dict) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    answer({"version": f"llama-cpp-python {llama_cpp.__version__}"})
    for line in sys.stdin:
        asked = json.loads(line)
        context = Context(
            model, n_threads, n_ctx_seq, asked["n_slots"], asked["flash"], asked.get("unified", False)
        )
        sequences = [Sequence(prompt, n) for prompt, n in asked["requests"]]
        seconds = context.run(sequences)
        answer({"seconds": seconds, "tokens": [sequence.output for sequence in sequences]})
        context.close()


main()
