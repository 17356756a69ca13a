"""Servers on threads: one of the real model for all tests, and toys whose steps can be held."""

import asyncio
import concurrent.futures
import contextlib
import queue
import runpy
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from ropewalk import LLM
from ropewalk.async_engine import AsyncEngine
from ropewalk.serve.app import make_app
from ropewalk.serve.options import ServerOptions
from ropewalk.serve.server import make_server
from ropewalk.text.chat import ChatTemplate

_TOYS = runpy.run_path(str(Path(__file__).parents[1] / "toy_llm.py"))

PATIENCE_S = 300.0
"""How long a test waits for what must come: long enough for a busy machine, since no test passes by its end."""


@dataclass
class Running:
    """A server that runs."""

    url: str
    port: int
    llm: LLM
    engine: AsyncEngine
    endpoints: Any
    server: Any
    thread: threading.Thread

    def post(self, path, body, **options):
        return httpx.post(self.url + path, json=body, timeout=PATIENCE_S, **options)

    def get(self, path, **options):
        return httpx.get(self.url + path, timeout=PATIENCE_S, **options)

    @property
    def taken(self):
        """The places of the server that are taken."""
        return sum(served.taken for served in self.endpoints.models.served.values())

    @property
    def submitted(self):
        """The requests that the engine has, or is about to take."""
        return len(self.engine._worker.mailboxes)

    def on_loop(self, function):
        """Have the server's event loop call a function, and return what it returns."""
        done = concurrent.futures.Future()
        self.server.servers[0].get_loop().call_soon_threadsafe(lambda: done.set_result(function()))
        return done.result(PATIENCE_S)

    def becomes_idle(self):
        """Whether no request is left, in the server and in the engine, and no page is in use."""
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            picture = self.engine.statistics()
            if (picture.running, picture.waiting, picture.pages_used, self.taken) == (0, 0, 0, 0):
                with self.llm.driver.lock:
                    self.llm.driver.engine.check()
                return True
            time.sleep(0.01)
        return False


@contextlib.contextmanager
def serving(llm, *, name="toy", options=None, engine=None, **settings):
    engine = engine or AsyncEngine(llm)
    app = make_app({name: engine}, options)
    server = make_server(app, access_log=False, **settings)
    ports = queue.Queue()
    thread = threading.Thread(target=server.run_telling, args=(ports.put,), daemon=True)
    thread.start()
    port = ports.get(timeout=PATIENCE_S)
    running = Running(f"http://127.0.0.1:{port}", port, llm, engine, app.state.endpoints, server, thread)
    try:
        yield running
    finally:
        server.should_exit = True
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
        asyncio.run(engine.close())


class Held(_TOYS["ToyBackend"]):
    """A toy whose steps wait while `free` is not set; from the one after `held_after` on, it is not.

    `steps` counts them, one that waits included. Held, a request is under way for as long as a test wants.
    """

    def __init__(self, held_after=None, **options):
        super().__init__(**options)
        self.held_after, self.steps = held_after, 0
        self.free = threading.Event()
        self.free.set()

    def forward(self, batch, cache):
        if self.steps == self.held_after:
            self.free.clear()
        self.steps += 1
        self.free.wait(PATIENCE_S)
        return super().forward(batch, cache)


@pytest.fixture
def toy():
    """A function that starts a server of a toy; `toy(held_after=..., options=..., template=..., **LLM options)`."""
    with contextlib.ExitStack() as stack:

        def start(
            *, held_after=None, options=None, template="{{ messages[0].content }}", settings=None, **sizes
        ):
            llm = _TOYS["toy_llm"](Held(held_after), template=template and ChatTemplate(template), **sizes)
            stack.callback(llm.close)
            grace = options or ServerOptions(grace_s=1.0)
            running = stack.enter_context(serving(llm, options=grace, **(settings or {})))
            stack.callback(llm.backend.free.set)
            return running

        yield start


@pytest.fixture(scope="session")
def serve():
    """The function `serving`."""
    return serving


@pytest.fixture(scope="session")
def smol(smollm2):
    """A server of the default model, by the names smol and gpt-4o."""
    options = ServerOptions(aliases={"gpt-4o": "smol"}, grace_s=1.0)
    with (
        LLM(smollm2, context_length=1024, max_batch=8) as llm,
        serving(llm, name="smol", options=options) as running,
    ):
        yield running
