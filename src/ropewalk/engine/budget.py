"""How many tokens the KV cache has room for: from a number of bytes, a share of the free memory, or tokens.

Arithmetic on numbers that a backend gives; allocates nothing.
"""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass
from numbers import Integral

from ropewalk.backend.base import PAGE_SIZE
from ropewalk.engine.persist import DEFAULT_DISK_BYTES, folder_of
from ropewalk.errors import InvalidParameterError

DEFAULT_SHARE = 0.25
"""Of the memory that is free, what the KV cache may take unless something else is said."""

DEFAULT_CONTEXT = 8192
"""Most tokens of context unless something else is said."""

_UNITS = {"b": 1, **{f"{p}b": 1000**n for n, p in enumerate("kmgt", 1)}}
_UNITS |= {f"{p}ib": 1024**n for n, p in enumerate("kmgt", 1)}
_ALLOWED = "bytes (an integer, or text such as '2GiB' or '500MB'), or a share of what is free (0.25, '25%')"


@dataclass(frozen=True)
class CacheSize:
    """Tokens that one sequence may have, and tokens that the KV cache has room for: never fewer."""

    context_length: int
    kv_tokens: int


def cache_size(
    *,
    model_context: int,
    page_bytes: int,
    free_bytes: int,
    max_batch: int,
    context_length: int | None = None,
    kv_tokens: int | None = None,
    kv_memory: str | float | None = None,
) -> CacheSize:
    """Settle the sizes, given at most one of `kv_tokens` and `kv_memory`.

    Without `context_length` it is the model's, but at most `DEFAULT_CONTEXT` and what the cache was said to have room
    for. With neither of the others, the cache takes `DEFAULT_SHARE` of the free memory, but never more than the whole
    batch could fill, and never less than one context.

    Parameters
    ----------
    model_context : int
        The most tokens that the model can read.
    page_bytes : int
        Bytes of a page of `PAGE_SIZE` tokens over all layers.
    free_bytes : int
        Bytes that could be allocated now.
    max_batch : int
        Most requests that run at once.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed, or they contradict each other.
    """
    check_count("max_batch", max_batch)
    if kv_tokens is not None:
        check_count("kv_tokens", kv_tokens)
    if kv_tokens is not None and kv_memory is not None:
        raise InvalidParameterError("kv_tokens and kv_memory both size the KV cache; allowed: one of them")
    room, said = kv_tokens, f"kv_tokens is {kv_tokens}"
    if kv_memory is not None:
        room = parse_memory(kv_memory, free_bytes) // page_bytes * PAGE_SIZE
        said = f"kv_memory is {kv_memory}: room for {room} tokens, at {page_bytes} bytes for {PAGE_SIZE}"
    if room is not None and room < 2:
        raise InvalidParameterError(f"{said}; allowed: at least 2 tokens")
    check_context(context_length, model_context)
    if context_length is None:
        context_length = min(model_context, DEFAULT_CONTEXT, room or DEFAULT_CONTEXT)
    if room is None:
        share = int(DEFAULT_SHARE * free_bytes) // page_bytes * PAGE_SIZE
        room = max(context_length, min(share, max_batch * context_length))
    elif room < context_length:
        raise InvalidParameterError(f"{said}; allowed: at least context_length, which is {context_length}")
    elif (n_bytes := -(-room // PAGE_SIZE) * page_bytes) > max(free_bytes, page_bytes):
        raise InvalidParameterError(
            f"{said}, which takes {n_bytes:,} bytes; allowed: at most the {free_bytes:,} that are free"
        )
    return CacheSize(context_length, room)


def check_context(context_length: int | None, model_context: int) -> None:
    """Raise InvalidParameterError if a model cannot read that many tokens; None is the default and fine."""
    if context_length is None:
        return
    check_count("context_length", context_length)
    if not 2 <= context_length <= model_context:
        raise InvalidParameterError(
            f"context_length is {context_length}; allowed: 2 ... {model_context}, the model's"
        )


def check_count(name: str, value: object) -> None:
    """Raise InvalidParameterError if a number of things is not an integer."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise InvalidParameterError(f"{name} is {value!r}; allowed: an integer")


def disk_bytes(folder: str | os.PathLike[str] | None, size: str | float | None) -> int:
    """Most bytes of pages in a folder on disk, given a size as `parse_memory` reads it.

    Raises
    ------
    InvalidParameterError
        If it is none, or there is one and no folder.
    """
    if size is None:
        return DEFAULT_DISK_BYTES
    if folder is None:
        raise InvalidParameterError(f"cache_dir_size is {size!r}; allowed: None, without a cache_dir")
    wanted = folder_of(folder).absolute()
    there = next(path for path in (wanted, *wanted.parents) if path.exists())
    return parse_memory(size, shutil.disk_usage(there).free, name="cache_dir_size")


def parse_memory(value: str | float, free_bytes: int, *, name: str = "kv_memory") -> int:
    """Return bytes: of an integer, of text with a unit, or of a share (float, or text with %) of the free ones.

    Raises
    ------
    InvalidParameterError
        If it is none of these, or not above 0, or a share above 1.
    """
    number: float | None = None
    if isinstance(value, str):
        if match := re.fullmatch(r"(\d+|\d*\.\d+) ?(%|[kmgt]i?b|b|)", value.strip().lower()):
            digits, unit = match.groups()
            number = float(digits) if "." in digits else int(digits)
            if unit:
                number = number / 100 if unit == "%" else int(number * _UNITS[unit])
    elif isinstance(value, int | float) and not isinstance(value, bool):
        number = value
    if isinstance(number, float) and 0 < number <= 1:
        return int(number * free_bytes)
    if isinstance(number, int) and number > 0:
        return number
    raise InvalidParameterError(f"{name} is {value!r}; allowed: {_ALLOWED}")
