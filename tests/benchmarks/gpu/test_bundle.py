"""Archives for machines without a network: which code of a fat binary stays."""

import struct
from collections.abc import Callable
from types import ModuleType

import pytest

Import = Callable[[str], ModuleType]

TEXT, CODE = 1, 2
Entry = tuple[int, int]
"""Kind and compute capability."""


def build_fat_binary(*entries: Entry) -> bytearray:
    """One, with four bytes of code in each entry."""
    parts = [
        struct.pack("<HHIQ12xI32x", kind, 0, 64, 4, capability) + b"code"
        for kind, capability in entries
    ]
    content = b"".join(parts)
    return bytearray(struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(content)) + content)


@pytest.mark.parametrize(
    ("entries", "kept"),
    [
        ([(CODE, 80), (CODE, 90), (TEXT, 90), (CODE, 100)], [(CODE, 90)]),
        ([(CODE, 80), (TEXT, 75), (TEXT, 80), (TEXT, 100)], [(TEXT, 80)]),
        ([(CODE, 100)], []),
    ],
)
def test_code_of_other_gpus_is_zeroed(
    module: Import, entries: list[Entry], kept: list[Entry]
) -> None:
    content = build_fat_binary(*entries)
    module("bundle").drop_code(content, 16, len(content), "_C.so")
    left = [content[16 + 68 * n + 64 : 16 + 68 * (n + 1)] for n in range(len(entries))]
    assert [each for each, code in zip(entries, left, strict=True) if code == b"code"] == kept
    assert all(code in (b"code", bytes(4)) for code in left)


@pytest.mark.parametrize(
    ("name", "is_left_out"),
    [("torch", True), ("nvidia-cudnn-cu13", True), ("tokenspeed-triton", True), ("vllm", False)],
)
def test_what_comes_with_torch_is_left_out(module: Import, name: str, is_left_out: bool) -> None:
    assert bool(module("bundle").LEFT_OUT.fullmatch(name)) == is_left_out
