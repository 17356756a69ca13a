"""Models from a hub: a small server on this machine speaks as much of the protocol as is needed."""

import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from ropewalk.checkpoint import hub, store
from ropewalk.checkpoint.huggingface import Reference, choose, split_sets
from ropewalk.errors import DownloadError, ModelNotFoundError

COMMIT = "c0ffee" + "0" * 34


@dataclass
class FakeHub:
    """Repositories by name, each with its files; what was asked for; and what goes wrong."""

    url: str = ""
    repos: dict[str, dict[str, bytes]] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    private: dict[str, str] = field(default_factory=dict)
    corrupt: set[str] = field(default_factory=set)
    cut_after: dict[str, int] = field(default_factory=dict)
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)
    ranges: list[str | None] = field(default_factory=list)

    def files_sent(self) -> list[str]:
        return [
            path.split("/resolve/")[1].split("/", 1)[1]
            for verb, path, _ in self.requests
            if "/resolve/" in path and verb == "GET"
        ]


class Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def do_HEAD(self):
        self.answer(body=False)

    def do_GET(self):
        self.answer(body=True)

    def answer(self, body: bool) -> None:
        path = self.path.split("?")[0]
        self.hub.requests.append((self.command, path, self.headers.get("Authorization")))
        self.hub.ranges.append(self.headers.get("Range"))
        api = re.fullmatch(r"/api/models/([^/]+/[^/]+)", path)
        file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        repo = (api or file)[1] if api or file else None
        files = self.hub.repos.get(repo or "")
        if files is None or (self.hub.private.get(repo) not in (None, self.headers.get("Authorization"))):
            self.send(401 if files else 404, {"X-Error-Code": "RepoNotFound"}, b"", body)
        elif repo in self.hub.gated:
            self.send(403, {"X-Error-Code": "GatedRepo"}, b"", body)
        elif api:
            self.send(
                200, {"Content-Type": "application/json"}, json.dumps(self.info(repo, files)).encode(), body
            )
        elif file[3] in files:
            self.send_file(file[3], files[file[3]], body)
        else:
            self.send(404, {"X-Error-Code": "EntryNotFound"}, b"", body)

    def info(self, repo: str, files: dict[str, bytes]) -> dict:
        siblings = []
        for name, data in files.items():
            lfs = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest(), "pointerSize": 134}
            siblings.append({"rfilename": name, "size": len(data), "blobId": "0" * 40, "lfs": lfs})
        return {"_id": "1", "id": repo, "modelId": repo, "sha": COMMIT, "private": False, "tags": [],
                "downloads": 0, "likes": 0, "siblings": siblings}  # fmt: skip

    def send_file(self, name: str, data: bytes, body: bool) -> None:
        headers = {
            "ETag": f'"{hashlib.sha256(data).hexdigest()}"',
            "X-Repo-Commit": COMMIT,
            "Accept-Ranges": "bytes",
        }
        if name in self.hub.corrupt:
            data = bytes(len(data))
        status, wanted = 200, self.headers.get("Range")
        if wanted and (match := re.fullmatch(r"bytes=(\d+)-(\d*)", wanted)):
            start, size = int(match[1]), len(data)
            end = int(match[2] or size - 1)
            status = 206
            headers["Content-Range"] = f"bytes {start}-{end}/{size}"
            data = data[start : end + 1]
        self.send(status, headers, data, body, self.hub.cut_after.get(name))

    def send(
        self, status: int, headers: dict[str, str], data: bytes, body: bool, cut: int | None = None
    ) -> None:
        self.send_response(status)
        for key, value in (headers | {"Content-Length": str(len(data))}).items():
            self.send_header(key, value)
        self.end_headers()
        if body:
            self.wfile.write(data[:cut])
            if cut is not None:
                self.close_connection = True


