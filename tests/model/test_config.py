"""Configurations are read exactly, or refused by the name of what is wrong."""

import math
from types import SimpleNamespace

import numpy as np
import pytest

from ropewalk.errors import CheckpointError, UnsupportedModelError
from ropewalk.model.config import ModelConfig, RopeConfig

ALL = ("llama", "qwen2", "gemma3")


def test_llama_row(tiny):
    config = tiny("llama").config()
    assert config.name == "tiny"
    assert (config.n_layers, config.hidden_size, config.ffn_size, config.vocab_size) == (7, 24, 40, 50)
    assert (config.n_heads, config.n_kv_heads, config.head_dim, config.kv_group) == (6, 2, 8, 3)
    assert config.rope == (RopeConfig(10000.0, 8, "neighbours", False),)
    assert config.layer_rope == (0,) * 7
    assert config.layer_window == (0,) * 7
    assert (config.activation, config.embedding_scale) == ("silu", 1.0)
    assert config.attention_scale == 1 / math.sqrt(8)
    assert not (config.qkv_bias or config.qk_norm or config.post_norms)
    assert config.tied_output
    assert (config.attention_softcap, config.logit_softcap) == (0.0, 0.0)


def test_qwen2_row(tiny):
    config = tiny("qwen2").config()
    assert config.rope == (RopeConfig(10000.0, 8, "halves", False),)
    assert config.qkv_bias
    assert config.activation == "silu"


def test_gemma3_row(tiny):
    """Every sixth layer sees everything with the global base, the others have a window and the local base."""
    config = tiny("gemma3", {"rope.freq_base": None}).config()
    assert config.layer_window == (5, 5, 5, 5, 5, 0, 5)
    assert config.layer_rope == (1, 1, 1, 1, 1, 0, 1)
    assert config.rope == (RopeConfig(1e6, 8, "halves"), RopeConfig(1e4, 8, "halves"))
    assert config.embedding_scale == math.sqrt(24)
    assert config.qk_norm and config.post_norms and not config.qkv_bias
    assert config.activation == "gelu_tanh"


def test_gemma3_file_may_state_its_windows(tiny):
    config = tiny("gemma3", {"attention.sliding_window_pattern": 2, "rope.freq_base_swa": 500.0}).config()
    assert config.layer_window == (5, 0, 5, 0, 5, 0, 5)
    assert config.rope[1].base == 500.0
    local = np.array([True, True, False, False, True, False, False])
    config = tiny("gemma3", {"attention.sliding_window_pattern": local}).config()
    assert config.layer_window == (5, 5, 0, 0, 5, 0, 0)
    config = tiny("gemma3", {"attention.sliding_window": 0}).config()
    assert config.layer_window == config.layer_rope == (0,) * 7


def test_scale_of_the_largest_gemma3(tiny):
    """Its 62-layer checkpoint divides by the square root of hidden / heads, not of head_dim."""
    model = tiny("gemma3", {"block_count": 62, "embedding_length": 24, "attention.head_count": 6})
    for layer in range(7, 62):
        names = [name for name in model.tensors if name.startswith("blk.0.")]
        model.tensors |= {name.replace("blk.0.", f"blk.{layer}."): model.tensors[name] for name in names}
    assert model.config().attention_scale == 1 / math.sqrt(24 / 6)


def test_explicit_head_dim_b3():
    """B3: hidden 5120, 32 heads, head_dim 128, as in Mistral Nemo: the q projection is 4096 wide."""
    keys = {
        "block_count": 1,
        "context_length": 1024,
        "embedding_length": 5120,
        "feed_forward_length": 14336,
        "attention.head_count": 32,
        "attention.head_count_kv": 8,
        "attention.key_length": 128,
        "attention.value_length": 128,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 1e6,
        "rope.dimension_count": 128,
    }
    metadata = {f"llama.{k}": v for k, v in keys.items()} | {"general.architecture": "llama"}
    shapes = {
        "token_embd.weight": (131072, 5120),
        "output.weight": (131072, 5120),
        "output_norm.weight": (5120,),
        "blk.0.attn_norm.weight": (5120,),
        "blk.0.attn_q.weight": (4096, 5120),
        "blk.0.attn_k.weight": (1024, 5120),
        "blk.0.attn_v.weight": (1024, 5120),
        "blk.0.attn_output.weight": (5120, 4096),
        "blk.0.ffn_norm.weight": (5120,),
        "blk.0.ffn_gate.weight": (14336, 5120),
        "blk.0.ffn_up.weight": (14336, 5120),
        "blk.0.ffn_down.weight": (5120, 14336),
    }
    tensors = {name: SimpleNamespace(shape=shape) for name, shape in shapes.items()}
    config = ModelConfig.from_gguf(metadata, tensors)
    assert config.head_dim == 128
    assert config.rope[0].width == 128
    assert config.attention_scale == 1 / math.sqrt(128)
    tensors["blk.0.attn_q.weight"] = SimpleNamespace(shape=(5120, 5120))
    with pytest.raises(
        CheckpointError, match=r"blk\.0\.attn_q\.weight has shape \[5120, 5120\].*\[4096, 5120\]"
    ):
        ModelConfig.from_gguf(metadata, tensors)


