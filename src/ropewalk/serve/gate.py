"""What surrounds every request: keys, host names, an error in place of an exception, and a line in the log.

The log has one JSON object a line: who asked for what, how it ended and what it cost, never prompts or answers.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import json
import logging
import re
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ropewalk.api.bodies import new_id
from ropewalk.api.errors import ApiError
from ropewalk.serve import page
from ropewalk.serve.http import error_response
from ropewalk.serve.running import ClientGoneError

if TYPE_CHECKING:
    from ropewalk.serve.metrics import Metrics
    from ropewalk.serve.options import ServerOptions

access_log = logging.getLogger("ropewalk.access")
fault_log = logging.getLogger("ropewalk.faults")
OPEN_TO_ALL = frozenset({"/health"}) | page.PATHS
CLIENT_CLOSED = 499
"""What the log says of a request whose client went away, as nginx does."""


class Gate:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp, options: ServerOptions, metrics: Metrics) -> None:
        self._app, self._options, self._metrics = app, options, metrics
        self._digests = [_digest(key) for key in options.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, or answer it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if re.fullmatch(r"[\w.:-]{1,128}", given, re.ASCII) else new_id("req_")
        started, status = time.perf_counter(), 0
        record: dict[str, Any] = {}
        scope["ropewalk.log"] = record

        async def told(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            self._check(scope, headers)
            await self._app(scope, receive, told)
        except ClientGoneError:
            status = CLIENT_CLOSED
        except ApiError as error:
            await error_response(error)(scope, receive, told)
        except Exception:
            fault_log.exception("request %s failed", request_id)
            if status == 0:
                await error_response(ApiError("internal error", status=500))(scope, receive, told)
        finally:
            if status >= 400 and status != CLIENT_CLOSED:
                self._metrics.refused(status)
            client = scope.get("client")
            line = {
                "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
                "request_id": request_id,
                "client": client[0] if client else None,
                "method": scope["method"],
                "path": scope["path"],
                "status": status or CLIENT_CLOSED,
                "seconds": round(time.perf_counter() - started, 4),
                **record,
            }
            access_log.info("%s", json.dumps(line))

    def _check(self, scope: Scope, headers: Headers) -> None:
        hosts = self._options.allowed_hosts
        if hosts is not None and not _is_allowed(headers.get("host", ""), hosts):
            raise ApiError(
                "this server is not called by that host name; see --allow-host", status=403, code="host"
            )
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if self._digests and path not in OPEN_TO_ALL and scope["method"] != "OPTIONS":
            scheme, _, key = headers.get("authorization", "").partition(" ")
            # All of them are compared, always.
            found = [hmac.compare_digest(_digest(key), digest) for digest in self._digests]
            if scheme.lower() != "bearer" or not any(found):
                message = "a valid API key is needed: Authorization: Bearer KEY"
                raise ApiError(
                    message, status=401, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"}
                )


def _digest(key: str) -> bytes:
    """Keys of all lengths become equally long, so that comparing takes the same time."""
    return hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).digest()


def _is_allowed(host: str, allowed: frozenset[str]) -> bool:
    name = host.rpartition(":")[0] if re.search(r":\d*$", host) else host
    if name.lower() in allowed:
        return True
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True
