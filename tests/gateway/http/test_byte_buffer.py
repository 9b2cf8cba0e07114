"""Bytes that grow without being copied."""

import asyncio
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cleave.gateway.http.byte_buffer import MAPPED_BYTES, ByteBuffer


@given(st.lists(st.integers(0, MAPPED_BYTES), max_size=12), st.binary(max_size=3))
def test_what_was_appended_is_taken(sizes: list[int], begin: bytes) -> None:
    buffer, expected = ByteBuffer(begin), bytearray(begin)
    for number, size in enumerate(sizes):
        piece = bytes([65 + number % 26]) * size
        buffer.add(memoryview(piece) if number % 2 else piece)
        expected += piece
        assert len(buffer) == len(expected)
    assert bytes(buffer.take()) == expected


@pytest.mark.parametrize("size", [10, 2 * MAPPED_BYTES])
def test_the_last_byte_can_be_dropped(size: int) -> None:
    buffer = ByteBuffer()
    buffer.add(b"a" * size + b",")
    buffer.drop_last()
    buffer.add(b"]")
    assert bytes(buffer.take()) == b"a" * size + b"]"


def test_no_append_takes_long() -> None:
    piece = b"x" * (64 << 10)

    def measure() -> float:
        buffer, longest_s = ByteBuffer(), 0.0
        for _ in range(512):
            began = time.thread_time()
            buffer.add(piece)
            longest_s = max(longest_s, time.thread_time() - began)
        return longest_s

    assert min(measure() for _ in range(3)) < 0.005


async def test_memory_is_given_back_in_steps_once_nothing_refers_to_it() -> None:
    buffer = ByteBuffer()
    for _ in range(256):
        buffer.add(b"x" * (64 << 10))
    body = memoryview(buffer.take())[5:]
    del buffer
    before = read_resident_mib()
    del body
    assert before - read_resident_mib() < 4, "it would take 2 ms here"
    for _ in range(100):
        await asyncio.sleep(0)
    assert before - read_resident_mib() > 12


def test_without_an_event_loop_memory_is_given_back_at_once() -> None:
    buffer = ByteBuffer()
    buffer.add(b"x" * (16 << 20))
    before = read_resident_mib()
    del buffer
    assert before - read_resident_mib() > 12


def read_resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) / 256
