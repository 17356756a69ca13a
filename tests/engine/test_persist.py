"""Prefix pages on disk: found by later engines, never wrong, never in the way."""

import errno
import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from ropewalk.engine import persist
from ropewalk.engine.engine import Engine
from ropewalk.engine.persist import MAGIC, PageStore
from ropewalk.engine.request import Request
from ropewalk.errors import InvalidParameterError
from ropewalk.params import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PAGE_BYTES = 256
LIMIT = 1 << 20


@pytest.fixture(autouse=True)
def quiet(caplog):
    """No warning of the store goes unseen: a test that provokes one takes it from `caplog`."""
    yield caplog
    assert not caplog.records, caplog.text


def warnings(caplog):
    """The warnings so far, which are forgotten."""
    found = [record.getMessage() for record in caplog.records]
    caplog.clear()
    return found


def text(n, start=0):
    return [(i * i + start) % 12 for i in range(n)]


def ask(engine, prompt, params=GREEDY, **options):
    """The finished request."""
    request = engine.add_request(prompt, params, **options)
    while engine.has_unfinished:
        engine.step()
        engine.check()
    return request


@pytest.fixture
def open_engine(toy, tmp_path):
    """A function that makes an engine over the folder `tmp_path`, as if in a new process."""
    engines = []

    def make(folder=tmp_path, backend=None, **options):
        sizes = {"context_length": 64, "kv_tokens": 320, "cache_dir_bytes": LIMIT} | options
        engines.append(Engine(backend or toy(), cache_dir=folder, **sizes))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def cold(toy, prompt):
    engine = Engine(toy(), context_length=64, kv_tokens=64, prefix_cache=False)
    return ask(engine, prompt).output


def files(folder):
    return sorted(folder.rglob("*.page*"))


