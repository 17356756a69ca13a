"""What `trace` in a body asks for: of each token, how it came to be drawn, and what its step read and cost.

It goes into a member `trace` of the choice: of a whole answer all tokens, of a streamed one those of the chunk.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ropewalk.engine.trace import TokenTrace
    from ropewalk.outputs import CompletionOutput, StreamChunk
    from ropewalk.text.tokenizer import Tokenizer


def traced(tokens: Iterable[TokenTrace], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Tokens as JSON values, each with its step: `TokenTrace.to_dict`, `StepTrace.to_dict`."""
    return [{**token.to_dict(tokenizer.token_text), "step": token.step.to_dict()} for token in tokens]


def of_completion(completion: CompletionOutput, tokenizer: Tokenizer) -> dict[str, Any]:
    """The member of a whole choice, or nothing if it was not asked for."""
    trace = completion.trace
    return {} if trace is None else {"trace": traced(trace.tokens, tokenizer)}


def of_chunk(chunk: StreamChunk, tokenizer: Tokenizer) -> dict[str, Any]:
    """The member of a chunk's choice, or nothing if it was not asked for."""
    return {} if chunk.trace is None else {"trace": traced([chunk.trace], tokenizer)}
