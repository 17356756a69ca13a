"""Formats of calls: the grammar of each allows its own calls with the right arguments and no others."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from ropewalk.api.chat import Conversation
from ropewalk.api.chat_request import ChatRequest
from ropewalk.api.tools import HERMES, JSON, LLAMA, MISTRAL, ToolFormat
from ropewalk.text.chat import ChatTemplate
from ropewalk.text.grammar import Grammars

END, MARKER = 256, 257
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "weather", "parameters": {**CITY, "additionalProperties": False}}
TIME = {"name": "time"}


class Tokens:
    vocab_size = 258
    bos_id = None
    eos_ids = frozenset([END])

    def token_bytes(self, i):
        return bytes([i]) if i < 256 else (b"<end>", b"[TOOL_CALLS]")[i - 256]

    def is_special(self, i):
        return i >= 256

    def encode(self, text, *, add_special=False):
        return list(text.encode() if isinstance(text, str) else text)


GRAMMARS = Grammars(Tokens(), 258)


def allowed(form, text, *, required=True, parallel=True, marker_id=None, tools=(WEATHER, TIME), answer=None):
    """Whether the whole text is an answer; with a marker id, that token stands for the marker."""
    grammar = form.grammar(tools, required=required, parallel=parallel, marker_id=marker_id, answer=answer)
    constraint = GRAMMARS.lark(grammar)
    ids = list(text.encode())
    if marker_id is not None:
        before, found, rest = text.partition(form.marker)
        ids = [*before.encode(), *([marker_id] if found else []), *rest.encode()]
    for token in ids:
        if not constraint.mask()[token]:
            return False
        constraint.accept(token)
    return constraint.ended or bool(np.flatnonzero(constraint.mask()).tolist().count(END))


def call(form, name, arguments):
    return f'{{"name": "{name}", "{form.key}": {arguments}}}'


def written(form, *calls):
    if form.listed:
        return f"{form.marker}[{', '.join(calls)}]"
    return "\n".join(f"{form.marker}{form.opening}{each}{form.closing}" for each in calls)


FORMATS = pytest.mark.parametrize("form", [HERMES, MISTRAL, LLAMA, JSON], ids=lambda form: form.name)


class TestGrammar:
    @FORMATS
    def test_a_required_call(self, form):
        rome = call(form, "weather", '{"city": "Rome"}')
        assert allowed(form, written(form, rome))
        assert allowed(form, written(form, call(form, "time", "{}")))
        assert allowed(form, written(form, rome, call(form, "time", "{}")))
        assert not allowed(form, written(form, rome, rome), parallel=False)
        assert not allowed(form, "It is sunny.")
        assert not allowed(form, "")
        assert not allowed(form, written(form, rome) + " Bye.")

    @FORMATS
    def test_arguments_follow_their_schema(self, form):
        for name, arguments in (
            ("weather", "{}"),
            ("weather", '{"city": 5}'),
            ("weather", '{"city": "Rome", "x": 1}'),
            ("time", '{"city": "Rome"}'),
            ("rain", "{}"),
        ):
            for required in (True, False):
                text = written(form, call(form, name, arguments))
                assert not allowed(form, text, required=required)

    @FORMATS
    def test_a_named_function(self, form):
        rome = written(form, call(form, "weather", '{"city": "Rome"}'))
        assert allowed(form, rome, tools=[WEATHER], parallel=False)
        assert not allowed(form, rome, tools=[TIME], parallel=False)

    @FORMATS
    def test_free_text_or_calls(self, form):
        rome = written(form, call(form, "weather", '{"city": "Rome"}'))
        for text in ("", "It is sunny.", "{}", '{"a": 1}', "<tool", "a\nb", rome):
            assert allowed(form, text, required=False)
        if form.marker:
            assert allowed(form, f"Let me see.\n{rome}", required=False)

    @FORMATS
    def test_calls_or_a_structure(self, form):
        answer = '%json {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'
        rome = written(form, call(form, "weather", '{"city": "Rome"}'))
        for text, expected in (
            (rome, True),
            ('{"a": 1}', True),
            ("It is sunny.", False),
            (f"{rome} Bye.", False),
        ):
            assert allowed(form, text, required=False, answer=answer) == expected

    def test_a_marker_that_is_a_control_token(self):
        rome = written(MISTRAL, call(MISTRAL, "weather", '{"city": "Rome"}'))
        for required in (True, False):
            assert allowed(MISTRAL, rome, marker_id=MARKER, required=required)
            assert not allowed(MISTRAL, rome.replace("Rome", 'Rome"'), marker_id=MARKER, required=required)
        assert allowed(MISTRAL, "Hello", marker_id=MARKER, required=False)


class TestFormat:
    @pytest.mark.parametrize(
        ("source", "form"),
        [
            ("{{ '[TOOL_CALLS]' }}", MISTRAL),
            ("{{ '<tool_call>' }}", HERMES),
            ("{% if tools %}<|python_tag|>", LLAMA),
            ('{% if tools %}{"name": function name, "parameters": dictionary}', LLAMA),
            ("{% for message in messages %}", JSON),
        ],
    )
    def test_it_is_known_by_the_template(self, source, form):
        assert ToolFormat.of(source) == form

    def test_a_template_without_tools_is_told_in_words(self):
        called = {
            "id": "1",
            "type": "function",
            "function": {"name": "weather", "arguments": '{"city":"Rome"}'},
        }
        messages = [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Weather?"},
            {"role": "assistant", "content": None, "tool_calls": [called]},
            {"role": "tool", "tool_call_id": "1", "content": "sun"},
        ]
        told = JSON.explained(messages, [WEATHER])
        assert [m["role"] for m in told] == ["system", "user", "assistant", "user"]
        assert told[0]["content"].startswith("Be brief.\n\nYou can call functions.")
        assert json.loads(told[0]["content"].splitlines()[-1]) == WEATHER
        assert json.loads(told[2]["content"]) == {"name": "weather", "arguments": {"city": "Rome"}}
        assert told[3]["content"] == "Result of weather: sun"
        assert JSON.explained(messages[1:2], [TIME])[0]["role"] == "system"
        assert messages[2]["content"] is None


def test_a_model_may_have_a_template_of_its_own_for_tools():
    """Hermes' files list "default" and "tool_use": with tools the latter, if it writes calls in a known format."""
    default, tool_use = "plain: {{ messages[-1].content }}", "<tool_call> {{ tools[0].function.name }}"
    ask = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "truncate_prompt_tokens": 40}
    with_tools = ask | {"tools": [{"type": "function", "function": WEATHER}]}

    def opened(request, other):
        metadata = {"tokenizer.chat_template": default, "tokenizer.chat_template.tool_use": other}
        llm = SimpleNamespace(chat_template=ChatTemplate.from_metadata(metadata))
        return Conversation(llm, ChatRequest(**request))

    assert (
        opened(ask, tool_use).text == opened(with_tools | {"tool_choice": "none"}, None).text == "plain: hi"
    )
    found = opened(with_tools, tool_use)
    assert (found.text, found.tool_format) == ("<tool_call> weather", HERMES)
    unknown = opened(with_tools, "Action: {{ tools }}")
    assert unknown.text.startswith("plain: ") and not unknown.tool_format.explained_by_template
