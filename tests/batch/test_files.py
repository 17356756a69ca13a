"""The two files of a batch: what is refused before anything runs, and what a later run finds."""

import json
import os

import pytest

from ropewalk.batch import files
from ropewalk.batch.files import BatchInput, BatchOutput
from ropewalk.errors import BatchError


@pytest.fixture
def write(tmp_path):
    """A function that writes an input and reads it through."""

    def write(*lines):
        path = tmp_path / "in.jsonl"
        path.write_bytes(
            b"".join(line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n" for line in lines)
        )
        return BatchInput(path)

    return write


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out.jsonl"


def named(*names):
    return [{"custom_id": name} for name in names]


class TestInput:
    def test_lines_are_counted_and_blank_ones_are_none(self, write):
        source = write(*named("a"), b"\n", *named("b"), b"  \r\n", b'{"custom_id": "c"}')
        assert (source.n_requests, source.n_lines) == (3, 5)
        found = list(source.requests(bytearray(6)))
        assert found == [(1, {"custom_id": "a"}), (3, {"custom_id": "b"}), (5, {"custom_id": "c"})]
        assert list(source.requests(bytearray([0, 1, 1, 0, 1, 1]))) == [(3, {"custom_id": "b"})]

    def test_an_empty_file_has_no_requests(self, write):
        assert write().n_requests == 0

    def test_a_byte_order_mark_is_no_fault(self, write):
        source = write(b'\xef\xbb\xbf{"custom_id": "a"}\n')
        assert list(source.requests(bytearray(2))) == [(1, {"custom_id": "a"})]

    @pytest.mark.parametrize(
        ("line", "message"),
        [
            (b"{\n", "line 2: it is not JSON: .* at line 2 column 1"),
            (b"[1]\n", "line 2: it must be a JSON object"),
            (b'{"custom_id": NaN}\n', "line 2: it is not JSON: NaN is no number"),
            (b"\xc4\xe3\n", r"line 2: it is not UTF-8 \(at byte 0\)"),
            (b'{"custom_id": "\\ud83d"}\n', "line 2: it has half of a surrogate pair"),
            (b"[" * 200_000 + b"\n", "line 2: it is nested too deeply"),
            (b"{}\n", "line 2: custom_id is missing"),
            (b'{"custom_id": 5}\n', "line 2: custom_id must be a string, not empty"),
            (b'{"custom_id": ""}\n', "line 2: custom_id must be a string, not empty"),
            (b'{"custom_id": "a"}\n', "line 2: custom_id 'a' is that of line 1$"),
        ],
    )
    def test_a_line_that_nothing_can_answer_refuses_the_file(self, write, line, message):
        with pytest.raises(BatchError, match=message):
            write(*named("a"), line, *named("b"))

    def test_the_first_faults_are_named_and_the_rest_counted(self, write):
        with pytest.raises(BatchError) as caught:
            write(*named("a", "b", "a", "b", "a", "b", "a"), b"x\n")
        text = str(caught.value)
        assert [f"line {n}:" in text for n in (8, 3, 4, 5, 6, 7)] == [True] * 5 + [False]
        assert text.endswith("; and 1 more")

    def test_equal_hashes_of_different_names_do_not_matter(self, write, monkeypatch):
        monkeypatch.setattr(files, "_hash", lambda data: 7)
        assert write(*named("a", "b", "c")).n_requests == 3
        with pytest.raises(BatchError, match=r"line 3: custom_id 'a' is that of line 1$"):
            write(*named("a", "b", "a"))

    def test_a_line_without_end(self, write, monkeypatch):
        monkeypatch.setattr(files, "MAX_LINE_BYTES", 2**20)
        with pytest.raises(BatchError, match="line 2 is longer than 1 MiB"):
            write(*named("a"), b" " * 2**20)

    def test_a_file_that_cannot_be_read(self, tmp_path):
        with pytest.raises(BatchError, match=r"nothing\.jsonl cannot be read: No such file"):
            BatchInput(tmp_path / "nothing.jsonl")

    def test_a_change_while_it_is_read(self, write):
        source = write(*named("a", "b", "c"))
        text = source.path.read_text()
        for changed, message in (
            (text.replace('"b"', '"x"'), "was changed at line 2"),
            (text + text, "was changed at line 4"),
            (text[: text.index("\n") + 1], "was cut after line 1"),
        ):
            source.path.write_text(changed)
            with pytest.raises(BatchError, match=message):
                list(source.requests(bytearray(4)))


def answer(target, number, name, status=200):
    target.write(number, name, f"req_{number}", status, {"text": "é"})


class TestOutput:
    def test_an_answer_is_a_line_in_openai_s_format(self, write, out):
        with BatchOutput(out, write(*named("a", "b")), b"m") as target:
            answer(target, 2, "b")
            (line,) = out.read_text().splitlines()
        assert line.startswith('{"id": "batch_req_')
        assert json.loads(line) | {"id": None} == {
            "id": None,
            "custom_id": "b",
            "response": {"status_code": 200, "request_id": "req_2", "body": {"text": "é"}},
            "error": None,
        }

    def test_a_later_run_knows_what_is_left(self, write, out):
        source = write(*named("a", "b", "c"))
        with BatchOutput(out, source, b"m") as target:
            answer(target, 3, "c", 400)
            answer(target, 1, "a")
        with BatchOutput(out, source, b"m") as target:
            assert (target.n_done, target.n_failed) == (2, 1)
            assert [number for number, _ in source.requests(target.done)] == [2]
            answer(target, 2, "b")
        assert [json.loads(line)["custom_id"] for line in out.read_text().splitlines()] == ["c", "a", "b"]

    def test_a_torn_last_line_is_taken_away_wherever_it_was_cut(self, write, out):
        source = write(*named("a", "b"))
        with BatchOutput(out, source, b"m") as target:
            answer(target, 1, "a")
            answer(target, 2, "b")
        whole = out.read_bytes()
        start = whole.index(b"\n") + 1
        for cut in range(start, len(whole), 7):
            out.write_bytes(whole[:cut])
            with BatchOutput(out, source, b"m") as target:
                assert target.n_done == 1
                assert out.read_bytes() == whole[:start]
                answer(target, 2, "b")
            assert out.read_bytes() == whole

    def test_a_changed_input_and_other_options_are_refused(self, write, out):
        source = write(*named("a", "b"))
        with BatchOutput(out, source, b"m") as target:
            answer(target, 1, "a")
        before = out.read_bytes()
        for other, run in (
            (source, b"n"),
            (write(*named("a", "x")), b"m"),
            (write(*named("a", "b", "c")), b"m"),
        ):
            with pytest.raises(BatchError, match=r"answers another input, .*\(line 1\)"):
                BatchOutput(out, other, run)
        assert out.read_bytes() == before

    @pytest.mark.parametrize(
        "content",
        [b"a letter\n", b"a letter", b"{}\n", b"[1]\n", b'{"id": 5}\n', b"[" * 100_000 + b"\n", b"\xff\n"],
    )
    def test_a_file_of_somebody_else_is_left_alone(self, write, out, content):
        out.write_bytes(content)
        with pytest.raises(BatchError, match="something else than an"):
            BatchOutput(out, write(*named("a")), b"m")
        assert out.read_bytes() == content

    def test_a_line_that_is_answered_twice(self, write, out):
        source = write(*named("a"))
        with BatchOutput(out, source, b"m") as target:
            answer(target, 1, "a")
        out.write_bytes(2 * out.read_bytes())
        with pytest.raises(BatchError, match=r"answers line 1 of the input twice, .*\(line 2\)"):
            BatchOutput(out, source, b"m")

    def test_what_cannot_be_written_to(self, write, out, tmp_path):
        source = write(*named("a"))
        with pytest.raises(BatchError, match="is the input"):
            BatchOutput(source.path, source, b"m")
        with pytest.raises(BatchError, match="cannot be written: Is a directory"):
            BatchOutput(tmp_path, source, b"m")
        with pytest.raises(BatchError, match="cannot be written: No such file"):
            BatchOutput(tmp_path / "no" / "where", source, b"m")
        with (
            BatchOutput(out, source, b"m"),
            pytest.raises(BatchError, match="being written by another process"),
        ):
            BatchOutput(out, source, b"m")

    def test_a_full_disk_leaves_whole_lines(self, write, out, monkeypatch):
        source = write(*named("a", "b"))
        with BatchOutput(out, source, b"m") as target:
            answer(target, 1, "a")
            before = out.read_bytes()
            real = os.write

            def full(fd, data):
                if len(data) < 60:
                    raise OSError(28, "No space left on device")
                return real(fd, data[: len(data) // 2])

            monkeypatch.setattr(files.os, "write", full)
            with pytest.raises(BatchError, match=r"out\.jsonl cannot be written: No space left"):
                answer(target, 2, "b")
            monkeypatch.undo()
            assert out.read_bytes() == before
