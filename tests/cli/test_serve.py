"""`ropewalk serve` as a process, `ropewalk chat --url` beside it, and what their options mean."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

import pytest

from ropewalk.cli import serve as serve_verb
from ropewalk.cli.remote import RemoteModel
from ropewalk.errors import GenerationError, InvalidParameterError, ModelNotFoundError, PromptError
from ropewalk.params import SamplingParams

KEY = "sk-of-the-test"


@pytest.fixture(scope="module")
def server(smollm2, tmp_path_factory):
    """The URL of a process that serves SmolLM2, and what it has told on stderr."""
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(f"# of the test\n{KEY}\n")
    command = [
        sys.executable,
        "-m",
        "ropewalk",
        "serve",
        str(smollm2),
        "--port",
        "0",
        "-c",
        "512",
        "--max-batch",
        "4",
    ]
    command += ["--alias", "gpt-4o", "--api-key-file", str(keys), "--grace", "5"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        told = []
        for line in process.stderr:
            told.append(line)
            if match := re.search(r"at (http://\S+)", line):
                break
        else:
            pytest.fail("".join(told))
        reading = threading.Thread(target=lambda: told.extend(process.stderr))
        reading.start()
        try:
            yield match.group(1), told
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(300) == 0, "".join(told)
            reading.join()
            assert not [line for line in told if "Traceback" in line or "Error" in line]


@pytest.fixture
def key(monkeypatch):
    monkeypatch.setenv("ROPEWALK_API_KEY", KEY)


def post(url, body, key=KEY):
    headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=300) as response:
        return json.load(response)


class TestProcess:
    def test_it_answers_and_logs(self, server):
        url, told = server
        body = {"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 4, "seed": 1}
        body["user"] = "who-is-logged"
        answer = post(url, body)
        assert answer["usage"]["completion_tokens"] == 4
        while not (lines := [json.loads(line) for line in list(told) if '"who-is-logged"' in line]):
            time.sleep(0.01)
        (line,) = lines
        assert (line["path"], line["status"]) == ("/v1/chat/completions", 200)
        assert line["completion_tokens"] == 4
        with pytest.raises(urllib.error.HTTPError, match="401"):
            post(url, body, key="sk-something-else")

    def test_chat_talks_to_it(self, server, key):
        url, _ = server
        command = [
            sys.executable,
            "-m",
            "ropewalk",
            "chat",
            "--url",
            url,
            "--temperature",
            "0",
            "-n",
            "8",
            "--speed",
        ]
        done = subprocess.run(
            command, input="Say hello.\n/show\n", capture_output=True, text=True, timeout=300
        )
        asked = {"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 8, "temperature": 0}
        expected = post(url, asked)
        assert done.stdout == expected["choices"][0]["message"]["content"] + "\n"
        assert "decode 8 tokens" in done.stderr
        assert re.search(r"context +\d+ of 512 tokens", done.stderr)
        assert done.returncode == 0

    def test_other_processes_may_leave_in_the_middle(self, server, key):
        url, _ = server
        with RemoteModel(url) as model:
            assert (model.name, model.context_length) == ("smollm2-135m-instruct-q4_1", 512)
            chunks = model.stream_chat(
                [{"role": "user", "content": "Count."}], SamplingParams(ignore_eos=True)
            )
            assert next(chunks).text
            chunks.close()

    def test_refusals_are_told(self, server, key):
        url, _ = server
        with pytest.raises(ModelNotFoundError, match="does not serve 'x'; it serves smollm2"):
            RemoteModel(url, "x")
        with (
            RemoteModel(f"{url}/v1/", "gpt-4o") as model,
            pytest.raises(PromptError, match="at most 511 fit"),
        ):
            next(model.stream_chat([{"role": "user", "content": "a b " * 600}], SamplingParams()))

    def test_nobody_there(self, ropewalk):
        done = ropewalk("chat", "--url", "http://127.0.0.1:9", stdin="")
        assert done.exit_code == 1
        assert "http://127.0.0.1:9 cannot be reached" in done.stderr

    def test_a_url_leaves_the_machine_to_the_server(self, ropewalk):
        done = ropewalk("chat", "--url", "http://127.0.0.1:9", "--threads", "2", stdin="")
        assert done.exit_code == 2
        assert "--url leaves how the model runs to the server" in done.stderr

    def test_what_is_no_url(self):
        with pytest.raises(InvalidParameterError, match="allowed: http://HOST"):
            RemoteModel("ftp://x")
        with pytest.raises(GenerationError, match="cannot be reached"):
            RemoteModel("127.0.0.1:9")


class TestOptions:
    def test_keys_come_from_a_file_and_the_environment(self, tmp_path, monkeypatch):
        file = tmp_path / "keys"
        file.write_text("# a\nsk-one-is-here\n\n  sk-two-is-here \n")
        monkeypatch.setenv("ROPEWALK_API_KEY", "sk-three-is-here")
        assert serve_verb.read_keys(file) == ("sk-three-is-here", "sk-one-is-here", "sk-two-is-here")
        assert serve_verb.read_keys(None) == ("sk-three-is-here",)
        file.write_text("\n# nothing\n")
        monkeypatch.delenv("ROPEWALK_API_KEY")
        for path, message in ((file, "has no keys"), (tmp_path / "none", "cannot be read")):
            with pytest.raises(InvalidParameterError, match=message):
                serve_verb.read_keys(path)
        assert serve_verb.read_keys(None) == ()

    def test_names(self):
        assert serve_verb.name_of("/models/a-b.gguf") == "a-b"
        assert serve_verb.name_of("smollm2-135m") == "smollm2-135m"
        assert serve_verb.name_of("hf.co/me/it:a.gguf") == "hf.co/me/it:a.gguf"

    def test_aliases(self):
        assert serve_verb.parse_alias("gpt", ["a", "b"]) == ("gpt", "a")
        assert serve_verb.parse_alias("gpt=x/b.gguf", ["a", "b"]) == ("gpt", "b")
        for text in ("gpt=c", "=a"):
            with pytest.raises(InvalidParameterError, match="expected NAME or NAME=MODEL, MODEL one of a, b"):
                serve_verb.parse_alias(text, ["a", "b"])
        assert serve_verb.read_aliases(["x=a", "y=b", "x=a"], ["a", "b"]) == {"x": "a", "y": "b"}
        for texts in (["b=a"], ["x=a", "x=b"]):
            with pytest.raises(InvalidParameterError, match="is the name of another model"):
                serve_verb.read_aliases(texts, ["a", "b"])

    def test_adapters_are_those_of_the_model_that_is_named(self):
        alone = {"x": "x.gguf", "a=y": "y.gguf"}
        assert serve_verb.adapters_by_model(alone, ["a"]) == {"a": {"x": "x.gguf", "y": "y.gguf"}}
        both = {"a=x": "x.gguf", "models/b.gguf=y": "y.gguf"}
        expected = {"a": {"x": "x.gguf"}, "b": {"y": "y.gguf"}}
        assert serve_verb.adapters_by_model(both, ["a", "b"]) == expected
        for adapters in ({"x": "x.gguf"}, {"c=x": "x.gguf"}, {"a=x": "1.gguf", "b=x": "2.gguf"}):
            with pytest.raises(InvalidParameterError, match="--lora"):
                serve_verb.adapters_by_model(adapters, ["a", "b"])

    def test_two_models_of_one_name(self):
        assert serve_verb.by_name(["a.gguf", "b"]) == {"a": "a.gguf", "b": "b"}
        with pytest.raises(InvalidParameterError, match=r"the name 'a': x/a\.gguf and y/a\.gguf"):
            serve_verb.by_name(["x/a.gguf", "y/a.gguf"])

    def test_origins(self):
        for origin in ("*", "https://app.example", "http://localhost:3000", "app://obsidian.md"):
            assert serve_verb.checked_origin(origin) == origin
        for origin in ("https://app.example/", "app.example", "https://a.example/b", ""):
            with pytest.raises(InvalidParameterError, match="without a path"):
                serve_verb.checked_origin(origin)

    def test_host_names(self):
        assert serve_verb.hosts("127.0.0.1", [], guarded=False) == {"localhost"}
        assert serve_verb.hosts("127.0.0.1", [], guarded=True) is None
        assert serve_verb.hosts("0.0.0.0", [], guarded=False) is None
        assert serve_verb.hosts("0.0.0.0", ["My.Host"], guarded=True) == {"localhost", "my.host"}

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (("--ssl-certfile", "x"), "belong together"),
            (("--ssl-certfile", "x", "--ssl-keyfile", "y"), "there is no file x"),
            (("--port", "70000"), "--port"),
            (("--max-batch", "0"), "max-batch"),
            (("--root-path", "llm"), "allowed: a path such as /llm"),
            (("--root-path", "/lüm"), "allowed: a path such as /llm"),
        ],
    )
    def test_wrong_usage(self, ropewalk, arguments, message):
        done = ropewalk("serve", *arguments)
        assert done.exit_code == 2
        assert message in done.stderr

    def test_what_cannot_be_served(self, ropewalk):
        for arguments, message in (
            (("no-such-model",), "no-such-model"),
            (("--alias", "a=b"), "expected NAME"),
            (("--host", "192.0.2.1"), "host is '192.0.2.1' (Cannot assign requested address)"),
            (("--ssl-certfile", __file__, "--ssl-keyfile", __file__), "allowed: PEM files that match"),
        ):
            done = ropewalk("serve", *arguments)
            assert done.exit_code == (1 if arguments == ("no-such-model",) else 2)
            assert message in done.stderr

    def test_a_key_that_is_too_short(self, ropewalk, monkeypatch):
        assert os.environ.get("ROPEWALK_API_KEY") is None
        monkeypatch.setenv("ROPEWALK_API_KEY", "short")
        done = ropewalk("serve")
        assert done.exit_code == 2
        assert "8 or more ASCII characters" in done.stderr
        assert "short" not in done.stderr
