"""How close are the logits? Ropewalk and llama.cpp against a float32 reference, on one file and one text.

    python benchmarks/fidelity.py MODEL --peer-python /path/to/python [--json]

MODEL is anything `ropewalk run` takes; the other Python is one that has llama-cpp-python installed. The
reference is `ropewalk.model.reference` (float32, NumPy; the tests hold it to transformers). Compared are:

1. The KL divergence from the reference's distribution to each engine's, at every position of the first
   `--windows` windows of `--window` tokens of the text, each window on its own, with the model's start token.
2. The perplexity of that text under each of the three.
3. Greedy continuations of twenty prompts. At the first token where the two engines differ, the gap between
   their two choices is shown under the reference and under each engine. A gap that is small beside the
   engines' own error of such gaps (root mean square over the text) is a near-tie, which rounding decides.

Prints Markdown, or one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ropewalk import LLM, SamplingParams, __version__
from ropewalk.checkpoint.gguf import open_gguf
from ropewalk.checkpoint.hub import resolve
from ropewalk.model.config import ModelConfig
from ropewalk.model.reference import Reference
from ropewalk.passes import log_softmax

HERE = Path(__file__).parent
TEXT = HERE.parent / "tests" / "data" / "alice.txt"
PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n",
    "The three laws of motion are",
    "Dear Sir or Madam,\n\nI am writing to",
    "Q: What is the boiling point of water?\nA:",
    "To make bread, first",
    "In 1969, the first humans",
    "# A shell script that counts the lines of all text files\n",
    "The main difference between a virus and a bacterium is",
    "import numpy as np\n\ndef softmax(x):",
    "My favourite season is autumn, because",
    "The ship left the harbour at dawn and",
    "A list of prime numbers: 2, 3, 5, 7,",
    "Photosynthesis is the process by which",
    "He looked at the letter again and said:",
    "SELECT name, age FROM people WHERE",
    "The quick brown fox",
    "Rope is made by twisting",
    "Der Hund lief über die Straße und",
)
ENGINES = ("Ropewalk", "llama.cpp, flash attention off", "llama.cpp, flash attention on")


@dataclass
class Peer:
    """llama.cpp in another process, one job at a time."""

    python: str
    model: Path
    threads: int
    context: int
    version: str = ""

    def run(self, out: Path, *, flash=False, every=(), last=(), greedy=(), steps=0) -> list[list[int]]:
        """Write logits to `out` (see `worker_logits.py`); returns the greedy tokens."""
        job = {
            "model": str(self.model),
            "threads": self.threads,
            "context": self.context,
            "flash": flash,
            "out": str(out),
            "all": list(every),
            "last": list(last),
            "greedy": list(greedy),
            "steps": steps,
        }
        done = subprocess.run(
            [self.python, str(HERE / "worker_logits.py")],
            input=json.dumps(job),
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise SystemExit(f"the llama.cpp worker failed:\n{done.stderr[-2000:]}")
        answer = json.loads(done.stdout)
        self.version = answer["version"]
        return answer["greedy"]


@dataclass
class Tally:
    """What is gathered of one set of logits, position by position."""

    kl: list[float] = field(default_factory=list)
    nll: list[float] = field(default_factory=list)
    gap_error: list[float] = field(default_factory=list)

    def add(self, logits: np.ndarray, truth: np.ndarray, pair: tuple[int, int], target: int | None) -> None:
        """One position: logits [vocab], the reference's log-probabilities and its two best tokens."""
        ours = log_softmax(logits)
        self.kl.append(float(np.exp(truth) @ (truth - ours)))
        self.gap_error.append(gap(ours, pair) - gap(truth, pair))
        if target is not None:
            self.nll.append(-float(ours[target]))

    def summary(self) -> dict[str, float]:
        kl = np.array(self.kl)
        return {
            "kl_mean": float(kl.mean()),
            "kl_standard_error": float(kl.std() / np.sqrt(len(kl))),
            "kl_median": float(np.median(kl)),
            "kl_p99": float(np.quantile(kl, 0.99)),
            "kl_max": float(kl.max()),
            "perplexity": float(np.exp(np.mean(self.nll))),
            "gap_error_rms": float(np.sqrt(np.mean(np.square(self.gap_error)))),
        }


def windows_of(llm: LLM, text: str, size: int, count: int) -> list[list[int]]:
    """The first `count` windows of `size` token ids, each with the model's start token if it has one."""
    start = llm.encode("")
    body = llm.encode(text)[len(start) :]
    step = size - len(start)
    if len(body) < step * count:
        raise SystemExit(f"the text has {len(body)} tokens, fewer than {step * count}")
    return [start + body[i * step : (i + 1) * step] for i in range(count)]


def compare_windows(
    windows: list[list[int]], llm: LLM, reference: Reference, peer: Peer
) -> dict[str, dict[str, float]]:
    """Divergence and perplexity of every engine; a window's logits are dropped before the next."""
    tallies = {name: Tally() for name in ("float32 reference", *ENGINES)}
    with tempfile.TemporaryDirectory() as folder:
        for number, window in enumerate(windows):
            reference_logits = reference.logits(window)
            logits = [reference_logits, llm.logits(window)]
            for flash in (False, True):
                peer.run(Path(folder), flash=flash, every=[window])
                logits.append(np.load(Path(folder) / "all-0.npy"))
            for i, target in enumerate([*window[1:], None]):
                truth = log_softmax(reference_logits[i])
                second, first = np.argpartition(truth, -2)[-2:]
                for tally, rows in zip(tallies.values(), logits, strict=True):
                    tally.add(rows[i], truth, (first, second), target)
            print(f"window {number + 1} of {len(windows)}", file=sys.stderr)
    return {name: tally.summary() for name, tally in tallies.items()}