@pytest.fixture
def fake(tmp_path, monkeypatch) -> FakeHub:
    fake = FakeHub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("BoundHandler", (Handler,), {"hub": fake}))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    fake.url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setenv("HF_ENDPOINT", fake.url)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("ROPEWALK_HOME", str(tmp_path / "home"))
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy", "HTTPS_PROXY", "https_proxy"):
        monkeypatch.delenv(name, raising=False)
    fake.repos["ann/one"] = {"README.md": b"# one", "one-Q8_0.gguf": b"GGUF one" * 999}
    fake.repos["ann/many"] = {
        f"many-{q}.gguf": f"GGUF {q}".encode() * 99 for q in ("Q4_0", "Q4_K_M", "Q4_K_S", "F16")
    } | {"mmproj-F16.gguf": b"GGUF eye"}
    fake.repos["ann/split"] = {
        f"Q6_K/split-Q6_K-0000{i}-of-00003.gguf": f"GGUF {i}".encode() * 999 for i in (1, 2, 3)
    } | {"Q2_K/split-Q2_K-00001-of-00002.gguf": b"GGUF alone"}
    yield fake
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_only_file_of_a_repository_is_fetched_once(fake):
    seen = []
    path = hub.resolve("hf.co/ann/one", progress=lambda *step: seen.append(step))
    assert path == store.models_dir() / "hf.co" / "ann" / "one" / "one-Q8_0.gguf"
    assert path.read_bytes() == fake.repos["ann/one"]["one-Q8_0.gguf"]
    assert fake.files_sent() == ["one-Q8_0.gguf"]
    assert {token for _, path, token in fake.requests if "ann/one" in path} == {"Bearer hf_secret"}
    assert seen[0] == ("downloading hf.co/ann/one", 0, 7992)
    assert seen[-1] == ("downloading hf.co/ann/one", 7992, 7992)

    fake.requests.clear()
    assert hub.resolve("hf.co/ann/one", download=False) == path
    assert hub.resolve("hf.co/ann/one:Q8_0", download=False) == path
    assert fake.requests == []  # what is here is used without asking


@pytest.mark.parametrize(
    ("wanted", "file"),
    [
        ("Q4_K_M", "many-Q4_K_M.gguf"),
        ("q4_k_m", "many-Q4_K_M.gguf"),
        ("many-Q4_0.gguf", "many-Q4_0.gguf"),
        ("many-Q4_0", "many-Q4_0.gguf"),
        ("mmproj-F16.gguf", "mmproj-F16.gguf"),
    ],
)
def test_a_file_or_a_quantization_is_chosen(fake, wanted, file):
    assert hub.resolve(f"hf.co/ann/many:{wanted}").name == file
    assert fake.files_sent() == [file]


def test_several_files_are_listed_to_choose_from(fake):
    with pytest.raises(ModelNotFoundError, match=r"several \.gguf files") as caught:
        hub.resolve("hf.co/ann/many")
    choices = str(caught.value).split("\n  ")[1:]
    assert choices == [f"hf.co/ann/many:many-{q}.gguf" for q in ("F16", "Q4_0", "Q4_K_M", "Q4_K_S")]
    with pytest.raises(ModelNotFoundError, match=r"no file matches 'Q9'.*\n.*many-F16"):
        hub.resolve("hf.co/ann/many:Q9")
    with pytest.raises(ModelNotFoundError, match=r"several files match 'F16'"):
        hub.resolve("hf.co/ann/many:F16")
    for choice in choices:
        assert hub.resolve(choice).exists()


