"""`ropewalk warmup`: which kernels it compiles, and what it says."""

import pickle
import re

import pytest

from ropewalk.backend import compile as backend_compile
from ropewalk.backend.compile import Part, all_parts, attention_parts
from ropewalk.cli import warmup as warmup_verb
from ropewalk.kernels import cache
from ropewalk.kernels.attention import head_passes, tile_tokens
from ropewalk.kernels.formats import PACKED
from ropewalk.kernels.pack import compile_packer


@pytest.fixture
def compiled(monkeypatch, smollm2):
    """The names of the parts that were compiled; compiling takes no time."""
    names = []

    def compile_in_processes(parts, n_processes, progress):
        names.extend(part.what for part in parts)

    monkeypatch.setattr(backend_compile, "compile_in_processes", compile_in_processes)
    monkeypatch.setattr(cache, "cache_bytes", lambda: (12_300_000, 99))
    monkeypatch.setattr(warmup_verb, "find", lambda model: smollm2)
    return names


def test_a_model_needs_its_formats_both_caches_and_the_forward_pass_each_once(ropewalk, compiled):
    result = ropewalk("warmup", "one", "two")
    assert result.exit_code == 0, result.stderr
    assert compiled == [
        "the forward pass",
        "sampling",
        "kernels for Q4_1",  # with 16-bit activations and with 8-bit ones
        "kernels for Q4_1",
        "kernels for Q8_0",
        *(
            f"attention for 3 heads, tokens: {tokens}, {cache}"
            for cache in ("float16", "int8")
            for tokens in (1, tile_tokens(3))
        ),
    ]
    assert re.fullmatch(r"ready after \d+\.\d s: 12\.3 MB in (.*)\n", result.stdout)[1] == str(
        cache.cache_folder()
    )


def test_all_is_every_format_and_every_group(ropewalk, compiled):
    ropewalk("warmup", "--all")
    assert {name for name in compiled if name.startswith("kernels")} == {
        f"kernels for {name}" for name in PACKED
    }
    assert {name for name in compiled if name.startswith("attention")} == {
        f"attention for {heads} heads, tokens: {tokens}, {cache}"
        for heads in range(1, 9)
        for tokens in (1, tile_tokens(heads))
        for cache in ("float16", "int8")
    }


def test_processes_compile_onto_the_disk(monkeypatch, tmp_path):
    monkeypatch.setenv("ROPEWALK_HOME", str(tmp_path))
    parts = [
        Part("a packer", compile_packer, (PACKED[name].kind, size)) for name, size in (("F32", 4), ("F16", 2))
    ]
    told = []
    backend_compile.compile_in_processes(parts, 2, lambda what, share: told.append((what, share)))
    assert told == [("compiling a packer", 0.0), ("compiling a packer", 0.5)]
    assert len(list(tmp_path.rglob("pack.*.nbc"))) == 2


def test_an_interruption_waits_for_no_process(tmp_path):
    late = tmp_path / "late"
    parts = [Part("a", exec, (f"import time, pathlib\ntime.sleep(15)\npathlib.Path({str(late)!r}).touch()",))]

    def interrupt(what, share):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        backend_compile.compile_in_processes(parts, 1, interrupt)
    assert not late.exists()


def test_every_part_can_be_sent_to_a_process():
    assert pickle.loads(pickle.dumps(all_parts())) == all_parts()


@pytest.mark.parametrize(("files", "doing"), [([], "compiling"), (["pack.x-0.nbc"], "preparing")])
def test_parts_are_compiled_in_order_and_told(monkeypatch, tmp_path, files, doing):
    monkeypatch.setattr(backend_compile, "cache_folder", lambda: tmp_path)
    for name in files:
        (tmp_path / name).touch()
    log = []
    parts = [Part(name, log.append, (name,)) for name in "ab"]
    backend_compile.compile_parts(parts, lambda what, share: log.append((what, share)))
    assert log == [(f"{doing} a", 0.0), "a", (f"{doing} b", 0.5), "b"]


@pytest.mark.parametrize(
    ("group", "passes"), [(1, (1, 1)), (8, (8, 8)), (9, (5, 4)), (14, (7, 7)), (17, (6, 5))]
)
def test_query_heads_are_shared_out_evenly_over_passes(group, passes):
    assert head_passes(group) == passes


def test_a_model_of_two_kinds_of_pass_needs_both(monkeypatch):
    from types import SimpleNamespace

    assert {part.what for part in attention_parts(SimpleNamespace(kv_group=9, latent=None), "int8")} == {
        f"attention for {heads} heads, tokens: {tokens}, int8"
        for heads in (5, 4)
        for tokens in (1, tile_tokens(5))
    }
