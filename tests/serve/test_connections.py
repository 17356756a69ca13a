"""Connections that stall, talk no HTTP, or come by other ways: raw sockets against a server of a toy."""

import json
import logging
import socket
import time

import pytest

from ropewalk.errors import InvalidParameterError
from ropewalk.serve.options import ServerOptions
from ropewalk.serve.server import bind, check_certificate

PATIENCE_S = 300.0
CHAT = {"messages": [{"role": "user", "content": "ab"}], "ignore_eos": True, "seed": 1}
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def post(**more):
    body = json.dumps({**CHAT, **more}).encode()
    return HEAD + b"Content-Length: %d\r\n\r\n%s" % (len(body), body)


def connect(server, data=b"", *, buffer=None):
    made = socket.socket()
    if buffer is not None:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    made.settimeout(PATIENCE_S)
    made.connect(("127.0.0.1", server.port))
    made.sendall(data)
    return made


def rest(connection):
    """All that comes until the server closes; a reset counts as closing."""
    data = b""
    try:
        while piece := connection.recv(2**16):
            data += piece
    except ConnectionError:
        pass
    connection.close()
    return data


def wait_until(condition, what):
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, f"not in time: {what}"
        time.sleep(0.01)


def answers(server):
    return server.post("/v1/chat/completions", {**CHAT, "max_tokens": 3}).status_code == 200


def connections(server):
    return server.server.server_state.connections


def other_side(server, connection):
    """The server's end of a connection, once it is there."""
    port = connection.getsockname()[1]
    found = []
    wait_until(
        lambda: found.extend(each for each in list(connections(server)) if each.client[1] == port) or found,
        "the connection is there",
    )
    return found[0]


def look(server):
    """Look after every connection, as the server does by itself every half minute."""
    server.on_loop(lambda: [each._look() for each in list(connections(server))])


def small_buffers(server):
    """Have the kernel keep little of an answer for connections to come."""
    for listening in server.server.servers[0].sockets:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**14)


class TestStalled:
    @pytest.mark.parametrize("sent", [b"", b"POST /v1/chat", HEAD])
    def test_who_does_not_finish_a_head_is_cut(self, toy, sent, monkeypatch):
        server = toy()
        with monkeypatch.context() as patch:
            patch.setattr("ropewalk.serve.protocol.LOOK_S", 0.1)
            assert rest(connect(server, sent)) == b""
        assert answers(server)

    def test_so_is_who_begins_a_second_one(self, toy):
        """uvicorn stops its own clock when the first byte of the next request comes."""
        server = toy()
        server.server.config.timeout_keep_alive = PATIENCE_S
        connection = connect(server, post(max_tokens=2))
        assert b"200 OK" in connection.recv(2**16)
        ours = other_side(server, connection)
        wait_until(lambda: ours.timeout_keep_alive_task, "uvicorn waits for the next request")
        connection.sendall(b"GET /hea")
        wait_until(lambda: not ours.timeout_keep_alive_task, "the next request has begun")
        look(server)
        look(server)
        assert b"HTTP/1.1" not in rest(connection)

    def test_who_waits_for_an_answer_is_not(self, toy):
        server = toy(held_after=1)
        connection = connect(server, post(max_tokens=2))
        wait_until(lambda: server.llm.backend.steps == 2, "the answer is under way")
        for _ in range(4):
            look(server)
        server.llm.backend.free.set()
        assert b"200 OK" in connection.recv(2**16)
        connection.close()

    @pytest.mark.parametrize("requests", [1, 60])
    def test_who_takes_nothing_of_an_answer_is_cut(self, toy, requests):
        """Also while several are pipelined, and the second cannot begin to be sent."""
        server = toy(context_length=512, kv_tokens=1024)
        small_buffers(server)
        tall = post(max_tokens=400, stream=True, logprobs=True, top_logprobs=12) if requests == 1 else None
        connection = connect(
            server, tall or b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * requests, buffer=1
        )
        ours = other_side(server, connection)
        wait_until(lambda: ours.transport.get_write_buffer_size(), "more of an answer than the kernel takes")

        def cut():
            look(server)
            return not connections(server)

        wait_until(cut, "the connection is cut")
        connection.close()
        assert server.becomes_idle()

    def test_who_takes_it_slowly_gets_it_whole(self, toy):
        """Between two looks a part of what waits for the client is taken."""
        server = toy()
        small_buffers(server)
        expected = server.get("/openapi.json").content
        many = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 10
        connection = connect(server, many, buffer=2**14)
        ours = other_side(server, connection)
        wait_until(lambda: ours.cycle, "the first answer is under way")
        data = b""
        while data.count(expected) < 10:
            look(server)
            while (ours.cycle, ours.transport.get_write_buffer_size()) == ours._seen:
                piece = connection.recv(2**14)
                assert piece, "the server cut the connection"
                data += piece
                if data.count(expected) == 10:
                    break
        connection.close()


