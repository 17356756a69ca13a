"""`AsyncEngine`: streams on any event loop, and how each of them can end. On toys, then on the real model."""

import asyncio
import contextlib
import gc
import os
import runpy
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ropewalk import LLM, AsyncEngine, SamplingParams
from ropewalk.errors import GenerationError, InvalidParameterError, PromptError, TemplateError

_TOYS = runpy.run_path(str(Path(__file__).with_name("toy_llm.py")))
ToyBackend, ToyTokenizer, PIECES = _TOYS["ToyBackend"], _TOYS["ToyTokenizer"], _TOYS["PIECES"]
toy_llm, says, idle = _TOYS["toy_llm"], _TOYS["says"], _TOYS["idle"]

SEEDED = SamplingParams(seed=3, max_tokens=12, ignore_eos=True)
LONG = SamplingParams(seed=3, max_tokens=10**6, ignore_eos=True, slide=True)
"""Goes on until somebody ends it, on however quick a machine."""
PATIENCE_S = 300.0


def seeded(seed, **options):
    return SamplingParams(**({"seed": seed, "max_tokens": 12, "ignore_eos": True} | options))


class Slow(ToyBackend):
    """A step takes a moment, and what ran is written down; `gate` can hold a step back."""

    def __init__(self, step_s=0.002, **options):
        super().__init__(**options)
        self.step_s = step_s
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()  # set while a step is held back

    def forward(self, batch, cache):
        while not self.gate.is_set():
            self.entered.set()
            time.sleep(0.0005)
        time.sleep(self.step_s)
        return super().forward(batch, cache)


def go(coroutine):
    """Run it on a loop of its own, but not for ever."""

    async def bounded():
        async with asyncio.timeout(PATIENCE_S):
            return await coroutine

    return asyncio.run(bounded())


def run(main):
    """Run `main(engine, llm)` on a toy; afterwards nothing may be left of any request."""
    llm = toy_llm(Slow(), context_length=512, kv_tokens=2048)

    async def inside():
        async with AsyncEngine(llm) as engine:
            await main(engine, llm)
            await settled(engine)

    go(inside())
    assert idle(llm)


async def until(condition):
    while not condition():
        await asyncio.sleep(0.001)


async def settled(engine):
    """Wait until nothing runs."""
    await until(
        lambda: (
            not (engine._worker.mailboxes or engine.statistics().running or engine.statistics().pages_used)
        )
    )


async def ends_within_a_step(engine, llm):
    """A request was just given up: at most the step under way may still run it."""
    n_steps = len(llm.backend.batch_sizes)
    await settled(engine)
    assert len(llm.backend.batch_sizes) <= n_steps + 1


async def hold(llm):
    """Wait for a step, and hold it back until the gate is opened."""
    llm.backend.gate.clear()
    llm.backend.entered.clear()
    await until(lambda: llm.backend.entered.is_set())


async def at_once(engine, llm, *coroutines):
    """Tasks of requests that are all queued before the second step begins."""
    llm.backend.gate.clear()
    tasks = [asyncio.create_task(each) for each in coroutines]
    await until(lambda: len(engine._worker.mailboxes) == len(tasks))
    llm.backend.gate.set()
    return tasks


async def abort_during_a_step(engine, llm, request_id):
    await hold(llm)
    abort = asyncio.create_task(engine.abort(request_id))
    await asyncio.sleep(0)
    llm.backend.gate.set()
    assert await abort


def alone(prompt, params=SEEDED):
    return toy_llm().generate(prompt, params)[0]


