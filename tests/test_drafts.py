"""`LLM(draft=...)`: the text that comes without drafts, on toys and on the real model; what is refused at start."""

import dataclasses
import runpy
from pathlib import Path

import pytest

from ropewalk import LLM, SamplingParams
from ropewalk.engine.speculative.model import DraftModel
from ropewalk.engine.speculative.pace import Pace
from ropewalk.engine.speculative.speculator import Speculator
from ropewalk.errors import InvalidParameterError, ModelNotFoundError

_TOYS = runpy.run_path(str(Path(__file__).with_name("toy_llm.py")))
ToyBackend, Scripted, PIECES = _TOYS["ToyBackend"], _TOYS["Scripted"], _TOYS["PIECES"]
toy_llm, idle = _TOYS["toy_llm"], _TOYS["idle"]


def always(backend, most=6):
    """A draft model that is asked for every guess there is room for."""
    return Speculator(DraftModel(backend, len(PIECES)), most, Pace())


def both(script, params, most=6):
    """What a scripted model says without drafts, and with drafts that are all right."""
    ids = [PIECES.index(piece) for piece in [b"a", *script]]
    plain = toy_llm(Scripted(ids)).generate("a", params)[0]
    llm = toy_llm(Scripted(ids), draft=always(Scripted(ids), most))
    drafted = llm.generate("a", params)[0]
    assert drafted.timings.accepted_tokens > 0
    assert idle(llm)
    assert drafted.outputs == plain.outputs
    return llm, drafted


class TestStopStrings:
    SCRIPT = (b"a", b"b", b"c", b" ", b"ab", b"c", b"d", b"e", b"f")

    @pytest.mark.parametrize("stop", ["b", "bc", "c a", "bcd", "de", "f", "abc", " "])
    @pytest.mark.parametrize("most", [1, 2, 6])
    def test_one_inside_an_accepted_run_ends_the_text_there(self, stop, most):
        params = SamplingParams(temperature=0, seed=1, stop=[stop], logprobs=1)
        llm, output = both(self.SCRIPT, params, most)
        assert output.text == "abc abcdef"[: "abc abcdef".index(stop)]
        assert (output.finish_reason, output.stop_reason) == ("stop", stop)
        assert len(output.logprobs) == len(output.token_ids) == output.timings.generated_tokens
        assert llm.statistics().generated_tokens == len(output.token_ids)

    def test_min_tokens_and_characters_over_several_tokens(self):
        params = SamplingParams(
            temperature=0, seed=1, stop=["b"], min_tokens=3, include_stop_str_in_output=True
        )
        _, output = both(self.SCRIPT, params)
        assert output.text == "abc ab"
        _, output = both(
            (b"a", b"\xf0\x9f", b"\x98\x80", b"d", b"e"), SamplingParams(temperature=0, seed=1, stop=["d"])
        )
        assert output.text == "a😀"

    def test_a_stream_has_a_chunk_for_each_token(self):
        ids = [PIECES.index(piece) for piece in [b"a", *self.SCRIPT]]
        params = SamplingParams(temperature=0, seed=1, stop=["bcde"], logprobs=0)
        streams = [
            list(toy_llm(Scripted(ids), draft=draft).stream("a", params))
            for draft in (None, always(Scripted(ids)))
        ]
        plain, drafted = (
            [dataclasses.replace(chunk, output=None, completion=None) for chunk in chunks]
            for chunks in streams
        )
        assert drafted == plain
        assert streams[1][-1].completion == streams[0][-1].completion


class TestToys:
    def test_several_completions_in_a_batch(self):
        params = [
            SamplingParams(n=3, seed=s, max_tokens=20, ignore_eos=True, repetition_penalty=1.2, logprobs=2)
            for s in range(4)
        ]
        plain = toy_llm().generate(["ab", "c", "abab", "d"], params)
        for draft in ("lookup", always(ToyBackend())):
            drafted = toy_llm(draft=draft).generate(["ab", "c", "abab", "d"], params)
            assert [o.outputs for o in drafted] == [o.outputs for o in plain]
        assert sum(o.timings.accepted_tokens for o in drafted) > 100
        assert {o.timings.acceptance_rate for o in drafted} == {1.0}

    def test_a_failing_request_gives_the_tokens_before_its_failure(self):
        params = SamplingParams(seed=1, max_tokens=20, ignore_eos=True)
        poison = {10: float("-inf")}
        outputs = []
        for draft in (None, always(ToyBackend())):
            with pytest.warns(RuntimeWarning, match="prompt 0 failed: no token can be drawn"):
                outputs += toy_llm(ToyBackend(poison), draft=draft).generate("ab", params)
        plain, drafted = (dataclasses.replace(o.outputs[0], error=None) for o in outputs)
        assert drafted == plain
        assert len(plain.token_ids) > 2

    def test_the_draft_models_cache_counts_in_the_budget(self):
        """Both toys take 256 bytes for a page: 16 pages are 4 kB, or 8 kB with a draft model."""
        plain = toy_llm(kv_tokens=None, kv_memory=16 * 512)
        drafted = toy_llm(kv_tokens=None, kv_memory=16 * 512, draft=always(ToyBackend()))
        assert plain.kv_cache_bytes == drafted.kv_cache_bytes == 16 * 512
        assert plain.statistics().pages == 2 * drafted.statistics().pages
        drafted.close()
        assert drafted.kv_cache_bytes == 0
        assert drafted._speculator.drafter.backend.closed


