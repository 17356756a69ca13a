"""The official `openai` client on every endpoint and option, against the real server and SmolLM2."""

import json

import httpx
import numpy as np
import openai
import pydantic
import pytest

from ropewalk import SamplingParams
from ropewalk.text.chat import encode_chat

HI = [{"role": "user", "content": "Name three rivers."}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
KNOBS = {"top_k": 40, "min_p": 0.02, "typical_p": 0.95, "repetition_penalty": 1.1, "min_tokens": 3}


@pytest.fixture(scope="module")
def client(smol):
    with openai.OpenAI(base_url=f"{smol.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def prompt_of(llm, messages):
    return encode_chat(llm.tokenizer, llm.chat_template.render(messages))


def streamed(stream):
    """Texts by choice, and the chunks."""
    texts, chunks = {}, list(stream)
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
    return texts, chunks


class TestModels:
    def test_list_and_retrieve(self, client):
        assert [model.id for model in client.models.list()] == ["smol", "gpt-4o"]
        assert client.models.retrieve("gpt-4o").root == "smol"

    def test_an_unknown_one(self, client):
        with pytest.raises(
            openai.NotFoundError, match="there is no model 'smoll'; did you mean 'smol'"
        ) as caught:
            client.chat.completions.create(model="smoll", messages=HI)
        assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("nobody")


class TestChat:
    def test_it_is_what_the_library_says(self, client, smol):
        answer = client.chat.completions.create(
            model="gpt-4o", messages=HI, max_tokens=12, seed=5, temperature=0.8
        )
        (expected,) = smol.llm.chat(HI, SamplingParams(max_tokens=12, seed=5, temperature=0.8))
        (choice,) = answer.choices
        assert choice.message.content == expected.text
        assert (choice.message.role, choice.finish_reason, answer.model) == ("assistant", "length", "gpt-4o")
        assert answer.object == "chat.completion"
        usage = answer.usage
        assert (usage.prompt_tokens, usage.completion_tokens) == (len(expected.prompt_token_ids), 12)
        assert usage.total_tokens == usage.prompt_tokens + 12

    def test_every_knob_is_the_library_s(self, client, smol):
        shared = {
            "temperature": 0.9,
            "top_p": 0.9,
            "frequency_penalty": 0.3,
            "presence_penalty": 0.2,
            "seed": 11,
        }
        answer = client.chat.completions.create(
            model="smol",
            messages=HI,
            max_completion_tokens=16,
            logit_bias={"28": 2},
            extra_body=KNOBS,
            **shared,
        )
        params = SamplingParams(max_tokens=16, logit_bias={28: 2}, **shared, **KNOBS)
        assert answer.choices[0].message.content == smol.llm.chat(HI, params)[0].text

    def test_ignore_eos_and_stop_tokens_and_special_tokens(self, client, smol):
        end = min(smol.llm.tokenizer.eos_ids)
        bias = {str(end): 100}
        for extra, n, text in (
            ({}, 1, ""),
            ({"ignore_eos": True, "skip_special_tokens": False}, 3, "<|endoftext|>" * 3),
        ):
            answer = client.chat.completions.create(
                model="smol", messages=HI, max_tokens=3, logit_bias=bias, temperature=0, extra_body=extra
            )
            assert (answer.usage.completion_tokens, answer.choices[0].message.content) == (n, text)
        whole = client.chat.completions.create(model="smol", messages=HI, max_tokens=8, temperature=0)
        token = smol.llm.chat(HI, SamplingParams(max_tokens=8, temperature=0))[0].token_ids[4]
        cut = client.chat.completions.create(
            model="smol", messages=HI, max_tokens=8, temperature=0, extra_body={"stop_token_ids": [token]}
        )
        assert cut.choices[0].finish_reason == "stop"
        assert whole.choices[0].message.content.startswith(cut.choices[0].message.content)
        assert cut.usage.completion_tokens <= 5

    def test_stop_strings(self, client):
        whole = client.chat.completions.create(model="smol", messages=HI, max_tokens=24, temperature=0)
        text = whole.choices[0].message.content
        stop = text[10:14]
        for stops in (stop, ["@@", stop]):
            answer = client.chat.completions.create(
                model="smol", messages=HI, max_tokens=24, temperature=0, stop=stops
            )
            assert answer.choices[0].message.content == text[: text.index(stop)]
            assert answer.choices[0].finish_reason == "stop"
        kept = client.chat.completions.create(
            model="smol",
            messages=HI,
            max_tokens=24,
            temperature=0,
            stop=stop,
            extra_body={"include_stop_str_in_output": True},
        )
        assert kept.choices[0].message.content == text[: text.index(stop)] + stop

    def test_several_completions_and_each_again_alone(self, client):
        answer = client.chat.completions.create(model="smol", messages=HI, max_tokens=8, n=3, seed=7)
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        assert len({choice.message.content for choice in answer.choices}) == 3
        assert answer.usage.completion_tokens == 24
        for choice in answer.choices:
            alone = client.chat.completions.create(model="smol", messages=HI, max_tokens=8, seed=choice.seed)
            assert alone.choices[0].message.content == choice.message.content

    def test_system_messages_parts_and_conversations(self, client):
        messages = [
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Say "}, {"type": "text", "text": "yes."}]},
            {"role": "assistant", "content": "Yes."},
            {"role": "user", "content": "Again."},
        ]
        assert (
            client.chat.completions.create(model="smol", messages=messages, max_tokens=4, temperature=0)
            .choices[0]
            .message.content
        )

    def test_the_context_is_named_when_it_is_too_short(self, client):
        with pytest.raises(openai.BadRequestError, match="at most 1023 fit into a context of 1024") as caught:
            client.chat.completions.create(
                model="smol", messages=[{"role": "user", "content": "a b " * 2000}]
            )
        assert caught.value.code == "context_length_exceeded"

    def test_a_token_that_the_model_lacks(self, client):
        with pytest.raises(openai.BadRequestError, match="logit_bias has token id 999999"):
            client.chat.completions.create(model="smol", messages=HI, logit_bias={"999999": 1})


class TestStream:
    def test_shape(self, client, smol):
        """I2."""
        options = {"model": "smol", "messages": HI, "max_tokens": 10, "seed": 3}
        whole = client.chat.completions.create(**options)
        texts, chunks = streamed(client.chat.completions.create(**options, stream=True))
        assert texts == {0: whole.choices[0].message.content}
        assert chunks[0].choices[0].delta.role == "assistant"
        assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:])
        assert {(chunk.id, chunk.object, chunk.model) for chunk in chunks} == {
            (chunks[0].id, "chat.completion.chunk", "smol")
        }
        reasons = [chunk.choices[0].finish_reason for chunk in chunks]
        assert reasons == [None] * (len(chunks) - 1) + ["length"]
        assert all(chunk.usage is None for chunk in chunks)

    def test_usage_when_it_is_asked_for(self, client):
        """I2."""
        options = {"model": "smol", "messages": HI, "max_tokens": 5, "seed": 3, "n": 2}
        whole = client.chat.completions.create(**options)
        _, chunks = streamed(
            client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True})
        )
        assert chunks[-1].choices == []
        assert all(chunk.choices and chunk.usage is None for chunk in chunks[:-1])
        for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert getattr(chunks[-1].usage, name) == getattr(whole.usage, name)

    def test_several_completions(self, client):
        options = {"model": "smol", "messages": HI, "max_tokens": 6, "seed": 3, "n": 3}
        whole = client.chat.completions.create(**options)
        texts, chunks = streamed(client.chat.completions.create(**options, stream=True))
        assert texts == {choice.index: choice.message.content for choice in whole.choices}
        ends = [c.index for chunk in chunks for c in chunk.choices if c.finish_reason]
        assert sorted(ends) == [0, 1, 2]

    def test_the_last_words(self, smol):
        """I2: read as text."""
        body = {"messages": HI, "max_tokens": 2, "stream": True}
        with httpx.stream("POST", f"{smol.url}/v1/chat/completions", json=body, timeout=300) as response:
            assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
            events = response.read().decode().split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        assert all(event.startswith("data: {") for event in events[:-2])

    def test_stop_strings_do_not_leak(self, client):
        options = {"model": "smol", "messages": HI, "max_tokens": 24, "temperature": 0}
        text = client.chat.completions.create(**options).choices[0].message.content
        texts, _ = streamed(client.chat.completions.create(**options, stop=text[10:14], stream=True))
        assert texts[0] == text[: text.index(text[10:14])]


