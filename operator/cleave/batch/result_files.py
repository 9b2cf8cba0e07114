"""The two files of a batch's results, which are its only state. Used by `batch_run`.

Lines have the form of OpenAI's output and error files. A run that was killed continues where it
stopped: what stands in a file is done, and what does not is sent. What is hard: a kill, or a full
disk, may leave half a line. It is cut off when the files are opened again, so that each line is
whole and each custom_id stands in one of the files once. But a user may name any file, so nothing
is cut off that is not the beginning of a result.
"""

import fcntl
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Self

import msgspec

from cleave.batch.batch_file import (
    MAX_LINE_BYTES,
    REQUEST_ID_PREFIX,
    BatchLine,
    hash_id,
    read_lines,
)

MAX_RESULT_BYTES = 4 * MAX_LINE_BYTES
"""Of a line of results."""
_LINE_BEGIN = f'{{"id":"{REQUEST_ID_PREFIX}'.encode()
"""How each line of results begins."""


class ResultFilesError(RuntimeError):
    """A file cannot be used, or not be written to."""


class _RecordedResponse(msgspec.Struct):
    status_code: int
    request_id: str
    body: msgspec.Raw


class _Error(msgspec.Struct):
    code: str
    message: str


class _Result(msgspec.Struct):
    id: str
    custom_id: str
    response: _RecordedResponse | None
    error: _Error | None


class _Identified(msgspec.Struct):
    id: Annotated[str, msgspec.Meta(pattern=f"^{REQUEST_ID_PREFIX}")]
    """Lines of requests have none."""
    custom_id: str


_encode = msgspec.json.Encoder().encode
_decode_identified = msgspec.json.Decoder(_Identified).decode


def build_response_line(line: BatchLine, status: int, request_id: str, body: bytes) -> bytes:
    """The result of a request that was answered, with its line end. `body`: JSON; anything else
    becomes a JSON text."""
    try:
        msgspec.json.decode(body)
        compact = msgspec.json.format(body, indent=-1)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        compact = _encode(body.decode("utf-8", "replace"))
    response = _RecordedResponse(status, request_id, msgspec.Raw(compact))
    return _encode(_Result(line.request_id, line.custom_id, response, None)) + b"\n"


def build_error_line(line: BatchLine, code: str, message: str) -> bytes:
    """The result of a request that was not answered, with its line end."""
    return _encode(_Result(line.request_id, line.custom_id, None, _Error(code, message))) + b"\n"


class ResultFiles:
    """The files of one run, a context manager. Only one run at a time may use them."""

    def __init__(self, output: Path, errors: Path) -> None:
        """`output`: for answers with a status of 2xx; `errors`: for all others."""
        self.output = output
        self.errors = errors
        self._output_fd = self._errors_fd = -1
        self.num_succeeded = 0
        """Results in `output`."""
        self.num_failed = 0
        """Results in `errors`."""
        self._done: dict[bytes, str] = {}
        """Ids of the requests with a result, by the digests of their custom_ids."""

    def __enter__(self) -> Self:
        """Open the files, cut off what a killed run left of a line, and read what is done.
        Raises ResultFilesError."""
        try:
            self._output_fd = _open_locked(self.output)
            self._errors_fd = _open_locked(self.errors)
            self.num_succeeded = self._read_done(self.output, self._output_fd)
            self.num_failed = self._read_done(self.errors, self._errors_fd)
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        """Close the files."""
        self.sync()
        self._close()

    def is_done(self, custom_id: str) -> bool:
        """Whether a request has its result."""
        return hash_id(custom_id) in self._done

    def check_belongs(self, known: Mapping[bytes, str], batch: Path) -> None:
        """Check that all results are of these requests, as they are now: ids by the digests of
        their custom_ids. Raises ResultFilesError, BatchFileError."""
        results = f"{self.output} and {self.errors}"
        if foreign := len(self._done.keys() - known.keys()):
            fault = f"hold {foreign} results of requests that are not in {batch}"
            raise ResultFilesError(f"{results} {fault}: name other files")
        changed = {digest for digest, id_ in self._done.items() if known[digest] != id_}
        for line in read_lines(batch) if changed else ():
            if hash_id(line.custom_id) in changed:
                raise ResultFilesError(
                    f"{batch}: line {line.number}: the request {line.custom_id!r} has another body "
                    f"or url than when it got its result, as {len(changed)} of those in {results}: "
                    "give them other custom_ids, remove their results, or name other files"
                )

    def add(self, line: BatchLine, result: bytes, succeeded: bool) -> None:
        """Append a result. Raises ResultFilesError; then nothing of it is in the file."""
        path, fd = (self.output, self._output_fd) if succeeded else (self.errors, self._errors_fd)
        end = os.lseek(fd, 0, os.SEEK_END)
        try:
            rest = memoryview(result)
            while rest:
                rest = rest[os.write(fd, rest) :]
        except OSError as error:
            os.ftruncate(fd, end)
            raise ResultFilesError(f"{path}: {error.strerror}") from None
        self._done[hash_id(line.custom_id)] = line.request_id
        if succeeded:
            self.num_succeeded += 1
        else:
            self.num_failed += 1

    def sync(self) -> None:
        """Write to the disk what the kernel holds. Raises ResultFilesError."""
        for path, fd in ((self.output, self._output_fd), (self.errors, self._errors_fd)):
            try:
                os.fsync(fd)
            except OSError as error:
                raise ResultFilesError(f"{path}: {error.strerror}") from None

    def _close(self) -> None:
        for fd in (self._output_fd, self._errors_fd):
            if fd >= 0:
                os.close(fd)
        self._output_fd = self._errors_fd = -1

    def _read_done(self, path: Path, fd: int) -> int:
        """Read which requests are done, and cut off half a line; number of results."""
        end = number = 0
        with os.fdopen(os.dup(fd), "rb") as file:
            while raw := file.readline(MAX_RESULT_BYTES):
                if not raw.endswith(b"\n"):
                    break
                number += 1
                end += len(raw)
                try:
                    result = _decode_identified(raw)
                except (msgspec.MsgspecError, UnicodeDecodeError):
                    fault = f"line {number} is not a result of a batch: name another file"
                    raise ResultFilesError(f"{path}: {fault}") from None
                digest = hash_id(result.custom_id)
                if digest in self._done:
                    where = "" if path == self.output else f" or in {self.output}"
                    fault = f"line {number} is of a request with a result before it{where}"
                    raise ResultFilesError(f"{path}: {fault}: name another file, or remove it")
                self._done[digest] = result.id
            if len(raw) == MAX_RESULT_BYTES:
                raise ResultFilesError(f"{path}: line {number + 1} is too long: name another file")
        # A machine that lost power may leave zeros.
        half = raw.rstrip(b"\0")
        if half[: len(_LINE_BEGIN)] != _LINE_BEGIN[: len(half)]:
            fault = f"line {number + 1}, which does not end, is not a result of a batch"
            raise ResultFilesError(f"{path}: {fault}: name another file")
        os.ftruncate(fd, end)
        return number


def _open_locked(path: Path) -> int:
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise ResultFilesError(f"{path}: {error.strerror}") from None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise ResultFilesError(f"{path}: must be a regular file: name another file")
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise ResultFilesError(f"{path}: another run writes to it: wait until it ends") from None
    return fd
