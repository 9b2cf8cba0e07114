import random
import struct

import pytest

from cleave.local.smollm2.gguf import GgufFile

from tests.support import gguf


def decode(encoding: int, raw: bytes) -> list[float]:
    """Weight by weight, as ggml's reference dequantizes them."""
    found: list[float] = []
    if encoding == gguf.F32:
        return [*struct.unpack(f"<{len(raw) // 4}f", raw)]
    size = 20 if encoding == gguf.Q4_1 else 34
    for block in (raw[at : at + size] for at in range(0, len(raw), size)):
        if encoding == gguf.Q8_0:
            scale, *quants = struct.unpack("<e32b", block)
            found += [scale * each for each in quants]
        else:
            scale, least, *pairs = struct.unpack("<2e16B", block)
            found += [scale * (each & 15) + least for each in pairs]
            found += [scale * (each >> 4) + least for each in pairs]
    return found


@pytest.mark.parametrize("encoding", [gguf.F32, gguf.Q4_1, gguf.Q8_0])
def test_tensors_are_decoded_as_the_reference_does(encoding: int) -> None:
    raw = gguf.make_blocks(encoding, 192, random.Random(encoding))
    other = gguf.make_blocks(gguf.F32, 5, random.Random(9))
    file = gguf.pack({}, {"first": ((5,), gguf.F32, other), "a.weight": ((3, 64), encoding, raw)})
    weights = dict(GgufFile(file).iter_tensors())["a.weight"]
    assert weights.shape == (3, 64)
    assert weights.flatten().tolist() == pytest.approx(decode(encoding, raw), rel=1e-6)


def test_metadata_of_every_type_is_read() -> None:
    given = {"a": 7, "b": "Grüße", "c": True, "d": 0.5, "e": ["x", "", "ü"], "f": [-1, 2]}
    assert GgufFile(gguf.pack(given, {})).metadata == given


def test_what_is_no_such_file_is_a_value_error() -> None:
    whole = gguf.pack({"a": ["text"]}, {})
    strange = gguf.pack({}, {"a": ((32,), 2, bytes(18))})
    for data in (b"PK\x03\x04" + bytes(40), whole[:30], whole[:40] + b"\xff" * 40):
        with pytest.raises(ValueError, match=r"GGUF|not known|utf"):
            GgufFile(data)
    with pytest.raises(ValueError, match="tensor a: encoding 2 is not known"):
        dict(GgufFile(strange).iter_tensors())
