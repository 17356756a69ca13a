"""`LLM`: prompts in, text out. Mostly on a toy model of which every token is known, then on the real one."""

import contextlib
import dataclasses
import random
import runpy
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from ropewalk import LLM, SamplingParams
from ropewalk import driver as driver_module
from ropewalk.errors import GenerationError, InvalidParameterError, PromptError, TemplateError
from ropewalk.prompts import Prepared
from ropewalk.text.chat import ChatTemplate

_TOYS = runpy.run_path(str(Path(__file__).with_name("toy_llm.py")))
BOS, END = _TOYS["BOS"], _TOYS["END"]
ToyBackend, ToyTokenizer, Scripted = _TOYS["ToyBackend"], _TOYS["ToyTokenizer"], _TOYS["Scripted"]
toy_llm, says, idle, Reading = (_TOYS[name] for name in ("toy_llm", "says", "idle", "Reading"))

SEEDED = SamplingParams(seed=3, max_tokens=12, ignore_eos=True)


class TestGenerate:
    def test_a_list_is_one_batch_with_the_tokens_of_each_alone(self):
        prompts = ["a", "abc", [0, 1, 2], np.array([4, 4]), (7, 8)]
        params = [SamplingParams(seed=s, max_tokens=5 + s, ignore_eos=True) for s in range(5)]
        together = toy_llm()
        outputs = together.generate(prompts, params)
        assert max(together.backend.batch_sizes) > 5
        alone = [toy_llm().generate(p, q)[0] for p, q in zip(prompts, params, strict=True)]
        assert [o.token_ids for o in outputs] == [o.token_ids for o in alone]
        assert [o.text for o in outputs] == [o.text for o in alone]
        assert [len(o.token_ids) for o in outputs] == [5, 6, 7, 8, 9]
        assert [o.prompt for o in outputs] == ["a", "abc", None, None, None]
        assert [o.prompt_token_ids for o in outputs] == [[0], [0, 1, 2], [0, 1, 2], [4, 4], [7, 8]]
        assert idle(together)

    def test_more_prompts_than_fit_at_once(self):
        llm = toy_llm(max_batch=2, kv_tokens=64)
        outputs = llm.generate(["a"] * 7, SEEDED)
        assert {tuple(o.token_ids) for o in outputs} == {tuple(toy_llm().generate("a", SEEDED)[0].token_ids)}

    def test_nothing_in_nothing_out(self):
        assert toy_llm().generate([]) == []

    def test_results_carry_everything(self):
        (output,) = says("b", "c").generate("a", SamplingParams(logprobs=1))
        assert (output.text, output.token_ids, output.finish_reason) == ("bc", [1, 2, END], "stop")
        assert (output.stop_reason, output.error) == (None, None)
        assert [p.token_id for p in output.logprobs] == output.token_ids
        assert [p.top for p in output.logprobs] == [((i, 0.0),) for i in output.token_ids]
        t = output.timings
        assert (t.prompt_tokens, t.generated_tokens) == (1, 3)
        assert 0 < t.prefill_s <= t.time_to_first_token_s
        assert t.prefill_tps == 1 / t.prefill_s
        assert t.decode_tps == 2 / t.decode_s
        assert output.outputs[0].text == output.text

    def test_one_token_has_no_decode_speed(self):
        (output,) = says("b").generate("a", SamplingParams(max_tokens=1))
        assert (output.timings.decode_tps, output.finish_reason, output.logprobs) == (0.0, "length", None)

    def test_a_seed_is_reported_and_gives_the_text_again(self):
        params = SamplingParams(max_tokens=20, ignore_eos=True)
        first, second = toy_llm().generate(["a", "a"], params)
        assert first.seed != second.seed
        (again,) = toy_llm().generate("a", SamplingParams(max_tokens=20, ignore_eos=True, seed=second.seed))
        assert again.text == second.text

    def test_max_tokens_none_runs_to_the_end_of_the_context(self):
        (output,) = toy_llm().generate([0] * 50, SamplingParams(max_tokens=None, ignore_eos=True))
        assert (len(output.token_ids), output.finish_reason) == (14, "length")

    def test_without_a_kv_cache_the_same_text(self):
        with_cache, without = toy_llm(), toy_llm(kv_cache=False)
        params = SamplingParams(seed=1, max_tokens=30, ignore_eos=True)
        assert without.generate("abc", params)[0].token_ids == with_cache.generate("abc", params)[0].token_ids
        assert without.backend.batch_sizes == list(range(3, 33))


