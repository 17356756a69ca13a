"""Prompts that are longer than they may be: what is left out, on request, and what never is.

A plain prompt loses its middle: its first tokens and its last ones stay. A conversation loses whole turns, the oldest
first, so that the text stays one that the template writes; its system messages and its last turn stay. Knows token ids
and messages; how messages become ids is the caller's business.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ropewalk.errors import InvalidParameterError, PromptError, TemplateError
from ropewalk.params import SamplingParams

if TYPE_CHECKING:
    from ropewalk.text.tokenizer import Tokenizer

Conversation = Sequence[Mapping[str, Any]]
Encode = Callable[[Conversation], Sequence[int]]

SYSTEM_ROLES = ("system", "developer")
PROBES = ("x", "7")
"""Two messages that begin with different tokens."""


def most_tokens(n_tokens: int, params: SamplingParams, context_length: int) -> int:
    """Return how many of a prompt's tokens may stay; all of them if it is short enough or is not to be cut.

    Raises
    ------
    InvalidParameterError
        If `truncate_prompt_tokens` leaves no room for an output.
    """
    most = params.truncate_prompt_tokens
    if most is None:
        return n_tokens
    if most >= context_length:
        raise InvalidParameterError(
            f"truncate_prompt_tokens is {most}; allowed: at most {context_length - 1}, in a context of {context_length}"
        )
    if most == -1:
        if n_tokens < context_length:
            return n_tokens
        most = max(1, context_length // 2, context_length - (params.max_tokens or context_length))
    return min(n_tokens, most)


def cut_tokens(ids: Sequence[int], most: int, keep: int) -> Sequence[int]:
    """Leave out the middle of a prompt: the first `keep` tokens and the last ones stay, `most` in all.

    Raises
    ------
    InvalidParameterError
        If what is to be kept leaves no room for the last token.
    """
    if len(ids) <= most:
        return ids
    if keep >= most:
        raise InvalidParameterError(
            f"keep_tokens is {keep}; allowed: less than the {most} tokens that are left of a prompt of {len(ids)}"
        )
    return [*ids[:keep], *ids[len(ids) - (most - keep) :]]


def cut_turns(messages: Conversation, ids: Sequence[int], most: int, encode: Encode) -> Conversation:
    """Leave out the oldest turns of a conversation until at most `most` tokens are left; return the messages that stay.

    A turn begins with a message of the user. Messages of the system at the beginning stay. Fewer messages are taken to
    be fewer tokens, so that of a thousand turns only ten conversations are encoded.

    Raises
    ------
    PromptError
        If even the last turn is too long.
    """
    n_system = len(system_messages(messages))
    starts = [i for i, message in enumerate(messages) if i > n_system and message.get("role") == "user"]

    def without(start: int) -> Conversation:
        return [*messages[:n_system], *messages[start:]]

    n = bisect_left(starts, True, key=lambda start: len(encode(without(start))) <= most)
    if n == len(starts):
        n_left = len(encode(without(starts[-1]))) if starts else len(ids)
        raise PromptError(
            f"the last turn of the conversation has {n_left} tokens, with what stands before it; at most {most} fit"
        )
    return without(starts[n])


def fit(
    ids: Sequence[int],
    params: SamplingParams,
    context_length: int,
    tokenizer: Tokenizer,
    *,
    messages: Conversation | None = None,
    encode: Encode | None = None,
) -> tuple[Sequence[int], SamplingParams, Conversation | None]:
    """Cut a prompt that `params` let be cut, and say what a slide keeps if they do not.

    Parameters
    ----------
    ids : of the prompt, or of the whole conversation.
    messages, encode
        Of a conversation.

    Returns
    -------
    ids, params, messages
        What is left, with `keep_tokens` in place of its default.

    Raises
    ------
    InvalidParameterError, PromptError, TemplateError
        If it cannot be cut so.
    """
    most = most_tokens(len(ids), params, context_length)
    if most == len(ids) and not params.slide:
        return ids, params, messages
    if params.keep_tokens is None:
        n_start = int(len(ids) > 1 and tokenizer.bos_id is not None and ids[0] == tokenizer.bos_id)
        if messages is not None and encode is not None:
            n_start = max(n_start, head_tokens(messages, ids, encode, tokenizer.is_special))
        params = replace(params, keep_tokens=n_start)
    if most == len(ids):
        return ids, params, messages
    if messages is None or encode is None:
        return cut_tokens(ids, most, params.keep_tokens or 0), params, None
    left = cut_turns(messages, ids, most, encode)
    return encode(left), params, left


def system_messages(messages: Conversation) -> Conversation:
    """The messages of the system at the beginning of a conversation."""
    n = 0
    while n < len(messages) and messages[n].get("role") in SYSTEM_ROLES:
        n += 1
    return messages[:n]


def head_tokens(
    messages: Conversation, ids: Sequence[int], encode: Encode, is_special: Callable[[int], bool]
) -> int:
    """Return how many tokens at the beginning of a conversation come before its first turn.

    Found by comparing with conversations that differ in it: what all begin with, up to the token that opens the turn.
    Where the template puts the system message inside that turn, up to the message's end. 0 if it takes none of them.
    """
    system = system_messages(messages)

    def probe(system: Conversation, text: str) -> Sequence[int]:
        return encode([*system, {"role": "user", "content": text}])

    try:
        n = min(common(ids, probe(system, text)) for text in PROBES)
        opening = max((i for i in range(1, n) if is_special(ids[i])), default=n)
        if system:
            others = [[{**message, "content": text} for message in system] for text in PROBES]
            begins = min(common(ids, probe(other, PROBES[0])) for other in others)
            return opening if opening > begins else n
    except TemplateError:
        return 0
    return opening


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens at the beginning that two texts share."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))