class TestLogprobs:
    def test_of_a_chat(self, client, smol):
        """I6, A11: of the raw distribution, whatever the temperature is."""
        options = {"model": "smol", "messages": HI, "max_tokens": 4, "temperature": 0, "logprobs": True}
        plain = client.chat.completions.create(**options).choices[0].logprobs.content
        assert [item.top_logprobs for item in plain] == [[]] * 4
        biased = client.chat.completions.create(
            **{**options, "temperature": 1.7}, top_logprobs=3, seed=1, logit_bias={"1": -100}
        )
        items = biased.choices[0].logprobs.content
        ids = smol.llm.chat(HI, SamplingParams(max_tokens=4, temperature=1.7, seed=1, logit_bias={1: -100}))[
            0
        ].token_ids
        logits = smol.llm.logits([*prompt_of(smol.llm, HI), *ids])[-5:-1].astype(np.float64)
        raw = (
            logits
            - np.log(np.exp(logits - logits.max(axis=1, keepdims=True)).sum(axis=1, keepdims=True))
            - logits.max(axis=1, keepdims=True)
        )
        for item, token, row in zip(items, ids, raw, strict=True):
            assert bytes(item.bytes) == smol.llm.tokenizer.token_bytes(token)
            assert item.token == bytes(item.bytes).decode()
            assert item.logprob == pytest.approx(row[token], abs=1e-4)
            assert [top.logprob for top in item.top_logprobs] == pytest.approx(sorted(row)[:-4:-1], abs=1e-4)

    def test_of_a_chat_that_is_streamed(self, client):
        options = {
            "model": "smol",
            "messages": HI,
            "max_tokens": 6,
            "seed": 1,
            "logprobs": True,
            "top_logprobs": 1,
        }
        whole = client.chat.completions.create(**options).choices[0].logprobs.content
        _, chunks = streamed(client.chat.completions.create(**options, stream=True))
        choices = [chunk.choices[0] for chunk in chunks]
        assert [item for c in choices if c.logprobs for item in c.logprobs.content] == whole

    def test_of_a_completion(self, client):
        """I6."""
        options = {"model": "smol", "prompt": "The capital of France is", "max_tokens": 6, "seed": 2}
        choice = client.completions.create(**options, logprobs=2).choices[0]
        logprobs = choice.logprobs
        *tokens, end = logprobs.tokens
        assert ("".join(tokens), end) == (choice.text, "<|im_end|>")
        spans = zip(logprobs.text_offset, tokens, strict=False)
        assert [choice.text[at : at + len(token)] for at, token in spans] == tokens
        for token, value, top in zip(
            logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True
        ):
            assert top[token] == value <= 0
            assert len(top) in (2, 3)
        pieces = [
            c.choices[0].logprobs for c in client.completions.create(**options, logprobs=2, stream=True)
        ]
        assert [t for piece in pieces if piece for t in piece.tokens] == logprobs.tokens
        assert [t for piece in pieces if piece for t in piece.text_offset] == logprobs.text_offset

    @pytest.mark.parametrize("max_tokens", [0, 1])
    def test_of_an_echoed_prompt(self, client, smol, max_tokens):
        """What EleutherAI's harness reads: a score for each token but the first, then what was generated."""
        context, rest = "The capital of France is", " Paris. It lies on the"
        ids = smol.llm.encode(context + rest)
        n_context = len(smol.llm.encode(context))
        (score,) = smol.llm.score(ids[:n_context], [ids[n_context:]])
        for prompts in ([context + rest, "A"], [ids, smol.llm.encode("A")]):
            answer = client.completions.create(
                model="smol",
                prompt=prompts,
                echo=True,
                logprobs=1,
                max_tokens=max_tokens,
                temperature=0,
            )
            choice, short = answer.choices
            found = choice.logprobs
            assert answer.usage.completion_tokens == 2 * max_tokens
            assert answer.usage.prompt_tokens == len(ids) + 1
            assert (len(found.tokens), len(short.logprobs.tokens)) == (len(ids) + max_tokens, 1 + max_tokens)
            assert "".join(found.tokens) == choice.text
            assert choice.text.startswith(context + rest)
            spans = zip(found.text_offset, found.tokens, strict=True)
            assert [choice.text[at : at + len(token)] for at, token in spans] == found.tokens
            assert found.token_logprobs[0] is found.top_logprobs[0] is None
            scored = slice(n_context, len(ids))
            assert found.token_logprobs[scored] == pytest.approx(score.logprobs, abs=1e-9)
            pairs = list(zip(found.token_logprobs, found.top_logprobs, strict=True))[scored]
            assert all(value == max(top.values()) for value, top in pairs) == score.is_greedy
            assert (choice.finish_reason, short.finish_reason) == ("length", "length")

    def test_of_an_echoed_prompt_with_special_tokens(self, client):
        """They are in the text of the prompt; the end token of the answer is none of its text, but is counted."""
        answer = client.completions.create(
            model="smol", prompt="<|im_start|>a", echo=True, logprobs=0, logit_bias={"0": 100}, temperature=0
        )
        (choice,) = answer.choices
        assert (choice.text, choice.finish_reason) == ("<|im_start|>a", "stop")
        assert choice.logprobs.tokens == ["<|im_start|>", "a", "<|endoftext|>"]
        assert choice.logprobs.text_offset == [0, 12, 13]
        assert [len(top or ()) for top in choice.logprobs.top_logprobs] == [0, 1, 1]

    def test_no_tokens_streamed(self, client):
        options = {"model": "smol", "prompt": "A B", "echo": True, "max_tokens": 0, "stream": True}
        (first, last) = list(client.completions.create(**options))
        assert (first.choices[0].text, last.choices[0].text) == ("A B", "")
        assert last.choices[0].finish_reason == "length"

    def test_of_prompts_as_vllm_has_them(self, client, smol):
        ids = smol.llm.encode("The capital of France is Paris")
        completion = client.completions.create(
            model="smol", prompt=ids, logprobs=0, max_tokens=1, extra_body={"prompt_logprobs": 2}
        )
        chat = client.chat.completions.create(
            model="smol", messages=HI, max_tokens=1, extra_body={"prompt_logprobs": 2}
        )
        of_both = (
            (ids, completion.choices[0].prompt_logprobs),
            (prompt_of(smol.llm, HI), chat.prompt_logprobs),
        )
        for tokens, (first, *others) in of_both:
            (score,) = smol.llm.score(tokens[:1], [tokens[1:]])
            assert first is None
            own = [each[str(token)] for each, token in zip(others, tokens[1:], strict=True)]
            assert [each["logprob"] for each in own] == pytest.approx(score.logprobs, abs=1e-9)
            text = "".join(each["decoded_token"] for each in own)
            assert text == smol.llm.decode(tokens[1:], skip_special=False)
            n_rivals = [len(each) - 1 for each in others]
            assert n_rivals == [1 if each["rank"] <= 2 else 2 for each in own]
        assert len(completion.choices[0].logprobs.tokens) == 1

    def test_bytes_of_split_characters(self, client):
        """E1, I6: a token that is half a character is spelled by its bytes."""
        choice = client.chat.completions.create(
            model="smol", messages=HI, seed=1, logprobs=True, extra_body={"regex": "[😀-🙏]{2}"}
        ).choices[0]
        assert (
            b"".join(bytes(item.bytes) for item in choice.logprobs.content).decode() == choice.message.content
        )
        assert choice.logprobs.content[0].token.startswith("bytes:\\xf0")


