"""Tiny models of every family: metadata and random weights in memory, standing in for a file."""

import numpy as np
import pytest

from ropewalk.model.config import ModelConfig
from ropewalk.model.shapes import tensor_shapes

SIZES = {
    "block_count": 7,
    "context_length": 128,
    "embedding_length": 24,
    "feed_forward_length": 40,
    "attention.head_count": 6,
    "attention.head_count_kv": 2,
    "attention.key_length": 8,
    "attention.value_length": 8,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "rope.freq_base": 10000.0,
}
EXTRA = {"llama": {}, "qwen2": {}, "gemma3": {"attention.sliding_window": 5}}
BIASED = {"qwen2"}
NORMED = {"gemma3"}


class Tiny:
    """A checkpoint in memory. `tensors` maps names to arrays, whose `.shape` is all that the config reads."""

    def __init__(self, architecture, changes=None, vocab_size=50, **tensor_changes):
        keys = SIZES | EXTRA[architecture] | (changes or {})
        self.metadata = {"general.architecture": architecture, "general.name": "tiny"}
        self.metadata |= {f"{architecture}.{k}": v for k, v in keys.items() if v is not None}
        self.tensors = self._weights(architecture, SIZES | EXTRA[architecture], vocab_size)
        self.tensors |= {k: v for k, v in tensor_changes.items() if v is not None}
        for name in [k for k, v in tensor_changes.items() if v is None]:
            del self.tensors[name]

    @staticmethod
    def _weights(architecture, keys, vocab_size):
        rng = np.random.default_rng(7)
        hidden, ffn, head = keys["embedding_length"], keys["feed_forward_length"], 8
        q, kv = head * keys["attention.head_count"], head * keys["attention.head_count_kv"]
        shapes = {"token_embd.weight": (vocab_size, hidden)}
        for n in range(keys["block_count"]):
            layer = {
                "attn_norm.weight": (hidden,),
                "attn_q.weight": (q, hidden),
                "attn_k.weight": (kv, hidden),
                "attn_v.weight": (kv, hidden),
                "attn_output.weight": (hidden, q),
                "ffn_norm.weight": (hidden,),
                "ffn_gate.weight": (ffn, hidden),
                "ffn_up.weight": (ffn, hidden),
                "ffn_down.weight": (hidden, ffn),
            }
            if architecture in BIASED:
                layer |= {"attn_q.bias": (q,), "attn_k.bias": (kv,), "attn_v.bias": (kv,)}
            if architecture in NORMED:
                layer |= {"attn_q_norm.weight": (head,), "attn_k_norm.weight": (head,)}
                layer |= {"post_attention_norm.weight": (hidden,), "post_ffw_norm.weight": (hidden,)}
            shapes |= {f"blk.{n}.{name}": shape for name, shape in layer.items()}
        shapes["output_norm.weight"] = (hidden,)
        scale = {1: 1.0, 2: 0.3}
        return {
            name: (rng.standard_normal(shape) * scale[len(shape)]).astype(np.float32)
            for name, shape in shapes.items()
        }

    def tensor(self, name):
        return self.tensors[name]

    def config(self):
        config = ModelConfig.from_gguf(self.metadata, self.tensors)
        assert set(tensor_shapes(config)) <= set(self.tensors)
        return config


@pytest.fixture
def tiny():
    return Tiny
