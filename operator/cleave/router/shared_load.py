"""Load accounting shared by all processes of one gateway, so that they dispatch like a single one.

Used by the registry if a gateway has several processes. Each process adds its dispatches to its
own cells in shared memory; the load is the sum over all processes. What is hard: it must be about
as cheap as unshared accounting, hence no locks and no messages; and accounting belongs to one boot
of an engine, which each process discovers at another time, hence rows are claimed by boot and are
free again when no process uses them.
"""

import functools
import logging
import struct

from cleave.policy.prefix_cache import CLOCK_TOKENS
from cleave.policy.queue_model import OutstandingTokens, PrefillQueueModel, estimate_pending
from cleave.router.instance import InFlightLoad
from cleave.shm.table import CELL_BYTES, SharedTable

log = logging.getLogger(__name__)

MAX_BOOTS = 4_096
"""Limit of boots of engines at a time. All further ones share one row: each then has the sum of
their loads and is picked last."""

_NUM_PROMPTS, _NUM_REQUESTS, _PROMPT_TOKENS, _RESIDENT_TOKENS = 0, 1, 2, 3
_NUM_OWN_CELLS = 4
"""Number of own cells; they hold the load of the requests of each process."""
_REMOTE_PROMPT, _REMOTE_RESIDENT, _LAST_PICK = 0, 1, 2
"""Common cells that every score needs, directly after the own cells that it needs. `_REMOTE_*`: the
load of other gateways, as of the latest report to any process."""
_REMOTE_REQUESTS, _HEAD_STARTED, _PROMPT_MS, _TOKEN_MS, _UPPER_TOKEN_MS = 3, 4, 5, 6, 7
"""Common cells that some scores need; from `_HEAD_STARTED` on, those of the queue model."""
_SUMS, _NUM_SUMS = 8, 9
"""First cell and number of the `policy.queue_model.RegressionSums` of the queue model."""
_SUM_OF_PROMPTS, _SUM_OF_TOKENS = 1, 2
"""Indices in these sums: prompts and their tokens."""
_NUM_COMMON_CELLS = _SUMS + _NUM_SUMS
"""Number of common cells, before those of the cache."""
_PROMPT_SUM, _LOOKED_UP_SUM, _CACHED_SUM, _WRITTEN_SUM, _LOADED_SUM = 0, 1, 2, 3, 4
_NUM_CACHE_CELLS = 5
"""Cells of each process for the cache, after the common ones, because scores do not need them. What
they count never decreases, also when a process dies: the engine still has what it wrote."""
_OVERFLOW_ROW, _PICK_COUNTER_ROW = 0, 1
"""Rows that belong to no boot: for all boots beyond MAX_BOOTS, and for the counter of picks."""
_CLOSED = -1
"""Row number after `SharedInFlightLoad.close`."""


def build_table(processes: int) -> SharedTable:
    """The table; to be created before the processes are forked."""
    common = _NUM_COMMON_CELLS + _NUM_CACHE_CELLS * processes
    table = SharedTable(MAX_BOOTS, processes, own=_NUM_OWN_CELLS, common=common)
    table.claim(b"overflow")
    table.claim(b"pick counter")
    return table


class SharedLoad:
    """Opens the shared accounting of instances for one process."""

    def __init__(self, table: SharedTable) -> None:
        self.table = table
        self._cells = table.cells
        self._pick_counter_index = table.locate_common(_PICK_COUNTER_ROW, _LAST_PICK)
        self._overflow: SharedInFlightLoad | None = None

    def open(self, instance: str, boot_id: str) -> "SharedInFlightLoad":
        """The load of one boot of an engine."""
        row = self.table.claim(f"{instance} {boot_id}".encode())
        if row is not None:
            return SharedInFlightLoad(self.table, row)
        log.warning("the shared load table is full: the load of %s is overestimated", instance)
        if self._overflow is None:
            self._overflow = SharedInFlightLoad(self.table, _OVERFLOW_ROW)
        return self._overflow

    def find_row(self, in_flight: InFlightLoad) -> int:
        """Row of a load; the overflow row if it is not shared."""
        return in_flight.row if isinstance(in_flight, SharedInFlightLoad) else _OVERFLOW_ROW

    def count_pick(self) -> int:
        """Count a pick; its number. Two picks at exactly the same time may get the same number."""
        number = self._cells[self._pick_counter_index] + 1.0
        self._cells[self._pick_counter_index] = number
        return int(number)


@functools.cache
def _get_struct(count: int) -> struct.Struct:
    """A struct of `count` cells, cached because it is used for all rows."""
    return struct.Struct(f"{count}d")


