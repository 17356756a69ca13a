"""How much does quantizing lose? `ropewalk quantize` beside llama.cpp's own quantizer, type by type, on one model.

    python benchmarks/quantize.py MODEL --peer-python /path/to/python [--types Q4_K_M,Q6_K] [--calibration TEXT]

MODEL is anything `ropewalk run` takes, best one of float weights; others are dequantized to float16 first. The other
Python is one that has llama-cpp-python installed. Both quantizers start from the same float16 file. For each type:

1. size, time, and the squared error of all quantized weights over their squares;
2. the KL divergence from the float16 model's distribution, mean over the positions of the first `--windows` windows of
   512 tokens of the text, and the perplexity of that text. Both files are run by Ropewalk, so that nothing but the
   weights differs;
3. with `--calibration`, a third file, ours with an importance matrix from that text;
4. whether llama.cpp opens our file, and in how many of twenty prompts its greedy continuation of 32 tokens is ours.
   Where it is not, the two engines' rounding decided a near-tie (docs/fidelity.md).

Prints Markdown, or with `--json` one JSON object.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import numpy as np
from fidelity import HERE, PROMPTS, TEXT, Peer, windows_of

from ropewalk import LLM, SamplingParams, __version__
from ropewalk.checkpoint.base import open_checkpoint
from ropewalk.checkpoint.gguf import open_gguf
from ropewalk.checkpoint.hub import resolve
from ropewalk.checkpoint.mixes import mix_named
from ropewalk.imatrix import collect, split_windows
from ropewalk.kernels.team import available_threads
from ropewalk.model.config import ModelConfig
from ropewalk.passes import log_softmax
from ropewalk.quantize import quantize_model

TYPES = "Q8_0,Q6_K,Q5_K_M,Q4_K_M,Q4_K_S,Q4_0,Q3_K_M,Q2_K"
STEPS = 32


def ours(source: Path, target: Path, kind: str, threads: int, importance=None) -> float:
    """Quantize with Ropewalk; seconds. A first small run keeps compilation out of them."""
    start = time.perf_counter()
    with open_checkpoint(source) as model, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantize_model(
            model, target, mix_named(kind), importance=importance, n_threads=threads, overwrite=True
        )
    return time.perf_counter() - start


def theirs(python: str, source: Path, target: Path, kind: str, threads: int) -> float:
    """Quantize with llama.cpp; seconds."""
    worker = [python, str(HERE / "worker_quantize.py"), str(source), str(target)]
    worker += [str(mix_named(kind).file_type), str(threads)]
    done = subprocess.run(worker, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"the llama.cpp worker failed:\n{done.stderr[-2000:]}")
    return float(done.stdout)


def weight_error(source: Path, target: Path) -> float:
    """Σ (w' − w)² / Σ w² over the matrices that were quantized."""
    wrong = total = 0.0
    with open_gguf(source) as a, open_gguf(target) as b:
        for name, info in b.tensors.items():
            if info.format.bits_per_weight < 16:
                x, y = a.tensor(name), b.tensor(name)
                wrong += float(np.square(y - x, dtype=np.float64).sum())
                total += float(np.square(x, dtype=np.float64).sum())
                a.release()
                b.release()
    return wrong / total if total else 0.0


def distributions(path: Path, windows: list[list[int]], threads: int) -> list[np.ndarray]:
    """Log-probabilities of every position of every window, float32 [n, vocab]."""
    with LLM(path, n_threads=threads) as llm:
        return [log_softmax(llm.logits(w)).astype(np.float32) for w in windows]


def against(truth: list[np.ndarray], path: Path, windows: list[list[int]], threads: int) -> dict[str, float]:
    """KL divergence from the float16 model, and perplexity."""
    kl, nll = [], []
    with LLM(path, n_threads=threads) as llm:
        for window, p in zip(windows, truth, strict=True):
            q = log_softmax(llm.logits(window))
            kl.append((np.exp(p.astype(np.float64)) * (p - q)).sum(-1))
            nll.append(-q[np.arange(len(window) - 1), window[1:]])
    values = np.concatenate(kl)
    return {
        "kl_mean": float(values.mean()),
        "kl_standard_error": float(values.std() / np.sqrt(len(values))),
        "kl_p99": float(np.quantile(values, 0.99)),
        "perplexity": float(np.exp(np.mean(np.concatenate(nll)))),
    }


def agreement(path: Path, peer: Peer, folder: Path, threads: int) -> int:
    """In how many prompts both engines write the same tokens from our file."""
    with LLM(path, n_threads=threads) as llm:
        prompts = [llm.encode(text) for text in PROMPTS]
        params = SamplingParams(temperature=0.0, max_tokens=STEPS, ignore_eos=True)
        mine = [output.token_ids for output in llm.generate(prompts, params)]
    peer.model = path
    other = peer.run(folder, greedy=prompts, steps=STEPS)
    return sum(list(a) == list(b) for a, b in zip(mine, other, strict=True))


def compare(options: argparse.Namespace, folder: Path) -> dict:
    threads = options.threads or available_threads()
    base = folder / "base.gguf"
    ours(resolve(options.model), base, "F16", threads)
    with LLM(base, n_threads=threads) as llm:
        windows = windows_of(llm, TEXT.read_text("utf-8"), 512, options.windows)
    truth = distributions(base, windows, threads)
    nll = [-p[np.arange(len(w) - 1), w[1:]] for p, w in zip(truth, windows, strict=True)]
    importance = calibrate(base, options.calibration) if options.calibration else None
    peer = Peer(options.peer_python, base, threads, 1024)
    rows = {}
    for kind in options.types.split(","):
        a, b = folder / "ours.gguf", folder / "theirs.gguf"
        files = {"Ropewalk": (a, ours(base, a, kind, threads))}
        if importance:
            c = folder / "calibrated.gguf"
            files["Ropewalk, calibrated"] = (c, ours(base, c, kind, threads, importance))
        files["llama.cpp"] = (b, theirs(options.peer_python, base, b, kind, threads))
        rows[kind] = {
            who: {
                "bytes": path.stat().st_size,
                "seconds": seconds,
                "weight_error": weight_error(base, path),
                **against(truth, path, windows, threads),
            }
            for who, (path, seconds) in files.items()
        }
        rows[kind]["same_text"] = agreement(a, peer, folder, threads)
        print(kind, json.dumps(rows[kind]), file=sys.stderr, flush=True)
    return {
        "model": Path(options.model).name,
        "positions": sum(map(len, windows)),
        "versions": [f"ropewalk {__version__}", peer.version],
        "threads": threads,
        "perplexity": float(np.exp(np.mean(np.concatenate(nll)))),
        "prompts": len(PROMPTS),
        "types": rows,
    }


def calibrate(path: Path, text: Path):
    from ropewalk.text.tokenizer import Tokenizer

    with open_checkpoint(path) as model:
        tokenizer = Tokenizer.from_metadata(model.metadata)
        ids = tokenizer.encode(text.read_text("utf-8"), add_special=False)
        config = ModelConfig.from_gguf(model.metadata, model.tensors)
        sums = collect(model, config, split_windows(ids, tokenizer.encode(""), 512, 16))
    return {name: each.importance() for name, each in sums.items()}


def markdown(result: dict) -> str:
    lines = [
        f"### {result['model']}",
        "",
        f"{result['positions']} positions, {', '.join(result['versions'])}, {result['threads']} threads. Perplexity of",
        f"the float16 model: {result['perplexity']:.3f}. Both files are run by Ropewalk.",
        "",
        "| type | MB | quantizer | seconds | error of weights | mean KL (nats) | KL, 99 % | perplexity | same text |",
        "|---|---:|---|---:|---:|---:|---:|---:|---:|",
    ]
    for kind, row in result["types"].items():
        for who, each in row.items():
            if who == "same_text":
                continue
            same = f"{row['same_text']} of {result['prompts']}" if who == "Ropewalk" else ""
            lines.append(
                f"| {kind} | {each['bytes'] / 1e6:.1f} | {who} | {each['seconds']:.1f} | {each['weight_error']:.3e} | "
                f"{each['kl_mean']:.4f} ± {each['kl_standard_error']:.4f} | {each['kl_p99']:.3f} | "
                f"{each['perplexity']:.3f} | {same} |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--peer-python", required=True)
    parser.add_argument("--types", default=TYPES)
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--calibration", type=Path)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = compare(options, Path(folder))
    print(json.dumps(result) if options.json else markdown(result))


if __name__ == "__main__":
    main()
