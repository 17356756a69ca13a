"""Metadata of one architecture in a model file: typed and bounded reads, and a memory of what was read.

Knows what a value may look like, not what it means.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn

import numpy as np

from ropewalk.errors import CheckpointError, UnsupportedModelError, warn
from ropewalk.model.families import INERT_KEYS, UNIMPLEMENTED_KEYS

MAX_SIZE = 2**31 - 1
"""Largest size, vocabulary or position: token ids and positions are int32 everywhere."""


def show(value: object) -> str:
    """A value of the file for an error message: short, whatever the file holds."""
    if isinstance(value, np.ndarray):
        return f"{value.dtype} array of {value.size}, {value[:4].tolist()} …"
    text = repr(value)
    return text if len(text) <= 80 else text[:80] + "…"


class Keys:
    """The metadata of one architecture: typed and bounded reads, and a memory of what was read.

    Parameters
    ----------
    metadata : mapping
        Of a file. Only keys that begin with the architecture are seen, and all are named without it.
    architecture : str

    Raises
    ------
    CheckpointError
        By every read, naming the key, its value and what is allowed: the value is of another type or out of bounds, or
        is missing and has no default.
    UnsupportedModelError
        By reads of a number whose layers have different ones.
    """

    def __init__(self, metadata: Mapping[str, object], architecture: str) -> None:
        self.prefix = architecture + "."
        self._values = {
            key.removeprefix(self.prefix): value
            for key, value in metadata.items()
            if key.startswith(self.prefix)
        }
        self._read: set[str] = set()

    def has(self, key: str) -> bool:
        """Whether the file says something; this is no read."""
        return key in self._values

    def value(self, key: str) -> object:
        """What the file says, of whatever type; None if it says nothing."""
        self._read.add(key)
        return self._values.get(key)

    def integer(self, key: str, default: int | None = None, *, low: int = 1, high: int = MAX_SIZE) -> int:
        """A whole number in low ... high."""
        value = self._scalar(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            self.refuse(key, value, f"an integer from {low} to {high}")
        return value

    def number(
        self, key: str, default: float | None = None, *, low: float, high: float, open_low: bool = False
    ) -> float:
        """A number in low ... high; with `open_low` it must be above low."""
        value = self._scalar(key, default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not low <= value <= high or (open_low and value == low):
            self.refuse(key, value, f"a number {'above' if open_low else 'from'} {low:g} up to {high:g}")
        return float(value)

    def scale(self, key: str, default: float) -> float:
        """A positive factor; 0 or absent: the default."""
        return self.number(key, default, low=0.0, high=1e6) or default

    def boolean(self, key: str, default: bool) -> bool:
        """True or False."""
        value = self.value(key)
        if value is not None and not isinstance(value, bool):
            self.refuse(key, value, "true or false")
        return default if value is None else value

    def _scalar(self, key: str, default: float | None) -> float:
        """One number; an array (one entry a layer) counts as one when its entries are all the same."""
        value = self.value(key)
        if value is None:
            if default is None:
                raise CheckpointError(f"metadata key {self.prefix}{key} is missing")
            return default
        if isinstance(value, np.ndarray) and value.ndim == 1 and value.size:
            if (value != value[0]).any():
                raise UnsupportedModelError(
                    f"{self.prefix}{key} = {show(value)} is not supported; "
                    "all layers must have the same value"
                )
            value = value[0].item()
        return value  # type: ignore[return-value]  # its type is checked by the callers

    def refuse(self, key: str, value: object, allowed: str) -> NoReturn:
        """Raise the CheckpointError of a value that is not allowed."""
        raise CheckpointError(f"{self.prefix}{key} = {show(value)} is not allowed; it must be {allowed}")

    def check_the_rest(self) -> None:
        """Refuse features that are not implemented; warn of keys that nobody read."""
        for key, value in self._values.items():
            if key in UNIMPLEMENTED_KEYS and key not in self._read:
                neutral = UNIMPLEMENTED_KEYS[key]
                if isinstance(value, np.ndarray) or value not in neutral:
                    allowed = " or ".join(map(repr, neutral)) or "absent"
                    raise UnsupportedModelError(
                        f"{self.prefix}{key} = {show(value)} is not implemented; supported: {allowed}"
                    )
            elif key not in self._read and key not in INERT_KEYS:
                if key.startswith("rope."):
                    raise UnsupportedModelError(f"{self.prefix}{key} = {show(value)} is not implemented")
                warn(f"metadata key {self.prefix}{key} is unknown and not used")
