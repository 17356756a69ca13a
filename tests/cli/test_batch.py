"""`ropewalk batch` as a user runs it: statuses, what it tells, and killed at any moment."""

import json
import os
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from ropewalk.batch.runner import Tally
from ropewalk.cli import batch as batch_verb
from ropewalk.cli.batch import Rate, clock, summary
from ropewalk.params import SamplingParams

_TOYS = runpy.run_path(str(Path(__file__).parents[1] / "toy_llm.py"))
toy_llm = _TOYS["toy_llm"]


def line(i, **body):
    body = {"prompt": "ab", "max_tokens": 3 + i % 7, "seed": i, "ignore_eos": True} | body
    return {"custom_id": f"r{i}", "method": "POST", "url": "/v1/completions", "body": body}


@pytest.fixture
def files(tmp_path):
    """A function that writes requests and returns the names of both files."""

    def write(*lines):
        source = tmp_path / "in.jsonl"
        source.write_text("".join(json.dumps(each) + "\n" for each in lines))
        return source, tmp_path / "out.jsonl"

    return write


@pytest.fixture
def opened(monkeypatch):
    """What models were opened."""
    opened = []

    def open_toy(model, machine, *, max_batch):
        opened.append((model, machine.n_threads, max_batch))
        return toy_llm(max_batch=max_batch)

    monkeypatch.setattr(batch_verb, "open_llm", open_toy)
    return opened


def by_name(path):
    answers = [json.loads(text) for text in path.read_text().splitlines()]
    found = {answer["custom_id"]: answer["response"] for answer in answers}
    assert len(found) == len(answers), "a line is answered twice"
    return found


class TestStatuses:
    def test_all_is_well(self, ropewalk, files, opened):
        source, out = files(*map(line, range(9)))
        done = ropewalk("batch", source, "-o", out, "--model", "m.gguf", "-t", 3, "--max-batch", 5)
        assert (done.exit_code, done.stdout) == (0, "")
        assert "9 requests in" in done.stderr
        assert "18 tokens read and" in done.stderr
        assert "failed" not in done.stderr
        assert opened == [("m.gguf", 3, 5)]
        assert {answer["body"]["model"] for answer in by_name(out).values()} == {"m"}

    def test_some_failed_also_when_there_is_nothing_left(self, ropewalk, files, opened):
        source, out = files(line(0), line(1, best=2), line(2))
        done = ropewalk("batch", source, "-o", out)
        assert done.exit_code == 3
        assert "1 of 3 failed; the first of this run: line 2: unknown field 'best'" in done.stderr
        again = ropewalk("batch", source, "-o", out)
        assert (again.exit_code, len(opened)) == (3, 1)
        assert again.stderr == "3 of 3 requests are answered already\n"
        assert ropewalk("batch", source, "-o", out, "-q").stderr == ""

    def test_what_is_refused_before_a_model_is_opened(self, ropewalk, files, opened):
        source, out = files(line(0), line(0))
        done = ropewalk("batch", source, "-o", out)
        assert done.exit_code == 1
        assert done.stderr.endswith("line 2: custom_id 'r0' is that of line 1\n")
        assert not out.exists()
        source, out = files(line(0))
        assert ropewalk("batch", source, "-o", out).exit_code == 0
        for options in (
            ["--max-tokens", 4],
            ["--model", "other"],
            ["--cache-type", "int8"],
            ["--context", 50],
        ):
            done = ropewalk("batch", source, "-o", out, *options)
            assert (done.exit_code, "answers another input" in done.stderr) == (1, True)
        for options in (["--threads", 1], ["--no-prefix-cache"], ["--max-batch", 2], ["--prompt-lookup"]):
            assert ropewalk("batch", source, "-o", out, *options).exit_code == 0
        files(line(0), line(1))
        assert ropewalk("batch", source, "-o", out).exit_code == 1
        assert len(opened) == 1
        assert ropewalk("batch", source).exit_code == 2

    def test_names_and_a_default_length(self, ropewalk, files, opened):
        source, out = files(line(0, model="gpt-4o", max_tokens=None))
        assert ropewalk("batch", source, "-o", out, "--alias", "gpt-4o", "--max-tokens", 2).exit_code == 0
        (answer,) = by_name(out).values()
        assert answer["body"]["model"] == "gpt-4o"
        assert answer["body"]["usage"]["completion_tokens"] == 2


