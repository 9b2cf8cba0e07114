"""A board that all processes of a gateway score together.

Used by the directory where a gateway has several processes. Whoever changes the books of an
instance scores it at once, in cells that all read; a pick begins by gathering the scores of its
board: few one by one, many in two operations over arrays. What is hard: two processes may score
one instance at the same time, one of them without what the other has just entered; so each looks
again at what it scored by, and the last to write has seen it all. Whether an instance is open and
how well it is heard is each process's own view, which is added here.
"""

import math
import struct

import numpy as np

from cleave.metrics.shared_table import CELL_BYTES, SharedTable
from cleave.policy.dispatch import STALE, Policy, Scores
from cleave.router.board import USES, Board, score, view
from cleave.router.instance import Contact, Instance
from cleave.router.shared_books import (
    FIRST,
    PENDING,
    TOTAL,
    SharedBooks,
    SharedLedger,
)

_STALE = Contact.STALE
_FEW = 8
"""Up to so many instances gathering by array takes longer than one after the other."""
_ATTEMPTS = 3
"""To score what others change meanwhile; the next change or report scores it anew."""


class SharedBoard(Board):
    """Its arrays hold what was gathered last."""

    __slots__ = (
        "_all",
        "_cells",
        "_common_at",
        "_doubts",
        "_gathered",
        "_is_small",
        "_masks",
        "_memory",
        "_own",
        "_read",
        "_sources",
        "_weights",
    )

    def __init__(self, instances: list[Instance], policy: Policy, books: SharedBooks) -> None:
        table, rows = books.table, [books.find_row(each.ledger) for each in instances]
        self._memory, self._all, self._cells = table.memory, table.all, table.cells
        self._own = [
            slice(CELL_BYTES * table.block_at(row, 0), CELL_BYTES * table.common_at(row, 0))
            for row in rows
        ]
        self._common_at = [table.common_at(row, 0) for row in rows]
        self._read = struct.Struct("3d").unpack_from
        self._doubts = [0.0] * len(instances)
        self._is_small = len(instances) <= _FEW
        self._masks, self._weights = np.zeros((1, len(instances))), np.zeros(1)
        super().__init__(instances, policy)
        if not self._is_small:
            self._gather_at_once(table, rows)
        self.gather()

    def gather(self) -> None:
        """Take in what the siblings did."""
        if not self._is_small:
            # Without a mode take() copies once more.
            self._all.take(self._sources, out=self._gathered, mode="clip")
            np.add(self._gathered, self._masks, out=self._gathered)
            return
        for slot, at in enumerate(self._common_at):
            first, total, pending = self._read(self._memory, CELL_BYTES * (at + FIRST))
            if doubt := self._doubts[slot]:
                first, total, pending = first + doubt * STALE, total + doubt, pending + doubt
            self._enter(slot, first, total, pending)

    def find_shortest_queue(self) -> float:
        """As it is now."""
        if not self._is_small:
            self.gather()
            return super().find_shortest_queue()
        least = math.inf
        for slot in self.computing:
            least = min(least, self._cells[self._common_at[slot] + PENDING] + self._doubts[slot])
        return least

    def is_overtaken(self, slot: int) -> bool:
        """Whether a sibling has sent prompts there, or got some done, since the last gathering."""
        pending = self._cells[self._common_at[slot] + PENDING] + self._doubts[slot]
        return pending != self._prompt_cells[slot]

    def update(self, slot: int) -> None:
        """Score one instance anew from the books of all processes."""
        instance = self.instances[slot]
        ledger = instance.ledger
        assert isinstance(ledger, SharedLedger)
        if instance.num_routers > 1 or self.is_shared:
            self._share_out(slot, instance)
        doubt = STALE if instance.contact is _STALE else 0.0
        if doubt != self._doubts[slot]:
            self._masks[:, slot] += (doubt - self._doubts[slot]) * self._weights
            self._doubts[slot] = doubt
        if self._compares_more:
            self._measure(slot, instance)
        ledger.tell()
        memory, own = self._memory, self._own[slot]
        cells, at = self._cells, self._common_at[slot]
        now = memory[own]
        for _ in range(_ATTEMPTS):
            before = now
            prompt, prompts, resident = ledger.count_pending(ledger.look())
            first, total = score(self._way, ledger, prompt, prompts, resident, 0.0)
            cells[at + FIRST], cells[at + TOTAL], cells[at + PENDING] = first, total, prompt
            now = memory[own]
            if now == before:
                break

    def _gather_at_once(self, table: SharedTable, rows: list[int]) -> None:
        """With arrays: nothing for few instances, and less than each by itself for many."""
        used = [use for use in USES if getattr(self, use).size]
        kinds = [FIRST if use == "prefill" else TOTAL for use in used] + [PENDING]
        self._sources = np.array([[table.common_at(row, kind) for row in rows] for kind in kinds])
        # As in `score`: no clock may show as much.
        self._weights = np.where(np.array(kinds) == FIRST, STALE, 1.0)
        self._masks = self._find_masks(used) + np.outer(self._weights, self._doubts)
        self._gathered = np.empty(self._sources.shape)
        for at, use in enumerate(used):
            setattr(self, use, self._gathered[at])
        self.pending_prompt = self._gathered[-1]
        self._prompt_cells = view(self.pending_prompt)

    def _find_masks(self, used: list[str]) -> Scores:
        """+inf where an instance is closed for a use; the last line is of what has no use."""
        masks = np.full((len(used) + 1, len(self.instances)), np.inf)
        masks[-1] = 0.0
        lines = {id(getattr(self, use)): at for at, use in enumerate(used)}
        for slot, both in enumerate(self._uses):
            for scores in (*both[0], *both[1]):
                masks[lines[id(scores)], slot] = 0.0
        return masks
