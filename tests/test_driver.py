"""Work in pieces beside the steps of an engine. What else a driver does is tested where `LLM` and `AsyncEngine` are."""

import runpy
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from ropewalk import SamplingParams
from ropewalk.errors import GenerationError

_TOYS = runpy.run_path(str(Path(__file__).with_name("toy_llm.py")))
toy_llm, idle, Reading = (_TOYS[name] for name in ("toy_llm", "idle", "Reading"))

SEEDED = SamplingParams(seed=3, max_tokens=30, ignore_eos=True)
TEXT = [i % 7 for i in range(39)]  # ten pieces of four tokens


def reader():
    return toy_llm(Reading(), token_budget=4, max_batch=4)


def test_a_long_text_is_embedded_between_steps():
    llm = reader()
    chunks = llm.stream("a", SEEDED)
    first = next(chunks)
    llm.backend.calls.clear()
    (vector,) = llm.embed(TEXT, normalize=False)
    assert llm.backend.calls == ["step", "piece"] * 10
    assert vector.tolist() == [TEXT[-1], 38, 39]
    llm.backend.calls.clear()
    tokens = [first.token_id, *(chunk.token_id for chunk in chunks)]
    assert tokens == toy_llm().generate("a", SEEDED)[0].token_ids
    assert llm.backend.calls == ["step"] * (30 - 11)
    assert idle(llm)


def test_without_requests_there_are_only_pieces():
    llm = reader()
    one, other = llm.embed([TEXT, [5, 6]], pooling="cls", normalize=False)
    assert llm.backend.calls == ["piece"] * 11
    assert one.tolist() == [0, 0, 4] and other.tolist() == [5, 0, 2]


def test_several_threads_wait_for_each_other():
    """Two that embed and two that generate: all get what they would alone."""
    llm, found = reader(), {}

    def generate(seed):
        found[seed] = llm.generate("ab", SamplingParams(seed=seed, max_tokens=50, ignore_eos=True))[
            0
        ].token_ids

    def embed(token):
        found[-token] = llm.embed([[token] * 60], normalize=False)[0].tolist()

    with llm.driver.lock:  # until all of them wait
        threads = [threading.Thread(target=generate, args=(seed,)) for seed in (1, 2)]
        threads += [threading.Thread(target=embed, args=(token,)) for token in (3, 4)]
        for thread in threads:
            thread.start()
        while len(llm.driver._works) < 2:
            time.sleep(0.001)
    for thread in threads:
        thread.join(300)
    for seed in (1, 2):
        params = SamplingParams(seed=seed, max_tokens=50, ignore_eos=True)
        assert found[seed] == toy_llm().generate("ab", params)[0].token_ids
    assert found[-3] == [3, 59, 60] and found[-4] == [4, 59, 60]
    assert llm.backend.calls.count("piece") == 30
    assert idle(llm) and not llm.driver._works


class TestEndings:
    def test_a_piece_that_fails_is_the_callers_alone(self):
        llm = reader()
        chunks = llm.stream("a", SEEDED)
        next(chunks)

        def pieces():
            yield
            raise ZeroDivisionError("a piece")

        with pytest.raises(ZeroDivisionError, match="a piece"):
            llm.driver.run(pieces())
        assert len(list(chunks)) == 29
        assert llm.driver.run(iter_of("done")) == "done"

    def test_ctrl_c_in_a_piece_of_another_thread(self):
        llm = reader()

        def interrupted():
            yield
            raise KeyboardInterrupt

        error = []

        def wait():
            with pytest.raises(GenerationError, match="interrupted in another thread") as info:
                llm.driver.run(interrupted())
            error.append(info)

        with llm.driver.lock:
            thread = threading.Thread(target=wait)
            thread.start()
            while not llm.driver._works:
                time.sleep(0.001)
            llm.driver.step()
            with pytest.raises(KeyboardInterrupt):
                llm.driver.step()
        thread.join(300)
        assert error and not llm.driver._works
        assert llm.embed([[1]], normalize=False).tolist() == [[1, 0, 1]]

    def test_ctrl_c_of_the_one_who_waits(self):
        llm = reader()

        def interrupted():
            raise KeyboardInterrupt
            yield

        with pytest.raises(KeyboardInterrupt):
            llm.driver.run(interrupted())
        assert not llm.driver._works
        assert llm.embed([[1]], normalize=False).tolist() == [[1, 0, 1]]

    def test_closed(self):
        llm = reader()
        llm.close()
        with pytest.raises(GenerationError, match="closed"):
            llm.embed([1])
        assert not llm.driver._works

    def test_a_step_that_fails_is_told_to_whoever_runs_it(self):
        llm = reader()
        chunks = llm.stream("a", SEEDED)
        next(chunks)
        llm.backend.fail_at = (len(llm.backend.batch_sizes) + 1, MemoryError("no room"))
        with pytest.raises(MemoryError, match="no room"):
            llm.embed(TEXT)
        assert not llm.driver._works
        with pytest.raises(GenerationError):
            next(chunks)
        assert np.isfinite(llm.embed(TEXT)).all()


def iter_of(result):
    yield
    return result
