"""Log-probabilities in the shapes of the endpoints; all are of the model's raw distribution.

The text of a token that is no whole characters is spelled `bytes:\\xf0\\x9f`, so that no two tokens look alike.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ropewalk.api.bodies import (
    CompletionLogprobs,
    ContentLogprob,
    PromptLogprob,
    PromptLogprobs,
    TokenLogprob,
)
from ropewalk.engine.sampler import Logprob

if TYPE_CHECKING:
    from ropewalk.outputs import RequestOutput
    from ropewalk.text.tokenizer import Tokenizer


def spelled(data: bytes) -> str:
    """A token's bytes as text."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def chat_logprob(tokenizer: Tokenizer, logprob: Logprob) -> ContentLogprob:
    """One item of a chat's `content`."""
    top = [_token(tokenizer, token, value) for token, value in logprob.top]
    chosen = _token(tokenizer, logprob.token_id, logprob.logprob)
    return {**chosen, "top_logprobs": top}


def _token(tokenizer: Tokenizer, token: int, logprob: float) -> TokenLogprob:
    data = tokenizer.token_bytes(token)
    return {"token": spelled(data), "logprob": logprob, "bytes": list(data)}


def prompt_logprobs(output: RequestOutput, tokenizer: Tokenizer, n_top: int) -> PromptLogprobs:
    """The member `prompt_logprobs`: of each token of the prompt, then of its `n_top` likeliest rivals."""

    def described(token: int, value: float, rank: int) -> PromptLogprob:
        return {"logprob": value, "rank": rank, "decoded_token": spelled(tokenizer.token_bytes(token))}

    found: PromptLogprobs = []
    for own in output.prompt_logprobs or ():
        if own is None:
            found.append(None)
            continue
        each = {str(own.token_id): described(own.token_id, own.logprob, own.rank)}
        for rank, (token, value) in enumerate(own.top[:n_top], 1):
            each.setdefault(str(token), described(token, value, rank))
        found.append(each)
    return found


class CompletionLogprobsMaker:
    """Makes the `logprobs` of one completion, whole or in pieces; counts characters for `text_offset`.

    Parameters
    ----------
    tokenizer : Tokenizer
    n_top : int
        Rivals of each token.
    skip_special : bool
        Whether the text is without special tokens.
    """

    def __init__(self, tokenizer: Tokenizer, n_top: int, *, skip_special: bool) -> None:
        self._tokenizer, self._n_top, self._skip_special = tokenizer, n_top, skip_special
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._n_characters = 0

    def of_prompt(self, output: RequestOutput, text: str) -> CompletionLogprobs:
        """The lists for the tokens of a prompt, which reads `text`.

        Tokens may have more characters than the text: a start token that was put before it, a first space. These are
        at its beginning, so offsets are counted from its end.
        """
        made = _nothing()
        for token, logprob in zip(output.prompt_token_ids, output.prompt_logprobs or (), strict=True):
            self._add(made, token, logprob)
            self._n_characters += len(self._utf8.decode(self._tokenizer.token_bytes(token)))
        surplus = self._n_characters - len(text)
        made["text_offset"] = [max(0, at - surplus) for at in made["text_offset"]]
        self._n_characters = len(text)
        return made

    def of(self, logprobs: Sequence[Logprob], before: CompletionLogprobs | None = None) -> CompletionLogprobs:
        """The lists for the next tokens, behind those `before`. The chosen token is always among its rivals."""
        made = before or _nothing()
        for logprob in logprobs:
            token = logprob.token_id
            self._add(made, token, logprob)
            if not (self._skip_special and self._tokenizer.is_special(token)):
                self._n_characters += len(self._utf8.decode(self._tokenizer.token_bytes(token)))
        return made

    def _add(self, made: CompletionLogprobs, token: int, logprob: Logprob | None) -> None:
        text = spelled(self._tokenizer.token_bytes(token))
        made["tokens"].append(text)
        made["text_offset"].append(self._n_characters)
        made["token_logprobs"].append(None if logprob is None else logprob.logprob)
        if logprob is None:
            made["top_logprobs"].append(None)
            return
        rivals = {spelled(self._tokenizer.token_bytes(i)): value for i, value in logprob.top[: self._n_top]}
        made["top_logprobs"].append({**rivals, text: logprob.logprob})


def _nothing() -> CompletionLogprobs:
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
