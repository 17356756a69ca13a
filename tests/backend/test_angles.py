"""Rotary scaling in the CPU backend: every scheme reaches its logits, and longrope follows the sequence (B6, B8)."""

import gguf
import numpy as np
import pytest

from ropewalk.backend.base import StepBatch
from ropewalk.backend.cpu import CpuBackend
from ropewalk.checkpoint.gguf import open_gguf
from ropewalk.engine.engine import Engine
from ropewalk.errors import UnsupportedModelError
from ropewalk.model.config import ModelConfig
from ropewalk.model.reference import Reference
from ropewalk.model.rope_settings import override_rope
from ropewalk.params import SamplingParams
from ropewalk.passes import Passes, log_softmax

HIDDEN, FFN, VOCAB, HEADS, KV_HEADS, HEAD = 64, 96, 80, 4, 2, 32
TOKENS = np.random.default_rng(5).integers(0, VOCAB, 40).astype(np.int32)
LIMIT = 8
LISTS = {"short": 1 + 0.1 * np.arange(16), "long": 1 + np.arange(16) ** 1.5}


def write(path, lists=None, context=64, key_bias=0.0, **keys):
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    sizes = {
        "block_count": 2,
        "context_length": context,
        "embedding_length": HIDDEN,
        "feed_forward_length": FFN,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.key_length": HEAD,
        "attention.value_length": HEAD,
        "rope.dimension_count": HEAD,
    }
    for key, value in sizes.items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    for key, value in keys.items():
        name = f"llama.rope.scaling.{key}"
        if isinstance(value, str):
            writer.add_string(name, value)
        else:
            (writer.add_uint32 if isinstance(value, int) else writer.add_float32)(name, value)
    kind = gguf.GGMLQuantizationType.Q8_0

    def matrix(name, rows, columns):
        values = (rng.standard_normal((rows, columns)) * 0.2).astype(np.float32)
        writer.add_tensor(f"{name}.weight", gguf.quants.quantize(values, kind), raw_dtype=kind)

    matrix("token_embd", VOCAB, HIDDEN)
    for layer in range(2):
        shapes = {
            "attn_q": (HEADS * HEAD, HIDDEN),
            "attn_k": (KV_HEADS * HEAD, HIDDEN),
            "attn_v": (KV_HEADS * HEAD, HIDDEN),
            "attn_output": (HIDDEN, HEADS * HEAD),
            "ffn_gate": (FFN, HIDDEN),
            "ffn_up": (FFN, HIDDEN),
            "ffn_down": (HIDDEN, FFN),
        }
        for name, shape in shapes.items():
            matrix(f"blk.{layer}.{name}", *shape)
        if key_bias:
            for name, n in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
                bias = (key_bias if name == "k" else 0) * rng.standard_normal(n * HEAD)
                writer.add_tensor(f"blk.{layer}.attn_{name}.bias", bias.astype(np.float32))
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(HIDDEN, np.float32))
    writer.add_tensor("output_norm.weight", np.ones(HIDDEN, np.float32))
    for name, values in (lists or {}).items():
        writer.add_tensor(f"rope_factors_{name}.weight", values.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def model(tmp_path):
    """A function from rotary keys and lists to a backend and a reference."""
    opened = []

    def make(lists=None, override=None, **keys):
        path = tmp_path / f"{len(opened)}.gguf"
        write(path, lists, **keys)
        file = open_gguf(path)
        config = override_rope(ModelConfig.from_gguf(file.metadata, file.tensors), override)
        backend = CpuBackend(file, config, n_threads=2)
        opened.append((file, backend))
        return backend, Reference(config, file)

    yield make
    for file, backend in opened:
        backend.close()
        file.close()


def logits(backend, tokens, lengths=None, chunk=None, dtype="float16"):
    """Logits of every token of one sequence, in chunks."""
    n = len(tokens)
    cache = backend.new_cache(4, dtype)
    table = np.arange(4, dtype=np.int32)[None]
    rows = []
    for start in range(0, n, chunk or n):
        part = np.arange(start, min(start + (chunk or n), n), dtype=np.int32)
        batch = StepBatch(
            tokens[part],
            part,
            np.zeros(len(part), np.int32),
            table,
            np.arange(len(part), dtype=np.int32),
            lengths=None if lengths is None else np.array([lengths], np.int32),
        )
        batch.check(vocab_size=VOCAB, n_pages=4)
        rows.append(backend.forward(batch, cache).copy())
    return np.concatenate(rows)


OVERRIDES = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "ntk": {"rope_type": "ntk", "factor": 8.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 16},
    "longrope": {
        "rope_type": "longrope",
        "factor": 4.0,
        "original_max_position_embeddings": LIMIT,
        "short_factor": LISTS["short"].tolist(),
        "long_factor": LISTS["long"].tolist(),
    },
}


@pytest.mark.parametrize("scheme", OVERRIDES)
def test_every_scheme_is_what_the_reference_makes_of_it(model, scheme):
    plain, _ = model()
    ours, reference = model(override=OVERRIDES[scheme])
    expected = reference.logits(TOKENS)
    found = logits(ours, TOKENS)
    assert (found - expected).std() < 0.04 * expected.std()
    assert (logits(plain, TOKENS) - found).std() > 0.15 * expected.std()


