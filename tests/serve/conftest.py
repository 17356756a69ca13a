"""Servers on threads: one of the real model for all tests, and toys whose steps can be held."""

import asyncio
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
        return httpx.post(self.url + path, json=body, timeout=30, **options)

    def get(self, path, **options):
        return httpx.get(self.url + path, timeout=30, **options)

    def becomes_idle(self, seconds=5.0):
        """Whether no request is left, in the server and in the engine, and no page is in use."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            picture = self.engine.statistics()
            taken = sum(served.taken for served in self.endpoints.models.served.values())
            if (picture.running, picture.waiting, picture.pages_used, taken) == (0, 0, 0, 0):
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
    port = ports.get(timeout=10)
    running = Running(f"http://127.0.0.1:{port}", port, llm, engine, app.state.endpoints, server, thread)
    try:
        yield running
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()
        asyncio.run(engine.close())


class Held(_TOYS["ToyBackend"]):
    """A toy whose steps take `step_s`, and wait while `held` is set. `steps` counts them."""

    def __init__(self, step_s=0.0, **options):
        super().__init__(**options)
        self.step_s, self.steps = step_s, 0
        self.free = threading.Event()
        self.free.set()

    def forward(self, batch, cache):
        self.steps += 1
        self.free.wait(20)
        time.sleep(self.step_s)
        return super().forward(batch, cache)


@pytest.fixture
def toy():
    """A function that starts a server of a toy; `toy(step_s=..., options=..., template=..., **LLM options)`."""
    with contextlib.ExitStack() as stack:

        def start(*, step_s=0.0, options=None, template="{{ messages[0].content }}", settings=None, **sizes):
            llm = _TOYS["toy_llm"](Held(step_s), template=template and ChatTemplate(template), **sizes)
            stack.callback(llm.close)
            grace = options or ServerOptions(grace_s=1.0)
            return stack.enter_context(serving(llm, options=grace, **(settings or {})))

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
