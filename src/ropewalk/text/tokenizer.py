"""Text to token ids and back, for the vocabulary of a GGUF file.

`Tokenizer` finds special tokens in a text, leaves the text between them to the encoder of the file's kind
(`bytelevel` or `spm`), and adds the tokens that begin and end a text. Ids equal llama.cpp's, also for bytes
that are not UTF-8. It knows nothing of models or of chats.
"""

import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from numbers import Integral

from ropewalk.errors import PromptError
from ropewalk.text.bytelevel import ByteLevelBPE
from ropewalk.text.spm import SentencePiece
from ropewalk.text.vocab import BYTE_TEXT, Vocab, flag, key_error, read_vocab


@dataclass(frozen=True)
class TokenizerDescription:
    """What `inspect` shows of a tokenizer.

    Attributes
    ----------
    kind : "byte-level BPE" or "SentencePiece BPE".
    pre : name of the pre-split rule, or None.
    size : number of tokens.
    special : number of tokens that are not ordinary text (control and user-defined).
    """

    kind: str
    pre: str | None
    size: int
    special: int

    def __str__(self) -> str:
        rule = f", pre-split {self.pre}" if self.pre else ""
        return f"{self.kind}{rule}, {self.size} tokens, {self.special} special"


class Tokenizer:
    """Encode and decode with one vocabulary.

    Attributes
    ----------
    vocab_size : number of tokens; ids are 0 to vocab_size - 1.
    bos_id : id of the token that begins a text, or None.
    eos_id : id of the token that ends a text, or None.
    eos_ids : ids of all tokens that end a generation.
    add_bos, add_eos : whether `encode` puts BOS before and EOS after a text by default.
    add_space_prefix : whether a text is encoded as if a space came before it.
    description : for people.
    """

    def __init__(self, vocab: Vocab, metadata: Mapping[str, object]) -> None:
        self._vocab = vocab
        self._encoder: ByteLevelBPE | SentencePiece
        self._encoder = (
            ByteLevelBPE(vocab, metadata) if vocab.model == "gpt2" else SentencePiece(vocab, metadata)
        )
        self.vocab_size = len(vocab.tokens)
        self.bos_id, self.eos_id = vocab.bos_id, vocab.eos_id
        self.eos_ids = vocab.end_ids
        self.add_space_prefix = self._encoder.add_space_prefix
        self.add_bos = flag(metadata, "add_bos_token", self._encoder.add_bos)
        self.add_eos = flag(metadata, "add_eos_token", False)
        for name, wanted, i in (("bos", self.add_bos, vocab.bos_id), ("eos", self.add_eos, vocab.eos_id)):
            if wanted and i is None:
                raise key_error(
                    f"{name}_token_id", f"is missing, but texts are to have the {name.upper()} token"
                )
        self._matched_always = _Finder(vocab, vocab.user_defined)
        self._matched_on_request = _Finder(vocab, vocab.user_defined | vocab.control)

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, object]) -> "Tokenizer":
        """Build the tokenizer that GGUF metadata describes.

        Parameters
        ----------
        metadata : keys to values; string arrays are sequences of str, or have `raw_items() -> list[bytes]`;
            numeric arrays are NumPy arrays.

        Raises
        ------
        CheckpointError : a key is missing or malformed; the message names it.
        UnsupportedModelError : an unknown kind of tokenizer or pre-split rule.
        """
        return cls(read_vocab(metadata), metadata)

    @property
    def spellings(self) -> list[bytes]:
        """Text of each token as the file spells it."""
        return self._vocab.tokens

    @property
    def description(self) -> TokenizerDescription:
        """What `inspect` shows of the tokenizer."""
        vocab = self._vocab
        kind = "byte-level BPE" if vocab.model == "gpt2" else "SentencePiece BPE"
        special = len(vocab.control | vocab.user_defined)
        return TokenizerDescription(kind, vocab.pre or None, self.vocab_size, special)

    def encode(
        self,
        text: str | bytes,
        *,
        add_special: bool = True,
        parse_special: bool = False,
        continuation: bool = False,
    ) -> list[int]:
        """Return the token ids of a text.

        Parameters
        ----------
        text : str, or bytes that need not be UTF-8.
        add_special : put BOS before and EOS after the text where the model wants them (`add_bos`, `add_eos`).
        parse_special : read control tokens such as <|im_end|> in the text; otherwise they are plain letters.
            User-defined tokens are read in either case.
        continuation : the text goes on after other tokens, so no space is put before it.

        Raises
        ------
        PromptError : it is no text.

        Warns
        -----
        UserWarning : the text itself starts with the BOS token that is added; the ids then hold it twice.
        """
        if not isinstance(text, str | bytes):
            raise PromptError(f"a text is {text!r}; allowed: a string")
        data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
        finder = self._matched_on_request if parse_special else self._matched_always
        ids: list[int] = []
        prefix = self.add_space_prefix and not continuation
        for part in finder.split(data):
            if isinstance(part, int):
                ids.append(part)
                prefix = self.add_space_prefix
            else:
                ids += self._encoder.encode(part, prefix=prefix)
                prefix = False
        if add_special and self.add_bos and self.bos_id is not None:
            if ids[:1] == [self.bos_id]:
                warnings.warn("the prompt starts with the BOS token and gets another one", stacklevel=2)
            ids.insert(0, self.bos_id)
        if add_special and self.add_eos and self.eos_id is not None:
            ids.append(self.eos_id)
        return ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = True, continuation: bool = False) -> str:
        """Return the text of token ids; bytes that are not UTF-8 become U+FFFD.

        Parameters
        ----------
        ids : token ids.
        skip_special : leave out control tokens.
        continuation : the ids go on after others, as generated ids do: keep the space that begins the text.
            Otherwise the spaces that `encode` puts before a text and after special tokens go again.

        Raises
        ------
        PromptError : an id is no integer, or outside the vocabulary.
        """
        if isinstance(ids, str | bytes) or not isinstance(ids, Iterable):
            raise PromptError(f"token ids are {ids!r}; allowed: a sequence of integers")
        parts: list[bytes] = []
        at_start = self.add_space_prefix and not continuation
        for i in ids:
            part = self.token_bytes(i)
            if at_start and part.startswith(b" ") and not self._is_matched(i):
                part = part[1:]
            if not (skip_special and self.is_special(i)):
                parts.append(part)
            at_start = self.add_space_prefix and not continuation and self._is_matched(i)
        return b"".join(parts).decode("utf-8", "replace")

    def _is_matched(self, i: int) -> bool:
        return i in self._vocab.control or i in self._vocab.user_defined

    def token_bytes(self, i: int) -> bytes:
        """Return the bytes that a token stands for; raises PromptError unless it is one of the vocabulary.

        A control token gives its own spelling, whether or not `decode` would leave it out.
        """
        vocab = self._vocab
        if isinstance(i, bool) or not isinstance(i, Integral):
            raise PromptError(f"token id {i!r} is no integer")
        if not 0 <= i < self.vocab_size:
            raise PromptError(f"token id {i} is outside the vocabulary: ids are 0 to {self.vocab_size - 1}")
        token = vocab.tokens[i]
        if self._is_matched(i):
            return token
        if i in vocab.silent:
            return b""
        if i in vocab.byte_ids and (match := BYTE_TEXT.fullmatch(token)):
            return bytes([int(match.group(1), 16)])
        return self._encoder.token_bytes(token)

    def token_text(self, i: int) -> str:
        """Return `token_bytes` as text, for display and for chat templates."""
        return self.token_bytes(i).decode("utf-8", "replace")

    def is_special(self, i: int) -> bool:
        """Whether the token is left out of decoded text by default (BOS, <|im_end|>, …)."""
        return i in self._vocab.control