class TestCompletions:
    PARAMS = SamplingParams(n=3, seed=3, max_tokens=12, ignore_eos=True, logprobs=1)

    def test_several_completions_each_of_its_own_seed(self):
        llm = toy_llm()
        outputs = llm.generate(["ab", "c"], self.PARAMS)
        for prompt, output in zip(["ab", "c"], outputs, strict=True):
            assert [c.index for c in output.outputs] == [0, 1, 2]
            assert output.outputs[0].seed == output.seed == 3
            for completion in output.outputs:
                params = dataclasses.replace(self.PARAMS, n=1, seed=completion.seed)
                (alone,) = toy_llm().generate(prompt, params)
                assert dataclasses.replace(completion, index=0) == alone.outputs[0]
            assert len({c.text for c in output.outputs}) == 3
            assert output.text == output.outputs[0].text
            t = output.timings
            assert (t.prompt_tokens, t.generated_tokens) == (len(prompt), 36)
            assert t.decode_tps == 35 / t.decode_s
            assert t.time_per_token_s == t.decode_s / 35
        assert idle(llm)

    def test_a_stream_of_several_says_whose_each_chunk_is(self):
        chunks = list(toy_llm().stream("ab", self.PARAMS))
        (output,) = toy_llm().generate("ab", self.PARAMS)
        for completion in output.outputs:
            own = [chunk for chunk in chunks if chunk.index == completion.index]
            assert "".join(chunk.text for chunk in own) == completion.text
            assert [chunk.token_id for chunk in own] == completion.token_ids
            assert [chunk.completion for chunk in own] == [None] * 11 + [completion]
            assert [chunk.finish_reason for chunk in own] == [None] * 11 + ["length"]
        assert [chunk.output is None for chunk in chunks] == [True] * 35 + [False]
        assert chunks[-1].output.outputs == output.outputs

    def test_each_ends_for_itself(self):
        bias = {END: 1.0}
        (output,) = toy_llm().generate("ab", SamplingParams(n=16, seed=1, max_tokens=9, logit_bias=bias))
        assert {c.finish_reason for c in output.outputs} == {"stop", "length"}
        for c in output.outputs:
            assert (c.token_ids[-1] == END) == (c.finish_reason == "stop") or len(c.token_ids) == 9

    def test_one_that_fails_does_not_take_the_others_with_it(self):
        llm = toy_llm(ToyBackend(poison={10: -np.inf}))
        params = SamplingParams(n=8, seed=1, max_tokens=4, ignore_eos=True)
        with pytest.warns(RuntimeWarning, match="prompt 0 failed: no token can be drawn"):
            (output,) = llm.generate("ab", params)
        assert {c.finish_reason for c in output.outputs} == {"error", "length"}
        with pytest.raises(GenerationError, match="no token can be drawn"):
            list(llm.stream("ab", params))
        assert idle(llm)

    def test_closing_a_stream_ends_them_all(self):
        llm = toy_llm()
        with contextlib.closing(llm.stream("ab", self.PARAMS)) as chunks:
            for _ in range(5):
                next(chunks)
        assert idle(llm)


