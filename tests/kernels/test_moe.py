"""The choice of experts in compiled code, against the reference's."""

import numpy as np
import pytest

from ropewalk.kernels import moe as M
from ropewalk.kernels.jit import kernel
from ropewalk.kernels.tables import Moe
from ropewalk.model.config import ExpertConfig
from ropewalk.model.reference import route

SCORINGS = {"softmax": M.SOFTMAX, "sigmoid": M.SIGMOID, "softmax of chosen": M.SOFTMAX_OF_CHOSEN}


@kernel
def choose(table, row, bias, chosen, weights):
    n, n_used = table[Moe.N_EXPERTS], table[Moe.N_USED]
    M._score(row, n, bias, table[Moe.SCORING])
    if table[Moe.N_GROUPS] > 1:
        by_sums = table[Moe.SCORING] == M.SIGMOID
        M._keep_groups(row + 4 * n, n, table[Moe.N_GROUPS], table[Moe.N_GROUPS_USED], by_sums)
    for j in range(n_used):
        M.store_i32(chosen + 4 * j, np.int32(M._best(row + 4 * n, n, chosen, j)))
    M._weigh(table, row, chosen, weights)


def compiled(scores, experts, bias):
    """What `route` returns, row by row."""
    scale = np.array([experts.weight_scale], np.float32)
    table = np.zeros(len(Moe), np.int64)
    for field, value in {
        Moe.N_EXPERTS: experts.n_experts,
        Moe.N_USED: experts.n_used,
        Moe.SCORING: SCORINGS[experts.scoring],
        Moe.NORMALISE: experts.normalise,
        Moe.N_GROUPS: experts.n_groups,
        Moe.N_GROUPS_USED: experts.n_groups_used,
        Moe.WEIGHT_SCALE: scale.ctypes.data,
    }.items():
        table[field] = value
    chosen = np.zeros((len(scores), experts.n_used), np.int32)
    weights = np.zeros(chosen.shape, np.float32)
    for i, row in enumerate(scores):
        room = np.concatenate([row, np.zeros(2 * experts.n_experts, np.float32)])
        added = 0 if bias is None else bias.ctypes.data
        choose(table, room.ctypes.data, added, chosen[i].ctypes.data, weights[i].ctypes.data)
    return chosen, weights


def rule(scoring="softmax", **changes):
    base = {"n_experts": 12, "n_used": 3, "ffn_size": 32, "shared_ffn_size": 0, "normalise": False}
    base |= {"shared_gate": False, "weight_scale": 1.0, "selection_bias": False}
    return ExpertConfig(scoring=scoring, **(base | changes))


@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("changes", [{}, {"normalise": True}, {"weight_scale": 2.5, "n_used": 1}])
@pytest.mark.parametrize("groups", [(1, 1), (4, 2), (3, 1)])
@pytest.mark.parametrize("biased", [False, True])
def test_choice_and_weights_are_those_of_the_reference(scoring, changes, groups, biased):
    """Large and small scores, and halves, so that many are equal: the lower number comes first then."""
    rng = np.random.default_rng(0)
    experts = rule(scoring, n_groups=groups[0], n_groups_used=groups[1], **changes)
    scores = np.round(rng.standard_normal((60, 12)) * 3) / 2
    scores = np.concatenate([scores, 20 * rng.standard_normal((20, 12))]).astype(np.float32)
    bias = rng.choice([0, 0.25], 12).astype(np.float32) if biased else None
    chosen, weights = compiled(scores, experts, bias)
    expected, expected_weights = route(scores, experts, bias)
    assert np.array_equal(chosen, expected)
    np.testing.assert_allclose(weights, expected_weights, rtol=2e-6, atol=1e-7)


def test_scores_that_are_no_numbers_choose_different_experts_all_the_same():
    """A NaN must not lead outside the experts: their numbers are addresses' factors."""
    for values in (np.full(12, np.nan), np.full(12, -np.inf), np.r_[np.nan, np.arange(11)]):
        chosen, _ = compiled(values.astype(np.float32)[None], rule(), None)
        assert len(set(chosen[0])) == 3
        assert 0 <= chosen.min() <= chosen.max() < 12
