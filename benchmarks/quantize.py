"""How much does quantizing lose? `ropewalk quantize` beside llama.cpp's own quantizer, type by type, on one model.

    python benchmarks/quantize.py MODEL --peer-python /path/to/python [--types Q4_K_M,Q6_K] [--calibration TEXT]
        [--noise 0.05] [--windows 4] [--prompts 20] [--threads N] [--json]

MODEL is anything `ropewalk run` takes, best one of float weights; others are dequantized to float16 first. The other
Python is one that has llama-cpp-python installed. Both quantizers start from the same float16 file. Weights that were
quantized before lie on a grid which a format of the same kind finds again; `--noise` moves them off it, by random
numbers of that size beside the root mean square of their row. For each type:

1. size, time, and the squared error of all quantized weights over their squares;
2. the KL divergence from the float16 model's distribution, mean over the positions of the first `--windows` windows of
   512 tokens of the text, and the perplexity of that text. Both files are run by Ropewalk, so that nothing but the
   weights differs. Both are also compared position by position: the standard error of such a difference is what decides
   whether one file is better than the other;
3. with `--calibration`, each quantizer's file again with the same importance matrix from that text, which should not be
   the one that is measured;
4. with `--prompts`, whether llama.cpp opens our file, and in how many prompts its greedy continuation of 32 tokens is
   ours. Where it is not, how far apart the float32 reference holds the two tokens (docs/fidelity.md).

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
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from fidelity import HERE, PROMPTS, TEXT, Peer, compare_greedy, windows_of

from ropewalk import LLM, __version__
from ropewalk.checkpoint.base import open_checkpoint
from ropewalk.checkpoint.gguf import open_gguf
from ropewalk.checkpoint.hub import resolve
from ropewalk.checkpoint.mixes import mix_named
from ropewalk.checkpoint.writer import NewTensor, write_gguf
from ropewalk.encoder import encode_rows
from ropewalk.imatrix import collect, split_windows
from ropewalk.kernels.team import available_threads
from ropewalk.model.config import ModelConfig
from ropewalk.model.reference import Reference
from ropewalk.passes import log_softmax
from ropewalk.quantize import plan_formats, quantize_model

TYPES = "Q8_0,Q6_K,Q5_K_M,Q4_K_M,Q4_K_S,Q4_0,Q3_K_M,Q2_K"
STEPS = 32
ROWS = 32  # positions whose distributions are compared at a time


def ours(source: Path, target: Path, kind: str, threads: int, importance=None) -> float:
    """Quantize with Ropewalk; seconds. A first small run keeps compilation out of them."""
    start = time.perf_counter()
    with open_checkpoint(source) as model, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantize_model(
            model, target, mix_named(kind), importance=importance, n_threads=threads, overwrite=True
        )
    return time.perf_counter() - start


def float_file(source: Path, target: Path, noise: float) -> None:
    """The float16 file that both quantizers start from."""
    rng = np.random.default_rng(0)
    with open_checkpoint(source) as model:
        chosen = plan_formats(model, mix_named("F16"))

        def rows(name: str) -> Iterator[np.ndarray]:
            raw, info = model.raw(name), model.tensors[name]
            raw = raw.reshape(-1, raw.shape[-1])
            for start in range(0, len(raw), 1024):
                x = info.format.dequantize(raw[start : start + 1024])
                if chosen[name].name == "F16":
                    size = np.sqrt(np.square(x).mean(-1, keepdims=True))
                    x = x + np.float32(noise) * size * rng.standard_normal(x.shape, np.float32)
                yield encode_rows(x, chosen[name])
            model.release()

        tensors = [NewTensor(n, model.tensors[n].shape, f) for n, f in chosen.items()]
        write_gguf(target, model.metadata, tensors, (rows(n) for n in chosen))


def theirs(python: str, source: Path, target: Path, kind: str, threads: int, importance=None) -> float:
    """Quantize with llama.cpp; seconds."""
    worker = [python, str(HERE / "worker_quantize.py"), str(source), str(target)]
    worker += [str(mix_named(kind).file_type), str(threads)]
    if importance:
        np.savez(target.with_suffix(".npz"), **importance)
        worker.append(str(target.with_suffix(".npz")))
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
                y -= x
                wrong += float(np.vdot(y, y))
                total += float(np.vdot(x, x))
                a.release()
                b.release()
    return wrong / total if total else 0.0


def distributions(path: Path, windows: list[list[int]], threads: int) -> list[np.ndarray]:
    """Log-probabilities of every position of every window, float32 [n, vocab]."""
    with LLM(path, n_threads=threads) as llm:
        return [np.concatenate([p.astype(np.float32) for p in rows_of(llm, w)]) for w in windows]


def rows_of(llm: LLM, window: list[int]) -> Iterator[np.ndarray]:
    """Log-probabilities of a window, float64, some positions at a time."""
    logits = llm.logits(window)
    for start in range(0, len(window), ROWS):
        yield log_softmax(logits[start : start + ROWS])


def against(
    truth: list[np.ndarray], path: Path, windows: list[list[int]], threads: int
) -> tuple[np.ndarray, np.ndarray]:
    """KL divergence from the float16 model at each position, and −log p of each token but a window's first."""
    kl, nll = [], []
    with LLM(path, n_threads=threads) as llm:
        for window, wanted in zip(windows, truth, strict=True):
            for start, q in zip(range(0, len(window), ROWS), rows_of(llm, window), strict=True):
                p, targets = wanted[start : start + ROWS], window[start + 1 : start + ROWS + 1]
                kl.append((np.exp(p) * (p - q)).sum(-1))
                nll.append(-q[np.arange(len(targets)), targets])
    return np.concatenate(kl), np.concatenate(nll)


