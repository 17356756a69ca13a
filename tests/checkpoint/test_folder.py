"""Hugging Face folders: logits of tiny models equal transformers'; what is missing or unknown is refused by name."""

import json
import lzma
from pathlib import Path

import numpy as np
import pytest

from ropewalk.checkpoint.assemble import rope_rows
from ropewalk.checkpoint.base import open_checkpoint
from ropewalk.checkpoint.writer import NewTensor, write_gguf
from ropewalk.errors import CheckpointError, UnsupportedModelError
from ropewalk.model.config import ModelConfig
from ropewalk.model.reference import Reference
from ropewalk.model.rope import rotate
from ropewalk.model.rope_settings import override_rope

DATA = Path(__file__).parents[1] / "data"
FAMILIES = json.loads(lzma.decompress((DATA / "hf-families.json.xz").read_bytes()))


def reference(path) -> Reference:
    checkpoint = open_checkpoint(path)
    return Reference(ModelConfig.from_gguf(checkpoint.metadata, checkpoint.tensors), checkpoint)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(tmp_path, folders, family):
    """B1 for every family: a wrong permutation, split or transpose gives other logits."""
    path = folders.write(tmp_path / "m", folders.parts(family))
    made = FAMILIES[family]
    logits = reference(path).logits(made["ids"])[made["positions"]]
    expected = np.array(made["logits"], np.float32)
    assert np.abs(logits - expected).max() < 2e-5 * np.abs(expected).max()


@pytest.mark.parametrize(
    "family", ["qwen2, yarn", "llama, linear scaling", "llama, llama3 scaling", "deepseek_v3"]
)
def test_scaling_chosen_when_a_model_is_opened_gives_transformers_logits(tmp_path, folders, family):
    """The file says nothing, and `--rope-scaling` what another file's configuration says."""
    parts = folders.parts(family)
    settings = dict(parts.config["rope_parameters"])
    parts.config["rope_parameters"] = {"rope_type": "default", "rope_theta": settings.pop("rope_theta")}
    checkpoint = open_checkpoint(folders.write(tmp_path / "m", parts))
    plain = ModelConfig.from_gguf(checkpoint.metadata, checkpoint.tensors)
    made = FAMILIES[family]
    expected = np.array(made["logits"], np.float32)
    chosen = Reference(override_rope(plain, settings, None), checkpoint)
    for model, is_close in ((chosen, True), (Reference(plain, checkpoint), False)):
        logits = model.logits(made["ids"])[made["positions"]]
        assert (np.abs(logits - expected).max() < 2e-5 * np.abs(expected).max()) == is_close
    without = override_rope(chosen.config, {"rope_type": "none"}, None)
    assert without.attention_scale == pytest.approx(plain.attention_scale, rel=1e-12)


def test_b1_permuted_rows_turn_halves_into_neighbours():
    """Converter with n_head = 4, n_kv = 2: rotating the permuted rows as neighbours permutes the rotated halves."""
    rng = np.random.default_rng(3)
    for n_heads in (4, 2):
        x = rng.standard_normal(n_heads * 8).astype(np.float32)
        angle = 0.7 * 10.0 ** -np.arange(4, dtype=np.float32)
        cos, sin = np.cos(angle), np.sin(angle)
        rows = rope_rows(n_heads, 8)
        halves = rotate(x.reshape(n_heads, 8), cos, sin, "halves").reshape(-1)
        neighbours = rotate(x[rows].reshape(n_heads, 8), cos, sin, "neighbours").reshape(-1)
        assert np.array_equal(neighbours, halves[rows])
    assert rope_rows(1, 8).tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
    assert rope_rows(2, 6, 4).tolist() == [0, 2, 1, 3, 4, 5, 6, 8, 7, 9, 10, 11]


