"""Usage of tenants that all processes of a gateway share. Used by the admission controller.

What is hard: it works without a lock. Running requests are counted in one column per process and
summed up. The state of an allowance is a single number that each process overwrites when it uses
some, so two that do so within the same microsecond may charge only one.
"""

import struct

from cleave.gateway.admission.rate_limit import (
    LimitExceeded,
    TenantLimits,
    TenantUsage,
    TokenBucket,
)
from cleave.shm.table import CELL_BYTES, SharedTable

_NUM_RUNNING = 0
_REQUESTS, _TOKENS = 0, 1
"""Columns of the two buckets: the time at which each is full again."""


class SharedTenantUsage(TenantUsage):
    """Usage of one tenant, in a row of the shared table."""

    __slots__ = ("_cells", "_row", "_running_cell", "_running_offset", "_table", "_unpack_running")

    def __init__(self, table: SharedTable, row: int, limits: TenantLimits, now: float) -> None:
        """`table`: with one cell per process and two common cells in each row."""
        self._table, self._row, self._cells = table, row, table.cells
        self._running_cell = table.locate_own(row, _NUM_RUNNING)
        self._running_offset = CELL_BYTES * table.locate_cell(row, _NUM_RUNNING, 0)
        self._unpack_running = struct.Struct(f"{table.processes}d").unpack_from
        super().__init__(limits, now)

    def acquire(self, prompt_tokens: int, now: float) -> LimitExceeded | None:
        """Charge a new request; a refused request is not charged."""
        refusal = super().acquire(prompt_tokens, now)
        self._cells[self._running_cell] = float(self.num_running)
        return refusal

    def release(self, output_tokens: int, now: float) -> None:
        """An admitted request has ended after so many output tokens."""
        super().release(output_tokens, now)
        self._cells[self._running_cell] = float(self.num_running)

    def count_running(self) -> int:
        """Requests of all processes that are queued or running."""
        running: tuple[float, ...] = self._unpack_running(self._table.memory, self._running_offset)
        return int(sum(running))

    def _create_bucket(self, of_tokens: bool, per_minute: int, now: float) -> TokenBucket:
        field = _TOKENS if of_tokens else _REQUESTS
        return SharedTokenBucket(self._table, self._row, field, per_minute, now)


class SharedTokenBucket(TokenBucket):
    """An allowance that all processes share."""

    __slots__ = ("_cell", "_cells")

    def __init__(
        self, table: SharedTable, row: int, field: int, per_minute: float, now: float
    ) -> None:
        super().__init__(per_minute, now)
        self._cells, self._cell = table.cells, table.locate_common(row, field)
        self._cells[self._cell] = self._cells[self._cell] or now

    def sync(self) -> None:
        """Load what other processes have used."""
        self._full_at = self._cells[self._cell]

    def consume(self, amount: float, now: float) -> None:
        """Charge an amount, even if it exceeds the allowance."""
        super().consume(amount, now)
        self._cells[self._cell] = self._full_at
