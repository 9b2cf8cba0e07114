"""Score tables of gateway processes that share load accounting.

Used by the registry. Each pick first loads the changes of all processes: with few instances, all
are rescored from the shared load. What is hard: with many instances that takes too long, and most
have not changed; so each process records its changes in a change log, and only those are rescored.
Each process decides separately whether an instance is open or stale.
"""

from cleave.api.enums import DispatchPolicy
from cleave.router.instance import RoutedInstance, Target
from cleave.router.score_table import ScoreTable
from cleave.router.shared_load import SharedLoad

MAX_RESCORED_INSTANCES = 12
"""Number of instances up to which rescoring all is faster than finding those that changed."""


class SharedScoreTable(ScoreTable):
    """A table of few instances, which are all rescored."""

    __slots__ = ("_is_fresh",)

    def __init__(self, instances: list[RoutedInstance], policy: DispatchPolicy) -> None:
        self._is_fresh = False
        super().__init__(instances, policy)

    def refresh(self) -> None:
        """Load changes of other processes; once for admission and the pick that follows."""
        if self._is_fresh:
            self._is_fresh = False
            return
        for slot in range(len(self.instances)):
            super().update(slot)

    def find_shortest_queue(self) -> float:
        """As in the base class, with the changes of other processes."""
        self._is_fresh = False
        self.refresh()
        self._is_fresh = True
        return super().find_shortest_queue()

    def update_uses(self, slot: int, before: Target) -> None:
        """As in the base class."""
        super().update_uses(slot, before)
        self._is_fresh = False

    def update(self, slot: int) -> None:
        """Publish changes of an instance's load; the next `refresh` rescores it."""
        self.instances[slot].in_flight.publish()
        self._is_fresh = False


class ChangeLogScoreTable(ScoreTable):
    """A table of many instances, of which only those in the change log are rescored."""

    __slots__ = ("_change_log", "_changed", "_reader", "_rows", "_shared_load", "_slots")

    def __init__(
        self, instances: list[RoutedInstance], policy: DispatchPolicy, shared_load: SharedLoad
    ) -> None:
        self._shared_load = shared_load
        self._change_log = shared_load.table.change_log
        self._reader = self._change_log.open_reader()
        self._rows = [shared_load.find_row(each.in_flight) for each in instances]
        self._slots: dict[int, list[int]] = {}
        for slot, row in enumerate(self._rows):
            self._slots.setdefault(row, []).append(slot)
        self._changed: set[int] = set()
        super().__init__(instances, policy)

    def update_uses(self, slot: int, before: Target) -> None:
        """As in the base class; a new boot has another row."""
        row = self._shared_load.find_row(self.instances[slot].in_flight)
        self._slots[self._rows[slot]].remove(slot)
        self._slots.setdefault(row, []).append(slot)
        self._rows[slot] = row
        super().update_uses(slot, before)

    def refresh(self) -> None:
        """Rescore the instances that this or another process has changed."""
        changed = self._changed
        if not self._reader.drain(changed, len(self._rows)):
            changed.update(self._rows)
        if changed:
            for row in changed:
                for slot in self._slots.get(row, ()):
                    super().update(slot)
            changed.clear()

    def find_shortest_queue(self) -> float:
        """As in the base class, with the changes of other processes."""
        self.refresh()
        return super().find_shortest_queue()

    def has_lost_race(self, slot: int) -> bool:
        """Whether another process has sent a request there since the last `refresh`."""
        before = self.pending_prompt.get_score(slot)
        self.refresh()
        return self.pending_prompt.get_score(slot) > before

    def update(self, slot: int) -> None:
        """Publish and log changes of an instance's load; the next `refresh` rescores it."""
        self.instances[slot].in_flight.publish()
        row = self._rows[slot]
        self._changed.add(row)
        self._change_log.record(row)


def build_shared_table(
    instances: list[RoutedInstance], policy: DispatchPolicy, shared_load: SharedLoad
) -> ScoreTable:
    """The score table for this number of instances; `shared_load`: their load accounting.
    A process that discovers an instance before the others may miss changes of theirs until they
    discover it too or a load report arrives."""
    table: ScoreTable
    if len(instances) <= MAX_RESCORED_INSTANCES:
        table = SharedScoreTable(instances, policy)
    else:
        table = ChangeLogScoreTable(instances, policy, shared_load)
    table.refresh()
    return table