@pytest.mark.parametrize("dtype", ["F16", "BF16"])
def test_halves_stay_what_they_are(tmp_path, folders, dtype):
    parts = folders.parts("llama")
    half = {n: a.astype(np.float16) for n, a in parts.tensors.items()}
    if dtype == "BF16":
        half = {n: (a.view(np.uint32) >> 16).astype(np.uint16) for n, a in parts.tensors.items()}
    parts.tensors = {n: (dtype, a) for n, a in half.items()}
    path = folders.write(tmp_path / "m", parts)
    checkpoint = open_checkpoint(path)
    info = checkpoint.tensors["blk.0.ffn_up.weight"]
    assert info.format.name == dtype
    stored = half["model.layers.0.mlp.up_proj.weight"]
    assert checkpoint.raw("blk.0.ffn_up.weight").tobytes() == stored.tobytes()
    assert checkpoint.tensors["blk.0.attn_norm.weight"].format.name == "F32"
    logits = reference(path).logits(FAMILIES["llama"]["ids"])[FAMILIES["llama"]["positions"]]
    assert np.abs(logits - np.array(FAMILIES["llama"]["logits"])).max() < 0.1


def test_shards_give_the_same_logits(tmp_path, folders):
    parts = folders.parts("llama")
    path = folders.write(tmp_path / "m", parts)
    whole = reference(path).logits([5, 6, 7])
    (path / "model.safetensors").unlink()
    names = sorted(parts.tensors)
    places = {n: f"model-0000{i % 2 + 1}-of-00002.safetensors" for i, n in enumerate(names)}
    for file in set(places.values()):
        folders.save(path / file, {n: parts.tensors[n] for n in names if places[n] == file})
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    assert np.array_equal(reference(path).logits([5, 6, 7]), whole)
    assert open_checkpoint(path).kind == "safetensors in 2 files"


def test_g5_the_output_matrix(tmp_path, folders):
    """Absent: the embedding. There: used even if the configuration says tied, unless it is the embedding again."""
    parts = folders.parts("llama")
    parts.config["tie_word_embeddings"] = True
    with pytest.warns(UserWarning, match="output matrix of its own"):
        checkpoint = open_checkpoint(folders.write(tmp_path / "m", parts))
    assert "output.weight" in checkpoint.tensors
    parts.tensors["lm_head.weight"] = parts.tensors["model.embed_tokens.weight"].copy()
    assert "output.weight" not in open_checkpoint(folders.write(tmp_path / "m", parts)).tensors
    del parts.tensors["lm_head.weight"], parts.config["tie_word_embeddings"]
    path = folders.write(tmp_path / "m", parts)
    checkpoint = open_checkpoint(path)
    assert ModelConfig.from_gguf(checkpoint.metadata, checkpoint.tensors).tied_output


def test_g5_missing_and_unknown_tensors(tmp_path, folders):
    parts = folders.parts("llama")
    parts.tensors["model.layers.0.extra.weight"] = np.ones(3, np.float32)
    with pytest.warns(UserWarning, match=r"'model\.layers\.0\.extra\.weight' is unknown"):
        open_checkpoint(folders.write(tmp_path / "m", parts))
    del parts.tensors["model.layers.0.extra.weight"], parts.tensors["model.layers.1.mlp.up_proj.weight"]
    checkpoint = open_checkpoint(folders.write(tmp_path / "m", parts))
    with pytest.raises(CheckpointError, match=r"blk\.1\.ffn_up\.weight is missing"):
        ModelConfig.from_gguf(checkpoint.metadata, checkpoint.tensors)