class TestStructured:
    class Person(pydantic.BaseModel):
        name: str = pydantic.Field(max_length=10)
        age: int = pydantic.Field(ge=0, le=120)

    def test_parse(self, client):
        answer = client.chat.completions.parse(
            model="smol",
            messages=[{"role": "user", "content": "Invent a person."}],
            response_format=self.Person,
            seed=1,
        )
        assert isinstance(answer.choices[0].message.parsed, self.Person)
        assert answer.choices[0].finish_reason == "stop"

    def test_any_object(self, client):
        for seed in range(3):
            choice = client.chat.completions.create(
                model="smol",
                messages=[{"role": "user", "content": "Give me JSON."}],
                response_format={"type": "json_object"},
                max_tokens=150,
                seed=seed,
            ).choices[0]
            assert choice.finish_reason == "length" or isinstance(json.loads(choice.message.content), dict)

    def test_several_and_streamed(self, client):
        schema = {
            "type": "object",
            "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}},
            "required": ["n"],
        }
        options = {
            "model": "smol",
            "messages": HI,
            "n": 4,
            "seed": 1,
            "temperature": 1.5,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "n", "schema": {**schema, "additionalProperties": False}},
            },
        }
        whole = client.chat.completions.create(**options)
        numbers = [json.loads(choice.message.content)["n"] for choice in whole.choices]
        assert len(set(numbers)) > 1
        texts, _ = streamed(client.chat.completions.create(**options, stream=True))
        assert texts == {choice.index: choice.message.content for choice in whole.choices}

    def test_a_regular_expression_and_a_grammar(self, client):
        chat = client.chat.completions.create(
            model="smol", messages=HI, seed=1, extra_body={"regex": "(yes|no)!"}
        )
        assert chat.choices[0].message.content in ("yes!", "no!")
        grammar = 'start: "a" ("b" | "c")'
        text = (
            client.completions.create(model="smol", prompt="x", seed=1, extra_body={"grammar": grammar})
            .choices[0]
            .text
        )
        assert text in ("ab", "ac")

    def test_penalties_and_biases_do_not_break_it(self, client):
        options = {
            "frequency_penalty": 2,
            "presence_penalty": 2,
            "logit_bias": {str(i): 100 for i in range(30, 60)},
        }
        answer = client.chat.completions.create(
            model="smol", messages=HI, seed=1, extra_body={"regex": "(ab){5}"}, **options
        )
        assert answer.choices[0].message.content == "ababababab"

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"regex": "a", "grammar": "b"}, "regex and grammar cannot be combined"),
            ({"regex": "("}, "the regular expression cannot be used"),
            ({"grammar": "start: x"}, "the grammar cannot be used"),
            ({"regex": "a", "ignore_eos": True}, "ignore_eos"),
            ({"regex": "a", "min_tokens": 5}, "min_tokens"),
            (
                {
                    "response_format": {
                        "type": "json_schema",
                        "json_schema": {"name": "x", "schema": {"type": "x"}},
                    }
                },
                "JSON schema",
            ),
            ({"tools": [WEATHER], "tool_choice": "required", "regex": "a"}, "cannot be combined"),
        ],
    )
    def test_what_cannot_be(self, client, options, message):
        with pytest.raises(openai.BadRequestError, match=message):
            client.chat.completions.create(model="smol", messages=HI, extra_body=options)


