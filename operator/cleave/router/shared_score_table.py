"""The score table of one of several processes of a gateway, which share load accounting.

Used by the registry. A pick begins by gathering what all of them have done: few instances are all
scored anew from the shared load. What is hard: many would take too long, and most of them are as
they were; so whoever changes one says so, and only those are scored.
Whether an instance is open and how well it is heard is each process's own view.
"""

from cleave.api.enums import DispatchPolicy
from cleave.router.instance import RoutedInstance
from cleave.router.score_table import ScoreTable
from cleave.router.shared_load import SharedLoad

MAX_RESCORED_INSTANCES = 12
"""Up to so many instances scoring all of them takes less than finding those that have changed."""


class SharedScoreTable(ScoreTable):
    """Of few instances."""

    __slots__ = ("_is_fresh",)

    def __init__(self, instances: list[RoutedInstance], policy: DispatchPolicy) -> None:
        self._is_fresh = False
        super().__init__(instances, policy)

    def refresh(self) -> None:
        """Take in what the siblings did; once for the door and the pick that follows."""
        if self._is_fresh:
            self._is_fresh = False
            return
        for slot in range(len(self.instances)):
            super().update(slot)

    def find_shortest_queue(self) -> float:
        """As it is now."""
        self._is_fresh = False
        self.refresh()
        self._is_fresh = True
        return super().find_shortest_queue()

    def update(self, slot: int) -> None:
        """Tell siblings what has changed; it is scored once somebody picks."""
        self.instances[slot].in_flight.publish()
        self._is_fresh = False


class ChangeLogScoreTable(ScoreTable):
    """Of many."""

    __slots__ = ("_change_log", "_changed", "_reader", "_rows", "_slots")

    def __init__(
        self, instances: list[RoutedInstance], policy: DispatchPolicy, shared_load: SharedLoad
    ) -> None:
        self._change_log = shared_load.table.change_log
        self._reader = self._change_log.open_reader()
        self._rows = [shared_load.find_row(each.in_flight) for each in instances]
        self._slots: dict[int, list[int]] = {}
        for slot, row in enumerate(self._rows):
            self._slots.setdefault(row, []).append(slot)
        self._changed: set[int] = set()
        super().__init__(instances, policy)

    def refresh(self) -> None:
        """Take in what this process and its siblings did."""
        changed = self._changed
        if not self._reader.drain(changed, len(self._rows)):
            changed.update(self._rows)
        if changed:
            for row in changed:
                for slot in self._slots.get(row, ()):
                    super().update(slot)
            changed.clear()

    def find_shortest_queue(self) -> float:
        """As it is now."""
        self.refresh()
        return super().find_shortest_queue()

    def has_lost_race(self, slot: int) -> bool:
        """Whether a sibling has sent something there since the scores were gathered."""
        before = self.pending_prompt.get_score(slot)
        self.refresh()
        return self.pending_prompt.get_score(slot) > before

    def update(self, slot: int) -> None:
        """Tell siblings what has changed, and that it has; it is scored once somebody picks."""
        self.instances[slot].in_flight.publish()
        row = self._rows[slot]
        self._changed.add(row)
        self._change_log.record(row)


def build_shared_table(
    instances: list[RoutedInstance], policy: DispatchPolicy, shared_load: SharedLoad
) -> ScoreTable:
    """One for so many; `shared_load`: those of the instances.

    A process that has just heard of one instance more than its siblings may not be told by them
    what they change, until they hear of it too or a report comes.
    """
    is_few = len(instances) <= MAX_RESCORED_INSTANCES
    table = (
        SharedScoreTable(instances, policy)
        if is_few
        else ChangeLogScoreTable(instances, policy, shared_load)
    )
    table.refresh()
    return table
