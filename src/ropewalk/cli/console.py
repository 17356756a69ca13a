"""Writing to a terminal or a pipe: safe text, aligned lines, exit statuses.

Text that comes from a model file, a prompt or a model is never trusted: `visible` takes the terminal's
control characters out of it. Nothing here colours anything, so NO_COLOR and pipes need no special case.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import os
import sys
import unicodedata
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import typer

from ropewalk.cli.words import as_options
from ropewalk.errors import InvalidParameterError, RopewalkError, TruncationWarning

# Characters that change the order in which a line is read; harmless in prose, a disguise in a name.
_REORDERING = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\u200e\u200f\u061c")


def visible(text: str, *, keep: str = "\n\t") -> str:
    """`text` with every control character replaced by a visible one, except those in `keep`.

    ESC becomes U+241B and so on; what has no such picture becomes `\\x9b` in letters.
    """
    if text.isprintable():
        return text
    return "".join(c if c in keep or unicodedata.category(c) != "Cc" else _picture(c) for c in text)


def _picture(control: str) -> str:
    code = ord(control)
    return chr(0x2400 + code) if code < 0x20 else "\u2421" if code == 0x7F else f"\\x{code:02x}"


def one_line(text: object) -> str:
    """`text` for one line of a message: no control characters at all, and none that reorder the line."""
    shown = visible(str(text).replace("\n", " "), keep="")
    return "".join(f"\\u{ord(c):04x}" if c in _REORDERING else c for c in shown)


def reason(error: Exception) -> str:
    """Why a file cannot be used, without the number and the name that Python adds."""
    return getattr(error, "strerror", None) or str(error)


def write(text: str) -> None:
    """Write text to stdout at once: made safe for a terminal, exactly as it is for a pipe."""
    sys.stdout.write(visible(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def say(text: str) -> None:
    """A line on stdout."""
    print(text)


def tell(text: str) -> None:
    """A line on stderr: what is going on, never the result."""
    print(text, file=sys.stderr, flush=True)


def write_json(value: object) -> None:
    """`value` as one line of JSON on stdout. Strictly JSON: NaN and infinities are a fault."""
    print(json.dumps(value, allow_nan=False))


def columns(rows: Sequence[Sequence[str]], *, right: Iterable[int] = ()) -> str:
    """Rows as aligned text, two spaces between columns; the columns in `right` are aligned right."""
    right = frozenset(right)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(
            c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)


def fields(values: Mapping[str, str]) -> str:
    """`name  value` lines, aligned; a value of several lines is indented under its first."""
    width = max(map(len, values))
    indent = "\n" + " " * (width + 2)
    return "\n".join(f"{name:<{width}}  {value.replace(chr(10), indent)}" for name, value in values.items())


def byte_size(n_bytes: float) -> str:
    """A number of bytes as people read it, in powers of ten: `98.1 MB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if n_bytes < 1000:
            return f"{n_bytes:.0f} {unit}" if unit == "B" else f"{n_bytes:.1f} {unit}"
        n_bytes /= 1000
    return f"{n_bytes:.1f} TB"


def verb(function: Callable[..., None]) -> Callable[..., None]:
    """A verb with each of its endings turned into an exit status (see `ropewalk.cli.main`)."""

    parameters = inspect.signature(function).parameters.values()
    names = [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]

    @functools.wraps(function)
    def run(*args: Any, **options: Any) -> None:
        for stream in (sys.stdout, sys.stderr):
            if reconfigure := getattr(stream, "reconfigure", None):
                reconfigure(errors="replace")  # an ASCII terminal must not stop an answer
        try:
            with ending(names), warnings.catch_warnings():
                warnings.simplefilter("always", TruncationWarning)
                warnings.showwarning = _tell_warning
                function(*args, **options)
                sys.stdout.flush()
        except SystemExit as end:  # what `typer` calls it
            raise typer.Exit(int(end.code or 0)) from None

    return run


@contextmanager
def ending(options: Iterable[str] = ()) -> Iterator[None]:
    """Turn what ends a program into SystemExit with its status, told in a line on stderr. Our own faults pass.

    Parameters
    ----------
    options : iterable of str
        Names of the parameters that are options: an error about one of them calls it so.
    """
    try:
        yield
    except InvalidParameterError as error:
        tell(f"ropewalk: {one_line(as_options(str(error), options))}")
        raise SystemExit(2) from None
    except RopewalkError as error:
        tell(f"ropewalk: {one_line(error)}")
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        tell("")
        raise SystemExit(130) from None
    except BrokenPipeError:
        _give_up_stdout()
        raise SystemExit(1) from None
    except OSError as error:  # a full disk, a lost terminal, a file without permission
        what = f"{error.filename}: " if error.filename else ""
        tell(f"ropewalk: {one_line(what)}{one_line(error.strerror or error)}")
        _give_up_stdout()
        raise SystemExit(1) from None


def _give_up_stdout() -> None:
    """Nobody takes what is left for stdout: Python would flush it once more on its way out, and complain."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def open_standard_streams() -> None:
    """Let stdin, stdout and stderr be there: one that was closed becomes /dev/null, not the next file opened."""
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            flags = os.O_RDONLY if mode == "r" else os.O_WRONLY
            if (opened := os.open(os.devnull, flags)) != number:
                os.dup2(opened, number)
                os.close(opened)
            setattr(sys, name, open(number, mode, encoding="utf-8", errors="replace"))  # noqa: PTH123, SIM115


def _tell_warning(message: Warning | str, category: type[Warning], *where: object, **more: object) -> None:
    tell(f"ropewalk: warning: {one_line(message)}")
