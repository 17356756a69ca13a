"""Byte-level BPE: a pre-split rule cuts text into words, and listed merges build tokens from their bytes.

Tokens are spelled in an alphabet of 256 printable characters, one a byte, as GPT-2 introduced it. The work
is done by `tokenizers`, built straight from the arrays of the file: 0.06 s for 49 152 tokens and 0.2 s for
151 936, where loading the same tokenizer from a saved `tokenizer.json` takes 0.07 s and 0.27 s. So nothing
is cached on disk.

Text that is not UTF-8 is read as llama.cpp reads it: U+FFFD for each byte that begins no character, while
characters that are too long for their value, or surrogates, pass.
"""

import re
from collections.abc import Iterable, Mapping

from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from ropewalk.errors import CheckpointError
from ropewalk.text.presplit import pre_split
from ropewalk.text.vocab import Vocab, key_error, raw_strings

_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
ALPHABET: dict[int, str] = {b: chr(b) for b in _PRINTABLE} | {b: chr(256 + i) for i, b in enumerate(_OTHERS)}
_BYTES: dict[str, int] = {char: byte for byte, char in ALPHABET.items()}

_SURROGATE = re.compile("[\ud800-\udfff]")
# A private character takes the place of a surrogate, which Rust strings cannot hold, while words are cut.
_STAND_IN = "\uf8ff"
_SEQUENCE = re.compile(
    rb"[\x00-\x7f]+|[\xc0-\xdf][\x80-\xbf]|[\xe0-\xef][\x80-\xbf]{2}|[\xf0-\xf7][\x80-\xbf]{3}|[\x80-\xff]"
)


def lenient_text(data: bytes) -> str:
    """Decode UTF-8 by its structure alone; the result may hold surrogates."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "".join(map(_lenient_char, _SEQUENCE.findall(data)))


def _lenient_char(sequence: bytes) -> str:
    first = sequence[0]
    if first < 0x80:
        return sequence.decode()
    if len(sequence) == 1:
        return "\ufffd"
    code = first & (0xFF >> (len(sequence) + 1))
    for byte in sequence[1:]:
        code = code << 6 | byte & 0x3F
    return chr(code) if code <= 0x10FFFF else "\ufffd" * len(sequence)


class ByteLevelBPE:
    """Encoder and decoder of one vocabulary.

    Raises CheckpointError where `tokenizer.ggml.merges` is missing or malformed, UnsupportedModelError where
    `tokenizer.ggml.pre` names an unknown rule.
    """

    add_space_prefix = False

    def __init__(self, vocab: Vocab, metadata: Mapping[str, object]) -> None:
        rule = pre_split(vocab.pre, metadata)
        self.add_bos = rule.add_bos
        self._n = len(vocab.tokens)
        texts = dict(zip(_decoded(vocab.tokens), range(self._n), strict=True))
        # A byte that the vocabulary lacks gets an id past its end, so that its neighbours do not become one
        # another's; `encode` drops it.
        missing = [char for char in ALPHABET.values() if char not in texts]
        texts.update((char, self._n + i) for i, char in enumerate(missing))
        self._tokenizer = Tokenizer(_bpe(texts, raw_strings(metadata, "merges"), rule.ignore_merges))
        self._tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in rule.patterns]
            + [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )

    def encode(self, text: bytes, *, prefix: bool) -> list[int]:
        """Return the ids of text without special tokens; `prefix` does nothing: no rule adds a space."""
        decoded = lenient_text(text)
        if _SURROGATE.search(decoded):
            ids = self._encode_with_surrogates(decoded)
        else:
            # In a batch of one, since only then others may run meanwhile: megabytes take seconds.
            ids = self._tokenizer.encode_batch_fast([decoded], add_special_tokens=False)[0].ids
        return [i for i in ids if i < self._n]

    def _encode_with_surrogates(self, text: str) -> Iterable[int]:
        """Cut the text with a stand-in for each surrogate, put the surrogates back, then merge."""
        originals = iter(re.findall(f"[\ud800-\udfff{_STAND_IN}]", text))
        spelled_stand_in = _spell(_STAND_IN)
        cut = self._tokenizer.pre_tokenizer.pre_tokenize_str(_SURROGATE.sub(_STAND_IN, text))
        for word, _ in cut:
            restored = re.sub(re.escape(spelled_stand_in), lambda _: _spell(next(originals)), word)
            yield from (token.id for token in self._tokenizer.model.tokenize(restored))

    def token_bytes(self, token: bytes) -> bytes:
        """Bytes that an ordinary token stands for; characters outside the alphabet stand for themselves."""
        text = token.decode("utf-8", "replace")
        try:
            return bytes([_BYTES[char] for char in text])
        except KeyError:
            return b"".join(bytes([_BYTES[c]]) if c in _BYTES else c.encode() for c in text)


def _spell(text: str) -> str:
    return "".join(ALPHABET[byte] for byte in text.encode("utf-8", "surrogatepass"))


def _decoded(items: list[bytes]) -> list[str]:
    """Decode many strings, at once where that is possible (ten times faster)."""
    text = b"\n".join(items).decode("utf-8", "replace").split("\n")
    return text if len(text) == len(items) else [item.decode("utf-8", "replace") for item in items]


def _bpe(texts: dict[str, int], merges: list[bytes], ignore_merges: bool) -> models.BPE:
    """Build the merges, each "left right"; the first of equals counts."""
    pairs = [tuple(merge.split(" ")) for merge in _decoded(list(dict.fromkeys(merges)))]
    try:
        return models.BPE(texts, pairs, ignore_merges=ignore_merges)  # type: ignore[arg-type]
    except Exception as error:  # a list like no BPE has: find out what is wrong with it
        raise _merge_error(texts, pairs) or key_error("merges", f"cannot be used: {error}") from None


def _merge_error(texts: dict[str, int], pairs: list[tuple[str, ...]]) -> CheckpointError | None:
    for pair in pairs:
        merge = " ".join(pair)
        if len(pair) != 2 or not all(pair):
            return key_error("merges", f"holds {merge!r}, which is not two tokens with a space between")
        for text in (*pair, "".join(pair)):
            if text not in texts:
                return key_error("merges", f"holds {merge!r}, but {text!r} is not a token")
    return None