class TestKilled:
    N = 120

    def start(self, source, out, slow_after=1_000_000):
        script = Path(__file__).with_name("fake_batch.py")
        command = [sys.executable, script, "batch", source, "-o", out, "--max-batch", "4"]
        environment = {**os.environ, "SLOW_AFTER": str(slow_after)}
        return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)

    def wait_for(self, process, out, size):
        until = time.monotonic() + 300
        while not (out.exists() and out.stat().st_size >= size):
            assert process.poll() is None and time.monotonic() < until, process.stderr.read()
            time.sleep(0.001)

    def test_at_any_moment_no_line_is_lost_or_doubled(self, files):
        source, out = files(*map(line, range(self.N)))
        for size, slow_after in ((1, 5), (20_000, 70)):
            process = self.start(source, out, slow_after)
            self.wait_for(process, out, size)
            os.kill(process.pid, signal.SIGKILL)
            assert process.wait() == -signal.SIGKILL
            process.stderr.close()
            whole = out.read_bytes()
            assert 0 < whole.count(b"\n") < self.N
            out.write_bytes(whole + whole[: whole.index(b"\n") // 2])  # as if in the middle of a write
        process = self.start(source, out)
        _, told = process.communicate(timeout=300)
        assert process.returncode == 0
        assert f"of {self.N} requests are answered already" in told
        answers = by_name(out)
        assert sorted(answers) == sorted(f"r{i}" for i in range(self.N))
        params = [SamplingParams(max_tokens=3 + i % 7, seed=i, ignore_eos=True) for i in range(self.N)]
        for i, alone in enumerate(toy_llm().generate(["ab"] * self.N, params)):
            assert answers[f"r{i}"]["body"]["choices"][0]["text"] == alone.text

    def test_ctrl_c(self, files):
        source, out = files(*map(line, range(self.N)))
        process = self.start(source, out, slow_after=5)
        self.wait_for(process, out, 1)
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=300)
        assert process.returncode == 130
        assert f"of {self.N} answered; give the command again to go on" in told
        assert out.read_bytes().endswith(b"\n")
        assert 0 < len(by_name(out)) < self.N

    def test_two_at_once(self, files):
        source, out = files(*map(line, range(self.N)))
        first = self.start(source, out, slow_after=5)
        self.wait_for(first, out, 1)
        second = self.start(source, out)
        _, told = second.communicate(timeout=300)
        assert (second.returncode, "being written by another process" in told) == (1, True)
        first.kill()
        first.communicate()


class TestTold:
    TALLY = Tally(
        100, 40, 2, n_answered=20, prompt_tokens=300, generated_tokens=500, first_error="line 1: \x1bno"
    )

    def test_clock(self):
        assert [clock(s) for s in (0.84, 59.4, 60, 125.6, 93_785)] == [
            "0.8 s",
            "59 s",
            "1:00",
            "2:06",
            "26:03:05",
        ]

    def test_rate_is_that_of_the_last_seconds(self):
        rate = Rate()
        tally = Tally(100, 0, 0, started_s=0.0)
        lines = []
        for now, tokens in ((10.0, 100), (20.0, 100), (30.0, 100), (40.0, 1100)):
            tally.generated_tokens, tally.n_answered = tokens, tokens // 50
            lines.append(rate.line(tally, now).split(",")[:2])
        assert lines == [
            ["10.0 tok/s", " 0.20 requests/s"],
            ["5.0 tok/s", " 0.10 requests/s"],
            ["0.0 tok/s", " 0.00 requests/s"],
            ["50.0 tok/s", " 1.00 requests/s"],
        ]

    def test_what_is_left(self, monkeypatch):
        monkeypatch.setattr("ropewalk.batch.runner.time", SimpleNamespace(monotonic=lambda: 50.0))
        tally = Tally(100, 40, 0, n_answered=20, started_s=40.0)
        assert (tally.elapsed_s, tally.left_s) == (10.0, 30.0)
        assert Tally(100, 40, 0, started_s=40.0).left_s is None

    def test_summary(self, monkeypatch):
        monkeypatch.setattr(Tally, "elapsed_s", 10.0)
        assert summary(self.TALLY) == (
            "20 requests in 10 s: 300 tokens read and 500 written, 50.0 tok/s\n"
            "2 of 100 failed; the first of this run: line 1: ␛no"
        )
