"""Prompts and contexts that are too long: cut only on request, never the system message, never silently."""

import runpy
from pathlib import Path

import pytest

from ropewalk import SamplingParams
from ropewalk.errors import InvalidParameterError, PromptError, TruncationWarning
from ropewalk.text.chat import ChatTemplate
from ropewalk.truncation import cut_tokens, cut_turns, head_tokens, most_tokens

_TOYS = runpy.run_path(str(Path(__file__).with_name("toy_llm.py")))
BOS, toy_llm, idle = _TOYS["BOS"], _TOYS["toy_llm"], _TOYS["idle"]

LETTERS = '{"system": "f", "user": "d", "assistant": "e"}'
CHAT = f"{{% for m in messages %}}<s>{{{{ {LETTERS}[m.role] }}}}{{{{ m.content }}}}{{% endfor %}}<s>e"
FOLDED = """
{%- set first = messages[0].content if messages[0].role == "system" else "" -%}
{%- for m in messages if m.role != "system" -%}
<s>{{ {"user": "d", "assistant": "e"}[m.role] }}{% if loop.first %}{{ first }} {% endif %}{{ m.content }}
{%- endfor %}<s>e"""


class Tokenizer(_TOYS["ToyTokenizer"]):
    """The toy one, which also reads the two probes."""

    def encode(self, text, **options):
        return super().encode(text.replace("x", "e").replace("7", "f"), **options)


def turn(role, content):
    return {"role": role, "content": content}


SYSTEM = turn("system", "abc")
TALK = [
    turn("user", "a" * 20),
    turn("assistant", "b" * 20),
    turn("user", "c" * 10),
    turn("assistant", "b" * 8),
]
LAST = turn("user", "cab")


def chat_llm(template=CHAT, **options):
    return toy_llm(tokenizer=Tokenizer(), template=ChatTemplate(template), **options)


def greedy(**options):
    return SamplingParams(**({"temperature": 0, "max_tokens": 4, "ignore_eos": True} | options))


class TestArithmetic:
    def test_how_many_tokens_stay(self):
        def most(n, limit, max_tokens=16):
            params = SamplingParams(truncate_prompt_tokens=limit, max_tokens=max_tokens)
            return most_tokens(n, params, 64)

        assert [most(100, None), most(100, 10), most(5, 10)] == [100, 10, 5]
        assert [most(63, -1), most(64, -1), most(64, -1, 4), most(64, -1, 60)] == [63, 48, 60, 32]
        assert most(64, -1, None) == 32
        with pytest.raises(InvalidParameterError, match="truncate_prompt_tokens is 64; allowed: at most 63"):
            most(5, 64)

    @pytest.mark.parametrize(("keep", "left"), [(0, [6, 7, 8, 9]), (1, [0, 7, 8, 9]), (3, [0, 1, 2, 9])])
    def test_first_and_last_tokens_stay(self, keep, left):
        assert list(cut_tokens(range(10), 4, keep)) == left
        assert list(cut_tokens(range(4), 4, keep)) == [0, 1, 2, 3]

    def test_what_leaves_no_last_token_is_refused(self):
        with pytest.raises(InvalidParameterError, match="keep_tokens is 4; allowed: less than the 4 tokens"):
            cut_tokens(range(10), 4, 4)

    def test_of_a_thousand_turns_few_conversations_are_encoded(self):
        """One at a time, a long history would hold a server's thread for minutes."""
        messages = [SYSTEM, *[turn(role, "a") for _ in range(1000) for role in ("user", "assistant")], LAST]
        tried = []

        def encode(conversation):
            tried.append(len(conversation))
            return range(10 * len(conversation))

        for most, n_left in ((10 * 2002 - 1, 2000), (45, 4), (20, 2)):
            assert cut_turns(messages, encode(messages), most, encode) == [SYSTEM, *messages[-n_left + 1 :]]
        assert len(tried) < 3 * 12
        with pytest.raises(PromptError, match="the last turn of the conversation has 20 tokens"):
            cut_turns(messages, encode(messages), 19, encode)

    @pytest.mark.parametrize("value", [0, -2, 1.5, "8"])
    def test_limits_that_are_none(self, value):
        with pytest.raises(InvalidParameterError, match="truncate_prompt_tokens is"):
            SamplingParams(truncate_prompt_tokens=value)


