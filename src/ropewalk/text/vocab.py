"""The vocabulary of a GGUF file: its tokens, what kind each one is, and which ones begin or end a text.

Everything comes from an untrusted file, so every array length and token id is checked here, once; an error
names the metadata key. Kinds, defaults and the search for end-of-generation tokens follow llama.cpp, which
is what the makers of GGUF files test against. This module knows nothing of merges or of text.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, cast

import numpy as np

from ropewalk.errors import CheckpointError, UnsupportedModelError

PREFIX = "tokenizer.ggml."
BYTE_TEXT = re.compile(rb"<0x([0-9A-Fa-f]{2})>")


class Kind(IntEnum):
    """Values of `tokenizer.ggml.token_type`."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


# A token with one of these texts ends a generation, whatever the file says of it.
_END_TEXTS = frozenset(
    "<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> <|endoftext|> </s> "
    "<|eom_id|> <EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> <eos> <turn|> <|tool_response> "
    "<｜end▁of▁sentence｜> [e~[".encode().split()
)
# Texts of fill-in-the-middle tokens. Those of `pad`, `rep` (repository) and `sep` (file) end a generation.
_FIM_TEXTS = {
    "pre": "<|fim_prefix|> <fim-prefix> <fim_prefix> <｜fim▁begin｜> <PRE> ▁<PRE> <|code_prefix|> <|prefix|>",
    "suf": "<|fim_suffix|> <fim-suffix> <fim_suffix> <｜fim▁hole｜> <SUF> ▁<SUF> <|code_suffix|> <|suffix|>",
    "mid": "<|fim_middle|> <fim-middle> <fim_middle> <｜fim▁end｜> <MID> ▁<MID> <|code_middle|> <|middle|>",
    "pad": "<|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD]",
    "rep": "<|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame>",
    "sep": "<|file_sep|>",
}
# Markers of the Harmony format, always shown in the text.
_ALWAYS_SHOWN = (b"<|channel|>", b"<|message|>", b"<|start|>", b"<|constrain|>")


@dataclass(frozen=True)
class Vocab:
    """A checked vocabulary of n tokens.

    Attributes
    ----------
    model : "gpt2" (byte-level BPE) or "llama" (SentencePiece-style).
    pre : name of the pre-split rule; "" for "llama", which has none.
    tokens : the n texts as the file spells them.
    ids : token text to id.
    control : ids that are read in a text only where the caller allows special tokens, and that `skip_special`
        leaves out of decoded text (kinds CONTROL and UNKNOWN).
    user_defined : ids that are matched in every text before anything else.
    byte_ids : ids that stand for one byte, spelled <0xEA>.
    silent : ids without text (kinds UNUSED and UNDEFINED).
    bos_id, unknown_id : token ids or None.
    eos_id : the token that `add_eos` appends, or None.
    end_ids : every token that ends a generation.
    """

    model: str
    pre: str
    tokens: list[bytes]
    ids: dict[bytes, int]
    control: frozenset[int]
    user_defined: frozenset[int]
    byte_ids: frozenset[int]
    silent: frozenset[int]
    bos_id: int | None
    eos_id: int | None
    unknown_id: int | None
    end_ids: frozenset[int]


def key_error(key: str, problem: str) -> CheckpointError:
    """The error for the metadata key `tokenizer.ggml.<key>`."""
    return CheckpointError(f"{PREFIX}{key} {problem}")


def raw_strings(metadata: Mapping[str, object], key: str) -> list[bytes]:
    """The bytes of every item of a string array; raises CheckpointError where there is none."""
    value = metadata.get(PREFIX + key)
    if value is None:
        raise key_error(key, "is missing")
    raw_items = getattr(value, "raw_items", None)
    if raw_items is not None:
        return cast(Callable[[], list[bytes]], raw_items)()
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise key_error(key, "is not an array of strings")
    if not all(isinstance(item, str) for item in value):
        raise key_error(key, "is not an array of strings")
    return [item.encode("utf-8", "surrogatepass") for item in value]


