"""A draft model whose size, context and cache differ from the model's."""

import numpy as np
import pytest

from ropewalk.engine.engine import Engine
from ropewalk.engine.speculative.model import DraftModel
from ropewalk.engine.speculative.pace import Pace
from ropewalk.engine.speculative.speculator import Speculator
from ropewalk.params import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)


def play(backend, draft, prompts, params, *, most=4, token_budget=512, **options):
    """Requests with a draft model, and without."""
    drafter = DraftModel(draft, backend.config.vocab_size, token_budget)
    outputs = []
    for speculator in (Speculator(drafter, most, Pace()), None):
        sizes = {"context_length": 64, "kv_tokens": 512, "token_budget": token_budget} | options
        engine = Engine(backend, speculator=speculator, **sizes)
        requests = [engine.add_request(prompt, params) for prompt in prompts]
        while engine.has_unfinished:
            engine.step()
            engine.check()
        outputs.append(requests)
    drafted, plain = outputs
    assert [r.output for r in drafted] == [r.output for r in plain]
    return drafted, drafter


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_h4_no_id_is_guessed_that_the_model_lacks(toy, temperature):
    """The toy checks every batch against its vocabulary."""
    params = SamplingParams(temperature=temperature, seed=1, max_tokens=30, ignore_eos=True)
    (request,), _ = play(toy(), toy(vocab_size=40), [[1, 2]], params)
    assert request.n_accepted == request.n_drafted > 20  # of the ids that it shares it thinks the same


def test_h4_a_sequence_with_ids_that_the_draft_model_lacks_is_not_drafted(toy):
    params = SamplingParams(
        temperature=0, max_tokens=30, ignore_eos=True, logit_bias={12: -100.0, 11: -100.0}
    )
    (with_12, without), _ = play(toy(), toy(vocab_size=11), [[12, 1], [1, 2]], params)
    assert with_12.n_drafted == 0
    assert without.n_drafted > 0


def test_a_draft_model_with_a_short_context_guesses_as_far_as_it_reaches(toy):
    class Short(toy):
        def forward(self, batch, cache):
            assert batch.positions.max() < 16, "beyond the context"
            return super().forward(batch, cache)

    draft = Short()
    draft.config.context_length = 16
    (request,), _ = play(toy(), draft, [[1] * 10], GREEDY, most=3)
    assert request.n_accepted == request.n_drafted == 3 + 2  # after 11 tokens, and after 15


def test_logits_that_are_no_numbers_end_the_draft_and_nothing_else(toy):
    """Warnings are errors here."""
    for value in (np.nan, -np.inf, np.inf):
        poison = dict.fromkeys(range(0, 13, 2), value)
        (request,), _ = play(toy(), toy(poison=poison), [[1, 2, 3]], GREEDY)
        assert request.finish_reason == "length"
        assert 0 < request.n_drafted < 60


def test_what_it_has_to_read_is_read_in_chunks(toy):
    backend, draft = toy(), toy()
    prompts = [[i % 7 for i in range(40)], [1, 2, 3]]
    requests, _ = play(
        backend, draft, prompts, GREEDY, token_budget=16, context_length=80, prefix_cache=False
    )
    assert max(draft.batch_sizes) == 16
    assert all(r.n_accepted == r.n_drafted > 15 for r in requests)


def test_a_shared_beginning_is_read_once(toy):
    draft = toy()
    beginning = [i % 7 for i in range(48)]
    requests, _ = play(
        toy(), draft, [[*beginning, i] for i in range(4)], GREEDY, max_batch=4, context_length=96
    )
    assert all(r.n_accepted == r.n_drafted > 20 for r in requests)
    drafted_alone = sum(r.n_drafted for r in requests) + 30 * 4
    assert sum(draft.batch_sizes) < 48 + 4 + drafted_alone


def test_its_cache_is_of_the_same_size_and_type_and_goes_with_it(toy):
    class Wide(toy):
        def page_bytes(self, dtype="float16"):
            return 1000

    draft = Wide()
    drafter = DraftModel(draft, 13)
    assert (drafter.page_bytes("int8"), drafter.n_bytes) == (1000, 0)
    Engine(toy(), context_length=64, kv_tokens=160, cache_dtype="int8", speculator=Speculator(drafter, 4))
    assert draft.cache_dtypes == ["int8"]
    assert drafter.n_bytes == 10 * 16 * 16
    drafter.close()
    assert draft.closed
    assert drafter.n_bytes == 0
