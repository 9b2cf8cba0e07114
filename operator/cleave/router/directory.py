"""Every instance the router knows, by name, and the boards to pick from, by model.

Fed by the fleet (which does the I/O), read by the router. What is hard: a name may move (a pod is
replaced and its successor registers from another address), so what an address says or stops saying
counts only while that address is the one that holds the name.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Collection

from cleave.api.enums import DispatchPolicy
from cleave.policy.affinity import to_key
from cleave.router.board import Board
from cleave.router.errors import NoInstance, RouterError, UnknownModel
from cleave.router.instance import Contact, Instance
from cleave.router.shared_board import share_board
from cleave.router.shared_books import SharedBooks
from cleave.rpc.v1 import agent_pb2

STALE_S = 2.0
"""An instance that has not been heard for so long comes after all others."""
SILENCE_S = 10.0
"""One that has not been heard for so long takes no new requests."""


@dataclasses.dataclass(slots=True)
class Model:
    """The boards of one model or adapter, one per deployment and revision."""

    boards: list[Board]
    instances: list[Instance]
    base: str = ""
    """Of an adapter: the model that it changes; empty: this is none."""
    adapter: int | None = None
    """The key of an adapter; None: this is none."""
    is_crowded: bool = False
    """Whether instances have more adapters than they hold at a time."""


class Directory:
    """Instances by name, models by the name clients ask for."""

    def __init__(
        self,
        policy: DispatchPolicy = DispatchPolicy.SHORTEST_WAIT,
        books: SharedBooks | None = None,
    ) -> None:
        """`books`: where several processes dispatch as one."""
        self.policy = policy
        """What boards score by."""
        self.books = books
        self.instances: dict[str, Instance] = {}
        self.models: dict[str, Model] = {}
        self.known: set[str] = set()
        """Names of all models so far, those that are away as well."""
        self._names: dict[str, str] = {}

    def hear(self, agent: str, event: agent_pb2.WatchEvent, now: float) -> None:
        """Take in what the agent at this address says; `now` in seconds.

        Raises ValueError when it cannot be understood; nothing of it is taken in then.
        """
        if event.HasField("registration"):
            self._register(agent, event.registration, now)
        elif event.HasField("load"):
            self._report(agent, event.load, now)

    def lose(self, agent: str) -> None:
        """The connection to an agent ended: no new requests until it is heard again."""
        instance = self._held_by(agent)
        if instance is not None and self._note_contact(instance, Contact.LOST):
            self._rebuild()

    def forget(self, agent: str) -> None:
        """The agent is gone for good, and its instance too, unless another address took over."""
        instance = self._held_by(agent)
        self._names.pop(agent, None)
        if instance is not None:
            self._drop(instance)
            self._rebuild()

    def note_silence(self, now: float) -> None:
        """Doubt what has not been heard for STALE_S, close what has not for SILENCE_S."""
        closed = False
        for instance in self.instances.values():
            age = now - instance.heard_at
            if age > STALE_S and instance.contact is not Contact.LOST:
                contact = Contact.SILENT if age > SILENCE_S else Contact.STALE
                closed |= self._note_contact(instance, contact)
        if closed:
            self._rebuild()

    def refresh(self, instance: Instance) -> None:
        """Score an instance whose books changed."""
        if instance.board is not None:
            instance.board.update(instance.slot)
        else:
            instance.ledger.sync()

    @property
    def has_answers(self) -> bool:
        """Whether any engine has answered yet: until then nobody knows which adapters there are."""
        return any(map(_has_answered, self.instances.values()))

    def miss(self, model: str) -> RouterError:
        """Why a model is not there: a fleet that is away may have had it."""
        if self.has_answers:
            return UnknownModel(model)
        return NoInstance("no instance has answered so far")

    def find_max_model_len(self, model: str) -> int:
        """Tokens that a request may have on every instance of a model; 0: not known."""
        known = self.models.get(model)
        stated = [i.registration.max_model_len for i in known.instances] if known else []
        return min(stated, default=0)

    def _register(self, agent: str, registration: agent_pb2.Registration, now: float) -> None:
        previous = self._held_by(agent)
        instance = self.instances.get(registration.instance)
        # First what may raise.
        if instance is None:
            instance = (
                Instance(agent, registration, now)
                if self.books is None
                else Instance(agent, registration, now, self.books.open)
            )
            self.instances[registration.instance] = instance
        else:
            instance.register(agent, registration)
        if previous is not None and previous is not instance:
            self._drop(previous)
        self._names[agent] = registration.instance
        instance.heard_at, instance.contact = now, Contact.HEARD
        self._rebuild()

    def _report(self, agent: str, load: agent_pb2.LoadReport, now: float) -> None:
        instance = self._held_by(agent)
        if instance is None or not instance.report(load, now):
            return
        instance.heard_at = now
        if self._note_contact(instance, Contact.HEARD):
            self._rebuild()
        else:
            self.refresh(instance)

    def _drop(self, instance: Instance) -> None:
        del self.instances[instance.name]
        instance.board = None
        instance.ledger.leave()

    def _held_by(self, agent: str) -> Instance | None:
        instance = self.instances.get(self._names.get(agent, ""))
        return instance if instance is not None and instance.agent == agent else None

    def _note_contact(self, instance: Instance, contact: Contact) -> bool:
        """Whether it opens or closes the instance; all else it changes is the score."""
        if instance.contact is contact:
            return False
        selectable, instance.contact = instance.selectable, contact
        self.refresh(instance)
        return instance.selectable is not selectable

    def _rebuild(self) -> None:
        groups: dict[tuple[str, str, str], list[Instance]] = defaultdict(list)
        for name in sorted(self.instances):
            instance = self.instances[name]
            stated = instance.registration
            groups[stated.model, stated.deployment, stated.revision].append(instance)
        adapters: dict[str, list[tuple[str, Board]]] = defaultdict(list)
        self.models = {}
        for (model, _, _), instances in sorted(groups.items()):
            board = (
                Board(instances, self.policy)
                if self.books is None
                else share_board(instances, self.policy, self.books)
            )
            known = self.models.setdefault(model, Model([], []))
            known.boards.append(board)
            known.instances.extend(instances)
            for slot, instance in enumerate(instances):
                instance.board, instance.slot = board, slot
            for name in _find_adapters(instances):
                adapters[name].append((model, board))
        for name, served in adapters.items():
            if name not in self.models:
                boards = [board for _, board in served]
                all_of_them = [instance for board in boards for instance in board.instances]
                crowded = any(map(_is_crowded, all_of_them))
                self.models[name] = Model(boards, all_of_them, served[0][0], to_key(name), crowded)
        self.known.update(self.models)


def _find_adapters(instances: Collection[Instance]) -> Collection[str]:
    """What all of them serve, as far as they know: one that starts for the first time does not."""
    told = [set(each.registration.adapters) for each in instances if _has_answered(each)]
    return sorted(set.intersection(*told)) if told else ()


def _is_crowded(instance: Instance) -> bool:
    return len(instance.registration.adapters) > instance.registration.max_adapters


def _has_answered(instance: Instance) -> bool:
    """Whether its engine has: in this life, or in one before and said which adapters it has."""
    stated = instance.registration
    return stated.state != agent_pb2.STATE_STARTING or bool(stated.adapters)