class TestRefusals:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"draft": 5}, "draft is 5; allowed: 'lookup', or a model's path"),
            ({"draft_tokens": 4}, "draft_tokens is 4 without a draft"),
            ({"draft": "lookup", "draft_tokens": 0}, r"draft_tokens is 0; allowed: 1 \.\.\. 63"),
            ({"draft": "lookup", "draft_tokens": 64}, "draft_tokens is 64"),
            ({"draft": "lookup", "draft_tokens": 2.0}, "draft_tokens is 2.0; allowed: an integer"),
            ({"draft": "lookup", "kv_cache": False}, "draft is 'lookup' with kv_cache=False"),
        ],
    )
    def test_parameters(self, options, message):
        with pytest.raises(InvalidParameterError, match=message):
            toy_llm(**options)

    def test_a_draft_model_that_nobody_knows(self, smollm2):
        with pytest.raises(ModelNotFoundError, match="no-such-model"):
            LLM(smollm2, draft="no-such-model")

    def test_h4_a_draft_model_with_other_tokens(self, smollm2, model_path):
        with pytest.raises(
            InvalidParameterError, match=r"token \d+ is '.+' in the model and '.+' in the draft"
        ):
            LLM(smollm2, draft=model_path("gemma3-270m"))


TEXTS = [
    "Copy the list exactly.\n\n1. hemp\n2. jute\n3. sisal\n4. cotton\n\nThe list again:\n\n1. hemp\n2.",
    "The rope maker walked backwards all day, the rope maker walked",
    "def area(width, height):\n    return width * height\n\ndef volume(width, height, depth):\n    return",
]


@pytest.fixture(scope="module")
def plain(smollm2):
    with LLM(smollm2, context_length=256, max_batch=4) as llm:
        yield llm


PARAMS = [
    SamplingParams(temperature=0, seed=1, max_tokens=24),
    SamplingParams(temperature=0.8, top_k=40, top_p=0.95, seed=3, max_tokens=24),
    SamplingParams(seed=5, max_tokens=16, repetition_penalty=1.1, presence_penalty=0.3, logprobs=2),
]


@pytest.fixture(scope="module")
def expected(plain):
    return [[output.outputs for output in plain.generate(TEXTS, params)] for params in PARAMS]


@pytest.mark.parametrize("adaptive", [True, False])
@pytest.mark.parametrize("drafter", ["lookup", "model"])
def test_h1_h2_smollm2_gives_the_same_tokens(plain, expected, drafter, adaptive):
    """Alone and in a batch, greedy and sampled, with penalties and log-probabilities; the model drafts for itself."""
    from ropewalk.engine.speculative.lookup import PromptLookup

    made = PromptLookup() if drafter == "lookup" else DraftModel(plain.backend, plain.config.vocab_size)
    drafted = LLM.from_parts(
        plain.backend,
        plain.tokenizer,
        context_length=256,
        max_batch=4,
        draft=Speculator(made, 5, None if adaptive else Pace()),
    )
    for params, outputs in zip(PARAMS, expected, strict=True):
        found = drafted.generate(TEXTS, params) + drafted.generate(TEXTS[:1], params)
        assert [o.outputs for o in found] == [*outputs, outputs[0]]
    if not adaptive:
        rates = drafted.statistics().acceptance_rate
        assert rates == 1 if drafter == "model" else 0.1 < rates < 1


def test_a_draft_model_from_a_file(smollm2, expected):
    with LLM(smollm2, context_length=256, kv_tokens=256, draft=smollm2, draft_tokens=3) as llm:
        (found,) = llm.generate(TEXTS[1], PARAMS[0])
        assert found.outputs == expected[0][1]
        assert llm.kv_cache_bytes == 2 * 16 * llm.backend.page_bytes()