class TestPrompts:
    def test_the_empty_string_is_bos_where_the_model_has_one(self):
        (output,) = toy_llm(tokenizer=ToyTokenizer(add_bos=True)).generate("", SEEDED)
        assert output.prompt_token_ids == [BOS]
        with pytest.raises(PromptError, match="no tokens"):
            toy_llm().generate("")

    @pytest.mark.parametrize(
        ("prompts", "message"),
        [
            ("a" * 64, "64 tokens; at most 63 fit into a context of 64"),
            ([[]], "no tokens"),
            ([[0, 13]], "token id 13; allowed: 0 ... 12"),
            ([0, "a"], "'a' among its token ids"),
            ([["a", "b"]], "'a' among its token ids"),
            (b"abc", "a prompt is b'abc'"),
            ([b"abc"], "a prompt is b'abc'"),
            (5, "a prompt is 5"),
            (["a", None], "a prompt is None"),
        ],
    )
    def test_prompts_that_cannot_be_used(self, prompts, message):
        llm = toy_llm()
        with pytest.raises(PromptError, match=message):
            llm.generate(prompts)
        assert llm.backend.batch_sizes == []

    def test_one_bad_prompt_refuses_the_list_before_anything_runs(self):
        llm = toy_llm()
        with pytest.raises(PromptError):
            llm.generate(["a", "b", [99]])
        assert llm.backend.batch_sizes == []
        assert idle(llm)

    def test_params(self):
        llm = toy_llm()
        with pytest.raises(InvalidParameterError, match="there are 2 params for 3 prompts"):
            llm.generate(["a", "b", "c"], [SEEDED, SEEDED])
        with pytest.raises(InvalidParameterError, match=r"params is 0\.5; allowed: SamplingParams"):
            llm.stream("a", 0.5)
        with pytest.raises(InvalidParameterError, match="logit_bias has token id 13"):
            llm.generate("a", SamplingParams(logit_bias={13: 1.0}))
        with pytest.raises(InvalidParameterError, match="there are 1 priorities for 2 prompts"):
            llm.generate(["a", "b"], priority=[1])
        with pytest.raises(InvalidParameterError, match=r"priority is 1\.5; allowed: an integer"):
            llm.stream("a", priority=1.5)

    def test_special_tokens_are_recognised_in_prompts(self):
        (output,) = toy_llm().generate("<s>ab</s>", SEEDED)
        assert output.prompt_token_ids == [BOS, 0, 1, END]
        assert toy_llm().encode("<s>ab</s>") == [BOS, 0, 1, END]
        assert toy_llm().decode([BOS, 0, 1, END]) == "ab"
        assert toy_llm().decode([BOS, 0, 1, END], skip_special=False) == "<s>ab</s>"


class TestEndings:
    def test_a_stop_string_over_tokens_neither_leaks_nor_loses(self):
        for stop, text, n_tokens, reason in (
            ("cd", "b", 3, "cd"),
            ("c", "b", 2, "c"),
            ("dx", "bcde", 5, None),
            (["e", "bc"], "", 2, "bc"),
        ):
            llm = says("b", "c", "d", "e")
            params = SamplingParams(stop=stop)
            (output,) = llm.generate("a", params)
            chunks = list(llm.stream("a", params))
            assert (output.text, len(output.token_ids)) == (text, n_tokens)
            assert "".join(chunk.text for chunk in chunks) == text
            assert (output.finish_reason, output.stop_reason) == ("stop", reason)
            assert idle(llm)

    def test_include_stop_str_in_output(self):
        params = SamplingParams(stop="cd", include_stop_str_in_output=True)
        assert says("b", "c", "d", "e").generate("a", params)[0].text == "bcd"
        params = SamplingParams(stop="c", include_stop_str_in_output=True)
        assert says("c", "ab").generate("a", params)[0].text == "c"
        params = SamplingParams(stop_token_ids=[2], include_stop_str_in_output=True)
        assert says("b", "c", "d").generate("a", params)[0].text == "bc"

    def test_a_stop_string_in_the_last_token_that_fits_is_a_stop(self):
        (output,) = says("b", "c", "d").generate("a", SamplingParams(stop="c", max_tokens=2))
        assert (output.text, output.finish_reason, output.stop_reason) == ("b", "stop", "c")

    def test_a_stop_token_is_left_out_of_the_text(self):
        (output,) = says("b", "c", "d").generate("a", SamplingParams(stop_token_ids=[2]))
        assert (output.text, output.token_ids, output.stop_reason) == ("b", [1, 2], 2)

    def test_held_back_text_is_delivered_at_the_end(self):
        (output,) = says("b", "c").generate("a", SamplingParams(stop="cde"))
        assert (output.text, output.finish_reason) == ("bc", "stop")
        (output,) = says("b", "c", "d").generate("a", SamplingParams(stop="cde", max_tokens=2))
        assert (output.text, output.finish_reason) == ("bc", "length")

    def test_special_tokens_in_the_text(self):
        params = SamplingParams(ignore_eos=True, max_tokens=3)
        assert says("b", "</s>", "c").generate("a", params)[0].text == "bc"
        shown = SamplingParams(ignore_eos=True, max_tokens=3, skip_special_tokens=False)
        assert says("b", "</s>", "c").generate("a", shown)[0].text == "b</s>c"

    def test_stop_strings_do_not_count_before_min_tokens(self):
        (output,) = says("b", "c", "b", "c").generate("a", SamplingParams(stop="c", min_tokens=3))
        assert (output.text, output.token_ids) == ("bcb", [1, 2, 1, 2])
        (output,) = says("b", "c", "d").generate("a", SamplingParams(stop="cd", min_tokens=2))
        assert output.text == "bcd"  # it began too early