def compare_greedy(llm: LLM, reference: Reference, peer: Peer, n_prompts: int, n_tokens: int) -> list[dict]:
    """For each prompt how many tokens are equal, and what lies behind the first that is not."""
    prompts = [llm.encode(prompt) for prompt in PROMPTS[:n_prompts]]
    params = SamplingParams(temperature=0, max_tokens=n_tokens, ignore_eos=True)
    own = [list(output.token_ids) for output in llm.generate(prompts, params)]
    with tempfile.TemporaryDirectory() as folder:
        other = peer.run(Path(folder), greedy=prompts, steps=n_tokens)
        rows = [
            {"prompt": text, "tokens": n_tokens, "equal": equal_length(a, b)}
            for text, a, b in zip(PROMPTS, own, other, strict=False)
        ]
        split = [i for i, row in enumerate(rows) if row["equal"] < n_tokens]
        peer.run(Path(folder), last=[(prompts[i], own[i][: rows[i]["equal"]]) for i in split])
        for number, i in enumerate(split):
            at = rows[i]["equal"]
            prefix = prompts[i] + own[i][:at]
            pair = own[i][at], other[i][at]
            rows[i] |= {
                "ropewalk": llm.decode([pair[0]]),
                "llama_cpp": llm.decode([pair[1]]),
                "gap_reference": gap(reference.logits(prefix)[-1], pair),
                "gap_ropewalk": gap(llm.logits(prefix)[-1], pair),
                "gap_llama_cpp": gap(np.load(Path(folder) / f"last-{number}.npy"), pair),
            }
    return rows


def equal_length(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))


def gap(logits: np.ndarray, pair: tuple[int, int]) -> float:
    """How far the first token's logit is above the second's."""
    return float(logits[pair[0]] - logits[pair[1]])


def report(result: dict) -> None:
    """Print the result as Markdown."""
    print(f"### {result['model']}\n")
    print(
        f"{result['positions']} positions ({result['windows']} windows of {result['window']} tokens), "
        f"{result['versions'][0]}, {result['versions'][1]}, "
        f"{result['threads']} threads, {result['machine']}.\n"
    )
    print("| | mean KL (nats) | median | 99 % | largest | perplexity | error of a gap |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for name, row in result["engines"].items():
        if name == "float32 reference":
            print(f"| {name} | 0 | 0 | 0 | 0 | {row['perplexity']:.3f} | 0 |")
            continue
        print(
            f"| {name} | {row['kl_mean']:.2e} ± {row['kl_standard_error']:.0e} | {row['kl_median']:.2e} "
            f"| {row['kl_p99']:.2e} | {row['kl_max']:.2e} | {row['perplexity']:.3f} "
            f"| {row['gap_error_rms']:.3f} |"
        )
    rows = result["greedy"]
    if not rows:
        return
    same = sum(row["equal"] == row["tokens"] for row in rows)
    print(f"\nGreedy, {len(rows)} prompts × {rows[0]['tokens']} tokens: {same} continuations are identical.")
    if same == len(rows):
        return
    sides = sum(row.get("gap_reference", 0) > 0 for row in rows)
    print(f"At the first difference of the other {len(rows) - same}, the reference prefers Ropewalk's token")
    print(f"{sides} times. The gaps are how far Ropewalk's choice is above llama.cpp's, in logits:\n")
    print("| prompt | token | Ropewalk | llama.cpp | reference's gap | Ropewalk's | llama.cpp's |")
    print("|---|---:|---|---|---:|---:|---:|")
    for row in rows:
        if row["equal"] < row["tokens"]:
            gaps = " | ".join(f"{row[f'gap_{who}']:+.3f}" for who in ("reference", "ropewalk", "llama_cpp"))
            cells = " | ".join(code(row[key]) for key in ("ropewalk", "llama_cpp"))
            print(f"| {code(row['prompt'])} | {row['equal'] + 1} | {cells} | {gaps} |")


def code(text: str) -> str:
    """A text as a Markdown code span inside a table."""
    return "`" + repr(text)[1:-1].replace("|", "\\|").replace("`", "'") + "`"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--peer-python", required=True, help="a Python with llama-cpp-python")
    parser.add_argument("--text", type=Path, default=TEXT, help="UTF-8 text")
    parser.add_argument("--window", type=int, default=512, help="tokens of a window")
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--prompts", type=int, default=len(PROMPTS), help="0: no greedy comparison")
    parser.add_argument("--tokens", type=int, default=48, help="tokens of a greedy continuation")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()

    path = resolve(options.model)
    context = max(options.window, options.tokens + 64)
    peer = Peer(options.peer_python, path, options.threads, context)
    with open_gguf(path) as checkpoint, LLM(path, n_threads=options.threads, context_length=context) as llm:
        config = ModelConfig.from_gguf(checkpoint.metadata, checkpoint.tensors)
        reference = Reference(config, checkpoint, keep_bytes=2**33)
        windows = windows_of(llm, options.text.read_text(encoding="utf-8"), options.window, options.windows)
        engines = compare_windows(windows, llm, reference, peer)
        greedy = compare_greedy(llm, reference, peer, options.prompts, options.tokens)
    result = {
        "model": path.name,
        "text": options.text.name,
        "window": options.window,
        "windows": options.windows,
        "positions": options.window * options.windows,
        "threads": options.threads,
        "machine": platform.machine(),
        "versions": [f"ropewalk {__version__}", peer.version],
        "engines": engines,
        "greedy": greedy,
    }
    if options.json:
        print(json.dumps(result, indent=1))
    else:
        report(result)


if __name__ == "__main__":
    main()