def test_head_dim_defaults_to_hidden_over_heads(tiny):
    model = tiny("llama", {"attention.key_length": None, "attention.value_length": None})
    with pytest.raises(CheckpointError, match=r"attn_q\.weight has shape \[48, 24\].*\[24, 24\]"):
        model.config()  # 24 / 6 = 4, so six heads make 24 rows


def test_partial_rotary_width_b2(tiny):
    assert tiny("llama", {"rope.dimension_count": 4}).config().rope[0].width == 4


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("block_count", 0),
        ("block_count", 2**40),
        ("block_count", -1),
        ("block_count", 7.0),
        ("block_count", True),
        ("block_count", "7"),
        ("block_count", None),
        ("embedding_length", 0),
        ("embedding_length", 2**63),
        ("embedding_length", None),
        ("feed_forward_length", 0),
        ("context_length", 0),
        ("context_length", 2**31),
        ("attention.head_count", 0),
        ("attention.head_count", None),
        ("attention.head_count_kv", 0),
        ("attention.head_count_kv", 4),
        ("attention.head_count_kv", 12),
        ("attention.key_length", 0),
        ("attention.key_length", 2**40),
        ("attention.layer_norm_rms_epsilon", 0.0),
        ("attention.layer_norm_rms_epsilon", -1e-6),
        ("attention.layer_norm_rms_epsilon", math.nan),
        ("attention.layer_norm_rms_epsilon", math.inf),
        ("attention.layer_norm_rms_epsilon", None),
        ("attention.scale", 0.0),
        ("attn_logit_softcapping", -1.0),
        ("final_logit_softcapping", math.nan),
        ("rope.freq_base", 0.0),
        ("rope.freq_base", math.nan),
        ("rope.dimension_count", 0),
        ("rope.dimension_count", 3),
        ("rope.dimension_count", 10),
        ("vocab_size", 49),
        ("vocab_size", 2**40),
    ],
)
def test_absurd_value_is_refused_by_its_key(tiny, key, value):
    with pytest.raises(CheckpointError, match=f"llama.{key}".replace(".", r"\.")):
        tiny("llama", {key: value}).config()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rope.scaling.type", "surprise"),
        ("rope.scaling.type", 5),
        ("rope.scaling.yarn_beta_fast", 32.0),
        ("rope.dimension_sections", np.array([16, 24, 24, 0])),
        ("attention.causal", False),
        ("attention.clamp_kqv", 8.0),
        ("use_parallel_residual", True),
        ("attention.value_length", 4),
        ("feed_forward_length", np.array([40, 40, 40, 20, 40, 40, 40])),
    ],
)
def test_feature_not_implemented_is_refused_by_its_key_and_value(tiny, key, value):
    shown = "" if isinstance(value, np.ndarray) else f" = {value!r}"
    with pytest.raises(UnsupportedModelError, match=f"llama.{key}{shown}".replace(".", r"\.")):
        tiny("llama", {key: value}).config()


def test_neutral_values_of_those_features_are_fine(tiny):
    neutral = {
        "rope.scaling.type": "none",
        "rope.scaling.factor": 1.0,
        "expert_count": 0,
        "attention.causal": True,
        "vocab_size": 50,
        "logit_scale": 0.0,
        "residual_scale": 0.0,
        "embedding_scale": 0.0,
        "attention.sliding_window": 0,
        "feed_forward_length": np.full(7, 40),
    }
    assert tiny("llama", neutral).config() == tiny("llama").config()


@pytest.mark.parametrize("architecture", ["mamba", "", None, 3, "llama4", "x" * 10_000])
def test_unknown_architecture_is_refused_with_the_known_ones(tiny, architecture):
    model = tiny("llama")
    model.metadata["general.architecture"] = architecture
    with pytest.raises(UnsupportedModelError, match="supported are llama, qwen2, qwen3, gemma, ") as error:
        model.config()
    assert len(str(error.value)) < 500


def test_refusal_of_an_architecture_says_why_or_what_may_be_meant(tiny):
    model = tiny("llama")
    for architecture, reason in (
        ("mamba2", "it needs state spaces, which is not implemented"),
        ("qwen2-moe", "did you mean 'qwen2moe'"),
    ):
        model.metadata["general.architecture"] = architecture
        with pytest.raises(UnsupportedModelError, match=reason):
            model.config()


