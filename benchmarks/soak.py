"""Memory of one engine over thousands of short requests of every kind: it should not grow.

    python benchmarks/soak.py [MODEL] [--requests 10000]

Requests with common beginnings or not, of one completion or several, read whole or as a stream, some dropped, closed,
cancelled or aborted on the way, some refused, some failing while they run. Resident memory is read at ten moments, each
after all requests so far have ended and the garbage is collected; nothing may run or hold a page then. It is counted in
three parts, as Linux does: anonymous memory, which is the process's own (packed weights, buffers, all Python objects);
shared memory, which is the KV cache; and pages of mapped files, of which the system holds one copy for all processes,
and which come as they are read: of the model, a token's row of the embedding matrix when that token is first met.

Fails if a request ends in a way that it should not, if something is left, or if the first two parts together grow by
more than `--allowed` MB from the second of these moments to the last. (Before the second, the KV cache is still being
written for the first time.)
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import gc
import os
import random
import sys
import threading
import time
from collections import Counter
from pathlib import Path

from ropewalk import LLM, AsyncEngine, SamplingParams
from ropewalk.errors import GenerationError, PromptError

MOMENTS = 10
BEGINNINGS = [
    "You are a helpful assistant who answers in one short sentence and never repeats the question. ",
    "The following is a list of facts about ropes, knots, ships and harbours, one fact a line. ",
]
ENDS = {"whole": 8, "stream": 4, "stop string": 2, "several": 2, "logprobs": 2, "closed": 2, "dropped": 2}
ENDS |= {"cancelled": 2, "aborted": 2, "refused": 1, "failing": 1}


class Broken:
    """What an output must follow, by somebody who made a mistake."""

    ended = False

    def mask(self) -> object:
        raise ValueError("a mistake")

    def accept(self, token: int) -> None:
        raise AssertionError("nothing was drawn")

    def fork(self) -> Broken:
        return self


class Soak:
    """An engine and what became of its requests."""

    def __init__(self, engine: AsyncEngine, n_tokens: int) -> None:
        self.engine, self.n_tokens = engine, n_tokens
        self.chosen = random.Random(1)
        self.ended: Counter[str] = Counter()

    async def one(self, number: int) -> None:
        """One request, ended in one of the ways."""
        chosen = self.chosen
        (end,) = chosen.choices(list(ENDS), list(ENDS.values()))
        prompt = chosen.choice(["", "", *BEGINNINGS]) + f"Number {chosen.randrange(10**6)} is"
        length = chosen.randint(1, self.n_tokens)
        params = SamplingParams(
            seed=number,
            max_tokens=length,
            n=chosen.randint(2, 3) if end == "several" else 1,
            stop="e" if end == "stop string" else (),
            logprobs=2 if end == "logprobs" else None,
        )
        await getattr(self, f"_{end.replace(' ', '_')}")(prompt, params, str(number))
        self.ended[end] += 1

    async def _whole(self, prompt: str, params: SamplingParams, name: str) -> None:
        output = await self.engine.generate(prompt, params, request_id=name)
        assert {completion.finish_reason for completion in output.outputs} <= {"stop", "length"}
        assert len(output.outputs) == params.n

    _several = _logprobs = _stop_string = _whole

    async def _stream(self, prompt: str, params: SamplingParams, name: str) -> None:
        stream = self.engine.stream(prompt, params, request_id=name)
        texts = [chunk.text async for chunk in stream]
        assert "".join(texts) == stream.output.text

    async def _closed(self, prompt: str, params: SamplingParams, name: str) -> None:
        stream = self.engine.stream(prompt, params, request_id=name)
        await anext(stream)
        await stream.aclose()

    async def _dropped(self, prompt: str, params: SamplingParams, name: str) -> None:
        async for _ in self.engine.stream(prompt, params, request_id=name):
            break

    async def _cancelled(self, prompt: str, params: SamplingParams, name: str) -> None:
        task = asyncio.create_task(self.engine.generate(prompt, params, request_id=name))
        await asyncio.sleep(self.chosen.random() / 20)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def _aborted(self, prompt: str, params: SamplingParams, name: str) -> None:
        stream = self.engine.stream(prompt, params, request_id=name)
        await asyncio.sleep(self.chosen.random() / 20)
        aborted = await self.engine.abort(name)
        assert aborted == (stream.output.finish_reason == "abort")

    async def _refused(self, prompt: str, params: SamplingParams, name: str) -> None:
        try:
            await self.engine.generate([10**9], params)
        except PromptError:
            return
        raise AssertionError("a prompt that cannot be used was accepted")

    async def _failing(self, prompt: str, params: SamplingParams, name: str) -> None:
        try:
            await self.engine.generate(prompt, params, constraint=Broken())
        except GenerationError as error:
            assert "a mistake" in str(error)
            return
        raise AssertionError("a request that must fail did not")

    async def settle(self) -> None:
        """Wait until everything has ended, and prove that nothing is left."""
        gc.collect()
        async with asyncio.timeout(60):
            while self.engine._worker.mailboxes:
                await asyncio.sleep(0.01)
        gc.collect()
        driver = self.engine.llm.driver
        with driver.lock:
            driver.engine.check()
            assert not driver.live, "a generation is left"
            statistics = driver.statistics()
        assert (statistics.running, statistics.waiting, statistics.pages_used) == (0, 0, 0), statistics


def resident_mb() -> tuple[float, float, float]:
    """Anonymous memory of this process, without what the C library keeps for later, shared memory, and mapped files."""
    with contextlib.suppress(OSError, AttributeError):  # another C library than GNU's has no such call
        ctypes.CDLL(None).malloc_trim(0)
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    anonymous, shared, files = (int(lines[key].split()[0]) for key in ("RssAnon", "RssShmem", "RssFile"))
    return anonymous * 1.024e-3, shared * 1.024e-3, files * 1.024e-3


async def soak(
    engine: AsyncEngine, n_requests: int, n_at_once: int, n_tokens: int
) -> tuple[list[tuple], Soak]:
    """Run the requests; return a row for each moment."""
    work = Soak(engine, n_tokens)
    start, rows = time.monotonic(), []
    room = asyncio.Semaphore(n_at_once)

    async def bounded(number: int) -> None:
        async with room:
            await work.one(number)

    for moment in range(MOMENTS):
        first, last = (n_requests * part // MOMENTS for part in (moment, moment + 1))
        await asyncio.gather(*(bounded(number) for number in range(first, last)))
        await work.settle()
        drawn = engine.llm.statistics().generated_tokens
        files = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
        kept = engine.llm.statistics().pages_cached
        seconds = time.monotonic() - start
        rows.append((last, seconds, drawn, *resident_mb(), kept, threading.active_count(), files))
        print(
            "{} requests, {:.0f} s, {} tokens, {:.1f} + {:.1f} + {:.1f} MB".format(*rows[-1][:6]),
            file=sys.stderr,
        )
    return rows, work


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--at-once", type=int, default=48)
    parser.add_argument("--max-batch", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=8, help="most tokens of an output")
    parser.add_argument("--allowed", type=float, default=3.0, help="MB that memory may grow")
    options = parser.parse_args()

    with LLM(options.model, context_length=256, kv_tokens=4096, max_batch=options.max_batch) as llm:

        async def run() -> tuple[list[tuple], Soak]:
            async with AsyncEngine(llm) as engine:
                return await soak(engine, options.requests, options.at_once, options.tokens)

        rows, work = asyncio.run(run())
        statistics = llm.statistics()
    print(
        "| requests | seconds | tokens drawn | own MB | KV cache MB | mapped MB | pages kept | threads | open files |\n"
        + "|---" * 9
        + "|"
    )
    for row in rows:
        print("| {:,} | {:.0f} | {:,} | {:.1f} | {:.1f} | {:.1f} | {} | {} | {} |".format(*row))
    print(
        f"\n{dict(work.ended)}; {statistics.preemptions} preemptions; {statistics.hit_rate:.0%} of the prompts' tokens "
        f"from the prefix cache; time to first token {statistics.time_to_first_token_s:.3f} s, per later token "
        f"{statistics.time_per_token_s:.4f} s"
    )
    grown = sum(rows[-1][3:5]) - sum(rows[1][3:5])
    print(f"memory other than files grew by {grown:.1f} MB from request {rows[1][0]:,} to {rows[-1][0]:,}")
    if grown > options.allowed:
        raise SystemExit(f"that is more than {options.allowed:g} MB")


if __name__ == "__main__":
    main()
