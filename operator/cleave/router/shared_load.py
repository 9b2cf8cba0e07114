"""Load accounting shared by all processes of one gateway, so that they dispatch like a single one.

Used by the directory if a gateway has several processes. Each process adds its dispatches to its
own cells in shared memory; the load is the sum over all processes. What is hard: it must be about
as cheap as unshared accounting, hence no locks and no messages; and accounting belongs to one boot
of an engine, which each process discovers at another time, hence rows are claimed by boot and are
free again when no process uses them.
"""

import functools
import logging
import struct

from cleave.policy.queue_model import Book, Queue, estimate_pending
from cleave.router.instance import Ledger
from cleave.shm.table import CELL_BYTES, SharedTable

log = logging.getLogger(__name__)

MAX_BOOTS = 4_096
"""Limit of boots of engines at a time. All further ones share one row: each then has the sum of
their loads and is picked last."""

_PROMPTS, _REQUESTS, _PROMPT, _RESIDENT = 0, 1, 2, 3
_OWN = 4
"""Number of own cells; they hold the load of the requests of each process."""
_OTHERS_PROMPT, _OTHERS_RESIDENT, _TURN = 0, 1, 2
"""Common cells that every score needs, directly after the own cells that it needs. `_OTHERS_*`: the
load of other gateways, as of the latest report to any process."""
_OTHERS_REQUESTS, _SINCE, _PROMPT_MS, _TOKEN_MS, _SAFE_TOKEN_MS = 3, 4, 5, 6, 7
"""Common cells that some scores need. `_SINCE` and all cells after it belong to the queue model."""
_LEARNT, _NUM_LEARNT = 8, 9
"""First cell and number of the `policy.queue_model.Sums` of the queue model."""
_PROMPTS_LEARNT, _TOKENS = 1, 2
"""Indices in these sums: prompts and their tokens."""
_COMMON = _LEARNT + _NUM_LEARNT
"""Number of common cells."""
_SPILL, _TURNS = 0, 1
"""Rows that belong to no boot: for all boots beyond MAX_BOOTS, and for the counter of picks."""
_GONE = -1
"""Row number after `SharedLedger.leave`."""


def make_table(processes: int) -> SharedTable:
    """The table; to be created before the processes are forked."""
    table = SharedTable(MAX_BOOTS, processes, own=_OWN, common=_COMMON)
    table.claim(b"what has no row of its own")
    table.claim(b"turns")
    return table


class SharedBooks:
    """Opens the shared accounting of instances for one process."""

    def __init__(self, table: SharedTable) -> None:
        self.table = table
        self._cells = table.cells
        self._turn_at = table.common_at(_TURNS, _TURN)
        self._spill: SharedLedger | None = None

    def open(self, instance: str, boot_id: str) -> "SharedLedger":
        """The ledger of one boot of an engine."""
        row = self.table.claim(f"{instance} {boot_id}".encode())
        if row is not None:
            return SharedLedger(self.table, row)
        log.warning("no room in the shared books: the load of %s is overestimated", instance)
        if self._spill is None:
            self._spill = SharedLedger(self.table, _SPILL)
        return self._spill

    def find_row(self, ledger: Ledger) -> int:
        """Row of a ledger; the overflow row if it is not shared."""
        return ledger.row if isinstance(ledger, SharedLedger) else _SPILL

    def next_turn(self) -> int:
        """Count a pick; its number. Two picks at exactly the same time may get the same number."""
        turn = self._cells[self._turn_at] + 1.0
        self._cells[self._turn_at] = turn
        return int(turn)


@functools.cache
def _to_cells(count: int) -> struct.Struct:
    """A struct of `count` cells, cached because it is used for all rows."""
    return struct.Struct(f"{count}d")


class View:
    """Reads the cells of one row that scores need: own cells of all processes and common cells."""

    __slots__ = ("_end", "_memory", "_processes", "_read", "_read_tokens", "_start", "_tokens_at")

    def __init__(self, table: SharedTable, row: int) -> None:
        self._memory, self._processes = table.memory, table.processes
        self._end = _OWN * table.processes
        self._start = CELL_BYTES * table.cell_at(row, 0, 0)
        self._read = _to_cells(self._end + _LEARNT).unpack_from
        self._tokens_at = CELL_BYTES * table.cell_at(row, _PROMPT, 0)
        self._read_tokens = _to_cells(2 * table.processes + _TURN + 1).unpack_from

    def read(self) -> tuple[float, ...]:
        """The present values of all these cells."""
        values: tuple[float, ...] = self._read(self._memory, self._start)
        return values

    def read_tokens(self) -> tuple[float, float, float]:
        """(pending prompt tokens, resident tokens, number of the last pick), in half the time."""
        values: tuple[float, ...] = self._read_tokens(self._memory, self._tokens_at)
        middle, end = self._processes, 2 * self._processes
        prompt = _add_up(values, 0, middle) + values[end + _OTHERS_PROMPT]
        resident = _add_up(values, middle, end) + values[end + _OTHERS_RESIDENT]
        return prompt, resident, values[end + _TURN]

    def add_up(self, values: tuple[float, ...], field: int) -> float:
        """The sum of an own field over all processes, from the result of `read`."""
        return _add_up(values, field * self._processes, (field + 1) * self._processes)

    def find(self, values: tuple[float, ...], field: int) -> float:
        """A common cell, from the result of `read`."""
        return values[self._end + field]


