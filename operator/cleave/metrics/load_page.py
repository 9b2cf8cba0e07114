"""The load page: one small file that the engine writes and its agent reads.

The engine's side (vLLM's stat logger plug-in, the emulated engine) stores a snapshot after every
iteration; the agent reads it ten times a second. A memory-mapped file costs the engine under a
microsecond, where scraping its /metrics would cost several milliseconds of its event loop.
What is hard: reader and writer share no lock, so a sequence number is odd while a write is under
way and the reader tries again (a seqlock).
"""

import mmap
import os
import struct
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Self

ENV = "CLEAVE_LOAD_PAGE"
"""Environment variable that names the page to the engine."""

_SEQUENCE = struct.Struct("<Q")
_BODY = struct.Struct("<IIQIIQdQ")
_SIZE = _SEQUENCE.size + _BODY.size
_READ_ATTEMPTS = 100


@dataclass(frozen=True, slots=True)
class Load:
    """What an engine carries at one moment."""

    num_running: int = 0
    num_waiting: int = 0
    pending_prompt_tokens: int = 0
    """Prompt tokens accepted and not yet computed."""
    kv_blocks_free: int = 0
    kv_blocks_total: int = 0
    num_preemptions: int = 0
    """Since the engine started."""
    kv_cache_usage: float = 0.0
    """Used share, 0..1."""
    sampled_ns: int = 0
    """CLOCK_MONOTONIC; 0 until the engine has written once."""


class LoadPage:
    """A load page, opened for writing (engine) or reading (agent)."""

    def __init__(self, path: Path) -> None:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if os.fstat(fd).st_size < _SIZE:
                os.ftruncate(fd, _SIZE)
            self._map = mmap.mmap(fd, _SIZE)
        finally:
            os.close(fd)

    def write(self, load: Load) -> None:
        """Store a snapshot, stamped with the present time."""
        (sequence,) = _SEQUENCE.unpack_from(self._map)
        # An odd number left by a writer that died would stay odd for ever: round up first.
        sequence += sequence & 1
        _SEQUENCE.pack_into(self._map, 0, sequence + 1)
        _BODY.pack_into(
            self._map,
            _SEQUENCE.size,
            load.num_running,
            load.num_waiting,
            load.pending_prompt_tokens,
            load.kv_blocks_free,
            load.kv_blocks_total,
            load.num_preemptions,
            load.kv_cache_usage,
            time.monotonic_ns(),
        )
        _SEQUENCE.pack_into(self._map, 0, sequence + 2)

    def read(self) -> Load:
        """The newest whole snapshot; Load() when none can be had."""
        for _ in range(_READ_ATTEMPTS):
            (before,) = _SEQUENCE.unpack_from(self._map)
            body = _BODY.unpack_from(self._map, _SEQUENCE.size)
            (after,) = _SEQUENCE.unpack_from(self._map)
            if before == after and not before & 1:
                return Load(*body)
        return Load()

    def close(self) -> None:
        """Unmap the page; the file stays."""
        self._map.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
