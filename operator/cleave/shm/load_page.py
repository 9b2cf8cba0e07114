"""The load page: a small memory-mapped file with an engine's load, which its agent reads.

The engine's side (vLLM's stat logger plug-in, the emulated engine) stores a snapshot after every
iteration; the agent reads it ten times a second. A memory-mapped file costs the engine under a
microsecond, where scraping its /metrics would cost several milliseconds of its event loop.
"""

import struct
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from cleave.shm.page import Page

ENV = "CLEAVE_LOAD_PAGE"
"""Environment variable that names the page to the engine."""

_BODY = struct.Struct("<IIQIIQdQQQdQ")
_KV_BODY = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class LoadSnapshot:
    """The load of an engine at one moment."""

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
    prefix_cache_queries: int = 0
    """Prompt tokens that were looked up in the prefix cache since the engine started; all prompt
    tokens if it has no prefix cache."""
    prefix_cache_hits: int = 0
    """Those of them that it had."""
    host_kv_hits: int = 0
    """Prompt tokens copied back from host memory since the engine started."""
    host_kv_load_ms: float = 0.0
    """ms that these copies took, added up, for each GPU."""
    sampled_ns: int = 0
    """CLOCK_MONOTONIC of the engine's latest step; 0 until the engine has written once."""
    oldest_kv_ns: int = 0
    """CLOCK_MONOTONIC when a request began to use the KV block whose latest use is the oldest one;
    while there is none, when the engine emptied its cache; 0: none was ever used, or it is not
    known."""


class LoadPage:
    """A load page, opened for writing (engine) or reading (agent)."""

    def __init__(self, path: Path) -> None:
        self._page = Page(path, _BODY)
        # Not a part of the other one: it is another process of vLLM that knows uses.
        self._kv_page = Page(path.with_name(f"{path.name}-kv"), _KV_BODY)

    def write(self, load: LoadSnapshot) -> None:
        """Store a snapshot without `load.oldest_kv_ns`; the present time is `sampled_ns` if it has
        none."""
        self._page.write(
            load.num_running,
            load.num_waiting,
            load.pending_prompt_tokens,
            load.kv_blocks_free,
            load.kv_blocks_total,
            load.num_preemptions,
            load.kv_cache_usage,
            load.prefix_cache_queries,
            load.prefix_cache_hits,
            load.host_kv_hits,
            load.host_kv_load_ms,
            load.sampled_ns or time.monotonic_ns(),
        )

    def write_oldest_kv(self, used_ns: int) -> None:
        """Store `oldest_kv_ns` of later snapshots."""
        self._kv_page.write(used_ns)

    def read(self) -> LoadSnapshot:
        """The latest consistent snapshot; LoadSnapshot() when there is none."""
        values = self._page.read()
        return LoadSnapshot(*values, *(self._kv_page.read() or ())) if values else LoadSnapshot()

    def close(self) -> None:
        """Unmap the page; the file stays."""
        self._page.close()
        self._kv_page.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
