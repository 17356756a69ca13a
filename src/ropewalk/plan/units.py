"""Numbers with units: read strictly, written with their label.

GB and GiB are different: kB, MB, GB, TB are powers of 1,000, KiB, MiB, GiB, TiB powers of 1,024, and a plain number
is not a size. Knows nothing of models or machines.
"""

from __future__ import annotations

import math
import re
from typing import TypeVar

from ropewalk.errors import InvalidParameterError

_DECIMAL = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "p": 10**15}
_BYTES = {"b": 1, **{f"{p}b": n for p, n in _DECIMAL.items()}}
_BYTES |= {f"{p}ib": 1024**power for power, p in enumerate("kmgtp", 1)}
_COUNTS = {"": 1, **_DECIMAL, "b": 10**9}
_NUMBER = r"(\d[\d,_]*(?:\.\d+)?(?:e[+-]?\d+)?|\.\d+)"


def parse_bytes(text: str, what: str = "a size") -> int:
    """Bytes of text such as "24GB", "80 GiB" or "512MiB"; the unit must be given.

    Raises
    ------
    InvalidParameterError
        Not a number with such a unit, or not above 0.
    """
    number, unit = _split(text, what, "24GB, 22.5GiB or 80000000000B")
    if unit not in _BYTES:
        raise InvalidParameterError(
            f"{what} is {text!r}; allowed: a number with a unit, of 1,000s (kB, MB, GB, TB) or of 1,024s "
            f"(KiB, MiB, GiB, TiB)"
        )
    return _positive(round(number * _BYTES[unit]), text, what)


def parse_bandwidth(text: str, what: str = "a bandwidth") -> float:
    """Bytes per second of text such as "1TB/s", "936 GB/s" or "80GiB/s"; raises as `parse_bytes`."""
    stripped = text.strip()
    size, slash, second = stripped.rpartition("/")
    if not slash or second.strip().lower() != "s":
        raise InvalidParameterError(f"{what} is {text!r}; allowed: a size a second, such as 936GB/s or 1TB/s")
    number, unit = _split(size, what, "936GB/s or 1TB/s")
    if unit not in _BYTES:
        raise InvalidParameterError(f"{what} is {text!r}; allowed: a size a second, such as 936GB/s or 1TB/s")
    return _positive(number * _BYTES[unit], text, what)


def parse_rate(text: str, what: str = "a rate") -> float:
    """Operations per second of text such as "312T", "312 TFLOP/s" or "1.2P"; raises as `parse_bytes`."""
    lowered = re.sub(r"(flop/s|flops|op/s|ops|flop)$", "", text.strip().lower())
    number, unit = _split(lowered, what, "312T or 1.2P")
    if unit == "" or unit not in _DECIMAL:
        raise InvalidParameterError(f"{what} is {text!r}; allowed: operations a second, such as 312T or 1.2P")
    return _positive(number * _DECIMAL[unit], text, what)


def parse_count(text: str, what: str = "a count") -> int:
    """A whole number such as "6.74e9", "7B" (billion), "135M" or "6,738,415,616"; raises as `parse_bytes`."""
    number, unit = _split(text, what, "6.74e9, 7B or 135M")
    if unit not in _COUNTS:
        raise InvalidParameterError(f"{what} is {text!r}; allowed: a count, such as 6.74e9, 7B or 135M")
    return _positive(round(number * _COUNTS[unit]), text, what)


def _split(text: str, what: str, examples: str) -> tuple[float, str]:
    match = re.fullmatch(_NUMBER + r"\s*([a-z]*)", text.strip().lower())
    if match is None:
        raise InvalidParameterError(f"{what} is {text!r}; allowed: a positive number, such as {examples}")
    number = float(match[1].replace(",", "").replace("_", ""))
    if number > LARGEST:
        raise InvalidParameterError(f"{what} is {text!r}; allowed: at most {LARGEST:g}")
    return number, match[2]


LARGEST = 1e18
_Number = TypeVar("_Number", int, float)


def _positive(value: _Number, text: str, what: str) -> _Number:
    if not value > 0 or not math.isfinite(value):
        raise InvalidParameterError(f"{what} is {text!r}; allowed: more than 0")
    return value


def in_gib(n_bytes: float) -> str:
    """`2.00 GiB`: powers of 1,024."""
    return _scaled(n_bytes, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))


def in_gb(n_bytes: float) -> str:
    """`2.15 GB`: powers of 1,000."""
    return _scaled(n_bytes, 1000, ("B", "kB", "MB", "GB", "TB"))


def both(n_bytes: float) -> str:
    """`2.00 GiB (2.15 GB)`, or `64 B` where the two are the same."""
    return f"{n_bytes:,.0f} B" if n_bytes < 1000 else f"{in_gib(n_bytes)} ({in_gb(n_bytes)})"


def per_second(rate: float, unit: str) -> str:
    """`2.00 TB/s`, `312 TFLOP/s`: powers of 1,000."""
    return _scaled(rate, 1000, ("", "k", "M", "G", "T", "P", "E")) + f"{unit}/s"


def duration(seconds: float) -> str:
    """`6.75 ms`."""
    for limit, factor, unit in ((1e-3, 1e6, "µs"), (1.0, 1e3, "ms"), (120.0, 1.0, "s")):
        if seconds < limit:
            return f"{_digits(seconds * factor)} {unit}"
    return f"{_digits(seconds / 60)} min"


def _scaled(value: float, step: int, units: tuple[str, ...]) -> str:
    power = 0
    while abs(value) >= step and power < len(units) - 1:
        value, power = value / step, power + 1
    return f"{value:.0f} B" if units[power] == "B" else f"{_digits(value)} {units[power]}"


def _digits(value: float) -> str:
    """Three digits, and never an exponent."""
    places = 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0
    return f"{value:,.{places}f}"
