"""`ropewalk inspect`: what a model file says about itself, without loading its weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ropewalk.cli.console import byte_size, columns, fields, one_line, say, verb, visible, write_json
from ropewalk.cli.loading import find
from ropewalk.cli.options import DEFAULT_MODEL, model_argument
from ropewalk.errors import RopewalkError, UnsupportedModelError

if TYPE_CHECKING:
    from ropewalk.checkpoint.base import Checkpoint


@verb
def inspect(
    model: Annotated[str, model_argument()] = DEFAULT_MODEL,
    *,
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Show what a model file says about itself."""
    from ropewalk.checkpoint.base import open_checkpoint

    with open_checkpoint(find(model)) as checkpoint:
        facts = describe(checkpoint)
        if tensors:
            facts["tensors"] = [
                {"name": t.name, "shape": list(t.shape), "type": t.format.name, "bytes": t.n_bytes}
                for t in checkpoint.tensors.values()
            ]
    if as_json:
        write_json(facts)
    else:
        show(facts)


def describe(checkpoint: Checkpoint) -> dict[str, Any]:
    """What `inspect` shows, as JSON values. A model that we cannot run is described as far as it goes."""
    metadata = checkpoint.metadata
    sizes: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for tensor in checkpoint.tensors.values():
        sizes[tensor.format.name] += tensor.n_bytes
        counts[tensor.format.name] += 1
    template = metadata.get("tokenizer.chat_template")
    return {
        "path": str(checkpoint.path),
        "files": len(checkpoint.paths),
        "bytes": checkpoint.file_bytes,
        "format": checkpoint.kind,
        "name": _text(metadata.get("general.name")),
        "architecture": _text(metadata.get("general.architecture")),
        "license": _text(metadata.get("general.license")),
        "parameters": sum(t.size for t in checkpoint.tensors.values()),
        "tensor_types": {name: {"tensors": counts[name], "bytes": n} for name, n in sizes.most_common()},
        "model": _model(checkpoint),
        "tokenizer": _tokenizer(checkpoint),
        "suggested_sampling": _suggested(metadata),
        "chat_template": template if isinstance(template, str) else None,
    }


def _text(value: object) -> str | None:
    return None if value is None else str(value)


def _suggested(metadata: Mapping[str, object]) -> dict[str, int | float]:
    """Settings that the model's makers suggest, by GGUF's names. They are shown alone: ours are the same everywhere."""
    start = "general.sampling."
    return {
        key.removeprefix(start): float(f"{value:.6g}") if isinstance(value, float) else value
        for key, value in metadata.items()
        if key.startswith(start) and isinstance(value, int | float)
    }


def _model(checkpoint: Checkpoint) -> dict[str, Any]:
    from ropewalk.model.config import ModelConfig

    try:
        config = ModelConfig.from_gguf(checkpoint.metadata, checkpoint.tensors)
    except UnsupportedModelError as error:
        return {"unsupported": str(error)}
    facts: dict[str, Any] = {
        "layers": config.n_layers,
        "hidden_size": config.hidden_size,
        "heads": config.n_heads,
        "kv_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "ffn_size": config.ffn_size,
        "vocabulary": config.vocab_size,
        "context_length": config.context_length,
        "rope": [{"base": r.base, "width": r.width, "layout": r.layout} for r in config.rope],
        "windowed_layers": sum(map(bool, config.layer_window)),
        "window": max(config.layer_window),
        "tied_output": config.tied_output,
    }
    if config.experts:
        facts["experts"] = {
            "layers": sum(config.layer_experts),
            "count": config.experts.n_experts,
            "used": config.experts.n_used,
            "ffn_size": config.experts.ffn_size,
            "shared_ffn_size": config.experts.shared_ffn_size,
        }
    if config.latent:
        facts["latent"] = {"kv_rank": config.latent.kv_rank, "value": config.latent.value}
    return facts


def _tokenizer(checkpoint: Checkpoint) -> dict[str, Any]:
    from ropewalk.text.tokenizer import Tokenizer

    try:
        tokenizer = Tokenizer.from_metadata(checkpoint.metadata)
    except RopewalkError as error:
        return {"unsupported": str(error)}
    return {
        "description": str(tokenizer.description),
        "bos_id": tokenizer.bos_id if tokenizer.add_bos else None,
        "end_ids": sorted(tokenizer.eos_ids),
    }


def show(facts: dict[str, Any]) -> None:
    """`facts` of `describe` for people."""
    model, tokenizer = facts["model"], facts["tokenizer"]
    lines = {
        "file": f"{facts['path']} ({byte_size(facts['bytes'])}, {facts['format']})",
        "name": facts["name"] or "(none)",
        "license": facts["license"] or "(not said)",
        "architecture": facts["architecture"] or "(none)",
        "parameters": f"{facts['parameters'] / 1e6:.1f} million",
    }
    if "unsupported" in model:
        lines["not supported"] = model["unsupported"]
    else:
        lines |= _model_lines(model)
    lines["tokenizer"] = tokenizer.get("unsupported") or _tokenizer_line(tokenizer)
    if suggested := facts["suggested_sampling"]:
        lines["suggested"] = ", ".join(f"{name} {value:g}" for name, value in suggested.items())
    for name, value in lines.items():
        lines[name] = one_line(value)
    types = [(n, f"{t['tensors']}", byte_size(t["bytes"])) for n, t in facts["tensor_types"].items()]
    lines["tensor types"] = columns([("type", "tensors", "bytes"), *types], right=(1, 2))
    lines["chat template"] = visible(facts["chat_template"] or "(none)").rstrip()
    say(fields(lines))
    if "tensors" in facts:
        rows = [
            (one_line(t["name"]), str(t["shape"]), t["type"], byte_size(t["bytes"])) for t in facts["tensors"]
        ]
        say("\n" + columns([("tensor", "shape", "type", "bytes"), *rows], right=(3,)))


def _tokenizer_line(tokenizer: dict[str, Any]) -> str:
    bos_id = tokenizer["bos_id"]
    begins = "" if bos_id is None else f", begins with {bos_id}"
    return f"{tokenizer['description']}{begins}, ends at {', '.join(map(str, tokenizer['end_ids']))}"


def _model_lines(model: dict[str, Any]) -> dict[str, str]:
    window = f", {model['windowed_layers']} of them see {model['window']} tokens" if model["window"] else ""
    experts = ""
    if mixture := model.get("experts"):
        shared = (
            f", one of {mixture['shared_ffn_size']} for every token" if mixture["shared_ffn_size"] else ""
        )
        experts = (
            f"; {mixture['used']} of {mixture['count']} experts of {mixture['ffn_size']}{shared}, "
            f"in {mixture['layers']} layers"
        )
    return {
        "layers": f"{model['layers']}{window}",
        "width": f"{model['hidden_size']}, feed-forward {model['ffn_size']}{experts}",
        "heads": f"{model['heads']} of width {model['head_dim']}, {model['kv_heads']} for keys and values",
        "rotary": "; ".join(f"base {r['base']:g}, width {r['width']}, {r['layout']}" for r in model["rope"])
        or "none: positions are learned",
        "vocabulary": f"{model['vocabulary']} tokens"
        + (", output shares the embedding" if model["tied_output"] else ""),
        "context length": f"{model['context_length']} tokens",
    }
