"""Runs the application in uvicorn, and stops it gracefully.

Told to stop, the server refuses new requests and lets those under way end; after `grace_s` they are cut, each with its
error. A second signal ends it at once.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import uvicorn

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from ropewalk.serve.app import Endpoints


class Server(uvicorn.Server):
    """uvicorn's server with our way of stopping.

    Parameters
    ----------
    config : uvicorn.Config
    endpoints : Endpoints
    """

    def __init__(self, config: uvicorn.Config, endpoints: Endpoints) -> None:
        super().__init__(config)
        self._endpoints = endpoints
        self._tell: Callable[[int], None] = lambda port: None

    def run_telling(self, started: Callable[[int], None]) -> None:
        """Run until a signal comes; `started` is called with the port once there is one."""
        self._tell = started
        if threading.current_thread() is threading.main_thread():
            for number in (
                signal.SIGINT,
                signal.SIGTERM,
            ):  # uvicorn raises them once more when it has stopped
                signal.signal(number, lambda *_: None)
        self.run()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen."""
        await super().startup(sockets)
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


def make_server(
    app: Starlette,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    root_path: str = "",
    ssl_certfile: str | None = None,
    ssl_keyfile: str | None = None,
    access_log: bool = True,
) -> Server:
    """Return a server that is not started; `run()` runs it until a signal comes."""
    endpoints: Endpoints = app.state.endpoints
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
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
    return Server(config, endpoints)


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