class SharedRowView:
    """Reads the cells of one row that scores need: own cells of all processes and common cells."""

    __slots__ = ("_end", "_memory", "_processes", "_read", "_read_tokens", "_start", "_tokens_at")

    def __init__(self, table: SharedTable, row: int) -> None:
        self._memory, self._processes = table.memory, table.processes
        self._end = _NUM_OWN_CELLS * table.processes
        self._start = CELL_BYTES * table.locate_cell(row, 0, 0)
        self._read = _get_struct(self._end + _SUMS).unpack_from
        self._tokens_at = CELL_BYTES * table.locate_cell(row, _PROMPT_TOKENS, 0)
        self._read_tokens = _get_struct(2 * table.processes + _LAST_PICK + 1).unpack_from

    def read_all(self) -> tuple[float, ...]:
        """The present values of all these cells."""
        values: tuple[float, ...] = self._read(self._memory, self._start)
        return values

    def read_tokens(self) -> tuple[float, float, float]:
        """(pending prompt tokens, resident tokens, number of the last pick), in half the time."""
        values: tuple[float, ...] = self._read_tokens(self._memory, self._tokens_at)
        middle, end = self._processes, 2 * self._processes
        prompt = _sum_cells(values, 0, middle) + values[end + _REMOTE_PROMPT]
        resident = _sum_cells(values, middle, end) + values[end + _REMOTE_RESIDENT]
        return prompt, resident, values[end + _LAST_PICK]

    def sum_own(self, values: tuple[float, ...], field: int) -> float:
        """The sum of an own field over all processes, from the result of `read_all`."""
        return _sum_cells(values, field * self._processes, (field + 1) * self._processes)

    def get_common(self, values: tuple[float, ...], field: int) -> float:
        """A common cell, from the result of `read_all`."""
        return values[self._end + field]


def _sum_cells(values: tuple[float, ...], start: int, end: int) -> float:
    """Sum, at least 0: rounding errors of added and removed fractions may leave it below."""
    total = 0.0
    for at in range(start, end):
        total += values[at]
    return total if total > 0.0 else 0.0


