"""Streams: iterators that can be closed, dropped, and forked where their reader is."""

import gc
import runpy
from pathlib import Path

import pytest

from ropewalk import SamplingParams
from ropewalk.errors import GenerationError, InvalidParameterError

_TOYS = runpy.run_path(str(Path(__file__).with_name("toy_llm.py")))
toy_llm, says, idle, Scripted = (_TOYS[name] for name in ("toy_llm", "says", "idle", "Scripted"))

SEEDED = SamplingParams(seed=3, max_tokens=20, ignore_eos=True)


def read(chunks, n):
    return [next(chunks) for _ in range(n)]


def seeded(seed, **options):
    return SamplingParams(**({"seed": seed, "max_tokens": 20, "ignore_eos": True} | options))


class TestForks:
    def test_each_goes_on_as_it_would_alone(self):
        llm = toy_llm()
        first = llm.stream("abc", SEEDED)
        begun = [chunk.token_id for chunk in read(first, 6)]
        second = first.fork(seeded(8))
        ends = [list(chunks)[-1].output for chunks in (second, first)]
        assert ends[1].token_ids == llm.generate("abc", SEEDED)[0].token_ids
        prompt = [0, 1, 2, *begun]
        assert ends[0].token_ids == begun + llm.generate(prompt, seeded(8, max_tokens=14))[0].token_ids
        assert ends[0].prompt == "abc"
        assert ends[0].text == llm.decode(ends[0].token_ids)
        assert idle(llm)

    def test_it_begins_with_the_next_chunk_of_its_reader(self):
        """A stream that is forked where another one's steps have brought it further."""
        llm = toy_llm()
        one, other = llm.stream("abc", SEEDED), llm.stream("ab", SEEDED)
        read(one, 2)
        read(other, 9)  # steps that `one` had a part in
        fork = one.fork(seeded(3))
        rest = list(one)
        assert [c.token_id for c in fork] == [c.token_id for c in rest]
        assert rest[-1].output.token_ids == llm.generate("abc", SEEDED)[0].token_ids

    def test_before_the_first_chunk_and_of_a_fork(self):
        llm = toy_llm()
        first = llm.stream("abc", SEEDED)
        second = first.fork(seeded(4))
        read(second, 5)
        third = second.fork(seeded(4))
        assert [c.token_id for c in third] == llm.generate("abc", seeded(4))[0].token_ids[5:]
        first.close()
        second.close()
        assert idle(llm)

    def test_one_of_several_completions(self):
        llm = toy_llm()
        chunks = llm.stream("abc", seeded(5, n=3))
        begun = [chunk.token_id for chunk in read(chunks, 12) if chunk.index == 2]
        fork = chunks.fork(index=2)  # without a seed it draws one of its own, so only its beginning is known
        output = list(fork)[-1].output
        whole = list(chunks)[-1].output
        assert len(output.outputs) == 1
        assert len(begun) == 3  # the first step gives only the first completion a token
        assert output.token_ids[:3] == whole.outputs[2].token_ids[:3] == begun
        assert output.seed not in [completion.seed for completion in whole.outputs]
        with pytest.raises(GenerationError, match="closed"):
            chunks.fork()
        with pytest.raises(InvalidParameterError, match=r"index is 3; allowed: 0 \.\.\. 2"):
            llm.stream("abc", seeded(5, n=3)).fork(index=3)

    def test_a_character_that_is_half_read(self):
        """The fork has the bytes that the first stream holds back."""
        llm = says("b", b"\xf0\x9f", b"\x98\x80", "c")
        chunks = llm.stream("a", SamplingParams(temperature=0))
        assert [c.text for c in read(chunks, 2)] == ["b", ""]
        fork = chunks.fork(SamplingParams(temperature=0))
        assert [c.text for c in fork] == ["😀", "c", ""]

    def test_stop_strings_count_from_the_beginning(self):
        llm = says("b", "c", "d", "e")
        chunks = llm.stream("a", SamplingParams(temperature=0))
        read(chunks, 2)
        fork = chunks.fork(SamplingParams(temperature=0, stop="cd"))
        output = list(fork)[-1].output
        assert (output.text, output.stop_reason) == ("b", "cd")
        with pytest.raises(InvalidParameterError, match="stop has 'bc', which is in what was read"):
            chunks.fork(SamplingParams(temperature=0, stop="bc"))
        chunks.close()
        assert idle(llm)

    def test_what_was_cut_off_is_told_by_the_fork(self):
        llm = toy_llm()
        with pytest.warns(UserWarning, match="was cut"):
            chunks = llm.stream("a" * 70, seeded(1, truncate_prompt_tokens=20))
        next(chunks)
        assert list(chunks.fork())[-1].output.n_truncated == 50


class TestGenerators:
    def test_closing_ends_the_request(self):
        llm = toy_llm()
        chunks = llm.stream("abc", SEEDED)
        next(chunks)
        chunks.close()
        chunks.close()
        assert idle(llm)
        assert list(chunks) == []

    def test_so_does_dropping_it(self):
        llm = toy_llm()
        chunks = llm.stream("abc", SEEDED)
        next(chunks)
        del chunks
        gc.collect()
        assert idle(llm)

    def test_an_exception_thrown_into_it(self):
        llm = toy_llm()
        chunks = llm.stream("abc", SEEDED)
        next(chunks)
        with pytest.raises(KeyError):
            chunks.throw(KeyError("x"))
        assert idle(llm)
