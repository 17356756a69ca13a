"""Choosing a token in compiled code: the same as the readable sampler, bit for bit, whatever the row and the knobs."""

import math
import warnings

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ropewalk.engine.sampler import Context, choose, choose_plainly, logprob, logprob_plainly
from ropewalk.errors import GenerationError
from ropewalk.kernels import powers, sampling
from ropewalk.kernels.jit import kernel
from ropewalk.params import SamplingParams

MODEL_SIZED = 262_144
NOTHING = Context(np.array([], np.int32), np.array([], np.int32))


def outcome(work):
    """What a call gives: its result, or the type and text of its error; and what it warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            found = work()
        except GenerationError as error:
            found = type(error), str(error)
    return found, {str(warning.message) for warning in caught}


def assert_same_token(logits, params, context=NOTHING, *, seed=0, position=0):
    before = logits.copy()
    where = {"seed": seed, "position": position}
    fast = outcome(lambda: choose(logits, params, context, **where))
    assert fast == outcome(lambda: choose_plainly(before, params, context, **where))
    assert np.array_equal(logits.view(np.uint32), before.view(np.uint32)), "the row was not restored"


def assert_same_logprob(logits, token, n_top):
    assert outcome(lambda: logprob(logits, token, n_top)) == outcome(
        lambda: logprob_plainly(logits, token, n_top)
    )


def flat(rng, n):
    return np.full(n, rng.choice([0.0, -3.5, 1e30]), np.float32)


def even(rng, n):
    return rng.uniform(-1, 1, n).astype(np.float32)


def tied(rng, n):
    return rng.integers(0, rng.choice([2, 5, 40]), n).astype(np.float32) / 4


def normal(rng, n):
    return rng.standard_normal(n, dtype=np.float32) * np.float32(rng.choice([0.01, 1, 3, 30]))


def peaked(rng, n):
    x = normal(rng, n)
    x[rng.integers(0, n, 1 + n // 1000)] += rng.uniform(5, 40)
    return x


def spread(rng, n):
    """Of any size that float32 has, denormals included."""
    return (rng.choice([-1, 1], n) * 10.0 ** rng.uniform(-44, 38, n)).astype(np.float32)


def crowded(rng, n):
    """Neighbouring floats: keys that differ in the last bit."""
    return (np.float32(7).view(np.int32) + rng.integers(0, 3, n, dtype=np.int32)).view(np.float32)


def steps_down(rng, n):
    """Halves of halves: each bucket has one key and the last one has the rest."""
    return -(2.0 ** -rng.integers(0, 60, n).astype(np.float64)).astype(np.float32)


KINDS = [flat, even, tied, normal, peaked, spread, crowded, steps_down]
SPECIALS = {
    "none": [],
    "masked": [-np.inf],
    "nan": [np.nan],
    "infinite": [np.inf],
    "all": [-np.inf, np.nan, np.inf],
}


def row(data, sizes):
    """A row of logits of some kind, perhaps with special values strewn in."""
    n = data.draw(sizes, "vocabulary")
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32), "rows"))
    logits = data.draw(st.sampled_from(KINDS), "kind")(rng, n)
    for value in SPECIALS[
        data.draw(st.sampled_from(["none", "none", "none", "masked", *SPECIALS]), "specials")
    ]:
        share = data.draw(st.sampled_from([0.0, 0.1, 0.9, 1.0]), "share")
        logits[rng.random(n) < share] = value
        logits[rng.integers(0, n)] = value
    return logits


shares = st.one_of(st.just(1.0), st.sampled_from([0.0, 0.5, 0.9, 0.95, 0.999999]), st.floats(0, 1))
temperatures = st.one_of(
    st.sampled_from([0.0, 1e-5, 0.5, 0.8, 1.0, 2.0, 50.0, 1e300, 1.7e308]), st.floats(1e-5, 5)
)
counts = st.one_of(st.just(0), st.integers(1, 60), st.sampled_from([500, 4096, 4097, 10**6, 10**20]))
truncating = {
    "temperature": temperatures,
    "top_k": counts,
    "top_p": shares,
    "min_p": st.one_of(st.just(0.0), st.sampled_from([0.05, 1.0, 5e-324, 1e-13]), st.floats(0, 1)),
    "typical_p": shares,
}


def params_of(data, vocab_size):
    ids = st.integers(0, vocab_size - 1)
    penalties = st.sampled_from([0.0, 0.0, 0.7, -1.5])
    return data.draw(
        st.builds(
            SamplingParams,
            **truncating,
            repetition_penalty=st.sampled_from([1.0, 1.0, 1.3, 0.5]),
            frequency_penalty=penalties,
            presence_penalty=penalties,
            logit_bias=st.one_of(st.just({}), st.dictionaries(ids, st.floats(-100, 100), max_size=4)),
            min_tokens=st.sampled_from([0, 0, 9]),
        ),
        "params",
    )


class TestSameAsTheReadableSampler:
    @given(st.data())
    @settings(max_examples=400, deadline=None)
    def test_every_knob_on_every_kind_of_row(self, data):
        logits = row(
            data, st.one_of(st.integers(1, 40), st.integers(1, 5000), st.sampled_from([1023, 1024, 1025]))
        )
        ids = st.lists(st.integers(0, len(logits) - 1), max_size=20)
        context = Context(
            *(np.array(data.draw(ids), np.int32) for _ in range(2)), frozenset(data.draw(ids)[:3])
        )
        params = params_of(data, len(logits))
        for position in range(3):
            seed = data.draw(st.integers(0, 2**64 - 1))
            assert_same_token(logits, params, context, seed=seed, position=position)

    @given(st.data())
    @settings(max_examples=12, deadline=None)
    def test_every_knob_on_rows_as_long_as_a_models(self, data):
        logits = row(data, st.sampled_from([MODEL_SIZED, MODEL_SIZED - 5]))
        assert_same_token(logits, params_of(data, len(logits)), seed=data.draw(st.integers(0, 9)))

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize(
        "knobs",
        [
            {},
            {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05},
            {"temperature": 2.0, "top_p": 0.95},
            {"temperature": 2.0, "typical_p": 0.95},
            {"min_p": 0.02, "typical_p": 0.8},
            {"top_k": 6000, "temperature": 3.0},
        ],
    )
    def test_typical_knobs_on_a_row_as_long_as_a_models(self, kind, knobs):
        logits = kind(np.random.default_rng(7), MODEL_SIZED)
        for position in range(2):
            assert_same_token(logits, SamplingParams(**knobs), seed=3, position=position)

    @given(st.data())
    @settings(max_examples=200, deadline=None)
    def test_log_probabilities(self, data):
        logits = row(data, st.one_of(st.integers(1, 40), st.integers(1, 5000)))
        token = data.draw(st.integers(0, len(logits) - 1))
        assert_same_logprob(logits, token, data.draw(st.one_of(st.integers(0, 8), counts)))

    def test_log_probabilities_of_a_row_as_long_as_a_models(self):
        for kind in KINDS:
            assert_same_logprob(kind(np.random.default_rng(1), MODEL_SIZED), 12345, 20)

    def test_other_strides_types_and_rows_that_may_not_be_written(self):
        logits = np.random.default_rng(0).standard_normal(4000)
        params = SamplingParams(top_k=5, repetition_penalty=1.5, seed=1)
        context = Context(np.arange(40, dtype=np.int32), np.arange(9, dtype=np.int32))
        expected = choose_plainly(logits[::2].astype(np.float32), params, context, seed=1, position=1)
        wide = logits.astype(np.float32)
        kept = wide[::2].copy()
        kept.flags.writeable = False
        for given_logits in (wide[::2], kept):
            assert choose(given_logits, params, context, seed=1, position=1) == expected
        assert logprob(wide[::2], 7, 3) == logprob_plainly(kept, 7, 3)

    def test_a_short_row_after_a_long_one(self):
        """The workspace has room for the longest row so far, and what that left there does not matter."""
        rng = np.random.default_rng(5)
        for n in (3000, 10, 5000, 1, 2999):
            for knobs in ({}, {"top_k": 3, "top_p": 0.9}, {"typical_p": 0.9}):
                assert_same_token(normal(rng, n), SamplingParams(**knobs))


@kernel
def weigh(exponents, bits, out):
    for i in range(exponents.shape[0]):
        out[i] = sampling.weight(exponents[i], bits)


class TestWeights:
    @given(st.integers(1, 50), st.integers(0, 2**32))
    @settings(max_examples=50, deadline=None)
    def test_the_kernel_gives_the_bits_of_its_twin(self, bits, seed):
        rng = np.random.default_rng(seed)
        exponents = -np.concatenate(
            [
                rng.uniform(0, bits + 2, 3000),
                10.0 ** rng.uniform(-320, 308, 500),
                np.arange(bits + 3) / 2,
                [bits],
            ]
        )
        found = np.empty(len(exponents), np.int64)
        weigh(np.append(exponents, [-np.inf, -0.0]), bits, extended := np.empty(len(exponents) + 2, np.int64))
        assert extended[-2:].tolist() == [0, 2**bits]
        found = extended[:-2]
        assert np.array_equal(found, powers.weights(exponents, bits))

    def test_powers_of_two_are_exact_and_others_nearly(self):
        bits = 44
        assert powers.weights(-np.arange(46.0), bits).tolist() == [*(2 ** (bits - i) for i in range(45)), 0]
        exponents = -np.linspace(0, 44, 9999)
        exact = 2.0 ** (bits + exponents)
        error = np.abs(powers.weights(exponents, bits) - exact)
        assert np.all(error <= 0.5 + 3e-13 * exact)

    def test_a_weight_never_falls_as_its_exponent_rises_past_the_last_that_weighs(self):
        for bits in (20, 44, 50):
            edge = np.array([-bits - 1e-9, np.nextafter(-bits, -np.inf), -bits, np.nextafter(-bits, 0)])
            assert powers.weights(edge, bits).tolist() == [0, 0, 1, 1]

    @pytest.mark.parametrize("n", [1, 2, 3, 4095, 4096, 49_152, 262_143, 262_144, 2**20 - 1, 2**24])
    def test_the_sum_of_as_many_weights_fits_into_int64(self, n):
        bits = powers.resolution(n)
        assert n * 2**bits < 2**63
        assert bits == 50 or (n + 1) * 2 ** (bits + 1) >= 2**63


class TestCut:
    """The border of a prefix, against a full sort."""

    @given(st.data())
    @settings(max_examples=100, deadline=None)
    def test_equals_a_sort(self, data):
        n = data.draw(st.sampled_from([1, 2, 100, 3000]))
        rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
        keys = data.draw(st.sampled_from(KINDS))(rng, n)
        weights = rng.integers(0, data.draw(st.sampled_from([2, 1000, 2**40])), n)
        counting = data.draw(st.booleans())
        counted = np.ones(n, np.int64) if counting else weights
        assume(counted.sum() > 0)
        need = data.draw(st.integers(1, int(counted.sum())))
        order = np.argsort(-keys, kind="stable")
        index = int(np.searchsorted(np.cumsum(counted[order]), need))
        key = keys[order[index]]
        scratch = sampling.Workspace(n).arrays(n)[-1]
        bounds = (float(keys.max()), float(keys.min()))
        found = cut(keys, weights, n, need, counting, *bounds, scratch)
        assert found == (key, index + 1 - np.count_nonzero(keys > key), np.count_nonzero(keys == key))


@kernel
def cut(keys, weights, count, need, counting, top, bottom, scratch):
    return sampling._cut(keys, weights, count, need, counting, top, bottom, scratch)


class TestInfiniteLogits:
    """A model that emits plus infinity, together with what masks it."""

    PARAMS = SamplingParams(min_tokens=5, temperature=1.0)

    def test_others_are_drawn_where_the_infinite_one_is_masked(self):
        logits = np.array([1, 2, np.inf], np.float32)
        context = Context(np.array([0], np.int32), np.array([], np.int32), frozenset([2]))
        drawn = {choose(logits, self.PARAMS, context, seed=s, position=1) for s in range(40)}
        assert drawn == {0, 1}

    @pytest.mark.parametrize("how", [logprob, logprob_plainly])
    def test_their_log_probability_is_a_clear_error(self, how):
        logits = np.array([1, 2, np.inf], np.float32)
        with pytest.raises(
            GenerationError, match="token 1 has no log-probability: its raw logit is 2, the largest inf"
        ):
            how(logits, 1, 2)
        assert how(logits, 2, 2).top == ((2, 0.0),)

    @pytest.mark.parametrize("how", [logprob, logprob_plainly])
    def test_a_masked_token_has_none_either(self, how):
        with pytest.raises(GenerationError, match="its raw logit is -inf"):
            how(np.array([0, -np.inf], np.float32), 1, 2)


def test_draws_follow_the_distribution():
    p = np.array([0.1, 0.2, 0.3, 0.4])
    logits = np.log(p).astype(np.float32)
    for knobs, q in (({}, p), ({"top_k": 3}, p * [0, 1, 1, 1]), ({"temperature": 0.5}, p**2)):
        drawn = [choose(logits, SamplingParams(**knobs), NOTHING, seed=11, position=i) for i in range(4000)]
        expected = 4000 * q / q.sum()
        counts = np.bincount(drawn, minlength=4)
        assert np.all(counts[q == 0] == 0)
        chi_square = np.sum((counts - expected)[q > 0] ** 2 / expected[q > 0])
        assert chi_square < 21  # 3 degrees of freedom: p < 1e-4


def test_log_probabilities_are_those_of_a_float64_softmax():
    x = normal(np.random.default_rng(2), MODEL_SIZED)
    exact = x.astype(np.float64) - x.max()
    exact -= math.log(math.fsum(np.exp(exact)))
    for token in (0, 17, int(np.argmax(x)), int(np.argmin(x))):
        assert logprob(x, token, 0).logprob == pytest.approx(exact[token], abs=1e-8)
