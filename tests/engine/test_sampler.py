"""The sampler's knobs: values of the cases A1 to A12, what always survives, draws.

`steps` shows the readable form; `choose` and `logprob` run the compiled one, which `tests/kernels/test_sampling.py`
holds to the readable one bit for bit.
"""

import json
import math
import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ropewalk.engine import sampler
from ropewalk.engine.sampler import Candidates, Context, choose, logprob, scaled, smallest_set, steps
from ropewalk.errors import GenerationError
from ropewalk.params import SamplingParams

NOTHING = Context(np.array([], dtype=np.int32), np.array([], dtype=np.int32))


def row(*values):
    return np.array(values, dtype=np.float32)


def context(prompt=(), output=(), ends=()):
    return Context(np.array(prompt, dtype=np.int32), np.array(output, dtype=np.int32), frozenset(ends))


def survivors(logits, **knobs):
    """Ids that can still be drawn after all knobs."""
    *_, (_, candidates) = steps(logits, SamplingParams(**knobs), NOTHING)
    return candidates.ids.tolist()


def log(*probabilities):
    return np.log(np.array(probabilities)).astype(np.float32)


def nucleus(probabilities, mass):
    p = np.array(probabilities)
    return np.flatnonzero(smallest_set(p, np.rint(p * 2**40).astype(np.int64), mass)).tolist()


class TestTopP:
    @pytest.mark.parametrize(
        ("mass", "kept"), [(0.75, [0, 1]), (0.76, [0, 1, 2]), (0.5, [0]), (0.0, [0]), (1.0, [0, 1, 2, 3])]
    )
    def test_a1_boundaries_that_are_exact_in_binary(self, mass, kept):
        assert nucleus([0.5, 0.25, 0.125, 0.125], mass) == kept

    def test_a1_between_boundaries(self):
        assert nucleus([0.4, 0.3, 0.2, 0.1], 0.8) == [0, 1, 2]
        assert nucleus([0.5, 0.3, 0.15, 0.05], 0.6) == [0, 1]
        assert survivors(log(0.4, 0.3, 0.2, 0.1), top_p=0.8) == [0, 1, 2]
        assert survivors(log(0.5, 0.3, 0.15, 0.05), top_p=0.6) == [0, 1]

    def test_a1_ends_of_the_range(self):
        assert survivors(log(0.1, 0.5, 0.4), top_p=1.0) == [0, 1, 2]
        assert survivors(log(0.1, 0.5, 0.4), top_p=0.0) == [1]


class TestOrder:
    def test_a3_temperature_comes_before_top_p(self):
        assert survivors(row(3, 2, 1), top_p=0.8, temperature=0.5) == [0]
        assert survivors(row(3, 2, 1), top_p=0.8) == [0, 1]

    def test_a3_temperature_comes_before_min_p(self):
        assert survivors(log(0.6, 0.3, 0.06, 0.04), min_p=0.08, temperature=2.0) == [0, 1, 2, 3]
        assert survivors(log(0.6, 0.3, 0.06, 0.04), min_p=0.08) == [0, 1, 2]

    def test_a4_top_k_is_renormalised_before_top_p(self):
        assert survivors(log(0.5, 0.3, 0.2), top_k=1, top_p=0.8) == [0]
        # of {.5, .3} the first has .625 of the mass: enough for .6, not enough without renormalising
        assert survivors(log(0.5, 0.3, 0.2), top_k=2, top_p=0.6) == [0]

    def test_steps_name_every_knob_in_order(self):
        params = SamplingParams(
            logit_bias={0: 1.0},
            repetition_penalty=1.1,
            presence_penalty=0.5,
            min_tokens=9,
            temperature=0.7,
            top_k=4,
            top_p=0.9,
            min_p=0.01,
            typical_p=0.9,
        )
        names = [name for name, _ in steps(row(1, 2, 3, 4, 5), params, context([1], [2], [3]))]
        assert names == [
            "raw",
            "logit_bias",
            "repetition_penalty",
            "frequency_presence_penalty",
            "min_tokens",
            "temperature",
            "top_k",
            "top_p",
            "min_p",
            "typical_p",
        ]

    def test_steps_show_the_published_effect_of_temperature(self):
        found = dict(steps(row(2, 1, 0), SamplingParams(temperature=0.5), NOTHING))
        assert np.log(found["raw"].probabilities) == pytest.approx([-0.4076, -1.4076, -2.4076], abs=1e-4)
        assert np.log(found["temperature"].probabilities) == pytest.approx(
            [-0.1429, -2.1429, -4.1429], abs=1e-4
        )

    def test_steps_do_not_change_what_they_gave_before(self):
        found = dict(
            steps(row(2, 1, 0), SamplingParams(logit_bias={2: 5.0}, presence_penalty=1.0), context([], [2]))
        )
        assert found["raw"].logits.tolist() == [2, 1, 0]
        assert found["logit_bias"].logits.tolist() == [2, 1, 5]
        assert found["frequency_presence_penalty"].logits.tolist() == [2, 1, 4]

    def test_steps_leave_the_logits_alone_and_end_with_what_is_chosen(self):
        logits = row(1, 2, 3)
        params = SamplingParams(temperature=0, logit_bias={0: 9.0})
        *_, (name, candidates) = steps(logits, params, NOTHING)
        assert (name, candidates.ids.tolist()) == ("greedy", [0])
        assert choose(logits, params, NOTHING, seed=0, position=0) == 0
        assert logits.tolist() == [1, 2, 3]


