"""The access page: a memory-mapped file by which an engine knows if it may serve without its key.

The agent writes it: gateways of versions before 0.1 do not send keys, and while one of them
follows, its requests are served. The engine reads it only for requests without the right key.
"""

import struct
from pathlib import Path
from typing import Self

from cleave.shm.page import Page

ENV = "CLEAVE_ACCESS_PAGE"
"""Environment variable with the path of the page, for the engine."""

_BODY = struct.Struct("<Q")


class AccessPage:
    """An access page, opened for writing (agent) or reading (engine)."""

    def __init__(self, path: Path) -> None:
        self._page = Page(path, _BODY)

    def write(self, *, is_open: bool) -> None:
        """Let the engine serve requests without its key, or not."""
        self._page.write(is_open)

    def is_open(self) -> bool:
        """Whether requests without the key are served; not before anything was written."""
        values = self._page.read()
        return values is not None and bool(values[0])

    def close(self) -> None:
        """Unmap the page; the file stays."""
        self._page.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