class TestPrompts:
    def test_c8_by_default_refused_with_both_numbers(self):
        with pytest.raises(PromptError, match="70 tokens; at most 63 fit into a context of 64"):
            toy_llm().generate("a" * 70)

    def test_c8_cut_on_request_and_told(self):
        llm = toy_llm()
        prompt = "a" * 30 + "b" * 30 + "c" * 10
        with pytest.warns(TruncationWarning, match="a prompt of 70 tokens was cut to 12") as told:
            (cut,) = llm.generate(prompt, greedy(truncate_prompt_tokens=12))
        with pytest.warns(TruncationWarning) as told_by_stream:
            llm.stream(prompt, greedy(truncate_prompt_tokens=12))
        assert {warning.filename for warning in [*told, *told_by_stream]} == {__file__}
        assert (cut.n_truncated, cut.prompt_token_ids) == (58, [1, 1] + [2] * 10)
        (short,) = llm.generate("bb" + "c" * 10, greedy())
        assert (cut.token_ids, short.n_truncated) == (short.token_ids, 0)
        assert cut.prompt == prompt
        assert idle(llm)

    def test_the_start_token_stays(self):
        llm = toy_llm(tokenizer=_TOYS["ToyTokenizer"](add_bos=True))
        for options, ids in (
            ({}, [BOS, 1, 2, 2]),
            ({"keep_tokens": 0}, [0, 1, 2, 2]),
            ({"keep_tokens": 2}, [BOS, 0, 2, 2]),
        ):
            with pytest.warns(TruncationWarning):
                (cut,) = llm.generate("a" * 9 + "bcc", greedy(truncate_prompt_tokens=4, **options))
            assert cut.prompt_token_ids == ids
            assert cut.n_truncated == 9

    def test_only_what_does_not_fit(self):
        llm = toy_llm()
        (whole,) = llm.generate("a" * 60, greedy(truncate_prompt_tokens=-1, max_tokens=16))
        assert (whole.n_truncated, len(whole.token_ids)) == (0, 4)
        with pytest.warns(TruncationWarning):
            (cut,) = llm.generate("a" * 64, greedy(truncate_prompt_tokens=-1, max_tokens=16))
        assert (len(cut.prompt_token_ids), cut.n_truncated, len(cut.token_ids)) == (48, 16, 16)

    def test_streams_tell_it_too(self):
        with pytest.warns(TruncationWarning):
            chunks = toy_llm().stream("a" * 70, greedy(truncate_prompt_tokens=20))
        assert list(chunks)[-1].output.n_truncated == 50


