"""Books that all processes of one gateway keep together, so that each picks as if it were the only.

Used by the directory where a gateway has several processes. A dispatch is entered in a column of
the process's own, in a memory that all share; what is pending is the sum of the columns. What is
hard: it must stay about as cheap as books of one's own, hence no lock and no message; and books
belong to one boot of an engine, which each process hears of at a time of its own, hence rows by
boot that are free again when nobody needs them.
"""

import logging

from cleave.metrics.shared_table import CELL_BYTES, SharedTable
from cleave.policy.books import NOMINAL_TOKEN_MS, NOMINAL_TOKENS, Book, Queue, estimate_pending
from cleave.router.instance import Ledger

log = logging.getLogger(__name__)

MAX_BOOTS = 4_096
"""Boots of engines at a time. All further ones share a row: each then counts as being as busy as
all of them together, and is taken last."""

FIRST, TOTAL, PENDING = 0, 1, 2
"""Common cells with what boards compare: `shared_board`."""
_SINCE, _TOKEN_MS, _LEARNT_MS, _LEARNT_TOKENS, _TURN = 3, 4, 5, 6, 7
_OTHERS = 8
"""Plus the own field: what other gateways have there, as the latest report tells any process."""
PROMPT, _RESIDENT, _REQUESTS = 0, 1, 2
"""Own cells."""
OTHER_PROMPTS, OTHER_RESIDENTS = _OTHERS + PROMPT, _OTHERS + _RESIDENT
_SPILL, _TURNS = 0, 1
"""Rows that are no boot's."""


def make_table(processes: int) -> SharedTable:
    """Before the processes are forked."""
    table = SharedTable(MAX_BOOTS, processes, own=3, common=_OTHERS + 3)
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
    """A ledger in one row of the table."""

    __slots__ = ("_cells", "_others_at", "_own", "_requests_at", "_table", "_turn_at", "row")

    def __init__(self, table: SharedTable, row: int) -> None:
        # Not the base's: it would set to nothing what siblings have written.
        self.row = row
        self._table = table
        self._cells = table.cells
        self._requests_at = table.own_at(row, _REQUESTS)
        self._others_at = table.common_at(row, _OTHERS + _REQUESTS)
        self._turn_at = table.common_at(row, _TURN)
        self._own = 0
        self.prompt = SharedBook(table, row, PROMPT)
        self.resident = SharedBook(table, row, _RESIDENT)
        self.queue = SharedQueue(table, row)
        self.heavy = 0
        self.context = 0.0
        self.running = {}

    @property
    def requests(self) -> int:
        """Of this process."""
        return self._own

    @requests.setter
    def requests(self, number: int) -> None:
        self._cells[self._requests_at] += number - self._own
        self._own = number

    @property
    def others(self) -> float:
        """Requests of other gateways, when the latest report was taken."""
        return self._cells[self._others_at]

    @others.setter
    def others(self, number: float) -> None:
        self._cells[self._others_at] = number

    @property
    def last_turn(self) -> int:
        """When any process sent something there."""
        return int(self._cells[self._turn_at])

    @last_turn.setter
    def last_turn(self, turn: int) -> None:
        self._cells[self._turn_at] = turn

    def count_requests(self) -> int:
        """Of all processes."""
        return round(sum(self._table.read(self.row, _REQUESTS)))

    def leave(self) -> None:
        """Take what is this process's off the row; what is released later changes nothing there."""
        self.requests, own = 0, self._own
        for book in (self.prompt, self.resident):
            book.close(book.own)
        if self.row != _SPILL:
            self._table.release(self.row)
        self.prompt, self.resident, self.queue = Book(), Book(), Queue()
        self._cells = memoryview(bytearray(CELL_BYTES)).cast("d")
        self._requests_at = self._others_at = self._turn_at = 0
        self._own = own


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
    def pending(self) -> float:
        """The estimate that dispatch compares."""
        return add_up(self._unpack(self._memory, self._start)) + self._cells[self._others_at]

    @pending.setter
    def pending(self, tokens: float) -> None:
        raise AttributeError(f"{tokens} cannot be set: it follows from what is entered")

    def enter(self, tokens: float) -> None:
        """A request of this process was sent there."""
        self.own += tokens
        self._cells[self._own_at] += tokens

    def close(self, tokens: float) -> None:
        """That request, or its phase, has ended."""
        self.own -= tokens
        self._cells[self._own_at] -= tokens

    def report(self, reported: float) -> None:
        """The instance's own count arrived."""
        here = add_up(self._unpack(self._memory, self._start))
        self._cells[self._others_at] = estimate_pending(0.0, reported, here)


def add_up(tokens: tuple[float, ...]) -> float:
    """What all processes have entered; sums of fractions do not come back to nothing exactly."""
    here = sum(tokens)
    return here if here > 0.0 else 0.0


class SharedQueue(Queue):
    """How fast an instance computes the prompts of all processes, each of which tells the others.

    Two that learn at the same moment may lose what one has seen; of two hundred that is little.
    """

    __slots__ = ("_cells", "_learnt_at", "_since_at", "_token_at", "_tokens_at")

    def __init__(self, table: SharedTable, row: int) -> None:
        self._cells = table.cells
        self._since_at = table.common_at(row, _SINCE)
        self._token_at = table.common_at(row, _TOKEN_MS)
        self._learnt_at = table.common_at(row, _LEARNT_MS)
        self._tokens_at = table.common_at(row, _LEARNT_TOKENS)
        if not self._learnt_tokens:
            self._learnt_ms = NOMINAL_TOKEN_MS * NOMINAL_TOKENS
            self._learnt_tokens = NOMINAL_TOKENS
            self.token_ms = NOMINAL_TOKEN_MS

    @property
    def since_ms(self) -> float:
        """When the first prompt in the queue began."""
        return self._cells[self._since_at]

    @since_ms.setter
    def since_ms(self, ms: float) -> None:
        self._cells[self._since_at] = ms

    @property
    def token_ms(self) -> float:
        """Time for a token of a prompt."""
        return self._cells[self._token_at]

    @token_ms.setter
    def token_ms(self, ms: float) -> None:
        self._cells[self._token_at] = ms

    @property
    def _learnt_ms(self) -> float:
        return self._cells[self._learnt_at]

    @_learnt_ms.setter
    def _learnt_ms(self, ms: float) -> None:
        self._cells[self._learnt_at] = ms

    @property
    def _learnt_tokens(self) -> float:
        return self._cells[self._tokens_at]

    @_learnt_tokens.setter
    def _learnt_tokens(self, tokens: float) -> None:
        self._cells[self._tokens_at] = tokens
