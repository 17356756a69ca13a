"""`ropewalk run`: what its arguments mean, what goes to stdout and what to stderr."""

import json

import pytest
import typer

from ropewalk.cli.options import Machine
from ropewalk.cli.prompt import model_and_prompt
from ropewalk.params import SamplingParams


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_the_answer_on_stdout_the_speed_on_stderr(ropewalk, llm):
    result = ropewalk("run", "some-model", "Hi", "--seed", "5")
    assert result.exit_code == 0
    assert result.stdout == "Hello!\n"
    assert result.stderr == (
        "prefill 10 tokens, 100.0 tok/s | decode 6 tokens, 20.0 tok/s | first token after 0.11 s | seed 5\n"
    )
    assert llm.opened == ("some-model", Machine())
    assert llm.asked[0][:2] == ("stream_chat", user("Hi"))
    assert llm.closed


def test_guesses_are_told(ropewalk, llm, monkeypatch):
    def drafted(messages, params, stream=llm.stream_chat):
        for chunk in stream(messages, params):
            if chunk.output is not None:
                vars(chunk.output.timings).update(drafted_tokens=8, accepted_tokens=6)
            yield chunk

    monkeypatch.setattr(llm, "stream_chat", drafted)
    assert " | 6 of 8 guesses right | " in ropewalk("run", "m", "Hi", "--prompt-lookup").stderr
    assert llm.opened[1].draft == "lookup"


def test_no_seed_is_told_where_none_was_used(ropewalk, llm):
    assert "seed" not in ropewalk("run", "m", "Hi", "--temperature", "0").stderr


def test_quiet_tells_nothing(ropewalk, llm):
    assert ropewalk("run", "m", "Hi", "-q").stderr == ""


def test_a_newline_is_added_only_where_one_is_missing(ropewalk, llm):
    llm.replies = ["line\n"]
    assert ropewalk("run", "m", "Hi").stdout == "line\n"


def test_sampling_and_machine_options_arrive(ropewalk, llm):
    ropewalk("run", "m", "Hi", "--temperature", "0", "-n", "7", "--stop", "X", "--threads", "2", "-c", "64")
    assert llm.asked[0][2] == SamplingParams(
        temperature=0, top_k=40, top_p=0.95, min_p=0.05, max_tokens=7, stop=("X",)
    )
    assert llm.opened[1] == Machine(n_threads=2, context_length=64)


def test_a_model_without_template_continues_the_prompt(ropewalk, llm):
    llm.has_chat_template = False
    ropewalk("run", "m", "Once upon")
    assert llm.asked[0][:2] == ("stream", "Once upon")


def test_raw_continues_the_prompt_although_there_is_a_template(ropewalk, llm):
    ropewalk("run", "m", "Once upon", "--raw")
    assert llm.asked[0][:2] == ("stream", "Once upon")


def test_chat_insists_on_a_template(ropewalk, llm):
    llm.has_chat_template = False
    ropewalk("run", "m", "Hi", "--chat")
    assert llm.asked[0][0] == "stream_chat"


def test_a_system_message_comes_first(ropewalk, llm):
    ropewalk("run", "m", "Hi", "--system", "Be brief.")
    assert llm.asked[0][1] == [{"role": "system", "content": "Be brief."}, *user("Hi")]


@pytest.mark.parametrize("arguments", [("m",), ("m", "-"), ("--", "m")])
def test_the_prompt_from_stdin_less_one_newline(ropewalk, llm, arguments):
    ropewalk("run", *arguments, stdin="Hi there\n\n")
    assert llm.asked[0][1] == user("Hi there\n")


def test_nothing_but_stdin_means_the_default_model(ropewalk, llm):
    ropewalk("run", stdin="Hi")
    assert llm.opened[0] == "smollm2-135m"
    assert llm.asked[0][1] == user("Hi")


def test_one_argument_with_a_space_is_a_prompt(ropewalk, llm):
    ropewalk("run", "Why is the sky blue?", stdin="")
    assert llm.opened[0] == "smollm2-135m"
    assert llm.asked[0][1] == user("Why is the sky blue?")


def test_a_prompt_that_is_too_long_for_a_file_name(ropewalk, llm):
    prompt = "Why is the sky/blue? " * 500
    ropewalk("run", prompt, stdin="")
    assert llm.asked[0][1] == user(prompt)


def test_one_argument_with_a_space_that_is_a_file_is_a_model(ropewalk, llm, tmp_path):
    path = tmp_path / "my model.gguf"
    path.touch()
    ropewalk("run", path, stdin="Hi")
    assert llm.opened[0] == str(path)


def test_no_prompt_on_a_terminal_is_wrong_usage(monkeypatch):
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    with pytest.raises(typer.BadParameter, match="no prompt"):
        model_and_prompt("m", None)
    assert model_and_prompt("m", "-") == ("m", None)


@pytest.mark.parametrize(
    ("stdin", "told"),
    [
        (b"", "ropewalk: the prompt (stdin) is empty\n"),
        (b"ab\xff", "ropewalk: the prompt (stdin) is not UTF-8: byte 0xff at offset 2\n"),
    ],
)
def test_a_bad_stdin_is_told_in_one_line(ropewalk, llm, stdin, told):
    result = ropewalk("run", "m", stdin=stdin)
    assert (result.exit_code, result.stdout, result.stderr) == (1, "", told)


def test_an_argument_that_is_not_utf8(ropewalk, llm):
    result = ropewalk("run", "m", "a\udcff")
    assert result.exit_code == 1
    assert "the prompt is not UTF-8: byte 0xff at offset 1" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--raw", "--chat"), "--raw"),
        (("--raw", "--system", "x"), "--raw"),
        (("--logprobs", "2"), "--json"),
        (("--min-p", "2"), "--min-p is 2.0"),
    ],
)
def test_wrong_usage(ropewalk, llm, arguments, named):
    result = ropewalk("run", "m", "Hi", *arguments)
    assert result.exit_code == 2
    assert named in result.stderr
    assert llm.asked == []


def test_our_errors_end_with_status_1(ropewalk, llm, too_long):
    llm.replies = [too_long]
    result = ropewalk("run", "m", "Hi")
    assert (result.exit_code, result.stderr) == (1, f"ropewalk: {too_long}\n")


def test_json(ropewalk, llm):
    result = ropewalk("run", "m", "Hi", "--json", "--seed", "3", "--logprobs", "0")
    assert result.stderr == ""
    answer = json.loads(result.stdout)
    assert answer == {
        "model": "m",
        "text": "Hello!",
        "token_ids": [0, 1, 2, 3, 4, 5],
        "finish_reason": "stop",
        "stop_reason": None,
        "seed": 3,
        "prompt_token_ids": [1, 2],
        "n_truncated": 0,
        "n_dropped": 0,
        "timings": {
            "prompt_tokens": 10,
            "cached_tokens": 0,
            "disk_tokens": 0,
            "generated_tokens": 6,
            "drafted_tokens": 0,
            "accepted_tokens": 0,
            "prefill_s": 0.1,
            "decode_s": 0.5,
            "prefill_tps": 100.0,
            "decode_tps": 20.0,
            "time_to_first_token_s": 0.11,
        },
        "logprobs": [{"token_id": 7, "logprob": -0.5, "rank": 1, "top": [[7, -0.5], [9, -2.0]]}],
    }
    assert llm.asked[0][0] == "chat"