class TestStream:
    def test_joined_chunks_are_the_text(self):
        chunks = list(toy_llm().stream("ab", SEEDED))
        (output,) = toy_llm().generate("ab", SEEDED)
        assert "".join(chunk.text for chunk in chunks) == output.text
        assert [chunk.token_id for chunk in chunks] == output.token_ids
        assert [chunk.finish_reason for chunk in chunks] == [None] * 11 + ["length"]
        assert chunks[-1].output.text == output.text
        assert {chunk.output for chunk in chunks[:-1]} == {None}

    def test_e1_half_a_character_is_never_emitted(self):
        chunks = list(says("b", b"\xf0\x9f", b"\x98\x80", "c").stream("a"))
        assert [chunk.text for chunk in chunks] == ["b", "", "😀", "c", ""]
        chunks = list(says(b"\xf0\x9f").stream("a"))
        assert "".join(chunk.text for chunk in chunks) == "\ufffd"

    def test_closing_ends_the_request_and_frees_its_pages(self):
        llm = toy_llm()
        chunks = llm.stream("a", SEEDED)
        next(chunks)
        next(chunks)
        assert not idle(llm)
        chunks.close()
        assert idle(llm)

    def test_a_stream_that_was_never_started_holds_nothing(self):
        llm = toy_llm()
        chunks = llm.stream("a", SEEDED)
        assert idle(llm)
        chunks.close()
        with pytest.raises(PromptError):
            llm.stream([])

    def test_streams_that_alternate_share_steps(self):
        llm = toy_llm()
        first, second = llm.stream("a", SEEDED), llm.stream("bc", SEEDED)
        texts = [[], []]
        for pair in zip(first, second, strict=True):
            for text, chunk in zip(texts, pair, strict=True):
                text.append(chunk.text)
        assert llm.backend.batch_sizes.count(2) >= 10
        assert ["".join(t) for t in texts] == [toy_llm().generate(p, SEEDED)[0].text for p in ("a", "bc")]
        assert idle(llm)

    def test_threads_share_one_llm(self):
        llm = toy_llm()
        found = {}

        def work(prompt):
            found[prompt] = "".join(chunk.text for chunk in llm.stream(prompt, SEEDED))

        threads = [threading.Thread(target=work, args=(p,)) for p in ("a", "b", "c", "ab", "bc", "abc")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == {p: toy_llm().generate(p, SEEDED)[0].text for p in found}
        assert len(found) == 6
        assert idle(llm)


class TestFailures:
    def test_a12_a_failing_request_does_not_take_the_others_with_it(self):
        llm = toy_llm(ToyBackend(poison={10: -np.inf}))
        never_f = SamplingParams(seed=1, max_tokens=9, ignore_eos=True, logit_bias={10: -100.0})
        with pytest.warns(RuntimeWarning, match="prompt 1 failed: no token can be drawn"):
            good, bad = llm.generate(["ab", "af"], never_f)
        assert (bad.finish_reason, bad.text, bad.token_ids) == ("error", "", [])
        assert isinstance(bad.error, GenerationError)
        assert (good.finish_reason, good.text) == ("length", toy_llm().generate("ab", never_f)[0].text)
        assert idle(llm)

    def test_a_failing_stream_raises(self):
        llm = toy_llm(ToyBackend(poison={10: -np.inf}))
        with pytest.raises(GenerationError, match="no token can be drawn"):
            list(llm.stream("af"))
        assert idle(llm)

    def test_ctrl_c_leaves_the_llm_usable(self):
        llm = toy_llm(ToyBackend(fail_at=(4, KeyboardInterrupt())))
        other = llm.stream("c", SEEDED)
        next(other)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["a", "b"], SEEDED)
        with pytest.raises(GenerationError, match="interrupted step"):
            list(other)
        assert idle(llm)
        assert llm.generate("a", SEEDED)[0].text == toy_llm().generate("a", SEEDED)[0].text

    def test_ctrl_c_between_a_step_and_its_text_costs_the_neighbours_nothing(self, monkeypatch):
        llm = toy_llm()
        mine = llm.stream("a", SEEDED)
        before = [next(mine)]
        other = llm.stream("b", SEEDED)
        next(other)

        def interrupted_after_it():
            monkeypatch.undo()
            llm.driver.engine.step()
            raise KeyboardInterrupt

        monkeypatch.setattr(llm.driver.engine, "step", interrupted_after_it)
        with pytest.raises(KeyboardInterrupt):
            next(other)
        chunks = before + list(mine)
        (expected,) = toy_llm().generate("a", SEEDED)
        assert [chunk.token_id for chunk in chunks] == expected.token_ids
        assert idle(llm)

    @pytest.mark.parametrize("place", ["Generation", "submit"])
    def test_ctrl_c_while_a_request_is_added_leaves_nothing_behind(self, monkeypatch, place):
        llm = toy_llm()
        submit = Prepared.submit

        def interrupted(*args):
            if place == "submit":
                submit(*args)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(driver_module if place == "Generation" else Prepared, place, interrupted)
            with pytest.raises(KeyboardInterrupt):
                llm.generate("a", SEEDED)
        assert llm.generate("b", SEEDED)[0].text == toy_llm().generate("b", SEEDED)[0].text
        assert idle(llm)

    def test_a_fault_in_decoding_fails_its_request_alone(self):
        class Faulty(ToyTokenizer):
            def token_bytes(self, i):
                return super().token_bytes(i) if i != 7 else 1 // 0

        llm = toy_llm(Scripted([0, 1, 7, 1]), Faulty())
        with pytest.warns(RuntimeWarning, match="prompt 1 failed"):
            good, bad = llm.generate([[0, 1, 0], [0]], SamplingParams(temperature=0))
        assert (bad.finish_reason, bad.text, type(bad.error)) == ("error", "b", ZeroDivisionError)
        assert (good.finish_reason, good.text) == ("stop", "b")
        assert idle(llm)

    def test_closed(self):
        with toy_llm() as llm:
            chunks = llm.stream("a", SEEDED)
            next(chunks)
        assert llm.backend.closed
        for use in (
            lambda: next(chunks),
            lambda: llm.generate("a"),
            lambda: llm.stream("a"),
            lambda: llm.logits([1]),
        ):
            with pytest.raises(GenerationError, match="closed"):
                use()
        assert llm.kv_cache_bytes == 0
        llm.close()

    @pytest.mark.parametrize("length", [1, 513, -5])
    def test_context_lengths_that_are_not_allowed(self, length):
        with pytest.raises(InvalidParameterError, match=f"context_length is {length}; allowed: 2 ... 512"):
            toy_llm(context_length=length, kv_tokens=None)

    @pytest.mark.parametrize("params", [5, {"n": 2}, 0, {}])
    def test_what_is_no_sampling_params(self, params):
        with pytest.raises(InvalidParameterError, match=r"params is .*; allowed: SamplingParams"):
            toy_llm().generate("a", params)

    @pytest.mark.parametrize("budget", ["512", 512.0])
    def test_a_token_budget_that_is_no_integer(self, budget):
        with pytest.raises(InvalidParameterError, match=r"token_budget is .*; allowed: an integer"):
            toy_llm(token_budget=budget)


