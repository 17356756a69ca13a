"""Which operations a chat template may use, and what those that make much out of little have to pay
beforehand.

`sandbox` asks here before it calls a filter, a test, a method or an operator. The names of arguments in the
checks of filters are those of Jinja's own functions.
"""

import functools
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

from jinja2.exceptions import SecurityError

from ropewalk.text.budget import MAX_NUMBER_BITS, paid_argument, pay_for, spend

MAX_FIELD_WIDTH = 999
MAX_FORMAT_CHARACTERS = 10_000

_Check = Callable[[Mapping[str, Any]], None]  # takes the arguments of a filter by name

# fmt: off
FILTERS = frozenset([
    "abs", "attr", "batch", "capitalize", "center", "count", "d", "default", "dictsort", "e",
    "escape", "first", "float", "forceescape", "format", "groupby", "indent", "int", "items",
    "join", "last", "length", "list", "lower", "map", "max", "min", "reject", "rejectattr",
    "replace", "reverse", "round", "safe", "select", "selectattr", "slice", "sort", "string",
    "striptags", "sum", "title", "tojson", "trim", "truncate", "unique", "upper", "urlencode",
    "wordcount",
])
# These look at a value without reading it through: one step, however large it is.
_LOOKING_FILTERS = frozenset(["attr", "count", "d", "default", "first", "last", "length"])
_LOOKING_TESTS = frozenset([
    "boolean", "callable", "defined", "divisibleby", "escaped", "even", "false", "filter", "float", "integer",
    "iterable", "mapping", "none", "number", "odd", "sameas", "sequence", "string", "test", "true", "undefined",
])
METHODS: dict[type, frozenset[str]] = {
    str: frozenset([
        "capitalize", "casefold", "center", "count", "endswith", "find", "format", "format_map",
        "index", "isalnum", "isalpha", "isascii", "isdecimal", "isdigit", "isidentifier", "islower",
        "isnumeric", "isprintable", "isspace", "istitle", "isupper", "join", "ljust", "lower",
        "lstrip", "partition", "removeprefix", "removesuffix", "replace", "rfind", "rindex",
        "rjust", "rpartition", "rsplit", "rstrip", "split", "splitlines", "startswith", "strip",
        "swapcase", "title", "upper", "zfill",
    ]),
    dict: frozenset(["copy", "get", "items", "keys", "values"]),
    list: frozenset(["copy", "count", "index"]),
    tuple: frozenset(["count", "index"]),
    int: frozenset(["bit_length"]),
    float: frozenset(["is_integer"]),
}
# fmt: on
# Methods of strings that are paid for by what their arguments ask for.
_LONG_RESULTS = frozenset(["center", "join", "ljust", "replace", "rjust", "rsplit", "split", "zfill"])
_PIECE_BYTES = 50  # what a short string takes


def paying_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a filter pay for its arguments, and for its result where that may be longer."""
    return _stepping(function) if name in _LOOKING_FILTERS else _paying(function, _FILTER_CHECKS.get(name))


def paying_test(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a test pay for its arguments."""
    return _stepping(function) if name in _LOOKING_TESTS else _paying(function, None)


def _paying(function: Callable[..., Any], check: _Check | None) -> Callable[..., Any]:
    signature = inspect.signature(function) if check else None
    # Jinja hands some of its filters a context that the function behind them does not take.
    extra = int(_takes_context(function) and not _takes_context(inspect.unwrap(function)))

    @functools.wraps(function)
    def paying(*args: Any, **kwargs: Any) -> Any:
        spend()
        args = tuple(map(paid_argument, args))
        kwargs = {key: paid_argument(value) for key, value in kwargs.items()}
        if check and signature:
            bound = signature.bind(*args[extra:], **kwargs)
            bound.apply_defaults()
            check(bound.arguments)
        result = function(*args, **kwargs)
        if isinstance(result, (str, list)):
            spend(0, _size(result))
        return result

    return paying


def _takes_context(function: Callable[..., Any]) -> bool:
    return hasattr(function, "jinja_pass_arg")


