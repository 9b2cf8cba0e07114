"""Limits of one tenant: requests and tokens a minute, concurrent requests. Time is passed in.

Used by the admission controller for every request of a tenant with limits. What is hard: the length
of an output is not known before. So tokens are charged as they come, and a tenant that has
overdrawn its limit waits. All processes of a gateway share a tenant's usage without a lock: running
requests are counted in one column per process and summed up. The state of an allowance is a single
number that each process overwrites when it uses some, so two that do so within the same microsecond
may charge only one.
"""

import struct
from dataclasses import dataclass

from cleave.shm.table import CELL_BYTES, SharedTable

MINUTE_S = 60.0
MIN_WAIT_S = 1e-6
"""Shorter waits count as none, because sums of floats are not exact."""
_NUM_RUNNING = 0
_REQUESTS, _TOKENS = 0, 1
"""Columns of the two buckets: the time at which each is full again."""


class TokenBucket:
    """An allowance that refills continuously; a minute's worth may be used at once. Its state is
    the time at which it is full again (the generic cell rate algorithm, ITU-T I.371)."""

    __slots__ = ("_full_at", "_per_minute")

    def __init__(self, per_minute: float, now: float) -> None:
        self._per_minute = per_minute
        self._full_at = now

    def sync(self) -> None:
        """Load what other processes have used; called before any other method."""

    def compute_wait_s(self, amount: float, now: float) -> float:
        """Seconds until so much may be used, 0: now; until full for more than a minute's worth."""
        needed_s = min(amount / self._per_minute, 1.0) * MINUTE_S
        wait_s = self._full_at - now + needed_s - MINUTE_S
        return wait_s if wait_s > MIN_WAIT_S else 0.0

    def consume(self, amount: float, now: float) -> None:
        """Charge an amount, even if it exceeds the allowance; below zero: give it back."""
        self._full_at = max(self._full_at, now) + amount / self._per_minute * MINUTE_S

    def resize(self, per_minute: float) -> None:
        """Set another allowance."""
        self._per_minute = per_minute


@dataclass(frozen=True, slots=True)
class LimitExceeded:
    """Why a tenant's request is refused."""

    reason: str
    """Label of the metric and code of the error."""
    message: str
    retry_after_s: float


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """Limits of a tenant; 0: no limit."""

    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    """Of prompts and outputs."""
    max_concurrent: int = 0
    """Requests that are queued or running."""


class TenantUsage:
    """What one tenant uses."""

    __slots__ = ("_limits", "_request_bucket", "_token_bucket", "num_running")

    def __init__(self, limits: TenantLimits, now: float) -> None:
        self.num_running = 0
        self._request_bucket: TokenBucket | None = None
        self._token_bucket: TokenBucket | None = None
        self._limits = limits
        self.set_limits(limits, now)

    def set_limits(self, limits: TenantLimits, now: float) -> None:
        """Set other limits."""
        self._limits = limits
        requests, tokens = limits.requests_per_minute, limits.tokens_per_minute
        self._request_bucket = self._resize_bucket(self._request_bucket, False, requests, now)
        self._token_bucket = self._resize_bucket(self._token_bucket, True, tokens, now)

    def acquire(self, prompt_tokens: int, now: float) -> LimitExceeded | None:
        """Charge a new request; a refused request is not charged."""
        limits = self._limits
        if limits.max_concurrent and self.count_running() >= limits.max_concurrent:
            message = f"more than {limits.max_concurrent} requests at a time"
            return LimitExceeded("concurrency_limit", message, 1.0)
        requests, tokens = self._request_bucket, self._token_bucket
        if requests is not None:
            requests.sync()
            if wait_s := requests.compute_wait_s(1, now):
                message = f"more than {limits.requests_per_minute} requests a minute"
                return LimitExceeded("request_rate_limit", message, wait_s)
        if tokens is not None:
            tokens.sync()
            if wait_s := tokens.compute_wait_s(prompt_tokens, now):
                message = f"more than {limits.tokens_per_minute} tokens a minute"
                return LimitExceeded("token_rate_limit", message, wait_s)
        if requests is not None:
            requests.consume(1, now)
        if tokens is not None:
            tokens.consume(prompt_tokens, now)
        self.num_running += 1
        return None

    def charge(self, tokens: int, now: float) -> None:
        """Charge further tokens to a request; below zero: what was charged too much."""
        if self._token_bucket is not None and tokens:
            self._token_bucket.sync()
            self._token_bucket.consume(tokens, now)

    def release(self, tokens: int, now: float) -> None:
        """An admitted request has ended; `tokens` that were not charged yet."""
        self.num_running -= 1
        self.charge(tokens, now)

    def count_running(self) -> int:
        """Requests that are queued or running."""
        return self.num_running

    def _resize_bucket(
        self, bucket: TokenBucket | None, of_tokens: bool, per_minute: int, now: float
    ) -> TokenBucket | None:
        if not per_minute:
            return None
        if bucket is None:
            return self._create_bucket(of_tokens, per_minute, now)
        bucket.resize(per_minute)
        return bucket

    def _create_bucket(self, of_tokens: bool, per_minute: int, now: float) -> TokenBucket:
        del of_tokens
        return TokenBucket(per_minute, now)


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

    def release(self, tokens: int, now: float) -> None:
        """An admitted request has ended; `tokens` that were not charged yet."""
        super().release(tokens, now)
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

    def __init__(self, table: SharedTable, row: int, field: int, rate: float, now: float) -> None:
        """`rate`: per minute."""
        super().__init__(rate, now)
        self._cells, self._cell = table.cells, table.locate_common(row, field)
        self._cells[self._cell] = self._cells[self._cell] or now

    def sync(self) -> None:
        """Load what other processes have used."""
        self._full_at = self._cells[self._cell]

    def consume(self, amount: float, now: float) -> None:
        """Charge an amount, even if it exceeds the allowance."""
        super().consume(amount, now)
        self._cells[self._cell] = self._full_at
