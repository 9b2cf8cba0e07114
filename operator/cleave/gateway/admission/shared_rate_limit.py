"""Usage of tenants that all processes of a gateway share. Used by the admission controller.

What is hard: it works without a lock. Running requests are counted in one column per process and
summed up. The state of an allowance is a single number that each process overwrites when it uses
some, so two that do so within the same microsecond may charge only one.
"""

import struct

from cleave.gateway.admission.rate_limit import Account, Bucket, Limits, Refusal
from cleave.shm.table import CELL_BYTES, SharedTable

_RUNNING = 0
_REQUESTS, _TOKENS = 0, 1
"""Columns of the two buckets: the time at which each is full again."""


class SharedAccount(Account):
    """Usage of one tenant, in a row of the shared table."""

    __slots__ = ("_cells", "_look", "_row", "_running_at", "_start", "_table")

    def __init__(self, table: SharedTable, row: int, limits: Limits, now: float) -> None:
        """`table`: with one cell per process and two common cells in each row."""
        self._table, self._row, self._cells = table, row, table.cells
        self._running_at = table.own_at(row, _RUNNING)
        self._start = CELL_BYTES * table.cell_at(row, _RUNNING, 0)
        self._look = struct.Struct(f"{table.processes}d").unpack_from
        super().__init__(limits, now)

    def enter(self, prompt_tokens: int, now: float) -> Refusal | None:
        """Charge a new request; a refused request is not charged."""
        refusal = super().enter(prompt_tokens, now)
        self._cells[self._running_at] = float(self.running)
        return refusal

    def leave(self, output_tokens: int, now: float) -> None:
        """An admitted request has ended after so many output tokens."""
        super().leave(output_tokens, now)
        self._cells[self._running_at] = float(self.running)

    def count_running(self) -> int:
        """Requests of all processes that are queued or running."""
        running: tuple[float, ...] = self._look(self._table.memory, self._start)
        return int(sum(running))

    def _open_bucket(self, of_tokens: bool, per_minute: int, now: float) -> Bucket:
        field = _TOKENS if of_tokens else _REQUESTS
        return SharedBucket(self._table, self._row, field, per_minute, now)


class SharedBucket(Bucket):
    """An allowance that all processes share."""

    __slots__ = ("_at", "_cells")

    def __init__(
        self, table: SharedTable, row: int, field: int, per_minute: float, now: float
    ) -> None:
        super().__init__(per_minute, now)
        self._cells, self._at = table.cells, table.common_at(row, field)
        self._cells[self._at] = self._cells[self._at] or now

    def look(self) -> None:
        """Load what other processes have used."""
        self._full_at = self._cells[self._at]

    def use(self, amount: float, now: float) -> None:
        """Charge an amount, even if it exceeds the allowance."""
        super().use(amount, now)
        self._cells[self._at] = self._full_at
