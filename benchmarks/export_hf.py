"""Write a GGUF model as a folder in Hugging Face's layout, for tests of reading such folders.

    python benchmarks/export_hf.py MODEL.gguf FOLDER [--dtype F16|BF16|F32] [--shard-mb 400]

The weights are dequantized, and rounded to `--dtype`; the configuration, the tokenizer and the chat template are
written as transformers reads them. It knows the architectures llama, qwen2 and gemma3. Nothing here is part of
Ropewalk: nobody needs models made larger.
"""

from __future__ import annotations

import argparse
import json
import struct
from pathlib import Path

import numpy as np

from ropewalk.checkpoint.gguf import GGUF, open_gguf
from ropewalk.checkpoint.hf_presplit import RULE_NAMES
from ropewalk.checkpoint.names import STEPS, TABLES, Sizes
from ropewalk.model.config import ModelConfig

MODEL_TYPES = {"llama": "llama", "qwen2": "qwen2", "gemma3": "gemma3"}


def config_of(model: ModelConfig, metadata: dict) -> dict:
    """`config.json`."""
    everywhere = model.rope[0]
    config = {
        "model_type": {"gemma3": "gemma3_text"}.get(model.architecture, model.architecture),
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_size,
        "num_hidden_layers": model.n_layers,
        "num_attention_heads": model.n_heads,
        "num_key_value_heads": model.n_kv_heads,
        "head_dim": model.head_dim,
        "vocab_size": model.vocab_size,
        "max_position_embeddings": model.context_length,
        "rms_norm_eps": model.norm_eps,
        "rope_theta": everywhere.base,
        "tie_word_embeddings": model.tied_output,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
        "hidden_act": "silu",
    }
    if model.architecture == "gemma3":
        config |= {
            "hidden_activation": "gelu_pytorch_tanh",
            "rope_local_base_freq": model.rope[1].base,
            "sliding_window": max(model.layer_window),
            "query_pre_attn_scalar": model.attention_scale**-2,
            "layer_types": [
                "sliding_attention" if window else "full_attention" for window in model.layer_window
            ],
        }
    return config


def tokenizer_of(metadata: dict) -> dict:
    """`tokenizer.json`."""
    tokens = list(metadata["tokenizer.ggml.tokens"])
    types = metadata["tokenizer.ggml.token_type"]
    added = [
        {"id": i, "content": t, "special": int(types[i]) == 3, "normalized": False, "single_word": False,
         "lstrip": False, "rstrip": False}
        for i, t in enumerate(tokens) if int(types[i]) in (3, 4)
    ]  # fmt: skip
    bpe = metadata["tokenizer.ggml.model"] == "gpt2"
    model = {"type": "BPE", "vocab": {t: i for i, t in enumerate(tokens)}}
    if bpe:
        patterns, whole = next(k for k, v in RULE_NAMES.items() if v == metadata["tokenizer.ggml.pre"])
        steps = [
            {"type": "Split", "pattern": {"Regex": p}, "behavior": "Isolated", "invert": False}
            for p in patterns
        ]
        steps.append(
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
        )
        model |= {"merges": list(metadata["tokenizer.ggml.merges"]), "ignore_merges": whole}
        return {
            "added_tokens": added,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
            "model": model,
        }
    model |= {"merges": merges_of(tokens, metadata), "byte_fallback": True, "unk_token": tokens[3]}
    space = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    return {"added_tokens": added, "normalizer": space, "model": model}


def merges_of(tokens: list[str], metadata: dict) -> list[list[str]]:
    """Every way to make a token of two others, the best-scored token first."""
    scores, ids = metadata["tokenizer.ggml.scores"], {t: i for i, t in enumerate(tokens)}
    special = {i for i, kind in enumerate(metadata["tokenizer.ggml.token_type"]) if kind not in (1, 4)}
    pairs = []
    for i in sorted(range(len(tokens)), key=lambda i: -scores[i]):
        text = tokens[i]
        if i in special:
            continue
        for cut in range(1, len(text)):
            a, b = text[:cut], text[cut:]
            if ids.get(a, -1) not in special and ids.get(b, -1) not in special and a in ids and b in ids:
                pairs.append([a, b])
    return pairs


