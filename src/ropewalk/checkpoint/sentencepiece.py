"""`tokenizer.model` of SentencePiece: pieces, scores and kinds, read from its protobuf message.

The message's field 1 repeats pieces of {1: text, 2: float32 score, 3: kind}; field 2 says how it was trained
(3: the kind of model, 2 is BPE), field 3 how text is prepared (3: whether a space is put in front). Source:
`sentencepiece_model.proto`. Everything else in it is skipped. This module does not know what pieces are for.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ropewalk.checkpoint.cursor import show
from ropewalk.checkpoint.files import read_file
from ropewalk.errors import CheckpointError, UnsupportedModelError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""Kinds of tokens: those of SentencePiece in the numbers of `tokenizer.ggml.token_type`."""
_KINDS = {1: NORMAL, 2: UNKNOWN, 3: CONTROL, 4: USER_DEFINED, 5: UNUSED, 6: BYTE}
_BPE = 2


@dataclass
class Pieces:
    """The vocabulary, in the order of ids.

    Attributes
    ----------
    texts, scores, kinds : one entry a piece.
    space_prefix : whether a text is read as if a space came before it.
    """

    texts: list[str] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)
    space_prefix: bool = True


def read_pieces(path: Path) -> Pieces:
    """Read a `tokenizer.model`.

    Raises
    ------
    CheckpointError
        If it cannot be read, is cut short or no such message.
    UnsupportedModelError
        If it is no BPE model.
    """
    pieces, kind = Pieces(), 1
    for number, value in _fields(read_file(path), path):
        if number == 1 and isinstance(value, bytes):
            _add_piece(pieces, value, path)
        elif number == 2 and isinstance(value, bytes):
            kind = next((v for n, v in _fields(value, path) if n == 3 and isinstance(v, int)), 1)
        elif number == 3 and isinstance(value, bytes):
            pieces.space_prefix = all(v for n, v in _fields(value, path) if n == 3)
    if not pieces.texts:
        raise CheckpointError(f"{path} holds no pieces: it is no SentencePiece model")
    if kind != _BPE:
        raise UnsupportedModelError(
            f"{path}: the model type {show(kind)} is not supported; supported: 2 (BPE)"
        )
    return pieces


def _add_piece(pieces: Pieces, data: bytes, path: Path) -> None:
    text, score, kind = "", 0.0, 1
    for number, value in _fields(data, path):
        if number == 1 and isinstance(value, bytes):
            text = value.decode("utf-8", "replace")
        elif number == 2 and isinstance(value, bytes) and len(value) == 4:
            score = float(np.frombuffer(value, "<f4")[0])
        elif number == 3 and isinstance(value, int):
            kind = value
    pieces.texts.append(text)
    pieces.scores.append(score)
    pieces.kinds.append(_KINDS.get(kind, NORMAL))


def _fields(data: bytes, path: Path) -> Iterator[tuple[int, int | bytes]]:
    """Fields of a protobuf message: numbers of varints, bytes of everything else."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = 0
        for shift in range(0, 70, 7):
            if at >= len(data):
                break
            byte = data[at]
            at += 1
            value |= (byte & 127) << shift
            if byte < 128:
                return value
        raise CheckpointError(f"{path} is cut short or corrupt at byte {at}")

    while at < len(data):
        number, kind = divmod(varint(), 8)
        if kind == 0:
            yield number, varint()
            continue
        size = {1: 8, 5: 4}.get(kind, -1) if kind != 2 else varint()
        if size < 0 or at + size > len(data):
            raise CheckpointError(f"{path} is cut short or corrupt at byte {at}")
        yield number, data[at : at + size]
        at += size
