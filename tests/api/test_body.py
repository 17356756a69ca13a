"""Bodies: what is no JSON or does not fit is refused by an error that names the field and repeats nothing else."""

import pytest

from ropewalk.api.body import checked, read_json
from ropewalk.api.chat_request import ChatRequest, TokenizeRequest
from ropewalk.api.errors import ApiError, as_api_error
from ropewalk.api.requests import CompletionRequest
from ropewalk.api.response_request import ResponseRequest
from ropewalk.errors import PromptError

HI = [{"role": "user", "content": "hi"}]

HOSTILE = {
    "empty": (b"", "the body is empty"),
    "blank": (b"  \n", "the body is empty"),
    "truncated": (b'{"messages": [', "the body is not JSON"),
    "GBK": ('{"prompt": "你好"}'.encode("gbk"), r"the body is not UTF-8 \(at byte 12\)"),
    "UTF-16": ('{"prompt": "a"}'.encode("utf-16"), "not UTF-8"),
    "200 000 brackets": (b"[" * 200_000, "nested too deeply"),
    "200 000 objects": (b'{"a":' * 200_000, "nested too deeply"),
    "129 levels": (b'{"a":' + b"[" * 128 + b"]" * 128 + b"}", "nested too deeply: at most 128"),
    "NaN": (b'{"temperature": NaN}', "NaN is no number"),
    "Infinity": (b'{"temperature": -Infinity}', "-Infinity is no number"),
    "infinite": (b'{"temperature": 1e999}', "too large"),
    "long number": (b'{"seed": ' + b"1" * 5000 + b"}", "too long"),
    "lone surrogate": (b'{"prompt": "\\ud83d"}', "half of a surrogate pair"),
    "lone surrogate as a key": (b'{"\\uDE00": 1}', "half of a surrogate pair"),
    "surrogates in the wrong order": (b'{"prompt": "\\ude00\\ud83d"}', "half of a surrogate pair"),
    "encoded surrogate": (b'{"prompt": "\xed\xa0\xbd"}', "not UTF-8"),
    "a list": (b"[1]", "must be a JSON object"),
    "a string": (b'"hi"', "must be a JSON object"),
    "two objects": (b"{}{}", "not JSON"),
}


class TestReadJson:
    @pytest.mark.parametrize("case", HOSTILE)
    def test_hostile_bodies(self, case):
        """I4."""
        data, message = HOSTILE[case]
        with pytest.raises(ApiError, match=message) as caught:
            read_json(data)
        assert caught.value.status == 400
        assert len(str(caught.value)) < 120

    def test_what_is_fine(self):
        assert read_json(b'{"a": "\\ud83d\\ude00 \\\\ud83d", "b": [1, 2.5, null]}') == {
            "a": "😀 \\ud83d",
            "b": [1, 2.5, None],
        }
        assert read_json(b'{"a":' + b"[" * 127 + b"]" * 127 + b"}")


def tool(name):
    return {"type": "function", "function": {"name": name}}


