"""Reads models in ggml's format GGUF: metadata, and tensors as float32.

It knows the three encodings that the demo's model has. Format: github.com/ggml-org/ggml,
docs/gguf.md; the encodings' blocks: src/ggml-common.h.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

_NUMBERS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
"""Formats of `struct` by type of a value."""
_STRING, _ARRAY = 8, 9
_F32, _Q4_1, _Q8_0 = 0, 3, 8
_BLOCK = 32
"""Weights of one block of Q4_1 and Q8_0."""
_BLOCK_BYTES = {_Q4_1: 20, _Q8_0: 34}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where a tensor lies."""

    name: str
    shape: tuple[int, ...]
    """Rows first, as in PyTorch."""
    encoding: int
    offset: int
    """Bytes from the begin of all tensors."""


class GgufFile:
    """A GGUF file in memory. Raises ValueError when it is none, or has types that are not known."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._position = 0
        magic, version, num_tensors, num_values = self._unpack("4sIQQ")
        if (magic, version) != (b"GGUF", 3):
            raise ValueError(f"no GGUF file of version 3: it begins with {magic!r} and {version}")
        self.metadata = {self._read_string(): self._read_value() for _ in range(num_values)}
        self._tensors = [self._read_tensor_head() for _ in range(num_tensors)]
        alignment = self.metadata.get("general.alignment", 32)
        self._begin = -(-self._position // alignment) * alignment

    def iter_tensors(self) -> Iterator[tuple[str, "np.ndarray"]]:
        """Yield the name and the float32 weights of each tensor."""
        for tensor in self._tensors:
            yield tensor.name, self._decode(tensor)

    def _decode(self, tensor: GgufTensor) -> "np.ndarray":
        import numpy as np

        count, begin = prod(tensor.shape), self._begin + tensor.offset
        if tensor.encoding == _F32:
            values = np.frombuffer(self._data, np.float32, count, begin)
            return values.reshape(tensor.shape)
        size = _BLOCK_BYTES.get(tensor.encoding)
        if size is None:
            raise ValueError(f"tensor {tensor.name}: encoding {tensor.encoding} is not known")
        raw = np.frombuffer(self._data, np.uint8, count // _BLOCK * size, begin)
        blocks = raw.reshape(-1, size)
        scales = blocks[:, :2].copy().view(np.float16).astype(np.float32)
        values = blocks[:, 2:].view(np.int8).astype(np.float32)
        if tensor.encoding == _Q4_1:
            # The first half of a block is in the low bits.
            values = np.concatenate((blocks[:, 4:] & 15, blocks[:, 4:] >> 4), axis=1)
        found = np.multiply(scales, values, dtype=np.float32)
        if tensor.encoding == _Q4_1:
            found += blocks[:, 2:4].copy().view(np.float16)
        return found.reshape(tensor.shape)

    def _read_tensor_head(self) -> GgufTensor:
        name = self._read_string()
        (num_dimensions,) = self._unpack("I")
        shape = self._unpack(f"{num_dimensions}Q")[::-1]
        encoding, offset = self._unpack("IQ")
        return GgufTensor(name, shape, encoding, offset)

    def _read_value(self, kind: int | None = None) -> Any:  # noqa: ANN401 - as the file says
        if kind is None:
            (kind,) = self._unpack("I")
        if kind == _STRING:
            return self._read_string()
        if kind == _ARRAY:
            element, count = self._unpack("IQ")
            if element in _NUMBERS:
                return list(self._unpack(f"{count}{_NUMBERS[element]}"))
            return [self._read_value(element) for _ in range(count)]
        if kind not in _NUMBERS:
            raise ValueError(f"a value of type {kind} is not known")
        return self._unpack(_NUMBERS[kind])[0]

    def _read_string(self) -> str:
        (size,) = self._unpack("Q")
        return str(self._unpack(f"{size}s")[0], "utf-8")

    def _unpack(self, layout: str) -> tuple[Any, ...]:
        try:
            values = struct.unpack_from(f"<{layout}", self._data, self._position)
        except struct.error as error:
            raise ValueError(f"the GGUF file ends too early: {error}") from error
        self._position += struct.calcsize(f"<{layout}")
        return values