class TestTools:
    ROME = [{"role": "user", "content": "What is the weather in Rome?"}]  # noqa: RUF012

    @pytest.mark.parametrize(
        "choice", ["required", {"type": "function", "function": {"name": "get_weather"}}]
    )
    def test_a_call_that_must_be(self, client, choice):
        answer = client.chat.completions.create(
            model="smol",
            messages=self.ROME,
            tools=[WEATHER],
            tool_choice=choice,
            seed=1,
            parallel_tool_calls=False,
        )
        (call,) = answer.choices[0].message.tool_calls
        assert call.function.name == "get_weather"
        assert list(json.loads(call.function.arguments)) == ["city"]
        assert (answer.choices[0].finish_reason, answer.choices[0].message.content) == ("tool_calls", None)

    def test_streamed_calls_are_the_same(self, client):
        options = {
            "model": "smol",
            "messages": self.ROME,
            "tools": [WEATHER],
            "tool_choice": "required",
            "seed": 1,
            "parallel_tool_calls": False,
        }
        whole = client.chat.completions.create(**options).choices[0]
        with client.chat.completions.stream(**options) as stream:
            for _ in stream:
                pass
            streamed_message = stream.get_final_completion().choices[0].message
        assert [(c.function.name, c.function.arguments) for c in streamed_message.tool_calls] == [
            (c.function.name, c.function.arguments) for c in whole.message.tool_calls
        ]
        assert len({call.id for call in streamed_message.tool_calls}) == len(streamed_message.tool_calls)

    def test_auto_and_none_may_answer_in_words(self, client):
        for choice in ("auto", "none"):
            answer = client.chat.completions.create(
                model="smol", messages=HI, tools=[WEATHER], tool_choice=choice, max_tokens=8, temperature=0
            )
            assert answer.choices[0].message.content
            assert answer.choices[0].message.tool_calls is None

    def test_a_call_or_a_structure(self, client):
        """Both may be asked for: the answer is one of the two."""
        options = {"model": "smol", "messages": self.ROME, "tools": [WEATHER], "max_tokens": 60}
        for structure in ({"regex": "(sun|rain)"}, {"response_format": {"type": "json_object"}}):
            (choice,) = client.chat.completions.create(**options, seed=1, extra_body=structure).choices
            if choice.finish_reason == "tool_calls":
                assert json.loads(choice.message.tool_calls[0].function.arguments)
            elif choice.finish_reason == "stop":
                assert choice.message.content in ("sun", "rain") or json.loads(choice.message.content)
        with pytest.raises(openai.BadRequestError, match="grammar cannot be combined with tools"):
            client.chat.completions.create(**options, extra_body={"grammar": 'start: "a"'})

    def test_the_results_go_back(self, client):
        """F5: content null, arguments as text."""
        first = client.chat.completions.create(
            model="smol",
            messages=self.ROME,
            tools=[WEATHER],
            tool_choice="required",
            seed=1,
            parallel_tool_calls=False,
        )
        message = first.choices[0].message
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "Sunny, 25 degrees."}
        answer = client.chat.completions.create(
            model="smol",
            messages=[*self.ROME, message.model_dump(), result],
            tools=[WEATHER],
            max_tokens=6,
            temperature=0,
        )
        assert answer.choices[0].message.content