def _add_up(values: tuple[float, ...], start: int, end: int) -> float:
    """Sum, at least 0: rounding errors of added and removed fractions may leave it below."""
    total = 0.0
    for at in range(start, end):
        total += values[at]
    return total if total > 0.0 else 0.0


class SharedLedger(Ledger):
    """A ledger in one row of the table. Other processes see changes after the next `sync` or
    `tell`, which follows every change; their changes are read whenever values are needed."""

    __slots__ = (
        "_cells",
        "_common_at",
        "_prompt",
        "_prompt_at",
        "_prompts",
        "_prompts_at",
        "_requests",
        "_requests_at",
        "_resident",
        "_resident_at",
        "_since_ms",
        "_table",
        "_turn",
        "_view",
        "row",
    )

    def __init__(self, table: SharedTable, row: int) -> None:
        super().__init__()
        self.row = row
        self._table, self._cells = table, table.cells
        self._view = View(table, row)
        self._prompts_at, self._prompt_at = table.own_at(row, _PROMPTS), table.own_at(row, _PROMPT)
        self._requests_at = table.own_at(row, _REQUESTS)
        self._resident_at = table.own_at(row, _RESIDENT)
        self._common_at = table.common_at(row, 0)
        self.prompt = SharedBook(table, row, _PROMPT, _OTHERS_PROMPT)
        self.resident = SharedBook(table, row, _RESIDENT, _OTHERS_RESIDENT)
        self.queue: Queue = SharedQueue(table, row)
        # Values published last.
        self._prompt = self._resident = 0.0
        self._since_ms = self.queue.since_ms
        self._requests = self._prompts = self._turn = 0

    def count_pending(self, prompts: bool = True) -> tuple[float, float, float]:
        """As in the base class, over all processes; also loads what they have published."""
        view = self._view
        if not prompts:
            prompt, resident, turn = view.read_tokens()
            self.last_turn = self._turn = int(turn)
            return prompt, 0.0, resident
        seen = self.look()
        prompt = view.add_up(seen, _PROMPT) + view.find(seen, _OTHERS_PROMPT)
        resident = view.add_up(seen, _RESIDENT) + view.find(seen, _OTHERS_RESIDENT)
        return prompt, self._count_prompts(seen), resident

    def count_prompts(self, pending: float) -> float:
        """Number of prompts of all processes; other gateways' prompts have the mean length."""
        del pending
        return self._count_prompts(self._view.read())

    def count_requests(self) -> int:
        """Number of requests of all processes."""
        return round(self._view.add_up(self._view.read(), _REQUESTS))

    def report_requests(self, here: int) -> None:
        """Include the number of requests that the instance reports."""
        super().report_requests(here)
        self._cells[self._common_at + _OTHERS_REQUESTS] = self.others

    def sync(self) -> None:
        """Publish changes and load those of other processes."""
        if self.row != _GONE:
            self.tell()
            self.look()

    def tell(self) -> None:
        """Publish the values that have changed to the other processes."""
        cells, prompt, resident = self._cells, self.prompt.own, self.resident.own
        if prompt != self._prompt:
            cells[self._prompt_at] = self._prompt = prompt
        if resident != self._resident:
            cells[self._resident_at] = self._resident = resident
        if self.requests != self._requests:
            self._requests = self.requests
            cells[self._requests_at] = float(self.requests)
        if self.prompts != self._prompts:
            self._prompts = self.prompts
            cells[self._prompts_at] = float(self.prompts)
        if self.last_turn != self._turn:
            self._turn = self.last_turn
            cells[self._common_at + _TURN] = float(self.last_turn)
        since_ms = self.queue.since_ms
        if since_ms != self._since_ms:
            cells[self._common_at + _SINCE] = self._since_ms = since_ms

    def look(self) -> tuple[float, ...]:
        """Load the common values that other processes published; returns all cells."""
        view, queue = self._view, self.queue
        values = view.read()
        self.last_turn = self._turn = int(view.find(values, _TURN))
        queue.since_ms = self._since_ms = view.find(values, _SINCE)
        queue.prompt_ms = view.find(values, _PROMPT_MS)
        queue.token_ms = view.find(values, _TOKEN_MS)
        queue.safe_token_ms = view.find(values, _SAFE_TOKEN_MS)
        self.others = view.find(values, _OTHERS_REQUESTS)
        return values

    def leave(self) -> None:
        """Release the row; later changes to this ledger are not shared."""
        if self.row > _TURNS:
            self._table.release(self.row)
            self.row = _GONE
            self.prompt, self.resident, self.queue = Book(), Book(), Queue()

    def _count_prompts(self, values: tuple[float, ...]) -> float:
        own = self._view.add_up(values, _PROMPTS)
        remote = self._view.find(values, _OTHERS_PROMPT)
        return own + self.queue.count_prompts(remote) if remote else own


