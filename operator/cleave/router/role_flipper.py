"""Role flipping of instances. Run by the gateway.

Once a second it computes the inputs of `policy.role_flipping` for the instances of each deployment
and revision, and executes the decision through their agents. What is hard: there are several
gateways and only one may decide. Agents report to every router its rank among the routers that
watch them; the router with rank 0 at most of the instances decides. If two routers ever do so, the
epoch of the role lets only one SetRole request succeed. Data-parallel ranks compute in step, so
that one with prompts delays all: they change their role together, and count as one instance.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import grpc

from cleave.api.enums import FlippingMode
from cleave.policy import role_flipping
from cleave.policy.role_flipping import NONE, FlipThresholds
from cleave.router.instance import ROLES, RoutedInstance
from cleave.router.registry import InstanceRegistry
from cleave.rpc import role_epochs
from cleave.rpc.agent_discovery import AgentDiscovery
from cleave.rpc.channel import dial
from cleave.rpc.enum_names import get_enum_name
from cleave.rpc.v1 import agent_pb2, agent_pb2_grpc
from cleave.time_slices import Steps, run_in_slices

log = logging.getLogger(__name__)

Role: TypeAlias = "agent_pb2.Role.ValueType"
Ranks: TypeAlias = Sequence[RoutedInstance]
"""The data-parallel ranks of one instance, or an instance without ranks alone."""

_ROLE_NUMBERS = {role: number for number, role in enumerate(ROLES)}
"""Role -> its number in `policy.role_flipping`."""

PERIOD_S = 1.0
SET_ROLE_TIMEOUT_S = 20.0
"""Timeout of SetRole, as in the operator: the agent may have to test the KV path first. Meanwhile
other flips of this gateway wait, but not requests."""
RETRY_DELAY_S = 10.0
"""Delay after a failed SetRole until the next one in the same deployment and revision."""


@dataclass(frozen=True, slots=True)
class RoleFlip:
    """The decision to give one instance, or one rank of it, another role."""

    instance: str
    whole: str
    """The instance that it is a rank of; otherwise the same as `instance`."""
    model: str
    agent: str
    boot_id: str
    epoch: int
    """The new epoch of the role."""
    origin: Role
    role: Role
    prefill_pressure: float
    decode_pressure: float

    @property
    def labels(self) -> tuple[str, str, str]:
        """(model, from, to), for metrics."""
        origin, role = (get_enum_name(agent_pb2.Role, each) for each in (self.origin, self.role))
        return self.model, origin, role

    def describe(self) -> str:
        """A description for the log."""
        return (
            f"{self.whole}: {' -> '.join(self.labels[1:])}; "
            f"pressure of prompts {self.prefill_pressure:.2f}, "
            f"of decoding {self.decode_pressure:.2f}"
        )


class FlipState:
    """The state of role flipping of one deployment and revision, between two checks."""

    def __init__(self) -> None:
        self.retry_at_s = 0.0
        self.recommended: RoleFlip | None = None
        self._members: dict[str, dict[str, Any]] = {}
        """By name of the instance."""
        self._history = role_flipping.build_plain_history()

    def decide(
        self,
        instances: Mapping[str, Ranks],
        thresholds: FlipThresholds,
        now_s: float,
        enabled: bool = True,
    ) -> Steps[tuple[RoleFlip, ...]]:
        """The flip to execute now, for each rank of one instance; empty: there is none. `enabled`:
        False while flipping is off."""
        now_ms, known = now_s * 1000, self._members
        self._members = {
            name: known.get(name) or role_flipping.build_plain_member() for name in instances
        }
        for member, ranks in zip(self._members.values(), instances.values(), strict=True):
            _fill_member(member, ranks, now_ms)
            yield
        members = list(self._members.values())
        if enabled:
            slot, role = role_flipping.decide(members, self._history, thresholds, now_ms)
        else:
            slot, role = role_flipping.return_flipped(members, now_ms)
        if slot == NONE:
            return ()
        whole = [*self._members][slot]
        pressures = [
            role_flipping.compute_pressure(members, side, thresholds, True) for side in range(2)
        ]
        return tuple(
            RoleFlip(
                rank.name,
                whole,
                rank.registration.model,
                rank.agent,
                rank.registration.boot_id,
                rank.registration.epoch + 1,
                rank.registration.role,
                ROLES[role],
                *pressures,
            )
            for rank in instances[whole]
        )

    def record(self, flip: RoleFlip, now_s: float) -> None:
        """Record an executed flip."""
        members = [self._members[flip.whole]]
        role_flipping.record_role(members, 0, _ROLE_NUMBERS[flip.role], now_s * 1000)


class RoleFlipper:
    """Flips roles of the instances of all models in a registry."""

    def __init__(
        self,
        registry: InstanceRegistry,
        mode: FlippingMode,
        thresholds: FlipThresholds,
        clock: Callable[[], float],
        on_flip: Callable[[RoleFlip], None],
        set_role: Callable[[RoleFlip], Awaitable[None]],
    ) -> None:
        """`on_flip`: called for each flip; `set_role`: executes a flip or raises AioRpcError."""
        self._registry = registry
        self._mode = mode
        self._thresholds = thresholds
        self._clock = clock
        self._on_flip = on_flip
        self._set_role = set_role
        self._states: dict[tuple[str, str], FlipState] = {}
        self._excluded: set[str] = set()
        """Names of instances that cannot change roles and for which this has been logged."""

    async def run(self) -> None:
        """Check once per PERIOD_S until cancelled."""
        while True:
            await asyncio.sleep(PERIOD_S)
            await self.check()

    async def check(self) -> None:
        """Check all deployments and revisions; at most one flip for each of them."""
        present = set()
        # Adapters have the score tables of their base models.
        for model in [each for each in self._registry.models.values() if not each.base]:
            for table in model.score_tables:
                registration = table.instances[0].registration
                key = registration.deployment, registration.revision
                present.add(key)
                if is_leader(table.instances):
                    flippable = await run_in_slices(self._list_flippable(table.instances))
                    await self._check_group(self._states.setdefault(key, FlipState()), flippable)
                await asyncio.sleep(0)
        for key in self._states.keys() - present:
            del self._states[key]
        self._excluded &= self._registry.instances.keys()

    def _list_flippable(self, instances: Iterable[RoutedInstance]) -> Steps[dict[str, Ranks]]:
        flippable: dict[str, Ranks] = {}
        for name, ranks in group_ranks(instances).items():
            if all(map(self._may_flip, ranks)):
                flippable[name] = ranks
            yield
        return flippable

    def _may_flip(self, instance: RoutedInstance) -> bool:
        """Whether an instance can change its role; if not, the reason is logged once."""
        registration = instance.registration
        roles = {registration.role, registration.home or registration.role}
        if registration.epoch < role_epochs.MAX_EPOCH and roles <= _ROLE_NUMBERS.keys():
            self._excluded.discard(instance.name)
            return True
        if instance.name not in self._excluded:
            self._excluded.add(instance.name)
            role = get_enum_name(agent_pb2.Role, registration.role)
            home = get_enum_name(agent_pb2.Role, registration.home)
            message = "%s is excluded from role changes: role %s, home %s, epoch %d"
            log.warning(message, instance.name, role, home, registration.epoch)
        return False

    async def _check_group(self, state: FlipState, instances: Mapping[str, Ranks]) -> None:
        now, enabled = self._clock(), self._mode is not FlippingMode.OFF
        flips = await run_in_slices(state.decide(instances, self._thresholds, now, enabled))
        if not flips:
            state.recommended = None
        elif self._mode is FlippingMode.ADVISORY:
            flip = flips[0]
            if state.recommended is None or state.recommended.whole != flip.whole:
                log.info("would flip %s", flip.describe())
                self._on_flip(flip)
            state.recommended = flip
        elif now >= state.retry_at_s:
            await self._execute(state, flips)

    async def _execute(self, state: FlipState, flips: Sequence[RoleFlip]) -> None:
        flip = flips[0]
        try:
            for rank_flip in flips:
                await self._set_role(rank_flip)
        except (grpc.aio.AioRpcError, ValueError) as error:
            # ValueError: a number of the registration does not fit the request.
            reason = error.details() if isinstance(error, grpc.aio.AioRpcError) else error
            state.retry_at_s = self._clock() + RETRY_DELAY_S
            log.warning("not flipped: %s; %s", flip.describe(), reason)
            return
        log.info("flipped %s", flip.describe())
        state.record(flip, self._clock())
        self._on_flip(flip)


async def send_flip(agents: AgentDiscovery, flip: RoleFlip) -> None:
    """Send SetRole to the instance's agent. Raises AioRpcError."""
    metadata = await agents.build_metadata(flip.agent)
    async with dial(flip.agent) as channel:
        request = agent_pb2.SetRoleRequest(role=flip.role, epoch=flip.epoch, boot_id=flip.boot_id)
        await agent_pb2_grpc.AgentStub(channel).SetRole(
            request, timeout=SET_ROLE_TIMEOUT_S, metadata=metadata
        )