class TestHits:
    @pytest.mark.parametrize(
        ("n", "hit"), [(1, 0), (15, 0), (16, 15), (17, 16), (32, 31), (33, 32), (48, 47)]
    )
    def test_c1_c2_a_later_engine_skips_what_an_earlier_one_computed(self, toy, open_engine, n, hit):
        first = open_engine()
        expected = ask(first, text(n)).output
        first.close()
        backend = toy()
        second = open_engine(backend=backend)
        request = ask(second, text(n))
        assert request.output == expected == cold(toy, text(n))
        assert (request.n_cached, min(request.n_from_disk, request.n_cached)) == (hit, hit)
        assert backend.batch_sizes == [n - hit, 1, 1, 1, 1, 1]
        found = second.statistics()
        assert (found.disk_tokens, found.cached_tokens) == (hit, hit)
        assert found.pages_read == -(-hit // 16)
        again = ask(second, text(n))  # now it is in memory
        assert (again.n_cached, again.n_from_disk) == (hit, 0)

    def test_only_what_memory_lacks_is_read(self, open_engine):
        engine = open_engine()
        ask(engine, text(48))
        engine.close()
        engine = open_engine()
        assert ask(engine, text(20)).n_from_disk == 16
        assert ask(engine, text(48)).n_from_disk == 32
        assert engine.statistics().pages_read == 3

    @pytest.mark.parametrize(("switch", "key"), [(0, b""), (0, b'[["salt", "X"]]'), (40, b""), (100, b"k")])
    def test_c3_the_text_of_a_page_is_all_that_its_hash_was_made_of(self, switch, key):
        tokens = np.arange(90, dtype=np.int32)
        request = Request(0, GREEDY, 0, frozenset(), tokens, 60, 60, cache_key=key, rope_switch=switch)
        for i in range(3):
            assert request.text(i) == b"".join(request.block(j) for j in range(i + 1))

    def test_what_was_evicted_comes_back(self, toy, open_engine):
        """A pool of four pages forgets a prompt at once; the disk does not."""
        engine = open_engine(kv_tokens=64)
        prompts = [text(40, start) for start in range(4)]
        for hit in (0, 32):
            requests = [ask(engine, prompt) for prompt in prompts]
            engine._shelf.store.flush()
            assert [r.n_from_disk for r in requests] == [hit] * 4
            assert [r.output for r in requests] == [cold(toy, prompt) for prompt in prompts]

    def test_output_is_found_by_the_next_turn(self, open_engine):
        engine = open_engine()
        first = ask(engine, text(20), SamplingParams(temperature=0, max_tokens=16, ignore_eos=True))
        engine.close()
        assert ask(open_engine(), text(20) + first.output + [1]).n_from_disk == 32

    def test_c3_keys_and_texts_are_told_apart_though_all_hashes_are_the_same(self, toy, open_engine):
        keys = [(), [("adapter", "X")], [("salt", "X")]]
        for _ in range(3):
            for start in (0, 1):
                for key in keys:
                    engine = open_engine()
                    engine.scheduler.tables.prefix._hash_of = lambda parent, block: b"1"
                    request = ask(engine, text(20, start), cache_key=key)
                    assert request.output == cold(toy, text(20, start))
                    engine.close()
        assert request.n_from_disk == 0 or key == ()  # the one file is that of the first text

    def test_another_model_or_format_finds_nothing(self, toy, open_engine):
        engine = open_engine()
        ask(engine, text(40))
        engine.close()
        for options in ({"backend": toy(vocab_size=14)}, {"cache_dtype": "int8"}):
            other = open_engine(**options)
            assert ask(other, text(40)).n_cached == 0
            other.close()
        assert ask(open_engine(), text(40)).n_from_disk == 32

    def test_a_page_of_another_identity_does_not_pass_for_its_own(self, toy, open_engine, tmp_path, caplog):
        for backend in (toy(), toy(vocab_size=14)):
            engine = open_engine(backend=backend)
            ask(engine, text(40))
            engine.close()
        one, other = sorted((tmp_path / "pages").iterdir())
        for path in files(one):
            (other / path.relative_to(one)).write_bytes(path.read_bytes())
        engines = [open_engine(), open_engine(backend=toy(vocab_size=14))]
        assert sorted(ask(engine, text(40)).n_from_disk for engine in engines) == [0, 32]
        assert any("its checksum is wrong" in warning for warning in warnings(caplog))

    def test_a_page_is_read_only_into_a_page_that_no_copy_waits_for(self, toy, open_engine):
        """Forks, preemption and disk in one pool of five pages."""
        prompts = [text(40, start) for start in range(4)]
        engine = open_engine()
        for prompt in prompts:
            ask(engine, prompt)
        engine.close()
        engine = open_engine(kv_tokens=80, max_batch=4, token_budget=16)
        drawn = [SamplingParams(seed=i, n=2, max_tokens=20, ignore_eos=True) for i in range(4)]
        requests = [engine.add_request(*each).group for each in zip(prompts, drawn, strict=True)]
        while engine.has_unfinished:
            engine.step()
            engine.check()
        assert engine.statistics().pages_read > 4
        for prompt, params, group in zip(prompts, drawn, requests, strict=True):
            plain = Engine(toy(), context_length=64, kv_tokens=320, prefix_cache=False)
            alone = plain.add_request(prompt, params).group
            while plain.has_unfinished:
                plain.step()
            assert [r.output for r in group] == [r.output for r in alone]


class TestTrouble:
    @pytest.fixture
    def kept(self, open_engine, tmp_path):
        """The files of three pages."""
        engine = open_engine()
        ask(engine, text(48))
        engine.close()
        return files(tmp_path)

    @pytest.mark.parametrize(
        "damage",
        [
            lambda data: data[:-1],
            lambda data: data[:50],
            lambda data: data[:3],
            lambda data: b"",
            lambda data: bytes(len(data)),
            lambda data: data + b"x",
            lambda data: data[:-9] + bytes([data[-9] ^ 1]) + data[-8:],
            lambda data: data[:20] + bytes([data[20] ^ 1]) + data[21:],
            lambda data: data[:60] + bytes([data[60] ^ 1]) + data[61:],
            lambda data: data[:40] + b"\xff" * 16 + data[56:],
        ],
    )
    def test_a_damaged_page_is_computed_again_and_replaced(self, toy, kept, open_engine, damage, caplog):
        whole = [path.read_bytes() for path in kept]
        for path, data in zip(kept, whole, strict=True):
            path.write_bytes(damage(data))
        engine = open_engine()
        request = ask(engine, text(48))
        engine.close()
        assert (request.n_cached, request.output) == (0, cold(toy, text(48)))
        (warning,) = warnings(caplog)
        assert "a damaged page is removed" in warning
        assert [path.read_bytes() for path in kept] == whole or request.n_from_disk == 0
        assert ask(open_engine(), text(48)).n_from_disk in (16, 48)
        warnings(caplog)

    @pytest.mark.parametrize("kind", ["file", "folder", "link", "pipe"])
    def test_a_foreign_file_is_left_alone(self, toy, kept, open_engine, tmp_path, kind, caplog):
        foreign = tmp_path / "letter.txt"
        foreign.write_text("Dear reader, this is none of your pages.")
        for path in kept:
            path.unlink()
            if kind == "file":
                path.write_bytes(foreign.read_bytes())
            elif kind == "folder":
                path.mkdir()
            elif kind == "link":
                path.symlink_to(foreign)
            else:
                os.mkfifo(path)
        for _ in range(2):
            engine = open_engine()
            assert ask(engine, text(48)).output == cold(toy, text(48))
            engine.close()
            assert len(warnings(caplog)) == 1
        assert all(os.path.lexists(path) for path in kept)
        assert foreign.read_text().startswith("Dear reader")

    def test_files_with_other_names_are_never_touched(self, open_engine, tmp_path):
        (tmp_path / "pages" / "x" / "yy").mkdir(parents=True)
        others = [
            tmp_path / "a.page",
            tmp_path / "pages" / "notes",
            tmp_path / "pages" / "x" / "yy" / "b.page",
        ]
        for path in others:
            path.write_bytes(b"mine")
        engine = open_engine(cache_dir_bytes=16 * PAGE_BYTES)
        for start in range(12):
            ask(engine, text(60, start))
        engine.close()
        assert all(path.read_bytes() == b"mine" for path in others)

    def test_a_full_disk_is_told_once_and_costs_nothing_else(self, toy, open_engine, monkeypatch, caplog):
        def full(*args, **kwargs):
            raise OSError(errno.ENOSPC, "No space left on device")

        engine = open_engine()
        with monkeypatch.context() as patched:
            patched.setattr(persist.Path, "replace", full)
            for start in range(3):
                assert ask(engine, text(40, start)).output == cold(toy, text(40, start))
            engine._shelf.store.flush()
        (warning,) = warnings(caplog)
        assert "pages cannot be kept" in warning
        assert "No space left" in warning
        assert not engine._shelf.store.wants_pages
        monkeypatch.setattr(engine._shelf.store, "_refused_until", 0.0)  # a minute later
        ask(engine, text(40, 5))
        engine._shelf.store.flush()
        assert engine.statistics().pages_written == 2

    def test_a_read_only_disk_is_read(self, toy, kept, open_engine, monkeypatch, caplog):
        def refuse(*args, **kwargs):
            raise OSError(errno.EROFS, "Read-only file system")

        for owner, name in ((persist.Path, "open"), (persist.Path, "unlink"), (persist.os, "utime")):
            monkeypatch.setattr(owner, name, refuse)
        engine = open_engine()
        assert ask(engine, text(48)).n_from_disk == 48
        assert ask(engine, text(48, 3)).output == cold(toy, text(48, 3))
        engine.close()
        (warning,) = warnings(caplog)
        assert "pages cannot be kept" in warning

    @pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may write everywhere")
    def test_a_folder_that_cannot_be_written_is_read(self, kept, open_engine, tmp_path, caplog):
        for path in [tmp_path / "pages", *{path.parent for path in kept}]:
            path.chmod(0o500)
        engine = open_engine()
        assert ask(engine, text(48)).n_from_disk == 48
        ask(engine, text(48, 3))
        engine.close()
        assert len(warnings(caplog)) == 1

    def test_what_can_be_no_such_folder_is_refused(self, open_engine, tmp_path):
        (tmp_path / "file").write_text("")
        for folder in (tmp_path / "file", tmp_path / "file" / "below"):
            with pytest.raises(InvalidParameterError, match=r"cache_dir is '.*file.*', which cannot be used"):
                open_engine(folder)
        for name in (5, "", b"x"):
            with pytest.raises(
                InvalidParameterError, match=r"cache_dir is .*; allowed: the path of a folder"
            ):
                open_engine(name)
        with pytest.raises(
            InvalidParameterError, match="cache_dir_size is 4095 bytes; allowed: at least 16 pages"
        ):
            open_engine(cache_dir_bytes=4095)
        with pytest.raises(
            InvalidParameterError, match=r"cache_dir is .*; allowed: None, without a prefix cache"
        ):
            open_engine(prefix_cache=False)

    def test_what_a_dead_process_left_is_removed(self, kept, open_engine, tmp_path):
        old, new = (kept[0].with_name(f"{kept[0].name}.{digit * 16}") for digit in "ab")
        for path in (old, new):
            path.write_bytes(MAGIC)
        os.utime(old, (time.time() - 100,) * 2)
        engine = open_engine()
        ask(engine, text(40, 7))
        engine.close()
        assert (old.exists(), new.exists()) == (False, True)


class TestSize:
    @pytest.fixture
    def store(self, tmp_path):
        store = PageStore(tmp_path, identity=b"i", page_bytes=PAGE_BYTES, limit_bytes=20 * 1000)
        yield store
        store.close()

    def save(self, store, number, index=0):
        """A page of 1,000 bytes on disk, all told."""
        store.save(
            bytes([number] * 16), index, bytes([number]) * (1000 - 56 - PAGE_BYTES), self.contents(number)
        )

    def contents(self, number):
        return np.full(PAGE_BYTES, number, np.uint8)

    def has(self, store, number, index=0):
        found = store.load(bytes([number] * 16), index, bytes([number]) * (1000 - 56 - PAGE_BYTES))
        return found is not None and bool(np.array_equal(found, self.contents(number)))

    def test_a_page_that_another_process_removes_meanwhile_is_missed_and_no_more(self, store, monkeypatch):
        with monkeypatch.context() as patch:
            patch.setattr(persist.os.path, "lexists", lambda path: True)  # seen, and gone before it is marked
            store.save(b"k" * 16, 0, b"gone", np.zeros(PAGE_BYTES, np.uint8))
            store.flush()
        store.save(b"l" * 16, 0, b"kept", np.zeros(PAGE_BYTES, np.uint8))
        store.flush()
        assert store.load(b"l" * 16, 0, b"kept") is not None

    def test_the_least_recently_used_go_first(self, store, tmp_path):
        for number in range(15):
            self.save(store, number)
            store.flush()
            time.sleep(0.001)
        store.mark([bytes([0] * 16), bytes([3] * 16)])
        store.flush()
        for number in range(15, 24):
            self.save(store, number)
            store.flush()
            time.sleep(0.001)
            assert sum(path.stat().st_size for path in files(tmp_path)) <= 20 * 1000
        there = [number for number in range(24) if self.has(store, number)]
        assert {0, 3} <= set(there)
        assert there[2:] == list(range(there[2], 24))
        assert 15 <= len(there) <= 20

    def test_of_one_sequence_the_last_page_goes_first(self, store):
        for index in range(18):
            self.save(store, index, index)
        store.mark([bytes([index] * 16) for index in range(18)])
        for number in range(100, 106):
            self.save(store, number)
        store.flush()
        there = [number for number in range(18) if self.has(store, number, number)]
        assert there == list(range(len(there)))
        assert 10 < len(there) < 18

    def test_an_engine_marks_what_a_request_used(self, open_engine, tmp_path):
        engine = open_engine()
        ask(engine, text(48))
        engine._shelf.store.flush()
        by_time = sorted(files(tmp_path), key=lambda path: path.stat().st_mtime_ns)
        node, keys = None, []
        for i in range(3):
            block = np.array(text(48)[16 * i : 16 * i + 16], np.int32).tobytes()
            node = engine.scheduler.tables.prefix.find(node, block)
            keys.append(node.key.hex())
        assert [path.stem for path in by_time] == keys[::-1]

    def test_pages_beyond_what_may_wait_are_not_kept(self, store, monkeypatch):
        monkeypatch.setattr(persist, "MAX_PENDING_BYTES", 3 * PAGE_BYTES)
        busy = threading.Event()
        write = store._write
        monkeypatch.setattr(store, "_write", lambda record: (busy.wait(), write(record)))
        for number in range(9):
            self.save(store, number)
        assert not store.wants_pages
        busy.set()
        store.flush()
        assert [self.has(store, number) for number in range(9)] == [True] * 3 + [False] * 6
        assert store.wants_pages

    def test_two_stores_in_one_folder(self, store, tmp_path):
        other = PageStore(tmp_path, identity=b"i", page_bytes=PAGE_BYTES, limit_bytes=20 * 1000)
        for number in range(60):
            one = (store, other)[number % 2]
            self.save(one, number)
            one.flush()
        other.close()
        assert sum(path.stat().st_size for path in files(tmp_path)) <= 20 * 1000 * (1 + 1 / 16)
        assert all(self.has(store, number) for number in range(50, 60))


def test_two_processes_that_write_and_read_the_same_pages_at_once(tmp_path):
    """Each writes, reads, marks and evicts the same 40 pages in a folder with room for 20; what is read is right."""
    script = """
import sys, random
from pathlib import Path
import numpy as np
from ropewalk.engine.persist import PageStore
store = PageStore(Path(sys.argv[1]), identity=b"i", page_bytes=65536, limit_bytes=20 * 66000)
chance, hits = random.Random(int(sys.argv[2])), 0
looked = 0
while looked < 600 or hits <= 50:
    looked += 1
    if looked % 50 == 0:
        store.flush()  # or all may be over before a page is written
    n = chance.randrange(40)
    key, text = bytes([n] * 16), bytes([n] * 100)
    found = store.load(key, n, text)
    if found is None:
        store.save(key, n, text, np.full(65536, n, np.uint8))
    else:
        hits += 1
        assert (found == n).all()
        store.mark([key])
store.close()
"""
    both = [
        subprocess.Popen(
            [sys.executable, "-c", script, tmp_path, str(seed)], stderr=subprocess.PIPE, text=True
        )
        for seed in (1, 2)
    ]
    for process in both:
        _, errors = process.communicate(timeout=300)
        assert (process.returncode, errors) == (0, "")
    assert all(persist._NAME.fullmatch(path.name) for path in files(tmp_path))