class _Finder:
    """Finds special tokens in text: the longest wherever it stands, then the next longest in what is left.

    That order, not left to right, is the reference's. Only tokens that occur at all take part: candidates are
    found by their first two bytes, so a text without any costs one pass of a regular expression.
    """

    def __init__(self, vocab: Vocab, ids: frozenset[int]) -> None:
        self._ids = {vocab.tokens[i]: i for i in ids if vocab.tokens[i]}
        lengths: dict[bytes, set[int]] = {}
        for text in self._ids:
            lengths.setdefault(text[:2], set()).add(len(text))
        self._lengths = {start: sorted(found) for start, found in lengths.items()}
        self._starts = re.compile(b"|".join(map(_starting, sorted(self._lengths)))) if lengths else None

    def _present(self, data: bytes) -> set[bytes]:
        found: set[bytes] = set()
        for match in self._starts.finditer(data) if self._starts else ():
            at = match.start()
            for start in (data[at : at + 2], data[at : at + 1]):
                for length in self._lengths.get(start, ()):
                    text = data[at : at + length]
                    if text in self._ids:
                        found.add(text)
        return found

    def split(self, data: bytes) -> Iterator[bytes | int]:
        """Yield the text as pieces of plain text and ids of special tokens."""
        parts: list[bytes | int] = [data]
        for text in sorted(self._present(data), key=lambda text: (-len(text), self._ids[text])):
            parts = [piece for part in parts for piece in _split_at(part, text, self._ids[text])]
        yield from (part for part in parts if part != b"")


def _starting(start: bytes) -> bytes:
    """Pattern of one byte that another may have to follow, so that matches one byte apart are found."""
    first, second = re.escape(start[:1]), re.escape(start[1:])
    return first + (b"(?=" + second + b")" if second else b"")


def _split_at(part: bytes | int, text: bytes, i: int) -> Iterator[bytes | int]:
    if isinstance(part, int):
        yield part
        return
    first, *others = part.split(text)
    yield first
    for other in others:
        yield i
        yield other
