"""Books that all processes of one gateway keep together, so that each picks as if it were the only.

Used by the directory where a gateway has several processes. A dispatch is entered in a column of
the process's own, in a memory that all share; what is pending is the sum of the columns. What is
hard: it must stay about as cheap as books of one's own, hence no lock and no message; and books
belong to one boot of an engine, which each process hears of at a time of its own, hence rows by
boot that are free again when nobody needs them.
"""

import logging

from cleave.metrics.shared_table import CELL_BYTES, SharedTable
from cleave.policy.books import Book, Queue, Sums, estimate_pending
from cleave.router.instance import Ledger

log = logging.getLogger(__name__)

MAX_BOOTS = 4_096
"""Boots of engines at a time. All further ones share a row: each then counts as being as busy as
all of them together, and is taken last."""

FIRST, TOTAL, PENDING = 0, 1, 2
"""Common cells with what boards compare: `shared_board`."""
_SINCE, _TURN, _PROMPT_MS, _TOKEN_MS, _SAFE_TOKEN_MS = 3, 4, 5, 6, 7
_LEARNT, _NUM_LEARNT = 8, 9
"""The sums of a queue."""
_OTHERS = _LEARNT + _NUM_LEARNT
"""Plus the own field: what other gateways have there, as the latest report tells any process."""
PROMPT, _RESIDENT, _REQUESTS, _PROMPTS = 0, 1, 2, 3
OWN = 4
"""Own cells."""
OTHER_PROMPTS, OTHER_RESIDENTS = _OTHERS + PROMPT, _OTHERS + _RESIDENT
_SPILL, _TURNS = 0, 1
"""Rows that are no boot's."""


def make_table(processes: int) -> SharedTable:
    """Before the processes are forked."""
    table = SharedTable(MAX_BOOTS, processes, own=OWN, common=_OTHERS + 3)
    table.claim(b"what has no row of its own")
    table.claim(b"turns")
    return table


class SharedBooks:
    """The books of all instances, as one process keeps them."""

    def __init__(self, table: SharedTable) -> None:
        self.table = table
        self._cells = table.cells
        self._turn_at = table.common_at(_TURNS, _TURN)

    def open(self, instance: str, boot_id: str) -> "SharedLedger":
        """The ledger of one boot of an engine."""
        row = self.table.claim(f"{instance} {boot_id}".encode())
        if row is None:
            log.warning("no room in the shared books: the load of %s is overestimated", instance)
        return SharedLedger(self.table, _SPILL if row is None else row)

    def find_row(self, ledger: Ledger) -> int:
        """Where a ledger's scores are; those of another kind have none of their own."""
        return ledger.row if isinstance(ledger, SharedLedger) else _SPILL

    def next_turn(self) -> int:
        """Counts the picks of all processes; two at the very same time may get the same."""
        turn = self._cells[self._turn_at] + 1.0
        self._cells[self._turn_at] = turn
        return int(turn)


class SharedLedger(Ledger):
    """A ledger in one row of the table; what is not a sum is brought in step by `sync`."""

    __slots__ = (
        "_cells",
        "_others_at",
        "_prompts_at",
        "_requests_at",
        "_table",
        "_told",
        "_told_prompts",
        "_turn_at",
        "row",
    )

    def __init__(self, table: SharedTable, row: int) -> None:
        super().__init__()
        self.row = row
        self.prompt = SharedBook(table, row, PROMPT)
        self.resident = SharedBook(table, row, _RESIDENT)
        self.queue: Queue = SharedQueue(table, row)
        self._table = table
        self._cells = table.cells
        self._requests_at = table.own_at(row, _REQUESTS)
        self._prompts_at = table.own_at(row, _PROMPTS)
        self._others_at = table.common_at(row, _OTHERS + _REQUESTS)
        self._turn_at = table.common_at(row, _TURN)
        self._told = self._told_prompts = 0

    def count_prompts(self, pending: float) -> float:
        """Of all processes, and other gateways' as long as usual."""
        del pending
        here, others = add_up(self._table.read(self.row, _PROMPTS)), self.prompt.others
        return here + self.queue.count_prompts(others) if others else here

    def count_requests(self) -> int:
        """Of all processes."""
        return round(sum(self._table.read(self.row, _REQUESTS)))

    def report_requests(self, here: int) -> None:
        """The instance's own count arrived."""
        super().report_requests(here)
        self._cells[self._others_at] = self.others

    def sync(self) -> None:
        """Tell siblings what has changed, and learn what they have told."""
        cells = self._cells
        if self.requests != self._told:
            cells[self._requests_at] += self.requests - self._told
            self._told = self.requests
        if self.prompts != self._told_prompts:
            cells[self._prompts_at] += self.prompts - self._told_prompts
            self._told_prompts = self.prompts
        turn = int(cells[self._turn_at])
        if self.last_turn > turn:
            cells[self._turn_at] = float(self.last_turn)
        else:
            self.last_turn = turn
        self.others = cells[self._others_at]
        self.queue.sync()

    def leave(self) -> None:
        """Take what is this process's off the row; what is released later changes nothing there."""
        self._cells[self._requests_at] -= self._told
        self._cells[self._prompts_at] -= self._told_prompts
        for book in (self.prompt, self.resident):
            book.close(book.own)
        if self.row != _SPILL:
            self._table.release(self.row)
        self.prompt, self.resident, self.queue = Book(), Book(), Queue()


