"""`tokenizer.json` and its neighbours as GGUF metadata: tokens, merges or scores, special tokens, chat template.

Two kinds are read: byte-level BPE, whose way to cut text into words `hf_presplit` knows, and BPE over characters with ▁
for spaces as SentencePiece has it. Scores of SentencePiece tokens come from `tokenizer.model` where there is one, else
from the order of the merges.

Everything is checked for its type here; what the values mean is for `ropewalk.text` to judge.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ropewalk.checkpoint.cursor import show
from ropewalk.checkpoint.files import read_file
from ropewalk.checkpoint.hf_presplit import pre_split, steps_of
from ropewalk.checkpoint.hf_values import read_object
from ropewalk.checkpoint.sentencepiece import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    read_pieces,
)
from ropewalk.errors import CheckpointError, UnsupportedModelError

MAX_TOKENS = 1 << 22

_BYTE = re.compile(r"<0x[0-9A-F]{2}>")


@dataclass
class _Draft:
    """The vocabulary while it is being put together."""

    label: str
    tokens: dict[int, str]
    types: dict[int, int] = field(default_factory=dict)


def tokenizer_metadata(folder: Path, config: Mapping[str, Any], vocab_size: int) -> dict[str, object]:
    """Read everything about text in a folder.

    Parameters
    ----------
    folder : pathlib.Path
    config : mapping
        `config.json`, for token ids that stand nowhere else.
    vocab_size : int
        Rows of the embedding; ids that no token has become unused ones.

    Raises
    ------
    CheckpointError
        A file is missing or malformed.
    UnsupportedModelError
        A kind of tokenizer, or a step of one, that is not implemented.
    """
    options = read_object(folder / "tokenizer_config.json")
    path = folder / "tokenizer.json"
    if path.is_file():
        saved = read_object(path)
        draft, metadata = _from_json(saved, str(path))
    elif (folder / "tokenizer.model").is_file():
        saved, path = {}, folder / "tokenizer.model"
        draft, metadata = _from_sentencepiece(path)
    else:
        raise CheckpointError(f"{folder} has neither tokenizer.json nor tokenizer.model")
    if metadata["tokenizer.ggml.model"] == "llama" and saved and (folder / "tokenizer.model").is_file():
        _take_scores(folder / "tokenizer.model", draft, metadata)
    _add_tokens(draft, saved.get("added_tokens", []), options.get("added_tokens_decoder", {}))
    _fill(draft, vocab_size, metadata)
    metadata |= _specials(draft, options, config, read_object(folder / "generation_config.json"))
    metadata |= _ends_of_text(draft, saved, options, metadata)
    return metadata | _templates(folder, options)


def _from_json(saved: Mapping[str, Any], label: str) -> tuple[_Draft, dict[str, object]]:
    model = saved.get("model")
    kind = model.get("type", "BPE") if isinstance(model, dict) else None
    if not isinstance(model, dict) or kind != "BPE":
        raise UnsupportedModelError(
            f"{label}: a tokenizer of the type {show(kind)} is not supported; supported: BPE"
        )
    vocab = model.get("vocab")
    if not isinstance(vocab, dict) or not all(type(i) is int and 0 <= i < MAX_TOKENS for i in vocab.values()):
        raise CheckpointError(f"{label}: model.vocab is {show(vocab)}; it must map tokens to ids")
    draft = _Draft(label, {i: token for token, i in vocab.items()})
    if len(draft.tokens) < len(vocab):
        raise CheckpointError(f"{label}: two tokens of model.vocab have the same id")
    listed = model.get("merges", [])
    if not isinstance(listed, list):
        raise CheckpointError(f"{label}: model.merges is {show(listed)}; it must be a list of pairs")
    merges = [_merge(pair, label) for pair in listed]
    steps = list(steps_of(saved.get("pre_tokenizer"), "pretokenizers"))
    if any(s.get("type") == "ByteLevel" for s in steps):
        return draft, _byte_level(saved, model, merges, steps, label)
    return draft, _character_level(saved, model, merges, steps, draft)


def _merge(pair: object, label: str) -> tuple[str, str]:
    parts = pair.split(" ") if isinstance(pair, str) else pair
    if isinstance(parts, list) and len(parts) == 2 and all(isinstance(p, str) and p for p in parts):
        return parts[0], parts[1]
    raise CheckpointError(f"{label}: the merge {show(pair)} is not two tokens")


def _byte_level(
    saved: Mapping[str, Any],
    model: Mapping[str, Any],
    merges: Sequence[tuple[str, str]],
    steps: Sequence[Mapping[str, Any]],
    label: str,
) -> dict[str, object]:
    for step in steps_of(saved.get("normalizer"), "normalizers"):
        if step.get("type") != "NFC":
            raise UnsupportedModelError(
                f"{label}: the normalizer {show(step.get('type'))} is not supported; supported: NFC"
            )
    metadata: dict[str, object] = {"tokenizer.ggml.model": "gpt2"}
    metadata["tokenizer.ggml.merges"] = [f"{a} {b}" for a, b in merges]
    return metadata | pre_split(steps, label, whole_words=model.get("ignore_merges", False) is True)


def _character_level(
    saved: Mapping[str, Any],
    model: Mapping[str, Any],
    merges: Sequence[tuple[str, str]],
    steps: Sequence[Mapping[str, Any]],
    draft: _Draft,
) -> dict[str, object]:
    """SentencePiece's kind. The score of a token is its place in the order in which merges make tokens."""
    prefix = _space_prefix(saved, steps, draft.label)
    size = max(draft.tokens, default=-1) + 1
    scores = np.zeros(size, np.float32)
    ids = {token: i for i, token in draft.tokens.items()}
    ranks: dict[str, int] = {}
    for a, b in merges:
        ranks.setdefault(a + b, len(ranks))
    for text, rank in ranks.items():
        if text not in ids:
            raise CheckpointError(f"{draft.label}: a merge makes {show(text)}, which is not a token")
        scores[ids[text]] = -rank
    for i, token in draft.tokens.items():
        if _BYTE.fullmatch(token):
            draft.types[i] = BYTE
    metadata: dict[str, object] = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.pre": "default"}
    metadata |= {"tokenizer.ggml.scores": scores, "tokenizer.ggml.add_space_prefix": prefix}
    unknown = model.get("unk_token")
    if isinstance(unknown, str) and unknown in ids:
        draft.types[ids[unknown]] = UNKNOWN
        metadata["tokenizer.ggml.unknown_token_id"] = ids[unknown]
    return metadata


