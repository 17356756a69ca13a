"""Adapters from files: PEFT's folders against transformers' logits, GGUF files, and broken ones."""

import json
import runpy
import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ropewalk.adapters import open_loras
from ropewalk.checkpoint.base import open_checkpoint
from ropewalk.errors import CheckpointError, InvalidParameterError, ModelNotFoundError, UnsupportedModelError
from ropewalk.model.config import ModelConfig
from ropewalk.model.reference import Reference

byte_level_tokenizer = runpy.run_path(str(Path(__file__).parent / "conftest.py"))["byte_level_tokenizer"]
ARCHIVE = np.load(Path(__file__).parents[1] / "data" / "lora.npz")


@pytest.fixture
def unpack(tmp_path):
    """A function from a model's name to the folder that has its files, in `model` and in `adapter`."""

    def unpacked(name):
        for entry in ARCHIVE.files:
            owner, _, path = entry.partition("/")
            if owner == name and "/" in path:
                target = tmp_path / path
                target.parent.mkdir(exist_ok=True)
                target.write_bytes(ARCHIVE[entry].tobytes())
        (tmp_path / "model" / "tokenizer.json").write_text(json.dumps(byte_level_tokenizer(64)))
        return tmp_path

    return unpacked


class Merged:
    def __init__(self, checkpoint, lora):
        self._checkpoint, self._lora = checkpoint, lora
        self.tensors = checkpoint.tensors

    def tensor(self, name):
        weight = self._checkpoint.tensor(name)
        if name in self._lora.matrices:
            a, b = self._lora.matrices[name]
            weight = weight + b @ a
        return weight


def opened(folder, path=None):
    checkpoint = open_checkpoint(folder / "model")
    config = ModelConfig.from_gguf(checkpoint.metadata, checkpoint.tensors)
    return checkpoint, config, open_loras({"own": path or folder / "adapter"}, config, checkpoint)["own"]


@pytest.mark.parametrize("name", ["llama", "phi3", "gpt2"])
def test_a_folder_of_peft_gives_the_logits_of_transformers(unpack, name):
    """B1 too: q and k of llama are rearranged for the other rotary layout, and so are their adapters."""
    checkpoint, config, lora = opened(unpack(name))
    with checkpoint:
        logits = Reference(config, Merged(checkpoint, lora)).logits(ARCHIVE[f"{name}/ids"])
        plain = Reference(config, checkpoint).logits(ARCHIVE[f"{name}/ids"])
    expected = ARCHIVE[f"{name}/logits"]
    assert np.abs(logits - expected).max() < 1e-4 * np.abs(expected).max()
    assert np.abs(plain - expected).max() > 0.01 * np.abs(expected).max()


def as_gguf(path, lora, architecture="llama", alpha=None, **fields):
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_type(fields.get("type", "adapter"))
    writer.add_string("adapter.type", fields.get("kind", "lora"))
    writer.add_float32("adapter.lora.alpha", alpha or 0.0)
    for name, (a, b) in lora.matrices.items():
        writer.add_tensor(name + ".lora_a", a)
        if name != fields.get("without"):
            writer.add_tensor(name + ".lora_b", b)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_gguf_file_has_the_same_matrices_and_digest(unpack):
    folder = unpack("llama")
    checkpoint, _, lora = opened(folder)
    with checkpoint:
        _, _, plain = opened(folder, as_gguf(folder / "a.gguf", lora))  # alpha 0: as it stands
        assert plain.matrices.keys() == lora.matrices.keys() and plain.digest == lora.digest
        _, _, scaled = opened(folder, as_gguf(folder / "b.gguf", lora, alpha=6.0))
    for name, (a, b) in lora.matrices.items():
        assert np.array_equal(scaled.matrices[name][1], b * np.float32(6.0 / len(a)))
    assert scaled.digest != lora.digest


@pytest.mark.parametrize(
    ("fields", "said"),
    [({"type": "model"}, "is no LoRA adapter: general.type is 'model'"),
     ({"kind": "control"}, "adapter.type 'control'"),
     ({"architecture": "qwen2"}, "is for the architecture 'qwen2'; the model's is 'llama'"),
     ({"without": "blk.0.attn_q.weight"}, r"blk\.0\.attn_q\.weight has only one of its two halves")],
)  # fmt: skip
def test_a_gguf_file_that_is_something_else(unpack, fields, said):
    folder = unpack("llama")
    _, _, lora = opened(folder)
    with pytest.raises(CheckpointError, match=said):
        opened(folder, as_gguf(folder / "a.gguf", lora, **fields))


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [({"peft_type": "IA3"}, UnsupportedModelError, "peft_type is not LORA"),
     ({"use_dora": True}, UnsupportedModelError, "use_dora = True is not supported"),
     ({"bias": "all"}, UnsupportedModelError, "bias = 'all'"),
     ({"modules_to_save": ["lm_head"]}, UnsupportedModelError, "modules_to_save"),
     ({"lora_alpha": "x"}, CheckpointError, "lora_alpha is 'x'; allowed: a number"),
     ({"lora_alpha": 1e308}, CheckpointError, r"lora_alpha is 1e\+308; allowed: a number below 1e\+06"),
     ({"use_rslora": "yes"}, CheckpointError, "use_rslora is 'yes'; allowed: true, false"),
     ({"alpha_pattern": "q_proj"}, CheckpointError, "alpha_pattern is 'q_proj'; allowed: an object"),
     ({"alpha_pattern": {"(": 1}}, UnsupportedModelError, r"the alpha_pattern '\(' is not supported"),
     ({"alpha_pattern": {"(a+)+b": 1}}, UnsupportedModelError, "none of them behind a bracket")],
)  # fmt: skip
def test_a_configuration_that_is_not_supported(unpack, change, error, said):
    folder = unpack("llama")
    path = folder / "adapter" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(error, match=said):
        opened(folder)