def _stepping(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def stepping(*args: Any, **kwargs: Any) -> Any:
        spend()
        return function(*args, **kwargs)

    return stepping


# Payments for results that are longer than what goes in.


def _width(value: Any) -> int:
    """Length of text that a number asks for; what is no number is refused later by the operation itself."""
    return max(value, 0) if isinstance(value, int) else 0


def _pay_for_replace(text: object, old: object, new: object) -> None:
    text, old, new = str(text), str(old), str(new)
    spend(1, (text.count(old) + 1) * len(new) + len(text))


def _pay_for_indent(a: Mapping[str, Any]) -> None:
    width = a["width"]
    lines = str(a["s"]).count("\n") + 1
    spend(1, lines * (_PIECE_BYTES + (len(width) if isinstance(width, str) else _width(width))))


def _pay_for_pieces(text: object) -> None:
    """Pay for cutting a text into words or lines (half of its characters at most), or into characters."""
    if isinstance(text, str):
        spend(1, len(text) * 4)


def _pay_for_join(separator: object, items: object) -> None:
    n = len(items) if isinstance(items, (list, tuple, str, Mapping, range)) else 1
    spend(1, n * len(str(separator)))


_WIDE_PERCENT = re.compile(r"%(?:\(.*?\))?[#0\- +]*(?:\*|\d{4}|\d*\.(?:\*|\d{4}))", re.DOTALL)
_WIDE_BRACES = re.compile(r"\{[^{}]*(?:\{|\d{4})")


def _pay_for_format(text: str, arguments: object, wide: re.Pattern[str]) -> None:
    """Refuse fields wider than 999, and widths that are arguments; any field may show all of the arguments."""
    if len(text) > MAX_FORMAT_CHARACTERS or wide.search(text.replace("{{", "").replace("}}", "")):
        raise SecurityError(
            f"format fields are at most {MAX_FIELD_WIDTH} wide, and their width is a plain number"
        )
    spend(1, (text.count("%") + text.count("{")) * (MAX_FIELD_WIDTH + pay_for(arguments)) + len(text))


def _check_round(a: Mapping[str, Any]) -> None:
    if _width(a["precision"]) > 100:
        raise SecurityError(f"round with a precision of {a['precision']} is too fine")


def _check_sum(a: Mapping[str, Any]) -> None:
    if not isinstance(a["start"], (int, float)):
        raise SecurityError("sum starts at a number")


def _check_int(a: Mapping[str, Any]) -> None:
    if isinstance(a["value"], str) and len(a["value"]) > MAX_NUMBER_BITS // 4:
        raise SecurityError(f"a number of {len(a['value'])} characters is too long")


_FILTER_CHECKS: dict[str, _Check] = {
    "center": lambda a: spend(1, _width(a["width"])),
    "indent": _pay_for_indent,
    "replace": lambda a: _pay_for_replace(a["s"], a["old"], a["new"]),
    "join": lambda a: _pay_for_join(a["d"], a["value"]),
    "format": lambda a: _pay_for_format(str(a["value"]), [a["args"], a["kwargs"]], _WIDE_PERCENT),
    "batch": lambda a: spend(_width(a["linecount"])),
    "slice": lambda a: spend(_width(a["slices"])),
    "round": _check_round,
    "sum": _check_sum,
    "int": _check_int,
    **dict.fromkeys(("wordcount", "title"), lambda a: _pay_for_pieces(a["s"])),
    **dict.fromkeys(("striptags", "list", "sort", "groupby"), lambda a: _pay_for_pieces(a["value"])),
    "truncate": lambda a: spend(1, len(str(a["end"]))),
}


def check_method(method: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Refuse methods that are not listed, and pay for those that make long text."""
    owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
    owner_type = owner if isinstance(owner, type) else type(owner)
    kind = next((kind for kind in METHODS if issubclass(owner_type, kind)), None)
    if kind is None:
        return
    if name not in METHODS[kind]:
        raise SecurityError(f"the method {name!r} of {kind.__name__!r} is not available in chat templates")
    if not isinstance(owner, str):
        return
    pay_for(owner)
    if name in ("format", "format_map"):
        _pay_for_format(owner, [args, kwargs], _WIDE_BRACES)
    elif kwargs and name in _LONG_RESULTS:
        raise SecurityError(f"the method {name!r} takes its arguments by position in chat templates")
    elif name in ("split", "rsplit") and args and isinstance(args[0], str):
        spend(1, _PIECE_BYTES * owner.count(args[0] or " "))
    elif name in ("split", "rsplit", "splitlines"):
        _pay_for_pieces(owner)
    elif name in ("center", "ljust", "rjust", "zfill"):
        spend(1, max(map(_width, args), default=0))
    elif name == "replace" and len(args) >= 2:
        _pay_for_replace(owner, args[0], args[1])
    elif name == "join" and args:
        _pay_for_join(owner, args[0])


def check_binop(operator: str, left: Any, right: Any) -> None:
    """Pay for an operation with two operands; raises SecurityError if its result would be too large."""
    spend()
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
        if bits > MAX_NUMBER_BITS:
            raise SecurityError(f"numbers have at most {MAX_NUMBER_BITS} bits")
    elif operator == "*":
        many, times = (right, left) if isinstance(left, int) else (left, right)
        if isinstance(times, int) and isinstance(many, (str, list, tuple)):
            spend(1, _size(many) * max(times, 0))
    elif operator == "%" and isinstance(left, str):
        _pay_for_format(left, right, _WIDE_PERCENT)
    elif operator == "+" and isinstance(left, (str, list, tuple)) and isinstance(right, (str, list, tuple)):
        spend(1, _size(left) + _size(right))


def _size(many: str | list[Any] | tuple[Any, ...]) -> int:
    """Characters, or the bytes of references to elements."""
    return len(many) if isinstance(many, str) else 8 * len(many)
