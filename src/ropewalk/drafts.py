"""From what a caller says of drafts to a `Speculator`: the text itself, or a draft model that is found and packed.

Knows files and tokenizers; what is done with drafts is `ropewalk.engine.speculative`'s business.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING

from ropewalk.engine.budget import check_count
from ropewalk.engine.speculative.drafter import Drafter
from ropewalk.engine.speculative.lookup import PromptLookup
from ropewalk.engine.speculative.model import DraftModel
from ropewalk.engine.speculative.speculator import MAX_ROWS, Speculator
from ropewalk.errors import InvalidParameterError
from ropewalk.text.same import check_same_tokens

if TYPE_CHECKING:
    from ropewalk.checkpoint.hub import Progress
    from ropewalk.text.tokenizer import Tokenizer

Draft = str | os.PathLike[str] | Drafter | Speculator

LOOKUP = "lookup"
MOST_OF_LOOKUP, MOST_OF_MODEL = 15, 7
"""Guesses at once unless something else is said: with the token before them they make a step of 16, or of 8."""


def check_draft(draft: Draft | None, draft_tokens: int | None, *, kv_cache: bool) -> None:
    """Raise InvalidParameterError if drafts are asked for in a way that is not allowed."""
    if draft is None:
        if draft_tokens is not None:
            raise InvalidParameterError(f"draft_tokens is {draft_tokens} without a draft; allowed: with one")
        return
    if not isinstance(draft, str | os.PathLike | Speculator) and not hasattr(draft, "draft"):
        raise InvalidParameterError(
            f"draft is {draft!r}; allowed: {LOOKUP!r}, or a model's path, catalog name or hf.co/owner/repo[:file]"
        )
    if not kv_cache:
        raise InvalidParameterError(f"draft is {draft!r} with kv_cache=False; allowed: with a KV cache")
    if draft_tokens is not None:
        check_count("draft_tokens", draft_tokens)
        if not 1 <= draft_tokens < MAX_ROWS:
            raise InvalidParameterError(f"draft_tokens is {draft_tokens}; allowed: 1 ... {MAX_ROWS - 1}")


def open_speculator(
    draft: Draft,
    draft_tokens: int | None,
    tokenizer: Tokenizer,
    vocab_size: int,
    *,
    n_threads: int | None,
    token_budget: int,
    progress: Progress | None = None,
) -> Speculator:
    """Make what `draft` names; a draft model is opened and packed.

    Parameters
    ----------
    tokenizer, vocab_size
        Of the model that checks the drafts.

    Raises
    ------
    InvalidParameterError
        If a draft model has other tokens than the model.
    ModelNotFoundError, DownloadError, CheckpointError, UnsupportedModelError
        As `LLM` does for a model.
    """
    if isinstance(draft, Speculator):
        return draft
    if draft == LOOKUP:
        return Speculator(PromptLookup(), draft_tokens or MOST_OF_LOOKUP)
    if isinstance(draft, str | os.PathLike):
        draft = _open_model(draft, tokenizer, vocab_size, n_threads, token_budget, progress)
    return Speculator(draft, draft_tokens or MOST_OF_MODEL)


class _FileModel(DraftModel):
    """A draft model that also closes its file."""

    resources: ExitStack

    def close(self) -> None:
        super().close()
        self.resources.close()


def _open_model(
    name: str | os.PathLike[str],
    tokenizer: Tokenizer,
    vocab_size: int,
    n_threads: int | None,
    token_budget: int,
    progress: Progress | None,
) -> DraftModel:
    from ropewalk.backend.cpu import CpuBackend
    from ropewalk.checkpoint.base import open_checkpoint
    from ropewalk.checkpoint.hub import resolve
    from ropewalk.model.config import ModelConfig
    from ropewalk.text.tokenizer import Tokenizer

    shares: Callable[[str, float], None] | None = None
    if progress is not None:
        told = progress

        def shares(what: str, share: float) -> None:
            told(f"draft model: {what}", round(100 * share), 100)

    with ExitStack() as resources:
        checkpoint = resources.enter_context(open_checkpoint(resolve(name, progress=progress)))
        config = ModelConfig.from_gguf(checkpoint.metadata, checkpoint.tensors)
        check_same_tokens(tokenizer, Tokenizer.from_metadata(checkpoint.metadata))
        model = _FileModel(
            CpuBackend(checkpoint, config, n_threads=n_threads, progress=shares), vocab_size, token_budget
        )
        model.resources = resources.pop_all()
        return model