class TestCompletions:
    def test_it_is_what_the_library_says(self, client, smol):
        answer = client.completions.create(model="smol", prompt="Once upon a time", seed=3, temperature=0.7)
        (expected,) = smol.llm.generate(
            "Once upon a time", SamplingParams(seed=3, temperature=0.7, max_tokens=16)
        )
        assert (answer.choices[0].text, answer.choices[0].finish_reason) == (expected.text, "length")
        assert (answer.object, answer.usage.completion_tokens) == ("text_completion", 16)

    def test_several_prompts_of_several_completions(self, client, smol):
        ids = smol.llm.encode("A B")
        for prompts in (["A B", "C D"], [ids, smol.llm.encode("C D")]):
            answer = client.completions.create(model="smol", prompt=prompts, n=2, max_tokens=4, seed=1)
            assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
            assert answer.usage.completion_tokens == 16
            again = client.completions.create(model="smol", prompt=prompts[1], max_tokens=4, seed=1)
            assert again.choices[0].text == answer.choices[2].text
            pieces = {}
            for chunk in client.completions.create(
                model="smol", prompt=prompts, n=2, max_tokens=4, seed=1, stream=True
            ):
                for choice in chunk.choices:
                    pieces[choice.index] = pieces.get(choice.index, "") + choice.text
            assert pieces == {choice.index: choice.text for choice in answer.choices}
        assert client.completions.create(model="smol", prompt=ids, max_tokens=4, seed=1).choices[0].text

    def test_echo(self, client):
        for stream in (False, True):
            answer = client.completions.create(
                model="smol", prompt="A B", echo=True, max_tokens=2, seed=1, stream=stream
            )
            text = "".join(c.choices[0].text for c in answer) if stream else answer.choices[0].text
            assert text.startswith("A B")
            assert len(text) > 3

    def test_the_usage_of_a_stream(self, client):
        chunks = list(
            client.completions.create(
                model="smol",
                prompt="A",
                max_tokens=3,
                seed=1,
                stream=True,
                stream_options={"include_usage": True},
            )
        )
        assert (chunks[-1].choices, chunks[-1].usage.completion_tokens) == ([], 3)