def test_keys_and_override_are_one_b6(model):
    by_keys, _ = model(type="yarn", factor=4.0, original_context_length=16)
    by_user, _ = model(override=OVERRIDES["yarn"])
    np.testing.assert_array_equal(logits(by_keys, TOKENS), logits(by_user, TOKENS))


def test_a_short_prompt_does_not_feel_the_context_b8(model):
    """Ten tokens in a context of 4,096 and of 131,072: the same logits, of the short list."""
    limit = {"lists": LISTS, "original_context_length": 4096, "attn_factor": 1.0}
    small, _ = model(**limit, context=4096)
    large, _ = model(**limit, context=131072)
    np.testing.assert_array_equal(logits(small, TOKENS[:10]), logits(large, TOKENS[:10]))


def test_the_list_follows_the_length_of_the_sequence_b8(model):
    """Length 8: short; 9: long, for every position, also of a prompt that is read in chunks."""
    keys = {"original_context_length": LIMIT, "attn_factor": 1.25}
    both, _ = model(LISTS, **keys)
    short, _ = model({"short": LISTS["short"], "long": LISTS["short"]}, **keys)
    long, _ = model({"short": LISTS["long"], "long": LISTS["long"]}, **keys)
    np.testing.assert_array_equal(logits(both, TOKENS[:8]), logits(short, TOKENS[:8]))
    np.testing.assert_array_equal(logits(both, TOKENS[:9]), logits(long, TOKENS[:9]))
    np.testing.assert_array_equal(logits(both, TOKENS[:30], lengths=30, chunk=4), logits(long, TOKENS[:30]))
    assert abs(logits(short, TOKENS[:9]) - logits(long, TOKENS[:9])).max() > 0.01


def test_short_and_long_sequences_share_a_step_b8(model):
    both, _ = model(LISTS, original_context_length=LIMIT)
    a, b = TOKENS[:6], TOKENS[6:20]
    cache = both.new_cache(4)
    tables = np.array([[0, 3], [1, 2]], np.int32)
    sequences = np.repeat(np.arange(2, dtype=np.int32), (6, 14))
    positions = np.concatenate([np.arange(6), np.arange(14)]).astype(np.int32)
    batch = StepBatch(np.concatenate([a, b]), positions, sequences, tables, np.arange(20, dtype=np.int32))
    together = both.forward(batch, cache).copy()
    np.testing.assert_array_equal(together, np.concatenate([logits(both, a), logits(both, b)]))


def test_the_constant_part_of_keys_turns_by_the_sequence_s_own_angles_b8(model):
    """An int8 cache adds it to the scores, with the angles of the short context or of the long one."""
    both, reference = model(LISTS, original_context_length=LIMIT, key_bias=20.0)
    for n in (6, 40):
        expected = reference.logits(TOKENS[:n])
        seen = logits(both, TOKENS[:n], dtype="int8")
        assert (seen - expected).std() < 0.1 * expected.std(), n
        np.testing.assert_array_equal(logits(both, TOKENS[:n], lengths=n, chunk=5, dtype="int8"), seen)
    assert both._constant_keys.n_terms.all()


def test_generation_that_crosses_the_limit_recomputes_its_keys_b8(model):
    """Each token is the one that a run without any cache draws; prompts below, at and beyond the limit."""
    both, reference = model(LISTS, original_context_length=LIMIT)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    engine = Engine(both, context_length=64, kv_tokens=128)
    slow = Engine(both, context_length=64, kv_tokens=64, keep_cache=False)
    for n in (2, 7, 8, 9, 20):
        requests = [
            engine.add_request(TOKENS[:n].tolist(), params),
            slow.add_request(TOKENS[:n].tolist(), params),
        ]
        for each in (engine, slow):
            while each.has_unfinished:
                each.step()
                each.check()
        assert requests[0].output == requests[1].output
        text = np.array([*TOKENS[:n], *requests[0].output])
        for end in (8, 9, 15):
            if end >= n:
                expected = reference.logits(text[:end])[-1]
                assert expected[text[end]] > expected.max() - 0.1 * expected.std()


def test_scores_are_those_of_a_pass_over_the_whole_text_b8(model):
    """The context has 6 tokens; with one continuation it stays within the limit, with the other it does not."""
    both, _ = model(LISTS, original_context_length=LIMIT)
    passes = Passes(both, "float16", 64)
    context, continuations = TOKENS[:6].tolist(), [TOKENS[6:8].tolist(), TOKENS[8:20].tolist()]
    for continuation, score in zip(continuations, passes.score(context, continuations), strict=True):
        rows = log_softmax(logits(both, np.array([*context, *continuation[:-1]], np.int32))[5:])
        assert score.logprobs.tolist() == [row[token] for row, token in zip(rows, continuation, strict=True)]


def test_dynamic_ntk_is_refused_by_name(model):
    with pytest.raises(
        UnsupportedModelError, match="rope scaling 'dynamic' is not supported in a context of 128"
    ):
        model(override={"rope_type": "dynamic", "factor": 2.0})
