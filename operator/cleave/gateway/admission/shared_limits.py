"""Accounts of tenants that all processes of a gateway keep together. Used by the door.

What is hard: to do so without a lock. What runs is counted in a column per process and added up;
what is left of an allowance is one number that whoever uses some of it writes, and two that do so
within the same microsecond may charge only one.
"""

from cleave.gateway.admission.limits import Account, Bucket, Limits, Refusal
from cleave.metrics.shared_table import SharedTable

_RUNNING = 0
_REQUESTS, _TOKENS = 0, 2
"""Level and time of each bucket are beside one another."""


class SharedAccount(Account):
    """The account of one tenant in a row of its own."""

    __slots__ = ("_cells", "_row", "_running_at", "_table")

    def __init__(self, table: SharedTable, row: int, limits: Limits, now: float) -> None:
        self._table, self._row, self._cells = table, row, table.cells
        self._running_at = table.own_at(row, _RUNNING)
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
        super().__init__(per_minute, now)
        self._cells = table.cells
        self._level_at = table.common_at(row, field)
        self._filled_at = table.common_at(row, field + 1)
        if not self._cells[self._filled_at]:
            self._tell()

    def charge(self, amount: float) -> None:
        """What was found there a moment ago."""
        super().charge(amount)
        self._tell()

    def resize(self, per_minute: float, now: float) -> None:
        """Another allowance from now on."""
        super().resize(per_minute, now)
        self._tell()

    def _fill(self, now: float) -> float:
        self._level, self._at = self._cells[self._level_at], self._cells[self._filled_at]
        level = super()._fill(now)
        self._tell()
        return level

    def _tell(self) -> None:
        self._cells[self._level_at], self._cells[self._filled_at] = self._level, self._at
