"""Books that all processes of one gateway keep together, so that each picks as if it were the only.

Used by the directory where a gateway has several processes. A dispatch is entered in cells of the
process's own, in a memory that all share; what is pending is the sum over all. What is
hard: it must stay about as cheap as books of one's own, hence no lock and no message; and books
belong to one boot of an engine, which each process hears of at a time of its own, hence rows by
boot that are free again when nobody needs them.
"""

import functools
import logging
import struct

from cleave.metrics.shared_table import CELL_BYTES, SharedTable
from cleave.policy.books import Book, Queue, estimate_pending
from cleave.router.instance import Ledger

log = logging.getLogger(__name__)

MAX_BOOTS = 4_096
"""Boots of engines at a time. All further ones share a row: each then counts as being as busy as
all of them together, and is taken last."""

_PROMPTS, _REQUESTS, _PROMPT, _RESIDENT = 0, 1, 2, 3
_OWN = 4
"""Own cells: what the process has sent."""
_OTHERS_PROMPT, _OTHERS_RESIDENT, _TURN = 0, 1, 2
"""Common cells that every score looks at; own ones that it does are just before them. Others': what
other gateways have there, as the latest report tells any process."""
_OTHERS_REQUESTS, _SINCE, _PROMPT_MS, _TOKEN_MS, _SAFE_TOKEN_MS = 3, 4, 5, 6, 7
"""Some scores look at these. `_SINCE` and all behind it are of the queue."""
_LEARNT, _NUM_LEARNT = 8, 9
"""The sums of a queue."""
_PROMPTS_LEARNT, _TOKENS = 1, 2
"""Among these sums."""
_COMMON = _LEARNT + _NUM_LEARNT
"""Common cells."""
_SPILL, _TURNS = 0, 1
"""Rows that are no boot's."""
_GONE = -1
"""The row of a boot that is not followed any more."""


def make_table(processes: int) -> SharedTable:
    """Before the processes are forked."""
    table = SharedTable(MAX_BOOTS, processes, own=_OWN, common=_COMMON)
    table.claim(b"what has no row of its own")
    table.claim(b"turns")
    return table


class SharedBooks:
    """The books of all instances, as one process keeps them."""

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
        """Where a ledger's scores are; those of another kind have none of their own."""
        return ledger.row if isinstance(ledger, SharedLedger) else _SPILL

    def next_turn(self) -> int:
        """Counts the picks of all processes; two at the very same time may get the same."""
        turn = self._cells[self._turn_at] + 1.0
        self._cells[self._turn_at] = turn
        return int(turn)


@functools.cache
def _to_cells(count: int) -> struct.Struct:
    """One for all rows: it is read with each."""
    return struct.Struct(f"{count}d")


class View:
    """What scores look at in one row: the own cells of all processes and some common ones."""

    __slots__ = ("_end", "_memory", "_processes", "_read", "_read_tokens", "_start", "_tokens_at")

    def __init__(self, table: SharedTable, row: int) -> None:
        self._memory, self._processes = table.memory, table.processes
        self._end = _OWN * table.processes
        self._start = CELL_BYTES * table.cell_at(row, 0, 0)
        self._read = _to_cells(self._end + _LEARNT).unpack_from
        self._tokens_at = CELL_BYTES * table.cell_at(row, _PROMPT, 0)
        self._read_tokens = _to_cells(2 * table.processes + _TURN + 1).unpack_from

    def read(self) -> tuple[float, ...]:
        """All of it, as it is now."""
        seen: tuple[float, ...] = self._read(self._memory, self._start)
        return seen

    def read_tokens(self) -> tuple[float, float, float]:
        """(prompt tokens that wait, resident tokens, last turn): half of it, in half the time."""
        seen: tuple[float, ...] = self._read_tokens(self._memory, self._tokens_at)
        here, end = self._processes, 2 * self._processes
        prompt = _add_up(seen, 0, here) + seen[end + _OTHERS_PROMPT]
        resident = _add_up(seen, here, end) + seen[end + _OTHERS_RESIDENT]
        return prompt, resident, seen[end + _TURN]

    def add_up(self, seen: tuple[float, ...], field: int) -> float:
        """What all have entered."""
        return _add_up(seen, field * self._processes, (field + 1) * self._processes)

    def find(self, seen: tuple[float, ...], field: int) -> float:
        """A common cell among those that were read."""
        return seen[self._end + field]


def _add_up(seen: tuple[float, ...], start: int, end: int) -> float:
    """Sums of fractions do not come back to nothing exactly."""
    here = 0.0
    for at in range(start, end):
        here += seen[at]
    return here if here > 0.0 else 0.0