class TestLogits:
    @pytest.mark.parametrize("budget", [16, 512])
    def test_every_position(self, budget):
        llm = toy_llm(token_budget=budget)
        tokens = [i % 12 for i in range(40)]
        logits = llm.logits(tokens)
        assert logits.dtype == np.float32
        assert np.array_equal(logits, [ToyBackend().logits(tokens[: i + 1]) for i in range(40)])
        assert llm.backend.batch_sizes == ([16, 16, 8] if budget == 16 else [40])

    def test_a_whole_context_is_allowed_and_nothing_longer(self):
        assert toy_llm().logits([1] * 64).shape == (64, 13)
        with pytest.raises(PromptError, match="65 tokens; at most 64 fit into a context of 64"):
            toy_llm().logits([1] * 65)
        with pytest.raises(PromptError, match="no tokens"):
            toy_llm().logits([])

    @pytest.mark.parametrize("value", [None, 5, b"ab", iter([1])])
    def test_what_is_no_sequence_of_ids(self, value):
        with pytest.raises(PromptError, match="allowed: a string or a sequence of token ids"):
            toy_llm().logits(value)


class TestWhatIsNoPrompt:
    @pytest.mark.parametrize("texts", [3, None, b"ab", [3.5]])
    def test_of_vectors(self, texts):
        with pytest.raises(PromptError, match="allowed: a string or a sequence of token ids"):
            toy_llm(Reading()).embed(texts)

    @pytest.mark.parametrize("continuations", [3, None, "bc"])
    def test_of_scores(self, continuations):
        """A single text is no list of its letters."""
        with pytest.raises(PromptError, match=r"continuations is .*; allowed: a sequence of them"):
            toy_llm().score("a", continuations)


