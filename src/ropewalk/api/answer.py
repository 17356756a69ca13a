"""What the text of an answer consists of: reasoning, content, and calls of tools, told apart as it grows.

`AnswerReader` takes the text piece by piece and says what is new; a whole answer is read in the same way, so streamed
and whole answers agree. Text is held back only while it may turn out to be something else.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Literal

from ropewalk.api.tools import ToolFormat

THINK, END_THINK = "<think>", "</think>"
PYTHON_TAG = "<|python_tag|>"  # Llama may write it before a call


@dataclass(frozen=True)
class Part:
    """What a piece of text adds.

    Attributes
    ----------
    kind : "reasoning", "content", "call" or "arguments"
        "call" begins a call, whose function is in `text`; "arguments" adds to the JSON text of its arguments.
    text : str
    index : int
        Number of the call.
    """

    kind: Literal["reasoning", "content", "call", "arguments"]
    text: str
    index: int = 0


class AnswerReader:
    """Reads one answer.

    Parameters
    ----------
    thinks : bool
        Whether the model writes its reasoning between <think> and </think> first.
    thinking : bool
        Whether the prompt has opened that already.
    tools : ToolFormat or None
        How calls are written; None reads no calls.
    names : collection of str
        Functions that may be called.
    """

    def __init__(
        self,
        *,
        thinks: bool = False,
        thinking: bool = False,
        tools: ToolFormat | None = None,
        names: Collection[str] = (),
    ) -> None:
        self._thought = _Thought(thinking) if thinks or thinking else None
        self._calls = _Calls(tools, names) if tools else None

    @property
    def n_calls(self) -> int:
        """Calls that have begun so far."""
        return self._calls.n_calls if self._calls else 0

    def push(self, text: str) -> list[Part]:
        """Take more text and return what is now certain."""
        return list(self._read(text, last=False))

    def finish(self) -> list[Part]:
        """Return what was held back."""
        return list(self._read("", last=True))

    def _read(self, text: str, *, last: bool) -> Iterator[Part]:
        if self._thought is not None:
            thought, text = self._thought.read(text, last)
            if thought:
                yield Part("reasoning", thought)
        if self._calls is not None:
            yield from self._calls.read(text, last)
        elif text:
            yield Part("content", text)


class _Thought:
    """Splits reasoning from the rest. `read` returns both as they become certain."""

    def __init__(self, thinking: bool) -> None:
        self._state: Literal["before", "in", "after", "over"] = "in" if thinking else "before"
        self._held = ""
        self._begun = False  # whether there was reasoning other than line breaks

    def read(self, text: str, last: bool) -> tuple[str, str]:
        thought, text = self._split(self._held + text, last)
        thought = thought if self._begun else thought.lstrip("\n")
        self._begun = self._begun or bool(thought)
        return thought, text

    def _split(self, text: str, last: bool) -> tuple[str, str]:
        self._held = thought = ""
        if self._state == "before":
            begun = text.lstrip()
            if begun.startswith(THINK):
                self._state, text = "in", begun.removeprefix(THINK)
            elif THINK.startswith(begun) and not last:
                self._held = text
                return "", ""
            else:
                self._state = "over"
        if self._state == "in":
            thought, found, rest = text.partition(END_THINK)
            if not found:
                n = 0 if last else _overlap(text, END_THINK)
                self._held = text[len(text) - n :]
                return text[: len(text) - n], ""
            self._state, text = "after", rest
        if self._state == "after":
            text = text.lstrip("\n")
            self._state = "over" if text else "after"
        return thought, text


class _Calls:
    """Finds calls in text."""

    def __init__(self, form: ToolFormat, names: Collection[str]) -> None:
        self.n_calls = 0
        self._format, self._names = form, names
        self._held = ""
        self._state: Literal["start", "text", "head", "arguments", "tail"] = "start"
        self._scanner = _Scanner()
        self._marker = ""  # as it was read, for the case that no call follows

    def read(self, text: str, last: bool) -> Iterator[Part]:
        self._held += text
        while (part := self._next(last)) is not None:
            if part.text:
                yield part

    def _next(self, last: bool) -> Part | None:
        """Return one part and take it out of what is held; None when more text is needed."""
        return {
            "start": self._in_start,
            "text": self._in_text,
            "head": self._in_head,
            "arguments": self._in_arguments,
            "tail": self._in_tail,
        }[self._state](last)

    def _take(self, n: int, state: Literal["text", "head", "arguments", "tail"]) -> str:
        taken, self._held = self._held[:n], self._held[n:]
        self._state = state
        return taken

    def _in_start(self, last: bool) -> Part | None:
        """White space before anything else belongs to a call if one follows."""
        text = self._held.lstrip()
        if not self._format.marker and text.startswith(PYTHON_TAG):
            self._held = text = text.removeprefix(PYTHON_TAG).lstrip()
        if not text and not last:
            return None
        if text.startswith("{"):  # also where there is a marker: small models forget it
            self._state = "head"
        elif self._format.marker and text.startswith(self._format.marker):
            self._held, self._state = text, "text"
        elif text and self._may_begin(text) and not last:
            return None
        else:
            self._state = "text"
        return Part("content", "")

    def _may_begin(self, text: str) -> bool:
        return (self._format.marker or PYTHON_TAG).startswith(text)

    def _in_text(self, last: bool) -> Part | None:
        marker = self._format.marker
        if not self._held:
            return None
        if not marker:
            return Part("content", self._take(len(self._held), "text"))
        at = self._held.find(marker)
        if at < 0:
            n = 0 if last else _overlap(self._held, marker)
            return Part("content", self._take(len(self._held) - n, "text")) if len(self._held) > n else None
        content = self._take(at, "head")
        self._marker, self._held = marker, self._held.removeprefix(marker)
        return Part("content", content)

    def _in_head(self, last: bool) -> Part | None:
        found = match_head(self._held, self._format)
        if found is None and not last:
            return None
        if not found or found[0] not in self._names:
            marker, self._marker = self._marker, ""
            held = self._take(len(self._held), "text")
            return Part("content", marker + held)
        name, n = found
        self._take(n, "arguments")
        self._scanner = _Scanner()
        self.n_calls += 1
        return Part("call", name, self.n_calls - 1)

    def _in_arguments(self, last: bool) -> Part | None:
        if not self._held:
            return None
        n = self._scanner.scan(self._held)
        text = self._take(n, "tail" if self._scanner.ended else "arguments")
        return Part("arguments", text, self.n_calls - 1)

    def _in_tail(self, last: bool) -> Part | None:
        """Pass over what closes a call, up to the next one or to other text."""
        rest = self._held
        for literal in ("}", "" if self._format.listed else self._format.closing.strip()):
            rest = rest.lstrip()
            if literal.startswith(rest) and rest != literal and not last:
                return None
            rest = rest.removeprefix(literal)
        rest = rest.lstrip()
        goes_on = rest.startswith("," if self._format.listed else "{") and (
            self._format.listed or not self._format.marker
        )
        if self._format.listed:
            rest = rest[1:].lstrip() if rest[:1] in (",", "]") else rest
        if not rest and not last:
            return None
        self._held, self._state, self._marker = rest, "head" if goes_on else "text", ""
        return Part("content", "")


class _Scanner:
    """Finds the end of a JSON object that comes in pieces."""

    def __init__(self) -> None:
        self.ended = False
        self._depth = 0
        self._in_string = self._escaped = False

    def scan(self, text: str) -> int:
        """Return how many of the characters belong to the object; `ended` says whether its end is among them."""
        for i, char in enumerate(text):
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif char == "\\":
                    self._escaped = True
                elif char == '"':
                    self._in_string = False
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self.ended = True
                    return i + 1
        return len(text)


def match_head(text: str, form: ToolFormat) -> tuple[str, int] | tuple[()] | None:
    """Read the beginning of a call: `{"name": "f", "arguments": ` before the `{` of the arguments.

    Returns
    -------
    (name, n) with n the number of characters before the arguments; () if this is no call; None if more is needed
    """
    opening = "[" if form.listed else ""
    patterns = [
        rf"\s*(?:{re.escape(opening)})?\s*" if opening else r"\s*",
        r"\{",
        r"\s*",
        r'"name"',
        r"\s*",
        ":",
        r"\s*",
    ]
    at = 0
    for pattern in patterns:
        if (match := re.compile(pattern).match(text, at)) is None:
            rest, literal = text[at:], pattern.replace("\\", "")
            return None if literal.startswith(rest) else ()
        at = match.end()
    if (match := re.compile(r'"([^"\\]{1,64})"').match(text, at)) is None:
        return None if re.fullmatch(r'("[^"\\]{0,64})?', text[at:]) else ()
    name, at = match.group(1), match.end()
    for pattern in (r"\s*", ",", r"\s*", '"(?:arguments|parameters)"', r"\s*", ":", r"\s*", r"(?=\{)"):
        if (match := re.compile(pattern).match(text, at)) is None:
            rest = text[at:]
            return (
                None
                if any(word.startswith(rest) for word in (",", '"arguments"', '"parameters"', ":"))
                else ()
            )
        at = match.end()
    return name, at


def _overlap(text: str, marker: str) -> int:
    """Length of the longest beginning of the marker, not all of it, that the text ends with."""
    return next((n for n in range(min(len(marker) - 1, len(text)), 0, -1) if text.endswith(marker[:n])), 0)