def standard_error(values: np.ndarray) -> float:
    return float(values.std() / np.sqrt(len(values)))


def summary(kl: np.ndarray, nll: np.ndarray) -> dict[str, float]:
    return {
        "kl_mean": float(kl.mean()),
        "kl_standard_error": standard_error(kl),
        "kl_p99": float(np.quantile(kl, 0.99)),
        "perplexity": float(np.exp(nll.mean())),
    }


def beside(ours: tuple[np.ndarray, np.ndarray], theirs: tuple[np.ndarray, np.ndarray]) -> dict[str, float]:
    """Differences of two files at the same positions, ours less theirs: of the KL, and of log perplexity."""
    kl, nll = (a - b for a, b in zip(ours, theirs, strict=True))
    return {
        "kl": float(kl.mean()),
        "kl_standard_error": standard_error(kl),
        "log_perplexity": float(nll.mean()),
        "log_perplexity_standard_error": standard_error(nll),
    }


def partings(path: Path, peer: Peer, options: argparse.Namespace, threads: int) -> list[dict]:
    """Both engines' greedy texts from our file; see `fidelity.compare_greedy`."""
    peer.model = path
    with open_gguf(path) as file, LLM(path, n_threads=threads) as llm:
        config = ModelConfig.from_gguf(file.metadata, file.tensors)
        reference = Reference(config, file, keep_bytes=2**33)
        return compare_greedy(llm, reference, peer, options.prompts, STEPS)


