"""A tiny deterministic "model" for engine tests, in which every mistake of the engine changes tokens.

The cache holds, for each slot, the token and the position written there. Logits of a token are a hash of the
whole history, read back through the page table; a slot that was not written, or was written for another
position, is an error at once, and a slot of another sequence gives other tokens. With `rope_switch` the written
position also says whether the sequence was long, and all of a sequence must agree.
"""

from types import SimpleNamespace

import numpy as np

VOCAB = 13
PAGE = 16
LONG = 10**6


class ToyCache:
    def __init__(self, n_pages):
        self.n_pages = n_pages
        self.bytes_per_page = PAGE * 16
        self.n_bytes = n_pages * self.bytes_per_page
        self.slots = np.full((n_pages * PAGE, 2), -1, dtype=np.int64)

    def copy_pages(self, pairs):
        pages = self.slots.reshape(self.n_pages, PAGE, 2)
        for source, target in pairs:
            assert source != target
            pages[target] = pages[source]

    def read_page(self, page):
        return self.slots.reshape(self.n_pages, -1)[page].view(np.uint8).copy()

    def write_page(self, page, contents):
        self.slots.reshape(self.n_pages, -1)[page] = contents.view(np.int64)


class ToyBackend:
    """`poison` maps a token id to the value that all logits have after it."""

    def __init__(self, poison=None, fail_at=None, vocab_size=VOCAB, rope_switch=0):
        self.config = SimpleNamespace(vocab_size=vocab_size, context_length=512, rope_switch=rope_switch)
        self.poison = poison or {}
        self.fail_at = fail_at
        self.batch_sizes = []
        self.cache_dtypes = []
        self.closed = False

    free_bytes = 2**20

    def page_bytes(self, dtype="float16"):
        return PAGE * 16

    def identity(self, dtype="float16"):
        return f"toy {self.config.vocab_size} {dtype}".encode()

    def new_cache(self, n_pages, dtype="float16"):
        self.cache_dtypes.append(dtype)
        return ToyCache(n_pages)

    def forward(self, batch, cache):
        batch.check(vocab_size=self.config.vocab_size, n_pages=cache.n_pages)
        self.batch_sizes.append(len(batch.tokens))
        if self.fail_at is not None and len(self.batch_sizes) == self.fail_at[0]:
            raise self.fail_at[1]
        long = self.is_long(batch)[batch.sequences]
        cache.slots[batch.slots] = np.stack([batch.tokens, batch.positions + LONG * long], axis=1)
        return np.stack([self.logits_of(batch, row, cache) for row in batch.logit_rows] or [np.zeros(0)])

    def logits_of(self, batch, row, cache):
        positions = np.arange(batch.positions[row] + 1)
        table = batch.page_tables[batch.sequences[row]]
        history = cache.slots[table[positions // PAGE] * PAGE + positions % PAGE]
        long = bool(self.is_long(batch)[batch.sequences[row]])
        written = (positions + LONG * long).tolist()
        assert history[:, 1].tolist() == written, "a slot was never written, or by someone else"
        tokens = history[:, 0].tolist()
        return self.logits(tokens, long=True) if long else self.logits(tokens)

    def is_long(self, batch):
        return (self.config.rope_switch > 0) & (batch.known > self.config.rope_switch)

    def logits(self, tokens, *, long=False):
        """float32 [VOCAB] after these tokens: quarters between 0 and 7.75, with ties."""
        state = 1 + 7 * long
        for position, token in enumerate(tokens):
            state = (
                state * 6364136223846793005 + token * 2654435761 + position + 1442695040888963407
            ) % 2**64
        ids = np.arange(1, self.config.vocab_size + 1, dtype=np.uint64)
        mixed = (np.uint64(state) ^ (ids * np.uint64(0x9E3779B97F4A7C15))) * np.uint64(0xD6E8FEB86659FD93)
        logits = ((mixed >> np.uint64(40)) % np.uint64(32)).astype(np.float32) / 4
        return np.full_like(logits, self.poison[tokens[-1]]) if tokens[-1] in self.poison else logits

    def close(self):
        self.closed = True
