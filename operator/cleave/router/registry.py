"""All instances that the router knows, by name, and their score tables, by model.

Updated by `router.agent_watcher` (which does the I/O), read by the router. What is hard: a name may
move to another address (a pod is replaced and its successor registers); events from an address, and
its disconnection, count only while the instance of that name is registered from this address. And
agents may report what is another one's: the first that has a name or a boot keeps it
(`_check_holders`).
An agent that reports changes without end must not cost the others' time: most change one slot of a
table, and tables are built again for the rest.
"""

import logging
from collections.abc import Collection, Sequence

from cleave.api.enums import DispatchPolicy
from cleave.router.errors import NoInstance, RouterError, UnknownModel
from cleave.router.instance import Connectivity, RoutedInstance, Target
from cleave.router.pair_proofs import PairResult
from cleave.router.score_table import ScoreTable
from cleave.router.served_models import (
    ServedModel,
    add_aliases,
    build_models,
    get_group,
    knows_adapters,
)
from cleave.router.shared_load import SharedLoad
from cleave.router.shared_score_table import build_shared_table
from cleave.rpc.boot_ids import is_boot_of
from cleave.rpc.registration_checks import RegistrationError
from cleave.rpc.v1 import agent_pb2

log = logging.getLogger(__name__)

STALE_S = 2.0
"""An instance without events for this time is picked only if no other one is available."""
MAX_KNOWN_MODELS = 4_096
SILENCE_S = 10.0
"""An instance without events for this time takes no new requests."""
RELEASE_S = 60.0
"""An instance without events for this time keeps its name and boot from no other one."""


