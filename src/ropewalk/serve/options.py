"""What a server allows, and whom."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ropewalk.errors import InvalidParameterError

MIB = 2**20


@dataclass(frozen=True)
class ServerOptions:
    """Limits and access. Times are in seconds; None is no limit.

    Attributes
    ----------
    max_queue : int
        Completions that may wait for each model beyond those that run; more are refused with status 429.
    max_body_bytes : int
        Of a request.
    max_prompt_tokens, max_output_tokens : int or None
        Of a request, besides what the context allows. The second is also the default of `max_tokens` in a chat.
    request_s : float or None
        For a request from its arrival to its end.
    body_s : float
        For the body to arrive.
    grace_s : float
        For requests under way when the server is told to stop; then they are cut.
    api_keys : tuple of str
        Any of these opens everything but /health, which is open to all. None: everything is open.
    allowed_hosts : frozenset of str or None
        Host names that a request may call the server by, besides IP addresses; None allows all. Refusing others keeps
        web pages from reaching a server on this machine through a name of their own.
    cors_origins : tuple of str
        Origins of web pages that may call the server; "*" is all.
    aliases : mapping of str to str
        More names of models.
    """

    max_queue: int = 256
    max_body_bytes: int = 8 * MIB
    max_prompt_tokens: int | None = None
    max_output_tokens: int | None = None
    request_s: float | None = 600.0
    body_s: float = 30.0
    grace_s: float = 30.0
    api_keys: tuple[str, ...] = ()
    allowed_hosts: frozenset[str] | None = None
    cors_origins: tuple[str, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("max_queue", "max_body_bytes", "request_s", "body_s", "grace_s"):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise InvalidParameterError(f"{name} is {value!r}; allowed: a number of at least 0")
        for key in self.api_keys:
            if len(key) < 8 or not key.isascii() or not key.isprintable() or " " in key:
                raise InvalidParameterError(
                    "an API key is malformed; allowed: 8 or more ASCII characters, no spaces"
                )
