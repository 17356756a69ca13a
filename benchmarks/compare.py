"""Ropewalk beside llama.cpp: one model file, one machine, one run that alternates the two.

    python benchmarks/compare.py MODEL --peer-python /path/to/python [--neighbour] [--json]

MODEL is anything `ropewalk run` takes; the other Python is one that has llama-cpp-python installed. Each
engine lives in a process of its own for the whole run, and each round asks one, then the other, for the same
work: prefill a prompt of --prefill tokens, then decode --decode tokens greedily. llama.cpp works twice a
round, with flash attention off and on, and the better of its two medians is what Ropewalk is compared with. Every
round has a prompt of its own, so that no engine can answer from what it kept of an earlier one.

What is printed: medians over the rounds; the ratio, as the median of each round's ratio; the bytes that one
decode step has to read (weights, and keys and values at the mean context); and the share of the machine's
read bandwidth, measured between the rounds of the same run. Use a quiet machine: what other processes take is
measured too, and told. With --neighbour a process of the benchmark itself spins on the last of the CPUs all the time.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
TEXT = HERE.parent / "tests" / "data" / "alice.txt"
SETTLE_S = 0.3  # lets the threads of the engine that just worked go to sleep


class Worker:
    """A long-lived process that answers one JSON line with another."""

    def __init__(self, python: str, script: str, *arguments: object) -> None:
        command = [python, str(HERE / script), *map(str, arguments)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.hello = self._answer()

    def _answer(self) -> dict:
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{' '.join(self.process.args)} ended with status {self.process.wait()}")
        return json.loads(line)

    def ask(self, **request: object) -> dict:
        time.sleep(SETTLE_S)
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


@dataclass(frozen=True)
class Traffic:
    """Bytes that one decode step reads."""

    weights: int
    cache: int

    @property
    def total(self) -> int:
        return self.weights + self.cache


def traffic(path: Path, context: int) -> Traffic:
    """Bytes per decode step: every weight of the file once, and float16 keys and values of `context` tokens.

    Of an embedding table with a separate output matrix a step reads one row, which is not counted.
    """
    from ropewalk.checkpoint.gguf import open_gguf
    from ropewalk.model.config import ModelConfig

    with open_gguf(path) as checkpoint:
        config = ModelConfig.from_gguf(checkpoint.metadata, checkpoint.tensors)
        skipped = () if config.tied_output else ("token_embd.weight",)
        weights = sum(t.n_bytes for name, t in checkpoint.tensors.items() if name not in skipped)
        seen = sum(min(context, window or context) for window in config.layer_window)
        return Traffic(weights, 2 * seen * config.n_kv_heads * config.head_dim * 2)


def different_prompts(ids: list[int], n_tokens: int, count: int) -> list[list[int]]:
    """`count` stretches of the text, no two of which begin alike.

    An engine that keeps the keys and values of a prompt it has seen would otherwise skip the prefill from the second
    round on, and what is measured would be a look-up.
    """
    if len(ids) < n_tokens + count:
        raise SystemExit(f"--prefill: the text has only {len(ids)} tokens")
    step = (len(ids) - n_tokens) // count
    prompts = [ids[i * step : i * step + n_tokens] for i in range(count)]
    if len({tuple(prompt[:16]) for prompt in prompts}) < count:
        raise SystemExit("two prompts begin with the same 16 tokens: choose other --prefill or --repeats")
    return prompts


def run_rounds(own: Worker, peer: Worker, prompts: list[list[int]], n_steps: int) -> dict:
    """Seconds of every round, by engine, one prompt a round; the first round is thrown away as warm-up."""
    rounds: dict[str, list[dict]] = {"ropewalk": [], "off": [], "on": []}
    bandwidth, busy = [], []
    for number, prompt in enumerate(prompts):
        busy.append(share_of_cpu_in_use())
        bandwidth.append(own.ask(bandwidth=True)["bytes_per_s"])
        asked = {
            "ropewalk": own.ask(prompt=prompt, n_steps=n_steps),
            "off": peer.ask(prompt=prompt, n_steps=n_steps, flash="off"),
            "on": peer.ask(prompt=prompt, n_steps=n_steps, flash="on"),
        }
        if number:
            for engine, answer in asked.items():
                rounds[engine].append(answer)
        print(f"round {number} of {len(prompts) - 1}" + ("" if number else " (warm-up)"), file=sys.stderr)
    return {"rounds": rounds, "bandwidth": bandwidth, "busy": max(busy)}


@contextmanager
def neighbour() -> Iterator[None]:
    """A process that spins on the last CPU that this one may use."""
    last = max(os.sched_getaffinity(0))
    code = f"import os\nos.sched_setaffinity(0, {{{last}}})\nwhile True: pass"
    process = subprocess.Popen([sys.executable, "-c", code])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def share_of_cpu_in_use(seconds: float = 0.5) -> float:
    """How much of the machine other processes use now, while both engines wait: 0 ... 1, 0 if nothing tells."""

    def ticks() -> tuple[int, int]:
        user, nice, system, idle, iowait, *rest = map(int, Path("/proc/stat").read_text().split()[1:9])
        return user + nice + system + sum(rest), idle + iowait

    try:
        busy, idle = ticks()
        time.sleep(seconds)
        busy, idle = (b - a for a, b in zip((busy, idle), ticks(), strict=True))
    except OSError:
        return 0.0
    return busy / (busy + idle) if busy + idle else 0.0


def speeds(rounds: list[dict], what: str, n_tokens: int) -> list[float]:
    return [n_tokens / r[what] for r in rounds]


def summarise(measured: dict, n_prefill: int, n_decode: int, bytes_read: Traffic) -> dict:
    """The figures that are printed, from the seconds of every round."""
    rounds, bandwidth = measured["rounds"], statistics.median(measured["bandwidth"])
    summary: dict = {"read_bandwidth_bytes_per_s": bandwidth}
    for phase, n_tokens in (("prefill", n_prefill), ("decode", n_decode)):
        own = speeds(rounds["ropewalk"], f"{phase}_s", n_tokens)
        peers = {flash: speeds(rounds[flash], f"{phase}_s", n_tokens) for flash in ("off", "on")}
        best = max(peers, key=lambda flash: statistics.median(peers[flash]))
        summary[phase] = {
            "ropewalk_tokens_per_s": statistics.median(own),
            "llama_cpp_tokens_per_s": statistics.median(peers[best]),
            "llama_cpp_flash_attention": best,
            "ratio": statistics.median(a / b for a, b in zip(own, peers[best], strict=True)),
            "rounds": {"ropewalk": own, **{f"llama_cpp_flash_{k}": v for k, v in peers.items()}},
        }
    for engine in ("ropewalk", "llama_cpp"):
        share = bytes_read.total * summary["decode"][f"{engine}_tokens_per_s"] / bandwidth
        summary["decode"][f"{engine}_bandwidth_share"] = share
    same = [
        agreement(a["tokens"], b["tokens"]) for a, b in zip(rounds["ropewalk"], rounds["off"], strict=True)
    ]
    summary["others_use_of_cpu"] = measured["busy"]
    return summary | {
        "bytes_per_token": vars(bytes_read),
        "same_tokens": same,
        "compared_tokens": n_decode + 1,
    }


def agreement(a: list[int], b: list[int]) -> int:
    """How many tokens two sequences have in common before they part."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine()
    )