class TestResponses:
    def test_text(self, client, smol):
        response = client.responses.create(
            model="smol",
            input="Name three rivers.",
            instructions="Be brief.",
            max_output_tokens=8,
            metadata={"a": "b"},
            temperature=0,
        )
        messages = [{"role": "system", "content": "Be brief."}, *HI]
        (expected,) = smol.llm.chat(messages, SamplingParams(temperature=0, max_tokens=8))
        assert response.output_text == expected.text
        assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert (response.usage.output_tokens, response.metadata, response.model) == (8, {"a": "b"}, "smol")

    def test_streamed(self, client):
        options = {"model": "smol", "input": HI, "max_output_tokens": 8, "temperature": 0}
        whole = client.responses.create(**options)
        events = list(client.responses.create(**options, stream=True))
        assert [event.sequence_number for event in events] == list(range(len(events)))
        kinds = [event.type for event in events]
        deltas = [kind for kind in kinds if kind == "response.output_text.delta"]
        assert kinds == [
            "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
            *deltas,
            "response.output_text.done", "response.content_part.done", "response.output_item.done",
            "response.incomplete",
        ]  # fmt: skip
        assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == whole.output_text
        assert events[-1].response.output_text == whole.output_text
        assert events[-1].response.usage == whole.usage.model_copy(
            update={"input_tokens_details": events[-1].response.usage.input_tokens_details}
        )

    def test_the_client_s_own_stream_helper(self, client):
        with client.responses.stream(
            model="smol", input="Hi", max_output_tokens=200, temperature=0
        ) as stream:
            text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
            assert stream.get_final_response().output_text == text

    def test_structured(self, client):
        response = client.responses.parse(
            model="smol", input="Invent a person.", text_format=TestStructured.Person, temperature=0
        )
        assert isinstance(response.output_parsed, TestStructured.Person)

    def test_calls_and_their_results(self, client):
        tool = {"type": "function", **WEATHER["function"]}
        options = {
            "model": "smol",
            "tools": [tool],
            "tool_choice": "required",
            "parallel_tool_calls": False,
            "temperature": 0,
        }
        items = [{"role": "user", "content": "Weather in Rome?"}]
        response = client.responses.create(input=items, **options)
        (call,) = response.output
        assert (call.type, call.name, list(json.loads(call.arguments))) == (
            "function_call",
            "get_weather",
            ["city"],
        )
        events = list(client.responses.create(input=items, stream=True, **options))
        pieces = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
        assert "".join(pieces) == call.arguments
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
        items += [*response.model_dump(exclude_none=True)["output"], result]
        answer = client.responses.create(
            model="smol", input=items, tools=[tool], tool_choice="none", max_output_tokens=4, temperature=0
        )
        assert answer.output[0].type == "message"

    def test_logprobs(self, client):
        response = client.responses.create(
            model="smol",
            input="Hi",
            max_output_tokens=3,
            top_logprobs=2,
            include=["message.output_text.logprobs"],
            temperature=0,
        )
        part = response.output[0].content[0]
        assert "".join(item.token for item in part.logprobs) == part.text
        assert [len(item.top_logprobs) for item in part.logprobs] == [2, 2, 2]