def test_unknown_key_is_named_in_a_warning(tiny):
    with pytest.warns(UserWarning, match=r"llama\.mystery is unknown and not used"):
        tiny("llama", {"mystery": 1}).config()


@pytest.mark.parametrize("architecture", ALL)
def test_every_missing_tensor_is_refused_by_name_g5(tiny, architecture):
    for name in list(tiny(architecture).tensors):
        if name == "blk.0.attn_q.bias" and architecture == "llama":
            continue
        with pytest.raises(CheckpointError, match=f"tensor {name} is missing".replace(".", r"\.")):
            tiny(architecture, **{name: None}).config()


def test_tied_and_separate_output_g5(tiny):
    assert tiny("qwen2").config().tied_output
    separate = {"output.weight": np.zeros((50, 24), np.float32)}
    assert not tiny("qwen2", **separate).config().tied_output
    with pytest.raises(CheckpointError, match=r"output\.weight has shape \[49, 24\]"):
        tiny("qwen2", **{"output.weight": np.zeros((49, 24), np.float32)}).config()


def test_rope_freqs_are_taken_into_the_config_g5(tiny):
    config = tiny("llama", **{"rope_freqs.weight": np.ones(4, np.float32)}).config()
    assert config.rope == (RopeConfig(10000.0, 8, "neighbours", True),)
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight has shape \[8\].*\[4\]"):
        tiny("llama", **{"rope_freqs.weight": np.ones(8, np.float32)}).config()


@pytest.mark.parametrize("name", ["mystery.weight", "blk.3.mystery.weight", "blk.9.attn_q.weight", "blk"])
def test_unknown_tensor_is_named_in_a_warning_g5(tiny, name):
    with pytest.warns(UserWarning, match=f"tensor {name} is unknown and not used".replace(".", r"\.")):
        tiny("llama", **{name: np.zeros(3, np.float32)}).config()


@pytest.mark.parametrize(
    "name",
    [
        "blk.3.attn_norm.bias",
        "blk.0.attn_q_norm.weight",
        "blk.1.ffn_gate_exps.weight",
        "rope.bias",
        "blk.0.x.scale",
    ],
)
def test_tensor_that_would_change_the_result_is_refused_g5(tiny, name):
    with pytest.raises(UnsupportedModelError, match=f"tensor {name} is not supported".replace(".", r"\.")):
        tiny("llama", **{name: np.zeros(3, np.float32)}).config()


def test_llama_bias_is_all_or_nothing(tiny):
    biases = {
        f"blk.{n}.attn_{p}.bias": np.zeros(48 if p == "q" else 16, np.float32)
        for n in range(7)
        for p in "qkv"
    }
    assert tiny("llama", **biases).config().qkv_bias
    assert not tiny("llama", **biases).config().biases - {"attn_q", "attn_k", "attn_v"}
    del biases["blk.4.attn_v.bias"]
    with pytest.raises(CheckpointError, match=r"tensor blk\.4\.attn_v\.bias is missing"):
        tiny("llama", **biases).config()


def test_vocabulary_must_match_the_embedding(tiny):
    model = tiny("llama")
    model.metadata["tokenizer.ggml.tokens"] = ["a"] * 51
    with pytest.raises(CheckpointError, match=r"tokenizer\.ggml\.tokens has 51 entries.*50 rows"):
        model.config()
    model.tensors["token_embd.weight"] = np.zeros(50, np.float32)
    with pytest.raises(CheckpointError, match=r"token_embd\.weight has shape \[50\]"):
        model.config()


def test_layers_that_guess_further_tokens_are_passed_over(tiny):
    """Their tensors may be of any kind: nothing of them is read."""
    extra = {"blk.6.nextn.eh_proj.weight": np.zeros((4, 4), np.float32)}
    config = tiny("llama", {"nextn_predict_layers": 1}, **extra).config()
    assert config.n_layers == 6
    with pytest.raises(CheckpointError, match=r"llama\.nextn_predict_layers = 7"):
        tiny("llama", {"nextn_predict_layers": 7}).config()


@pytest.mark.parametrize(
    ("key", "value"), [("embedding_scale", "x"), ("residual_scale", -1.0), ("logit_scale", math.inf)]
)
def test_absurd_scales_are_refused_by_their_key(tiny, key, value):
    with pytest.raises(CheckpointError, match=f"llama.{key}".replace(".", r"\.")):
        tiny("llama", {key: value}).config()
    config = tiny("llama", {key: 0.5}).config()
    assert getattr(config, key) == 0.5


def test_a_family_that_needs_scales_is_refused_without(tiny):
    model = tiny("llama")
    model.metadata = {
        key.replace("llama.", "minicpm."): "minicpm" if value == "llama" else value
        for key, value in model.metadata.items()
    }
    with pytest.raises(CheckpointError, match=r"minicpm\.embedding_scale is missing"):
        model.config()
