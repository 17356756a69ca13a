"""Log-probabilities in the shapes of the two endpoints; both are of the model's raw distribution.

The text of a token that is no whole characters is spelled `bytes:\\xf0\\x9f`, so that no two tokens look alike.
"""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING

from ropewalk.api.bodies import CompletionLogprobs, ContentLogprob, TokenLogprob
from ropewalk.engine.sampler import Logprob

if TYPE_CHECKING:
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


class CompletionLogprobsMaker:
    """Makes the `logprobs` of one completion, whole or in pieces; counts characters for `text_offset`."""

    def __init__(self, tokenizer: Tokenizer, skip_special: bool) -> None:
        self._tokenizer, self._skip_special = tokenizer, skip_special
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._n_characters = 0

    def of(self, logprobs: list[Logprob]) -> CompletionLogprobs:
        """The lists for the next tokens. The chosen token is always among its rivals."""
        made: CompletionLogprobs = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for logprob in logprobs:
            token, data = logprob.token_id, self._tokenizer.token_bytes(logprob.token_id)
            made["tokens"].append(spelled(data))
            made["token_logprobs"].append(logprob.logprob)
            rivals = {spelled(self._tokenizer.token_bytes(i)): value for i, value in logprob.top}
            made["top_logprobs"].append({**rivals, spelled(data): logprob.logprob})
            made["text_offset"].append(self._n_characters)
            if not (self._skip_special and self._tokenizer.is_special(token)):
                self._n_characters += len(self._utf8.decode(data))
        return made
