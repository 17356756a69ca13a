"""The CPU backend on small models made here: what none of the catalog's files has reaches its logits too."""

import gguf
import numpy as np
import pytest

from ropewalk.backend.base import StepBatch
from ropewalk.backend.cpu import CpuBackend
from ropewalk.checkpoint.gguf import open_gguf
from ropewalk.model.config import ModelConfig
from ropewalk.model.reference import Reference

HIDDEN, FFN, VOCAB, HEADS, KV_HEADS, HEAD = 64, 96, 80, 4, 2, 32  # 4 · 32 is not 64: B3
TOKENS = np.random.default_rng(5).integers(0, VOCAB, 24).astype(np.int32)


@pytest.fixture
def logits(tmp_path):
    """A function: logits of TOKENS from the CPU backend and from the reference, for one small model."""

    def compute(*, rotated=HEAD, output=False, divisors=None):
        path = tmp_path / "small.gguf"
        write(path, rotated, output, divisors)
        with open_gguf(path) as file:
            config = ModelConfig.from_gguf(file.metadata, file.tensors)
            backend = CpuBackend(file, config, n_threads=2)
            n = len(TOKENS)
            every = np.arange(n, dtype=np.int32)
            table = np.arange(2, dtype=np.int32)[None]
            batch = StepBatch(TOKENS, every, np.zeros(n, np.int32), table, every)
            ours = backend.forward(batch, backend.new_cache(2)).copy()
            backend.close()
            return ours, Reference(config, file).logits(TOKENS)

    return compute


def write(path, rotated, output, divisors):
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD)
    writer.add_value_length(HEAD)
    writer.add_rope_dimension_count(rotated)
    writer.add_layer_norm_rms_eps(1e-5)
    kind = gguf.GGMLQuantizationType.Q8_0

    def matrix(name, rows, columns):
        values = (rng.standard_normal((rows, columns)) * 0.2).astype(np.float32)
        writer.add_tensor(f"{name}.weight", gguf.quants.quantize(values, kind), raw_dtype=kind)

    matrix("token_embd", VOCAB, HIDDEN)
    for layer in range(2):
        for name, rows, columns in (
            ("attn_q", HEADS * HEAD, HIDDEN),
            ("attn_k", KV_HEADS * HEAD, HIDDEN),
            ("attn_v", KV_HEADS * HEAD, HIDDEN),
            ("attn_output", HIDDEN, HEADS * HEAD),
            ("ffn_gate", FFN, HIDDEN),
            ("ffn_up", FFN, HIDDEN),
            ("ffn_down", HIDDEN, FFN),
        ):
            matrix(f"blk.{layer}.{name}", rows, columns)
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(HIDDEN, np.float32))
    writer.add_tensor("output_norm.weight", np.ones(HIDDEN, np.float32))
    if output:
        matrix("output", VOCAB, HIDDEN)
    if divisors is not None:
        writer.add_tensor("rope_freqs.weight", np.array(divisors, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


CHANGES = {
    "b2 partial rotary": {"rotated": 16},
    "b6 divisors of the file": {"divisors": [1, 2, 4, 8] * 4},
    "g5 an output matrix of its own": {"output": True},
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_a_file_changes_is_what_the_reference_makes_of_it(logits, change):
    """And not what the plain model gives, which is much further away than rounding to 8 bits."""
    plain, plain_reference = logits()
    ours, reference = logits(**CHANGES[change])
    size = reference.std()
    assert (plain - plain_reference).std() < 0.04 * size
    assert (ours - reference).std() < 0.04 * size
    assert (ours - plain).std() > 0.15 * size
