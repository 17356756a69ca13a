"""`ropewalk chat`, line by line through a pipe."""

import os
import signal

import pytest

from ropewalk.cli import chat as chat_verb
from ropewalk.cli.chat import Conversation, parse_value, stoppable
from ropewalk.params import SamplingParams


def said(llm) -> list[list[tuple[str, str]]]:
    return [[(m["role"], m["content"]) for m in messages] for _, messages, _ in llm.asked]


def test_each_turn_sees_the_ones_before(ropewalk, llm):
    llm.replies = ["one", "two"]
    result = ropewalk("chat", "m", "--system", "S", stdin="a\n\nb\n")
    assert (result.exit_code, result.stdout) == (0, "one\ntwo\n")
    assert said(llm) == [
        [("system", "S"), ("user", "a")],
        [("system", "S"), ("user", "a"), ("assistant", "one"), ("user", "b")],
    ]
    assert llm.closed


def test_reset_forgets_and_system_begins_again(ropewalk, llm):
    ropewalk("chat", stdin="a\n/reset\nb\n/system S\nc\n")
    assert llm.opened[0] == "smollm2-135m"
    assert said(llm) == [[("user", "a")], [("user", "b")], [("system", "S"), ("user", "c")]]


def test_exit_leaves_at_once(ropewalk, llm):
    ropewalk("chat", stdin="/exit\na\n")
    assert llm.asked == []


def test_set_changes_the_next_answer(ropewalk, llm):
    result = ropewalk(
        "chat", stdin="/set temperature 0.2\n/set max-tokens none\n/set stop '\\n'\n/set seed 4\na\n/show\n"
    )
    params = llm.asked[0][2]
    assert (params.temperature, params.max_tokens, params.stop, params.seed) == (0.2, None, ("\n",), 4)
    assert "temperature" in result.stderr
    assert "16 of 100 tokens" in result.stderr


def test_what_is_shown_can_be_set(ropewalk, llm):
    """In the words of /set, not in those of Python; each value as it stands gives the same settings."""
    shown = ropewalk("chat", stdin="/set slide on\n/set stop X\n/show\n").stderr.splitlines()
    facts = dict(line.split(maxsplit=1) for line in shown)
    assert (facts["slide"], facts["ignore_eos"], facts["logit_bias"], facts["seed"]) == (
        "on",
        "off",
        "none",
        "none",
    )
    values = {k: v for k, v in facts.items() if k not in ("messages", "context", "system")}
    lines = "".join(f"/set {name} {value}\n" for name, value in values.items())
    again = ropewalk("chat", stdin=f"{lines}/show\n").stderr.splitlines()
    assert again == shown


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("/set temperature -1", "temperature is -1"),
        ("/set temperature hot", "temperature is 'hot'"),
        ("/set logprobs 2", "NAME is one of"),
        ("/set n 2", "NAME is one of"),
        ("/set trace 3", "NAME is one of"),
        ("/set seed", "NAME is one of"),
        ("/nonsense", "/nonsense is no command"),
        ("/help", "/reset"),
    ],
)
def test_what_is_wrong_is_told_and_the_chat_goes_on(ropewalk, llm, line, told):
    result = ropewalk("chat", stdin=f"{line}\na\n")
    assert told in result.stderr
    assert result.stdout == "Hello!\n"
    assert result.exit_code == 0


def test_a_message_that_does_not_fit_is_taken_back(ropewalk, llm, too_long):
    llm.replies = ["one", too_long, "three"]
    result = ropewalk("chat", stdin="a\nb\nc\n")
    assert str(too_long) in result.stderr
    assert "/reset" in result.stderr
    assert said(llm)[-1] == [("user", "a"), ("assistant", "one"), ("user", "c")]


def test_speed_is_told_when_asked_for(ropewalk, llm):
    assert "tok/s" not in ropewalk("chat", stdin="a\n").stderr
    assert "decode 6 tokens, 20.0 tok/s" in ropewalk("chat", "--speed", stdin="a\n").stderr


def test_a_model_without_template_is_refused(ropewalk, llm):
    llm.has_chat_template = False
    result = ropewalk("chat", "m", stdin="a\n")
    assert (result.exit_code, result.stderr) == (1, "ropewalk: m has no chat template: use ropewalk run\n")


def test_ctrl_c_stops_the_answer_and_keeps_what_was_said(llm, capsys, monkeypatch):
    conversation = Conversation(llm, SamplingParams(), None, speed=False)
    write = chat_verb.print_stream.__globals__["write"]

    def write_and_press(text: str) -> None:
        write(text)
        if text == "l":
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setitem(chat_verb.print_stream.__globals__, "write", write_and_press)
    before = signal.getsignal(signal.SIGINT)
    assert conversation.take("a")
    assert capsys.readouterr() == ("Hel\n", "(stopped)\n")
    assert conversation.messages == [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "Hel"},
    ]
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_ctrl_c_leaves():
    with pytest.raises(KeyboardInterrupt), stoppable() as stopped:
        os.kill(os.getpid(), signal.SIGINT)
        assert stopped()
        os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0.2", 0.2),
        ("40", 40),
        ("None", None),
        ("off", False),
        ("'a\\n'", "a\n"),
        ("END", "END"),
        ("{1: 2}", {1: 2}),
    ],
)
def test_parse_value(text, value):
    assert parse_value(text) == value


def test_a_line_that_is_not_utf8_is_refused(ropewalk, llm):
    result = ropewalk("chat", stdin=b"a\nb\xff\n")
    assert (result.exit_code, len(llm.asked)) == (1, 1)
    assert result.stderr == "ropewalk: line 2 of stdin is not UTF-8: byte 0xff at offset 1\n"
