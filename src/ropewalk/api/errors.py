"""What a client is told when something is wrong, in OpenAI's shape."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

from ropewalk.errors import GenerationError, InvalidParameterError, PromptError, TemplateError

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
"""Of other statuses: "invalid_request_error" below 500, else "server_error"."""


class ApiError(Exception):
    """A request that gets an error for an answer.

    Attributes
    ----------
    status : int
        The HTTP status.
    param : str or None
        The field that is wrong, as a path such as `messages[0].role`.
    code : str or None
        A short name of the fault for programs.
    headers : dict
        HTTP headers of the answer, such as Retry-After.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code
        self.headers = headers or {}

    @property
    def body(self) -> dict[str, Any]:
        """`{"error": {"message", "type", "param", "code"}}`."""
        kind = TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def as_api_error(error: BaseException) -> ApiError:
    """What a client is told of any exception; a fault of ours is named by its kind alone."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, PromptError):
        code = "context_length_exceeded" if "at most" in str(error) else None
        return ApiError(str(error), code=code)
    if isinstance(error, InvalidParameterError):
        return ApiError(str(error), param=str(error).split(" is ", 1)[0] if " is " in str(error) else None)
    if isinstance(error, TemplateError):
        return ApiError(str(error), param="messages")
    if isinstance(error, GenerationError):
        return ApiError(str(error), status=500)
    return ApiError(f"internal error ({type(error).__name__})", status=500)


def no_such_model(name: str, known: Iterable[str]) -> ApiError:
    """The answer to who asks for a model that nobody has."""
    shown = repr(name) if len(name) <= 100 and name.isprintable() else "of that name"
    message = f"there is no model {shown}{near(name[:100], known)}"
    return ApiError(message, status=404, param="model", code="model_not_found")


def near(name: str, known: Iterable[str]) -> str:
    """`"; did you mean 'x'?"` if a known name is close, else nothing."""
    found = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {found[0]!r}?" if found else ""
