"""The two files of a batch: requests in, answers out, one JSON object a line.

The answers are the only record of what was done. Each carries an `id` made of the run (a digest of the whole input and
of what else changes answers) and of the number of the line that it answers. So a later run knows which lines are left
and that the input is still the same. Answers are appended, so an unfinished line at the end is what a kill has left.

Of each line, a hash and whether it is done stay in memory: 9 bytes.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
from array import array
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ropewalk.api.body import read_json
from ropewalk.api.errors import ApiError
from ropewalk.closing import Closing
from ropewalk.errors import BatchError

MAX_LINE_BYTES = 64 * 2**20
MAX_TOLD = 5
"""Faults that an error names; of more it says how many."""

_ID = re.compile(r"batch_req_([0-9a-f]{16})_([0-9]{1,12})")


class BatchInput:
    """Requests, read through once to be checked, and again to be answered.

    Parameters
    ----------
    path : Path

    Attributes
    ----------
    n_requests : int
        Lines that are not blank.
    n_lines : int
    digest : bytes
        SHA-256 of the file.

    Raises
    ------
    BatchError
        If the file cannot be read, or a line is no JSON object, or has no `custom_id` or another line's. Lines are
        named by their numbers, which count from 1.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._hashes = array("Q")
        names = array("Q")
        faults: list[str] = []
        sha256 = hashlib.sha256()
        self.n_requests = 0
        for number, line in self._read():
            sha256.update(line)
            self._hashes.append(_hash(line))
            name = None
            if line.strip():
                self.n_requests += 1
                try:
                    name = _custom_id(line)
                except ApiError as error:
                    faults.append(f"line {number}: {error}")
            names.append(number if name is None else _hash(name.encode()))
        self.n_lines = len(self._hashes)
        self.digest = sha256.digest()
        faults += self._duplicates(np.frombuffer(names, dtype=np.uint64))
        if faults:
            more = f"; and {len(faults) - MAX_TOLD} more" if len(faults) > MAX_TOLD else ""
            raise BatchError(f"{path} cannot be used: {'; '.join(faults[:MAX_TOLD])}{more}")

    def requests(self, done: bytearray) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield number and content of each line that is not done.

        Raises
        ------
        BatchError
            If the file was changed meanwhile.
        """
        number = 0
        for number, line in self._read():
            if number > self.n_lines or _hash(line) != self._hashes[number - 1]:
                raise BatchError(f"{self.path} was changed at line {number} while it was read")
            if not done[number] and line.strip():
                yield number, read_json(line)
        if number < self.n_lines:
            raise BatchError(f"{self.path} was cut after line {number} while it was read")

    def _read(self) -> Iterator[tuple[int, bytes]]:
        try:
            with self.path.open("rb") as file:
                number = 0
                while line := file.readline(MAX_LINE_BYTES):
                    number += 1
                    if len(line) == MAX_LINE_BYTES:
                        raise BatchError(
                            f"{self.path}: line {number} is longer than {MAX_LINE_BYTES >> 20} MiB"
                        )
                    yield number, line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
        except OSError as error:
            raise BatchError(f"{self.path} cannot be read: {error.strerror}") from None

    def _duplicates(self, hashes: np.ndarray[Any, np.dtype[np.uint64]]) -> list[str]:
        """Say which names come twice. Equal hashes only say which lines to look at."""
        values, counts = np.unique(hashes, return_counts=True)
        suspects = set((np.flatnonzero(np.isin(hashes, values[counts > 1])) + 1).tolist())
        first: dict[str, int] = {}
        faults = []
        for number, line in self._read() if suspects else ():
            if number in suspects and line.strip():
                try:
                    name = _custom_id(line)
                except ApiError:
                    continue
                if (earlier := first.setdefault(name, number)) != number:
                    faults.append(f"line {number}: custom_id {_shown(name)} is that of line {earlier}")
        return faults


class BatchOutput(Closing):
    """Answers, each appended as one whole line as soon as it is there. One process at a time may have the file.

    Parameters
    ----------
    path : Path
        Made if it is not there. Answers of the same run in it are kept, an unfinished line at its end is taken away.
    source : BatchInput
    run : bytes
        Whatever else changes answers, such as the model's name.

    Attributes
    ----------
    done : bytearray
        Of each line of the input, from 1 on, whether it is answered.
    n_done, n_failed : int
        Answers in the file, and those of a status that is not 200.

    Raises
    ------
    BatchError
        If the file cannot be used, is in use, or holds anything but answers of this run.
    """

    def __init__(self, path: Path, source: BatchInput, run: bytes) -> None:
        self.path = path
        self.done = bytearray(source.n_lines + 1)
        self.n_done = self.n_failed = 0
        self._run = hashlib.sha256(source.digest + run).hexdigest()[:16]
        if path.exists() and source.path.samefile(path):
            raise BatchError(f"{path} is the input; the answers need another file")
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise BatchError(f"{path} cannot be written: {error.strerror}") from None
        try:
            if not path.is_file():
                raise BatchError(f"{path} is no regular file")
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise BatchError(f"{path} is being written by another process") from None
            self._size = self._read()
            os.ftruncate(self._fd, self._size)
        except BaseException:
            os.close(self._fd)
            raise

    def write(
        self, number: int, custom_id: str, request_id: str, status: int, body: Mapping[str, Any]
    ) -> None:
        """Append the answer to a line.

        Raises
        ------
        BatchError
            If it cannot be written; no part of it is left.
        """
        answer = {
            "id": f"batch_req_{self._run}_{number}",
            "custom_id": custom_id,
            "response": {"status_code": status, "request_id": request_id, "body": body},
            "error": None,
        }
        line = json.dumps(answer, ensure_ascii=False, allow_nan=False).encode() + b"\n"
        try:
            left = memoryview(line)
            while left:
                left = left[os.write(self._fd, left) :]
        except OSError as error:
            os.ftruncate(self._fd, self._size)
            raise BatchError(f"{self.path} cannot be written: {error.strerror}") from None
        self._size += len(line)
        self._count(number, status)

    def _count(self, number: int, status: object) -> None:
        self.done[number] = True
        self.n_done += 1
        self.n_failed += status != 200

    def _read(self) -> int:
        """Note which lines are answered; return how many bytes of whole lines there are."""
        size = 0
        with self.path.open("rb") as file:
            for row, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    self._check_torn(line)
                    break
                self._take(row, line)
                size += len(line)
        return size

    def _take(self, row: int, line: bytes) -> None:
        try:
            answer = json.loads(line)
            match = _ID.fullmatch(answer["id"])
            status = answer["response"]["status_code"]
        except (ValueError, TypeError, KeyError, RecursionError):
            match = None
        if match is None:
            raise BatchError(
                f"{self.path} holds something else than answers (line {row}); choose another file"
            )
        if match[1] != self._run:
            raise BatchError(
                f"{self.path} answers another input, or this one before it was changed, or with another model or other "
                f"options (line {row}); choose another file"
            )
        number = int(match[2])
        if not 1 <= number < len(self.done) or self.done[number]:
            raise BatchError(
                f"{self.path} answers line {number} of the input twice, or there is none (line {row})"
            )
        self._count(number, status)

    def _check_torn(self, line: bytes) -> None:
        beginning = f'{{"id": "batch_req_{self._run}_'.encode()
        if not line.startswith(beginning) and not beginning.startswith(line):
            raise BatchError(f"{self.path} ends with something else than an answer; choose another file")

    def close(self) -> None:
        """Make sure that everything is on the disk, and let others have the file."""
        os.fsync(self._fd)
        os.close(self._fd)


def _custom_id(line: bytes) -> str:
    try:
        name = read_json(line).get("custom_id")
    except ApiError as error:
        raise ApiError(str(error).replace("the body", "it", 1)) from None
    if not isinstance(name, str) or not name:
        raise ApiError("custom_id is missing" if name is None else "custom_id must be a string, not empty")
    return name


def _hash(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def _shown(name: str) -> str:
    return repr(name) if len(name) <= 64 else repr(name[:61] + "...")
