"""An `LLM` of toys: the model of `engine/toy.py`, and a tokenizer of thirteen tokens."""

import runpy
from pathlib import Path

import numpy as np

from ropewalk import LLM

ToyBackend = runpy.run_path(str(Path(__file__).parent / "engine" / "toy.py"))["ToyBackend"]

PIECES = [
    b"a",
    b"b",
    b"c",
    b"ab",
    b" ",
    b"\xf0\x9f",
    b"\x98\x80",
    b"d",
    "é".encode(),
    b"e",
    b"f",
    b"<s>",
    b"</s>",
]
BOS, END = 11, 12


class ToyTokenizer:
    """One token for each letter, two for an emoji, and special tokens."""

    vocab_size = len(PIECES)
    bos_id = BOS
    eos_ids = frozenset([END])

    def __init__(self, add_bos=False):
        self.add_bos = add_bos

    def encode(self, text, *, add_special=True, parse_special=False):
        ids = [self.bos_id] if add_special and self.add_bos else []
        while text:
            special = next((s for s in ("<s>", "</s>") if parse_special and text.startswith(s)), None)
            piece = special or text[0]
            ids.append(PIECES.index(piece.encode()))
            text = text[len(piece) :]
        return ids

    def decode(self, ids, *, skip_special=True):
        kept = [PIECES[i] for i in ids if not (skip_special and self.is_special(i))]
        return b"".join(kept).decode("utf-8", "replace")

    def token_bytes(self, i):
        return PIECES[i]

    def is_special(self, i):
        return i in (BOS, END)


class Scripted(ToyBackend):
    """Says the tokens of a script, by position, and END after it."""

    def __init__(self, script):
        super().__init__()
        self.script = script

    def logits(self, tokens):
        logits = np.zeros(len(PIECES), dtype=np.float32)
        logits[self.script[len(tokens)] if len(tokens) < len(self.script) else END] = 100
        return logits


class Reading(ToyBackend):
    """Has hidden states too: each token, its position and the number of those before it; `calls` lists what ran."""

    def __init__(self):
        super().__init__()
        self.config.hidden_size, self.config.pooling = 3, None
        self.calls = []

    def forward(self, batch, cache):
        self.calls.append("step")
        return super().forward(batch, cache)

    def hidden(self, batch, cache):
        self.calls.append("piece")
        super().forward(batch, cache)
        written = cache.slots[:, 0] >= 0
        each = [batch.tokens, batch.positions, np.full(len(batch.tokens), written.sum())]
        return np.stack(each, axis=1).astype(np.float32)


def toy_llm(backend=None, tokenizer=None, template=None, **options):
    sizes = {"context_length": 64, "kv_tokens": 256} | options
    return LLM.from_parts(backend or ToyBackend(), tokenizer or ToyTokenizer(), template, **sizes)


def says(*texts, prompt="a"):
    """An LLM that continues a one-token prompt with these pieces."""
    ids = [PIECES.index(t if isinstance(t, bytes) else t.encode()) for t in texts]
    return toy_llm(Scripted([PIECES.index(prompt.encode()), *ids]))


def idle(llm):
    """Whether no request and no page is in use."""
    engine = llm.driver.engine
    engine.check()
    return not engine.has_unfinished and not llm.driver.live and engine.statistics().pages_used == 0
