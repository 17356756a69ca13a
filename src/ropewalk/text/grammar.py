"""Outputs that follow a JSON schema, a regular expression or a grammar, through llguidance.

`Grammars` knows a vocabulary and compiles; a `GrammarConstraint` is the state of one output, as `engine.constraint`
describes it. Masks are over bytes, so a character may be split over tokens. Schemas and grammars are untrusted input:
their size, and the work of one step, are bounded here.

Between the parts of a JSON text there is at most one space, or one line break with its indentation, so a model that
likes white space cannot go on with it for ever. Within strings white space is content.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ropewalk.errors import GenerationError, InvalidParameterError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_CHARACTERS = 200_000
"""Of a schema, expression or grammar."""

JSON_OPTIONS = {"whitespace_flexible": True, "whitespace_pattern": r"( |\n[ \t]{0,40})"}


class _Tokens(Protocol):
    vocab_size: int
    bos_id: int | None
    eos_ids: frozenset[int]

    def token_bytes(self, i: int) -> bytes: ...
    def is_special(self, i: int) -> bool: ...
    def encode(self, text: str | bytes, *, add_special: bool) -> list[int]: ...


class Grammars:
    """Makes constraints for one vocabulary. What is compiled from a vocabulary is made on first use.

    Parameters
    ----------
    tokenizer : Tokenizer
    vocab_size : int
        Rows of the output matrix, which may be more than the tokenizer has tokens; those beyond are never allowed.
    """

    def __init__(self, tokenizer: _Tokens, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size

    def json_object(self) -> GrammarConstraint:
        """Any JSON object."""
        return self.json_schema({"type": "object"})

    def json_schema(self, schema: Mapping[str, Any] | bool) -> GrammarConstraint:
        """A JSON text that the schema allows; raises InvalidParameterError, naming keywords that are not known."""
        if schema is False:
            raise InvalidParameterError("the JSON schema is false, which allows nothing")
        return self._compile("the JSON schema", "json_schema", _dump({} if schema is True else schema))

    def regex(self, pattern: str) -> GrammarConstraint:
        """A text that a regular expression (Rust's syntax, without look-around) matches as a whole."""
        return self._compile("the regular expression", "regex", pattern)

    def lark(self, grammar: str) -> GrammarConstraint:
        """A text of a grammar in llguidance's dialect of Lark, with `start` as its first rule."""
        return self._compile("the grammar", "lark", grammar)

    def _compile(self, what: str, kind: str, source: str) -> GrammarConstraint:
        from llguidance import LLMatcher

        if len(source) > MAX_CHARACTERS:
            raise InvalidParameterError(
                f"{what} has {len(source)} characters; allowed: at most {MAX_CHARACTERS}"
            )
        if kind == "json_schema":
            grammar = LLMatcher.grammar_from_json_schema(source, overrides=JSON_OPTIONS)  # type: ignore[arg-type]
        elif kind == "regex":
            grammar = LLMatcher.grammar_from_regex(source)
        else:
            grammar = LLMatcher.grammar_from_lark(source)
        matcher = LLMatcher(self._llguidance, grammar, log_level=0, limits=_limits())
        if matcher.is_error():
            raise InvalidParameterError(f"{what} cannot be used: {_brief(matcher.get_error())}")
        return GrammarConstraint(matcher, self._tokenizer.vocab_size, self._vocab_size)

    @cached_property
    def _llguidance(self) -> LLTokenizer:
        from llguidance import LLTokenizer, TokenizerWrapper

        wrapped = TokenizerWrapper(_Vocabulary(self._tokenizer))
        return LLTokenizer(wrapped, eos_token=sorted(self._tokenizer.eos_ids) or None)


class GrammarConstraint:
    """The state of one output."""

    def __init__(self, matcher: LLMatcher, n_tokens: int, vocab_size: int) -> None:
        self._matcher = matcher
        self._n_tokens, self._vocab_size = n_tokens, vocab_size

    def mask(self) -> NDArray[np.bool_]:
        """Tokens that may come next, bool [vocab_size]."""
        bits = np.zeros((self._n_tokens + 31) // 32, dtype=np.uint32)
        self._matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        if self._matcher.is_error():
            raise GenerationError(f"the grammar is too complex: {_brief(self._matcher.get_error())}")
        mask = np.zeros(self._vocab_size, dtype=np.bool_)
        n = min(self._n_tokens, self._vocab_size)
        mask[:n] = np.unpackbits(bits.view(np.uint8), count=n, bitorder="little")
        return mask

    def accept(self, token: int) -> None:
        """Take the next token."""
        if not self._matcher.consume_token(token):
            raise GenerationError(f"token {token} breaks the grammar: {_brief(self._matcher.get_error())}")

    @property
    def ended(self) -> bool:
        """Whether nothing may follow."""
        return self._matcher.is_stopped()

    @property
    def complete(self) -> bool:
        """Whether the output may end here."""
        return self._matcher.is_accepting()

    def fork(self) -> GrammarConstraint:
        """Return an independent copy in the same state."""
        return GrammarConstraint(self._matcher.deep_copy(), self._n_tokens, self._vocab_size)


class After:
    """A constraint that begins once the output has a marker, such as `</think>`; before it everything is allowed.

    Parameters
    ----------
    marker : str
    constraint : GrammarConstraint
        For what follows the token in which the marker ends.
    tokenizer : Tokenizer
    """

    def __init__(self, marker: str, constraint: GrammarConstraint, tokenizer: _Tokens) -> None:
        self._marker, self._constraint, self._tokenizer = marker.encode(), constraint, tokenizer
        self._tail: bytes | None = b""  # None: the marker has come

    def mask(self) -> NDArray[np.bool_] | None:
        """As `GrammarConstraint.mask`; None before the marker."""
        return self._constraint.mask() if self._tail is None else None

    def accept(self, token: int) -> None:
        """Take the next token."""
        if self._tail is None:
            self._constraint.accept(token)
            return
        text = self._tail + self._tokenizer.token_bytes(token)
        self._tail = None if self._marker in text else text[-len(self._marker) :]

    @property
    def ended(self) -> bool:
        """Whether nothing may follow."""
        return self._tail is None and self._constraint.ended

    def fork(self) -> After:
        """Return an independent copy in the same state."""
        copy = After(self._marker.decode(), self._constraint.fork(), self._tokenizer)
        copy._tail = self._tail
        return copy


class _Vocabulary:
    """A tokenizer as llguidance asks for it."""

    def __init__(self, tokenizer: _Tokens) -> None:
        ids = range(tokenizer.vocab_size)
        self.eos_token_id = min(tokenizer.eos_ids, default=0)
        self.bos_token_id = tokenizer.bos_id
        self.tokens: Sequence[bytes] = [tokenizer.token_bytes(i) for i in ids]
        self.special_token_ids: Sequence[int] = [i for i in ids if tokenizer.is_special(i)]
        self._tokenizer = tokenizer

    def __call__(self, text: str | bytes) -> list[int]:
        return self._tokenizer.encode(text, add_special=False)


def _limits() -> Any:
    """About 20 ms for compiling the lexer and 10 ms a step at most, by llguidance's own account of its speed."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        max_items_in_row=2000,
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=200_000,
        step_max_items=50_000,
        max_lexer_states=50_000,
        max_grammar_size=200_000,
        verbose_errors=False,
    )


def _dump(schema: object) -> str:
    try:
        return json.dumps(schema, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidParameterError(f"the JSON schema is no JSON: {error}") from None


def _brief(message: str) -> str:
    """The first lines of a message, as one; what llguidance prints of its state is left out."""
    lines = [line.strip() for line in re.split(r"\n<state>|\n\n", message)[0].splitlines()]
    return " ".join(line for line in lines if line and set(line) != {"^"})[:300] or "it is empty"