def _space_prefix(saved: Mapping[str, Any], steps: Sequence[Mapping[str, Any]], label: str) -> bool:
    """Whether a text is read as if a space came before it; refuses any other change of the text."""
    prefix = spaces = False
    for step in [*steps_of(saved.get("normalizer"), "normalizers"), *steps]:
        kind = step.get("type")
        if kind == "Prepend" and step.get("prepend") == "▁":
            prefix = True
        elif kind == "Metaspace" and step.get("replacement", "▁") == "▁":
            spaces = True
            scheme = step.get("prepend_scheme", "always" if step.get("add_prefix_space", True) else "never")
            prefix = prefix or scheme != "never"
        elif kind == "Replace" and step.get("pattern") == {"String": " "} and step.get("content") == "▁":
            spaces = True
        elif kind == "Split" and step.get("pattern") == {"String": " "}:
            continue  # no space is left to split at
        else:
            raise UnsupportedModelError(f"{label}: the step {show(step)} of preparing text is not supported")
    if not spaces:
        raise UnsupportedModelError(
            f"{label}: neither bytes nor ▁ for spaces: this kind of tokenizer is not supported"
        )
    return prefix


def _add_tokens(draft: _Draft, listed: object, decoder: object) -> None:
    """Tokens beside the vocabulary, and what they are: control tokens, or words that are always found."""
    rows = list(listed) if isinstance(listed, list) else []
    if isinstance(decoder, Mapping) and not rows:
        rows = [
            {"id": int(i), **row}
            for i, row in decoder.items()
            if str(i).isdigit() and isinstance(row, Mapping)
        ]
    for row in rows:
        i, text = (row.get("id"), row.get("content")) if isinstance(row, Mapping) else (None, None)
        if not isinstance(i, int) or not isinstance(text, str) or not 0 <= i < MAX_TOKENS:
            raise CheckpointError(f"{draft.label}: the added token {show(row)} lacks id or content")
        if draft.tokens.setdefault(i, text) != text:
            raise CheckpointError(
                f"{draft.label}: token {i} is {show(draft.tokens[i])} and, as an added token, {show(text)}"
            )
        if draft.types.get(i) != UNKNOWN:
            draft.types[i] = CONTROL if row.get("special") else USER_DEFINED