def test_it_says_what_it_is(smollm2):
    llm = toy_llm()
    shown = "ToyBackend, context_length=64, cache_dtype='float16'"
    assert repr(llm) == f"LLM({shown})"
    llm.close()
    assert repr(llm) == f"LLM({shown}, closed)"
    with LLM(smollm2, context_length=64, cache_dtype="int8", quantize="q4") as llm:
        assert repr(llm) == f"LLM({str(smollm2)!r}, Q4_1, context_length=64, cache_dtype='int8')"


class TestChat:
    @pytest.mark.parametrize("writes_bos", [True, False])
    @pytest.mark.parametrize("add_bos", [True, False])
    def test_e4_the_start_token_is_there_once(self, writes_bos, add_bos):
        start = "<s>" if writes_bos else ""
        template = SimpleNamespace(render=lambda messages, **_: start + messages[0]["content"])
        llm = toy_llm(tokenizer=ToyTokenizer(add_bos), template=template)
        (output,) = llm.chat([{"role": "user", "content": "ab"}], SEEDED)
        assert output.prompt_token_ids == ([BOS] if writes_bos or add_bos else []) + [0, 1]
        assert output.prompt == start + "ab"

    def test_conversations(self):
        template = SimpleNamespace(render=lambda messages, **_: messages[-1]["content"])
        llm = toy_llm(template=template)
        talks = [[{"role": "user", "content": text}] for text in ("a", "bc")]
        outputs = llm.chat(talks, SEEDED)
        assert [o.text for o in outputs] == [o.text for o in llm.generate(["a", "bc"], SEEDED)]
        assert "".join(chunk.text for chunk in llm.stream_chat(talks[1], SEEDED)) == outputs[1].text

    def test_templates_get_tools(self):
        seen = []
        template = SimpleNamespace(render=lambda messages, **variables: seen.append(variables) or "a")
        toy_llm(template=template).chat([{"role": "user", "content": "b"}], SEEDED, tools=[{"name": "t"}])
        assert seen == [{"tools": [{"name": "t"}]}]

    @pytest.mark.parametrize("messages", [[], "hello", {"role": "user", "content": "a"}, ["hello"], [[]]])
    def test_what_is_no_conversation(self, messages):
        with pytest.raises(TemplateError):
            toy_llm(template=ChatTemplate("a")).chat(messages)

    def test_no_template(self):
        llm = toy_llm()
        assert not llm.has_chat_template
        for use in (llm.chat, llm.stream_chat):
            with pytest.raises(TemplateError, match="no chat template"):
                use([{"role": "user", "content": "a"}])


def test_kv_cache_bytes_and_dtype():
    llm = toy_llm(cache_dtype="int8", kv_tokens=100)
    assert llm.kv_cache_bytes == 7 * 16 * 16
    assert llm.backend.cache_dtypes == ["int8"]