def report(result: dict) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table(
        "", "ropewalk", "llama.cpp", "ratio", title=f"{result['model']}, {result['threads']} threads"
    )
    for phase in ("prefill", "decode"):
        r = result[phase]
        label = f"{phase}, {result[f'{phase}_tokens']} tokens (tok/s)"
        speed = [f"{r[f'{engine}_tokens_per_s']:.1f}" for engine in ("ropewalk", "llama_cpp")]
        table.add_row(
            label,
            speed[0],
            f"{speed[1]} (flash attention {r['llama_cpp_flash_attention']})",
            f"{r['ratio']:.2f}",
        )
    shares = [f"{result['decode'][f'{engine}_bandwidth_share']:.0%}" for engine in ("ropewalk", "llama_cpp")]
    table.add_row("decode, share of bandwidth", *shares, "")
    console.print(table)
    read = result["bytes_per_token"]
    console.print(
        f"read per decoded token: {read['weights'] / 1e6:.1f} MB of weights, "
        f"{read['cache'] / 1e6:.1f} MB of cache; "
        f"read bandwidth {result['read_bandwidth_bytes_per_s'] / 1e9:.1f} GB/s\n"
        f"medians of {result['repeats']} rounds; {result['cpu']}; {result['versions'][0]} "
        f"({result['kernels']}) and {result['versions'][1]}; "
        f"greedy tokens equal before the first difference, of {result['compared_tokens']}, in each round: "
        f"{', '.join(map(str, result['same_tokens']))}",
        highlight=False,
    )
    if result["others_use_of_cpu"] > 0.05:
        console.print(
            f"Not a fair comparison: other processes used up to {result['others_use_of_cpu']:.0%} of the CPUs between "
            "the rounds. Threads that spin at a barrier, as llama.cpp's do, suffer most from that.",
            highlight=False,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--peer-python", required=True, help="a Python with llama-cpp-python")
    parser.add_argument("--threads", type=int, help="default: what Ropewalk would use")
    parser.add_argument("--repeats", type=int, default=7, help="rounds that count, after one that does not")
    parser.add_argument("--prefill", type=int, default=512, help="tokens of the prompt")
    parser.add_argument("--decode", type=int, default=128, help="tokens to decode")
    parser.add_argument("--neighbour", action="store_true", help="keep one CPU busy with something else")
    parser.add_argument("--json", action="store_true", help="one JSON object, with every round")
    options = parser.parse_args()

    from ropewalk.checkpoint.hub import resolve
    from ropewalk.kernels.team import available_threads

    path = resolve(options.model)
    n_threads = options.threads or available_threads()
    n_ctx = -(-(options.prefill + options.decode + 1) // 256) * 256

    own = Worker(sys.executable, "worker_ropewalk.py", path, n_threads, n_ctx)
    peer = Worker(options.peer_python, "worker_llama_cpp.py", path, n_threads, n_ctx)
    ids = own.ask(encode=TEXT.read_text())["ids"]
    prompts = different_prompts(ids, options.prefill, options.repeats + 1)
    with neighbour() if options.neighbour else nullcontext():
        measured = run_rounds(own, peer, prompts, options.decode)
    own.close()
    peer.close()

    bytes_read = traffic(path, options.prefill + options.decode // 2)
    result = {
        "model": path.name,
        "threads": n_threads,
        "repeats": options.repeats,
        "prefill_tokens": options.prefill,
        "decode_tokens": options.decode,
        "neighbour": options.neighbour,
        "cpu": f"{cpu_name()}, {len(os.sched_getaffinity(0))} CPUs",
        "versions": [own.hello["version"], peer.hello["version"]],
        "kernels": own.hello["system"],
        "peer_system": peer.hello["system"],
        **summarise(measured, options.prefill, options.decode, bytes_read),
    }
    if options.json:
        print(json.dumps(result, indent=2))
    else:
        report(result)


if __name__ == "__main__":
    main()
