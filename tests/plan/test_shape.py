"""Shapes of models: from a configuration, to the parameter; from a GGUF file; from keys alone; or refused by name."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from ropewalk.errors import CheckpointError
from ropewalk.plan import LayerShape, cache_type, shape_of_config, shape_of_gguf, shape_of_hf, weight_type
from ropewalk.plan import token_bytes as plan_token_bytes

CASES = json.loads((Path(__file__).parents[1] / "data" / "parameters.json").read_text())
SIZES = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 100}


@pytest.mark.parametrize("name", CASES)
def test_parameters_are_those_of_transformers(name):
    shape = shape_of_config(CASES[name]["config"], name)
    assert shape.weights.total.count == CASES[name]["parameters"]
    assert shape.weights.total.n_bytes == 2 * CASES[name]["parameters"]


def test_published_totals():
    assert CASES["Llama 2 7B"]["parameters"] == 6_738_415_616
    assert CASES["Llama 3 8B"]["parameters"] == 8_030_261_248
    mixtral = shape_of_config(CASES["Mixtral 8x7B"]["config"], "Mixtral")
    assert mixtral.weights.total.count == 46_702_792_704
    assert mixtral.weights.used_count() + mixtral.weights.embedding.count == pytest.approx(
        12_879_925_248, rel=1e-9
    )


PUBLISHED = {
    "mistral": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 32000,
        "sliding_window": 4096,
    },
    "gemma3_text": {
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "num_hidden_layers": 26,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "vocab_size": 262144,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
    },
    "deepseek_v2": {
        "hidden_size": 5120,
        "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
        "num_hidden_layers": 60,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "n_routed_experts": 160,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "vocab_size": 102400,
    },
}
"""Mistral 7B, Gemma 3 1B and DeepSeek V2: what counts of their configurations."""


@pytest.mark.parametrize(
    ("family", "total", "written_out", "token_bytes"),
    [
        (
            "mistral",
            7_241_732_096,
            32 * (10 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 4096) + 8000 * 2**15,
            131_072,
        ),
        (
            "gemma3_text",
            999_885_952,
            26 * (10 * 1152 * 256 + 512 + 3 * 1152 * 6912 + 4 * 1152) + 2**18 * 1152,
            26_624,
        ),
        (
            "deepseek_v2",
            235_741_434_880,
            60
            * (
                1536 * (5120 + 1 + 128 * 192)
                + 5120 * 576
                + 512 * (1 + 128 * 256)
                + 128 * 128 * 5120
                + 2 * 5120
            )
            + 3 * 5120 * 12288
            + 59 * (5120 * 160 + 3 * 5120 * 1536 * 162)
            + 2 * 102400 * 5120,
            69_120,
        ),
    ],
)
def test_totals_of_whole_models_written_out(family, total, written_out, token_bytes):
    """Attention, feed-forward and norms of all layers, the two large matrices or the one, and the last norm."""
    config = PUBLISHED[family] | {"model_type": family}
    shape = shape_of_config(config, family)
    assert shape.weights.total.count == total == written_out + config["hidden_size"]
    assert plan_token_bytes(shape, cache_type("float16")) == token_bytes


def test_windows_of_a_configuration():
    def windows(**changes):
        return [layer.window for layer in shape_of_config(SIZES | changes, "m").layers]

    assert windows() == [0] * 4
    assert windows(sliding_window=8) == [8] * 4
    assert windows(sliding_window=8, sliding_window_pattern=2) == [8, 0, 8, 0]
    assert windows(sliding_window=8, use_sliding_window=False) == [0] * 4
    assert windows(sliding_window=8, use_sliding_window=True, max_window_layers=3) == [0, 0, 0, 8]
    kinds = ["full_attention", "sliding_attention"] * 2
    assert windows(sliding_window=8, layer_types=kinds) == [0, 8, 0, 8]
    assert windows(sliding_window=None) == [0] * 4


def test_latent_attention_of_a_configuration():
    shape = shape_of_config(CASES["deepseek_v3"]["config"], "m")
    assert shape.layers[0] == LayerShape(6, 6, 40, 24, latent=56)
    assert (shape.weights.n_experts, shape.weights.n_used) == (8, 2)


def test_a_folder_its_dtype_and_its_nested_text_model(tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps({"text_config": SIZES | {"dtype": "float32"}, "model_type": "x"})
    )
    shape = shape_of_hf(tmp_path)
    assert shape.weight_type == "F32"
    assert len(shape.layers) == 4
    assert shape_of_hf(tmp_path / "config.json", weight_type("Q8_0")).weight_type == "Q8_0"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": None}, "config.json has no 'hidden_size': without it nothing can be planned"),
        ({"num_hidden_layers": None}, "has no 'num_hidden_layers'"),
        ({"vocab_size": None}, "has no 'vocab_size'"),
        ({"hidden_size": -64}, "hidden_size = -64; it must be an integer from 1"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers = 1000000000"),
        ({"num_attention_heads": "4"}, "num_attention_heads = '4'"),
        ({"num_key_value_heads": 3}, "num_key_value_heads = 3 does not divide num_attention_heads = 4"),
        (
            {"num_local_experts": 4, "num_experts_per_tok": 5, "intermediate_size": 8},
            "num_experts_per_tok = 5",
        ),
        ({"kv_lora_rank": 8}, "has no 'qk_rope_head_dim'"),
    ],
)
def test_a_configuration_without_what_is_needed_is_refused(changes, message):
    with pytest.raises(CheckpointError, match=message):
        shape_of_config(SIZES | changes, "m")


@pytest.mark.parametrize(
    ("text", "message"), [("{", "is not JSON"), ("[1]", "is not a JSON object"), ("[" * 10**5, "is not JSON")]
)
def test_files_that_are_no_configuration(tmp_path, text, message):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(CheckpointError, match=message):
        shape_of_hf(path)
    with pytest.raises(CheckpointError, match="cannot be read"):
        shape_of_hf(tmp_path / "missing.json")


def fake_gguf(metadata, **tensors):
    infos = {
        name.replace("__", "."): SimpleNamespace(
            size=int(np.prod(shape)),
            n_bytes=2 * int(np.prod(shape)),
            shape=shape,
            format=SimpleNamespace(name="F16"),
        )
        for name, shape in tensors.items()
    }
    return SimpleNamespace(metadata=metadata, tensors=infos, path=Path("fake.gguf"))


def keys(**changes):
    values = {
        "block_count": 3,
        "embedding_length": 64,
        "attention.head_count": 4,
        "context_length": 256,
    } | {key.replace("__", "."): value for key, value in changes.items()}
    return {
        "general.architecture": "strange",
        **{f"strange.{k}": v for k, v in values.items() if v is not None},
    }


def test_an_architecture_that_cannot_be_run_is_planned_for_by_its_keys():
    file = fake_gguf(
        keys(attention__head_count_kv=np.array([4, 2, 1], np.int32), expert_count=8, expert_used_count=2),
        token_embd__weight=(100, 64),
        output__weight=(100, 64),
        blk__0__ffn_up_exps__weight=(8, 32, 64),
        blk__0__attn_q__weight=(64, 64),
    )
    shape = shape_of_gguf(file)
    assert [layer.n_kv_heads for layer in shape.layers] == [4, 2, 1]
    assert {layer.key_dim for layer in shape.layers} == {16}
    assert shape.context_length == 256
    assert shape.name == "fake.gguf"
    assert "by its keys alone" in shape.notes[0] and "strange" in shape.notes[0]
    w = shape.weights
    assert (w.embedding.count, w.output.count, w.experts.count, w.dense.count) == (6400, 6400, 16384, 4096)
    assert w.read_bytes(1) == 2 * (6400 + 4096 + 16384 / 4)


def test_latent_attention_of_a_gguf():
    shape = shape_of_gguf(
        fake_gguf(keys(attention__kv_lora_rank=512, rope__dimension_count=64), token_embd__weight=(100, 64))
    )
    assert shape.layers[0].latent == 576
    assert shape.weights.output.count == 6400 and shape.weights.embedding.count == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_count": None}, r"strange\.block_count is missing: without it nothing can be planned"),
        ({"attention__head_count": None}, r"strange\.attention\.head_count is missing"),
        ({"block_count": -3}, r"strange\.block_count = -3 is not allowed"),
        ({"block_count": 10**6}, r"strange\.block_count = 1000000 is not allowed; at most 4096"),
    ],
)
def test_keys_that_are_missing_or_absurd(changes, message):
    with pytest.raises(CheckpointError, match=message):
        shape_of_gguf(fake_gguf(keys(**changes), token_embd__weight=(100, 64)))
