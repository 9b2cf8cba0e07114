"""All instances that the router knows, by name, and their score tables, by model.

Updated by `router.agent_watcher` (which does the I/O), read by the router. What is hard: a name may
move to another address (a pod is replaced and its successor registers); events from an address, and
its disconnection, count only while the instance of that name is registered from this address.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Collection

from cleave.api.enums import DispatchPolicy
from cleave.policy.session_affinity import to_key
from cleave.router.errors import NoInstance, RouterError, UnknownModel
from cleave.router.instance import Connectivity, RoutedInstance
from cleave.router.pair_proofs import PairResult
from cleave.router.runtime_adapters import AdapterPlacement, choose_placements
from cleave.router.score_table import ScoreTable
from cleave.router.shared_load import SharedLoad
from cleave.router.shared_score_table import build_shared_table
from cleave.rpc.v1 import agent_pb2

STALE_S = 2.0
"""An instance without events for this time is picked only if no other one is available."""
MAX_KNOWN_MODELS = 4_096
SILENCE_S = 10.0
"""An instance without events for this time takes no new requests."""


@dataclasses.dataclass(slots=True)
class ServedModel:
    """A model or adapter with its score tables, one per deployment and revision."""

    score_tables: list[ScoreTable]
    instances: list[RoutedInstance]
    base: str = ""
    """Base model of an adapter; empty: this is not an adapter."""
    adapter: int | None = None
    """Key of an adapter; None: this is not an adapter."""
    is_crowded: bool = False
    """Whether instances serve more adapters than they can hold in memory at a time."""
    engine_name: str = ""
    """By which engines know an adapter that was loaded at run time; empty: by the model's name."""
    lacking: frozenset[str] = frozenset()
    """Instances in the score tables that have not loaded the adapter: they get none of its
    requests."""


