"""A board that all processes of a gateway score together.

Used by the directory where a gateway has several processes. A pick begins by gathering what they
all have entered. Few instances are scored then, from the books that all share. Many would take too
long: of those whoever changes the books of one scores it at once, in cells that all read. What is
hard: two processes may score one instance at the same time, one of them without what the other has
just entered; so each looks again at what it scored by, and the last to write has seen it all.
Whether an instance is open and how well it is heard is each process's own view.
"""

import numpy as np

from cleave.metrics.shared_table import CELL_BYTES, SharedTable
from cleave.policy.dispatch import STALE, Policy, Scores
from cleave.router.board import USES, Board, score
from cleave.router.instance import Contact, Instance
from cleave.router.line import LongLine
from cleave.router.shared_books import FIRST, PENDING, TOTAL, SharedBooks, SharedLedger

_STALE = Contact.STALE
FEW_SHARED = 12
"""Up to so many instances scoring all of them for a pick takes less than scoring each change."""
_ATTEMPTS = 3
"""To score what others change meanwhile; the next change or report scores it anew."""


class SharedBoard(Board):
    """Of few instances."""

    __slots__ = ("_is_fresh",)

    def __init__(self, instances: list[Instance], policy: Policy) -> None:
        self._is_fresh = False
        super().__init__(instances, policy)

    def gather(self) -> None:
        """Take in what the siblings did; once for the door and the pick that follows."""
        if self._is_fresh:
            self._is_fresh = False
            return
        for slot in range(len(self.instances)):
            super().update(slot)

    def find_shortest_queue(self) -> float:
        """As it is now."""
        self._is_fresh = False
        self.gather()
        self._is_fresh = True
        return super().find_shortest_queue()

    def update(self, slot: int) -> None:
        """Tell siblings what has changed; it is scored once somebody picks."""
        self.instances[slot].ledger.tell()
        self._is_fresh = False


class LongSharedBoard(Board):
    """Of many: its lines hold what was gathered last."""

    __slots__ = (
        "_all",
        "_cells",
        "_common_at",
        "_doubts",
        "_gathered",
        "_masks",
        "_memory",
        "_own",
        "_sources",
        "_weights",
    )

    def __init__(self, instances: list[Instance], policy: Policy, books: SharedBooks) -> None:
        table, rows = books.table, [books.find_row(each.ledger) for each in instances]
        self._memory, self._all, self._cells = table.memory, table.all, table.cells
        self._own = [
            slice(CELL_BYTES * table.cell_at(row, 0, 0), CELL_BYTES * table.common_at(row, 0))
            for row in rows
        ]
        self._common_at = [table.common_at(row, 0) for row in rows]
        self._doubts = [0.0] * len(instances)
        self._masks, self._weights = np.zeros((1, len(instances))), np.zeros(1)
        super().__init__(instances, policy)
        self._gather_from(table, rows)

    def gather(self) -> None:
        """Take in what the siblings did."""
        # Without a mode take() copies once more.
        self._all.take(self._sources, out=self._gathered, mode="clip")
        np.add(self._gathered, self._masks, out=self._gathered)

    def find_shortest_queue(self) -> float:
        """As it is now."""
        self.gather()
        return super().find_shortest_queue()

    def is_overtaken(self, slot: int) -> bool:
        """Whether a sibling has sent something there since the scores were gathered."""
        pending = self._cells[self._common_at[slot] + PENDING] + self._doubts[slot]
        return pending != self.pending_prompt.find(slot)

    def update(self, slot: int) -> None:
        """Score one instance anew from the books of all processes."""
        instance = self.instances[slot]
        ledger = instance.ledger
        assert isinstance(ledger, SharedLedger)
        self._look_closely(slot, instance)
        doubt = STALE if instance.contact is _STALE else 0.0
        if doubt != self._doubts[slot]:
            self._masks[:, slot] += (doubt - self._doubts[slot]) * self._weights
            self._doubts[slot] = doubt
        ledger.tell()
        memory, own = self._memory, self._own[slot]
        cells, at = self._cells, self._common_at[slot]
        now = memory[own]
        for _ in range(_ATTEMPTS):
            before = now
            prompt, prompts, resident = ledger.count_pending()
            first, total = score(self._way, ledger, prompt, prompts, resident, 0.0)
            cells[at + FIRST], cells[at + TOTAL], cells[at + PENDING] = first, total, prompt
            now = memory[own]
            if now == before:
                break

    def _gather_from(self, table: SharedTable, rows: list[int]) -> None:
        used = {id(line): line for use in USES if (line := getattr(self, use)).size}
        kinds = [FIRST if line is self.prefill else TOTAL for line in used.values()] + [PENDING]
        self._sources = np.array([[table.common_at(row, kind) for row in rows] for kind in kinds])
        # As in `score`: no clock may show as much.
        self._weights = np.where(np.array(kinds) == FIRST, STALE, 1.0)
        self._masks = self._find_masks([*used]) + np.outer(self._weights, self._doubts)
        self._gathered = np.empty(self._sources.shape)
        gathered = {each: LongLine(self._gathered[at]) for at, each in enumerate(used)}
        for use in USES:
            line = getattr(self, use)
            setattr(self, use, gathered.get(id(line), line))
        self.pending_prompt = LongLine(self._gathered[-1])

    def _find_masks(self, used: list[int]) -> Scores:
        """+inf where an instance is closed for a use; the last one is of what has no use."""
        masks = np.full((len(used) + 1, len(self.instances)), np.inf)
        masks[-1] = 0.0
        for slot, (by_prompt, by_all) in enumerate(self._lines):
            for line in (by_prompt, *by_all):
                if line is not None:
                    masks[used.index(id(line)), slot] = 0.0
        return masks


def share_board(instances: list[Instance], policy: Policy, books: SharedBooks) -> Board:
    """One for so many; `books`: those of the instances.

    A process that has just heard of one instance more than its siblings may look at scores that
    they have not entered, until they hear of it too or a report comes.
    """
    is_few = len(instances) <= FEW_SHARED
    board = SharedBoard(instances, policy) if is_few else LongSharedBoard(instances, policy, books)
    board.gather()
    return board
