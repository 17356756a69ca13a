"""Output: nothing from a model file or a model reaches the terminal as a command."""

import json
import warnings

import pytest
import typer

from ropewalk.cli import console
from ropewalk.errors import CheckpointError, InvalidParameterError


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain text, \U0001f600 and \u6b6a\n\tkept", "plain text, \U0001f600 and \u6b6a\n\tkept"),
        ("\x1b]0;title\x07", "\u241b]0;title\u2407"),
        ("a\rb\x00c\x7f", "a\u240db\u2400c\u2421"),
        ("\x9b31m", "\\x9b31m"),
    ],
)
def test_visible_disarms_control_characters(text, shown):
    assert console.visible(text) == shown


def test_one_line_stays_one_line_and_in_order():
    assert console.one_line("a\nb\tc\u202egnp.exe") == "a b\u2409c\\u202egnp.exe"


def test_write_is_exact_for_a_pipe_and_safe_for_a_terminal(capsys, monkeypatch):
    console.write("\x1b[31mred")
    assert capsys.readouterr().out == "\x1b[31mred"
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    console.write("\x1b[31mred")
    assert capsys.readouterr().out == "\u241b[31mred"


def test_write_json_is_strict(capsys):
    console.write_json({"a": 1, "b": "\x1b"})
    assert json.loads(capsys.readouterr().out) == {"a": 1, "b": "\x1b"}
    with pytest.raises(ValueError, match="not JSON compliant"):
        console.write_json({"logprob": float("-inf")})


def test_columns_and_fields_align():
    assert console.columns([("name", "n"), ("a", "10")], right=(1,)) == "name   n\na     10"
    assert console.fields({"a": "1\n2", "long": "3"}) == "a     1\n      2\nlong  3"


@pytest.mark.parametrize(
    ("n_bytes", "text"), [(0, "0 B"), (999, "999 B"), (98_000_000, "98.0 MB"), (1.5e12, "1.5 TB")]
)
def test_byte_size(n_bytes, text):
    assert console.byte_size(n_bytes) == text


@pytest.mark.parametrize(
    ("error", "status", "told"),
    [
        (CheckpointError("bad \x1b[2J file\nsecond line"), 1, "ropewalk: bad \u241b[2J file second line\n"),
        (InvalidParameterError("top_k is x; allowed: y"), 2, "ropewalk: top_k is x; allowed: y\n"),
        (KeyboardInterrupt(), 130, "\n"),
        (OSError(28, "No space left on device", "/a/b"), 1, "ropewalk: /a/b: No space left on device\n"),
    ],
)
def test_verb_turns_endings_into_statuses(error, status, told, capsys):
    @console.verb
    def fail():
        raise error

    with pytest.raises(typer.Exit) as exit_:
        fail()
    assert exit_.value.exit_code == status
    assert capsys.readouterr().err == told


def test_verb_leaves_our_own_faults_alone():
    @console.verb
    def fail():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()


def test_verb_tells_warnings_in_one_line(capsys):
    @console.verb
    def warn():
        warnings.warn("unknown key 'a\x1b'", UserWarning, stacklevel=1)

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warn()
    assert capsys.readouterr().err == "ropewalk: warning: unknown key 'a\u241b'\n"