def test_internlm2_is_llama_with_q_k_and_v_in_one_matrix(tmp_path, folders):
    """Each KV head is stored after its own heads of q, and its v after it; n_head = 4, n_kv = 2 (B1)."""
    parts = folders.parts("llama")
    expected = reference(folders.write(tmp_path / "llama", parts)).logits([5, 9, 7, 8])
    names = {
        "model.embed_tokens": "model.tok_embeddings", "lm_head": "output", "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm", "self_attn.o_proj": "attention.wo", "mlp.gate_proj": "feed_forward.w1",
        "mlp.up_proj": "feed_forward.w3", "mlp.down_proj": "feed_forward.w2",
    }  # fmt: skip
    tensors = {}
    for name, array in parts.tensors.items():
        for theirs, ours in names.items():
            name = name.replace(theirs, ours)
        tensors[name] = array
    for layer in ("model.layers.0.", "model.layers.1."):
        q, k, v = (tensors.pop(f"{layer}self_attn.{p}_proj.weight").reshape(-1, 8, 32) for p in "qkv")
        fused = [part for i in range(2) for part in (q[2 * i], q[2 * i + 1], k[i], v[i])]
        tensors[f"{layer}attention.wqkv.weight"] = np.concatenate(fused)
    parts.tensors, parts.config["model_type"] = tensors, "internlm2"
    assert np.array_equal(reference(folders.write(tmp_path / "m", parts)).logits([5, 9, 7, 8]), expected)


def test_minicpm_is_granite_by_other_names(tmp_path, folders):
    parts = folders.parts("granite")
    parts.config |= {"embedding_multiplier": 12.0, "residual_multiplier": 0.9 / np.sqrt(2)}
    parts.config |= {"attention_multiplier": 8**-0.5, "logits_scaling": 4.0}
    expected = reference(folders.write(tmp_path / "a", parts)).logits([5, 9, 7, 8])
    for key in [k for k in parts.config if k.endswith(("multiplier", "scaling"))]:
        del parts.config[key]
    parts.config |= {"model_type": "minicpm", "scale_emb": 12, "scale_depth": 0.9, "dim_model_base": 8}
    found = reference(folders.write(tmp_path / "b", parts)).logits([5, 9, 7, 8])
    assert np.abs(found - expected).max() < 1e-5 * np.abs(expected).max()


def test_a_model_for_embeddings(tmp_path, folders):
    """Names without "model.", no output matrix, and a pooling in a folder of its own."""
    parts = folders.parts("qwen3")
    expected = reference(folders.write(tmp_path / "a", parts)).logits([5, 6, 7])
    parts.tensors = {n.removeprefix("model."): a for n, a in parts.tensors.items()}
    path = folders.write(tmp_path / "b", parts)
    assert np.array_equal(reference(path).logits([5, 6, 7]), expected)
    (path / "1_Pooling").mkdir()
    settings = {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}
    (path / "1_Pooling" / "config.json").write_text(json.dumps(settings))
    checkpoint = open_checkpoint(path)
    assert ModelConfig.from_gguf(checkpoint.metadata, checkpoint.tensors).pooling == "last"
    settings["pooling_mode_mean_tokens"] = True
    (path / "1_Pooling" / "config.json").write_text(json.dumps(settings))
    with pytest.raises(UnsupportedModelError, match="several poolings"):
        open_checkpoint(path)


def test_layers_that_guess_further_tokens_are_passed_over(tmp_path, folders):
    parts = folders.parts("glm4_moe")
    plain = reference(folders.write(tmp_path / "a", parts)).logits([5, 6, 7])
    parts.tensors["model.layers.2.self_attn.q_proj.weight"] = np.ones((3, 3), np.float32)
    parts.config.pop("num_nextn_predict_layers", None)
    with pytest.warns(UserWarning, match=r"model\.layers\.2\.self_attn"):
        open_checkpoint(folders.write(tmp_path / "b", parts))
    parts.config["num_nextn_predict_layers"] = 1
    assert np.array_equal(reference(folders.write(tmp_path / "c", parts)).logits([5, 6, 7]), plain)


