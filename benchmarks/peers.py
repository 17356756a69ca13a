"""Ropewalk beside PyTorch, OpenVINO and llama.cpp: one model, one machine, one run that takes them in turns.

    python benchmarks/peers.py MODEL.gguf --hf FOLDER --torch-python P --openvino FOLDER ... --openvino-python P
        --llama-python P [--threads 2] [--repeats 5] [--prefill 512] [--decode 64] [--json]

Each engine is a process of its own, in an environment of its own, for the whole run; an engine whose Python is not
given, as an option or as ROPEWALK_TORCH_PYTHON, ROPEWALK_OPENVINO_PYTHON or ROPEWALK_LLAMA_PYTHON, does not take part.
Every round has a prompt of its own, the first round is thrown away, and every other round begins with another engine.
PyTorch computes in bfloat16 from the weights of the same file (`export_hf.py` writes the folder), OpenVINO from 8-bit
or 4-bit weights made of those (`export_openvino.py`; several folders are several engines), llama.cpp from the file,
with flash attention off and on. Ropewalk and its workers are those of `compare.py`.

What is printed: medians over the rounds, and the ratio of Ropewalk's speed to each engine's as the median of each
round's ratio. Use a quiet machine: what other processes take is measured too, and told.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

from compare import (
    TEXT,
    Worker,
    agreement,
    cpu_name,
    different_prompts,
    share_of_cpu_in_use,
)

OWN = "ropewalk"
Ask = Callable[[list[int], int], dict]


def start_engines(options: argparse.Namespace, n_ctx: int) -> tuple[Worker, list[Worker], dict[str, Ask]]:
    """Ropewalk's worker, all workers, and how to ask each engine, by name."""
    own = Worker(sys.executable, "worker_ropewalk.py", options.model, options.threads, n_ctx)
    workers, engines = [own], {OWN: _ask(own)}
    if options.torch_python and options.hf:
        workers.append(Worker(options.torch_python, "worker_torch.py", options.hf, options.threads))
        engines["torch bf16"] = _ask(workers[-1])
    for folder in options.openvino if options.openvino_python else []:
        workers.append(Worker(options.openvino_python, "worker_openvino.py", folder, options.threads))
        engines[f"openvino {folder.name}"] = _ask(workers[-1])
    if options.llama_python:
        workers.append(
            Worker(options.llama_python, "worker_llama_cpp.py", options.model, options.threads, n_ctx)
        )
        for flash in ("off", "on"):
            engines[f"llama.cpp, flash {flash}"] = _ask(workers[-1], flash=flash)
    return own, workers, engines


def _ask(worker: Worker, **more: str) -> Ask:
    return lambda prompt, n_steps: worker.ask(prompt=prompt, n_steps=n_steps, **more)


def run_rounds(engines: dict[str, Ask], prompts: list[list[int]], n_steps: int) -> tuple[dict, float]:
    """Answers of every round that counts, by engine, and the largest share of the CPUs that others used."""
    rounds: dict[str, list[dict]] = {name: [] for name in engines}
    busy = []
    names = list(engines)
    for number, prompt in enumerate(prompts):
        busy.append(share_of_cpu_in_use())
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            answer = engines[name](prompt, n_steps)
            if number:
                rounds[name].append(answer)
        print(f"round {number} of {len(prompts) - 1}" + ("" if number else " (warm-up)"), file=sys.stderr)
    return rounds, max(busy)


def summarise(rounds: dict[str, list[dict]], n_tokens: dict[str, int]) -> dict[str, dict]:
    """Of every engine and phase, tokens per second and Ropewalk's speed beside it; and how many tokens are the same."""
    summary: dict[str, dict] = {}
    for name, answers in rounds.items():
        own = rounds[OWN]
        same = [agreement(a["tokens"], b["tokens"]) for a, b in zip(own, answers, strict=True)]
        summary[name] = {"same_tokens": same}
        for phase, n in n_tokens.items():
            seconds, ours = ([r[f"{phase}_s"] for r in each] for each in (answers, own))
            summary[name][phase] = {
                "tokens_per_s": statistics.median(n / s for s in seconds),
                "ratio": statistics.median(s / t for s, t in zip(seconds, ours, strict=True)),
                "seconds": seconds,
            }
    return summary


def report(result: dict) -> None:
    """A Markdown table."""
    n = result["n_tokens"]
    print(
        f"{result['model']}, {result['threads']} threads, {result['cpu']}; medians of {result['repeats']} rounds\n"
    )
    print(
        f"| engine | prefill of {n['prefill']}, tok/s | Ropewalk's ratio | decode of {n['decode']}, tok/s | ratio |"
    )
    print("|---|---:|---:|---:|---:|")
    for name, found in result["engines"].items():
        cells = []
        for phase in ("prefill", "decode"):
            ratio = "" if name == OWN else f"{found[phase]['ratio']:.2f}"
            cells += [f"{found[phase]['tokens_per_s']:.1f}", ratio]
        print(f"| {name} | {' | '.join(cells)} |")
    print(
        f"\n{'; '.join(result['versions'])}. Other processes used up to {result['others_use_of_cpu']:.0%} of the CPUs."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a GGUF file")
    for name, what in (
        ("torch", "torch and transformers"),
        ("openvino", "openvino-genai"),
        ("llama", "llama-cpp-python"),
    ):
        default = os.environ.get(f"ROPEWALK_{name.upper()}_PYTHON")
        parser.add_argument(f"--{name}-python", default=default, help=f"a Python with {what}")
    parser.add_argument(
        "--hf", type=Path, help="the model as a Hugging Face folder (export_hf.py), for PyTorch"
    )
    parser.add_argument("--openvino", type=Path, nargs="*", default=[], help="folders of export_openvino.py")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--repeats", type=int, default=5, help="rounds that count, after one that does not")
    parser.add_argument("--prefill", type=int, default=512, help="tokens of the prompt")
    parser.add_argument("--decode", type=int, default=64, help="tokens to decode")
    parser.add_argument("--json", action="store_true", help="one JSON object, with every round")
    options = parser.parse_args()

    n_ctx = -(-(options.prefill + options.decode + 1) // 256) * 256
    own, workers, engines = start_engines(options, n_ctx)
    if len(workers) == 1:
        parser.error(
            "no other engine: give --torch-python with --hf, --openvino-python with --openvino, or --llama-python"
        )
    ids = own.ask(encode=TEXT.read_text(encoding="utf-8"))["ids"]
    prompts = different_prompts(ids, options.prefill, options.repeats + 1)
    rounds, busy = run_rounds(engines, prompts, options.decode)
    for worker in workers:
        worker.close()
    n_tokens = {"prefill": options.prefill, "decode": options.decode}
    result = {
        "model": Path(options.model).name,
        "threads": options.threads,
        "repeats": options.repeats,
        "n_tokens": n_tokens,
        "cpu": cpu_name(),
        "versions": list(dict.fromkeys(worker.hello["version"] for worker in workers)),
        "others_use_of_cpu": busy,
        "engines": summarise(rounds, n_tokens),
    }
    if options.json:
        print(json.dumps(result, indent=2))
    else:
        report(result)


if __name__ == "__main__":
    main()