def changed(folder, change):
    path = folder / "adapter" / "adapter_model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


Q_A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
Q_B = Q_A.replace("lora_A", "lora_B")


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [(lambda t: t.pop(Q_A), CheckpointError, "q_proj has only one of lora_A and lora_B"),
     (lambda t: t.update({Q_A: t[Q_A][:, :32].copy()}), CheckpointError, r"attn_q\.weight have shapes \[2, 32\]"),
     (lambda t: t.update({Q_A: t[Q_A] * np.float32(np.nan)}), CheckpointError, "not finite"),
     (lambda t: t.update({Q_A.replace("q_proj", "x_proj"): t[Q_A],
                          Q_A.replace("q_proj.lora_A", "x_proj.lora_B"): t[Q_A]}),
      UnsupportedModelError, "x_proj is unknown in the architecture llama"),
     (lambda t: t.update({Q_A: t[Q_A][:0].copy(), Q_B: t[Q_B][:, :0].copy()}), CheckpointError,
      r"q_proj have shapes \[0, 64\] and \[64, 0\]; they must be \[rank, inputs\]"),
     (lambda t: t.update({Q_B: t[Q_B][:, 0].copy()}), CheckpointError, r"shapes \[2, 64\] and \[64\]"),
     (lambda t: t.update({"other": t[Q_A]}), UnsupportedModelError, r"the tensor other \(F32\) is not supported"),
     (lambda t: t.update({Q_A.replace("layers.0", "layers.7"): t.pop(Q_A),
                          Q_A.replace("layers.0", "layers.7").replace("_A", "_B"): t.pop(Q_A.replace("_A", "_B"))}),
      CheckpointError, r"changes the tensor blk\.7\.attn_q\.weight, which the model does not have"),
     (lambda t: t.clear(), CheckpointError, "no matrices")],
)  # fmt: skip
def test_weights_that_do_not_fit(unpack, change, error, said):
    folder = unpack("llama")
    changed(folder, change)
    with pytest.raises(error, match=said):
        opened(folder)


def test_what_is_not_there(unpack):
    folder = unpack("llama")
    with pytest.raises(ModelNotFoundError, match=r"there is no adapter .*nowhere"):
        opened(folder, folder / "nowhere")
    (folder / "adapter" / "adapter_config.json").write_text("{")
    with pytest.raises(CheckpointError, match="is not JSON"):
        opened(folder)
    shutil.rmtree(folder / "adapter")
    (folder / "adapter").mkdir()
    with pytest.raises(ModelNotFoundError, match=r"adapter_config\.json cannot be read"):
        opened(folder)


def test_the_first_pattern_that_fits_a_module_gives_its_alpha(unpack):
    """As in PEFT: at the end of the name, and an expression's alternatives belong together."""
    folder = unpack("llama")
    path = folder / "adapter" / "adapter_config.json"
    base = json.loads(path.read_text()) | {"lora_alpha": 1.0, "use_rslora": False}
    path.write_text(json.dumps(base | {"alpha_pattern": {}}))
    _, _, plain = opened(folder)
    path.write_text(
        json.dumps(base | {"alpha_pattern": {"x_proj|q_proj": 4.0, r"layers\.\d+\.self_attn\..*": 8.0}})
    )
    _, _, found = opened(folder)
    for name, (_, b) in plain.matrices.items():
        factor = 4 if "attn_q" in name else 8 if "attn" in name else 1
        assert np.array_equal(found.matrices[name][1], b * np.float32(factor)), name


@pytest.mark.parametrize("adapters", ["path", {"": "path"}, {3: "path"}])
def test_names_that_are_not_allowed(unpack, adapters):
    checkpoint, config, _ = opened(unpack("llama"))
    with checkpoint, pytest.raises(InvalidParameterError, match="allowed: a"):
        open_loras(adapters, config, checkpoint)
