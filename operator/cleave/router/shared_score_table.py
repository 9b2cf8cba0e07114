"""The board of one of several processes of a gateway, which share their books.

Used by the directory. A pick begins by gathering what all of them have done: few instances are all
scored anew from the shared books. What is hard: many would take too long, and most of them are as
they were; so whoever changes one says so, and only those are scored.
Whether an instance is open and how well it is heard is each process's own view.
"""

from cleave.api.enums import DispatchPolicy
from cleave.router.instance import Instance
from cleave.router.score_table import Board
from cleave.router.shared_load import SharedBooks

FEW_SHARED = 12
"""Up to so many instances scoring all of them takes less than finding those that have changed."""


class SharedBoard(Board):
    """Of few instances."""

    __slots__ = ("_is_fresh",)

    def __init__(self, instances: list[Instance], policy: DispatchPolicy) -> None:
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
    """Of many."""

    __slots__ = ("_changed", "_follower", "_log", "_rows", "_slots")

    def __init__(
        self, instances: list[Instance], policy: DispatchPolicy, books: SharedBooks
    ) -> None:
        self._log = books.table.log
        self._follower = self._log.follow()
        self._rows = [books.find_row(each.ledger) for each in instances]
        self._slots: dict[int, list[int]] = {}
        for slot, row in enumerate(self._rows):
            self._slots.setdefault(row, []).append(slot)
        self._changed: set[int] = set()
        super().__init__(instances, policy)

    def gather(self) -> None:
        """Take in what this process and its siblings did."""
        changed = self._changed
        if not self._follower.take(changed, len(self._rows)):
            changed.update(self._rows)
        if changed:
            for row in changed:
                for slot in self._slots.get(row, ()):
                    super().update(slot)
            changed.clear()

    def find_shortest_queue(self) -> float:
        """As it is now."""
        self.gather()
        return super().find_shortest_queue()

    def is_overtaken(self, slot: int) -> bool:
        """Whether a sibling has sent something there since the scores were gathered."""
        before = self.pending_prompt.find(slot)
        self.gather()
        return self.pending_prompt.find(slot) > before

    def update(self, slot: int) -> None:
        """Tell siblings what has changed, and that it has; it is scored once somebody picks."""
        self.instances[slot].ledger.tell()
        row = self._rows[slot]
        self._changed.add(row)
        self._log.note(row)


def share_board(instances: list[Instance], policy: DispatchPolicy, books: SharedBooks) -> Board:
    """One for so many; `books`: those of the instances.

    A process that has just heard of one instance more than its siblings may not be told by them
    what they change, until they hear of it too or a report comes.
    """
    is_few = len(instances) <= FEW_SHARED
    board = SharedBoard(instances, policy) if is_few else LongSharedBoard(instances, policy, books)
    board.gather()
    return board
