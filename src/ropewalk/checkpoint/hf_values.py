"""JSON files of Hugging Face's layout, and values of `config.json`: reading them says what is wrong with them.

This module does not know what the values mean.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ropewalk.checkpoint.cursor import show
from ropewalk.checkpoint.files import read_file
from ropewalk.errors import CheckpointError, UnsupportedModelError


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file; {} where there is no file.

    Raises
    ------
    CheckpointError
        If it cannot be read, is too long, or holds anything else.
    """
    if not path.is_file():
        return {}
    try:
        value = json.loads(read_file(path))
    except (ValueError, RecursionError) as e:
        if isinstance(e, CheckpointError):
            raise
        reason = "it is nested too deeply" if isinstance(e, RecursionError) else str(e)
        raise CheckpointError(f"{path} cannot be read: {reason[:200]}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds {show(value)}; it must be a JSON object")
    return value


class Config:
    """The object in `config.json`; of a model that also sees, the part about text.

    Parameters
    ----------
    values : the parsed object.
    label : what errors call it.

    Raises
    ------
    CheckpointError : a part of it that must be an object is something else. Every method raises it, naming the key and
        its value, for a value of the wrong type, and `integer` for one that is missing.
    """

    def __init__(self, values: Mapping[str, Any], label: str) -> None:
        text = values.get("text_config")
        self.values = {**values, **text} if isinstance(text, Mapping) else dict(values)
        self.label = label
        for key in ("text_config", "rope_scaling", "rope_parameters"):
            if (value := self.values.get(key)) is not None and not isinstance(value, Mapping):
                raise CheckpointError(f"{label}: {key} is {show(value)}; allowed: an object, null")

    def first(self, *names: str) -> Any:
        """The value under the first of these names that has one, or None."""
        return next((v for name in names if (v := self.values.get(name)) is not None), None)

    def integer(self, *names: str, default: int | None = None) -> int:
        """The whole number under the first of these names that has a value, from 0 to 2³¹ - 1."""
        value = self.first(*names)
        value = default if value is None else value
        if value is None:
            raise CheckpointError(f"{self.label}: {' or '.join(names)} is missing")
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 31:
            raise CheckpointError(
                f"{self.label}: {names[0]} is {show(value)}; allowed: a whole number from 0"
            )
        return value

    def number(self, *names: str) -> float | None:
        """The finite number under the first of these names that has a value, or None."""
        value = self.first(*names)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise CheckpointError(f"{self.label}: {names[0]} is {show(value)}; allowed: a number")
        return float(value)

    def flag(self, name: str) -> bool | None:
        """True, False, or None where there is no value."""
        value = self.values.get(name)
        if value is not None and not isinstance(value, bool):
            raise CheckpointError(f"{self.label}: {name} is {show(value)}; allowed: true, false")
        return value

    def demand(self, name: str, *allowed: object) -> None:
        """Refuse a feature that is not implemented (UnsupportedModelError); a value that is absent is allowed."""
        value = self.values.get(name)
        if value is not None and value not in allowed:
            raise UnsupportedModelError(
                f"{self.label}: {name} = {show(value)} is not supported; "
                f"supported: {', '.join(map(show, allowed)) or 'absent'}"
            )