class SharedInFlightLoad(InFlightLoad):
    """A load in one row of the table. Other processes see changes after the next `sync` or
    `publish`, which follows every change; their changes are read whenever values are needed."""

    __slots__ = (
        "_cache_indices", "_cells", "_common_index", "_own_cache_index", "_prompt_index",
        "_prompts_index", "_published_head_started_ms", "_published_pick", "_published_prompt",
        "_published_prompts", "_published_requests", "_published_resident", "_requests_index",
        "_resident_index", "_table", "_view", "row",
    )  # fmt: skip

    def __init__(self, table: SharedTable, row: int) -> None:
        super().__init__()
        self.row = row
        self._table, self._cells = table, table.cells
        self._view = SharedRowView(table, row)
        self._prompts_index = table.locate_own(row, _NUM_PROMPTS)
        self._prompt_index = table.locate_own(row, _PROMPT_TOKENS)
        self._requests_index = table.locate_own(row, _NUM_REQUESTS)
        self._resident_index = table.locate_own(row, _RESIDENT_TOKENS)
        self._common_index = table.locate_common(row, 0)
        self._cache_indices = [
            table.locate_common(row, _NUM_COMMON_CELLS + _NUM_CACHE_CELLS * process)
            for process in range(table.processes)
        ]
        # A process that replaces another one counts on.
        self._own_cache_index = own = self._cache_indices[table.process]
        self.prompt_tokens = self._cells[own + _PROMPT_SUM]
        self.looked_up_tokens = self._cells[own + _LOOKED_UP_SUM]
        self.cached_tokens = self._cells[own + _CACHED_SUM]
        self.loaded_tokens = self._cells[own + _LOADED_SUM]
        self.written_tokens = self._cells[own + _WRITTEN_SUM]
        self.prompt = SharedOutstandingTokens(table, row, _PROMPT_TOKENS, _REMOTE_PROMPT)
        self.resident = SharedOutstandingTokens(table, row, _RESIDENT_TOKENS, _REMOTE_RESIDENT)
        self.queue: PrefillQueueModel = SharedPrefillQueueModel(table, row)
        # Values published last.
        self._published_prompt = self._published_resident = 0.0
        self._published_head_started_ms = self.queue.head_started_ms
        self._published_requests = self._published_prompts = self._published_pick = 0

    def count_prompt(self, prompt_tokens: float, looked_up: float, cached_tokens: float) -> None:
        """As in the base class, in the cells of this process."""
        if self.row == _CLOSED:
            return
        super().count_prompt(prompt_tokens, looked_up, cached_tokens)
        cells, start = self._cells, self._own_cache_index
        cells[start + _PROMPT_SUM] = self.prompt_tokens
        if looked_up:
            cells[start + _LOOKED_UP_SUM] = self.looked_up_tokens
            cells[start + _CACHED_SUM] = self.cached_tokens

    def count_loaded(self, tokens: float) -> None:
        """As in the base class, in the cell of this process."""
        if self.row != _CLOSED:
            super().count_loaded(tokens)
            self._cells[self._own_cache_index + _LOADED_SUM] = self.loaded_tokens

    def count_written(self, tokens: float) -> None:
        """As in the base class, in the cell of this process."""
        if self.row != _CLOSED:
            super().count_written(tokens)
            self._cells[self._own_cache_index + _WRITTEN_SUM] = self.written_tokens

    def read_clock(self) -> int:
        """As in the base class, over all processes."""
        return int(self._sum_cache_cells(_WRITTEN_SUM)) // CLOCK_TOKENS

    def predict_hits(self) -> tuple[float, float, float]:
        """As in the base class, over all processes."""
        fields = _PROMPT_SUM, _LOOKED_UP_SUM, _CACHED_SUM
        sent, looked_up, cached = map(self._sum_cache_cells, fields)
        return sent, looked_up, cached

    def predict_loaded(self) -> float:
        """As in the base class, over all processes."""
        return self._sum_cache_cells(_LOADED_SUM)

    def count_pending(self, prompts: bool = True) -> tuple[float, float, float]:
        """As in the base class, over all processes; also loads what they have published."""
        view = self._view
        if not prompts:
            prompt, resident, last_pick = view.read_tokens()
            self.last_pick = self._published_pick = int(last_pick)
            return prompt, 0.0, resident
        values = self.load_shared()
        prompt = view.sum_own(values, _PROMPT_TOKENS) + view.get_common(values, _REMOTE_PROMPT)
        resident = view.sum_own(values, _RESIDENT_TOKENS)
        resident += view.get_common(values, _REMOTE_RESIDENT)
        return prompt, self._count_prompts(values), resident

    def count_prompts(self, pending: float) -> float:
        """Number of prompts of all processes; other gateways' prompts have the mean length."""
        del pending
        return self._count_prompts(self._view.read_all())

    def count_requests(self) -> int:
        """Number of requests of all processes."""
        return round(self._view.sum_own(self._view.read_all(), _NUM_REQUESTS))

    def update_remote_requests(self, reported: int) -> None:
        """Include the number of requests that the instance reports."""
        super().update_remote_requests(reported)
        self._cells[self._common_index + _REMOTE_REQUESTS] = self.num_remote_requests

    def sync(self) -> None:
        """Publish changes and load those of other processes."""
        if self.row != _CLOSED:
            self.publish()
            self.load_shared()

    def publish(self) -> None:
        """Publish the values that have changed to the other processes."""
        cells, prompt, resident = self._cells, self.prompt.own, self.resident.own
        if prompt != self._published_prompt:
            cells[self._prompt_index] = self._published_prompt = prompt
        if resident != self._published_resident:
            cells[self._resident_index] = self._published_resident = resident
        if self.num_requests != self._published_requests:
            self._published_requests = self.num_requests
            cells[self._requests_index] = float(self.num_requests)
        if self.num_prompts != self._published_prompts:
            self._published_prompts = self.num_prompts
            cells[self._prompts_index] = float(self.num_prompts)
        if self.last_pick != self._published_pick:
            self._published_pick = self.last_pick
            cells[self._common_index + _LAST_PICK] = float(self.last_pick)
        since_ms = self.queue.head_started_ms
        if since_ms != self._published_head_started_ms:
            cells[self._common_index + _HEAD_STARTED] = self._published_head_started_ms = since_ms

    def load_shared(self) -> tuple[float, ...]:
        """Load the common values that other processes published; returns all cells."""
        view, queue = self._view, self.queue
        values = view.read_all()
        self.last_pick = self._published_pick = int(view.get_common(values, _LAST_PICK))
        queue.head_started_ms = view.get_common(values, _HEAD_STARTED)
        self._published_head_started_ms = queue.head_started_ms
        queue.prompt_ms = view.get_common(values, _PROMPT_MS)
        queue.token_ms = view.get_common(values, _TOKEN_MS)
        queue.upper_token_ms = view.get_common(values, _UPPER_TOKEN_MS)
        self.num_remote_requests = view.get_common(values, _REMOTE_REQUESTS)
        return values

    def close(self) -> None:
        """Release the row; later changes to this load are not shared."""
        if self.row > _PICK_COUNTER_ROW:
            self._table.release(self.row)
            self.row = _CLOSED
            self.prompt, self.resident = OutstandingTokens(), OutstandingTokens()
            self.queue = PrefillQueueModel()

    def _sum_cache_cells(self, field: int) -> float:
        cells, total = self._cells, 0.0
        for start in self._cache_indices:
            total += cells[start + field]
        return total

    def _count_prompts(self, values: tuple[float, ...]) -> float:
        own = self._view.sum_own(values, _NUM_PROMPTS)
        remote = self._view.get_common(values, _REMOTE_PROMPT)
        return own + self.queue.count_prompts(remote) if remote else own