class SharedBook(Book):
    """Outstanding tokens of one instance in one phase: of all processes and of other gateways."""

    __slots__ = ("_at", "_cells", "_others_at")

    def __init__(self, table: SharedTable, row: int, own: int, others: int) -> None:
        """`own`, `others`: field numbers of the own cells and of the common cell."""
        super().__init__()
        self._cells, self._others_at = table.cells, table.common_at(row, others)
        self._at = [table.cell_at(row, own, process) for process in range(table.processes)]

    @property
    def others(self) -> float:
        """Tokens of routers that do not share this accounting, as of the latest report."""
        return self._cells[self._others_at]

    @property
    def pending(self) -> float:
        """The estimate that dispatch compares."""
        return self._add_up() + self._cells[self._others_at]

    def report(self, reported: float) -> float:
        """Include the tokens that the instance reports; returns those of all processes."""
        own = self._add_up()
        self._cells[self._others_at] = estimate_pending(0.0, reported, own)
        return own

    def _add_up(self) -> float:
        # Cell by cell: unpacking a full row takes longer.
        cells, own = self._cells, 0.0
        for at in self._at:
            own += cells[at]
        return own if own > 0.0 else 0.0


_Cells = tuple[
    float, float, float, float, float, float, float, float, float, float, float, float, float
]
"""The cells of a queue model, from `_SINCE` on."""


class SharedQueue(Queue):
    """The queue model of an instance, shared by all processes.

    Of two simultaneous updates one may be lost, which matters little among two hundred samples.
    """

    __slots__ = ("_cells", "_learnt_at", "_memory", "_pack", "_place", "_unpack")

    def __init__(self, table: SharedTable, row: int) -> None:
        super().__init__()
        self._cells, self._memory = table.cells, table.memory
        start, end = table.common_at(row, _SINCE), table.common_at(row, _COMMON)
        self._place = slice(CELL_BYTES * start, CELL_BYTES * end)
        self._learnt_at = table.common_at(row, _LEARNT)
        cells = _to_cells(end - start)
        self._unpack, self._pack = cells.unpack, cells.pack
        if not self._cells[self._learnt_at + _TOKENS]:
            self._write()
        self._read()

    def answer(self, tokens: float, now_ms: float, others: float = 0.0) -> float:
        """As in the base class; loads the shared model before and stores it afterwards."""
        self._read()
        ms = super().answer(tokens, now_ms, others)
        self._write()
        return ms

    def count_prompts(self, tokens: float) -> float:
        """Expected number of prompts with `tokens` tokens in total."""
        start = self._learnt_at
        return tokens * self._cells[start + _PROMPTS_LEARNT] / self._cells[start + _TOKENS]

    def _read(self) -> None:
        """Load the shared model; of two start times of the first prompt the later one is right."""
        cells: _Cells = self._unpack(self._memory[self._place])
        since_ms, self.prompt_ms, self.token_ms, self.safe_token_ms, a, b, c, d, e, f, g, h, i = (
            cells
        )
        self.since_ms = max(self.since_ms, since_ms)
        self._sums = a, b, c, d, e, f, g, h, i

    def _write(self) -> None:
        a, b, c, d, e, f, g, h, i = self._sums
        # Not pack_into(): it clears the cells first, and other processes may read at any moment.
        self._memory[self._place] = self._pack(
            self.since_ms,
            self.prompt_ms,
            self.token_ms,
            self.safe_token_ms,
            a,
            b,
            c,
            d,
            e,
            f,
            g,
            h,
            i,
        )