def numbers(metadata: Mapping[str, object], key: str, n: int, kinds: str) -> np.ndarray[Any, Any] | None:
    """The numeric array of n items, or None where absent; `kinds` are the allowed `dtype.kind` letters."""
    value = metadata.get(PREFIX + key)
    if value is None:
        return None
    if not isinstance(value, np.ndarray) or value.ndim != 1 or value.dtype.kind not in kinds:
        raise key_error(key, "is not an array of numbers of the right type")
    if len(value) != n:
        raise key_error(key, f"has {len(value)} items, but there are {n} tokens")
    return value


def flag(metadata: Mapping[str, object], key: str, default: bool) -> bool:
    """The boolean at `key`, or `default` where it is absent."""
    value = metadata.get(PREFIX + key, default)
    if not isinstance(value, bool):
        raise key_error(key, f"is {value!r}, which is neither true nor false")
    return value


def text_value(metadata: Mapping[str, object], key: str, default: str | None = None) -> str:
    """The string at `key`, or `default`; raises CheckpointError where it is absent and has no default."""
    value = metadata.get(PREFIX + key, default)
    if value is None:
        raise key_error(key, "is missing")
    if not isinstance(value, str):
        raise key_error(key, f"is {value!r}, which is not a string")
    return value


def _token_id(metadata: Mapping[str, object], name: str, n: int, default: int | None = None) -> int | None:
    key = f"{name}_token_id"
    value = metadata.get(PREFIX + key)
    if value is None:
        return default if default is not None and default < n else None
    if isinstance(value, bool) or not isinstance(value, int):
        raise key_error(key, f"is {value!r}, which is not a token id")
    if not 0 <= value < n:
        raise key_error(key, f"is {value}, but the token ids are 0 to {n - 1}")
    return value


@dataclass
class _Draft:
    """Tokens and kinds while they are being read."""

    tokens: list[bytes]
    ids: dict[bytes, int]
    kinds: dict[int, Kind]  # of every token that is not NORMAL

    def find(self, texts: Iterable[bytes]) -> list[int]:
        """Ids of those texts that are tokens."""
        return [i for text in texts if (i := self.ids.get(text)) is not None]


def _read_kinds(metadata: Mapping[str, object], n: int) -> dict[int, Kind]:
    """Kind of every token that is not NORMAL; a number outside the known kinds counts as UNDEFINED."""
    kinds = numbers(metadata, "token_type", n, "iu")
    if kinds is None:
        return {}
    known = set(Kind)
    special = np.flatnonzero(kinds != Kind.NORMAL).tolist()
    return {i: Kind(kind) if (kind := int(kinds[i])) in known else Kind.UNDEFINED for i in special}


def _read_tokens(metadata: Mapping[str, object]) -> tuple[list[bytes], dict[bytes, int]]:
    tokens = raw_strings(metadata, "tokens")
    if not tokens:
        raise key_error("tokens", "is empty")
    ids = {token: i for i, token in enumerate(tokens) if token}
    if len(ids) != len(tokens) - tokens.count(b""):
        twice = next(token for i, token in enumerate(tokens) if token and ids[token] != i)
        raise key_error("tokens", f"holds {twice.decode('utf-8', 'replace')!r} twice")
    return tokens, ids


def _fim_ends(metadata: Mapping[str, object], vocab: _Draft) -> set[int]:
    """Ids of the fill-in-the-middle tokens that end a generation; those found by text become CONTROL."""
    ends = set()
    for name, texts in _FIM_TEXTS.items():
        fim_id = _token_id(metadata, f"fim_{name}", len(vocab.tokens))
        found = vocab.find(texts.encode().split())
        if fim_id is None and found:
            fim_id = found[0]
            vocab.kinds[fim_id] = Kind.CONTROL
        if fim_id is not None and name in ("pad", "rep", "sep"):
            ends.add(fim_id)
    return ends