def _fill(draft: _Draft, vocab_size: int, metadata: dict[str, object]) -> None:
    """Make the vocabulary as long as the embedding: unused tokens for gaps, no added ones beyond its end."""
    beyond = [i for i in draft.tokens if i >= vocab_size]
    if lost := [i for i in beyond if draft.types.get(i, NORMAL) in (NORMAL, BYTE)]:
        raise CheckpointError(
            f"{draft.label}: token {lost[0]} ({show(draft.tokens[lost[0]])}) is beyond the {vocab_size} rows "
            "of the embedding"
        )
    for i in beyond:
        del draft.tokens[i]
    taken = set(draft.tokens.values())
    for i in range(vocab_size):
        if i not in draft.tokens:
            name = f"[PAD{i}]"
            draft.tokens[i] = name if name not in taken else f"[PAD{i}]▁"
            draft.types[i] = UNUSED
    metadata["tokenizer.ggml.tokens"] = [draft.tokens[i] for i in range(vocab_size)]
    metadata["tokenizer.ggml.token_type"] = np.array(
        [draft.types.get(i, NORMAL) for i in range(vocab_size)], np.int32
    )
    scores = metadata.get("tokenizer.ggml.scores")
    if isinstance(scores, np.ndarray):
        full = np.full(vocab_size, -1e6, np.float32)
        full[: len(scores)] = scores[:vocab_size]
        metadata["tokenizer.ggml.scores"] = full


def _specials(
    draft: _Draft, options: Mapping[str, Any], config: Mapping[str, Any], generation: Mapping[str, Any]
) -> dict[str, object]:
    """Ids of the tokens that begin, end and pad a text, and of all that end a generation."""
    ids = {token: i for i, token in draft.tokens.items()}
    metadata: dict[str, object] = {}
    ends = _ids(generation.get("eos_token_id"), draft) or _ids(config.get("eos_token_id"), draft)
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown")):
        token = options.get(f"{name}_token")
        text = token.get("content") if isinstance(token, Mapping) else token
        i = ids.get(text) if isinstance(text, str) else None
        if i is None and f"{name}_token" not in options:
            found = ends if name == "eos" else _ids(config.get(f"{name}_token_id"), draft)
            i = next(iter(found), None)
        if i is not None:
            metadata[f"tokenizer.ggml.{key}_token_id"] = i
    if ends:
        metadata.setdefault("tokenizer.ggml.eos_token_id", ends[0])
        metadata["tokenizer.ropewalk.end_token_ids"] = np.array(ends, np.int32)
        others = [i for i in ends if i != metadata["tokenizer.ggml.eos_token_id"]]
        if others:
            metadata["tokenizer.ggml.eot_token_id"] = others[0]
    return metadata


def _ids(value: object, draft: _Draft) -> list[int]:
    """One token id or several; ids that no token has are left out."""
    values = value if isinstance(value, list) else [value]
    return [i for i in values if type(i) is int and i in draft.tokens]


