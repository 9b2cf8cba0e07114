"""State that the processes of one gateway share; made by their parent, inherited by each.

Load accounting of the router, usage of tenants, and heartbeats are in shared memory; the counters
of each process are in files, so that no counter decreases when a process is killed. What is hard:
any process must respond for all of them at once, even if one hangs or is being replaced; so
processes never query each other, each publishes its own state.
"""

import copy
import logging
import math
import shutil
import time
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Self

from cleave.router.prefix_index import PrefixMemory
from cleave.router.shared_load import SharedLoad, build_table
from cleave.shm.table import SharedTable
from cleave.time_slices import Steps

log = logging.getLogger(__name__)

MAX_TENANTS = 4_096
"""Each process counts further tenants by itself."""
HEARTBEAT_TIMEOUT_S = 10.0
"""A process without a heartbeat for so long makes the gateway unhealthy."""

_HEARTBEAT, _AWAITING_FIRST_BYTE, _IN_FLIGHT, _PID = range(4)
_RESTARTS = 0
_LENGTH_BYTES = 4
"""Before each part of a file of counters."""


class SharedGatewayState:
    """The shared state of all processes; each has an instance with its process index."""

    def __init__(self, count: int, folder: Path, parent: int = -1) -> None:
        """`folder`: private, for files; `parent`: a pipe, readable once the parent has died."""
        self.num_processes = count
        self.process_index = count
        self.gateway_id = uuid.uuid4().hex
        """Identifies all processes together as one router to the agents."""
        self.parent_pipe = parent
        self._folder = folder
        self._has_warned = False
        """Whether it has been logged that the counters cannot be written."""
        self._load_table = build_table(count)
        self.prefix_memory = PrefixMemory()
        """Cached prompts by engine, for the router."""
        self.tenant_usage = SharedTable(MAX_TENANTS, count, own=1, common=2)
        """Usage of tenants."""
        self._process_table = SharedTable(1, count, own=4, common=1)
        self._process_table.claim(b"all")
        for process in range(count):
            self._write_field(process, _HEARTBEAT, time.monotonic())

    def for_process(self, process: int) -> Self:
        """The same state, for another process."""
        copied = copy.copy(self)
        copied.process_index = process
        copied._load_table = self._load_table.for_process(process)
        copied.tenant_usage = self.tenant_usage.for_process(process)
        return copied

    def open_load_accounting(self) -> SharedLoad:
        """Load accounting of the instances."""
        return SharedLoad(self._load_table)

    # --- published by each process ---

    def register_process(self, pid: int) -> None:
        """Publish the PID of this process: it listens."""
        self._write_field(self.process_index, _PID, pid)

    def publish_heartbeat(self, now: float, unanswered: int, in_flight: int) -> None:
        """Publish a heartbeat, the number of requests waiting for their first byte (`unanswered`),
        and of all requests in flight."""
        self._write_field(self.process_index, _HEARTBEAT, now)
        self._write_field(self.process_index, _AWAITING_FIRST_BYTE, unanswered)
        self._write_field(self.process_index, _IN_FLIGHT, in_flight)

    def write_counters(self, parts: Iterable[bytes]) -> Steps[None]:
        """Publish all that this process and its predecessors have counted."""
        path = self._get_counter_path(self.process_index)
        new = path.with_suffix(".part")
        try:
            with new.open("wb") as file:
                for part in parts:
                    file.write(len(part).to_bytes(_LENGTH_BYTES))
                    file.write(part)
                    yield
            new.replace(path)
        except OSError as error:
            # A full disk must not stop requests from being served.
            if not self._has_warned:
                log.warning("cannot share the metrics of this process with the others: %s", error)
            self._has_warned = True

    def remove_files(self) -> None:
        """Remove the files that a killed parent left behind."""
        shutil.rmtree(self._folder, ignore_errors=True)

    # --- read for all processes ---

    def read_counters(self, process: int) -> Iterator[bytes]:
        """The parts of the counters that a process published last; none at first."""
        try:
            with self._get_counter_path(process).open("rb") as file:
                while length := file.read(_LENGTH_BYTES):
                    yield file.read(int.from_bytes(length))
        except FileNotFoundError:
            return

    def compute_queue_limit(self, unanswered: int, limit: int) -> int:
        """How many requests of this process may wait for their first byte, until the next call.

        The remaining room is divided evenly, so that all processes together roughly keep to the
        limit however clients are spread. At least 1, or no request would be admitted again.
        """
        remaining = max(limit - sum(self._read_field(_AWAITING_FIRST_BYTE)), 0.0)
        return max(unanswered + math.floor(remaining / self.num_processes), 1)

    def count_in_flight(self) -> int:
        """Requests that all processes are serving."""
        return int(sum(self._read_field(_IN_FLIGHT)))

    def list_pids(self) -> list[int]:
        """Processes that are alive and listen."""
        return [int(pid) for pid in self._read_field(_PID) if pid]

    def list_hung(self, now: float) -> list[tuple[int, float]]:
        """(process, seconds since its heartbeat) of those without one for HEARTBEAT_TIMEOUT_S."""
        ages = [now - beat for beat in self._read_field(_HEARTBEAT)]
        return [(process, age) for process, age in enumerate(ages) if age > HEARTBEAT_TIMEOUT_S]

    @property
    def restarts(self) -> int:
        """Restarts of all processes since the start."""
        return int(self._process_table.common[0, _RESTARTS])

    # --- called by the parent only ---

    def get_heartbeat(self, process: int) -> float:
        """Time of a process's last heartbeat."""
        return self._read_field(_HEARTBEAT)[process]

    def clear_process(self, process: int) -> None:
        """A process has died, and with it all its requests: clear its state."""
        self._load_table.clear_process(process)
        self.tenant_usage.clear_process(process)
        for field in (_AWAITING_FIRST_BYTE, _IN_FLIGHT, _PID):
            self._write_field(process, field, 0.0)

    def record_restart(self) -> None:
        """Count the restart of a process."""
        self._process_table.common[0, _RESTARTS] += 1

    def close(self) -> None:
        """Free the shared memory, after all processes have ended."""
        for table in (self._load_table, self.tenant_usage, self._process_table):
            table.close()

    def _read_field(self, field: int) -> tuple[float, ...]:
        return self._process_table.read(0, field)

    def _write_field(self, process: int, field: int, value: float) -> None:
        self._process_table.cells[self._process_table.locate_cell(0, field, process)] = value

    def _get_counter_path(self, process: int) -> Path:
        return self._folder / f"{process}.counts"
