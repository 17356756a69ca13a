"""/v1/embeddings beside streams: neither waits for the whole of the other."""

import json
import runpy
import threading
import time
from pathlib import Path

import httpx
import numpy as np

_TOYS = runpy.run_path(str(Path(__file__).parents[1] / "toy_llm.py"))
serving = runpy.run_path(str(Path(__file__).with_name("conftest.py")))["serving"]


class HeldReading(_TOYS["Reading"]):
    """Steps wait until `free` is set."""

    def __init__(self):
        super().__init__()
        self.free, self.entered = threading.Event(), threading.Event()

    def forward(self, batch, cache):
        self.entered.set()
        self.free.wait(300)
        return super().forward(batch, cache)


def test_a_long_text_does_not_hold_up_a_stream():
    llm = _TOYS["toy_llm"](HeldReading(), token_budget=4, max_batch=4)
    text = [i % 7 for i in range(39)]
    streamed, vectors = [], []
    with llm, serving(llm) as server:

        def stream():
            body = {"prompt": [0], "max_tokens": 40, "seed": 3, "ignore_eos": True, "stream": True}
            with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=300) as answer:
                events = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
            streamed.append("".join(json.loads(event)["choices"][0]["text"] for event in events[:-1]))

        def embed():
            answer = server.post("/v1/embeddings", {"input": [text, text[:5]]})
            vectors.extend(item["embedding"] for item in answer.json()["data"])

        threads = [threading.Thread(target=stream), threading.Thread(target=embed)]
        threads[0].start()
        assert llm.backend.entered.wait(300)
        threads[1].start()
        while not llm.driver._works:
            assert threads[1].is_alive()
            time.sleep(0.001)
        llm.backend.free.set()
        for thread in threads:
            thread.join(300)
        expected = server.post(
            "/v1/completions", {"prompt": [0], "max_tokens": 40, "seed": 3, "ignore_eos": True}
        ).json()
        assert streamed == [expected["choices"][0]["text"]]
        for vector, ids in zip(vectors, (text, text[:5]), strict=True):
            whole = np.array([ids[-1], len(ids) - 1, len(ids)], np.float32)
            assert np.allclose(vector, whole / np.linalg.norm(whole), atol=1e-6)
        calls = llm.backend.calls
        first = calls.index("piece")
        assert calls[: first + 20] == [*["step"] * first, *["piece", "step"] * 10]