class TestEmbeddings:
    def test_they_are_the_library_s(self, client, smol):
        """The client asks for base64 by itself."""
        texts = ["A rope.", "A ropewalk is a long lane."]
        expected = smol.llm.embed(texts)
        for options in ({}, {"encoding_format": "float"}, {"dimensions": 576}):
            answer = client.embeddings.create(model="smol", input=texts, **options)
            assert [item.index for item in answer.data] == [0, 1]
            assert np.array_equal(np.array([item.embedding for item in answer.data], np.float32), expected)
            assert answer.usage.prompt_tokens == sum(len(smol.llm.encode(text)) for text in texts)
        ids = smol.llm.encode(texts[0])
        for one in (texts[0], ids, [ids]):
            (item,) = client.embeddings.create(model="smol", input=one).data
            assert np.array_equal(np.array(item.embedding, np.float32), expected[0])

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"input": "a", "dimensions": 64}, "dimensions is 64; this model has 576"),
            ({"input": []}, "input is empty"),
            ({"input": [""]}, "no tokens"),
            ({"input": "a b " * 2000}, "at most 1024"),
        ],
    )
    def test_what_cannot_be(self, client, options, message):
        with pytest.raises(openai.BadRequestError, match=message):
            client.embeddings.create(model="smol", **options)


class TestTooLong:
    """What is left out on request, and that the answer tells it."""

    TURNS = [{"role": "system", "content": "You are terse."}] + [
        {"role": ("user", "assistant")[i % 2], "content": f"{i} " + "rope " * 30} for i in range(21)
    ]

    def test_turns_of_a_chat(self, client, smol):
        def create(**options):
            return client.chat.completions.create(
                model="smol", messages=self.TURNS, max_tokens=4, temperature=0, extra_body=options
            )

        whole = create()
        cut = create(truncate_prompt_tokens=300)
        left = [self.TURNS[0], *self.TURNS[-7:]]
        alone = client.chat.completions.create(model="smol", messages=left, max_tokens=4, temperature=0)
        assert cut.usage.prompt_tokens == alone.usage.prompt_tokens == len(prompt_of(smol.llm, left)) <= 300
        assert cut.choices[0].message.content == alone.choices[0].message.content
        n_cut = whole.usage.prompt_tokens - cut.usage.prompt_tokens
        assert cut.usage.prompt_tokens_details.truncated_tokens == n_cut > 300
        assert not hasattr(whole.usage.prompt_tokens_details, "truncated_tokens")
        assert create(truncate_prompt_tokens=-1).usage.prompt_tokens_details.truncated_tokens == 0
        assert smol.becomes_idle()

    def test_what_cannot_be_cut_so(self, client):
        for options, message in (
            ({"truncate_prompt_tokens": 20}, "the last turn of the conversation has .* at most 20 fit"),
            ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens is 0"),
            ({"truncate_prompt_tokens": 1024}, "truncate_prompt_tokens is 1024; allowed: at most 1023"),
            ({"slide": True}, "max_tokens is None; allowed: with slide, a number"),
        ):
            with pytest.raises(openai.BadRequestError, match=message):
                client.chat.completions.create(model="smol", messages=self.TURNS, extra_body=options)

    def test_prompts(self, client, smol):
        """The beginning is kept as far as it is asked for, then the end; each prompt is cut for itself."""
        long = smol.llm.encode("one two three " * 800)
        answer = client.completions.create(
            model="smol",
            prompt=[long, long[:9]],
            max_tokens=3,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"truncate_prompt_tokens": 40, "keep_tokens": 10},
        )
        texts = ["", ""]
        for chunk in answer:
            for choice in chunk.choices:
                texts[choice.index] += choice.text
        assert chunk.usage.prompt_tokens == 49
        assert chunk.usage.prompt_tokens_details.truncated_tokens == len(long) - 40
        alone = client.completions.create(
            model="smol", prompt=[[*long[:10], *long[-30:]], long[:9]], max_tokens=3, temperature=0
        )
        assert texts == [choice.text for choice in alone.choices]
        text = client.completions.create(
            model="smol", prompt="word " * 100_000, max_tokens=2, extra_body={"truncate_prompt_tokens": -1}
        )
        assert text.usage.prompt_tokens == 1022

    @pytest.mark.parametrize("stream", [False, True])
    def test_a_context_that_slides(self, client, smol, stream):
        answer = client.completions.create(
            model="smol",
            prompt=smol.llm.encode("one two three " * 800)[:1000],
            max_tokens=40,
            stream=stream,
            extra_body={"slide": True, "ignore_eos": True, "seed": 3},
        )
        choice = list(answer)[-1].choices[0] if stream else answer.choices[0]
        params = SamplingParams(max_tokens=40, slide=True, ignore_eos=True, seed=3, keep_tokens=0)
        (output,) = smol.llm.generate([smol.llm.encode("one two three " * 800)[:1000]], params)
        assert choice.finish_reason == "length"
        assert choice.dropped_tokens == output.outputs[0].n_dropped > 0
        if not stream:
            assert choice.text == output.outputs[0].text
            assert answer.usage.completion_tokens == 40

    def test_responses(self, client):
        messages = [{"role": m["role"], "content": m["content"] * 3} for m in self.TURNS]
        with pytest.raises(openai.BadRequestError, match="at most 1023 fit"):
            client.responses.create(model="smol", input=messages, max_output_tokens=4)
        answer = client.responses.create(
            model="smol", input=messages, max_output_tokens=4, truncation="auto", temperature=0
        )
        assert (answer.truncation, answer.usage.output_tokens) == ("auto", 4)
        assert answer.usage.input_tokens_details.truncated_tokens > 500
        assert answer.usage.input_tokens <= 1020

    def test_embeddings(self, client, smol):
        ids = smol.llm.encode("one two three " * 800)
        create = client.embeddings.create
        answer = create(model="smol", input=ids, extra_body={"truncate_prompt_tokens": 50})
        assert answer.data == create(model="smol", input=ids[-50:]).data
        assert (answer.usage.prompt_tokens, answer.usage.truncated_tokens) == (50, len(ids) - 50)
        for limit, message in (
            (1025, "this model has a context of 1024"),
            (0, "truncate_prompt_tokens is 0"),
        ):
            with pytest.raises(openai.BadRequestError, match=message):
                create(model="smol", input="a", extra_body={"truncate_prompt_tokens": limit})