class TestStreams:
    def test_chunks_are_those_of_llm(self):
        async def main(engine, llm):
            chunks = [chunk async for chunk in engine.stream("ab", SEEDED)]
            expected = list(toy_llm().stream("ab", SEEDED))
            assert [(c.token_id, c.text) for c in chunks] == [(c.token_id, c.text) for c in expected]
            assert chunks[-1].output.outputs == expected[-1].output.outputs
            assert [c.output for c in chunks[:-1]] == [None] * 11

        run(main)

    def test_requests_share_steps_and_get_the_tokens_of_each_alone(self):
        async def main(engine, llm):
            prompts = ["a", "bc", "abc", [4, 4]]
            tasks = await at_once(engine, llm, *(engine.generate(p, SEEDED) for p in prompts))
            outputs = await asyncio.gather(*tasks)
            assert [o.token_ids for o in outputs] == [alone(p).token_ids for p in prompts]
            assert llm.backend.batch_sizes[2:12] == [4] * 10

        run(main)

    def test_several_completions_take_turns(self):
        async def main(engine, llm):
            params = SamplingParams(n=3, seed=3, max_tokens=9, ignore_eos=True)
            stream = engine.stream("ab", params)
            chunks = [chunk async for chunk in stream]
            expected = alone("ab", params)
            for completion in expected.outputs:
                own = [chunk.text for chunk in chunks if chunk.index == completion.index]
                assert "".join(own) == completion.text
            assert stream.output.outputs == expected.outputs

        run(main)

    def test_a_stop_string_ends_a_stream(self):
        async def main():
            async with AsyncEngine(says("b", "c", "d", "e")) as engine:
                output = await engine.generate("a", SamplingParams(stop="cd"))
                assert (output.text, output.finish_reason, output.stop_reason) == ("b", "stop", "cd")

        go(main())

    def test_chat(self):
        class Template:
            def render(self, messages, **_):
                return messages[-1]["content"]

        async def main():
            async with AsyncEngine(toy_llm(template=Template())) as engine:
                talk = [{"role": "user", "content": "bc"}]
                assert (await engine.chat(talk, SEEDED)).text == alone("bc").text
                chunks = [chunk.text async for chunk in engine.stream_chat(talk, SEEDED)]
                assert "".join(chunks) == alone("bc").text

        go(main())

    def test_a_queued_request_runs_before_anybody_waits_for_it(self):
        async def main(engine, llm):
            streams = [engine.stream(p, SEEDED) for p in ("a", "b")]
            await settled(engine)
            for stream, prompt in zip(streams, ("a", "b"), strict=True):
                assert "".join([c.text async for c in stream]) == alone(prompt).text

        run(main)

    def test_a_slow_reader_stalls_nobody(self):
        async def main(engine, llm):
            slow = engine.stream("a", SEEDED)
            first = await anext(slow)
            others = [await engine.generate("b", SEEDED) for _ in range(5)]
            assert {o.text for o in others} == {alone("b").text}
            assert first.text + "".join([c.text async for c in slow]) == alone("a").text

        run(main)

    def test_priority(self):
        async def main():
            llm = toy_llm(Slow(), max_batch=1)
            async with AsyncEngine(llm) as engine:
                llm.backend.gate.clear()
                ended = []

                async def ask(name, priority):
                    await engine.generate("a", SEEDED, priority=priority)
                    ended.append(name)

                tasks = [asyncio.create_task(ask("first", 0))]
                await hold(llm)
                tasks += [asyncio.create_task(ask(name, p)) for name, p in (("late", 1), ("soon", 0))]
                await asyncio.sleep(0)
                llm.backend.gate.set()
                await asyncio.gather(*tasks)
                assert ended == ["first", "soon", "late"]

        go(main())

    def test_streams_on_several_loops_of_several_threads(self):
        llm = toy_llm(Slow())
        engine = AsyncEngine(llm)
        found = {}

        def work(prompt):
            async def main():
                found[prompt] = "".join([c.text async for c in engine.stream(prompt, SEEDED)])

            go(main())

        threads = [threading.Thread(target=work, args=(p,)) for p in ("a", "b", "c", "ab", "bc", "abc")]
        for thread in threads:
            thread.start()
        found["direct"] = llm.generate("cc", SEEDED)[0].text  # the LLM itself is not taken
        for thread in threads:
            thread.join(PATIENCE_S)
        go(engine.close())
        assert found.pop("direct") == alone("cc").text
        assert found == {p: alone(p).text for p in ("a", "b", "c", "ab", "bc", "abc")}
        assert idle(llm)

    def test_time_to_first_token_counts_from_the_call(self):
        async def main(engine, llm):
            llm.backend.gate.clear()
            first = engine.stream("a", SEEDED)
            await hold(llm)
            second = asyncio.create_task(engine.generate("b", SEEDED))
            await until(lambda: engine.statistics().waiting == 1)
            called_s = time.perf_counter()
            await asyncio.sleep(0.01)
            waited_s = time.perf_counter() - called_s
            llm.backend.gate.set()
            assert (await second).timings.time_to_first_token_s > waited_s
            await first.aclose()

        run(main)