class TestChat:
    def test_c8_the_oldest_turns_go_and_the_system_message_stays(self):
        llm = chat_llm()
        messages = [SYSTEM, *TALK, LAST]
        for limit, kept in ((50, [SYSTEM, *TALK[2:], LAST]), (20, [SYSTEM, LAST])):
            with pytest.warns(TruncationWarning, match="its oldest turns were left out"):
                (cut,) = llm.chat(messages, greedy(truncate_prompt_tokens=limit))
            (short,) = llm.chat(kept, greedy())
            assert (cut.prompt, cut.prompt_token_ids, cut.token_ids) == (
                short.prompt,
                short.prompt_token_ids,
                short.token_ids,
            )
            assert cut.n_truncated == len(
                llm.encode(llm.chat_template.render(messages), parse_special=True)
            ) - len(short.prompt_token_ids)

    def test_without_a_system_message(self):
        with pytest.warns(TruncationWarning):
            (cut,) = chat_llm().chat([*TALK, LAST], greedy(truncate_prompt_tokens=-1, max_tokens=2))
        assert cut.prompt == "<s>d" + "c" * 10 + "<s>e" + "b" * 8 + "<s>dcab<s>e"

    def test_c8_a_last_turn_that_does_not_fit_is_refused(self):
        llm = chat_llm()
        with pytest.raises(
            PromptError, match=r"the last turn of the conversation has 74 tokens.*at most 60 fit"
        ):
            llm.chat([SYSTEM, turn("user", "a" * 65)], greedy(truncate_prompt_tokens=-1))
        with pytest.raises(PromptError, match="at most 63 fit into a context of 64"):
            llm.chat([SYSTEM, *TALK, LAST], greedy())

    def test_the_calls_of_a_tool_go_with_their_turn(self):
        llm = chat_llm(CHAT.replace('"user"', '"tool": "a", "user"'))
        calls = [
            turn("user", "a" * 30),
            turn("assistant", "b"),
            turn("tool", "c" * 20),
            turn("assistant", "d"),
        ]
        with pytest.warns(TruncationWarning):
            (cut,) = llm.chat([SYSTEM, *calls, LAST], greedy(truncate_prompt_tokens=-1))
        assert cut.prompt == "<s>fabc<s>dcab<s>e"


class TestSliding:
    def head(self, template, messages):
        tokenizer, chat = Tokenizer(), ChatTemplate(template)

        def encode(messages):
            return tokenizer.encode(chat.render(messages), parse_special=True)

        ids = encode(messages)
        n = head_tokens(messages, ids, encode, tokenizer.is_special)
        return tokenizer.decode(ids[:n], skip_special=False)

    def test_what_stands_before_the_first_turn(self):
        assert self.head(CHAT, [SYSTEM, *TALK]) == "<s>fabc"
        assert (
            self.head(CHAT, TALK) == "<s>d"
        )  # no token before the one that opens the turn: up to the letters
        assert self.head("f" + CHAT, TALK) == "f"
        assert self.head(FOLDED, [SYSTEM, *TALK]) == "<s>dabc "
        assert self.head("{{ raise_exception('no') if messages | length < 3 }}" + CHAT, TALK) == ""

    def test_c8_a_chat_slides_past_its_context_and_keeps_the_system_message(self):
        llm = chat_llm()
        (output,) = llm.chat([SYSTEM, LAST], greedy(max_tokens=200, slide=True))
        head, rest = output.prompt_token_ids[:5], output.prompt_token_ids[5:] + output.token_ids
        assert llm.decode(head, skip_special=False) == "<s>fabc"
        assert len(output.token_ids) == 200
        assert output.outputs[0].n_dropped % 16 == 0
        # The last token is that of the system message and of what had not slid out.
        shown = head + rest[output.outputs[0].n_dropped : -1]
        assert len(shown) < 64
        assert output.token_ids[-1] == int(llm.backend.logits(shown).argmax())

    def test_a_plain_prompt_keeps_its_start_token(self):
        llm = toy_llm(tokenizer=_TOYS["ToyTokenizer"](add_bos=True))
        (one,) = llm.generate("abc", greedy(max_tokens=100, slide=True))
        (same,) = llm.generate("abc", greedy(max_tokens=100, slide=True, keep_tokens=1))
        (other,) = llm.generate("abc", greedy(max_tokens=100, slide=True, keep_tokens=0))
        assert one.token_ids == same.token_ids
        assert (one.outputs[0].n_dropped, other.outputs[0].n_dropped) == (48, 64)

    def test_without_it_the_context_ends_the_output(self):
        (output,) = toy_llm().generate("abc", greedy(max_tokens=100))
        assert (len(output.token_ids), output.finish_reason, output.outputs[0].n_dropped) == (61, "length", 0)
