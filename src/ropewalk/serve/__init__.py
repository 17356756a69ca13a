"""The HTTP server: `ropewalk serve`.

`app.make_app` is an ASGI application over one or several `AsyncEngine`s; `server.serve` runs it. What bodies mean is
known to `ropewalk.api`; this room knows sockets, queues, limits, keys, logs and metrics.
"""
