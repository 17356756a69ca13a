"""Turn generated tokens into text as they come: whole characters only, and nothing that may belong to a stop
string.

A token is bytes, which may end in the middle of a character, and its text may be the beginning of a stop
string. Both are held back until the next tokens decide. Work per token is proportional to its own text:
nothing is decoded or searched twice. This module knows nothing of sampling; its caller stops when
`stop_hit` says so.

The stop string that is complete first ends the text; of two that end with the same character, the longer
one. This depends on the text alone, never on how it is cut into tokens, so streamed and whole text agree.
"""

import codecs
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from ropewalk.errors import InvalidParameterError


class _Tokens(Protocol):
    def token_bytes(self, i: int) -> bytes: ...
    def is_special(self, i: int) -> bool: ...


class _Matcher:
    """Knuth, Morris and Pratt's automaton for one stop string.

    `state` is the length of the longest beginning of the stop string that the text so far ends with.
    """

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.state = 0
        # [k]: the next shorter beginning that the first k letters end with
        self._fallback = [0] * (len(stop) + 1)
        k = 0
        for i in range(1, len(stop)):
            while k and stop[i] != stop[k]:
                k = self._fallback[k]
            k += stop[i] == stop[k]
            self._fallback[i + 1] = k

    def feed(self, char: str) -> bool:
        """Take one more character; True when it completes the stop string."""
        k = self.state
        while k and char != self.stop[k]:
            k = self._fallback[k]
        self.state = k + (char == self.stop[k])
        return self.state == len(self.stop)


class StreamDecoder:
    """Decodes one sequence of generated tokens.

    Parameters
    ----------
    tokenizer : gives `token_bytes` and `is_special`.
    stop : strings that end the text.
    include_stop : keep the stop string at the end of the text.
    skip_special : leave out control tokens.

    Attributes
    ----------
    stop_hit : the stop string that ended the text, or None.
    text : all text emitted so far.

    Raises
    ------
    InvalidParameterError : a stop string is empty.
    """

    def __init__(
        self,
        tokenizer: _Tokens,
        stop: Sequence[str] = (),
        *,
        include_stop: bool = False,
        skip_special: bool = True,
    ) -> None:
        if isinstance(stop, str):
            stop = (stop,)
        if "" in stop:
            raise InvalidParameterError("a stop string is empty; it would end every text before it begins")
        self.stop_hit: str | None = None
        self._tokenizer = tokenizer
        self._matchers = [_Matcher(s) for s in sorted(stop, key=len, reverse=True)]
        self._include_stop = include_stop
        self._skip_special = skip_special
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._held: deque[str] = deque()
        self._emitted: list[str] = []

    @property
    def text(self) -> str:
        """All text emitted so far."""
        return "".join(self._emitted)

    def push(self, token_id: int, *, match_stops: bool = True) -> str:
        """Take the next token and return the text that is now certain; "" after a stop string.

        With `match_stops=False` (the first `min_tokens` tokens, say) text held so far and the token's text
        pass without a look at stop strings, and none may begin in them.
        """
        if self._skip_special and self._tokenizer.is_special(token_id):
            return ""
        return self._take(self._utf8.decode(self._tokenizer.token_bytes(token_id)), match_stops)

    def finish(self) -> str:
        """Return what was held back; the bytes of an unfinished character become one U+FFFD."""
        text = self._take(self._utf8.decode(b"", final=True), True)
        return text + self._release(len(self._held))

    def _take(self, text: str, match_stops: bool) -> str:
        if self.stop_hit is not None:
            return ""
        if not match_stops:
            for matcher in self._matchers:
                matcher.state = 0
            self._held.extend(text)
            return self._release(len(self._held))
        for char in text:
            self._held.append(char)
            hits = [matcher for matcher in self._matchers if matcher.feed(char)]
            if hits:
                return self._stop(hits[0].stop)  # the longest comes first
        pending = max((matcher.state for matcher in self._matchers), default=0)
        return self._release(len(self._held) - pending)

    def _stop(self, stop: str) -> str:
        """End the text; what is held ends with the stop string."""
        self.stop_hit = stop
        text = self._release(len(self._held) - (0 if self._include_stop else len(stop)))
        self._held.clear()
        return text

    def _release(self, n: int) -> str:
        """Emit the first n characters that are held."""
        text = "".join([self._held.popleft() for _ in range(n)])
        if text:
            self._emitted.append(text)
        return text
