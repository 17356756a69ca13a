"""SentencePiece-style tokens: from the characters up, the neighbours that form the best-scored token merge
first.

Text is bytes here. Spaces are written U+2581 (▁); a character that ends up in no token is spelled in byte
tokens (<0xEA>), or as the unknown token where the vocabulary has none. A character is what the first byte
of a UTF-8 sequence promises, so text that is not UTF-8 has ids too, the same as llama.cpp's.

The merges are not listed in the file; they follow from the scores. `tokenizers` can run them as BPE, but
needs them as a list: for the 262 144 tokens of Gemma 3 that is 514 847 merges, which take 1.1 s to work
out, 0.4 s to hand over, and 0.9 s to load from a `tokenizer.json`. The loop below needs nothing but the
dictionary of tokens (0.1 s from the file), and merges equal scores from left to right as the reference
does, which a list of ranks cannot say. Text is cut into words first, and the ids of short words are kept.
"""

import re
from collections.abc import Iterator, Mapping
from heapq import heapify, heappop, heappush
from itertools import pairwise

import numpy as np

from ropewalk.text.vocab import Vocab, flag, key_error, numbers

SPACE = "▁".encode()

# One character by its first byte, or as much of it as there is.
_SYMBOL = re.compile(rb"[\x00-\xbf]|[\xc0-\xdf].?|[\xe0-\xef].{0,2}|[\xf0-\xff].{0,3}", re.DOTALL)
# A run of ▁ and everything up to the next ▁.
_WORD = re.compile(rb"(?:\xe2\x96\x81)*[^\xe2]*(?:\xe2(?!\x96\x81)[^\xe2]*)*")
_CACHED_WORDS = 50_000
_CACHED_WORD_BYTES = 64


class SentencePiece:
    """Encoder and decoder of one vocabulary.

    Raises CheckpointError where `tokenizer.ggml.scores` is missing, of the wrong length, or not numbers.
    """

    def __init__(self, vocab: Vocab, metadata: Mapping[str, object]) -> None:
        scores = numbers(metadata, "scores", len(vocab.tokens), "fiu")
        if scores is None:
            raise key_error("scores", "is missing")
        if np.isnan(scores).any():
            raise key_error("scores", f"is not a number at {int(np.flatnonzero(np.isnan(scores))[0])}")
        self.add_space_prefix = flag(metadata, "add_space_prefix", True)
        self.add_bos = True
        self._vocab = vocab
        self._costs: list[float] = (-scores.astype(np.float64)).tolist()
        self._ids = vocab.ids
        # Text never turns into a control token, nor the six letters <0xEA> into a byte.
        self._closed = vocab.control | vocab.byte_ids
        self._byte_ids = [self._byte_id(b) for b in range(256)]
        self._glue = self._symbols_before_space()
        self._words: dict[bytes, list[int]] = {}

    def _byte_id(self, byte: int) -> int | None:
        """Token of one byte: spelled <0xEA>, else the byte itself."""
        ids = self._ids
        return ids.get(b"<0x%02X>" % byte, ids.get(bytes([byte])))

    def _symbols_before_space(self) -> tuple[bytes, ...]:
        """Characters after which a token goes on with ▁, so that no word may end there."""
        inside = (_SYMBOL.findall(token) for token in self._vocab.tokens if token.rfind(SPACE) > 0)
        return tuple({a for symbols in inside for a, b in pairwise(symbols) if a != SPACE == b})

    def encode(self, text: bytes, *, prefix: bool) -> list[int]:
        """Return the ids of text without special tokens; `prefix` puts a space in front of it."""
        text = (b" " + text if prefix else text).replace(b" ", SPACE)
        ids: list[int] = []
        for word in self._split(text):
            found = self._words.get(word)
            if found is None:
                found = self._encode_word(word)
                if len(word) <= _CACHED_WORD_BYTES:
                    if len(self._words) >= _CACHED_WORDS:
                        self._words.clear()
                    self._words[word] = found
            ids += found
        return ids

    def _split(self, text: bytes) -> Iterator[bytes]:
        """Cut text where no token can reach across: before ▁, except after the characters in `_glue`."""
        try:
            text.decode()
        except UnicodeDecodeError:  # a broken character may swallow a ▁
            yield text
            return
        held = b""
        for word in _WORD.findall(text):
            held += word
            if held and not held.endswith(self._glue):
                yield held
                held = b""
        if held:
            yield held

    def _encode_word(self, word: bytes) -> list[int]:
        ids: list[int] = []
        for symbol in self._merge(_SYMBOL.findall(word)):
            i = self._ids.get(symbol)
            if i is not None and i not in self._closed:
                ids.append(i)
            else:
                ids += self._spell(symbol)
        return ids

    def _spell(self, symbol: bytes) -> list[int]:
        spelled = [self._byte_ids[byte] for byte in symbol]
        known = [i for i in spelled if i is not None]
        if len(known) == len(spelled):
            return known
        return [] if self._vocab.unknown_id is None else [self._vocab.unknown_id]

    def _merge(self, symbols: list[bytes]) -> list[bytes]:
        """Merge neighbours into tokens, the best score first, the leftmost of equals, until none form one."""
        n = len(symbols)
        before, after = list(range(-1, n - 1)), list(range(1, n + 1))
        ids, costs, closed = self._ids, self._costs, self._closed

        def candidate(left: int, right: int) -> tuple[float, int, int, bytes] | None:
            text = symbols[left] + symbols[right]
            i = ids.get(text)
            return None if i is None or i in closed else (costs[i], left, right, text)

        queue = [c for right in range(1, n) if (c := candidate(right - 1, right))]
        heapify(queue)
        while queue:
            _, left, right, text = heappop(queue)
            if (
                not symbols[left]
                or not symbols[right]
                or len(symbols[left]) + len(symbols[right]) != len(text)
            ):
                continue  # one of the two has been merged since
            symbols[left], symbols[right] = text, b""
            after[left] = nearest = after[right]
            if nearest < n:
                before[nearest] = left
                if c := candidate(left, nearest):
                    heappush(queue, c)
            if before[left] >= 0 and (c := candidate(before[left], left)):
                heappush(queue, c)
        return [symbol for symbol in symbols if symbol]

    def token_bytes(self, token: bytes) -> bytes:
        """Bytes of text that an ordinary token stands for."""
        return token.replace(SPACE, b" ")
