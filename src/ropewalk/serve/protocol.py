"""One connection: that it may not stay silent for ever, and what it is told when it talks no HTTP."""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from ropewalk.api.errors import ApiError
from ropewalk.serve.http import error_response

LOOK_S = 30.0
"""A connection that has not moved between two looks is cut, unless it waits for an answer."""


class Protocol(H11Protocol):
    """HTTP/1.1 on one connection.

    uvicorn limits the time between two requests only while nothing of the second has come, and waits for ever for a
    client to take its answer. Here it must, within one to two times `LOOK_S`, have sent the whole head of a request, or
    have taken some of what is there for it. A body that comes slowly, and an answer that takes long to make, have
    limits of their own.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to look."""
        super().connection_made(transport)
        self._seen: tuple[Any, int] | None = None
        self._looking = self.loop.call_later(LOOK_S, self._look)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop looking."""
        self._looking.cancel()
        super().connection_lost(exc)

    def _look(self) -> None:
        state = (self.cycle, self.transport.get_write_buffer_size())
        answering = self.cycle is not None and not self.cycle.response_complete
        if state == self._seen and (state[1] > 0 or not answering):
            self.transport.abort()
            return
        self._seen = state
        self._looking = self.loop.call_later(LOOK_S, self._look)

    def send_400_response(self, msg: str) -> None:
        """Tell a client that sends no HTTP, or a head that is too large, in the shape of all other errors."""
        cycle = self.cycle
        # Otherwise it would stand inside an answer.
        if cycle is None or cycle.response_complete or not cycle.response_started:
            answer = error_response(ApiError("the request is no valid HTTP/1.1, or its head is too large"))
            headers = [*answer.raw_headers, (b"connection", b"close")]
            try:
                for event in (
                    h11.Response(status_code=400, headers=headers, reason=b"Bad Request"),
                    h11.Data(data=bytes(answer.body)),
                    h11.EndOfMessage(),
                ):
                    self.transport.write(self.conn.send(event) or b"")
            except h11.LocalProtocolError:
                pass  # an answer was sent already: there is nothing left to say
        self.transport.close()