class SharedBook(Book):
    """Tokens outstanding at one instance in one phase: own ones, those of siblings, and others."""

    __slots__ = ("_cells", "_memory", "_others_at", "_own_at", "_start", "_unpack")

    def __init__(self, table: SharedTable, row: int, field: int) -> None:
        self.own = 0.0
        self._cells, self._memory, self._unpack = table.cells, table.memory, table.unpack
        self._own_at = table.own_at(row, field)
        self._start = CELL_BYTES * table.column_at(row, field)
        self._others_at = table.common_at(row, _OTHERS + field)

    @property
    def others(self) -> float:
        """What those have there that keep books of their own, as the latest report tells."""
        return self._cells[self._others_at]

    @property
    def pending(self) -> float:
        """The estimate that dispatch compares."""
        return add_up(self._unpack(self._memory, self._start)) + self._cells[self._others_at]

    def enter(self, tokens: float) -> None:
        """A request of this process was sent there."""
        self.own += tokens
        self._cells[self._own_at] += tokens

    def close(self, tokens: float) -> None:
        """That request, or its phase, has ended."""
        self.own -= tokens
        self._cells[self._own_at] -= tokens

    def report(self, reported: float) -> float:
        """The instance's own count arrived; what is outstanding of those that keep this book."""
        here = add_up(self._unpack(self._memory, self._start))
        self._cells[self._others_at] = estimate_pending(0.0, reported, here)
        return here


class SharedQueue(Queue):
    """How fast an instance computes the prompts of all processes, each of which tells the others.

    Two that learn at the same moment may lose what one has seen; of two hundred that is little.
    """

    __slots__ = ("_cells", "_learnt_at", "_prompt_at", "_safe_token_at", "_since_at", "_token_at")

    def __init__(self, table: SharedTable, row: int) -> None:
        super().__init__()
        self._cells = table.cells
        self._since_at = table.common_at(row, _SINCE)
        self._prompt_at = table.common_at(row, _PROMPT_MS)
        self._token_at = table.common_at(row, _TOKEN_MS)
        self._safe_token_at = table.common_at(row, _SAFE_TOKEN_MS)
        self._learnt_at = tuple(table.common_at(row, _LEARNT + at) for at in range(_NUM_LEARNT))
        if not self._cells[self._learnt_at[2]]:
            self._tell()
        self.sync()

    def answer(self, tokens: float, now_ms: float, others: float = 0.0) -> float:
        """A prompt of that many tokens was answered, the next one begins; how long it took."""
        self.sync()
        self._sums = self._hear()
        ms = super().answer(tokens, now_ms, others)
        self._tell()
        return ms

    def sync(self) -> None:
        """Whoever has seen the later prompt begin is right."""
        cells = self._cells
        since_ms = cells[self._since_at]
        if self.since_ms > since_ms:
            cells[self._since_at] = self.since_ms
        else:
            self.since_ms = since_ms
        self.prompt_ms, self.token_ms = cells[self._prompt_at], cells[self._token_at]
        self.safe_token_ms = cells[self._safe_token_at]

    def count_prompts(self, tokens: float) -> float:
        """How many prompts that many tokens are."""
        return tokens * self._cells[self._learnt_at[1]] / self._cells[self._learnt_at[2]]

    def _hear(self) -> Sums:
        cells = self._cells
        a, b, c, d, e, f, g, *last = (cells[at] for at in self._learnt_at)
        return a, b, c, d, e, f, g, last[0], last[1]

    def _tell(self) -> None:
        cells = self._cells
        cells[self._since_at] = max(self.since_ms, cells[self._since_at])
        cells[self._prompt_at], cells[self._token_at] = self.prompt_ms, self.token_ms
        cells[self._safe_token_at] = self.safe_token_ms
        for at, value in zip(self._learnt_at, self._sums, strict=True):
            cells[at] = value


def add_up(tokens: tuple[float, ...]) -> float:
    """What all processes have entered; sums of fractions do not come back to nothing exactly."""
    here = sum(tokens)
    return here if here > 0.0 else 0.0