async def forking(engine, llm):
    """A stream, and a task that forks it and waits for a step that is held back."""
    first = engine.stream("abc", LONG)
    await anext(first)
    llm.backend.gate.clear()
    await until(llm.backend.entered.is_set)
    fork = asyncio.create_task(first.fork(seeded(8)))
    await until(lambda: len(engine._worker.mailboxes) == 2)
    return first, fork


class TestForks:
    def test_each_goes_on_as_it_would_alone(self):
        async def main(engine, llm):
            first = engine.stream("abc", SEEDED)
            begun = [(await anext(first)).token_id for _ in range(5)]
            second = await first.fork(seeded(8))
            third = await second.fork(seeded(9))
            ends = [[chunk async for chunk in stream][-1].output for stream in (third, second, first)]
            alone = [toy_llm(context_length=512, kv_tokens=2048) for _ in range(3)]
            prompt = [0, 1, 2, *begun]
            for output, seed, other in zip(ends, (9, 8), alone, strict=False):
                (rest,) = other.generate(prompt, seeded(seed, max_tokens=7))
                assert output.token_ids == begun + rest.token_ids
            assert ends[2].token_ids == alone[2].generate("abc", SEEDED)[0].token_ids
            assert [output.prompt for output in ends] == ["abc"] * 3

        run(main)

    def test_it_begins_with_the_next_chunk_of_its_reader(self):
        """Also where the request that is forked has come to its end meanwhile."""

        async def main(engine, llm):
            first = engine.stream("abc", SEEDED)
            begun = [(await anext(first)).token_id for _ in range(2)]
            await settled(engine)
            fork = await first.fork(seeded(3))
            rest = [chunk async for chunk in fork]
            assert [chunk.token_id for chunk in rest] == [chunk.token_id async for chunk in first]
            assert rest[-1].output.token_ids[:2] == begun
            with pytest.raises(GenerationError, match="closed and cannot be forked"):
                await fork.fork()

        run(main)

    def test_before_the_first_chunk_and_one_of_several_completions(self):
        async def main(engine, llm):
            first = engine.stream("abc", seeded(5, n=3))
            fork = await first.fork(seeded(4), request_id="mine")
            (alone,) = toy_llm(context_length=512, kv_tokens=2048).generate("abc", seeded(4))
            assert [chunk.token_id async for chunk in fork] == alone.token_ids
            assert fork.request_id == "mine"
            begun = []
            while len(begun) < 4:
                chunk = await anext(first)
                begun += [chunk.token_id] if chunk.index == 2 else []
            other = await first.fork(seeded(6), index=2)
            output = [chunk async for chunk in other][-1].output
            assert output.token_ids[:4] == begun and len(output.outputs) == 1
            await first.aclose()

        run(main)

    def test_what_is_refused(self):
        async def main(engine, llm):
            first = engine.stream("abc", LONG, request_id="first")
            chunks = [await anext(first) for _ in range(3)]
            stop = next(chunk.text for chunk in chunks if chunk.text)
            for options, words in (
                ({"params": seeded(1, stop=stop)}, f"stop has {stop!r}, which is in what was read"),
                ({"params": seeded(1, n=2)}, "n is 2; allowed for a fork: 1"),
                ({"params": seeded(1, max_tokens=3)}, "max_tokens is 3; allowed for this fork: more"),
                ({"index": 1}, r"index is 1; allowed: 0 \.\.\. 0"),
                ({"request_id": "first"}, "request_id is 'first'; allowed: one that is not in use"),
            ):
                with pytest.raises(InvalidParameterError, match=words):
                    await first.fork(**options)
            await first.aclose()
            with pytest.raises(GenerationError, match="this stream is closed"):
                await first.fork()

        run(main)

    def test_one_whose_reader_is_cancelled_leaves_nothing(self):
        async def main(engine, llm):
            first, fork = await forking(engine, llm)
            fork.cancel()
            with pytest.raises(asyncio.CancelledError):
                await fork
            llm.backend.gate.set()
            await until(lambda: len(engine._worker.mailboxes) == 1)
            await first.aclose()

        run(main)

    def test_the_engine_is_closed_meanwhile(self):
        async def main(engine, llm):
            first, fork = await forking(engine, llm)
            closing = asyncio.create_task(engine.close())
            await until(lambda: not engine.is_alive)
            llm.backend.gate.set()
            with pytest.raises(GenerationError, match="this AsyncEngine is closed"):
                await fork
            await closing
            with pytest.raises(GenerationError, match="this AsyncEngine is closed"):
                await first.fork()

        run(main)

    def test_of_a_request_that_was_aborted_before_its_first_step(self):
        async def main(engine, llm):
            llm.backend.gate.clear()
            busy = engine.stream("a", LONG)
            await until(llm.backend.entered.is_set)
            first = engine.stream("abc", SEEDED, request_id="first")
            aborting = asyncio.create_task(engine.abort("first"))
            await asyncio.sleep(0)
            forking = asyncio.create_task(first.fork(seeded(8)))
            await until(lambda: len(engine._worker.mailboxes) == 3)
            llm.backend.gate.set()
            (alone,) = toy_llm(context_length=512, kv_tokens=2048).generate("abc", seeded(8))
            assert [chunk.token_id async for chunk in await forking] == alone.token_ids
            assert await aborting and [chunk async for chunk in first] == []
            await busy.aclose()

        run(main)


