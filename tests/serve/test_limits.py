"""What a server refuses, and that it goes on afterwards: hostile bodies, keys, hosts, full queues, time, the end."""

import http.client
import json
import logging
import re
import socket
import ssl
import threading
import time
from pathlib import Path

import httpx
import pytest

from ropewalk.serve.options import ServerOptions

OPTIONS = ServerOptions(grace_s=1.0)
CHAT = {"messages": [{"role": "user", "content": "ab"}], "ignore_eos": True, "seed": 1}
SHORT = {**CHAT, "max_tokens": 3}
LONG = {**CHAT, "max_tokens": 60}
PATIENCE_S = 300.0


def error_of(response, status):
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def works(server):
    response = server.post("/v1/chat/completions", SHORT)
    assert response.status_code == 200, response.text
    return response.json()["usage"]["completion_tokens"] == 3


def send_raw(server, data, path="/v1/chat/completions"):
    return httpx.post(
        server.url + path, content=data, headers={"content-type": "application/json"}, timeout=PATIENCE_S
    )


def wait_for(condition):
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.005)


def exit_at_once(*anything):
    raise SystemExit


def ask_whole(server, body, path="/v1/chat/completions"):
    """A connection on which a request is sent whose answer is not read."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)
    connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
    return connection


def in_thread(function, *arguments, **options):
    """Begin a call in another thread; a function that waits for its result."""
    found = []
    thread = threading.Thread(target=lambda: found.append(function(*arguments, **options)), daemon=True)
    thread.start()

    def result():
        thread.join(PATIENCE_S)
        return found[0]

    return result


class Stream:
    """A streamed request on a socket of its own, read event by event."""

    def __init__(self, server, body):
        self.connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)
        headers = {"content-type": "application/json"}
        self.connection.request("POST", "/v1/chat/completions", json.dumps({**body, "stream": True}), headers)
        self.response = None

    def event(self):
        """The data of the next event; None at the end of the response."""
        self.response = self.response or self.connection.getresponse()
        while line := self.response.readline():
            if line.startswith(b"data: "):
                return line[6:].strip().decode()
        return None

    def rest(self):
        events = []
        while (event := self.event()) is not None:
            events.append(event)
        self.close()
        return events

    def close(self):
        if self.response is not None:
            self.response.close()
        self.connection.close()


class TestBodies:
    def test_hostile_ones(self, toy):
        """I4: each gets an error in JSON, and the next request works."""
        server = toy(context_length=512, kv_tokens=512, options=ServerOptions(body_s=PATIENCE_S, grace_s=1.0))
        for data in (
            b"",
            b'{"messages": [',
            '{"prompt": "你好"}'.encode("gbk"),
            b"[" * 200_000,
            b'{"temperature": NaN}',
            b'{"messages": [{"role": "user", "content": "\\ud83d"}]}',
            json.dumps({"prompt": 5}).encode(),
            json.dumps({"messages": "hi"}).encode(),
            json.dumps({**SHORT, "stop": [str(i) for i in range(50)]}).encode(),
            json.dumps({**SHORT, "temperature": 1e308, "seed": 10**400}).encode(),
            json.dumps({"messages": [{"role": "user", "content": "a" * 10_000_000}]}).encode(),
            b"\x00" * 1000,
        ):
            response = send_raw(server, data)
            assert 400 <= response.status_code < 500
            assert len(error_of(response, response.status_code)["message"]) < 200
            assert works(server)

    def test_one_of_100_mb(self, toy):
        """I4."""
        server = toy(options=ServerOptions(body_s=PATIENCE_S, grace_s=1.0))
        error = error_of(send_raw(server, b'{"a": "' + b"a" * 100_000_000 + b'"}'), 413)
        assert error["message"] == "the body is too large; this server allows 8388608 bytes"
        assert works(server)

    def test_something_else_than_json(self, toy):
        server = toy()
        for headers in (
            {},
            {"content-type": "text/plain"},
            {"content-type": "application/json", "content-encoding": "gzip"},
        ):
            error_of(
                httpx.post(
                    f"{server.url}/v1/completions", content=b"{}", headers=headers, timeout=PATIENCE_S
                ),
                415,
            )

    def test_one_that_never_comes(self, toy):
        server = toy(options=ServerOptions(body_s=0.2, grace_s=1.0))
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.settimeout(PATIENCE_S)
            lines = (
                "POST /v1/completions HTTP/1.1",
                "host: a",
                "content-type: application/json",
                "content-length: 9",
            )
            connection.sendall("\r\n".join([*lines, "", "{"]).encode())
            assert connection.recv(4096).startswith(b"HTTP/1.1 408 ")

    def test_a_text_that_cannot_fit_is_not_even_tokenized(self, toy, monkeypatch):
        """Tokenizing megabytes may take half a minute."""
        server = toy()
        monkeypatch.setattr(server.llm.tokenizer, "encode", exit_at_once)
        text = "a" * 1000
        for path, body in (
            ("/v1/completions", {"prompt": text}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}),
            ("/v1/responses", {"input": text}),
            ("/v1/embeddings", {"input": [text]}),
        ):
            error = error_of(server.post(path, body), 400)
            assert "has 1000 bytes, more than 64 tokens of at most 4 bytes" in error["message"]
            assert error["code"] == "context_length_exceeded"

    def test_stop_of_null_is_the_default(self, toy):
        assert toy().post("/v1/chat/completions", {**SHORT, "stop": None}).status_code == 200

    def test_unknown_paths_and_methods(self, toy):
        server = toy()
        assert "there is no /v1/nothing" in error_of(server.get("/v1/nothing"), 404)["message"]
        assert "GET is not for /v1/completions" in error_of(server.get("/v1/completions"), 405)["message"]


class TestTemplates:
    def test_a_template_that_refuses(self, toy):
        """F3: its own words, status 400, and the server is healthy."""
        template = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}a"
        server = toy(template=template)
        body = {**SHORT, "messages": [{"role": "system", "content": "a"}]}
        assert (
            error_of(server.post("/v1/chat/completions", body), 400)["message"] == "System role not supported"
        )
        assert works(server)
        assert server.get("/health").status_code == 200

    def test_one_that_would_run_for_ever(self, toy):
        template = "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}"
        answer = toy(template=template).post("/v1/chat/completions", SHORT)
        assert re.search("takes (more|longer) than", error_of(answer, 400)["message"])  # steps, or seconds

    def test_none_at_all(self, toy):
        server = toy(template=None)
        assert "use /v1/completions" in error_of(server.post("/v1/chat/completions", SHORT), 400)["message"]
        assert server.post("/v1/completions", {"prompt": "ab", "max_tokens": 2}).status_code == 200

    def test_what_a_client_cannot_set(self, toy):
        body = {**SHORT, "chat_template_kwargs": {"messages": []}}
        assert error_of(toy().post("/v1/chat/completions", body), 400)["param"] == "chat_template_kwargs"

    def test_what_it_can(self, toy):
        server = toy(template="{{ 'ab' if enable_thinking else 'abc' }}")
        for value, n in ((True, 2), (False, 3)):
            body = {**SHORT, "chat_template_kwargs": {"enable_thinking": value}}
            assert server.post("/v1/chat/completions", body).json()["usage"]["prompt_tokens"] == n


class TestAccess:
    def test_keys(self, toy):
        server = toy(options=ServerOptions(api_keys=("sk-first-key", "sk-second-key"), grace_s=1.0))
        for headers in (
            {},
            {"authorization": "Bearer sk-third-key"},
            {"authorization": "sk-first-key"},
            {"authorization": "Basic sk-first-key"},
        ):
            for answer in (
                server.post("/v1/chat/completions", SHORT, headers=headers),
                server.get("/v1/models", headers=headers),
                server.get("/metrics", headers=headers),
            ):
                assert error_of(answer, 401)["code"] == "invalid_api_key"
                assert answer.headers["www-authenticate"] == "Bearer"
        for key in ("sk-first-key", "sk-second-key"):
            headers = {"authorization": f"Bearer {key}"}
            assert server.post("/v1/chat/completions", SHORT, headers=headers).status_code == 200
        assert server.get("/health").status_code == 200

    def test_a_name_that_is_not_ours(self, toy):
        """A page that has the name of its own host point to 127.0.0.1 is not let in."""
        server = toy(options=ServerOptions(allowed_hosts=frozenset({"localhost"}), grace_s=1.0))
        for host, status in (
            ("evil.example", 403),
            ("evil.example:80", 403),
            ("localhost:5", 200),
            ("LOCALHOST", 200),
            ("127.0.0.1:1", 200),
            ("[::1]:1", 200),
        ):
            assert server.get("/health", headers={"host": host}).status_code == status

    def test_web_pages_are_let_in_on_request_only(self, toy):
        headers = {"origin": "https://app.example", "access-control-request-method": "POST"}
        closed = toy()
        assert "access-control-allow-origin" not in closed.get("/health", headers=headers).headers
        open_ = toy(options=ServerOptions(cors_origins=("https://app.example",), grace_s=1.0))
        answer = httpx.options(f"{open_.url}/v1/chat/completions", headers=headers, timeout=PATIENCE_S)
        assert answer.headers["access-control-allow-origin"] == "https://app.example"
        headers["access-control-request-headers"] = (
            "authorization,content-type,x-stainless-os"  # of OpenAI's client
        )
        answer = httpx.options(f"{open_.url}/v1/chat/completions", headers=headers, timeout=PATIENCE_S)
        assert (answer.status_code, "x-stainless-os" in answer.headers["access-control-allow-headers"]) == (
            200,
            True,
        )
        assert (
            open_.get("/health", headers={"origin": "https://b.example"}).headers.get(
                "access-control-allow-origin"
            )
            is None
        )

    def test_https(self, toy):
        pem = str(Path(__file__).parents[1] / "data/localhost.pem")
        server = toy(settings={"ssl_certfile": pem, "ssl_keyfile": pem})
        trusted = ssl.create_default_context(cafile=pem)
        assert (
            httpx.get(
                f"https://localhost:{server.port}/health", verify=trusted, timeout=PATIENCE_S
            ).status_code
            == 200
        )
        with pytest.raises(httpx.TransportError):
            httpx.get(f"http://localhost:{server.port}/health")

    def test_behind_a_prefix(self, toy):
        server = toy(settings={"root_path": "/llm"})
        assert server.get("/health").status_code == 200
        assert works(server)


class TestQueue:
    def test_it_is_bounded(self, toy):
        server = toy(options=ServerOptions(max_queue=1, grace_s=1.0), max_batch=1)
        server.llm.backend.free.clear()
        streams = [Stream(server, LONG) for _ in range(2)]
        wait_for(lambda: server.taken == 2)
        answer = server.post("/v1/chat/completions", SHORT)
        assert error_of(answer, 429)["code"] == "queue_full"
        assert int(answer.headers["retry-after"]) >= 1
        error_of(server.post("/v1/chat/completions", {**SHORT, "stream": True}), 429)
        server.llm.backend.free.set()
        assert [stream.rest()[-1] for stream in streams] == ["[DONE]"] * 2
        assert works(server)
        assert server.becomes_idle()

    def test_what_never_fits(self, toy):
        server = toy(options=ServerOptions(max_queue=1, grace_s=1.0), max_batch=1)
        assert (
            "room for 2" in error_of(server.post("/v1/chat/completions", {**SHORT, "n": 3}), 400)["message"]
        )

    def test_a_long_prompt_holds_nobody_up(self, toy):
        """A step reads at most 32 tokens of it, so the other one gets a token in every step."""
        server = toy(token_budget=32, context_length=512, kv_tokens=1024, held_after=3)
        stream = Stream(server, {**CHAT, "max_tokens": 300})
        wait_for(lambda: server.llm.backend.steps == 4)
        answer = in_thread(server.post, "/v1/completions", {"prompt": [1] * 500, "max_tokens": 1})
        wait_for(lambda: server.submitted == 2)
        server.llm.backend.free.set()
        assert answer().status_code == 200
        assert json.loads(stream.rest()[-2])["choices"][0]["finish_reason"] == "length"
        sizes = server.llm.backend.batch_sizes
        assert sizes[4:21] == [32] * 16 + [5]  # 500 tokens, 31 in each step
        assert (len(sizes), max(sizes[:4] + sizes[21:])) == (300, 2)  # the stream's own prompt has 2


class TestGone:
    """I1: who is gone is not answered any more, within a step."""

    def test_while_it_streams(self, toy):
        server = toy(context_length=512, kv_tokens=1024)
        backend = server.llm.backend
        for _ in range(5):
            backend.held_after = backend.steps + 9
            stream = Stream(server, {**CHAT, "max_tokens": 500})
            for _ in range(4):
                stream.event()
            wait_for(lambda: not backend.free.is_set())
            stream.close()
            wait_for(lambda: server.taken == 0)
            steps = backend.steps
            backend.free.set()
            assert server.becomes_idle()
            assert backend.steps == steps
        assert works(server)

    @pytest.mark.parametrize("state", ["running", "waiting"])
    def test_while_it_waits_for_the_whole(self, toy, state):
        server = toy(max_batch=1, context_length=512, kv_tokens=1024)
        server.llm.backend.free.clear()
        first = Stream(server, {**CHAT, "max_tokens": 40}) if state == "waiting" else None
        if first:
            wait_for(lambda: server.llm.backend.steps == 1)
        connection = ask_whole(server, {**CHAT, "max_tokens": 500})
        wait_for(lambda: server.submitted == server.taken == (2 if first else 1))
        connection.close()
        wait_for(lambda: server.taken == (1 if first else 0))
        server.llm.backend.free.set()
        if first:
            assert first.rest()[-1] == "[DONE]"
        assert server.becomes_idle()
        assert server.llm.backend.steps < 60
        assert works(server)

    def test_while_its_prompt_is_read(self, toy):
        server = toy(token_budget=16, context_length=512, kv_tokens=1024, held_after=2, max_batch=1)
        connection = ask_whole(server, {"prompt": [1] * 500, "max_tokens": 5}, "/v1/completions")
        wait_for(lambda: server.llm.backend.steps == 3)
        connection.close()
        wait_for(lambda: server.taken == 0)
        server.llm.backend.free.set()
        assert server.becomes_idle()
        assert server.llm.backend.batch_sizes == [16] * 3

    def test_it_is_counted(self, toy):
        server = toy(held_after=3)
        stream = Stream(server, {**LONG, "n": 2})
        stream.event()
        wait_for(lambda: server.llm.backend.steps == 4)
        stream.close()
        wait_for(lambda: server.taken == 0)
        connection = ask_whole(server, {**LONG, "n": 2})
        wait_for(lambda: server.taken == 2)
        connection.close()
        wait_for(lambda: server.taken == 0)
        server.llm.backend.free.set()
        assert server.becomes_idle()
        counted = 'ropewalk:request_success_total{finished_reason="abort",model_name="toy"} 4.0'
        assert counted in server.get("/metrics").text.splitlines()

    def test_one_of_several_prompts(self, toy):
        server = toy(held_after=9, context_length=512, kv_tokens=2048)
        body = {"prompt": [[1], [2], [3]], "n": 2, "max_tokens": 400, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=PATIENCE_S) as response:
            for _ in zip(range(5), response.iter_lines(), strict=False):
                pass
        wait_for(lambda: server.taken == 0)
        server.llm.backend.free.set()
        assert server.becomes_idle()
        assert server.llm.backend.steps <= 11

    def test_a_hundred_times(self, toy):
        server = toy(max_batch=4)
        for i in range(100):
            stream = Stream(server, LONG)
            for _ in range(i % 3):
                stream.event()
            stream.close()
        assert server.becomes_idle()
        assert works(server)


class TestTime:
    def test_a_stream_that_is_silent_is_kept_alive(self, toy, monkeypatch):
        """A proxy may close a connection on which nothing comes."""
        monkeypatch.setattr("ropewalk.serve.http.PING_S", 0.05)
        server = toy()
        server.llm.backend.free.clear()
        with httpx.stream(
            "POST",
            f"{server.url}/v1/chat/completions",
            json={**SHORT, "stream": True},
            timeout=PATIENCE_S,
        ) as response:
            lines = response.iter_lines()
            while next(lines) != ": still here":
                pass
            server.llm.backend.free.set()
            assert [line for line in lines if line][-1] == "data: [DONE]"

    def test_a_request_that_takes_too_long(self, toy):
        server = toy(options=ServerOptions(request_s=0.3, grace_s=1.0), held_after=4)
        error = error_of(server.post("/v1/chat/completions", LONG), 504)
        assert (error["type"], error["message"]) == ("timeout_error", "the request took longer than 0.3 s")
        server.llm.backend.free.set()
        assert server.becomes_idle()

    def test_a_stream_that_takes_too_long_keeps_what_it_has(self, toy):
        server = toy(options=ServerOptions(request_s=1000.0, grace_s=1.0), held_after=9)
        stream = Stream(server, LONG)
        before = [stream.event() for _ in range(4)]
        wait_for(lambda: server.llm.backend.steps == 10)
        server.on_loop(lambda: [limit.reschedule(0) for limit in server.endpoints.running._limits])
        *events, last, done = stream.rest()
        assert json.loads(last)["error"]["type"] == "timeout_error"
        assert done == "[DONE]"
        assert len(before + events) <= 10
        server.llm.backend.free.set()
        assert server.becomes_idle()

    def test_limits_of_tokens(self, toy):
        server = toy(options=ServerOptions(max_prompt_tokens=4, max_output_tokens=5, grace_s=1.0))
        post = server.post
        assert "allows 4" in error_of(post("/v1/completions", {"prompt": "abcab"}), 400)["message"]
        assert (
            "allows 5" in error_of(post("/v1/completions", {"prompt": "a", "max_tokens": 6}), 400)["message"]
        )
        assert post("/v1/chat/completions", CHAT).json()["usage"]["completion_tokens"] == 5
        body = {"prompt": "a", "ignore_eos": True}
        assert post("/v1/completions", body).json()["usage"]["completion_tokens"] == 5


class TestEnd:
    def test_requests_under_way_may_finish(self, toy):
        server = toy(held_after=3, options=ServerOptions(grace_s=PATIENCE_S))
        stream = Stream(server, LONG)
        stream.event()
        server.server.should_exit = True
        wait_for(lambda: server.endpoints.running.closing)
        server.llm.backend.free.set()
        events = stream.rest()
        assert events[-1] == "[DONE]"
        assert json.loads(events[-2])["choices"][0]["finish_reason"] == "length"
        server.thread.join(PATIENCE_S)
        assert not server.thread.is_alive()

    def test_after_the_grace_they_are_cut_with_an_error(self, toy):
        server = toy(held_after=3, options=ServerOptions(grace_s=0.2))
        stream = Stream(server, LONG)
        stream.event()
        whole = in_thread(server.post, "/v1/chat/completions", LONG)
        wait_for(lambda: server.taken == server.submitted == 2)
        server.server.should_exit = True
        *_, last, done = stream.rest()
        assert (json.loads(last)["error"]["message"], done) == ("the server is shutting down", "[DONE]")
        error_of(whole(), 503)
        server.thread.join(PATIENCE_S)
        assert not server.thread.is_alive()

    def test_new_ones_are_refused(self, toy):
        server = toy()
        server.endpoints.running.closing = True
        assert (
            error_of(server.post("/v1/chat/completions", SHORT), 503)["message"]
            == "the server is shutting down"
        )
        error_of(server.post("/v1/chat/completions", {**SHORT, "stream": True}), 503)
        answer = server.get("/health")
        assert (answer.status_code, answer.json()["status"]) == (503, "stopping")

    def test_the_death_of_the_engine_is_seen(self, toy):
        """Whoever waits gets an error, and /health tells."""
        server = toy(held_after=3)
        stream = Stream(server, LONG)
        stream.event()
        server.llm.backend.forward = exit_at_once
        server.llm.backend.free.set()
        *_, last, done = stream.rest()
        error = json.loads(last)["error"]
        assert (error["message"], error["type"], done) == (
            "the engine has stopped",
            "service_unavailable_error",
            "[DONE]",
        )
        wait_for(lambda: not server.engine.is_alive)
        answer = server.get("/health")
        assert (answer.status_code, answer.json()) == (
            503,
            {"status": "dead", "dead": {"toy": "SystemExit"}},
        )
        error_of(server.post("/v1/chat/completions", SHORT), 503)


class TestFaults:
    def test_one_request_s_fault_is_its_own(self, toy):
        server = toy()
        server.llm.backend.poison[1] = float("nan")
        error = error_of(server.post("/v1/completions", {"prompt": "ab", "max_tokens": 5}), 500)
        assert "NaN" in error["message"]
        assert works(toy())
        assert server.post("/v1/completions", {"prompt": "ac", "max_tokens": 1}).status_code == 200
        assert server.becomes_idle()

    def test_a_fault_of_ours_says_nothing_of_itself(self, toy, monkeypatch, caplog):
        server = toy()
        monkeypatch.setattr(server.llm, "encode", lambda *a, **k: {}["secret"])
        for path in ("/v1/completions", "/tokenize"):
            error = error_of(server.post(path, {"prompt": "a"}), 500)
            assert error["message"] == "internal error (KeyError)"


class TestTold:
    def test_metrics(self, toy):
        server = toy()
        assert works(server)
        server.post("/v1/completions", {"prompt": "ab", "n": 2, "max_tokens": 4, "ignore_eos": True})
        error_of(server.post("/v1/completions", {}), 400)
        lines = server.get("/metrics").text.splitlines()
        values = dict(line.rsplit(" ", 1) for line in lines if line.startswith("ropewalk:"))
        model = '{model_name="toy"}'
        assert {name: float(values[f"ropewalk:{name}"]) for name in (
            f"num_requests_running{model}", f"num_requests_waiting{model}", f"kv_cache_usage_perc{model}",
            f"num_preemptions_total{model}", f"prompt_tokens_total{model}", f"generation_tokens_total{model}",
            f"time_to_first_token_seconds_count{model}", f"e2e_request_latency_seconds_count{model}",
            f"request_generation_tokens_sum{model}", 'request_refused_total{status="400"}',
            'request_success_total{finished_reason="length",model_name="toy"}',
        )} == {
            f"num_requests_running{model}": 0, f"num_requests_waiting{model}": 0, f"kv_cache_usage_perc{model}": 0,
            f"num_preemptions_total{model}": 0, f"prompt_tokens_total{model}": 4, f"generation_tokens_total{model}": 11,
            f"time_to_first_token_seconds_count{model}": 2, f"e2e_request_latency_seconds_count{model}": 2,
            f"request_generation_tokens_sum{model}": 11, 'request_refused_total{status="400"}': 1,
            'request_success_total{finished_reason="length",model_name="toy"}': 3,
        }  # fmt: skip

    def test_the_log_has_costs_but_no_words(self, toy, monkeypatch):
        lines = []
        logger = logging.getLogger("ropewalk.access")
        server = toy()
        monkeypatch.setattr(logger, "info", lambda message, line: lines.append(line))
        body = {**SHORT, "user": "u1", "messages": [{"role": "user", "content": "abcabc"}]}
        server.post("/v1/chat/completions", body, headers={"x-request-id": "mine-1"})
        stream = Stream(server, {**LONG, "messages": body["messages"]})
        stream.event()
        stream.close()
        wait_for(lambda: len(lines) == 2)
        server.post("/v1/chat/completions", {**body, "n": 0})
        wait_for(lambda: len(lines) == 3)
        whole, gone, refused = map(json.loads, lines)
        assert whole.items() >= {
            "request_id": "mine-1", "client": "127.0.0.1", "method": "POST", "path": "/v1/chat/completions",
            "status": 200, "model": "toy", "stream": False, "user": "u1", "prompt_tokens": 6, "completion_tokens": 3,
            "finish_reasons": ["length"],
        }.items()  # fmt: skip
        assert (gone["stream"], refused["status"]) == (True, 400)
        assert "abcabc" not in "".join(lines)

    def test_request_ids_come_back(self, toy):
        server = toy()
        assert server.get("/health", headers={"x-request-id": "abc.1"}).headers["x-request-id"] == "abc.1"
        assert (
            server.get("/health", headers={"x-request-id": "a b\x01"})
            .headers["x-request-id"]
            .startswith("req_")
        )

    def test_version(self, toy):
        from ropewalk import __version__

        assert toy().get("/version").json() == {"version": __version__}