def test_split_files_are_all_fetched_and_half_a_set_is_no_model(fake):
    path = hub.resolve("hf.co/ann/split")
    folder = store.models_dir() / "hf.co" / "ann" / "split" / "Q6_K"
    assert path == folder / "split-Q6_K-00001-of-00003.gguf"
    assert {f"Q6_K/{p.name}": p.read_bytes() for p in folder.iterdir()} == {
        k: v for k, v in fake.repos["ann/split"].items() if k.startswith("Q6_K")
    }
    (found,) = hub.list_models()
    assert found.name == "hf.co/ann/split:Q6_K/split-Q6_K-00001-of-00003.gguf"
    assert (len(found.files), found.n_bytes, found.path) == (3, 3 * 6 * 999, path)
    assert hub.resolve(found.name, download=False) == path

    (folder / "split-Q6_K-00002-of-00003.gguf").unlink()
    assert hub.list_models() == []
    fake.requests.clear()
    assert hub.resolve("hf.co/ann/split:Q6_K") == path
    assert fake.files_sent() == ["Q6_K/split-Q6_K-00002-of-00003.gguf"]
    assert len(hub.remove("hf.co/ann/split").files) == 3
    assert list(folder.iterdir()) == []


def test_models_of_the_hub_are_listed_and_removed(fake):
    hub.pull("hf.co/ann/one")
    hub.pull("hf.co/ann/many:Q4_0")
    assert [(m.name, m.source) for m in hub.list_models()] == [
        ("hf.co/ann/many:many-Q4_0.gguf", "huggingface.co/ann/many"),
        ("hf.co/ann/one:one-Q8_0.gguf", "huggingface.co/ann/one"),
    ]
    assert hub.remove("hf.co/ann/one").name == "hf.co/ann/one:one-Q8_0.gguf"
    assert [m.name for m in hub.list_models()] == ["hf.co/ann/many:many-Q4_0.gguf"]


def test_a_download_that_breaks_off_goes_on_where_it_stopped(fake):
    fake.repos["ann/large"] = {"large.gguf": bytes(range(256)) * 100_000}
    fake.cut_after["large.gguf"] = 15_000_000
    path = hub.resolve("hf.co/ann/large")
    assert path.read_bytes() == fake.repos["ann/large"]["large.gguf"]
    starts = [int(r.removeprefix("bytes=").split("-")[0]) for r in fake.ranges if r]
    assert starts
    assert min(starts) > 10_000_000


def test_what_came_is_compared_with_the_sha256_of_the_hub(fake):
    fake.corrupt.add("one-Q8_0.gguf")
    with pytest.raises(
        DownloadError, match=r"one-Q8_0\.gguf of hf\.co/ann/one came with SHA-256 [0-9a-f]{64} instead"
    ):
        hub.resolve("hf.co/ann/one")
    assert hub.list_models() == []
    fake.corrupt.clear()
    assert hub.resolve("hf.co/ann/one").read_bytes() == fake.repos["ann/one"]["one-Q8_0.gguf"]


def test_repositories_that_are_not_there_private_or_gated(fake):
    with pytest.raises(ModelNotFoundError, match=r"no repository ann/none.*HF_TOKEN"):
        hub.resolve("hf.co/ann/none")
    fake.private["ann/one"] = "Bearer another"
    with pytest.raises(ModelNotFoundError, match=r"private.*HF_TOKEN"):
        hub.resolve("hf.co/ann/one")
    fake.private["ann/one"] = "Bearer hf_secret"
    assert hub.resolve("hf.co/ann/one").exists()
    fake.gated.add("ann/many")
    with pytest.raises(DownloadError, match=r"accept conditions.*HF_TOKEN"):
        hub.resolve("hf.co/ann/many:Q4_0")


FOLDER = {
    "README.md": b"# tensors",
    "config.json": b"{}",
    "model-00001-of-00002.safetensors": b"one",
    "model-00002-of-00002.safetensors": b"two",
    "model.safetensors.index.json": b"{}",
    "onnx/model.safetensors": b"another",
    "pytorch_model.bin": b"pickled",
    "tokenizer.json": b"{}",
    "1_Pooling/config.json": b"{}",
    "additional_chat_templates/tool_use.jinja": b"{{ tools }}",
}


