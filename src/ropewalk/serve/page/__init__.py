"""The page at `/`: static files, read once, that use the public endpoints and nothing from anywhere else.

`index.html` is the page, `app.js` the chat, `inside.js` the glass box beside it, `api.js` what they ask of the server.
"""

from __future__ import annotations

from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

KINDS = {
    "app.js": "text/javascript",
    "api.js": "text/javascript",
    "inside.js": "text/javascript",
    "page.css": "text/css",
    "icon.svg": "image/svg+xml",
}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
PATHS = frozenset({"/", *(f"/page/{name}" for name in KINDS)})
"""What needs no API key: the page asks for one itself."""


def routes() -> list[Route]:
    """The page and its parts."""
    return [
        _route("/", "index.html", "text/html"),
        *(_route(f"/page/{name}", name, kind) for name, kind in KINDS.items()),
    ]


def _route(path: str, name: str, kind: str) -> Route:
    content = files(__name__).joinpath(name).read_bytes()

    async def send(request: Request) -> Response:
        return Response(content, media_type=kind, headers=HEADERS)

    return Route(path, send, methods=["GET"])