BAD_CHATS = [
    ({}, "messages", "messages is missing"),
    ({"messages": "hi"}, "messages", "messages: input should be a valid list"),
    ({"messages": HI, "stop": {}}, "stop", "stop: input should be a valid list or input should be a valid string"),
    ({"messages": []}, "messages", "at least 1 item"),
    ({"messages": [{"role": "user"}]}, "messages[0]", r"messages\[0\]: content is missing"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "valid string"),
    ({"messages": [{"role": "bob", "content": "x"}]}, "messages[0].role", "'system', 'developer', 'user'"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0]", "needs tool_call_id"),
    ({"messages": [*HI, {"role": "user", "content": "x", "tool_calls": []}]}, None, None),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content[0].type",
        "should be 'text'",
    ),
    ({"messages": HI, "temprature": 1}, "temprature", "unknown field 'temprature'; did you mean 'temperature'"),
    ({"messages": HI, "audio": {}}, "audio", "unknown field 'audio'"),
    ({"messages": HI, "stream_options": {"usage": True}}, "stream_options.usage", "unknown field"),
    ({"messages": HI, "stream_options": {}}, None, "only allowed with stream: true"),
    ({"messages": HI, "temperature": "1"}, "temperature", "valid number"),
    ({"messages": HI, "temperature": -1}, "temperature", "greater than or equal to 0"),
    ({"messages": HI, "n": 0}, "n", "greater than or equal to 1"),
    ({"messages": HI, "n": True}, "n", "valid integer"),
    ({"messages": HI, "n": 65}, "n", "less than or equal to 64"),
    ({"messages": HI, "max_tokens": 1.5}, "max_tokens", "valid integer"),
    ({"messages": HI, "max_tokens": 1, "max_completion_tokens": 1}, None, "mean the same"),
    ({"messages": HI, "stop": ""}, "stop", "at least 1 character"),
    ({"messages": HI, "stop": ["a"] * 50}, "stop", "at most 16 items"),
    ({"messages": HI, "stop": [""]}, "stop[0]", "at least 1 character"),
    ({"messages": HI, "stop": 5}, "stop", "valid list or .*valid string"),
    ({"messages": HI, "seed": 10**30}, "seed", "less than"),
    ({"messages": HI, "logit_bias": {"x": 1}}, "logit_bias.x", "should match pattern"),
    ({"messages": HI, "logit_bias": {"5": 101}}, "logit_bias.5", "less than or equal to 100"),
    ({"messages": HI, "top_logprobs": 2}, None, "only allowed with logprobs: true"),
    ({"messages": HI, "logprobs": True, "top_logprobs": 21}, "top_logprobs", "less than or equal to 20"),
    ({"messages": HI, "response_format": {"type": "xml"}}, "response_format.type", "'json_object'"),
    ({"messages": HI, "response_format": {"type": "json_schema"}}, "response_format", "json_schema is needed"),
    ({"messages": HI, "tools": [{"type": "web"}]}, "tools[0].type", "'function'"),
    ({"messages": HI, "tools": [tool("a b")]}, "tools[0].function.name", "pattern"),
    ({"messages": HI, "tools": [tool("f"), tool("f")]}, None, "two tools have the same name"),
    ({"messages": HI, "tool_choice": "auto"}, None, "tool_choice needs tools"),
    ({"messages": HI, "tool_choice": "always"}, "tool_choice", "'required'"),
    ({"messages": HI, "store": True}, "store", "nothing is stored"),
    ({"messages": HI, "store": 0}, "store", "valid boolean"),
    ({"messages": HI, "x" * 1000: 1}, "(a name that cannot be shown)", "unknown field"),
]  # fmt: skip


class TestChecked:
    @pytest.mark.parametrize(("body", "param", "message"), BAD_CHATS)
    def test_bad_chats(self, body, param, message):
        if message is None:
            assert checked(ChatRequest, body)
            return
        with pytest.raises(ApiError, match=message) as caught:
            checked(ChatRequest, body)
        error = caught.value.body["error"]
        assert (caught.value.status, error["param"], error["type"]) == (400, param, "invalid_request_error")

    @pytest.mark.parametrize(
        ("body", "message"),
        [
            ({}, "prompt is missing"),
            ({"prompt": 5}, "valid list or .*valid string"),
            ({"prompt": None}, "prompt"),
            ({"prompt": []}, "empty list"),
            ({"prompt": [1, "a"]}, r"prompt\[[01]\]"),
            ({"prompt": "a", "suffix": "b"}, "unknown field 'suffix'"),
            ({"prompt": "a", "best_of": 3}, "best_of is only allowed equal to n"),
            (
                {"prompt": "a", "echo": True, "logprobs": 1, "stream": True},
                "echo, logprobs and stream cannot be",
            ),
            (
                {"prompt": "a", "echo": True, "logprobs": 1, "truncate_prompt_tokens": 9},
                "echo, logprobs and truncate_prompt_tokens cannot be combined",
            ),
            ({"prompt": "a", "prompt_logprobs": 1, "stream": True}, "prompt_logprobs and stream cannot be"),
            (
                {"prompt": "a", "max_tokens": 0, "min_tokens": 2},
                "min_tokens is more than max_tokens, which is 0",
            ),
            ({"prompt": "a", "max_tokens": -1}, "max_tokens"),
            ({"prompt": ["a"] * 257}, "more than 256"),
        ],
    )
    def test_bad_completions(self, body, message):
        with pytest.raises(ApiError, match=message):
            checked(CompletionRequest, body)

    def test_kinds_of_prompts(self):
        for prompt, prompts in (
            ("a", ["a"]),
            (["a", "b"], ["a", "b"]),
            ([1, 2], [[1, 2]]),
            ([[1], [2]], [[1], [2]]),
        ):
            assert checked(CompletionRequest, {"prompt": prompt}).prompts == prompts

    def test_null_means_the_default(self):
        names = [name for name in ChatRequest.model_fields if name != "messages"]
        assert checked(ChatRequest, {"messages": HI, **dict.fromkeys(names)}) == checked(
            ChatRequest, {"messages": HI}
        )

    def test_every_knob_arrives(self):
        knobs = {
            "n": 2, "min_tokens": 1, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "typical_p": 0.8,
            "repetition_penalty": 1.1, "frequency_penalty": 0.2, "presence_penalty": -0.2, "stop": ["x"],
            "stop_token_ids": [7], "ignore_eos": True, "include_stop_str_in_output": True, "skip_special_tokens": False,
        }  # fmt: skip
        body = {"messages": HI, "seed": -1, "logit_bias": {"3": -5}, **knobs}
        params = checked(ChatRequest, body).sampling_params(max_tokens=9, logprobs=3)
        assert {name: getattr(params, name) for name in knobs} == {
            **knobs,
            "stop": ("x",),
            "stop_token_ids": (7,),
        }
        assert (params.seed, params.logit_bias, params.max_tokens, params.logprobs) == (
            2**64 - 1,
            {3: -5.0},
            9,
            3,
        )

    def test_an_earlier_answer_can_be_sent_back(self):
        """As the openai client dumps it."""
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        message = {
            "role": "assistant", "content": None, "refusal": None, "annotations": [], "audio": None,
            "function_call": None, "tool_calls": [call],
        }  # fmt: skip
        (checked_message,) = checked(ChatRequest, {"messages": [message]}).messages
        assert checked_message.as_dict() == {
            "role": "assistant", "content": None, "tool_calls": message["tool_calls"],
        }  # fmt: skip

    def test_parts_of_content_are_joined_and_developers_are_the_system(self):
        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        request = checked(ChatRequest, {"messages": [{"role": "developer", "content": parts}]})
        assert request.messages[0].as_dict() == {"role": "system", "content": "ab"}

    def test_tokenize_takes_one_of_two(self):
        for body in (
            {},
            {"prompt": "a", "messages": HI},
            {"prompt": "a", "tools": []},
            {"messages": HI, "add_special_tokens": True},
        ):
            with pytest.raises(ApiError, match=r"give either|only allowed"):
                checked(TokenizeRequest, body)