class InstanceRegistry:
    """Instances by name, models by the name that clients request."""

    def __init__(
        self,
        policy: DispatchPolicy = DispatchPolicy.PREFIX_AWARE,
        shared_load: SharedLoad | None = None,
    ) -> None:
        """`shared_load`: accounting shared with the other processes; None: a single process."""
        self.policy = policy
        """The policy that determines the scores."""
        self.shared_load = shared_load
        self.instances: dict[str, RoutedInstance] = {}
        self.models: dict[str, ServedModel] = {}
        self.known_models: dict[str, float] = {}
        """Time of the first registration, in seconds of the callers' clock, by the name of the
        model, including those that no instance serves now: the first MAX_KNOWN_MODELS since the
        start, as each is a label of metrics that stay."""
        self._pending_adapters: frozenset[str] = frozenset()
        """Adapters that were ordered and that no instance has loaded yet."""
        self.refusals: dict[str, str] = {}
        """Why agents refuse this process's calls, by address."""
        self._names: dict[str, str] = {}
        self.latest_s = 0.0
        """Time of the latest event or sweep, in seconds of the callers' clock."""

    def on_event(self, agent: str, event: agent_pb2.WatchEvent, now: float) -> None:
        """Apply an event from the agent at this address; `now` in seconds.
        Raises ValueError when it is invalid; then nothing of it is applied."""
        self.latest_s = now
        if event.HasField("registration"):
            self._register(agent, event.registration, now)
        elif event.HasField("load"):
            self._report(agent, event.load, now)
        elif event.HasField("pairs"):
            self._update_pairs(agent, event.pairs, now)

    def on_disconnect(self, agent: str) -> None:
        """The stream of an agent ended: its instance gets no new requests until its next event."""
        instance = self._find_instance(agent)
        if instance is not None and self._set_connectivity(instance, Connectivity.DISCONNECTED):
            self._rebuild()

    def remove_agent(self, agent: str) -> None:
        """Remove an agent and its instance, unless another address has registered the instance."""
        instance = self._find_instance(agent)
        self._names.pop(agent, None)
        if instance is not None:
            self._drop(instance)
            self._rebuild()

    def update_connectivity(self, now: float) -> None:
        """Mark instances without events for STALE_S as stale, close them after SILENCE_S."""
        closed, self.latest_s = False, now
        for instance in self.instances.values():
            age = now - instance.last_event_at
            if age > STALE_S and instance.connectivity is not Connectivity.DISCONNECTED:
                connectivity = Connectivity.UNRESPONSIVE if age > SILENCE_S else Connectivity.STALE
                closed |= self._set_connectivity(instance, connectivity)
        if closed:
            self._rebuild()
        for table in self.list_tables():
            if now >= table.closed_pairs.expiry_s:
                table.update_pairs(now)

    def list_tables(self) -> list[ScoreTable]:
        """The score tables of all models; adapters have those of their base models."""
        served = self.models.values()
        return [table for each in served if not each.base for table in each.score_tables]

    def list_ranks(self, name: str) -> list[str]:
        """Names of all data-parallel ranks of the instance that `name` is a rank of; only `name` if
        it is none, or not known."""
        instance = self.instances.get(name)
        if instance is None or instance.whole == name:
            return [name]
        return [each.name for each in self.instances.values() if each.whole == instance.whole]

    def refresh(self, instance: RoutedInstance) -> None:
        """Recompute the scores of an instance whose load changed."""
        if instance.score_table is not None:
            instance.score_table.update(instance.slot)
        else:
            instance.in_flight.sync()

    @property
    def knows_adapters(self) -> bool:
        """Whether any engine has reported its adapters; before that the list is incomplete."""
        return any(map(_knows_adapters, self.instances.values()))

    def build_error(self, model: str) -> RouterError:
        """The error for an unknown model; NoInstance while the list of models is incomplete."""
        if model in self._pending_adapters:
            return NoInstance(f"no instance has loaded the adapter {model!r} yet")
        if self.knows_adapters:
            return UnknownModel(model)
        return NoInstance(f"no instance has answered so far{self.explain_refusals()}")

    def explain_refusals(self) -> str:
        """That agents refuse calls, and what to do, for the end of a sentence; empty: none does."""
        if not self.refusals:
            return ""
        address, reason = next(iter(self.refusals.items()))
        return (
            f": {len(self.refusals)} agents refuse this gateway, such as {address} ({reason}); its "
            "token or theirs has changed: restart the deployment"
        )

    def find_max_model_len(self, model: str) -> int:
        """The context length that all instances of a model support, in tokens; 0: not known."""
        served = self.models.get(model)
        lengths = [i.registration.max_model_len for i in served.instances] if served else []
        return min(lengths, default=0)

    def _register(self, agent: str, registration: agent_pb2.Registration, now: float) -> None:
        previous = self._find_instance(agent)
        instance = self.instances.get(registration.instance)
        # The part that may raise comes first, so that an invalid event changes nothing.
        if instance is None:
            instance = (
                RoutedInstance(agent, registration, now)
                if self.shared_load is None
                else RoutedInstance(agent, registration, now, self.shared_load.open)
            )
            self.instances[registration.instance] = instance
        else:
            instance.register(agent, registration, now)
        if previous is not None and previous is not instance:
            self._drop(previous)
        self._names[agent] = registration.instance
        instance.last_event_at, instance.connectivity = now, Connectivity.FRESH
        self._rebuild()

    def _report(self, agent: str, load: agent_pb2.LoadReport, now: float) -> None:
        instance = self._find_instance(agent)
        if instance is None or not instance.update_load(load, now):
            return
        instance.last_event_at = now
        if self._set_connectivity(instance, Connectivity.FRESH):
            self._rebuild()
        else:
            self.refresh(instance)

    def record_pair(
        self, decode: RoutedInstance, boot_id: str, result: PairResult, now: float
    ) -> None:
        """Apply the result of a handoff from the prefill engine `boot_id`."""
        decode.set_pairs({**decode.pairs, boot_id: result})
        self._close_pairs(decode, now)

    def _update_pairs(self, agent: str, proofs: agent_pb2.PairProofs, now: float) -> None:
        instance = self._find_instance(agent)
        if instance is not None:
            instance.update_pairs(proofs, now)
            self._close_pairs(instance, now)

    def _close_pairs(self, decode: RoutedInstance, now: float) -> None:
        for table in self.list_tables():
            if table is decode.score_table:
                table.update_pairs_of(decode.slot, now)

    def _drop(self, instance: RoutedInstance) -> None:
        del self.instances[instance.name]
        instance.score_table = None
        instance.in_flight.close()

    def _find_instance(self, agent: str) -> RoutedInstance | None:
        instance = self.instances.get(self._names.get(agent, ""))
        return instance if instance is not None and instance.agent == agent else None

    def _set_connectivity(self, instance: RoutedInstance, connectivity: Connectivity) -> bool:
        """Set the connectivity; whether that opens or closes the instance for requests."""
        if instance.connectivity is connectivity:
            return False
        selectable, instance.connectivity = instance.selectable, connectivity
        self.refresh(instance)
        return instance.selectable is not selectable

    def _rebuild(self) -> None:
        groups: dict[tuple[str, str, str], list[RoutedInstance]] = defaultdict(list)
        for name in sorted(self.instances):
            instance = self.instances[name]
            registration = instance.registration
            key = registration.model, registration.deployment, registration.revision
            groups[key].append(instance)
        adapters: dict[str, list[tuple[str, ScoreTable]]] = defaultdict(list)
        self.models = {}
        for (model, _, _), instances in sorted(groups.items()):
            table = (
                ScoreTable(instances, self.policy)
                if self.shared_load is None
                else build_shared_table(instances, self.policy, self.shared_load)
            )
            table.update_pairs(self.latest_s)
            served = self.models.setdefault(model, ServedModel([], []))
            served.score_tables.append(table)
            served.instances.extend(instances)
            for slot, instance in enumerate(instances):
                instance.score_table, instance.slot = table, slot
            for name in _list_adapters(instances):
                adapters[name].append((model, table))
        for name, tables in adapters.items():
            if name not in self.models:
                score_tables = [table for _, table in tables]
                members = [instance for table in score_tables for instance in table.instances]
                crowded = any(map(_is_crowded, members))
                served = ServedModel(score_tables, members, tables[0][0], to_key(name), crowded)
                self.models[name] = served
        self._add_runtime_adapters()
        new = sorted(self.models.keys() - self.known_models.keys())
        room = MAX_KNOWN_MODELS - len(self.known_models)
        self.known_models.update(dict.fromkeys(new[:room], self.latest_s))

    def _add_runtime_adapters(self) -> None:
        """Add the adapters that engines have loaded since their start, below their models."""
        pending: set[str] = set()
        for model, base in list(self.models.items()):
            if base.base:
                continue
            found = choose_placements(base.instances)
            pending |= found.pending
            for name, placement in found.placements.items():
                if name not in self.models:
                    self.models[name] = _build_adapter(name, model, base, placement)
        self._pending_adapters = frozenset(pending - self.models.keys())