class SharedLedger(Ledger):
    """A ledger in one row of the table. What is entered here the others see after the next `sync`,
    which follows every change; what they have entered is read whenever it is asked for."""

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
        # What was told last.
        self._prompt = self._resident = 0.0
        self._since_ms = self.queue.since_ms
        self._requests = self._prompts = self._turn = 0

    def count_pending(self, prompts: bool = True) -> tuple[float, float, float]:
        """Of all processes, and other gateways; what else they have told is taken over."""
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
        """Of all processes, and other gateways' as long as usual."""
        del pending
        return self._count_prompts(self._view.read())

    def count_requests(self) -> int:
        """Of all processes."""
        return round(self._view.add_up(self._view.read(), _REQUESTS))

    def report_requests(self, here: int) -> None:
        """The instance's own count arrived."""
        super().report_requests(here)
        self._cells[self._common_at + _OTHERS_REQUESTS] = self.others

    def sync(self) -> None:
        """Tell siblings what has changed, and learn what they have told."""
        if self.row != _GONE:
            self.tell()
            self.look()

    def tell(self) -> None:
        """Tell siblings what has changed."""
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
        """What siblings have told, as cells; taken over here where it is no sum."""
        view, queue = self._view, self.queue
        seen = view.read()
        self.last_turn = self._turn = int(view.find(seen, _TURN))
        queue.since_ms = self._since_ms = view.find(seen, _SINCE)
        queue.prompt_ms = view.find(seen, _PROMPT_MS)
        queue.token_ms = view.find(seen, _TOKEN_MS)
        queue.safe_token_ms = view.find(seen, _SAFE_TOKEN_MS)
        self.others = view.find(seen, _OTHERS_REQUESTS)
        return seen

    def leave(self) -> None:
        """Take what is this process's off the row; what is released later changes nothing there."""
        if self.row > _TURNS:
            self._table.release(self.row)
            self.row = _GONE
            self.prompt, self.resident, self.queue = Book(), Book(), Queue()

    def _count_prompts(self, seen: tuple[float, ...]) -> float:
        here, others = self._view.add_up(seen, _PROMPTS), self._view.find(seen, _OTHERS_PROMPT)
        return here + self.queue.count_prompts(others) if others else here


class SharedBook(Book):
    """Tokens outstanding at one instance in one phase: own ones, those of siblings, and others."""

    __slots__ = ("_at", "_cells", "_others_at")

    def __init__(self, table: SharedTable, row: int, own: int, others: int) -> None:
        """`own`, `others`: fields."""
        super().__init__()
        self._cells, self._others_at = table.cells, table.common_at(row, others)
        self._at = [table.cell_at(row, own, process) for process in range(table.processes)]

    @property
    def others(self) -> float:
        """What those have there that keep books of their own, as the latest report tells."""
        return self._cells[self._others_at]

    @property
    def pending(self) -> float:
        """The estimate that dispatch compares."""
        return self._add_up() + self._cells[self._others_at]

    def report(self, reported: float) -> float:
        """The instance's own count arrived; what is outstanding of those that keep this book."""
        here = self._add_up()
        self._cells[self._others_at] = estimate_pending(0.0, reported, here)
        return here

    def _add_up(self) -> float:
        # One by one: a whole row takes longer to read.
        cells, here = self._cells, 0.0
        for at in self._at:
            here += cells[at]
        return here if here > 0.0 else 0.0


_Cells = tuple[
    float, float, float, float, float, float, float, float, float, float, float, float, float
]
"""Of a queue: from `_SINCE` on."""


class SharedQueue(Queue):
    """How fast an instance computes the prompts of all processes, each of which tells the others.

    Two that learn at the same moment may lose what one has seen; of two hundred that is little.
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
        """A prompt of that many tokens was answered, the next one begins; how long it took."""
        self._read()
        ms = super().answer(tokens, now_ms, others)
        self._write()
        return ms

    def count_prompts(self, tokens: float) -> float:
        """How many prompts that many tokens are."""
        learnt = self._learnt_at
        return tokens * self._cells[learnt + _PROMPTS_LEARNT] / self._cells[learnt + _TOKENS]

    def _read(self) -> None:
        """Whoever has seen the later prompt begin is right."""
        cells: _Cells = self._unpack(self._memory[self._place])
        since_ms, self.prompt_ms, self.token_ms, self.safe_token_ms, a, b, c, d, e, f, g, h, i = (
            cells
        )
        self.since_ms = max(self.since_ms, since_ms)
        self._sums = a, b, c, d, e, f, g, h, i

    def _write(self) -> None:
        a, b, c, d, e, f, g, h, i = self._sums
        # Not pack_into(): it clears the place first, and others read at any moment.
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
