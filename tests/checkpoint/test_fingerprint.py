"""The identity of model files: it follows from their contents, and is computed once."""

import hashlib
import os
import time

import pytest

from ropewalk.checkpoint import fingerprint as module
from ropewalk.checkpoint.fingerprint import fingerprint, stamp
from ropewalk.errors import CheckpointError

LONG_AGO = 1_600_000_000


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """A cache folder of its own."""
    monkeypatch.setenv("ROPEWALK_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def settled(monkeypatch):
    """As if files had been there for long."""
    monkeypatch.setattr(module, "RECENT_S", -1.0)


@pytest.fixture
def never_read(monkeypatch):
    """Fail whoever reads a file to hash it."""

    def start():
        def refuse(*args):
            raise AssertionError("the file was read again")

        monkeypatch.setattr(module.hashlib, "file_digest", refuse)

    return start


def write(path, data):
    path.write_bytes(data)
    return path


def test_it_is_that_of_the_contents(tmp_path):
    one, other = write(tmp_path / "a", b"weights"), write(tmp_path / "b", b"weights")
    expected = hashlib.sha256(hashlib.sha256(b"weights").digest()).digest()
    assert fingerprint(stamp([one])) == fingerprint(stamp([other])) == expected
    assert fingerprint(stamp([one, other])) != expected
    assert fingerprint(stamp([write(one, b"weightz")])) != expected


def test_a_file_is_read_once(tmp_path, settled, never_read):
    path = write(tmp_path / "model", b"weights")
    first = fingerprint(stamp([path]))
    never_read()
    assert fingerprint(stamp([path])) == first
    link = tmp_path / "link"
    link.symlink_to(path)
    assert fingerprint(stamp([link])) == first


@pytest.mark.parametrize("how", ["in place", "by another file", "with the old times"])
def test_another_content_is_seen_though_size_and_time_are_the_same(tmp_path, settled, how):
    path = write(tmp_path / "model", b"weights")
    os.utime(path, (LONG_AGO, LONG_AGO))
    first = fingerprint(stamp([path]))
    if how == "by another file":
        write(tmp_path / "new", b"WEIGHTS").replace(path)
    else:
        changed_ns = path.stat().st_ctime_ns
        while path.stat().st_ctime_ns == changed_ns:  # until the file system's clock ticks
            time.sleep(0.001)
            write(path, b"WEIGHTS")
    if how == "with the old times":
        os.utime(path, (LONG_AGO, LONG_AGO))
    assert fingerprint(stamp([path])) != first


def test_a_file_that_has_just_changed_is_read_again(tmp_path, home):
    path = write(tmp_path / "model", b"weights")
    fingerprint(stamp([path]))
    assert not (home / "hashes").exists()


def test_one_that_changes_while_it_is_opened_is_refused(tmp_path):
    path = write(tmp_path / "model", b"weights")
    before = stamp([path])
    write(path, b"other weights")
    with pytest.raises(CheckpointError, match="model was changed while it was being opened"):
        fingerprint(before)
    path.unlink()
    with pytest.raises(CheckpointError, match="model cannot be read"):
        fingerprint(before)


@pytest.mark.parametrize("damage", ["", "zz" * 32, "ab" * 31, "ab" * 33])
def test_a_damaged_or_foreign_digest_is_not_used(tmp_path, home, settled, damage):
    path = write(tmp_path / "model", b"weights")
    first = fingerprint(stamp([path]))
    (kept,) = (home / "hashes").iterdir()
    kept.write_text(damage)
    assert fingerprint(stamp([path])) == first


def test_where_nothing_can_be_kept_it_is_computed_each_time(tmp_path, home, settled):
    home.write_text("a file, no folder")
    path = write(tmp_path / "model", b"weights")
    assert fingerprint(stamp([path])) == fingerprint(stamp([path]))