def _ends_of_text(
    draft: _Draft, saved: Mapping[str, Any], options: Mapping[str, Any], metadata: Mapping[str, object]
) -> dict[str, object]:
    """Whether texts get a BOS token in front and an EOS token at the end."""
    first: object = None
    last: object = None
    for step in steps_of(saved.get("post_processor"), "processors"):
        single = step.get("single")
        if step.get("type") == "TemplateProcessing" and isinstance(single, list) and single:
            first, last = (_special_id(item) for item in (single[0], single[-1]))
    found: dict[str, object] = {}
    for name, text in (("bos", first), ("eos", last)):
        i = metadata.get(f"tokenizer.ggml.{name}_token_id")
        said = options.get(f"add_{name}_token")
        by_template = isinstance(i, int) and text is not None and draft.tokens.get(i) == text
        wanted = said if isinstance(said, bool) else by_template
        found[f"tokenizer.ggml.add_{name}_token"] = bool(wanted and i is not None)
    return found


def _special_id(item: object) -> object:
    """The text of the special token that an item of a template stands for, if it is one."""
    token = item.get("SpecialToken") if isinstance(item, Mapping) else None
    return token.get("id") if isinstance(token, Mapping) else None


def _templates(folder: Path, options: Mapping[str, Any]) -> dict[str, object]:
    """The chat template, and others by name."""
    found: object = options.get("chat_template")
    if (path := folder / "chat_template.json").is_file():
        found = read_object(path).get("chat_template", found)
    if (path := folder / "chat_template.jinja").is_file():
        found = _template_text(path)
    if found is None:
        return {}
    named = {"default": found} if isinstance(found, str) else found
    if isinstance(named, list):
        named = {str(row.get("name")): row.get("template") for row in named if isinstance(row, Mapping)}
    if not isinstance(named, Mapping) or not all(isinstance(x, str) for pair in named.items() for x in pair):
        raise CheckpointError(f"{folder}: the chat template is {show(found)}; it must be a text")
    others = sorted((folder / "additional_chat_templates").glob("*.jinja"))
    named = {**named, **{path.stem: _template_text(path) for path in others}}
    key = "tokenizer.chat_template"
    return {key if name == "default" else f"{key}.{name}": text for name, text in named.items()}


def _template_text(path: Path) -> str:
    try:
        return read_file(path).decode()
    except UnicodeDecodeError as e:
        raise CheckpointError(f"{path} cannot be read: {e}") from None


def _from_sentencepiece(path: Path) -> tuple[_Draft, dict[str, object]]:
    """A vocabulary from `tokenizer.model` alone."""
    pieces = read_pieces(path)
    draft = _Draft(str(path), dict(enumerate(pieces.texts)), dict(enumerate(pieces.kinds)))
    metadata: dict[str, object] = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.pre": "default"}
    metadata["tokenizer.ggml.scores"] = np.array(pieces.scores, np.float32)
    metadata["tokenizer.ggml.add_space_prefix"] = pieces.space_prefix
    if UNKNOWN in pieces.kinds:
        metadata["tokenizer.ggml.unknown_token_id"] = pieces.kinds.index(UNKNOWN)
    return draft, metadata


def _take_scores(path: Path, draft: _Draft, metadata: dict[str, object]) -> None:
    """Put in the true scores where the two files have the same tokens."""
    pieces = read_pieces(path)
    scores = metadata["tokenizer.ggml.scores"]
    assert isinstance(scores, np.ndarray)
    n = min(len(scores), len(pieces.texts))
    if all(draft.tokens.get(i) == pieces.texts[i] or pieces.kinds[i] != NORMAL for i in range(n)):
        scores[:n] = pieces.scores[:n]
        for i in range(n):
            if pieces.kinds[i] != NORMAL:
                draft.types.setdefault(i, pieces.kinds[i])