def _build_adapter(
    name: str, model: str, base: ServedModel, placement: AdapterPlacement
) -> ServedModel:
    """The adapter with the score tables that have an instance with it."""
    tables = [
        table
        for table in base.score_tables
        if any(each.name in placement.instances for each in table.instances)
    ]
    members = [instance for table in tables for instance in table.instances]
    return ServedModel(
        tables,
        members,
        model,
        to_key(name),
        any(map(_is_crowded, members)),
        placement.engine_name,
        frozenset(each.name for each in members) - placement.instances,
    )


def _list_adapters(instances: Collection[RoutedInstance]) -> Collection[str]:
    """Adapters that all instances serve, ignoring those that do not know their adapters yet."""
    reported = [set(each.registration.adapters) for each in instances if _knows_adapters(each)]
    return sorted(set.intersection(*reported)) if reported else ()


def _is_crowded(instance: RoutedInstance) -> bool:
    registration = instance.registration
    count = len(registration.adapters) + len(registration.runtime_adapters)
    return count > registration.max_adapters


def _knows_adapters(instance: RoutedInstance) -> bool:
    """Whether its engine has started, or had started before a restart and reported adapters."""
    registration = instance.registration
    return registration.state != agent_pb2.STATE_STARTING or bool(registration.adapters)
