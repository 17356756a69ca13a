"""Windows, perplexity and KL divergence, against sums over whole logits."""

import runpy
from pathlib import Path

import numpy as np
import pytest

from ropewalk.errors import InvalidParameterError, PromptError
from ropewalk.evaluation import divergence, perplexity, windows_of
from ropewalk.passes import log_softmax

toy = runpy.run_path(str(Path(__file__).parent / "toy_llm.py"))
TEXT = "abcde fab" * 20  # 180 tokens


def llm(add_bos=False):
    return toy["toy_llm"](tokenizer=toy["ToyTokenizer"](add_bos=add_bos))


def scored(window):
    return len(window.token_ids) - 1 - window.first_row


@pytest.mark.parametrize("add_bos", [False, True])
def test_windows_side_by_side_score_their_second_half(add_bos):
    model = llm(add_bos)
    windows = windows_of(model, TEXT, window=32)
    assert len(windows) == 180 // (32 - add_bos)
    assert all(len(w.token_ids) == 32 and scored(w) == 15 for w in windows)
    body = [token for w in windows for token in w.token_ids[add_bos:]]
    assert body == model.encode(TEXT)[add_bos:][: len(body)]
    assert all(w.token_ids[0] == model.tokenizer.bos_id for w in windows) == add_bos


@pytest.mark.parametrize("add_bos", [False, True])
@pytest.mark.parametrize("stride", [1, 7, 16, 30])
def test_windows_with_a_stride_score_every_token_once(add_bos, stride):
    model = llm(add_bos)
    body = model.encode(TEXT)[add_bos:]
    targets, start = [], 0
    for w in windows_of(model, TEXT, window=32, stride=stride):
        assert w.token_ids[add_bos:] == body[start : start + 32 - add_bos]
        targets += range(start + w.first_row + 1 - add_bos, start + len(w.token_ids) - add_bos)
        start += stride
    assert targets == list(range(1 - add_bos, len(body)))


@pytest.mark.parametrize(
    ("options", "said"),
    [({"window": 3}, "window is 3; allowed: 4 ... 64"), ({"window": 65}, "window is 65"),
     ({"window": 32, "stride": 0}, "stride is 0; allowed: 1 ... 31"), ({"window": 32, "stride": 32}, "stride is 32"),
     ({"window": 32, "n_windows": 0}, "windows is 0")],
)  # fmt: skip
def test_numbers_that_are_not_allowed(options, said):
    with pytest.raises(InvalidParameterError, match=said):
        windows_of(llm(), TEXT, **options)


def test_a_text_shorter_than_a_window():
    with pytest.raises(PromptError, match="the text has 3 tokens; allowed: at least one window, which is 32"):
        windows_of(llm(), "abc", window=32)


def test_perplexity_is_exp_of_the_mean_loss():
    model = llm()
    windows = windows_of(model, TEXT, window=20, stride=9, n_windows=4)
    losses = []
    for w in windows:
        logprobs = log_softmax(model.logits(w.token_ids))
        losses += [-logprobs[row, w.token_ids[row + 1]] for row in range(w.first_row, 19)]
    told = []
    found = perplexity(model.logits_in_parts, windows, told.append)
    assert found.value == pytest.approx(np.exp(np.mean(losses)), rel=1e-12)
    assert found.standard_error == pytest.approx(
        found.value * np.std(losses) / np.sqrt(len(losses)), rel=1e-12
    )
    assert found.n_tokens == len(losses) == 19 + 3 * 9
    assert told == [1, 2, 3, 4]


def rows_of(probabilities):
    """The logits of a model that says the same everywhere."""
    with np.errstate(divide="ignore"):
        row = np.log(np.float32(probabilities))
    return lambda ids: [np.tile(row, (len(ids), 1))]


def test_divergence_of_known_distributions():
    window = windows_of(llm(), TEXT, window=32, n_windows=1)
    for w in window:
        w.token_ids[:] = [0] * 32
    found = divergence(rows_of([0.5, 0.25, 0.25]), rows_of([0.25, 0.75, 0.0]), window)
    assert found.mean == pytest.approx(0.25 * np.log(0.25 / 0.5) + 0.75 * np.log(0.75 / 0.25), abs=1e-7)
    assert (found.maximum, found.median, found.p99) == pytest.approx([found.mean] * 3)
    assert (found.same_top, found.n_positions) == (0.0, 15) and found.standard_error < 1e-12
    assert (found.perplexity.value, found.reference_perplexity.value) == pytest.approx((2.0, 4.0))


def test_a_model_does_not_diverge_from_itself():
    model = llm()
    found = divergence(model.logits_in_parts, model.logits_in_parts, windows_of(model, TEXT, window=32))
    assert found.maximum == 0.0 and found.same_top == 1.0


def test_a_divergence_is_never_negative():
    rng = np.random.default_rng(0)
    for _ in range(50):
        p, q = rng.dirichlet(np.ones(13), 2)
        window = windows_of(llm(), TEXT, window=32, n_windows=1)
        assert divergence(rows_of(p), rows_of(q), window).mean > -1e-7