def test_a_model_that_also_sees_is_read_as_text(tmp_path, folders):
    parts = folders.parts("gemma3")
    plain = reference(folders.write(tmp_path / "a", parts)).logits([5, 6, 7])
    parts.config = {"model_type": "gemma3", "text_config": parts.config, "vision_config": {}}
    parts.tensors = {f"language_model.{n}": a for n, a in parts.tensors.items()}
    parts.tensors["vision_tower.x.weight"] = np.ones((2, 2), np.float32)
    path = folders.write(tmp_path / "b", parts)
    with pytest.warns(UserWarning, match="1 tensors of other senses are not used"):
        seeing = reference(path)
    assert np.array_equal(seeing.logits([5, 6, 7]), plain)


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        ({"model_type": "lama"}, UnsupportedModelError, "'lama' is not supported; the nearest are llama"),
        ({"model_type": None}, UnsupportedModelError, "model_type"),
        ({"hidden_act": "relu"}, UnsupportedModelError, "the activation 'relu'"),
        ({"rope_parameters": {"rope_type": "spiral"}}, UnsupportedModelError, "rope_type = 'spiral'"),
        ({"quantization_config": {"quant_method": "hqq"}}, UnsupportedModelError, "hqq"),
        ({"num_hidden_layers": None}, CheckpointError, "num_hidden_layers"),
        ({"hidden_size": "32"}, CheckpointError, "hidden_size is '32'"),
        ({"num_key_value_heads": 3}, CheckpointError, "4 heads"),
        ({"num_key_value_heads": 4}, CheckpointError, r"k_proj\.weight has shape \[16, 32\]"),
        ({"partial_rotary_factor": 1.5}, CheckpointError, "1.5"),
    ],
)
def test_a_configuration_that_cannot_be(tmp_path, folders, changes, kind, words):
    parts = folders.parts("llama")
    parts.config |= changes
    with pytest.raises(kind, match=words):
        open_checkpoint(folders.write(tmp_path / "m", parts))


@pytest.mark.parametrize(
    ("family", "changes", "kind", "words"),
    [
        (
            "gemma3",
            {"use_bidirectional_attention": True},
            UnsupportedModelError,
            "use_bidirectional_attention = True",
        ),
        ("qwen2", {"is_causal": False}, UnsupportedModelError, "is_causal = False"),
        ("gpt_oss", {"swiglu_limit": 10.0}, UnsupportedModelError, r"swiglu_limit = 10\.0 .*7\.0"),
        ("gpt_oss", {"swiglu_alpha": 1.0}, UnsupportedModelError, r"swiglu_alpha = 1\.0"),
        ("gemma3", {"query_pre_attn_scalar": -1}, CheckpointError, "query_pre_attn_scalar"),
        (
            "smollm3",
            {"no_rope_layers": None, "no_rope_layer_interval": 5},
            UnsupportedModelError,
            "interval = 5",
        ),
        ("deepseek_v3", {"rope_interleave": False}, UnsupportedModelError, "rope_interleave"),
        ("deepseek_v2", {"topk_method": "best"}, UnsupportedModelError, "topk_method = 'best'"),
        ("qwen2", {"layer_types": ["chunked_attention", "full_attention"]}, UnsupportedModelError, "chunked"),
        ("qwen2", {"layer_types": [["full_attention"]] * 2}, UnsupportedModelError, "layer_types"),
        ("llama", {"head_dim": 1}, CheckpointError, "1 dimensions of a head are rotated"),
        ("llama", {"rope_parameters": {"rope_type": []}}, UnsupportedModelError, "rope_type"),
        ("llama", {"rope_parameters": "yarn"}, CheckpointError, "rope_parameters is 'yarn'"),
        ("llama", {"rope_scaling": 4.0}, CheckpointError, r"rope_scaling is 4\.0"),
        ("llama", {"text_config": "x"}, CheckpointError, "text_config"),
    ],
)
def test_what_would_be_computed_otherwise_is_refused(tmp_path, folders, family, changes, kind, words):
    """Some of these were read and left aside: another model's text came out, or an error from inside."""
    parts = folders.parts(family)
    parts.config |= changes
    with pytest.raises(kind, match=words):
        open_checkpoint(folders.write(tmp_path / "m", parts))