def test_kv_memory_is_kept_to_the_page_and_bounds_the_context():
    llm = toy_llm(context_length=None, kv_tokens=None, kv_memory=5 * 256 + 255)
    assert (llm.kv_cache_bytes, llm.context_length) == (5 * 256, 80)
    with pytest.raises(PromptError, match="80 tokens; at most 79 fit into a context of 80"):
        llm.generate("a" * 80)
    (output,) = llm.generate("a" * 70, SamplingParams(max_tokens=None, ignore_eos=True))
    assert (len(output.token_ids), output.finish_reason) == (10, "length")  # C8
    with pytest.raises(
        InvalidParameterError, match="room for 80 tokens, at 256 bytes for 16; allowed: at least"
    ):
        toy_llm(context_length=81, kv_tokens=None, kv_memory=5 * 256)


def test_priorities():
    llm = toy_llm(max_batch=1)
    outputs = llm.generate(["a", "b", "c"], SEEDED, priority=[2, 1, 0])
    waits = [output.timings.time_to_first_token_s for output in outputs]
    assert waits == sorted(waits, reverse=True)


def test_cached_tokens_and_statistics():
    llm = toy_llm()
    prompt = "abc" * 12
    first, second = (llm.generate(prompt, SEEDED)[0] for _ in range(2))
    assert (first.timings.cached_tokens, second.timings.cached_tokens) == (0, 32)
    assert second.timings.prefill_tps == pytest.approx(4 / second.timings.prefill_s)
    assert first.token_ids == second.token_ids
    found = llm.statistics()
    assert (found.finished, found.generated_tokens, found.prompt_tokens, found.cached_tokens) == (
        2,
        24,
        72,
        32,
    )
    assert (found.running, found.waiting, found.pages_used, found.pages_free) == (0, 0, 0, found.pages)
    assert found.tokens_per_s == 24 / found.busy_s
    assert found.time_per_token_s > 0
    (off,) = toy_llm(prefix_cache=False).generate(prompt, SEEDED)
    assert (off.timings.cached_tokens, off.token_ids) == (0, first.token_ids)


# The real model.


@pytest.fixture(scope="module")
def llm(smollm2):
    with LLM(smollm2, context_length=512, kv_tokens=2048) as llm:
        yield llm


GREEDY = SamplingParams(temperature=0, max_tokens=24)
QUESTIONS = [
    "What is the capital of France?",
    "Name three colours.",
    "Why is the sky blue?",
    "Write a haiku about rope.",
    "How many legs has a spider?",
    "Translate 'good morning' into French.",
    "What is 2 + 2?",
    "Who wrote Hamlet?",
]


def ask(question):
    return [{"role": "user", "content": question}]