class TestEndings:
    def test_i1_closing_a_stream_ends_its_request(self):
        async def main(engine, llm):
            async with contextlib.aclosing(engine.stream("a", LONG)) as chunks:
                for _ in range(3):
                    await anext(chunks)
            await ends_within_a_step(engine, llm)
            assert [chunk async for chunk in chunks] == []

        run(main)

    def test_dropping_a_stream_ends_its_request(self):
        async def main(engine, llm):
            async for _ in engine.stream("a", LONG):
                break
            engine.stream("b", LONG)
            await ends_within_a_step(engine, llm)

        run(main)

    @pytest.mark.parametrize("whole", [True, False])
    def test_cancelling_the_task_ends_its_request(self, whole):
        async def main(engine, llm):
            async def read():
                async for _ in engine.stream("a", LONG):
                    pass

            task = asyncio.create_task(engine.generate("a", LONG) if whole else read())
            await until(lambda: engine.statistics().running)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await ends_within_a_step(engine, llm)

        run(main)

    def test_abort_returns_when_the_pages_are_free(self):
        async def main(engine, llm):
            stream = engine.stream("ab", LONG, request_id="mine")
            head = [await anext(stream) for _ in range(3)]
            assert await engine.abort("mine") is True
            assert (engine.statistics().running, engine.statistics().pages_used) == (0, 0)
            chunks = head + [chunk async for chunk in stream]
            assert stream.output.finish_reason == "abort"
            tokens = [chunk.token_id for chunk in chunks]
            expected = toy_llm(context_length=512, kv_tokens=512).generate("ab", seeded(3, max_tokens=500))
            assert stream.output.token_ids == tokens
            assert tokens[:500] == expected[0].token_ids[: len(tokens)]
            assert await engine.abort("mine") is False
            assert await engine.abort("nobody") is False

        run(main)

    def test_an_aborted_result_is_what_there_was(self):
        async def main(engine, llm):
            task = asyncio.create_task(engine.generate("ab", LONG, request_id="mine"))
            await until(lambda: engine.statistics().generated_tokens)
            assert await engine.abort("mine")
            output = await task
            assert output.finish_reason == "abort"
            assert output.token_ids

        run(main)

    def test_abort_while_queued(self):
        async def main():
            llm = toy_llm(Slow(), max_batch=1, context_length=512, kv_tokens=1024)
            async with AsyncEngine(llm) as engine:
                llm.backend.gate.clear()
                running = engine.stream("a", LONG)
                queued = engine.stream("b", LONG, request_id="queued")
                llm.backend.gate.set()
                await anext(running)
                await abort_during_a_step(engine, llm, "queued")
                assert [chunk async for chunk in queued] == []
                assert (queued.output.token_ids, queued.output.finish_reason) == ([], "abort")
                await running.aclose()
                await ends_within_a_step(engine, llm)

        go(main())

    def test_abort_before_the_engine_has_seen_the_request(self):
        async def main(engine, llm):
            running = engine.stream("a", LONG)
            await anext(running)
            await hold(llm)
            unseen = engine.stream("c", LONG, request_id="unseen")
            assert engine.statistics().waiting == 1
            await abort_during_a_step(engine, llm, "unseen")
            assert [chunk async for chunk in unseen] == []
            assert (unseen.output.token_ids, unseen.output.finish_reason) == ([], "abort")
            await running.aclose()

        run(main)

    def test_abort_in_prefill(self):
        async def main():
            llm = toy_llm(Slow(), token_budget=16)
            async with AsyncEngine(llm) as engine:
                llm.backend.gate.clear()
                stream = engine.stream([1] * 60, SEEDED, request_id="mine")
                await abort_during_a_step(engine, llm, "mine")
                assert stream.output.token_ids == []
                assert llm.backend.batch_sizes == [16]
                assert idle(llm)

        go(main())

    def test_a_hundred_readers_that_go_away(self):
        async def main(engine, llm):
            async def leave(number):
                chunks = engine.stream([number % 11] * (number % 40 + 1), LONG)
                for _ in range(number % 4):
                    await anext(chunks)

            await asyncio.gather(*(leave(number) for number in range(100)))
            await settled(engine)
            assert (await engine.generate("ab", SEEDED)).text == alone("ab").text

        run(main)

    def test_a_loop_that_is_closed_leaves_nothing_behind(self):
        llm = toy_llm(Slow())
        engine = AsyncEngine(llm)

        async def leave():
            tasks = [asyncio.create_task(anext(engine.stream("a", LONG))) for _ in range(3)]
            await tasks[0]

        go(leave())
        go(settled(engine))
        assert go(engine.generate("a", SEEDED)).text == alone("a").text
        go(engine.close())
        assert idle(llm)