class TestTokens:
    def test_there_and_back(self, smol):
        text = "Grüße, 世界! 😀"
        answer = smol.post("/tokenize", {"prompt": text, "return_token_strs": True}).json()
        assert answer["tokens"] == smol.llm.encode(text)
        assert (answer["count"], answer["max_model_len"]) == (len(answer["tokens"]), 1024)
        assert len(answer["token_strs"]) == answer["count"]
        assert smol.post("/detokenize", {"tokens": answer["tokens"]}).json() == {"prompt": text}

    def test_messages(self, smol):
        answer = smol.post("/tokenize", {"messages": HI}).json()
        assert answer["tokens"] == prompt_of(smol.llm, HI)
        shorter = smol.post("/tokenize", {"messages": HI, "add_generation_prompt": False}).json()
        assert answer["tokens"][: shorter["count"]] == shorter["tokens"]
        assert shorter["count"] < answer["count"]

    def test_what_clients_that_count_by_themselves_ask(self, smol):
        """EleutherAI's harness takes its tokens from here, with vLLM's names."""
        info, tokenizer = smol.get("/tokenizer_info").json(), smol.llm.tokenizer
        assert info == {
            "bos_token": tokenizer.token_text(tokenizer.bos_id),
            "eos_token": tokenizer.token_text(tokenizer.eos_id),
            "add_bos_token": False,
            "add_eos_token": False,
            "chat_template": smol.llm.chat_template.source,
            "model_max_length": smol.llm.context_length,
        }
        for name, token in (("bos_token", tokenizer.bos_id), ("eos_token", tokenizer.eos_id)):
            body = {"prompt": info[name], "add_special_tokens": False}
            assert smol.post("/tokenize", body).json()["tokens"] == [token]

    def test_a_token_that_the_model_lacks(self, smol):
        answer = smol.post("/detokenize", {"tokens": [10**6]})
        assert (answer.status_code, answer.json()["error"]["message"]) == (
            400,
            "token id 1000000 is outside the vocabulary: ids are 0 to 49151",
        )


def test_a_trace_is_told_when_it_is_asked_for(smol):
    """Of each token the stages and candidates, and what its step read; the same whole and streamed."""
    body = {
        "model": "smol",
        "prompt": "A rope is",
        "max_tokens": 5,
        "seed": 3,
        "temperature": 0.7,
        "top_k": 5,
        "trace": 4,
    }
    whole = smol.post("/v1/completions", body).json()["choices"][0]["trace"]
    lines = smol.post("/v1/completions", {**body, "stream": True}).text.split("\n\n")
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    streamed = [token for event in events for choice in event["choices"] for token in choice.get("trace", ())]
    assert len(whole) == len(streamed) == 5
    for one, other in zip(whole, streamed, strict=True):
        assert [stage["name"] for stage in one["stages"]] == ["raw", "temperature", "top_k"]
        assert one["stages"][-1]["n_candidates"] == 5
        same = ("token_id", "text", "position", "probability", "stages", "candidates")
        assert {name: one[name] for name in same} == {name: other[name] for name in same}
        assert one["step"]["read_bytes"] > 80e6 and one["step"]["seconds"] > 0
        assert sum(c["probabilities"][-1] for c in one["candidates"]) <= 1 + 1e-9
    without = {name: value for name, value in body.items() if name != "trace"}
    assert "trace" not in smol.post("/v1/completions", without).json()["choices"][0]
    assert smol.post("/v1/completions", {**body, "trace": 51}).status_code == 400


def test_the_machine_is_measured(smol):
    found = smol.get("/machine").json()
    assert found["threads"] >= 1 and found["read_bytes_per_s"] > 0
