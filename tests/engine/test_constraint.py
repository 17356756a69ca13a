"""Constraints in the engine: what they exclude is never drawn, and nothing around a request changes its tokens."""

from collections import Counter

import numpy as np
import pytest

from ropewalk.engine.engine import Engine
from ropewalk.errors import GenerationError, InvalidParameterError
from ropewalk.params import SamplingParams

END, VOCAB = 12, 13


class Climbing:
    """Allows tokens not below the last one, END always; ends after `most` tokens. Notes what it is told."""

    def __init__(self, most=9, told=()):
        self.most, self.told = most, list(told)

    def mask(self):
        mask = np.arange(VOCAB) >= max([t for t in self.told if t != END], default=0)
        mask[END] = True
        return mask

    def accept(self, token):
        if not self.mask()[token]:
            raise GenerationError(f"{token} after {self.told}")
        self.told.append(token)

    @property
    def ended(self):
        return len(self.told) == self.most

    def fork(self):
        return type(self)(self.most, self.told)


class Nothing(Climbing):
    def mask(self):
        return np.zeros(VOCAB, dtype=bool)


class Refusing(Climbing):
    def accept(self, token):
        raise GenerationError("never")


class OnlyOne(Climbing):
    def fork(self):
        self.most -= 5
        return 1 // max(self.most, 0) and self


def run(engine):
    while engine.has_unfinished:
        engine.step()
        engine.check()


def engine_of(toy, **options):
    sizes = {"context_length": 64, "kv_tokens": 1024, "max_batch": 8} | options
    return Engine(toy(), end_ids=[END], token_budget=32, **sizes)


class TestConstraint:
    @pytest.mark.parametrize("temperature", [0.0, 1.0, 5.0])
    def test_what_it_excludes_is_never_drawn(self, toy, temperature):
        engine = engine_of(toy)
        params = SamplingParams(temperature=temperature, seed=1, n=8, max_tokens=20)
        group = engine.add_request([1, 2], params, constraint=Climbing()).group
        run(engine)
        for request in group:
            text = [t for t in request.output if t != END]
            assert text == sorted(text)
            assert request.finish_reason == "stop"
            assert request.output[-1] == END or len(request.output) == 9
        assert (len({tuple(request.output) for request in group}) > 1) == (temperature > 0)

    def test_it_comes_before_every_knob(self, toy):
        """J1: a bias of 100 does not bring back what is excluded, nor do penalties."""
        engine = engine_of(toy)
        params = SamplingParams(
            seed=1, max_tokens=20, logit_bias={0: 100, END: -100}, top_k=1, frequency_penalty=2
        )
        request = engine.add_request([1], params, constraint=Climbing())
        run(engine)
        assert request.output == sorted(request.output)
        assert request.finish_reason == "stop"

    def test_each_completion_has_a_state_of_its_own(self, toy):
        """The one that was given is not used up."""
        engine, given = engine_of(toy), Climbing()
        group = engine.add_request([1], SamplingParams(seed=2, n=5, max_tokens=20), constraint=given).group
        run(engine)
        assert given.told == []
        assert [request.constraint.told for request in group] == [request.output for request in group]

    def test_preemption_changes_nothing(self, toy):
        params = [
            SamplingParams(seed=s, max_tokens=60, temperature=2.0, logit_bias={END: -100}) for s in range(6)
        ]
        outputs = []
        for kv_tokens in (96, 2048):
            engine = engine_of(toy, kv_tokens=kv_tokens)
            requests = [engine.add_request([s, 1], p, constraint=Climbing(45)) for s, p in enumerate(params)]
            run(engine)
            outputs.append([request.output for request in requests])
            assert (engine.statistics().preemptions > 0) == (kv_tokens == 96)
        assert outputs[0] == outputs[1]
        assert Counter(len(output) for output in outputs[0]) == {45: 6}

    def test_nothing_allowed_fails_that_request_alone(self, toy):
        engine = engine_of(toy)
        failing = engine.add_request([1], SamplingParams(seed=1), constraint=Nothing())
        other = engine.add_request([1], SamplingParams(seed=1, max_tokens=5, ignore_eos=True))
        run(engine)
        assert failing.finish_reason == "error"
        assert "no token can be drawn" in str(failing.error)
        assert other.finish_reason == "length"

    def test_a_fork_goes_on_from_the_same_state(self, toy):
        engine = engine_of(toy)
        bias = {END: -100}
        request = engine.add_request(
            [1], SamplingParams(seed=1, max_tokens=20, logit_bias=bias), constraint=Climbing()
        )
        for _ in range(4):
            engine.step()
        with pytest.raises(
            InvalidParameterError, match="n_output is 2; allowed under a constraint: the 4 that it was told"
        ):
            engine.fork(request, n_output=2)
        fork = engine.fork(request, SamplingParams(seed=5, max_tokens=20, logit_bias=bias))
        run(engine)
        assert fork.output[:4] == request.output[:4]
        assert fork.output == sorted(fork.output)
        assert len(fork.output) == len(request.output) == 9
        with pytest.raises(InvalidParameterError, match="before its end"):
            engine.fork(request, SamplingParams(seed=5, max_tokens=20))

    def test_what_has_failed_is_at_no_place_to_go_on_from(self, toy):
        engine = engine_of(toy)
        failing = engine.add_request([1], SamplingParams(seed=1), constraint=Refusing())
        run(engine)
        assert (failing.n_output, type(failing.error)) == (1, GenerationError)
        with pytest.raises(
            InvalidParameterError, match="n_output is 1; allowed under a constraint: the 0 that it was told"
        ):
            engine.fork(failing)

    def test_nor_is_what_was_cut(self, toy):
        """A stop string may end an output within what a step has drawn."""
        engine = engine_of(toy)
        request = engine.add_request(
            [1], SamplingParams(seed=1, logit_bias={END: -100}), constraint=Climbing()
        )
        for _ in range(4):
            engine.step()
        engine.finish(request, "stop", "a stop string", n_output=2)
        with pytest.raises(InvalidParameterError, match=r"n_output is 2; .* the 4 that it was told"):
            engine.fork(request)

    def test_all_completions_are_queued_or_none(self, toy):
        engine = engine_of(toy)
        with pytest.raises(ZeroDivisionError):
            engine.add_request([1], SamplingParams(seed=1, n=3), constraint=OnlyOne())
        assert not engine.has_unfinished
