"""What one rendering of a chat template may use: steps, characters, seconds.

A template comes from an untrusted file and runs inside this process, where nothing can stop a long piece of
C from outside. So work is paid for before it is done: whatever costs more than a fixed time is measured
first. Exponential growth (doubling a string, a list that holds itself twice) therefore ends when the budget
does, and the clock is read at every payment. This module knows nothing of Jinja's syntax.
"""

import time
from collections.abc import Iterable, Iterator, Mapping, Set, Sized, ValuesView
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import chain
from typing import cast

from jinja2.utils import Namespace

MAX_STEPS = 1_000_000  # loop turns, calls, filters, elements looked at
MAX_CHARACTERS = 32_000_000  # of all strings made on the way, not only of the result
MAX_SECONDS = 5.0
MAX_NUMBER_BITS = 4096
_CHARACTERS_READ_PER_MADE = 8


class BudgetExceededError(Exception):
    """A rendering used up what it may use."""


class Budget:
    """What is left for one rendering."""

    def __init__(self) -> None:
        self._steps = MAX_STEPS
        self._characters = MAX_CHARACTERS
        self._deadline = time.monotonic() + MAX_SECONDS

    def spend(self, steps: int = 1, characters: int = 0) -> None:
        """Pay for work about to be done; raises BudgetExceededError when it is too much."""
        self._steps -= steps
        self._characters -= characters
        if self._steps < 0:
            raise BudgetExceededError(f"takes more than {MAX_STEPS} steps")
        if self._characters < 0:
            raise BudgetExceededError(f"makes more than {MAX_CHARACTERS} characters of text")
        if time.monotonic() > self._deadline:
            raise BudgetExceededError(f"takes longer than {MAX_SECONDS:g} seconds")


_current: ContextVar[Budget] = ContextVar("budget of the chat template being rendered")


@contextmanager
def fresh_budget() -> Iterator[None]:
    """Give the code inside a new budget."""
    token = _current.set(Budget())
    try:
        yield
    finally:
        _current.reset(token)


def spend(steps: int = 1, characters: int = 0) -> None:
    """Pay from the budget of the rendering that is going on."""
    _current.get().spend(steps, characters)


def pay_for(value: object, *, copied: bool = False) -> int:
    """Pay for reading a value all the way down: a step an element, and a share of the characters of strings.

    With `copied` the text of the value ends up in a new string, and every character counts. Returns the number
    of characters.
    """
    total = 0
    budget, share = _current.get(), 1 if copied else _CHARACTERS_READ_PER_MADE
    rest: list[Iterator[object]] = [iter((value,))]
    while rest:
        for item in rest[-1]:
            length = _length(item)
            budget.spend(1, length // share)
            total += length
            inner = _inside(item)
            if inner is not None:
                rest.append(inner)
                break
        else:
            rest.pop()
    return total


def _length(value: object) -> int:
    """Characters of a value that holds no others; for a range, those of its numbers."""
    if isinstance(value, (str, bytes)):
        return len(value)
    if isinstance(value, int):
        return value.bit_length() // 3
    return 8 * len(value) if isinstance(value, range) else 0


def _inside(value: object) -> Iterator[object] | None:
    """What a value holds, if it holds any."""
    if isinstance(value, (str, bytes)):
        return None
    if isinstance(value, Mapping):
        return chain(value.keys(), value.values())
    if isinstance(value, Namespace):
        return iter(cast(dict[str, object], value._Namespace__attrs).values())
    return iter(value) if isinstance(value, (list, tuple, Set, ValuesView)) else None


class Metered(Iterable[object], Sized):
    """An iterable that pays a step for each element; it has a length if the original has one."""

    def __init__(self, original: Iterable[object]) -> None:
        self._original = original

    def __iter__(self) -> Iterator[object]:
        for item in self._original:
            spend()
            yield item

    def __len__(self) -> int:
        return len(self._original)  # type: ignore[arg-type]  # TypeError where it has none, as Jinja expects


def paid_argument(value: object) -> object:
    """Pay for a value that is going to be read; a generator becomes a list, each of its elements paid for."""
    if isinstance(value, Iterator):
        value = list(Metered(value))
    pay_for(value)
    return value