class TestRealModel:
    def test_greedy_text_makes_sense(self, llm):
        (output,) = llm.chat(ask(QUESTIONS[0]), GREEDY)
        assert "Paris" in output.text
        assert output.finish_reason == "stop"
        assert llm.tokenizer.eos_ids >= {output.token_ids[-1]}

    def test_a_batch_of_eight_equals_each_alone(self, llm):
        params = [SamplingParams(seed=s, max_tokens=12, top_p=0.9 if s % 2 else 1.0) for s in range(8)]
        together = llm.chat([ask(q) for q in QUESTIONS], params)
        for question, one, output in zip(QUESTIONS, params, together, strict=True):
            assert llm.chat(ask(question), one)[0].token_ids == output.token_ids

    def test_a_stream_equals_generate_and_decode(self, llm):
        params = SamplingParams(seed=5, max_tokens=24)
        chunks = list(llm.stream("The rope was", params))
        (output,) = llm.generate("The rope was", params)
        assert "".join(chunk.text for chunk in chunks) == output.text == llm.decode(output.token_ids)

    def test_stop_strings(self, llm):
        (full,) = llm.generate("One, two, three,", GREEDY)
        stop = full.text[5:12]
        (output,) = llm.generate("One, two, three,", SamplingParams(temperature=0, max_tokens=24, stop=stop))
        assert output.text == full.text[: full.text.index(stop)]
        assert (output.finish_reason, output.stop_reason) == ("stop", stop)

    def test_logprobs_of_a_prompt_are_its_score(self, llm):
        params = SamplingParams(max_tokens=1, prompt_logprobs=2)
        (output,) = llm.generate("The capital of France is Paris.", params)
        first, *others = output.prompt_logprobs
        ids = output.prompt_token_ids
        assert (first, [found.token_id for found in others]) == (None, ids[1:])
        (score,) = llm.score(ids[:1], [ids[1:]])
        assert [found.logprob for found in others] == pytest.approx(score.logprobs, abs=1e-9)
        assert all(len(found.top) == 2 and found.rank >= 1 for found in others)
        assert llm.generate("The", SamplingParams(max_tokens=1))[0].prompt_logprobs is None
        stream = llm.stream("The rope", SamplingParams(max_tokens=2, ignore_eos=True, prompt_logprobs=2))
        next(stream)
        assert next(stream.fork()).output.prompt_logprobs is None

    def test_logprobs_are_those_of_logits(self, llm):
        params = SamplingParams(seed=2, max_tokens=8, temperature=0.5, top_k=20, logprobs=3)
        (output,) = llm.generate("Once upon a time", params)
        logits = llm.logits(output.prompt_token_ids + output.token_ids).astype(np.float64)
        rows = logits[len(output.prompt_token_ids) - 1 : -1]
        log_p = (
            rows
            - np.log(np.exp(rows - rows.max(1, keepdims=True)).sum(1, keepdims=True))
            - rows.max(1, keepdims=True)
        )
        for row, token, found in zip(log_p, output.token_ids, output.logprobs, strict=True):
            assert found.token_id == token
            assert found.logprob == pytest.approx(row[token], abs=1e-9)
            assert [t for t, _ in found.top] == np.argsort(-row, kind="stable")[:3].tolist()

    def test_neither_chunks_nor_a_missing_cache_change_a_token(self, llm, smollm2):
        prompt = "It was the best of times, it was the worst of times, " * 8
        params = SamplingParams(seed=9, max_tokens=10)
        (expected,) = llm.generate(prompt, params)
        for options in ({"token_budget": 16}, {"token_budget": 37, "kv_cache": False}, {"n_threads": 1}):
            with LLM(smollm2, context_length=256, max_batch=1, **options) as other:
                assert other.generate(prompt, params)[0].token_ids == expected.token_ids

    def test_d3_a_randomised_schedule_over_a_tiny_cache_equals_each_request_alone(self, llm):
        """Joining, prefix hits, forks, preemption, aborting: no token differs."""
        chance = random.Random(4)
        ids = llm.encode("The rope maker walked backwards all day, " * 6)
        tiny, plain = (
            LLM.from_parts(llm.backend, llm.tokenizer, context_length=112, **options)
            for options in (
                {"kv_tokens": 112, "max_batch": 4, "token_budget": 40},
                {"kv_tokens": 112, "prefix_cache": False},
            )
        )
        engine, asked = tiny.driver.engine, []
        for _ in range(10):
            prompt = ids[: chance.choice([3, 15, 16, 33])] + ids[: chance.randrange(3)]
            params = SamplingParams(
                n=chance.choice([1, 1, 2]),
                temperature=chance.choice([0.0, 0.9]),
                seed=chance.randrange(99),
                max_tokens=chance.randrange(8, 60),
                ignore_eos=True,
            )
            group = engine.add_request(prompt, params, priority=chance.randrange(2)).group
            asked += [(request, prompt, params) for request in group]
            for _ in range(chance.randrange(8)):
                engine.step()
                engine.check()
            if chance.random() < 0.1:
                engine.finish(chance.choice(asked)[0])
        while engine.has_unfinished:
            engine.step()
            engine.check()
        for request, prompt, params in asked:
            alone = dataclasses.replace(params, n=1, seed=request.seed, max_tokens=max(1, request.n_output))
            if request.n_output:
                assert request.output == plain.generate(prompt, alone)[0].token_ids
        found = tiny.statistics()
        assert min(found.preemptions, found.cached_tokens, len(asked) - 10) > 0
        assert found.pages_used == 0

    def test_a_closed_stream_leaves_the_model_usable(self, llm):
        with contextlib.closing(llm.stream("a", GREEDY)) as chunks:
            next(chunks)
        assert idle(llm)
        assert "Paris" in llm.chat(ask(QUESTIONS[0]), GREEDY)[0].text
