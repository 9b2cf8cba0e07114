"""The scheduling page: a memory-mapped file through which the agent configures its engine.

The agent writes it when the engine starts and at each change of role. The engine's scheduler checks
it before each step, which costs a fraction of a microsecond and needs no thread or socket.
"""

import struct
from dataclasses import astuple
from pathlib import Path
from typing import Self

from cleave.policy.admission import Admission
from cleave.policy.prompt_order import PrefillOrder
from cleave.shm.page import Page
from cleave_worker.scheduling.config import RoleSchedulingConfig

ENV = "CLEAVE_SCHEDULING_PAGE"
"""Environment variable with the path of the page, for the engine."""

_BODY = struct.Struct("<7Q")
"""The fields of `RoleSchedulingConfig` in their order."""


class SchedulingPage:
    """A scheduling page, opened for writing (agent) or reading (engine)."""

    def __init__(self, path: Path) -> None:
        self._page = Page(path, _BODY)
        self._last_version = 0

    def write(self, config: RoleSchedulingConfig) -> None:
        """Write a configuration, which the engine applies from its next step on."""
        self._page.write(*astuple(config))

    def read_if_changed(self) -> RoleSchedulingConfig | None:
        """Return the configuration if it has changed since the last call, else None."""
        version = self._page.version
        if version == self._last_version or (values := self._page.read()) is None:
            return None
        self._last_version = version
        order, batch, seqs, tokens, threshold, admission, preemptions = values
        return RoleSchedulingConfig(
            PrefillOrder(order), batch, seqs, tokens, threshold, Admission(admission), preemptions
        )

    def close(self) -> None:
        """Unmap the page; the file stays."""
        self._page.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
