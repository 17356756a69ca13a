"""Answering a batch: every line exactly once, the engine kept full, memory bounded, failures where they belong."""

import asyncio
import json
import runpy
import time
from pathlib import Path

import numpy as np
import pytest

from ropewalk import AsyncEngine, SamplingParams
from ropewalk.batch.files import BatchInput, BatchOutput
from ropewalk.batch.runner import BatchRunner
from ropewalk.errors import BatchError, GenerationError
from ropewalk.text.chat import ChatTemplate

_TOYS = runpy.run_path(str(Path(__file__).parents[1] / "toy_llm.py"))
ToyBackend, toy_llm, idle = _TOYS["ToyBackend"], _TOYS["toy_llm"], _TOYS["idle"]
END = _TOYS["END"]


def completion(name, prompt="ab", **body):
    body = {"prompt": prompt, "max_tokens": 5, "seed": 3, "ignore_eos": True} | body
    return {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body}


@pytest.fixture
def batch(tmp_path):
    """A function that answers lines and returns the answers by name, the tally and the LLM."""

    def run(lines, llm=None, **options):
        source_path, target_path = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
        source_path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        llm = llm or toy_llm(template=ChatTemplate("{{ messages[-1].content }}"))
        source = BatchInput(source_path)

        async def main():
            async with AsyncEngine(llm) as engine, asyncio.timeout(60):
                with BatchOutput(target_path, source, b"") as target:
                    return await BatchRunner(engine, "toy", **options).run(source, target)

        tally = asyncio.run(main())
        assert idle(llm)
        answers = [json.loads(line) for line in target_path.read_text().splitlines()]
        by_name = {a["custom_id"]: a["response"] for a in answers}
        assert len(by_name) == len(answers) == len(lines)
        return by_name, tally, llm

    return run


def test_answers_are_those_of_the_model_alone(batch):
    lines = [completion(str(i), prompt=[i % 11] * (i + 1), seed=i, max_tokens=3 + i % 9) for i in range(30)]
    answers, tally, llm = batch(lines)
    for i in range(30):
        params = SamplingParams(seed=i, max_tokens=3 + i % 9, ignore_eos=True)
        (alone,) = toy_llm().generate([[i % 11] * (i + 1)], params)
        assert answers[str(i)]["status_code"] == 200
        assert answers[str(i)]["body"]["choices"][0]["text"] == alone.text
        assert answers[str(i)]["body"]["usage"]["completion_tokens"] == len(alone.token_ids)
    assert (tally.n_requests, tally.n_done, tally.n_failed, tally.n_answered) == (30, 30, 0, 30)
    assert tally.prompt_tokens == sum(range(1, 31))
    assert tally.generated_tokens == sum(3 + i % 9 for i in range(30))
    assert max(llm.backend.batch_sizes) >= 16


def test_chats_several_prompts_and_several_completions(batch):
    chat = {
        "custom_id": "chat",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {
            "messages": [{"role": "user", "content": "bc"}],
            "max_tokens": 4,
            "seed": 1,
            "logprobs": True,
        },
    }
    answers, _, _ = batch([chat, completion("list", prompt=["a", "b"], n=2, logprobs=1)])
    body = answers["chat"]["body"]
    assert body.get("object") == "chat.completion", body
    (alone,) = toy_llm().generate("bc", SamplingParams(seed=1, max_tokens=4))
    assert body["choices"][0]["message"]["content"] == alone.text
    assert len(body["choices"][0]["logprobs"]["content"]) == len([i for i in alone.token_ids if i != END])
    body = answers["list"]["body"]
    assert body["object"] == "text_completion"
    params = SamplingParams(seed=3, max_tokens=5, n=2, ignore_eos=True)
    expected = [c for prompt in "ab" for c in toy_llm().generate(prompt, params)[0].outputs]
    for choice, alone in zip(body["choices"], expected, strict=True):
        assert choice["text"] == alone.text
        assert len(choice["logprobs"]["tokens"]) == len(alone.token_ids)


@pytest.mark.parametrize(
    ("change", "status", "message"),
    [
        ({"url": "/v1/embeddings"}, 400, "url: input should be '/v1/chat/completions' or '/v1/completions'"),
        ({"method": "GET"}, 400, "method: input should be 'POST'"),
        ({"extra": 1}, 400, "unknown field 'extra'"),
        ({"body": 5}, 400, "body: input should be a valid dict"),
        (
            {"body": {"prompt": "a", "temprature": 1}},
            400,
            "unknown field 'temprature'; did you mean 'temperature'?",
        ),
        ({"body": {"prompt": "a", "stream": True}}, 400, "stream: a batch has no streams"),
        ({"body": {"prompt": "a", "model": "gpt-4"}}, 404, "there is no model 'gpt-4'"),
        ({"body": {"prompt": [99]}}, 400, "token id 99"),
        ({"body": {"prompt": "a" * 64}}, 400, "64 tokens; at most 63"),
        ({"url": "/v1/chat/completions", "body": {"messages": []}}, 400, "messages"),
    ],
)
def test_what_cannot_be_answered_gets_an_error(batch, change, status, message):
    answers, tally, _ = batch([completion("good"), completion("bad") | change, completion("fine")])
    error = answers["bad"]["body"]["error"]
    assert answers["bad"]["status_code"] == status
    assert message in error["message"]
    assert set(error) == {"message", "type", "param", "code"}
    assert answers["good"]["status_code"] == answers["fine"]["status_code"] == 200
    assert tally.n_failed == 1
    assert tally.first_error.startswith("line 2: ")