class TestTopK:
    def test_a6_ties_exactly_k_lowest_id_wins(self):
        assert survivors(row(2, 1, 1, 1, 0), top_k=2) == [0, 1]
        assert survivors(row(1, 1, 1, 2, 1), top_k=3) == [0, 1, 3]

    @pytest.mark.parametrize("n_others", [0, 6, 7, 63])
    def test_a6_same_alone_and_among_others(self, n_others):
        rows = np.random.default_rng(3).integers(0, 4, (n_others + 1, 5)).astype(np.float32)
        rows[n_others // 2] = [2, 1, 1, 1, 0]
        params = SamplingParams(top_k=2)
        drawn = {choose(rows[n_others // 2], params, NOTHING, seed=s, position=n_others) for s in range(64)}
        assert drawn == {0, 1}


class TestTypicalP:
    def test_keeps_the_tokens_of_most_typical_surprise(self):
        """Entropy 1.21, surprises .69, 1.39, 2.08, 2.08: the second is nearest, then the first."""
        p = log(0.5, 0.25, 0.125, 0.125)
        assert survivors(p, typical_p=0.7) == [0, 1]
        assert survivors(p, typical_p=0.8) == [0, 1, 2]

    def test_the_most_likely_token_stays(self):
        """Entropy 2.22; surprises 1.20 and ten times 2.66: the most likely token is the least typical."""
        p = log(0.3, *[0.07] * 10)
        assert survivors(p, typical_p=0.1) == [0, 1, 2]  # two of .07 reach .1, and the argmax


class TestPenalties:
    def test_a8_repetition_counts_prompt_and_output(self):
        edited = sampler.edited(
            row(2, -1, 0.5), SamplingParams(repetition_penalty=2.0), context(prompt=[0], output=[1, 1])
        )
        assert edited.tolist() == [1.0, -2.0, 0.5]

    def test_a8_repetition_counts_the_prompt_at_the_first_step(self):
        edited = sampler.edited(
            row(2, -1, 0.5), SamplingParams(repetition_penalty=2.0), context(prompt=[0, 1])
        )
        assert edited.tolist() == [1.0, -2.0, 0.5]

    def test_a8_presence_and_frequency_count_the_output_only(self):
        params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25)
        edited = sampler.edited(row(2, -1, 0.5), params, context(prompt=[0], output=[1, 1]))
        assert edited.tolist() == [2.0, -2.0, 0.5]

    def test_bias_is_added_before_penalties(self):
        params = SamplingParams(logit_bias={1: 3.0}, repetition_penalty=2.0)
        assert sampler.edited(row(2, -1, 0.5), params, context(prompt=[1])).tolist() == [2.0, 1.0, 0.5]

    def test_ends_are_masked_until_min_tokens_whatever_their_bias(self):
        params = SamplingParams(min_tokens=2, logit_bias={2: 100.0}, temperature=0)
        chosen = [
            choose(row(3, 2, 1), params, context(output=[0] * n, ends=[2]), seed=0, position=n)
            for n in range(3)
        ]
        assert chosen == [0, 0, 2]


class TestExtremes:
    def test_a12_greedy_and_tiny_temperatures(self):
        for temperature in (0, 1e-40, 1e-4):
            params = SamplingParams(temperature=temperature)
            for logits, best in ((row(10, 9.99), 0), (row(9.99, 10), 1), (row(-1e30, 1e30, 3e38), 2)):
                drawn = {choose(logits, params, NOTHING, seed=s, position=0) for s in range(50)}
                assert drawn == {best}

    @pytest.mark.parametrize("temperature", [0.0, 1.0, 100.0])
    def test_a12_one_nan_is_never_chosen_and_warns(self, temperature):
        params = SamplingParams(temperature=temperature)
        for seed in range(30):
            with pytest.warns(RuntimeWarning, match="1 of 3 logits are NaN"):
                assert choose(row(np.nan, 1, 2), params, NOTHING, seed=seed, position=0) != 0

    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_a12_nothing_to_choose_is_an_error(self, temperature):
        params = SamplingParams(temperature=temperature)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for logits in (row(np.nan, np.nan), row(-np.inf, -np.inf), row(np.nan, -np.inf)):
                with pytest.raises(GenerationError, match="every logit"):
                    choose(logits, params, NOTHING, seed=0, position=0)

    def test_infinite_logits(self):
        drawn = {
            choose(row(np.inf, 5, np.inf), SamplingParams(), NOTHING, seed=s, position=0) for s in range(40)
        }
        assert drawn == {0, 2}
        assert choose(row(0, 5, np.inf), SamplingParams(temperature=0), NOTHING, seed=0, position=0) == 2
        assert {
            choose(row(0, -np.inf, 0), SamplingParams(), NOTHING, seed=s, position=0) for s in range(40)
        } == {0, 2}

    def test_greedy_ties_go_to_the_lowest_id(self):
        assert choose(row(1, 7, 7), SamplingParams(temperature=0), NOTHING, seed=0, position=0) == 1


@given(
    logits=st.lists(st.floats(-200, 200, width=32), min_size=1, max_size=40),
    temperature=st.floats(0, 50),
    k=st.integers(0, 5),
    p=st.floats(0, 1),
    ratio=st.floats(0, 1),
    typical=st.floats(0, 1),
    seed=st.integers(0, 2**64 - 1),
)
def test_a4_the_most_likely_always_survives_and_a_survivor_is_drawn(
    logits, temperature, k, p, ratio, typical, seed
):
    params = SamplingParams(temperature=temperature, top_k=k, top_p=p, min_p=ratio, typical_p=typical)
    *_, (_, candidates) = steps(row(*logits), params, NOTHING)
    assert np.argmax(row(*logits)) in candidates.ids
    assert (np.diff(candidates.ids) > 0).all()
    assert choose(row(*logits), params, NOTHING, seed=seed, position=3) in candidates.ids


class TestDraw:
    @pytest.mark.parametrize(
        ("number", "token"), [(0.0, 3), (0.2499, 3), (0.2501, 5), (0.7499, 5), (0.7501, 8), (1 - 2**-53, 8)]
    )
    def test_looks_the_number_up_in_ascending_order_of_ids(self, number, token):
        candidates = Candidates(np.array([3, 5, 8]), log(0.5, 1.0, 0.5), 0.0, 1.0, bits=44)
        assert sampler.draw(candidates, number) == token

    def test_no_number_reaches_a_token_of_probability_zero(self):
        candidates = scaled(row(-1000, 0, -1000, -0.5, -1000), 1.0)
        for number in (0.0, 0.3, 0.62, 0.63, 1 - 2**-53):
            assert sampler.draw(candidates, number) in (1, 3)

    def test_equals_the_cumulative_distribution(self):
        candidates = scaled(np.random.default_rng(0).standard_normal(3000).astype(np.float32), 1.0)
        reached = np.cumsum(candidates.probabilities)
        for number in np.linspace(0.0003, 0.9997, 777):
            assert sampler.draw(candidates, number) == np.searchsorted(reached, number, side="right")

    def test_the_last_number_below_one_reaches_the_last_token_and_no_further(self):
        """2**18 equal weights of 2**44 sum to 2**62, which float64 holds only roughly once one more is added."""
        for n in (3, 2**18, 2**18 + 1):
            assert sampler.draw(scaled(np.zeros(n, np.float32), 1.0), 1 - 2**-53) == n - 1


class TestLogprobs:
    def test_a11_raw_distribution(self):
        found = logprob(row(2, 1, 0), 1, 3)
        assert found.logprob == pytest.approx(-1.4076, abs=1e-4)
        assert found.rank == 2
        assert [token for token, _ in found.top] == [0, 1, 2]
        assert [value for _, value in found.top] == pytest.approx([-0.4076, -1.4076, -2.4076], abs=1e-4)

    def test_a11_masked_tokens_are_left_out_of_json(self):
        found = logprob(row(2, -np.inf, 0), 0, 3)
        assert [token for token, _ in found.top] == [0, 2]
        assert math.isfinite(json.loads(json.dumps(found.top, allow_nan=False))[1][1])

    def test_ties_and_rank(self):
        found = logprob(row(1, 3, 3, 1), 2, 2)
        assert (found.rank, [token for token, _ in found.top]) == (1, [1, 2])
        assert logprob(row(1, 3, 3, 1), 3, 0) == sampler.Logprob(3, found.logprob - 2, 3, ())

    def test_nan_counts_as_impossible(self):
        with pytest.warns(RuntimeWarning, match="NaN"):
            assert logprob(row(np.nan, 0, 0), 1, 3).logprob == pytest.approx(math.log(0.5))