class InstanceRegistry:
    """Instances by name, models by the name that clients request."""

    def __init__(
        self,
        policy: DispatchPolicy = DispatchPolicy.PREFIX_AWARE,
        shared_load: SharedLoad | None = None,
        model_names: Sequence[str] = (),
    ) -> None:
        """`shared_load`: accounting shared with the other processes; None: a single process.
        `model_names`: of a model, its engines' own first; none: only those of the engines."""
        self.policy = policy
        """The policy that determines the scores."""
        self.shared_load = shared_load
        self.instances: dict[str, RoutedInstance] = {}
        self.listed: Collection[str] | None = None
        """Addresses of the agents that the source lists now; None: of all that have registered."""
        self._model_names = model_names
        self._models: dict[str, ServedModel] = {}
        self._is_stale = False
        """Whether instances have come or gone since the tables were built."""
        self._has_runtime_adapters = False
        self._boots: dict[str, str] = {}
        """Names of the instances by their boots."""
        self._known_models: dict[str, float] = {}
        self._pending_adapters: frozenset[str] = frozenset()
        """Adapters that were ordered and that no instance has loaded yet."""
        self.refusals: dict[str, str] = {}
        """Why agents refuse this process's calls, by address."""
        self._names: dict[str, str] = {}
        self.latest_s = 0.0
        """Time of the latest event or sweep, in seconds of the callers' clock."""

    @property
    def models(self) -> dict[str, ServedModel]:
        """What is served, by the name that clients request."""
        if self._is_stale:
            self._rebuild()
        return self._models

    @property
    def known_models(self) -> dict[str, float]:
        """Time of the first registration, in seconds of the callers' clock, by the name of the
        model, including those that no instance serves now: the first MAX_KNOWN_MODELS since the
        start, as each is a label of metrics that stay."""
        if self._is_stale:
            self._rebuild()
        return self._known_models

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
        if instance is not None:
            self._set_connectivity(instance, Connectivity.DISCONNECTED)

    def remove_agent(self, agent: str) -> None:
        """Remove an agent and its instance, unless another address has registered the instance."""
        instance = self._find_instance(agent)
        self._names.pop(agent, None)
        if instance is not None:
            if instance.score_table is None:
                # So that its models are known.
                self._rebuild()
            self._drop(instance)
            self._is_stale = True

    def update_connectivity(self, now: float) -> None:
        """Mark instances without events for STALE_S as stale, close them after SILENCE_S."""
        self.latest_s = now
        for instance in self.instances.values():
            age = now - instance.last_event_at
            if age > STALE_S and instance.connectivity is not Connectivity.DISCONNECTED:
                connectivity = Connectivity.UNRESPONSIVE if age > SILENCE_S else Connectivity.STALE
                self._set_connectivity(instance, connectivity)
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
        return any(map(knows_adapters, self.instances.values()))

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
            f": {len(self.refusals)} agents refuse this gateway, such as {address} ({reason}); "
            "give it the deployment's token as CLEAVE_TOKEN_FILE, or, if that has changed, restart "
            "the deployment"
        )

    def find_max_model_len(self, model: str) -> int:
        """The context length that all instances of a model support, in tokens; 0: not known."""
        return min(self._list_lengths(model), default=0)

    def find_longest_model_len(self, model: str) -> int:
        """The largest context length of an instance of a model, in tokens; 0: not all are known. A
        single instance cannot make it small."""
        lengths = self._list_lengths(model)
        return max(lengths, default=0) if all(lengths) else 0

    def is_always_thinking(self, model: str) -> bool:
        """Whether an instance of a model reports that its template does not switch thinking off."""
        served = self.models.get(model)
        return (
            any(each.registration.always_thinks for each in served.instances) if served else False
        )

    def find_only_model(self) -> str:
        """The only model that is served, adapters and further names apart; empty: there are none,
        or several."""
        bases = [name for name, served in self.models.items() if not served.base]
        return bases[0] if len(bases) == 1 else ""

    def _list_lengths(self, model: str) -> list[int]:
        served = self.models.get(model)
        return [each.registration.max_model_len for each in served.instances] if served else []

    def _register(self, agent: str, registration: agent_pb2.Registration, now: float) -> None:
        previous = self._find_instance(agent)
        if previous is not None and previous.registration == registration:
            previous.last_event_at = now
            self._set_connectivity(previous, Connectivity.FRESH)
            return
        self._check_holders(agent, registration, now)
        instance = self.instances.get(registration.instance)
        # The part that may raise comes first, so that an invalid event changes nothing.
        if instance is None:
            instance = (
                RoutedInstance(agent, registration, now)
                if self.shared_load is None
                else RoutedInstance(agent, registration, now, self.shared_load.open)
            )
            self.instances[registration.instance] = instance
            self._is_stale = True
        else:
            self._change(instance, agent, registration, now)
        if previous is not None and previous is not instance:
            self._drop(previous)
            self._is_stale = True
        self._names[agent] = registration.instance
        self._boots[registration.boot_id] = registration.instance

    def _check_holders(self, agent: str, registration: agent_pb2.Registration, now: float) -> None:
        """Raises RegistrationError for the name or boot of the instance of another agent, which the
        source still lists and which has been heard of lately. If the boot shows that it is not that
        one's, it was usurped: that instance goes."""
        named = self.instances.get(registration.instance)
        if named is not None and named.agent != agent and self._is_present(named, now):
            raise RegistrationError(f"instance {named.name!r} is that of the agent {named.agent}")
        name = self._boots.get(registration.boot_id, registration.instance)
        holder = self.instances.get(name) if registration.boot_id else None
        if holder is None or name == registration.instance or not self._is_present(holder, now):
            return
        boot_id = registration.boot_id
        if is_boot_of(boot_id, name) or not is_boot_of(boot_id, registration.instance):
            raise RegistrationError(f"boot {boot_id!r} is that of instance {name!r}")
        log.warning("instance %s had the boot of %s, and goes", name, registration.instance)
        self._drop(holder)
        self._is_stale = True

    def _is_present(self, instance: RoutedInstance, now: float) -> bool:
        is_listed = self.listed is None or instance.agent in self.listed
        return is_listed and now - instance.last_event_at < RELEASE_S

    def _change(
        self,
        instance: RoutedInstance,
        agent: str,
        registration: agent_pb2.Registration,
        now: float,
    ) -> None:
        """Apply a new registration of a known instance. Raises ValueError; then nothing changes."""
        target, former = instance.target, instance.registration
        is_regrouped = get_group(former) != get_group(registration)
        if is_regrouped and self._is_stale:
            # So that what it has served is known.
            self._rebuild()
        instance.register(agent, registration, now)
        instance.last_event_at, instance.connectivity = now, Connectivity.FRESH
        if former.boot_id != registration.boot_id:
            self._release_boot(former.boot_id, instance.name)
        if self._is_stale:
            return
        if is_regrouped:
            self._rebuild()
            return
        self._update_uses(instance, target)
        if former.boot_id != registration.boot_id:
            for table in self.list_tables():
                if table is instance.score_table:
                    table.update_pairs(now)

    def _update_uses(self, instance: RoutedInstance, before: Target) -> None:
        """Apply that an instance has opened or closed, or has another role or boot."""
        if self._has_runtime_adapters:
            # Where they are served depends on which instances are open.
            self._rebuild()
        elif instance.score_table is not None:
            instance.score_table.update_uses(instance.slot, before)

    def _report(self, agent: str, load: agent_pb2.LoadReport, now: float) -> None:
        instance = self._find_instance(agent)
        if instance is None or not instance.update_load(load, now):
            return
        instance.last_event_at = now
        if not self._set_connectivity(instance, Connectivity.FRESH):
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
        self._release_boot(instance.registration.boot_id, instance.name)
        instance.score_table = None
        instance.in_flight.close()

    def _release_boot(self, boot_id: str, name: str) -> None:
        if self._boots.get(boot_id) == name:
            del self._boots[boot_id]

    def _find_instance(self, agent: str) -> RoutedInstance | None:
        instance = self.instances.get(self._names.get(agent, ""))
        return instance if instance is not None and instance.agent == agent else None

    def _set_connectivity(self, instance: RoutedInstance, connectivity: Connectivity) -> bool:
        """Set the connectivity; returns whether it changes, and with it the scores."""
        if instance.connectivity is connectivity:
            return False
        selectable, instance.connectivity = instance.selectable, connectivity
        self.refresh(instance)
        if instance.selectable is not selectable and not self._is_stale:
            self._update_uses(instance, instance.target)
        return True

    def _rebuild(self) -> None:
        self._is_stale = False
        instances = [self.instances[name] for name in sorted(self.instances)]
        self._models, self._pending_adapters = build_models(instances, self._build_table)
        add_aliases(self._models, self._model_names)
        self._has_runtime_adapters = any(e.registration.runtime_adapters for e in instances)
        new = sorted(self._models.keys() - self._known_models.keys())
        room = MAX_KNOWN_MODELS - len(self._known_models)
        self._known_models.update(dict.fromkeys(new[:room], self.latest_s))

    def _build_table(self, instances: list[RoutedInstance]) -> ScoreTable:
        table = (
            ScoreTable(instances, self.policy)
            if self.shared_load is None
            else build_shared_table(instances, self.policy, self.shared_load)
        )
        table.update_pairs(self.latest_s)
        for slot, instance in enumerate(instances):
            instance.score_table, instance.slot = table, slot
        return table