class TestResponseRequest:
    def test_items_become_messages(self):
        said = {"type": "output_text", "text": "Let me see.", "annotations": []}
        items = [
            {"role": "user", "content": "weather?"},
            {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "message", "role": "assistant", "content": [said]},
            {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
            {"type": "function_call", "call_id": "2", "name": "g", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "1", "output": "sun"},
            {"type": "function_call_output", "call_id": "2", "output": "rain"},
            {"role": "assistant", "content": "Mixed."},
            {"role": "assistant", "content": "Sorry."},
        ]  # fmt: skip
        request = checked(ResponseRequest, {"input": items, "instructions": "Be brief."})
        messages = [message.as_dict() for message in request.as_chat().messages]
        assert [m["role"] for m in messages] == [
            "system", "user", "assistant", "tool", "tool", "assistant", "assistant",
        ]  # fmt: skip
        assert messages[2]["reasoning_content"] == "hm"
        assert messages[2]["content"] == "Let me see."
        assert [call["id"] for call in messages[2]["tool_calls"]] == ["1", "2"]
        assert messages[3] == {"role": "tool", "content": "sun", "tool_call_id": "1"}

    @pytest.mark.parametrize(
        ("body", "message"),
        [
            ({"input": [{"type": "web_search_call"}]}, "web_search_call|expected tags"),
            ({"input": "a", "previous_response_id": "x"}, "unknown field 'previous_response_id'"),
            ({"input": "a", "store": True}, "store"),
            ({"input": "a", "text": {"format": {"type": "json_schema"}}}, "text.format.schema is missing"),
        ],
    )
    def test_what_is_not_there_is_refused(self, body, message):
        with pytest.raises(ApiError, match=message):
            checked(ResponseRequest, body).as_chat()


class TestErrors:
    def test_faults_of_ours_say_no_more_than_their_kind(self):
        error = as_api_error(KeyError("secret"))
        assert (error.status, str(error)) == (500, "internal error (KeyError)")
        assert error.body["error"]["type"] == "server_error"

    def test_a_prompt_that_is_too_long(self):
        error = as_api_error(PromptError("the prompt has 9 tokens; at most 7 fit into a context of 8"))
        assert (error.status, error.code) == (400, "context_length_exceeded")