def test_longrope_of_a_model_that_was_first_trained_on_one_position(tmp_path, folders):
    """log(1) is 0; the factor was divided by it."""
    parts = folders.parts("phi3, longrope")
    parts.config["rope_parameters"] = {
        **parts.config["rope_parameters"],
        "original_max_position_embeddings": 1,
    }
    metadata = open_checkpoint(folders.write(tmp_path / "m", parts)).metadata
    assert metadata["phi3.rope.scaling.attn_factor"] == 1.0


def test_what_the_makers_suggest_for_drawing_is_kept(tmp_path, folders):
    """Under GGUF's keys, through a file of float32; not where they suggest not to draw at all."""
    parts, options = folders.parts("llama"), {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": None}
    path = folders.write(tmp_path / "m", parts, generation_config=options | {"repetition_penalty": 1})
    with open_checkpoint(path) as checkpoint:
        write_gguf(tmp_path / "m.gguf", checkpoint.metadata, [], [])
    kept = {k: v for k, v in open_checkpoint(tmp_path / "m.gguf").metadata.items() if "sampling" in k}
    names = ("temp", "top_k", "top_p", "penalty_repeat")
    assert kept == {
        f"general.sampling.{n}": pytest.approx(v) for n, v in zip(names, (0.6, 20, 0.95, 1.0), strict=True)
    }
    path = folders.write(tmp_path / "m", parts, generation_config=options | {"do_sample": False})
    assert not any("sampling" in key for key in open_checkpoint(path).metadata)
    path = folders.write(tmp_path / "m", parts, generation_config={"top_p": "0.9"})
    with pytest.raises(
        CheckpointError, match=r"generation_config\.json: top_p is '0\.9'; allowed: a number from 0 to 1"
    ):
        open_checkpoint(path)


def test_what_is_no_model_folder(tmp_path, folders):
    with pytest.raises(CheckpointError, match=r"no config\.json; it is empty"):
        open_checkpoint(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="pickled PyTorch"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read"):
        open_checkpoint(tmp_path)
    path = folders.write(tmp_path / "m", folders.parts("llama"))
    (path / "model.safetensors").rename(path / "a.safetensors")
    assert open_checkpoint(path).paths[0].name == "a.safetensors"
    (path / "b.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"several files.*a\.safetensors, b\.safetensors"):
        open_checkpoint(path)
    assert open_checkpoint(path / "a.safetensors").kind == "safetensors"
    (path / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"neither tokenizer\.json nor tokenizer\.model"):
        open_checkpoint(path / "a.safetensors")


def test_a_folder_with_one_gguf_model_is_that_model(tmp_path, craft):
    (tmp_path / "m.gguf").write_bytes(craft.every_kind())
    assert open_checkpoint(tmp_path).path.name == "m.gguf"
    (tmp_path / "n.gguf").write_bytes(craft.every_kind())
    with pytest.raises(CheckpointError, match=r"several GGUF models.*m\.gguf, n\.gguf"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "family", ["mixtral", "gpt_oss", "gemma3", "phi3, longrope", "llama, llama3 scaling"]
)
def test_a_folder_written_as_gguf_is_the_same_model(tmp_path, folders, family):
    """Metadata, experts, sinks, windows and rotary factors go through a file of float32."""
    path = folders.write(tmp_path / "m", folders.parts(family))
    ids = FAMILIES[family]["ids"]
    with open_checkpoint(path) as checkpoint:
        tensors = [NewTensor(i.name, i.shape, i.format) for i in checkpoint.tensors.values()]
        data = ([checkpoint.raw(name)] for name in checkpoint.tensors)
        write_gguf(tmp_path / "m.gguf", checkpoint.metadata, tensors, data)
    assert np.array_equal(reference(tmp_path / "m.gguf").logits(ids), reference(path).logits(ids))
