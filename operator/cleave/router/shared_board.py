"""A board that all processes of a gateway score together.

Used by the directory where a gateway has several processes. Whoever changes the books of an
instance scores it at once, in cells that all read; a pick begins by gathering the scores of its
board, two operations over arrays however much the siblings have done meanwhile. What is hard: two
processes may score one instance at the same time, one of them without what the other has just
entered; so each looks again at what it scored by, and the last to write has seen it all. Whether an
instance is open and how well it is heard is each process's own view, which is added here.
"""

import struct

import numpy as np

from cleave.metrics.shared_table import CELL_BYTES
from cleave.policy.dispatch import STALE, Policy, Scores
from cleave.router.board import USES, Board
from cleave.router.instance import Contact, Instance
from cleave.router.shared_books import (
    FIRST,
    OTHER_PROMPTS,
    OTHER_RESIDENTS,
    OWN,
    PENDING,
    PROMPT,
    TOTAL,
    SharedBooks,
    add_up,
)

_STALE = Contact.STALE
_ATTEMPTS = 3
"""To score what others change meanwhile; the next change or report scores it anew."""


class SharedBoard(Board):
    """Its arrays hold what was gathered last."""

    __slots__ = (
        "_at",
        "_cells",
        "_common",
        "_count",
        "_doubts",
        "_gathered",
        "_look",
        "_masks",
        "_memory",
        "_sources",
        "_starts",
        "_weights",
    )

    def __init__(self, instances: list[Instance], policy: Policy, books: SharedBooks) -> None:
        table, rows = books.table, [books.find_row(each.ledger) for each in instances]
        self._cells = table.cells
        fields = FIRST, TOTAL, PENDING, OTHER_PROMPTS, OTHER_RESIDENTS
        self._at = [tuple(table.common_at(row, field) for field in fields) for row in rows]
        self._memory, self._count = table.memory, table.processes
        # The columns of a row are side by side, tokens first: one look at all.
        self._look = struct.Struct(f"{OWN * table.processes}d").unpack_from
        self._starts = [CELL_BYTES * table.column_at(row, PROMPT) for row in rows]
        self._doubts = [0.0] * len(instances)
        self._masks, self._weights = np.zeros((1, len(instances))), np.zeros(1)
        super().__init__(instances, policy)
        used = [use for use in USES if getattr(self, use).size]
        kinds = [FIRST if use == "prefill" else TOTAL for use in used] + [PENDING]
        self._common = table.common.reshape(-1)
        self._sources = np.array(kinds)[:, None] * table.rows + np.array(rows, np.int64)
        # As in `score_wait`: no clock may show as much.
        self._weights = np.where(np.array(kinds) == FIRST, STALE, 1.0)
        self._masks = self._find_masks(used) + np.outer(self._weights, self._doubts)
        self._gathered = np.empty(self._sources.shape)
        for at, use in enumerate(used):
            setattr(self, use, self._gathered[at])
        self.pending_prompt = self._gathered[-1]
        self.gather()

    def gather(self) -> None:
        """Take in what the siblings did."""
        # Without a mode take() copies once more.
        self._common.take(self._sources, out=self._gathered, mode="clip")
        np.add(self._gathered, self._masks, out=self._gathered)

    def is_overtaken(self, slot: int) -> bool:
        """Whether a sibling has sent prompts there, or got some done, since the last gathering."""
        pending = self.instances[slot].ledger.prompt.pending + self._doubts[slot]
        return pending != self.pending_prompt.item(slot)

    def update(self, slot: int) -> None:
        """Score one instance anew from the books of all processes."""
        instance = self.instances[slot]
        ledger = instance.ledger
        if instance.num_routers > 1 or self.is_shared:
            self._share_out(slot, instance)
        doubt = STALE if instance.contact is _STALE else 0.0
        if doubt != self._doubts[slot]:
            self._masks[:, slot] += (doubt - self._doubts[slot]) * self._weights
            self._doubts[slot] = doubt
        if self._compares_more:
            self._measure(slot, instance)
        cells = self._cells
        first_at, total_at, pending_at, prompt_at, resident_at = self._at[slot]
        ledger.sync()
        look, memory, start, count = self._look, self._memory, self._starts[slot], self._count
        now = look(memory, start)
        for _ in range(_ATTEMPTS):
            seen = now
            prompt = add_up(seen[:count]) + cells[prompt_at]
            resident = add_up(seen[count : 2 * count]) + cells[resident_at]
            cells[first_at], cells[total_at] = self._score(ledger, prompt, resident, 0.0)
            cells[pending_at] = prompt
            now = look(memory, start)
            if now == seen:
                break

    def _find_masks(self, used: list[str]) -> Scores:
        """+inf where an instance is closed for a use; the last line is of what has no use."""
        masks = np.full((len(used) + 1, len(self.instances)), np.inf)
        masks[-1] = 0.0
        lines = {id(getattr(self, use)): at for at, use in enumerate(used)}
        for slot, both in enumerate(self._uses):
            for scores in (*both[0], *both[1]):
                masks[lines[id(scores)], slot] = 0.0
        return masks