def group_ranks(instances: Iterable[RoutedInstance]) -> dict[str, list[RoutedInstance]]:
    """Instances by name, each with its data-parallel ranks; one without ranks is alone."""
    groups: dict[str, list[RoutedInstance]] = {}
    for each in instances:
        groups.setdefault(each.whole, []).append(each)
    return groups


def _fill_member(member: dict[str, Any], ranks: Ranks, now_ms: float) -> None:
    """Fill in the inputs of the policy."""
    role = _ROLE_NUMBERS[_find_role(ranks)]
    if member["role"] != role:
        # The operator, a user or another gateway has changed the role.
        member["since_ms"] = now_ms
    first = ranks[0].registration
    member["wait_ms"] = sum(_predict_wait_ms(each, now_ms) for each in ranks) / len(ranks)
    loads = [each.load for each in ranks]
    used = [role_flipping.count_next(each.kv_cache_usage, each.num_running) for each in loads]
    member["use"] = sum(used) / len(ranks)
    member["configured_role"] = _ROLE_NUMBERS[first.home or first.role]
    member["role"] = role
    member["is_open"] = len(ranks) >= first.data_parallel_size and all(
        each.selectable and each.registration.kv_path.verified for each in ranks
    )


def _find_role(ranks: Ranks) -> Role:
    """The role; of ranks of which only some have changed it, as one agent refused, the new one: all
    will get their configured role again, or the next one."""
    roles = [each.registration.role for each in ranks]
    homes = [each.registration.home or each.registration.role for each in ranks]
    changed = (role for role, home in zip(roles, homes, strict=True) if role != home)
    return next(changed, roles[0])


def _predict_wait_ms(instance: RoutedInstance, now_ms: float) -> float:
    in_flight = instance.in_flight
    queue = in_flight.queue
    pending = in_flight.prompt.pending
    pending_ms = queue.predict_ms(pending, in_flight.count_prompts(pending))
    # The start of a prompt of another router is not known.
    elapsed_ms = max(now_ms - queue.head_started_ms, 0.0) if in_flight.prompt.own >= 1.0 else 0.0
    return max(pending_ms - elapsed_ms, 0.0)


def is_leader(instances: list[RoutedInstance]) -> bool:
    """Whether this router has rank 0 at most of these instances."""
    return 2 * sum(each.router_rank == 0 for each in instances) > len(instances)