class SharedOutstandingTokens(OutstandingTokens):
    """Outstanding tokens of one instance in one phase: of all processes and of other gateways."""

    __slots__ = ("_cells", "_own_indices", "_remote_index")

    def __init__(self, table: SharedTable, row: int, own: int, others: int) -> None:
        """`own`, `others`: field numbers of the own cells and of the common cell."""
        super().__init__()
        self._cells, self._remote_index = table.cells, table.locate_common(row, others)
        processes = range(table.processes)
        self._own_indices = [table.locate_cell(row, own, process) for process in processes]

    @property
    def remote(self) -> float:
        """Tokens of routers that do not share this accounting, as of the latest report."""
        return self._cells[self._remote_index]

    @property
    def pending(self) -> float:
        """The estimate that dispatch compares."""
        return self._sum_own() + self._cells[self._remote_index]

    def update_from_report(self, reported: float) -> float:
        """Include the tokens that the instance reports; returns those of all processes."""
        own = self._sum_own()
        self._cells[self._remote_index] = estimate_pending(0.0, reported, own)
        return own

    def _sum_own(self) -> float:
        # Cell by cell: unpacking a full row takes longer.
        cells, own = self._cells, 0.0
        for at in self._own_indices:
            own += cells[at]
        return own if own > 0.0 else 0.0


_QueueCells = tuple[
    float, float, float, float, float, float, float, float, float, float, float, float, float
]
"""The cells of a queue model, from `_HEAD_STARTED` on."""


class SharedPrefillQueueModel(PrefillQueueModel):
    """The queue model of an instance, shared by all processes.
    Of two simultaneous updates one may be lost, which matters little among two hundred samples."""

    __slots__ = ("_cells", "_memory", "_memory_slice", "_pack", "_sums_index", "_unpack")

    def __init__(self, table: SharedTable, row: int) -> None:
        super().__init__()
        self._cells, self._memory = table.cells, table.memory
        start = table.locate_common(row, _HEAD_STARTED)
        end = table.locate_common(row, _NUM_COMMON_CELLS)
        self._memory_slice = slice(CELL_BYTES * start, CELL_BYTES * end)
        self._sums_index = table.locate_common(row, _SUMS)
        cells = _get_struct(end - start)
        self._unpack, self._pack = cells.unpack, cells.pack
        if not self._cells[self._sums_index + _SUM_OF_TOKENS]:
            self._store_cells()
        self._load_cells()

    def observe_completion(self, tokens: float, now_ms: float, remote_tokens: float = 0.0) -> float:
        """As in the base class; loads the shared model before and stores it afterwards."""
        self._load_cells()
        ms = super().observe_completion(tokens, now_ms, remote_tokens)
        self._store_cells()
        return ms

    def count_prompts(self, tokens: float) -> float:
        """Expected number of prompts with `tokens` tokens in total."""
        start = self._sums_index
        return tokens * self._cells[start + _SUM_OF_PROMPTS] / self._cells[start + _SUM_OF_TOKENS]

    def _load_cells(self) -> None:
        """Load the shared model; of two start times of the first prompt the later one is right."""
        cells: _QueueCells = self._unpack(self._memory[self._memory_slice])
        since_ms, self.prompt_ms, self.token_ms, self.upper_token_ms, a, b, c, d, e, f, g, h, i = (
            cells
        )
        self.head_started_ms = max(self.head_started_ms, since_ms)
        self._sums = a, b, c, d, e, f, g, h, i

    def _store_cells(self) -> None:
        a, b, c, d, e, f, g, h, i = self._sums
        # Not pack_into(): it clears the cells first, and other processes may read at any moment.
        self._memory[self._memory_slice] = self._pack(
            self.head_started_ms, self.prompt_ms, self.token_ms, self.upper_token_ms,
            a, b, c, d, e, f, g, h, i,
        )  # fmt: skip
