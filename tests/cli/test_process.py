"""What only a real process shows: signals, closed pipes, terminals, colours, and the time to start."""

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

FAKE = [sys.executable, str(Path(__file__).parent / "fake_main.py")]
ROPEWALK = [sys.executable, "-m", "ropewalk"]


def start(arguments: list[str], **options) -> subprocess.Popen:
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)


def test_ctrl_c_ends_run_with_130_and_no_traceback():
    process = start([*FAKE, "run", "m", "Hi"])
    assert process.stdout.read(1) == b"0"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=300)
    assert (process.returncode, err) == (130, b"\n")


def test_a_reader_that_goes_away_ends_run_quietly():
    process = start([*FAKE, "run", "m", "Hi"])
    assert process.stdout.read(1) == b"0"
    process.stdout.close()
    assert process.wait(timeout=300) == 1
    assert process.stderr.read() == b""
    process.stderr.close()


def test_text_is_exact_through_a_pipe():
    process = start([*FAKE, "run", "m", "Hi"])
    assert process.stdout.read(15) == b"0\x1b[31m 1\x1b[31m 2"
    process.kill()
    process.communicate()


@pytest.mark.parametrize("arguments", [[*FAKE, "run", "m", "Hi", "-q"], [*ROPEWALK, "--help"]])
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is full")
def test_a_full_disk_is_told_in_one_line(arguments):
    with Path("/dev/full").open("wb") as full:
        result = subprocess.run(arguments, stdout=full, stderr=subprocess.PIPE, timeout=300)
    assert (result.returncode, result.stderr) == (1, b"ropewalk: No space left on device\n")


@pytest.mark.parametrize(("closed", "status"), [("0<&-", 1), ("1>&-", 0), ("2>&-", 0)])
def test_closed_streams(closed, status, tmp_path):
    """Reading from a stdin that is closed is reading nothing; what goes to a closed one goes nowhere."""
    prompt = "" if closed == "0<&-" else "Hi"
    line = f'"$@" run m {prompt} {closed}'
    result = subprocess.run(
        ["sh", "-c", line, "sh", *FAKE], capture_output=True, timeout=300, env={**os.environ, "LAST": "3"}
    )
    assert result.returncode == status
    assert b"Traceback" not in result.stderr
    if closed == "0<&-":
        assert result.stderr == b"ropewalk: the prompt (stdin) is empty\n"


def test_ctrl_c_while_libraries_are_imported_is_130_without_traceback(tmp_path):
    (tmp_path / "typer.py").write_text(
        "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(9)\n"
    )
    result = subprocess.run(
        [*ROPEWALK, "list"], capture_output=True, timeout=300, env={**os.environ, "PYTHONPATH": str(tmp_path)}
    )
    assert (result.returncode, result.stdout) == (130, b"")
    assert b"Traceback" not in result.stderr


class Terminal:
    """A program on a pseudo-terminal: type into it, and wait for what it shows."""

    def __init__(self, arguments: list[str], **environment: str) -> None:
        self.master, slave = pty.openpty()
        self.process = subprocess.Popen(
            arguments,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            env={**os.environ, "TERM": "xterm", **environment},
            preexec_fn=_take_terminal,
        )
        os.close(slave)
        self.shown = ""

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def wait_for(self, text: str) -> str:
        """Read until `text` is shown; what came before it. What comes after is for the next wait."""
        deadline = time.monotonic() + 300
        while text not in self.shown:
            assert time.monotonic() < deadline, f"{text!r} is not in {self.shown!r}"
            if select.select([self.master], [], [], 0.1)[0]:
                try:
                    data = os.read(self.master, 65536)
                except OSError:  # how Linux tells that the program is gone
                    data = b""
                assert data, f"the program ended; it showed {self.shown!r}"
                self.shown += data.decode(errors="replace")
                if "\x1b[6n" in self.shown:  # prompt_toolkit asks where the cursor is
                    self.shown = self.shown.replace("\x1b[6n", "")
                    os.write(self.master, b"\x1b[1;1R")
        before, _, self.shown = self.shown.partition(text)
        return before

    def end(self) -> int:
        """Wait for the program to end; its status."""
        deadline = time.monotonic() + 300
        while self.process.poll() is None and time.monotonic() < deadline:
            if select.select([self.master], [], [], 0.1)[0]:
                try:
                    os.read(self.master, 65536)
                except OSError:
                    break
        return self.process.wait(timeout=300)


