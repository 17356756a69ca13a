"""`pull`, `list`, `rm` and `inspect`."""

import json
from typing import ClassVar

import pytest

from ropewalk.checkpoint import hub
from ropewalk.checkpoint.catalog import CATALOG
from ropewalk.cli import loading
from ropewalk.errors import DownloadError


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache of our own; a function puts a hub model called `name` of 5 bytes into it."""
    monkeypatch.setenv("ROPEWALK_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def cached_default(cache):
    """The default model's place in the cache, taken by a file of the right size."""
    entry = CATALOG["smollm2-135m"]
    path = cache / "models" / entry.file
    path.parent.mkdir()
    with path.open("wb") as f:
        f.truncate(entry.n_bytes)
    return path


def test_list_an_empty_cache(ropewalk, cache):
    lines = ropewalk("list").stdout.splitlines()
    assert lines[0].split() == ["MODEL", "SIZE", "WHERE"]
    assert lines[1].split() == ["smollm2-135m", "98.4", "MB", "(ropewalk", "pull", "smollm2-135m)"]
    assert len(lines) == 1 + len(CATALOG)


def test_list_and_rm_a_cached_model(ropewalk, cached_default):
    assert str(cached_default) in ropewalk("list").stdout
    listed = json.loads(ropewalk("list", "--json").stdout)
    assert listed["cached"] == [
        {
            "name": "smollm2-135m",
            "path": str(cached_default),
            "bytes": 98_362_432,
            "source": CATALOG["smollm2-135m"].source,
        }
    ]
    assert "smollm2-135m" not in [m["name"] for m in listed["available"]]
    result = ropewalk("rm", "smollm2-135m")
    assert (result.exit_code, result.stderr) == (0, "removed smollm2-135m (98.4 MB)\n")
    assert not cached_default.exists()


def test_rm_what_is_not_there(ropewalk, cache):
    result = ropewalk("rm", "smollm2-135m")
    assert result.exit_code == 1
    assert "not in the cache" in result.stderr
    assert ropewalk("rm").exit_code == 2


class ByHand:
    """A `threading.Timer` that rings when the test says so."""

    made: ClassVar[list["ByHand"]] = []

    def __init__(self, seconds, ring, arguments):
        self.ring, self.arguments = ring, arguments
        self.cancelled = False
        self.made.append(self)

    def start(self):
        pass

    def cancel(self):
        self.cancelled = True


def test_pull_prints_the_path_and_tells_each_step_that_lasts_once(ropewalk, monkeypatch, tmp_path):
    def pull(model, *, progress):
        def wait():
            ByHand.made[-1].ring(*ByHand.made[-1].arguments)

        progress("what is over at once", 0, 2)
        progress(f"downloading {model}", 0, 5000)
        wait()
        progress(f"downloading {model}", 5000, 5000)
        progress(f"checking {model}\x1b", 1, 2)
        wait()
        ByHand.made[0].ring("what is over at once")  # too late: it was cancelled while it rang
        return tmp_path / "model.gguf"

    monkeypatch.setattr(hub, "pull", pull)
    monkeypatch.setattr(ByHand, "made", [])
    monkeypatch.setattr(loading.threading, "Timer", ByHand)
    result = ropewalk("pull")
    assert result.stdout == f"{tmp_path / 'model.gguf'}\n"
    assert result.stderr == "downloading smollm2-135m (5.0 kB) ...\nchecking smollm2-135m\u241b ...\n"
    assert all(timer.cancelled for timer in ByHand.made)


def test_pull_that_fails(ropewalk, monkeypatch):
    def pull(model, *, progress):
        raise DownloadError("no network")

    monkeypatch.setattr(hub, "pull", pull)
    result = ropewalk("pull", "gemma3-270m")
    assert (result.exit_code, result.stdout, result.stderr) == (1, "", "ropewalk: no network\n")


def test_inspect_the_default_model(ropewalk, smollm2):
    result = ropewalk("inspect", smollm2)
    facts = {line[:14].strip(): line[16:] for line in result.stdout.splitlines() if line[:14].strip()}
    assert result.exit_code == 0
    assert facts["architecture"] == "llama"
    assert facts["parameters"] == "134.5 million"
    assert facts["layers"] == "30"
    assert facts["heads"] == "9 of width 64, 3 for keys and values"
    assert facts["context length"] == "8192 tokens"
    assert facts["tokenizer"].startswith("byte-level BPE, pre-split smollm, 49152 tokens")
    assert "Q4_1      210   66.4 MB" in result.stdout
    assert "<|im_start|>" in facts["chat template"] + result.stdout


def test_inspect_as_json_with_every_tensor(ropewalk, smollm2):
    facts = json.loads(ropewalk("inspect", smollm2, "--json", "--tensors").stdout)
    assert facts["parameters"] == sum(t["shape"][0] * (t["shape"] + [1])[1] for t in facts["tensors"])
    assert facts["tensors"][0] == {
        "name": "token_embd.weight",
        "shape": [49152, 576],
        "type": "Q8_0",
        "bytes": 30_081_024,
    }
    assert facts["model"]["vocabulary"] == facts["tensors"][0]["shape"][0]
    assert facts["chat_template"].startswith("{% for message in messages %}")


def test_inspect_a_file_that_is_no_model(ropewalk, tmp_path):
    path = tmp_path / "a.gguf"
    path.write_bytes(b"<html>")
    result = ropewalk("inspect", path)
    assert result.exit_code == 1
    assert result.stderr.startswith("ropewalk: ")
    assert len(result.stderr.splitlines()) == 1


def test_inspect_a_model_that_cannot_run_and_wants_to_command_the_terminal(ropewalk, tmp_path):
    from gguf import GGUFWriter

    path = tmp_path / "hostile.gguf"
    writer = GGUFWriter(path, "mamba\x1b[31m")
    writer.add_name("[red]name\x1b]0;title\x07\nnext")
    writer.add_chat_template("{{ x }}\x1b[2J")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    result = ropewalk("inspect", path)
    assert result.exit_code == 0
    assert "\x1b" not in result.stdout
    assert "\x07" not in result.stdout
    assert "[red]name" in result.stdout
    assert "not supported" in result.stdout
    assert "mamba" in result.stdout


def test_inspect_shows_what_a_file_suggests(ropewalk, tmp_path):
    """It is not applied, so there must be a place to find it."""
    from gguf import GGUFWriter

    writer = GGUFWriter(tmp_path / "a.gguf", "mamba")
    writer.add_float32("general.sampling.temp", 0.7)
    writer.add_int32("general.sampling.top_k", 20)
    writer.add_string("general.sampling.sequence", "kp")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    result = ropewalk("inspect", tmp_path / "a.gguf")
    assert "suggested      temp 0.7, top_k 20\n" in result.stdout
    facts = json.loads(ropewalk("inspect", tmp_path / "a.gguf", "--json").stdout)
    assert facts["suggested_sampling"] == {"temp": 0.7, "top_k": 20}
