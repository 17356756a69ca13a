"""Answers are told apart in the same way whether they come whole or in any pieces."""

import random

import pytest

from ropewalk.api.answer import AnswerReader
from ropewalk.api.tools import HERMES, JSON, LLAMA, MISTRAL

CALL_F = '<tool_call>\n{"name": "f", "arguments": {"a": "}{\\""}}\n</tool_call>'
CALL_G = '<tool_call>\n{"name": "g", "arguments": {"x": [1, {"y": 2}]}}\n</tool_call>'
CALL_H = '<tool_call>\n{"name": "h", "arguments": {}}\n</tool_call>'
F_OF_1 = '{"name": "f", "arguments": {"a": 1}}'


def plain(content):
    return "", content, []


THINKING = {
    "<think>\nhmm</think>\n\nHi": ("hmm", "Hi", []),
    "<think>\n\n</think>\n\nHi": ("", "Hi", []),
    "  <think>a\nb</think>Hi</think>": ("a\nb", "Hi</think>", []),
    "Hi <think>": plain("Hi <think>"),
    "<think>never ends </thi": ("never ends </thi", "", []),
    "<thi": plain("<thi"),
    "<thin air": plain("<thin air"),
    "": plain(""),
}
CALLS = [
    (HERMES, CALL_F, ("", "", [("f", '{"a": "}{\\""}')])),
    (HERMES, f"Sure.\n{CALL_F}\n{CALL_G}", ("", "Sure.\n", [("f", '{"a": "}{\\""}'), ("g", '{"x": [1, {"y": 2}]}')])),
    (HERMES, f"{CALL_G} And now?", ("", "And now?", [("g", '{"x": [1, {"y": 2}]}')])),
    (HERMES, F_OF_1, ("", "", [("f", '{"a": 1}')])),
    (HERMES, '<tool_call>{"name":"f","arguments":{}}</tool_call>', ("", "", [("f", "{}")])),
    (HERMES, f"{CALL_H} bye", plain(f"{CALL_H} bye")),
    (HERMES, '<tool_call>\n{"name": "f", "argu', plain('<tool_call>\n{"name": "f", "argu')),
    (HERMES, '<tool_call>\n{"name": "f", "arguments": {"a": ', ("", "", [("f", '{"a": ')])),
    (HERMES, "a <tool_cal b", plain("a <tool_cal b")),
    (HERMES, "  x", plain("  x")),
    (HERMES, "a <tool", plain("a <tool")),
    (MISTRAL, f'[TOOL_CALLS][{F_OF_1}, {{"name":"g","arguments":{{}}}}]', ("", "", [("f", '{"a": 1}'), ("g", "{}")])),
    (MISTRAL, "[TOOL] no", plain("[TOOL] no")),
    (LLAMA, '{"name": "f", "parameters": {"a": 1}}', ("", "", [("f", '{"a": 1}')])),
    (LLAMA, '<|python_tag|>{"name": "f", "parameters": {"a": 1}}', ("", "", [("f", '{"a": 1}')])),
    (LLAMA, '{"a": 1}', plain('{"a": 1}')),
    (LLAMA, '{"name": "f"}', plain('{"name": "f"}')),
    (LLAMA, "Hello { x", plain("Hello { x")),
    (JSON, f"{F_OF_1}\n{F_OF_1}", ("", "", [("f", '{"a": 1}')] * 2)),
    (JSON, f"\n {F_OF_1} and so on", ("", "and so on", [("f", '{"a": 1}')])),
]  # fmt: skip


def read(make, pieces):
    reader = make()
    parts = [part for piece in pieces for part in reader.push(piece)] + reader.finish()
    texts, calls = {"reasoning": "", "content": ""}, []
    for part in parts:
        assert part.text
        if part.kind == "call":
            assert part.index == len(calls)
            calls.append([part.text, ""])
        elif part.kind == "arguments":
            calls[part.index][1] += part.text
        else:
            texts[part.kind] += part.text
    assert reader.n_calls == len(calls)
    return texts["reasoning"], texts["content"], [tuple(call) for call in calls]


def cut(text, rng):
    while text:
        n = rng.choice([1, 1, 2, 3, 7, 30])
        yield text[:n]
        text = text[n:]


def holds(make, text, expected):
    rng = random.Random(0)
    for pieces in ([text], list(text), *(list(cut(text, rng)) for _ in range(60))):
        assert read(make, pieces) == expected, pieces


class TestReasoning:
    @pytest.mark.parametrize("text", THINKING)
    def test_it_is_split_from_the_answer(self, text):
        holds(lambda: AnswerReader(thinks=True), text, THINKING[text])

    def test_a_prompt_may_have_begun_it(self):
        holds(lambda: AnswerReader(thinking=True), "hm</think>\nHi", ("hm", "Hi", []))

    def test_a_model_that_does_not_think_may_write_what_it_likes(self):
        holds(AnswerReader, "<think>a</think>", plain("<think>a</think>"))

    def test_calls_come_after_it(self):
        text = f"<think>I could <tool_call> now.</think>\n\n{CALL_G}"
        expected = ("I could <tool_call> now.", "", [("g", '{"x": [1, {"y": 2}]}')])
        holds(lambda: AnswerReader(thinks=True, tools=HERMES, names={"g"}), text, expected)


class TestCalls:
    @pytest.mark.parametrize(("form", "text", "expected"), CALLS)
    def test_they_are_found_in_each_format(self, form, text, expected):
        holds(lambda: AnswerReader(tools=form, names={"f", "g"}), text, expected)

    def test_arguments_are_told_as_they_grow(self):
        reader = AnswerReader(tools=HERMES, names={"f"})
        head = reader.push('<tool_call>\n{"name": "f", "arguments": ')
        assert head == []  # the value may yet be no object
        assert [part.kind for part in reader.push("{")] == ["call", "arguments"]
        assert [(part.kind, part.text) for part in reader.push('"city": "Ro')] == [
            ("arguments", '"city": "Ro')
        ]

    def test_text_that_is_no_call_is_told_at_once(self):
        reader = AnswerReader(tools=HERMES, names={"f"})
        assert [part.text for part in reader.push("Hello <")] == ["Hello "]
        assert [part.text for part in reader.push("b>")] == ["<b>"]