def test_names_of_the_model(batch):
    lines = [completion(str(i), model=name) for i, name in enumerate(("toy", "gpt-4", None))]
    answers, _, _ = batch(lines, aliases=["gpt-4"])
    assert [answers[str(i)]["body"]["model"] for i in range(3)] == ["toy", "gpt-4", "toy"]


def test_max_tokens_for_those_that_do_not_say(batch):
    lines = [completion("own"), completion("none", max_tokens=None), completion("zero", max_tokens=0)]
    answers, _, _ = batch(lines, max_tokens=7)
    assert answers["own"]["body"]["usage"]["completion_tokens"] == 5
    assert answers["none"]["body"]["usage"]["completion_tokens"] == 7
    assert answers["zero"]["body"]["usage"]["completion_tokens"] == 0


def test_a_request_that_fails_while_it_runs_fails_alone(batch):
    llm = toy_llm(ToyBackend(poison={10: -np.inf}))
    never_f = {"logit_bias": {"10": -100}}
    lines = [completion("good", **never_f), completion("bad", prompt=["ab", "af"], **never_f)]
    answers, _, _ = batch(lines, llm)
    assert answers["good"]["status_code"] == 200
    assert answers["bad"]["status_code"] == 500
    assert "no token can be drawn" in answers["bad"]["body"]["error"]["message"]


def test_no_more_than_a_few_are_in_memory(batch, monkeypatch):
    """A step waits until as many requests are there as may be: no more come, and the batch is always full."""
    most = submitted = 0
    mailboxes = {}
    submit = AsyncEngine.generate

    async def counted(self, *args, **options):
        nonlocal most, submitted, mailboxes
        mailboxes = self._worker.mailboxes
        submitted += 1
        most = max(most, len(mailboxes) + 1)
        return await submit(self, *args, **options)

    class Waiting(ToyBackend):
        def forward(self, batch, cache):
            while submitted < 60 and len(mailboxes) < 8:
                time.sleep(0.0001)
            return super().forward(batch, cache)

    monkeypatch.setattr(AsyncEngine, "generate", counted)
    _, _, llm = batch([completion(str(i)) for i in range(60)], toy_llm(Waiting(), max_batch=4), n_ahead=8)
    assert most == 8
    assert len(llm.backend.batch_sizes) < 90  # 75 if the very first one is full too, 300 one by one


def test_one_that_is_larger_than_the_room_runs_alone(batch):
    answers, _, _ = batch([completion("wide", n=20)], toy_llm(max_batch=4), n_ahead=8)
    assert len(answers["wide"]["body"]["choices"]) == 20


class StopError(Exception):
    pass


def test_a_later_run_answers_what_is_left(batch, tmp_path):
    lines = [completion(str(i), seed=i, max_tokens=i + 1) for i in range(20)]

    def stop(tally):
        if tally.n_answered == 7:
            raise StopError

    with pytest.raises(StopError):
        batch(lines, n_ahead=4, on_answer=stop)
    n_left = 20 - (tmp_path / "out.jsonl").read_bytes().count(b"\n")  # some may end together with the seventh
    answers, tally, _ = batch(lines)
    assert (tally.n_answered, tally.n_done) == (n_left, 20) and 10 <= n_left <= 13
    for i in range(20):
        (alone,) = toy_llm().generate("ab", SamplingParams(seed=i, max_tokens=i + 1, ignore_eos=True))
        assert answers[str(i)]["body"]["choices"][0]["text"] == alone.text
    _, tally, llm = batch(lines)
    assert (tally.n_answered, llm.backend.batch_sizes) == (0, [])


def test_a_dead_engine_is_no_answer(batch, tmp_path):
    with pytest.raises(GenerationError, match="killed"):
        batch([completion(str(i)) for i in range(9)], toy_llm(ToyBackend(fail_at=(3, SystemExit("killed")))))
    assert (tmp_path / "out.jsonl").read_bytes() == b""


def test_a_file_that_fails_ends_the_run(batch, monkeypatch):
    def full(*_):
        raise BatchError("out.jsonl cannot be written: No space left on device")

    monkeypatch.setattr(BatchOutput, "write", full)
    for line in (completion("a"), completion("a", stream=True)):
        with pytest.raises(BatchError, match="No space left"):
            batch([line, completion("b")])
