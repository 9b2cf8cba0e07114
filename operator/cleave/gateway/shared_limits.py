"""Accounts of tenants that all processes of a gateway keep together. Used by the door.

What is hard: to do so without a lock. What runs is counted in a column per process and added up;
what is left of an allowance is one number that whoever uses some of it writes, and two that do so
within the same microsecond may charge only one.
"""

from cleave.gateway.limits import Account, Bucket, Limits
from cleave.metrics.shared_table import SharedTable

_RUNNING = 0
_REQUESTS, _TOKENS = 0, 2
"""Level and time of each bucket are beside one another."""


class SharedAccount(Account):
    """The account of one tenant in a row of its own."""

    __slots__ = ("_cells", "_own", "_row", "_running_at", "_table")

    def __init__(self, table: SharedTable, row: int, limits: Limits, now: float) -> None:
        self._table, self._row, self._cells = table, row, table.cells
        self._running_at = table.own_at(row, _RUNNING)
        super().__init__(limits, now)

    @property
    def running(self) -> int:
        """Requests of this process."""
        return int(self._cells[self._running_at])

    @running.setter
    def running(self, number: int) -> None:
        self._cells[self._running_at] = number

    def count_running(self) -> int:
        """Requests of all processes."""
        return int(sum(self._table.read(self._row, _RUNNING)))

    def _open_bucket(self, of_tokens: bool, per_minute: int, now: float) -> Bucket:
        field = _TOKENS if of_tokens else _REQUESTS
        return SharedBucket(self._table, self._row, field, per_minute, now)


class SharedBucket(Bucket):
    """An allowance of all processes together."""

    __slots__ = ("_cells", "_filled_at", "_level_at")

    def __init__(
        self, table: SharedTable, row: int, field: int, per_minute: float, now: float
    ) -> None:
        self._cells = table.cells
        self._level_at = table.common_at(row, field)
        self._filled_at = table.common_at(row, field + 1)
        self._per_minute = per_minute
        if not self._at:
            self._level, self._at = per_minute, now

    @property
    def _level(self) -> float:
        return self._cells[self._level_at]

    @_level.setter
    def _level(self, level: float) -> None:
        self._cells[self._level_at] = level

    @property
    def _at(self) -> float:
        return self._cells[self._filled_at]

    @_at.setter
    def _at(self, now: float) -> None:
        self._cells[self._filled_at] = now