def _own_end_ids(metadata: Mapping[str, object], n: int) -> Iterable[int]:
    """Ends of a generation as `generation_config.json` lists them; GGUF's own keys have room for three."""
    key = "tokenizer.ropewalk.end_token_ids"
    ids = metadata.get(key)
    if ids is None:
        return []
    if not isinstance(ids, np.ndarray) or ids.dtype.kind not in "iu" or ids.ndim != 1 or len(ids) > 256:
        raise CheckpointError(f"{key} is not a short array of token ids")
    if len(ids) and not 0 <= ids.min() <= ids.max() < n:
        raise CheckpointError(f"{key} is {ids.tolist()}, but the token ids are 0 to {n - 1}")
    found: list[int] = ids.tolist()
    return found


def _end_ids(metadata: Mapping[str, object], vocab: _Draft, eos_id: int | None) -> frozenset[int]:
    """Collect the ids that end a generation; tokens found by their text become CONTROL."""
    n, kinds = len(vocab.tokens), vocab.kinds
    by_text = vocab.find(_END_TEXTS)
    kinds.update(dict.fromkeys(by_text, Kind.CONTROL))
    by_key = (
        eos_id,
        _token_id(metadata, "eot", n),
        _token_id(metadata, "eom", n),
        *_own_end_ids(metadata, n),
    )
    ends = {*by_text, *_fim_ends(metadata, vocab), *(i for i in by_key if i is not None)}
    kinds.update(dict.fromkeys(vocab.find(_ALWAYS_SHOWN), Kind.USER_DEFINED))

    texts = {vocab.tokens[i] for i in by_text}
    calls = texts & {b"<|call|>", b"<|calls|>"}
    if calls and texts & {b"<|return|>", b"<|flush|>"}:  # there <|end|> closes one message of many
        for i in vocab.find([b"<|end|>"]):
            ends.discard(i)
            kinds[i] = Kind.USER_DEFINED
    if b"<|tool_response>" in texts:
        for i in vocab.find([b"</s>"]):
            ends.discard(i)
            kinds[i] = Kind.NORMAL
    return frozenset(ends)


def read_vocab(metadata: Mapping[str, object]) -> Vocab:
    """Read and check the vocabulary in GGUF metadata.

    Raises
    ------
    CheckpointError : a key is missing, has the wrong type or length, or names a token that does not exist.
    UnsupportedModelError : `tokenizer.ggml.model` is neither "gpt2" nor "llama".
    """
    model = text_value(metadata, "model")
    if model not in ("gpt2", "llama"):
        raise UnsupportedModelError(f"{PREFIX}model is {model!r}: supported are 'gpt2' and 'llama'")
    tokens, ids = _read_tokens(metadata)
    n = len(tokens)
    kinds = _read_kinds(metadata, n)
    spm = model == "llama"
    eos_id = _token_id(metadata, "eos", n, 2 if spm else None)
    end_ids = _end_ids(metadata, _Draft(tokens, ids, kinds), eos_id)

    def of(*wanted: Kind) -> frozenset[int]:
        return frozenset(i for i, kind in kinds.items() if kind in wanted)

    byte_ids = of(Kind.BYTE)
    for i in byte_ids:
        if not BYTE_TEXT.fullmatch(tokens[i]):
            raise key_error("token_type", f"calls {tokens[i]!r} a byte, but a byte is spelled like <0xEA>")
    return Vocab(
        model=model,
        pre="" if spm else text_value(metadata, "pre", "default"),
        tokens=tokens,
        ids=ids,
        control=of(Kind.CONTROL, Kind.UNKNOWN),
        user_defined=of(Kind.USER_DEFINED),
        byte_ids=byte_ids,
        silent=of(Kind.UNUSED, Kind.UNDEFINED),
        bos_id=_token_id(metadata, "bos", n, 1 if spm else None),
        eos_id=eos_id,
        unknown_id=_token_id(metadata, "unknown", n, 0 if spm else None),
        end_ids=end_ids,
    )
