"""Reads the file of a batch: JSON lines as OpenAI's Batch API takes them. Used by `batch_run`.

What is hard: the file may be larger than memory, so it is read twice, line by line: once to find
all faults before anything is sent, and once to send. Of each line only digests of its custom_id and
of the whole request are kept.
"""

import hashlib
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, BinaryIO, Literal

import msgspec

PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
"""Values of `url`."""
MAX_LINES = 1_000_000
MAX_LINE_BYTES = 16 << 20
MAX_FAULTS = 10
"""Faults that are reported; one more line says that there are others."""
REQUEST_ID_PREFIX = "batch_req_"
_FLEX = msgspec.Raw(b'"flex"')


class BatchFileError(ValueError):
    """The file cannot be used."""

    def __init__(self, faults: list[str]) -> None:
        """`faults`: each in one line."""
        super().__init__("; ".join(faults))
        self.faults = faults


@dataclass(frozen=True, slots=True)
class BatchLine:
    """One request."""

    number: int
    """Of its line in the file, from 1."""
    custom_id: str
    path: str
    body: bytes
    """JSON, with `service_tier: flex` unless the file names another tier."""

    @property
    def request_id(self) -> str:
        """The same in each run while the request is the same, for logs of the gateway and the
        results: a digest of custom_id, path and body."""
        digest = hashlib.blake2b(f"{self.custom_id}\n{self.path}\n".encode(), digest_size=12)
        digest.update(self.body)
        return f"{REQUEST_ID_PREFIX}{digest.hexdigest()}"


class _Line(msgspec.Struct):
    custom_id: Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
    url: str
    body: dict[str, msgspec.Raw]
    method: Literal["POST"] = "POST"


_decode_line = msgspec.json.Decoder(_Line).decode
_encode = msgspec.json.Encoder().encode


def hash_id(custom_id: str) -> bytes:
    """What is kept of a custom_id: 16 bytes."""
    return hashlib.blake2b(custom_id.encode(), digest_size=16).digest()


def check_batch(path: Path) -> dict[bytes, str]:
    """Check all lines of a file; their request ids by the digests of their custom_ids. Raises
    BatchFileError with all faults, up to a limit."""
    seen: dict[bytes, int] = {}
    known: dict[bytes, str] = {}
    faults: list[str] = []
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise BatchFileError([f"{path}: must be a regular file, as it is read twice"])
        with path.open("rb") as file:
            for number, raw in _iter_raw_lines(file):
                if len(seen) >= MAX_LINES:
                    faults.append(f"{path}: more than {MAX_LINES} lines: split it")
                    break
                try:
                    line = parse_line(raw, number)
                except ValueError as error:
                    faults.append(f"{path}: {error}")
                else:
                    first = seen.setdefault(hash_id(line.custom_id), number)
                    known.setdefault(hash_id(line.custom_id), line.request_id)
                    if first != number:
                        text = f"custom_id: {line.custom_id!r} stands in line {first} already"
                        faults.append(f"{path}: line {number}: {text}")
                if len(faults) > MAX_FAULTS:
                    faults[MAX_FAULTS:] = [f"{path}: further lines were not checked"]
                    break
    except OSError as error:
        raise BatchFileError([f"{path}: {error.strerror}"]) from None
    if not seen and not faults:
        faults = [f"{path}: holds no request"]
    if faults:
        raise BatchFileError(faults)
    return known


def read_lines(path: Path) -> Iterator[BatchLine]:
    """The requests of a file that `check_batch` has accepted. Raises BatchFileError when it has
    changed or cannot be read."""
    try:
        with path.open("rb") as file:
            for number, raw in _iter_raw_lines(file):
                yield parse_line(raw, number)
    except OSError as error:
        raise BatchFileError([f"{path}: {error.strerror}"]) from None
    except ValueError as error:
        raise BatchFileError([f"{path}: has changed: {error}"]) from None


def parse_line(raw: bytes, number: int) -> BatchLine:
    """Parse one line. Raises ValueError that names the line, the field and the remedy."""
    if len(raw) > MAX_LINE_BYTES:
        raise ValueError(f"line {number}: longer than {MAX_LINE_BYTES >> 20} MiB: shorten it")
    try:
        line = _decode_line(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        fault, _, place = str(error).partition(" - at `$.")
        field = f"{place.removesuffix('`')}: " if place else ""
        fault = fault if fault.startswith("JSON") else f"{fault[:1].lower()}{fault[1:]}"
        raise ValueError(f"line {number}: {field}{fault}") from None
    if line.url not in PATHS:
        raise ValueError(f"line {number}: url: {line.url[:80]!r} must be one of {', '.join(PATHS)}")
    if bytes(line.body.get("stream", msgspec.Raw(b"false"))) not in (b"false", b"null"):
        raise ValueError(f"line {number}: body.stream: results are not streamed: remove it")
    if "model" not in line.body:
        raise ValueError(f"line {number}: body.model: required")
    line.body.setdefault("service_tier", _FLEX)
    return BatchLine(number, line.custom_id, line.url, _encode(line.body))


def _iter_raw_lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Lines with their numbers, without those that are blank. A line that is too long is cut, and
    what follows of it is skipped."""
    number = 0
    while raw := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        if not raw.isspace():
            yield number, raw
        while raw and not raw.endswith(b"\n"):
            raw = file.readline(MAX_LINE_BYTES)
