"""Logits, hidden states, embeddings and scores of given tokens, against the logits of whole sequences."""

import numpy as np
import pytest

from ropewalk import LLM
from ropewalk.checkpoint.gguf import open_gguf
from ropewalk.errors import InvalidParameterError, PromptError
from ropewalk.passes import log_softmax

TEXT = (
    "A rope is a group of yarns, plies, fibres, or strands that are twisted or braided together into a form."
)


@pytest.fixture(scope="module")
def llm(smollm2):
    with LLM(smollm2, kv_tokens=1024, context_length=256) as llm:
        yield llm


@pytest.mark.parametrize("n_context", [1, 15, 16, 17, 24])
def test_a_score_is_the_log_softmax_of_the_logits_bit_for_bit(llm, n_context):
    ids = [*llm.encode(TEXT)[:24], 5, 6, 7]
    context, rest = ids[:n_context], ids[n_context:]
    others = [[9], list(range(100, 180)), rest]
    for continuation, score in zip(others, llm.score(context, others), strict=True):
        logits = llm.logits([*context, *continuation])[n_context - 1 : -1]
        picked = log_softmax(logits)[np.arange(len(continuation)), continuation]
        assert np.array_equal(score.logprobs, picked)
        assert score.token_ids == continuation
        assert score.is_greedy == (logits.argmax(-1) == continuation).all()
        assert score.total == picked.sum()


def test_a_greedy_continuation_is_called_so(llm):
    from ropewalk import SamplingParams

    (output,) = llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=6))
    (score,) = llm.score(llm.encode("The capital of France is"), [output.token_ids])
    assert score.is_greedy


def test_text_is_scored_from_the_first_token_that_the_context_does_not_have(llm):
    paris, rome = llm.score("The capital of France is", [" Paris", " Rome"])
    assert llm.decode(paris.token_ids) == " Paris" and paris.total > rome.total
    inside = llm.score("The capital of France is Par", ["is"])[0]  # " Paris" is one token
    assert llm.decode(inside.token_ids) == " Paris"
    assert inside.total == paris.total
    ids = llm.encode("The capital of France is")
    assert llm.score(ids, [" Paris"])[0].total == llm.score(ids, [paris.token_ids])[0].total == paris.total


@pytest.mark.parametrize(
    ("context", "continuation", "said"),
    [("", "a", "context"), ("a", "", "continuation"), ([1], [], "continuation"), ([1], [49152], "49151"),
     ([1], [2] * 256, "257 tokens"), ([1], None, "a prompt is None")],
)  # fmt: skip
def test_what_cannot_be_scored(llm, context, continuation, said):
    with pytest.raises(PromptError, match=said):
        llm.score(context, [continuation])


def test_hidden_states_times_the_output_matrix_are_the_logits(llm, smollm2):
    ids = llm.encode(TEXT)
    with open_gguf(smollm2) as checkpoint:
        matrix = checkpoint.tensor("token_embd.weight")  # it is the output matrix too
    states = llm.embed(ids, pooling="last", normalize=False)
    logits = llm.logits(ids)[-1]
    assert np.abs(states[0] @ matrix.T - logits).max() < 2e-4 * np.abs(logits).max()


def test_poolings(llm):
    ids = [5, 6, 7, 8]
    each = [llm.embed(ids[: n + 1], pooling="last", normalize=False)[0] for n in range(4)]
    assert np.array_equal(llm.embed(ids, pooling="cls", normalize=False)[0], each[0])
    assert np.allclose(llm.embed(ids, pooling="mean", normalize=False)[0], np.mean(each, 0), atol=1e-6)
    assert np.array_equal(llm.embed(ids), llm.embed(ids, pooling="last"))


def test_embeddings_do_not_depend_on_what_stands_beside_and_have_length_one(llm):
    texts = ["a rope", TEXT, "a string"]
    together = llm.embed(texts)
    for text, vector in zip(texts, together, strict=True):
        assert np.array_equal(llm.embed(text)[0], vector)
    assert np.allclose(np.linalg.norm(together, axis=1), 1, atol=1e-6)


def test_what_cannot_be_embedded(llm):
    with pytest.raises(InvalidParameterError, match="pooling is 'max'; allowed: mean, cls, last"):
        llm.embed("a", pooling="max")
    with pytest.raises(PromptError, match="no tokens"):
        llm.embed([""])
    with pytest.raises(PromptError, match="a prompt is 5"):
        llm.embed(["a", 5])