class TestNoHttp:
    @pytest.mark.parametrize(
        "data",
        [
            b"\x16\x03\x01\x02\x00\x01\x00",
            b"GET /health\r\n\r\n",
            b"GET /health HTTP/1.1\r\n\r\n",
            b"GET /health HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
            HEAD + b"Content-Length: -1\r\n\r\n",
            b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 2**18 + b"\r\n\r\n",
        ],
    )
    def test_it_is_told_in_the_shape_of_all_errors(self, toy, data):
        server = toy()
        head, _, body = rest(connect(server, data)).partition(b"\r\n\r\n")
        if len(data) < 2**16:  # of a long one the kernel may drop the answer with the rest
            assert head.startswith(b"HTTP/1.1 400 Bad Request")
            assert json.loads(body)["error"]["type"] == "invalid_request_error"
        assert answers(server)

    def test_rubbish_after_a_request_comes_after_its_answer(self, toy):
        server = toy()
        answer, _, refusal = rest(
            connect(server, post(max_tokens=9, stream=True) + b"\x00\r\n\r\n")
        ).partition(b"HTTP/1.1 400")
        assert answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        assert b"no valid HTTP" in refusal
        assert server.becomes_idle()

    def test_rubbish_in_a_body(self, toy, caplog):
        server = toy()
        logging.getLogger("ropewalk.faults").addHandler(caplog.handler)
        head, _, body = rest(connect(server, HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n")).partition(
            b"\r\n\r\n"
        )
        assert head.startswith(b"HTTP/1.1 400")
        assert "no valid HTTP" in json.loads(body)["error"]["message"]
        assert answers(server)
        assert caplog.messages == []


class TestGone:
    def test_in_the_middle_of_a_body_is_no_fault_of_ours(self, toy, caplog):
        server = toy()
        logs = [logging.getLogger(name) for name in ("ropewalk.faults", "ropewalk.access")]
        for log in logs:
            log.addHandler(caplog.handler)
        logs[1].setLevel("INFO")
        connect(server, HEAD + b"Content-Length: 1000\r\n\r\n{").close()
        assert answers(server)
        wait_until(lambda: len(caplog.records) == 2, "both are logged")
        assert {json.loads(message)["status"] for message in caplog.messages} == {499, 200}
        assert "500" not in server.get("/metrics").text.partition("request_refused_total")[2]


class TestEnd:
    def test_a_body_that_does_not_come_holds_no_end_up(self, toy):
        server = toy(options=ServerOptions(grace_s=0.2))
        connection = connect(server, HEAD + b"Content-Length: 1000\r\n\r\n{")
        assert answers(server)
        server.server.should_exit = True
        head, _, body = rest(connection).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503")
        assert json.loads(body)["error"]["message"] == "the server is shutting down"
        server.thread.join(PATIENCE_S)
        assert not server.thread.is_alive()

    def test_nor_does_a_client_that_takes_nothing(self, toy, monkeypatch, capfd):
        monkeypatch.setattr("ropewalk.serve.running.LAST_WORD_S", 0.1)
        monkeypatch.setattr("ropewalk.serve.protocol.LOOK_S", 0.2)
        server = toy(options=ServerOptions(grace_s=0.1), context_length=512, kv_tokens=1024)
        small_buffers(server)
        connection = connect(
            server, post(max_tokens=400, stream=True, logprobs=True, top_logprobs=12), buffer=1
        )
        ours = other_side(server, connection)
        wait_until(
            lambda: not connections(server) or ours.transport.get_write_buffer_size(),
            "there is more of an answer than the kernel takes, unless the client is cut already",
        )
        server.server.should_exit = True
        server.thread.join(PATIENCE_S)
        assert not server.thread.is_alive()
        connection.close()
        assert "Traceback" not in capfd.readouterr().err


class TestBind:
    def test_both_families_have_one_port(self):
        sockets = bind("localhost", 0)
        try:
            assert len({each.getsockname()[1] for each in sockets}) == 1
            assert 1 <= len(sockets) <= 2
        finally:
            for each in sockets:
                each.close()

    def test_what_cannot_be(self):
        with (
            socket.create_server(("127.0.0.1", 0)) as taken,
            pytest.raises(InvalidParameterError, match=r"port is \d+ \(Address already in use\)"),
        ):
            bind("127.0.0.1", taken.getsockname()[1])
        with pytest.raises(
            InvalidParameterError, match=r"host is '192.0.2.1' \(Cannot assign requested address\)"
        ):
            bind("192.0.2.1", 0)
        with pytest.raises(InvalidParameterError, match="host is 'no such host'"):
            bind("no such host", 0)

    def test_certificates(self, tmp_path):
        file = tmp_path / "none.pem"
        file.write_text("nothing")
        with pytest.raises(InvalidParameterError, match="PEM files that match"):
            check_certificate(str(file), str(file))
