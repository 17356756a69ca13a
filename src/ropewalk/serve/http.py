"""Bodies in and out of sockets: a request's body within limits, events as they come, and an eye on the client.

Nobody asks whether the client is still there but the one who waits for its disconnection; so every answer that takes
long is raced against that.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from ropewalk.api.bodies import Event
from ropewalk.api.body import read_json
from ropewalk.api.errors import ApiError
from ropewalk.serve.running import ClientGoneError, Streaming

DRAINED_BYTES = 128 * 2**20
"""Read and dropped of a body that is too large, so that the client gets to the point of reading why."""

PING_S = 15.0
"""Without an event for so long, a comment is sent, lest a proxy thinks that nobody is there."""

Result = TypeVar("Result")


def error_response(error: ApiError) -> JSONResponse:
    """The answer that tells of an error."""
    return JSONResponse(error.body, status_code=error.status, headers=error.headers)


async def read_body(request: Request, *, most: int, seconds: float) -> dict[str, Any]:
    """Return the JSON object in a request's body.

    Raises
    ------
    ApiError
        400 if it is none, 408 if it takes too long to come, 413 if it is too large, 415 if it is said to be
        something else.
    ClientGoneError
        If the client leaves before.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError("the content type must be application/json", status=415)
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise ApiError("the body must not be compressed", status=415)
    data, n = bytearray(), 0
    try:
        async with asyncio.timeout(seconds):
            async for chunk in request.stream():
                n += len(chunk)
                if n <= most:
                    data += chunk
                elif n > DRAINED_BYTES:
                    break
    except ClientDisconnect:
        raise ClientGoneError from None
    except TimeoutError:
        raise ApiError(f"the body did not arrive within {seconds:g} s", status=408) from None
    if n > most:
        raise ApiError(f"the body is too large; this server allows {most} bytes", status=413)
    return read_json(bytes(data)) if n < 2**16 else await asyncio.to_thread(read_json, bytes(data))


async def while_connected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Return the result of `work`; cancel it and raise ClientGoneError when the client goes first."""
    working, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnection(receive))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGoneError
    finally:
        for task in (working, gone):
            task.cancel()
        await asyncio.wait({working, gone})


async def _disconnection(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events of a task that has begun."""

    media_type = "text/event-stream"

    def __init__(self, streaming: Streaming) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._streaming = streaming

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all events, unless the client goes before."""
        loop = asyncio.get_running_loop()
        latest = loop.time()

        async def write(text: str, *, more: bool = True) -> None:
            nonlocal latest
            latest = loop.time()
            await send({"type": "http.response.body", "body": text.encode(), "more_body": more})

        async def events(several: list[Event]) -> None:
            await write("".join(map(as_event, several)))

        async def ping() -> None:
            while True:
                await asyncio.sleep(latest + PING_S - loop.time())
                if loop.time() >= latest + PING_S:
                    await write(": still here\n\n")

        pinging = asyncio.ensure_future(ping())
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await while_connected(receive, self._streaming.run(events))
            await write("data: [DONE]\n\n", more=False)
        finally:
            pinging.cancel()
            await self._streaming.close()


def as_event(event: Event) -> str:
    """One event as text; it is named by its type where it has one."""
    name = f"event: {event['type']}\n" if isinstance(event.get("type"), str) else ""
    return f"{name}data: {json.dumps(event, ensure_ascii=False, allow_nan=False, separators=(',', ':'))}\n\n"