def compare(options: argparse.Namespace, folder: Path) -> dict:
    threads, python = options.threads or available_threads(), options.peer_python
    base = folder / "base.gguf"
    float_file(resolve(options.model), base, options.noise)
    with LLM(base, n_threads=threads) as llm:
        windows = windows_of(llm, options.text.read_text("utf-8"), 512, options.windows)
    truth = distributions(base, windows, threads)
    nll = [-p[np.arange(len(w) - 1), w[1:]] for p, w in zip(truth, windows, strict=True)]
    importance = calibrate(base, options.calibration) if options.calibration else None
    peer = Peer(python, base, threads, 1024)
    rows = {}
    for kind in options.types.split(","):
        a, b = folder / "ours.gguf", folder / "theirs.gguf"
        files, found = {}, {}
        for weights, words in ((None, ""), (importance, ", calibrated"))[: 2 if importance else 1]:
            for who, path, seconds in (
                (f"Ropewalk{words}", a, ours(base, a, kind, threads, weights)),
                (f"llama.cpp{words}", b, theirs(python, base, b, kind, threads, weights)),
            ):
                found[who] = against(truth, path, windows, threads)
                files[who] = {
                    "bytes": path.stat().st_size,
                    "seconds": seconds,
                    "weight_error": weight_error(base, path),
                    **summary(*found[who]),
                }
            files[f"Ropewalk{words}"]["beside"] = beside(
                found[f"Ropewalk{words}"], found[f"llama.cpp{words}"]
            )
            if not words and options.prompts:
                files["Ropewalk"]["greedy"] = partings(a, peer, options, threads)
        rows[kind] = files
        print(kind, json.dumps(rows[kind]), file=sys.stderr, flush=True)
    return {
        "model": Path(options.model).name,
        "noise": options.noise,
        "positions": sum(map(len, windows)),
        "versions": [f"ropewalk {__version__}", *([peer.version] if peer.version else [])],
        "threads": threads,
        "perplexity": float(np.exp(np.mean(np.concatenate(nll)))),
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
    noise = f", with noise of {result['noise']:g}," if result["noise"] else ""
    lines = [
        f"### {result['model']}",
        "",
        f"{result['positions']} positions, {', '.join(result['versions'])}, {result['threads']} threads. Perplexity of",
        f"the float16 model{noise}: {result['perplexity']:.3f}. Both files are run by Ropewalk.",
        "",
        "| type | MB | quantizer | seconds | error of weights | mean KL (nats) | KL, 99 % | perplexity "
        "| KL beside llama.cpp | perplexity beside it |",
        "|---|---:|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for kind, files in result["types"].items():
        for who, each in files.items():
            lines.append(
                f"| {kind} | {each['bytes'] / 1e6:.1f} | {who} | {each['seconds']:.1f} | {each['weight_error']:.3e} | "
                f"{each['kl_mean']:.4f} ± {each['kl_standard_error']:.4f} | {each['kl_p99']:.3f} | "
                f"{each['perplexity']:.3f} | {differences(each)} |"
            )
    greedy = {kind: files["Ropewalk"].get("greedy") for kind, files in result["types"].items()}
    if any(greedy.values()):
        lines += [
            "",
            "| type | same greedy text | gap where they part: median | largest |",
            "|---|---:|---:|---:|",
        ]
        lines += [f"| {kind} | {gaps(rows)} |" for kind, rows in greedy.items() if rows]
    return "\n".join(lines)


def differences(each: dict) -> str:
    """Two cells: how much smaller KL and perplexity are than llama.cpp's."""
    if (other := each.get("beside")) is None:
        return "|"
    ratio, error = np.expm1(other["log_perplexity"]), other["log_perplexity_standard_error"]
    return f"{other['kl']:+.5f} ± {other['kl_standard_error']:.5f} | {100 * ratio:+.2f} ± {100 * error:.2f} %"


def gaps(rows: list[dict]) -> str:
    """Three cells: how many texts are the same, and how far the reference holds the tokens apart elsewhere."""
    apart = [abs(row["gap_reference"]) for row in rows if row["equal"] < row["tokens"]]
    found = f"{np.median(apart):.3f} | {max(apart):.3f}" if apart else "|"
    return f"{len(rows) - len(apart)} of {len(rows)} | {found}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--peer-python", required=True)
    parser.add_argument("--types", default=TYPES)
    parser.add_argument("--noise", type=float, default=0.0, help="beside the root mean square of a row")
    parser.add_argument("--text", type=Path, default=TEXT, help="UTF-8 text to measure on")
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument(
        "--prompts", type=int, default=0, help=f"greedy texts to compare, up to {len(PROMPTS)}"
    )
    parser.add_argument("--calibration", type=Path, help="UTF-8 text for an importance matrix")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = compare(options, Path(folder))
    print(json.dumps(result) if options.json else markdown(result))


if __name__ == "__main__":
    main()
