"""Many streaming clients against a server for a while, some of which go in the middle of their answers.

    python benchmarks/serve_load.py MODEL.gguf [--clients 200] [--seconds 120] [--peer-python /path/to/python]

Starts `ropewalk serve` on the file, and with `--peer-python` after it llama-cpp-python's server (its `server` extra
must be installed there) on the same file, threads and context, and puts the same clients on each: chats of 8 to 64
tokens, each drawn with a seed; a fifth of the clients close their connections after a few events.

Of ours it then checks that every stream that was read to its end is complete and equal to the same request alone, that
no request and no page is left, and how the memory of the process grew in the second half. Prints one JSON object a
server. Exit status 1 if a promise was broken.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PATIENCE_S = 60.0  # after the time is up, for the requests under way
EMPTY = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
TOPICS = ["ropes", "rivers", "whales", "bread", "the moon", "clocks", "bees", "salt"]


def requests() -> list[dict[str, Any]]:
    """Sixteen different ones, so that each can be asked again alone."""
    bodies = []
    for i in range(16):
        text = f"Tell me about {TOPICS[i % len(TOPICS)]} in {2 + i // 8} sentences."
        bodies.append(
            {
                "messages": [{"role": "user", "content": text}],
                "max_tokens": (8, 16, 32, 64)[i % 4],
                "seed": 1000 + i,
                "temperature": 0.8,
                "top_p": 0.95,
            }
        )
    return bodies


@dataclass
class Tally:
    """What happened."""

    outcomes: Counter[str] = field(default_factory=Counter)
    first_token_s: list[float] = field(default_factory=list)
    events: int = 0
    texts: list[tuple[int, str]] = field(default_factory=list)
    memory: list[tuple[float, int]] = field(default_factory=list)


async def ask(port: int, body: dict[str, Any], tally: Tally, number: int, leave_after: int | None) -> None:
    """One request on a connection of its own; None reads it to its end."""
    started = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        data = json.dumps({**body, "stream": True}).encode()
        head = ["POST /v1/chat/completions HTTP/1.1", "Host: 127.0.0.1", "Content-Type: application/json"]
        head += [f"Content-Length: {len(data)}", "Connection: close", "", ""]
        writer.write("\r\n".join(head).encode() + data)
        await writer.drain()
        status = int((await reader.readline()).split()[1])
        if status != 200:
            tally.outcomes[f"status {status}"] += 1
            await asyncio.sleep(0.5)
            return
        text, finished, n_events = "", None, 0
        async for line in reader:
            if not line.startswith(b"data: "):
                continue
            if line.strip() == b"data: [DONE]":
                tally.outcomes["complete" if finished else "without a finish_reason"] += 1
                tally.texts.append((number, text))
                return
            event = json.loads(line[6:])
            if "error" in event:
                tally.outcomes["error event"] += 1
                return
            choice = event["choices"][0]
            finished = choice["finish_reason"] or finished
            if piece := choice["delta"].get("content"):
                if not text:
                    tally.first_token_s.append(time.perf_counter() - started)
                text += piece
                n_events += 1
                tally.events += 1
            if leave_after is not None and n_events >= leave_after:
                tally.outcomes["left"] += 1
                return
        tally.outcomes["cut off"] += 1
    finally:
        writer.close()


async def client(port: int, tally: Tally, rng: random.Random, end: float) -> None:
    bodies = requests()
    while time.perf_counter() < end:
        number = rng.randrange(len(bodies))
        leave_after = rng.randrange(1, 6) if rng.random() < 0.2 else None
        try:
            await ask(port, bodies[number], tally, number, leave_after)
        except (OSError, asyncio.IncompleteReadError) as error:
            tally.outcomes[type(error).__name__] += 1
            await asyncio.sleep(0.5)


async def load(port: int, pid: int, n_clients: int, seconds: float) -> Tally:
    tally = Tally()
    start = time.perf_counter()
    clients = [
        asyncio.create_task(client(port, tally, random.Random(i), start + seconds)) for i in range(n_clients)
    ]
    while time.perf_counter() < start + seconds:
        tally.memory.append((time.perf_counter() - start, resident_kb(pid)))
        await asyncio.sleep(2)
    done, late = await asyncio.wait(clients, timeout=PATIENCE_S)
    for task in late:
        task.cancel()
    tally.outcomes["still waiting at the end"] += len(late)
    for task in done:
        task.result()
    return tally


def resident_kb(pid: int) -> int:
    text = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+)", text).group(1))  # type: ignore[union-attr]


def post(port: int, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=600) as response:
        return json.load(response)


def start(command: list[str], ready: str) -> tuple[subprocess.Popen[str], threading.Thread]:
    """Start a server and wait until it says that it is ready."""
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    lines = []
    assert process.stderr is not None
    for line in process.stderr:
        lines.append(line)
        if re.search(ready, line):
            break
    else:
        raise SystemExit("".join(lines))
    drain = threading.Thread(target=lambda: [None for _ in process.stderr], daemon=True)
    drain.start()
    return process, drain


def summary(name: str, tally: Tally, seconds: float) -> dict[str, Any]:
    waits = sorted(tally.first_token_s)
    half = [kb for at, kb in tally.memory if at > seconds / 2]
    return {
        "server": name,
        "outcomes": dict(tally.outcomes),
        "chunks_per_s": round(tally.events / seconds, 1),
        "first_token_s": {
            "median": round(statistics.median(waits), 2) if waits else None,
            "p99": round(waits[int(len(waits) * 0.99)], 2) if waits else None,
        },
        "memory_mb": {
            "start": round(tally.memory[0][1] / 1000),
            "middle": round(half[0] / 1000),
            "end": round(half[-1] / 1000),
        },
    }


def ours(options: argparse.Namespace) -> bool:
    command = [sys.executable, "-m", "ropewalk", "serve", options.model, "--port", str(options.port)]
    command += ["-c", str(options.context), "-t", str(options.threads), "--max-batch", str(options.max_batch)]
    command += ["--max-queue", str(options.clients)]
    process, _ = start(command, "^Serving ")
    try:
        for body in requests()[:2]:
            post(options.port, body)
        tally = asyncio.run(load(options.port, process.pid, options.clients, options.seconds))
        told = summary("ropewalk", tally, options.seconds)
        alone = [post(options.port, body)["choices"][0]["message"]["content"] for body in requests()]
        told["equal_to_alone"] = sum(alone[number] == text for number, text in tally.texts)
        told["compared"] = len(tally.texts)
        url = f"http://127.0.0.1:{options.port}/metrics"
        metrics = urllib.request.urlopen(url, timeout=30).read().decode()
        left = {
            name: float(re.search(rf"^ropewalk:{name}{{.*}} (.*)$", metrics, re.M).group(1))  # type: ignore[union-attr]
            for name in (
                *EMPTY,
                "num_preemptions_total",
                "prefix_cache_hits_total",
                "prefix_cache_queries_total",
            )
        }
        told["metrics_at_the_end"] = left
        print(json.dumps(told), flush=True)
        fine = set(tally.outcomes) - {"still waiting at the end"} <= {"complete", "left"}
        fine = (
            fine
            and told["equal_to_alone"] == told["compared"] > 0
            and not tally.outcomes["still waiting at the end"]
        )
        return fine and not any(left[name] for name in EMPTY)
    finally:
        process.terminate()
        process.wait(60)


def peer(options: argparse.Namespace) -> None:
    command = [options.peer_python, "-m", "llama_cpp.server", "--model", options.model, "--host", "127.0.0.1"]
    command += ["--port", str(options.port), "--n_ctx", str(options.context)]
    command += ["--n_threads", str(options.threads), "--n_threads_batch", str(options.threads)]
    command += ["--interrupt_requests", "false", "--verbose", "false"]
    process, _ = start(command, "Uvicorn running")
    try:
        for body in requests()[:2]:
            post(options.port, body)
        tally = asyncio.run(load(options.port, process.pid, options.clients, options.seconds))
        print(json.dumps(summary("llama-cpp-python", tally, options.seconds)), flush=True)
    finally:
        process.terminate()
        process.wait(60)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="a GGUF file")
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--max-batch", type=int, default=32)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--port", type=int, default=8765)
    parser.add_argument("--peer-python", help="a Python that has llama-cpp-python[server]")
    options = parser.parse_args()
    fine = ours(options)
    if options.peer_python:
        peer(options)
    sys.exit(0 if fine else 1)


if __name__ == "__main__":
    main()
