"""Accounts of tenants that all processes of a gateway keep together. Used by the door.

What is hard: to do so without a lock. What runs is counted in a column per process and added up;
what is left of an allowance is one number that whoever uses some of it writes, and two that do so
within the same microsecond may charge only one.
"""

import struct

from cleave.gateway.admission.limits import Account, Bucket, Limits, Refusal
from cleave.metrics.shared_table import CELL_BYTES, SharedTable

_RUNNING = 0
_REQUESTS, _TOKENS = 0, 1
"""Of both buckets: when they are full again."""


class SharedAccount(Account):
    """The account of one tenant in a row of its own."""

    __slots__ = ("_cells", "_look", "_row", "_running_at", "_start", "_table")

    def __init__(self, table: SharedTable, row: int, limits: Limits, now: float) -> None:
        """A row with one own cell."""
        self._table, self._row, self._cells = table, row, table.cells
        self._running_at = table.own_at(row, _RUNNING)
        self._start = CELL_BYTES * table.cell_at(row, _RUNNING, 0)
        self._look = struct.Struct(f"{table.processes}d").unpack_from
        super().__init__(limits, now)

    def enter(self, prompt_tokens: int, now: float) -> Refusal | None:
        """Take a request in; a refusal changes nothing."""
        refusal = super().enter(prompt_tokens, now)
        self._cells[self._running_at] = float(self.running)
        return refusal

    def leave(self, output_tokens: int, now: float) -> None:
        """A request that was taken in has ended with so many tokens made."""
        super().leave(output_tokens, now)
        self._cells[self._running_at] = float(self.running)

    def count_running(self) -> int:
        """Requests of all processes."""
        running: tuple[float, ...] = self._look(self._table.memory, self._start)
        return int(sum(running))

    def _open_bucket(self, of_tokens: bool, per_minute: int, now: float) -> Bucket:
        field = _TOKENS if of_tokens else _REQUESTS
        return SharedBucket(self._table, self._row, field, per_minute, now)


class SharedBucket(Bucket):
    """An allowance of all processes together."""

    __slots__ = ("_at", "_cells")

    def __init__(
        self, table: SharedTable, row: int, field: int, per_minute: float, now: float
    ) -> None:
        super().__init__(per_minute, now)
        self._cells, self._at = table.cells, table.common_at(row, field)
        self._cells[self._at] = self._cells[self._at] or now

    def look(self) -> None:
        """Learn what siblings have used."""
        self._full_at = self._cells[self._at]

    def use(self, amount: float, now: float) -> None:
        """Charge so much, also what is not there."""
        super().use(amount, now)
        self._cells[self._at] = self._full_at
