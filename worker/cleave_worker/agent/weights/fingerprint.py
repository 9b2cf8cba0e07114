"""Fingerprints the files of a folder: equal content has the same one, on any node and path.

Called by `loaded_weights` in a thread, at each start of an engine. The smallest files, as many as
WHOLE_BYTES have room for, are read as a whole; of larger ones `tensor_samples` chooses pieces, so
that a model of any size takes seconds. An edit of a few bytes of a large tensor can be missed;
training, merging and quantising change whole tensors.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from pathlib import Path

from cleave_worker.agent.weights import tensor_samples
from cleave_worker.agent.weights.tensor_samples import Piece, Tensor

WHOLE_BYTES = 1 << 30
"""Bytes of files that are read as a whole."""
MAX_FILES = 20_000
_THREADS = 8
"""Reads at a time: storage in a network takes about a millisecond for each."""
_CHUNK_BYTES = 1 << 20
_TENSORS_AT_ONCE = 16
_DIGEST_BYTES = 16
_IGNORED_SUFFIXES = (".md", ".lock", ".log", ".png", ".jpg", ".jpeg", ".gif", ".pdf", ".incomplete")
_IGNORED_NAMES = frozenset(
    ("LICENSE", "LICENSE.txt", "NOTICE", "NOTICE.txt", "__pycache__", "lost+found")
)
"""What engines do not read. Hidden files and folders are ignored as well."""

Check = Callable[[float], None]
"""Called with the share that is read, 0 to 1, from any thread; may raise to end the reading."""


class FilesError(OSError):
    """The files cannot be fingerprinted; one line with the reason."""


@dataclass(frozen=True, slots=True)
class FileState:
    """A file as a listing shows it; changes with each write to it."""

    name: str
    """Path below the folder; empty: it is given itself."""
    size: int
    modified_ns: int
    changed_ns: int
    """Cannot be set back, as `modified_ns` can."""
    inode: int


def list_files(path: Path) -> tuple[FileState, ...]:
    """Return the files that engines may read below a folder, by name; of a file itself. Symbolic
    links are followed. Raises OSError."""
    if not path.is_dir():
        return (_read_state(path, ""),)
    found: list[FileState] = []
    for count, name in enumerate(_walk(path, "", frozenset())):
        if count >= MAX_FILES:
            raise FilesError(f"{path} has more than {MAX_FILES:,} files and folders")
        if not name.endswith("/"):
            found.append(_read_state(path / name, name))
    return tuple(sorted(found, key=lambda file: file.name))


def compute_fingerprint(path: Path, files: Sequence[FileState], check: Check) -> str:
    """Hash names, sizes and content of `files`, from `list_files`. Raises OSError, and what `check`
    raises."""
    whole = _choose_whole(files)
    with _open_pool() as pool:
        sampled = [each for each in files if each.name not in whole]
        tensors = dict(zip(sampled, pool.map(partial(_read_tensors, path), sampled), strict=True))
        jobs = list(_plan_jobs(path, files, whole, tensors))
        total, read = sum(job.size for job in jobs) or 1, 0
        result = blake2b(digest_size=_DIGEST_BYTES)
        for job, digest in zip(jobs, pool.map(partial(_run_job, check), jobs), strict=True):
            read += job.size
            check(read / total)
            # Each part has the same length, after a name that no other file has.
            result.update(b"%d %s %d " % (len(job.label), job.label.encode(), job.file_bytes))
            result.update(digest)
    return result.hexdigest()


@dataclass(frozen=True, slots=True)
class _Job:
    """Pieces of one file that are hashed together."""

    path: Path
    label: str
    file_bytes: int
    pieces: Sequence[Piece]

    @property
    def size(self) -> int:
        return sum(piece.size for piece in self.pieces)


def _walk(root: Path, below: str, above: frozenset[tuple[int, int]]) -> Iterator[str]:
    """Yield the names of files, and of folders with a slash. A folder with two names has its files
    under both, as a link may be moved to another one; within itself it is left out."""
    state = os.stat(root / below)
    identity = state.st_dev, state.st_ino
    if identity in above:
        return
    try:
        entries = sorted(os.scandir(root / below), key=lambda each: each.name)
    except PermissionError:
        # Neither can the engine read it.
        return
    for entry in entries:
        name = f"{below}/{entry.name}" if below else entry.name
        if _is_ignored(entry.name):
            continue
        if entry.is_dir():
            yield f"{name}/"
            yield from _walk(root, name, above | {identity})
        elif entry.is_file():
            yield name


def _is_ignored(name: str) -> bool:
    is_other = name.lower().endswith(_IGNORED_SUFFIXES) or name in _IGNORED_NAMES
    return is_other or name.startswith(".")


def _read_state(path: Path, name: str) -> FileState:
    state = os.stat(path)
    return FileState(name, state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_ino)


def _choose_whole(files: Iterable[FileState]) -> frozenset[str]:
    """Names of the files that are read as a whole."""
    chosen, total = [], 0
    for file in sorted(files, key=lambda each: (each.size, each.name)):
        total += file.size
        if total > WHOLE_BYTES:
            break
        chosen.append(file.name)
    return frozenset(chosen)


def _read_tensors(root: Path, file: FileState) -> list[Tensor] | None:
    """The tensors of a safetensors file, the first of which is its header; None: it is none."""
    try:
        with _open_file(root / file.name) as number:
            begin = os.pread(number, tensor_samples.LENGTH_BYTES, 0)
            if not (size := tensor_samples.read_header_size(begin, file.size)):
                return None
            tensors = tensor_samples.parse_tensors(os.pread(number, size, 0), file.size)
    except (PermissionError, ValueError, RecursionError):
        return None
    return [Tensor("", 0, size), *tensors]


def _plan_jobs(
    root: Path,
    files: Iterable[FileState],
    whole: frozenset[str],
    tensors: dict[FileState, list[Tensor] | None],
) -> Iterator[_Job]:
    """Yield what is read, in an order that depends on names and sizes only."""
    by_tensor = [found for found in tensors.values() if found is not None]
    per_tensor = tensor_samples.count_tensor_pieces(sum(map(len, by_tensor)))
    num_others = len(tensors) - len(by_tensor)
    for file in files:
        path, found = root / file.name, tensors.get(file)
        if file.name in whole:
            yield _Job(path, file.name, file.size, (Piece(0, file.size),))
        elif found is None:
            pieces = tensor_samples.choose_file_pieces(file.size, num_others)
            yield _Job(path, file.name, file.size, pieces)
        else:
            header, *others = found
            yield _Job(path, file.name, file.size, (Piece(header.offset, header.size),))
            for first in range(0, len(others), _TENSORS_AT_ONCE):
                group = others[first : first + _TENSORS_AT_ONCE]
                chosen = (tensor_samples.choose_tensor_pieces(each, per_tensor) for each in group)
                yield _Job(path, file.name, file.size, [one for pieces in chosen for one in pieces])


def _run_job(check: Check, job: _Job) -> bytes:
    check(0.0)
    hasher = blake2b(digest_size=_DIGEST_BYTES)
    try:
        with _open_file(job.path) as number:
            for piece in job.pieces:
                _hash_piece(hasher.update, number, piece)
    except PermissionError:
        # Neither can the engine read it.
        hasher.update(b"not readable")
    return hasher.digest()


def _hash_piece(update: Callable[[bytes], None], number: int, piece: Piece) -> None:
    offset, end = piece.offset, piece.offset + piece.size
    while offset < end:
        part = os.pread(number, min(_CHUNK_BYTES, end - offset), offset)
        if not part:
            # It has become shorter; the listing after the start of the engine shows that.
            return
        update(part)
        offset += len(part)


@contextmanager
def _open_file(path: Path) -> Iterator[int]:
    number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield number
    finally:
        os.close(number)


@contextmanager
def _open_pool() -> Iterator[ThreadPoolExecutor]:
    pool = ThreadPoolExecutor(_THREADS, "weights")
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)
