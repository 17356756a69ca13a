"""Runs the application in uvicorn, and stops it gracefully.

Told to stop, the server refuses new requests and lets those under way end; after `grace_s` they are cut, each with its
error. A second signal ends it at once.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import signal
import socket
import ssl
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import uvicorn

from ropewalk.errors import InvalidParameterError
from ropewalk.serve.protocol import Protocol

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from ropewalk.serve.app import Endpoints


class Server(uvicorn.Server):
    """uvicorn's server with our way of stopping.

    Parameters
    ----------
    config : uvicorn.Config
    endpoints : Endpoints
    sockets : list of sockets that `bind` returned
    """

    def __init__(self, config: uvicorn.Config, endpoints: Endpoints, sockets: list[socket.socket]) -> None:
        super().__init__(config)
        self._endpoints, self._sockets = endpoints, sockets
        self._tell: Callable[[int], None] = lambda port: None

    def run_telling(self, started: Callable[[int], None]) -> None:
        """Run until a signal comes; `started` is called with the port once there is one."""
        self._tell = started
        if threading.current_thread() is threading.main_thread():
            # uvicorn raises them once more when it has stopped.
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, lambda *_: None)
        self.run(self._sockets)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen; raises InvalidParameterError if another process began to listen there since `bind`."""
        try:
            await super().startup(sockets)
        except OSError as error:
            raise InvalidParameterError(
                f"port is in use by now ({error.strerror}); allowed: a free one"
            ) from None
        if self.started:
            self._tell(self.servers[0].sockets[0].getsockname()[1])

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop: see the module."""
        running = self._endpoints.running
        running.closing = True
        cut = asyncio.get_running_loop().call_later(self._endpoints.options.grace_s, running.cut)
        try:
            await super().shutdown(sockets)
        finally:
            cut.cancel()


def bind(host: str, port: int) -> list[socket.socket]:
    """Return sockets that have all addresses of a host; nothing can connect to them yet.

    Done before a model is loaded, so that a port that is taken is told at once.

    Raises
    ------
    InvalidParameterError
        If the host has no address of this machine, or the port is taken or not allowed.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise InvalidParameterError(
            f"host is {host!r} ({error}); allowed: an address of this machine"
        ) from None
    sockets: list[socket.socket] = []
    refused: OSError | None = None
    for family, kind, protocol, _, address in dict.fromkeys(found):
        try:
            sockets.append(_bound(family, kind, protocol, (address[0], port, *address[2:])))
        except OSError as error:
            refused = error
            # These two are those of ::1 where there is no IPv6.
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                sockets.clear()
                break
        else:
            port = sockets[0].getsockname()[1]
    if not sockets:
        assert refused is not None, "a host has at least one address"
        what = f"port is {port}" if refused.errno in (errno.EADDRINUSE, errno.EACCES) else f"host is {host!r}"
        raise InvalidParameterError(
            f"{what} ({refused.strerror}); allowed: a free port of an address of this machine"
        )
    return sockets


def _bound(family: int, kind: int, protocol: int, address: tuple[str | int, ...]) -> socket.socket:
    made = socket.socket(family, kind, protocol)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        made.bind(address)
    except OSError:
        made.close()
        raise
    return made


def check_certificate(certfile: str, keyfile: str) -> None:
    """Raise InvalidParameterError if the two cannot be used for HTTPS."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certfile, keyfile)
    except OSError as error:  # ssl.SSLError is one
        reason = error.strerror or str(error)
        raise InvalidParameterError(
            f"--ssl-certfile is {certfile} and --ssl-keyfile {keyfile} ({reason}); allowed: PEM files that match"
        ) from None


def make_server(
    app: Starlette,
    *,
    sockets: list[socket.socket] | None = None,
    root_path: str = "",
    ssl_certfile: str | None = None,
    ssl_keyfile: str | None = None,
    access_log: bool = True,
) -> Server:
    """Return a server that is not started; `run_telling` runs it until a signal comes.

    `sockets` are those of `bind`; default: a free port of 127.0.0.1.
    """
    endpoints: Endpoints = app.state.endpoints
    config = uvicorn.Config(
        app,
        http=Protocol,
        root_path=root_path,
        ssl_certfile=ssl_certfile,
        ssl_keyfile=ssl_keyfile,
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="off",
        ws="none",
        timeout_graceful_shutdown=int(endpoints.options.grace_s) + 10,
    )
    set_up_logs(access_log)
    return Server(config, endpoints, sockets or bind("127.0.0.1", 0))


def set_up_logs(access: bool) -> None:
    """Access log and faults go to stderr, one line each; of uvicorn only what is wrong."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    levels = {
        "ropewalk.access": "INFO" if access else "ERROR",
        "ropewalk.faults": "ERROR",
        "uvicorn": "ERROR",
    }
    for name, level in levels.items():
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)