def _take_terminal() -> None:
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@pytest.fixture
def terminal():
    """A function that starts a program on a terminal; it is ended with the test."""
    started: list[Terminal] = []

    def open_terminal(arguments: list[str], **environment: str) -> Terminal:
        started.append(Terminal(arguments, **environment))
        return started[-1]

    yield open_terminal
    for t in started:
        t.process.kill()
        t.process.wait()
        os.close(t.master)


def test_chat_on_a_terminal(terminal):
    chat = terminal([*FAKE, "chat"])
    chat.wait_for(">")
    chat.type("hello\r")
    chat.wait_for("5\u241b[31m")  # the model's escape sequence, disarmed
    chat.type("\x03")
    chat.wait_for("(stopped)")
    chat.wait_for(">")
    chat.type("half a line\x03")  # Ctrl-C while typing: the line is dropped, the chat goes on
    chat.wait_for("/exit leaves")
    chat.wait_for(">")
    chat.type("\x04")
    assert chat.end() == 0


def test_run_on_a_terminal_disarms_the_models_escape_sequences(terminal):
    run = terminal([*FAKE, "run", "m", "Hi"])
    shown = run.wait_for("5\u241b[31m")
    assert "\x1b[31m" not in shown
    run.type("\x03")
    assert run.end() == 130


def test_no_prompt_on_a_terminal_is_wrong_usage(terminal):
    run = terminal([*FAKE, "run", "m"])
    run.wait_for("no prompt")
    assert run.end() == 2


def test_a_bar_on_a_terminal_is_safe_from_markup_and_escape_sequences(terminal):
    code = """
import time
from ropewalk.cli.loading import progress_on_stderr
with progress_on_stderr() as progress:
    for step in range(100):
        progress("fetching [red]x\\x1b]0;t", step * 1_000_000, 100_000_000)
        time.sleep(0.02)
print("done")
"""
    bar = terminal([sys.executable, "-c", code], COLUMNS="100")
    shown = bar.wait_for("done")
    assert "fetching [red]x\u241b]0;t" in shown
    assert "/100.0 MB" in shown
    assert "\x1b]0;" not in shown
    assert bar.end() == 0


@pytest.mark.parametrize("arguments", [["--help"], ["list"], ["run", "--nonsense"]])
def test_no_colours_into_a_pipe_nor_with_no_color(terminal, arguments, tmp_path):
    environment = {**os.environ, "ROPEWALK_HOME": str(tmp_path)}
    piped = subprocess.run([*ROPEWALK, *arguments], capture_output=True, text=True, env=environment)
    assert "\x1b" not in piped.stdout + piped.stderr
    bare = terminal([*ROPEWALK, *arguments], NO_COLOR="1", ROPEWALK_HOME=str(tmp_path))
    shown = bare.wait_for((piped.stdout + piped.stderr).splitlines()[-1])
    assert not re.search(r"\x1b\[[0-9;]*m", shown)


def test_version():
    from ropewalk import __version__

    result = subprocess.run([*ROPEWALK, "--version"], capture_output=True, text=True, check=True)
    assert result.stdout == f"ropewalk {__version__}\n"


def test_help_loads_little_more_than_the_libraries_that_print_it():
    """Twice the time of typer and rich, which is 0.1 s; modules are counted, for a clock tells of the machine too."""

    def loaded(code: str) -> set[str]:
        code += "\nimport sys; print(*sys.modules, file=sys.stderr)"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        return set(done.stderr.split())

    libraries = loaded("import typer, rich.console")
    more = loaded(
        "import sys, contextlib, ropewalk.cli; sys.argv = ['ropewalk', '--help']\n"
        "with contextlib.suppress(SystemExit): ropewalk.cli.main()"
    )
    more -= libraries
    known = {"ropewalk", *(name.partition(".")[0] for name in libraries), *sys.stdlib_module_names}
    assert {name for name in more if name.partition(".")[0] not in known} == set()
    assert len(more) < 150


def test_a_terminal_that_speaks_ascii_shows_question_marks(tmp_path):
    environment = {**os.environ, "ROPEWALK_HOME": str(tmp_path / "h\u00f6me"), "PYTHONIOENCODING": "ascii"}
    result = subprocess.run([*ROPEWALK, "rm", "x"], capture_output=True, env=environment)
    assert result.returncode == 1
    assert b"h?me" in result.stderr
