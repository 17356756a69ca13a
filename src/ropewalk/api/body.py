"""Bytes of a request's body to checked data. Nothing that a client sends is repeated in an error but field names.

JSON is read strictly: UTF-8 alone, no NaN or infinite numbers, no lone surrogates, bounded depth.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from ropewalk.api.errors import ApiError, near

MAX_DEPTH = 128
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
Model = TypeVar("Model", bound=BaseModel)


def read_json(data: bytes) -> dict[str, Any]:
    """Return the object in a body.

    Raises
    ------
    ApiError
        400 if it is no JSON object.
    """
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ApiError(f"the body is not UTF-8 (at byte {error.start})") from None
    try:
        value = json.loads(text, parse_constant=_refuse, parse_float=_finite)
        if _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ApiError("the body has half of a surrogate pair in a string") from None
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno}"
        raise ApiError(
            f"the body is not JSON: {error.msg} at {where}" if text.strip() else "the body is empty"
        ) from None
    except RecursionError:
        raise ApiError("the body is nested too deeply") from None
    except ValueError as error:
        raise ApiError(f"the body is not JSON: {_brief(error)}") from None
    if not isinstance(value, dict):
        raise ApiError("the body must be a JSON object")
    _check_depth(value)
    return value


def checked(model: type[Model], body: dict[str, Any]) -> Model:
    """Return the body as a model; an ApiError names the first field that is wrong."""
    try:
        return model.model_validate(body)
    except ValidationError as error:
        faults = error.errors(include_url=False, include_input=False)
        fault = max(faults, key=lambda fault: _telling(fault["type"], _path(fault, body)))
        path = _path(fault, body)
        name = _spelled(path)
        if fault["type"] == "extra_forbidden":
            known = model.model_fields if len(path) == 1 else ()
            message = f"unknown field {name!r}{near(str(path[-1]), known)}"
        elif fault["type"] == "missing":
            message = f"{name} is missing"
        elif fault["type"] == "value_error":
            message = f"{name}: {fault['ctx']['error']}" if name else str(fault["ctx"]["error"])
        else:
            here = {f["msg"] for f in faults if _path(f, body) == path}
            message = f"{name}: {' or '.join(sorted(text[0].lower() + text[1:] for text in here))}"
        raise ApiError(message, param=name or None) from None


def _telling(kind: str, path: Sequence[int | str]) -> tuple[bool, bool, int]:
    """How much a fault says. Of a union every alternative complains: who got furthest knows what was meant."""
    return path[-1:] == ["type"], kind == "extra_forbidden", len(path)


def _refuse(name: str) -> float:
    raise ValueError(f"{name} is no number")


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError("a number is too large")
    return value


def _brief(error: ValueError) -> str:
    return (
        "a number is too long" if "int_max_str_digits" in str(error) or "digits" in str(error) else str(error)
    )


def _check_depth(value: object) -> None:
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise ApiError(f"the body is nested too deeply: at most {MAX_DEPTH} levels")
        containers = [item for item in level if isinstance(item, dict | list)]
        level = [x for item in containers for x in (item.values() if isinstance(item, dict) else item)]


def _path(fault: Any, body: Any) -> list[int | str]:
    """The part of an error's place that is in the data; the names of a union's alternatives are not."""
    loc: Sequence[int | str] = fault["loc"]
    path: list[int | str] = []
    for number, part in enumerate(loc):
        if isinstance(body, dict):
            if part in body:
                body = body[part]
            elif number < len(loc) - 1 or fault["type"] != "missing":
                continue
        elif isinstance(body, list) and isinstance(part, int) and part < len(body):
            body = body[part]
        else:
            continue
        path.append(part)
    return path


def _spelled(path: Sequence[int | str]) -> str:
    """`["messages", 0, "role"]` as `messages[0].role`."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{_printable(part)}" for part in path)
    return text.removeprefix(".")


def _printable(name: str) -> str:
    return name if len(name) <= 64 and name.isprintable() else "(a name that cannot be shown)"