def test_a_repository_in_the_hub_s_own_layout_is_fetched_as_a_folder(fake):
    fake.repos["ann/tensors"] = FOLDER
    path = hub.resolve("hf.co/ann/tensors")
    assert path.is_dir()
    wanted = FOLDER.keys() - {"README.md", "onnx/model.safetensors", "pytorch_model.bin"}
    found = {p.relative_to(path).as_posix(): p.read_bytes() for p in path.rglob("*") if p.is_file()}
    assert found == {n: FOLDER[n] for n in wanted}
    assert fake.files_sent()[-1] == "config.json"  # its presence says that the rest is there
    fake.requests.clear()
    assert hub.resolve("hf.co/ann/tensors") == path
    assert not fake.requests
    (listed,) = (m for m in hub.list_models() if "tensors" in m.name)
    assert (listed.name, listed.path) == ("hf.co/ann/tensors:safetensors", path)
    hub.remove("hf.co/ann/tensors")
    assert not [p for p in path.rglob("*") if p.is_file()]


def test_of_a_repository_with_both_layouts_gguf_is_meant_unless_the_other_is_named(fake):
    fake.repos["ann/both"] = FOLDER | {"both-Q8_0.gguf": b"GGUF both"}
    assert hub.resolve("hf.co/ann/both").name == "both-Q8_0.gguf"
    assert hub.resolve("hf.co/ann/both:safetensors").is_dir()
    assert hub.resolve("hf.co/ann/both").name == "both-Q8_0.gguf"


def test_pickled_weights_are_refused_by_name(fake):
    fake.repos["ann/old"] = {"config.json": b"{}", "pytorch_model.bin": b"x"}
    with pytest.raises(ModelNotFoundError, match=r"ann/old has only pickled PyTorch weights"):
        hub.resolve("hf.co/ann/old")


def test_a_repository_without_gguf_files(fake):
    fake.repos["ann/tensors"] = {"model.safetensors": b"x"}
    with pytest.raises(ModelNotFoundError, match=r"ann/tensors has neither a \.gguf file nor config\.json"):
        hub.resolve("hf.co/ann/tensors")


def test_names_that_would_leave_the_cache_are_ignored(fake):
    fake.repos["eve/evil"] = {"../../../evil.gguf": b"x", "/evil.gguf": b"x", "a\\..\\evil.gguf": b"x"}
    with pytest.raises(ModelNotFoundError, match=r"has no \.gguf file"):
        hub.resolve("hf.co/eve/evil")


def test_a_hub_that_cannot_be_reached(fake, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(DownloadError, match=r"hf\.co/ann/one could not be fetched"):
        hub.resolve("hf.co/ann/one")


@pytest.mark.parametrize(
    "name", ["hf.co/", "hf.co/a", "hf.co/a/b/c", "hf.co/../x", "hf.co/a/b:", "hf.co/a b/c"]
)
def test_names_that_are_no_repository(fake, name):
    with pytest.raises(ModelNotFoundError, match=r"write hf.co/OWNER/REPO"):
        hub.resolve(name)
    assert fake.requests == []


def test_parsing_and_choosing():
    assert Reference.parse("hf.co/a/b.c-1:x/y.gguf") == Reference("a", "b.c-1", "x/y.gguf")
    assert str(Reference.parse("hf.co/a/b:Q4")) == "hf.co/a/b:Q4"
    sets = split_sets(["b-00002-of-00002.gguf", "a.gguf", "b-00001-of-00002.gguf", "c.txt", "D.GGUF"])
    assert sets == {
        "D.GGUF": ["D.GGUF"],
        "a.gguf": ["a.gguf"],
        "b-00001-of-00002.gguf": ["b-00001-of-00002.gguf", "b-00002-of-00002.gguf"],
    }
    models = ["x/m-Q4_0.gguf", "m.Q4_0.gguf", "m-IQ4_0.gguf"]
    assert choose(models, "Q4_0") == ["x/m-Q4_0.gguf", "m.Q4_0.gguf"]
    assert choose(models, "x/m-Q4_0") == ["x/m-Q4_0.gguf"]
    assert choose(models, "4_0") == []
