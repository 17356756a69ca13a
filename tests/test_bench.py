"""`ropewalk.bench`: the plan, the arithmetic of a step, medians on a made-up clock, and one real run."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from ropewalk import bench
from ropewalk.bench import DECODE_STEPS, Case, Measurement, Plan, Work, batch_of, measure, work_of
from ropewalk.checkpoint.gguf import open_gguf
from ropewalk.errors import InvalidParameterError
from ropewalk.kernels.tables import MATRIX_FIELDS, Matrix
from ropewalk.model.config import ModelConfig

CONFIG = SimpleNamespace(
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    head_dim=32,
    vocab_size=100,
    context_length=4096,
    layer_window=(0, 64),
    experts=None,
    latent=None,
)
PAGE_BYTES = 2 * 16 * 2 * 2 * 32 * 2  # 2 layers, 16 tokens, keys and values, 2 heads, float16


def weights():
    """Fourteen matrices of 2 panels and an output matrix of 7; a panel is 100 bytes of 16 x 64 weights."""
    matrices = np.zeros((15, MATRIX_FIELDS), np.int64)
    matrices[:, Matrix.N_PANELS] = [2] * 14 + [7]
    matrices[:, Matrix.PANEL_BYTES] = 100
    matrices[:, Matrix.N_GROUPS] = 2
    return SimpleNamespace(matrices=matrices, vectors={"norm": np.zeros(3, np.float32)})


def work(case: Case) -> Work:
    return work_of(case, CONFIG, weights(), PAGE_BYTES)


# ---- the plan


def test_every_length_and_batch_at_every_depth():
    plan = Plan(prompts=(8, 16), depths=(0, 32), batches=(1, 2), threads=(1,))
    assert [(c.phase, c.tokens, c.batch, c.depth) for c in plan.cases()] == [
        *[("prefill", n, 1, depth) for depth in (0, 32) for n in (8, 16)],
        *[("decode", 1, n, depth) for depth in (0, 32) for n in (1, 2)],
    ]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"threads": (0,)}, "threads is [0]; allowed: numbers from 1"),
        ({"threads": (100_000,)}, "threads is 100000; this process may use"),
        ({"prompts": ()}, "prompts is []"),
        ({"batches": (1, 0)}, "batches is [1, 0]"),
        ({"depths": (-1,)}, "depths is [-1]; allowed: numbers from 0"),
        ({"cache_types": ("float16", "int4")}, "allowed: float16, int8"),
        ({"cache_types": ()}, "cache_types is []"),
        ({"repeats": 0}, "repeats is 0"),
    ],
)
def test_a_plan_that_makes_no_sense_is_refused(options, words):
    with pytest.raises(InvalidParameterError) as error:
        Plan(**options)
    assert words in str(error.value)


def test_a_depth_beyond_the_context_is_refused_before_anything_is_loaded():
    Plan(prompts=(96,), depths=(4000,)).check(CONFIG, 0, 1 << 40)
    with pytest.raises(
        InvalidParameterError, match=r"prefill of 97 tokens at depth 4000 takes 4097 .* has 4096"
    ):
        Plan(prompts=(97,), depths=(4000,)).check(CONFIG, 0, 1 << 40)
    with pytest.raises(InvalidParameterError, match="decode of 8 tokens at depth 4089"):
        Plan(prompts=(1,), depths=(4089,)).check(CONFIG, 0, 1 << 40)


def test_default_depths_are_those_that_the_context_has_room_for():
    assert Plan(prompts=(512,), depths=(0, 2048)).within(2560).depths == (0, 2048)
    assert Plan(prompts=(512,), depths=(0, 2048)).within(2559).depths == (0,)
    assert Plan(prompts=(512,), depths=(2048,)).within(100).depths == (0,)


def test_what_does_not_fit_into_memory_is_refused_with_the_sizes():
    plan = Plan(prompts=(16,), depths=(2048,), batches=(64,))
    cache = 64 * 129 * PAGE_BYTES  # 2056 tokens are 129 pages
    plan.check(CONFIG, 1000, cache + 1000 + bench.BANDWIDTH_BYTES)
    with pytest.raises(
        InvalidParameterError, match=r"a batch of 64 with 2056 tokens each takes 0\.1 GB of cache"
    ):
        plan.check(CONFIG, 1000, cache + 999 + bench.BANDWIDTH_BYTES)


# ---- what a step has to do


def test_a_decode_step_reads_every_weight_and_the_context_once():
    first = work(Case("decode", 1, 1, 0))
    assert first.weight_bytes == 14 * 2 * 100 + 7 * 100 + 12
    per_token = 2 * 2 * 32 * 2
    seen = 0 + (DECODE_STEPS - 1) // 2 + 1  # the middle one of the steps
    assert first.cache_bytes == 2 * seen * per_token
    at_weights = (14 * 2 + 7) * 16 * 64
    assert first.macs == at_weights + 2 * 2 * 4 * 32 * seen


def test_a_window_bounds_what_a_layer_reads():
    deep = work(Case("decode", 1, 1, 1000))
    assert deep.cache_bytes == (1004 + 64) * 2 * 2 * 32 * 2
    assert deep.macs == (14 * 2 + 7) * 16 * 64 + 2 * 4 * 32 * (1004 + 64)


def test_a_batch_shares_the_weights_and_nothing_else():
    one, four = work(Case("decode", 1, 1, 100)), work(Case("decode", 1, 4, 100))
    assert four.weight_bytes == one.weight_bytes
    assert (four.cache_bytes, four.macs) == (4 * one.cache_bytes, 4 * one.macs)


def test_a_prefill_reads_the_layers_once_a_pass_and_the_output_matrix_once():
    short, long = work(Case("prefill", 512, 1, 0)), work(Case("prefill", 513, 1, 0))
    layers = 14 * 2 * 100 + 12
    assert short.weight_bytes == layers + 700
    assert long.weight_bytes == 2 * layers + 700
    per_token = 2 * 2 * 32 * 2
    assert short.cache_bytes == (512 + 512) * per_token
    assert long.cache_bytes == (512 + 512 + 513 + 64) * per_token
    pairs = 512 * 513 // 2 + (64 * 65 // 2 + 448 * 64)
    assert short.macs == 14 * 2 * 16 * 64 * 512 + 7 * 16 * 64 + 2 * 4 * 32 * pairs


def test_of_experts_a_step_reads_those_that_tokens_meet():
    """Of 8 experts a token meets 2, 4 tokens that choose evenly 8 (1 - (6/8)^4); the router is read whole."""
    config = SimpleNamespace(**vars(CONFIG) | {"experts": SimpleNamespace(n_experts=8, n_used=2)})
    packed, dense = weights(), weights()
    rows = np.zeros(
        (8, MATRIX_FIELDS), np.int64
    )  # of each layer a router, and gate, up and down of one expert
    rows[:, Matrix.N_PANELS] = [1, 3, 3, 4] * 2
    rows[:, Matrix.PANEL_BYTES], rows[:, Matrix.N_GROUPS] = 100, 2
    packed.matrices = np.concatenate([packed.matrices, rows])
    for batch, met in ((1, 2), (4, 8 * (1 - 0.75**4))):
        case = Case("decode", 1, batch, 0)
        mixture = work_of(case, config, packed, PAGE_BYTES)
        plain = work_of(case, CONFIG, dense, PAGE_BYTES)
        assert mixture.weight_bytes - plain.weight_bytes == round(2 * 100 * (1 + 10 * met))
        assert mixture.macs - plain.macs == batch * 2 * 16 * 64 * (1 + 10 * 2)


def test_figures_of_a_measurement():
    m = Measurement(Case("decode", 1, 4, 0), 2, "int8", Work(3_000, 1_000, 8_000), 0.5, 20_000.0)
    assert m.tokens_per_s == 8
    assert m.bytes_per_s == 8_000
    assert m.macs_per_s == 16_000
    assert m.bandwidth_share == 0.4
    assert m.as_dict()["bandwidth_share"] == 0.4
    assert m.as_dict()["batch"] == 4


# ---- the rounds


class FakeBackend:
    """Takes `1 + batch size` seconds for a step, and ten times as long in its third round."""

    def __init__(self) -> None:
        self.config, self.weights, self.n_threads = CONFIG, weights(), 2
        self.now = 0.0
        self.batches: list[object] = []
        self.round = -1

    def new_cache(self, n_pages, dtype):
        self.cache = SimpleNamespace(n_pages=n_pages, bytes_per_page=PAGE_BYTES, copies=[])
        self.cache.copy_pages = self.cache.copies.extend
        return self.cache

    def forward(self, batch, cache):
        batch.check(vocab_size=100, n_pages=cache.n_pages)
        self.batches.append(batch)
        self.now += (1 + len(batch.tokens)) * (10 if self.round == 3 else 1)

    def bandwidth(self, n_threads):
        assert n_threads == 2
        self.round += 1
        return [1.0, 100.0, 300.0, 500.0][self.round]


def test_medians_over_the_rounds_the_first_left_out():
    backend = FakeBackend()
    cases = [Case("prefill", 20, 1, 0), Case("decode", 1, 3, 40)]
    told = []
    results = measure(
        backend,
        cases,
        "float16",
        3,
        clock=lambda: backend.now,
        bandwidth=backend.bandwidth,
        progress=lambda what, share: told.append(share),
    )
    assert [r.case for r in results] == cases
    assert [r.step_s for r in results] == [21, 4]
    assert [r.bandwidth for r in results] == [300, 300]
    assert len(backend.batches) == 1 + 4 * (1 + DECODE_STEPS)
    assert backend.cache.copies == [(0, page) for page in range(1, 3 * 3)]  # 48 tokens are 3 pages
    assert told == [i / 8 for i in range(8)]


def test_steps_go_on_from_the_depth():
    case = Case("decode", 1, 2, 15)
    steps = [batch_of(case, step, 100) for step in range(DECODE_STEPS)]
    assert [list(s.positions) for s in steps[:2]] == [[15, 15], [16, 16]]
    assert [list(s.slots) for s in steps[:2]] == [[15, 47], [16, 48]]
    assert [list(s.logit_rows) for s in steps[:2]] == [[0, 1]] * 2
    chunk = batch_of(Case("prefill", 20, 1, 8), 0, 100)
    assert list(chunk.positions) == list(range(8, 28))
    assert list(chunk.logit_rows) == [19]


def test_a_real_run(smollm2):
    plan = Plan(
        prompts=(24,),
        depths=(0, 300),
        batches=(1, 3),
        threads=(1,),
        cache_types=("float16", "int8"),
        repeats=1,
    )
    with open_gguf(smollm2) as checkpoint:
        config = ModelConfig.from_gguf(checkpoint.metadata, checkpoint.tensors)
        results = bench.run(checkpoint, config, plan)
        in_file = sum(t.n_bytes for t in checkpoint.tensors.values())
    assert [r.case for r in results] == 2 * plan.cases()
    assert [r.cache_type for r in results] == ["float16"] * 6 + ["int8"] * 6
    for result in results:
        assert result.work.weight_bytes == pytest.approx(in_file, rel=0.05)
        assert result.bandwidth_share > 0
        assert result.tokens_per_s > 0
    whole, half = (r.work.cache_bytes for r in (results[4], results[10]))
    assert whole / half == pytest.approx(2 * 64 / (64 + 4))
    assert replace(results[0].case, depth=300) == results[1].case