def tensors_of(checkpoint: GGUF, model: ModelConfig):
    """Names in Hugging Face's layout and float32 arrays, one after the other."""
    rope = model.rope[0]
    sizes = Sizes(model.n_heads, model.n_kv_heads, model.head_dim, rope.width)
    back = {}
    for theirs, ours in TABLES[MODEL_TYPES[model.architecture]].items():
        stem, *steps = ours.split()
        back[stem] = (theirs, steps)
    for name in checkpoint.tensors:
        stem, _, suffix = name.rpartition(".")
        parts = stem.split(".")
        layer = parts[1] if parts[0] == "blk" else ""
        theirs, steps = back[stem.replace(f"blk.{layer}.", "blk.{n}.") if layer else stem]
        array = checkpoint.tensor(name)
        for word in reversed(steps):
            array = (
                array - np.float32(1) if word == "plus_one" else array[np.argsort(STEPS[word](sizes).rows)]
            )
        yield f"{theirs.replace('{n}', layer)}.{suffix}", array


def encode(array: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "BF16":
        bits = array.view(np.uint32)
        return (
            (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        ).astype("<u2")
    return array.astype({"F16": "<f2", "F32": "<f4"}[dtype])


def write_shard(path: Path, arrays: dict[str, np.ndarray], dtype: str) -> None:
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name, array in arrays.items():
        header[name] = {
            "dtype": dtype,
            "shape": list(array.shape),
            "data_offsets": [offset, offset + array.nbytes],
        }
        offset += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        for array in arrays.values():
            f.write(np.ascontiguousarray(array).data)


def export(source: Path, folder: Path, dtype: str = "F16", shard_bytes: int = 400_000_000) -> None:
    """Write everything."""
    folder.mkdir(parents=True, exist_ok=True)
    with open_gguf(source) as checkpoint:
        metadata = dict(checkpoint.metadata)
        model = ModelConfig.from_gguf(metadata, checkpoint.tensors)
        shards, pending, size = [], {}, 0
        for name, array in tensors_of(checkpoint, model):
            pending[name] = encode(array, dtype)
            size += pending[name].nbytes
            if size >= shard_bytes:
                shards.append(list(pending))
                write_shard(folder / f"part-{len(shards)}.safetensors", pending, dtype)
                pending, size = {}, 0
            checkpoint.release()
        if pending:
            shards.append(list(pending))
            write_shard(folder / f"part-{len(shards)}.safetensors", pending, dtype)
    places = {n: f"part-{i + 1}.safetensors" for i, names in enumerate(shards) for n in names}
    tokens = metadata["tokenizer.ggml.tokens"]
    options = {"add_bos_token": bool(metadata.get("tokenizer.ggml.add_bos_token", False))}
    for name in ("bos", "eos"):
        if (i := metadata.get(f"tokenizer.ggml.{name}_token_id")) is not None:
            options[f"{name}_token"] = tokens[i]
    if template := metadata.get("tokenizer.chat_template"):
        (folder / "chat_template.jinja").write_text(template)
    for file, value in {
        "config.json": config_of(model, metadata),
        "tokenizer.json": tokenizer_of(metadata),
        "tokenizer_config.json": options,
        "model.safetensors.index.json": {"metadata": {}, "weight_map": places},
    }.items():
        (folder / file).write_text(json.dumps(value))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dtype", choices=("F16", "BF16", "F32"), default="F16")
    parser.add_argument("--shard-mb", type=int, default=400)
    options = parser.parse_args()
    export(options.model, options.folder, options.dtype, options.shard_mb * 1_000_000)


if __name__ == "__main__":
    main()
