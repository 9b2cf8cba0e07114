"""Chooses which bytes of a large file stand for its content. Pure.

Called by `fingerprint` for files that are too large to be read as a whole. Of a safetensors file
these are the header and pieces of every tensor, as training and merging change single tensors; of
other files the begin, and pieces at regular distances up to the end. The choice depends on sizes
and names only, so that every node makes the same one.
"""

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

PIECE_BYTES = 4096
"""What a disk reads at least."""
MAX_PIECES = 1 << 15
"""Pieces of all tensors of a model, as long as each tensor gets MIN_TENSOR_PIECES."""
MIN_TENSOR_PIECES, MAX_TENSOR_PIECES = 2, 64
"""Pieces of one tensor, of as many equal parts of it: what changes more than two neighbouring parts
of a tensor is found in any case."""
MIN_FILE_PIECES, MAX_FILE_PIECES = 256, 4096
"""Pieces of one file of another format."""
MAX_HEAD_BYTES, MAX_HEADS_BYTES = 16 << 20, 1 << 30
"""Bytes at the begin of a file of another format that are read as a whole, and of all such files:
GGUF has the tokenizer and the settings of the model there."""
MAX_HEADER_BYTES = 100_000_000
"""Limit of the safetensors format."""
LENGTH_BYTES = 8
_MIXER = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes of a file."""

    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor in a safetensors file."""

    name: str
    offset: int
    """From the begin of the file."""
    size: int
    """In bytes."""


def read_header_size(begin: bytes, file_bytes: int) -> int:
    """Return the bytes of a safetensors file up to its tensors, from its first LENGTH_BYTES; 0: it
    is no such file."""
    if len(begin) < LENGTH_BYTES:
        return 0
    size = LENGTH_BYTES + int(struct.unpack("<Q", begin[:LENGTH_BYTES])[0])
    return size if size <= min(MAX_HEADER_BYTES, file_bytes) else 0


def parse_tensors(header: bytes, file_bytes: int) -> list[Tensor]:
    """Return the tensors of a safetensors file, given its bytes up to the first one. Raises
    ValueError when it is no such file."""
    fields = json.loads(header[LENGTH_BYTES:])
    if not isinstance(fields, dict):
        raise ValueError("the header is no object")
    tensors = []
    for name, field in fields.items():
        if name == "__metadata__":
            continue
        try:
            begin, end = map(int, field["data_offsets"])
        except (KeyError, TypeError) as error:
            raise ValueError(f"tensor {name!r:.80} has no offsets") from error
        if not 0 <= begin <= end <= file_bytes - len(header):
            raise ValueError(f"tensor {name!r:.80} is not within the file")
        tensors.append(Tensor(name, len(header) + begin, end - begin))
    return tensors


def count_tensor_pieces(num_tensors: int) -> int:
    """Return the pieces of each tensor of a model with so many."""
    return min(max(MAX_PIECES // max(num_tensors, 1), MIN_TENSOR_PIECES), MAX_TENSOR_PIECES)


def count_file_pieces(num_files: int) -> int:
    """Return the pieces of each file of another format, of which there are so many."""
    return min(max(MAX_PIECES // max(num_files, 1), MIN_FILE_PIECES), MAX_FILE_PIECES)


def choose_tensor_pieces(tensor: Tensor, count: int) -> Sequence[Piece]:
    """Return pieces of a tensor, one at a place of its own in each of `count` equal parts; all of a
    tensor that is not larger than they are."""
    if tensor.size <= count * PIECE_BYTES:
        return (Piece(tensor.offset, tensor.size),)
    state = int.from_bytes(blake2b(tensor.name.encode(), digest_size=8).digest(), "little")
    pieces = []
    for part in range(count):
        first, last = part * tensor.size // count, (part + 1) * tensor.size // count - PIECE_BYTES
        state = (state * _MIXER + 1) & _MASK
        place = first + (state >> 16) % (last - first + 1)
        pieces.append(Piece(tensor.offset + place, PIECE_BYTES))
    return pieces


def choose_file_pieces(file_bytes: int, num_files: int) -> Sequence[Piece]:
    """Return the begin of one of so many files and pieces at regular distances up to its last byte;
    all of a file that is not larger than they are."""
    count = count_file_pieces(num_files)
    head = min(MAX_HEAD_BYTES, MAX_HEADS_BYTES // num_files)
    if file_bytes <= head + count * PIECE_BYTES:
        return (Piece(0, file_bytes),)
    last = file_bytes - PIECE_BYTES - head
    pieces = (Piece(head + part * last // (count - 1), PIECE_BYTES) for part in range(count))
    return [Piece(0, head), *pieces]