class TestFailures:
    def test_what_cannot_be_used_is_refused_at_once(self):
        async def main(engine, llm):
            for use in (engine.stream, engine.generate):
                with pytest.raises(PromptError, match="no tokens"):
                    await use([])
                with pytest.raises(InvalidParameterError, match="logit_bias has token id 13"):
                    await use("a", SamplingParams(logit_bias={13: 1.0}))
            with pytest.raises(InvalidParameterError, match="params is 5; allowed: SamplingParams"):
                engine.stream("a", 5)
            with pytest.raises(TemplateError, match="no chat template"):
                engine.stream_chat([{"role": "user", "content": "a"}])
            with pytest.raises(InvalidParameterError, match="request_id is 5; allowed: a string"):
                engine.stream("a", request_id=5)
            stream = engine.stream("a", SEEDED, request_id="mine")
            with pytest.raises(InvalidParameterError, match="request_id is 'mine'; allowed: one that is not"):
                engine.stream("a", SEEDED, request_id="mine")
            assert "".join([c.text async for c in stream]) == alone("a").text
            assert (await engine.generate("a", SEEDED, request_id="mine")).text == alone("a").text

        run(main)

    def test_options_belong_to_a_model_that_is_opened_here(self):
        with pytest.raises(InvalidParameterError, match="options are max_batch; allowed: none"):
            AsyncEngine(toy_llm(), max_batch=2)

    def test_one_that_fails_does_not_take_the_others_with_it(self):
        async def main():
            llm = toy_llm(Slow(poison={10: -np.inf}))
            never_f = SamplingParams(seed=1, max_tokens=9, ignore_eos=True, logit_bias={10: -100.0})
            async with AsyncEngine(llm) as engine:
                good, bad, streamed = await asyncio.gather(
                    engine.generate("ab", never_f),
                    engine.generate("af", never_f),
                    anext(engine.stream("af", never_f)),
                    return_exceptions=True,
                )
                assert good.text == alone("ab", never_f).text
                for error in (bad, streamed):
                    assert isinstance(error, GenerationError)
                    assert "no token can be drawn" in str(error)
                assert engine.is_alive
            assert idle(llm)

        go(main())

    def test_a_fault_in_decoding_is_a_generation_error(self):
        class Faulty(ToyTokenizer):
            def token_bytes(self, i):
                return super().token_bytes(i) if i != 7 else 1 // 0

        async def main():
            async with AsyncEngine(toy_llm(tokenizer=Faulty())) as engine:
                with pytest.raises(GenerationError, match="division") as caught:
                    await engine.generate("a", SamplingParams(logit_bias={7: 100.0}))
                assert isinstance(caught.value.__cause__, ZeroDivisionError)

        go(main())

    def test_a_failing_step_ends_those_in_it_and_the_engine_goes_on(self):
        async def main():
            llm = toy_llm(Slow(fail_at=(4, MemoryError("no room"))))
            async with AsyncEngine(llm) as engine:
                tasks = await at_once(engine, llm, *(engine.generate(p, SEEDED) for p in ("a", "b")))
                failed = await asyncio.gather(*tasks, return_exceptions=True)
                for error in failed:
                    assert isinstance(error, GenerationError)
                    assert "no room" in str(error)
                assert engine.is_alive
                assert (await engine.generate("a", SEEDED)).text == alone("a").text
            assert idle(llm)

        go(main())

    def test_a_step_of_somebody_else_that_fails_is_told(self):
        async def main():
            llm = toy_llm(Slow(), context_length=512, kv_tokens=2048)
            async with AsyncEngine(llm) as engine:
                stream = engine.stream("a", LONG)
                await anext(stream)
                with llm.driver.lock:
                    llm.backend.fail_at = (len(llm.backend.batch_sizes) + 1, KeyboardInterrupt())
                    with pytest.raises(KeyboardInterrupt):
                        llm.generate("b", SEEDED)
                with pytest.raises(GenerationError, match="KeyboardInterrupt"):
                    [chunk async for chunk in stream]
                assert (await engine.generate("a", SEEDED)).text == alone("a").text
            assert idle(llm)

        go(main())

    def test_the_death_of_the_thread_is_seen_by_everybody(self):
        async def main():
            llm = toy_llm(Slow(fail_at=(4, SystemExit("killed"))))
            engine = AsyncEngine(llm)
            assert engine.is_alive
            assert engine.error is None
            tasks = await at_once(engine, llm, *(engine.generate(p, SEEDED) for p in ("a", "b")))
            failed = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(isinstance(error, GenerationError) and "killed" in str(error) for error in failed)
            await until(lambda: not engine.is_alive)
            assert isinstance(engine.error, SystemExit)
            with pytest.raises(GenerationError, match=r"thread of this AsyncEngine died: SystemExit"):
                engine.stream("a", SEEDED)
            await engine.close()

        go(main())

    def test_a_fault_of_the_engine_itself_is_a_death_too(self, monkeypatch):
        async def main():
            llm = toy_llm(Slow(), context_length=512, kv_tokens=2048)
            engine = AsyncEngine(llm)
            stream = engine.stream("a", LONG)
            await anext(stream)
            monkeypatch.setattr("ropewalk.driver.Generation.advance", lambda *_: 1 // 0)
            with pytest.raises(GenerationError, match="died: ZeroDivisionError"):
                [chunk async for chunk in stream]
            assert isinstance(engine.error, ZeroDivisionError)
            await engine.close()

        go(main())

    def test_an_llm_that_is_closed_under_it(self):
        async def main():
            llm = toy_llm(Slow(), context_length=512, kv_tokens=2048)
            engine = AsyncEngine(llm)
            stream = engine.stream("a", LONG)
            await anext(stream)
            await asyncio.to_thread(llm.close)
            with pytest.raises(GenerationError, match="closed"):
                [chunk async for chunk in stream]
            with pytest.raises(GenerationError, match="closed"):
                engine.stream("a", SEEDED)
            await engine.close()

        go(main())

    def test_two_tasks_cannot_read_one_stream(self):
        async def main(engine, llm):
            llm.backend.gate.clear()
            stream = engine.stream("a", SEEDED)
            first = asyncio.create_task(anext(stream))
            await asyncio.sleep(0)
            with pytest.raises(RuntimeError, match="another task waits"):
                await anext(stream)
            llm.backend.gate.set()
            assert (await first).text + "".join([c.text async for c in stream]) == alone("a").text

        run(main)


class TestClosing:
    def test_waiting_streams_raise(self):
        async def main():
            llm = toy_llm(Slow(), context_length=512, kv_tokens=2048)
            engine = AsyncEngine(llm)
            stream = engine.stream("a", LONG)
            await anext(stream)
            await engine.close()
            with pytest.raises(GenerationError, match="this AsyncEngine is closed"):
                [chunk async for chunk in stream]
            assert not engine.is_alive
            assert engine.error is None
            with pytest.raises(GenerationError, match="this AsyncEngine is closed"):
                await engine.generate("a")
            await engine.close()
            assert idle(llm)
            assert not llm.backend.closed
            assert llm.generate("a", SEEDED)[0].text == alone("a").text

        go(main())

    def test_a_model_that_was_opened_here_is_closed(self, monkeypatch):
        llm = toy_llm()
        monkeypatch.setattr("ropewalk.async_engine.LLM", _opener(llm))

        async def main():
            async with AsyncEngine("a model", max_batch=3) as engine:
                assert engine.llm.opened_with == ("a model", {"max_batch": 3})

        go(main())
        assert llm.backend.closed

    def test_dropping_the_engine_ends_its_thread(self):
        llm = toy_llm(Slow())
        engine = AsyncEngine(llm)
        thread = engine._worker._thread
        go(_first(engine))
        del engine
        gc.collect()
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
        assert idle(llm)

    def test_an_idle_engine_uses_no_cpu(self):
        async def main(engine, llm):
            await engine.generate("a", SEEDED)
            await settled(engine)
            steps = len(llm.backend.batch_sizes)
            clock = time.pthread_getcpuclockid(engine._worker._thread.ident)
            for _ in range(100):  # what is left to do after a step may take a while on a busy machine
                before = time.clock_gettime(clock)
                await asyncio.sleep(0.1)
                used = time.clock_gettime(clock) - before
                if used < 0.003:
                    break
            assert used < 0.003
            assert len(llm.backend.batch_sizes) == steps

        run(main)

    @pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
    def test_a_forked_child_is_told(self):
        llm = toy_llm(Slow())
        engine = AsyncEngine(llm)
        stream = engine.stream("b", LONG, request_id="mine")
        go(until(lambda: engine.statistics().running))
        child = os.fork()
        if child == 0:
            status = 1
            with contextlib.suppress(BaseException):
                refused = 0
                for use in (
                    lambda: anext(stream),
                    lambda: engine.abort("mine"),
                    lambda: engine.generate("a"),
                ):
                    try:
                        go(use())
                    except GenerationError as error:
                        refused += "forked" in str(error)
                go(engine.close())
                usable = llm.generate("a", SEEDED)[0].text == alone("a").text and idle(llm)
                status = 0 if refused == 3 and usable and not engine.is_alive else 2
            os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert go(engine.generate("a", SEEDED)).text == alone("a").text
        assert go(anext(stream)).token_id == alone("b").token_ids[0]
        go(engine.close())

    @pytest.mark.parametrize(
        "end", ["", "raise SystemExit(0)", "del engine, llm", "raise SystemExit(asyncio.run(engine.close()))"]
    )
    def test_the_interpreter_ends_with_a_stream_under_way(self, end):
        toys = Path(__file__).with_name("toy_llm.py")
        code = f"""
import asyncio, runpy
from ropewalk import AsyncEngine, SamplingParams
llm = runpy.run_path({str(toys)!r})["toy_llm"](context_length=500, kv_tokens=1000)
engine = AsyncEngine(llm)
chunks = engine.stream("a", SamplingParams(max_tokens=10**6, ignore_eos=True, slide=True))
asyncio.run(asyncio.wait_for(anext(chunks), {PATIENCE_S}))
{end}
"""
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", code], capture_output=True, timeout=PATIENCE_S
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def _opener(llm):
    class Opener(LLM):
        def __new__(cls, model, **options):
            llm.opened_with = (model, options)
            return llm

        def __init__(self, *_, **__):
            pass

    return Opener


async def _first(engine):
    return await anext(engine.stream("a", LONG))


# Random orders.

PROMPTS = st.lists(st.integers(0, 10), min_size=1, max_size=40)
ENDS = st.sampled_from(["read", "result", "drop", "close", "cancel", "abort", "abandon"])
REQUESTS = st.lists(
    st.tuples(PROMPTS, ENDS, st.integers(0, 12), st.integers(0, 2), st.integers(1, 2)),
    min_size=1,
    max_size=12,
)


async def _act(engine, number, request, expected):
    prompt, end, n_read, priority, n = request
    params = SamplingParams(seed=number, n=n, max_tokens=14, ignore_eos=True)
    options = {"priority": priority, "request_id": str(number)}
    for _ in range(n_read % 3):
        await asyncio.sleep(0)
    if end == "result":
        assert (await engine.generate(prompt, params, **options)).outputs == expected(prompt, params)
        return
    if end == "cancel":
        task = asyncio.create_task(engine.generate(prompt, params, **options))
        await asyncio.sleep(n_read / 2000)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            assert (await task).outputs == expected(prompt, params)
        return
    stream = engine.stream(prompt, params, **options)
    if end == "abandon":
        return
    texts = [""] * n
    async for chunk in stream:
        texts[chunk.index] += chunk.text
        n_read -= 1
        if n_read <= 0 and end != "read":
            break
    full = [completion.text for completion in expected(prompt, params)]
    if end == "abort" and await engine.abort(str(number)):
        async for chunk in stream:
            texts[chunk.index] += chunk.text
        assert [c.text for c in stream.output.outputs] == texts
    if end == "close":
        await stream.aclose()
    assert texts == full if end == "read" else all(map(str.startswith, full, texts))


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(requests=REQUESTS, n_loops=st.integers(1, 3), pool=st.integers(4, 12))
def test_random_orders_over_threads_and_loops(requests, n_loops, pool):
    llm = toy_llm(kv_tokens=16 * pool, max_batch=4, token_budget=20)
    reference = toy_llm()
    lock = threading.Lock()
    engine = AsyncEngine(llm)
    faults = []

    def expected(prompt, params):
        with lock:
            return reference.generate([prompt], params)[0].outputs

    def work(share):
        async def main():
            async with asyncio.timeout(PATIENCE_S):
                await asyncio.gather(*(_act(engine, number, request, expected) for number, request in share))

        try:
            go(main())
        except BaseException as error:
            faults.append(error)

    numbered = list(enumerate(requests))
    threads = [threading.Thread(target=work, args=(numbered[i::n_loops],)) for i in range(n_loops)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert faults == []
    gc.collect()
    go(settled(engine))
    assert idle(llm)
    assert engine.is_alive
    go(engine.close())


def test_the_real_model_gives_the_tokens_of_llm(smollm2):
    prompts = ["Once upon a time", "The capital of France is", "A rope", "1, 2, 3, 4,", "def main():"]
    params = [SamplingParams(seed=i, max_tokens=12 + i, temperature=i / 4, n=1 + i % 2) for i in range(5)]
    with LLM(smollm2, context_length=256, max_batch=4) as llm:
        expected = llm.generate(prompts, params)

        async def main():
            async with AsyncEngine(llm) as engine:
                pairs = list(zip(prompts, params, strict=True))
                gone = engine.stream("This one is dropped", LONG)
                await anext(gone)
                outputs = await asyncio.gather(*(engine.generate(*pair) for pair in pairs))
                del gone
                texts = [
                    [chunk.text async for chunk in engine.stream(*pair) if not chunk.index] for pair in pairs
                ]
                await settled(engine)
                return outputs, texts

        outputs, texts = go(main())
        assert [o.outputs for o in outputs] == [o.outputs for o in expected]
        assert ["".join(text) for text in texts] == [o.text for o in expected]
        assert idle(llm)
