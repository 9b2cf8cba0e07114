"""Role flipping of instances. Run by the gateway.

Once a second it computes the inputs of `policy.role_flipping` for the instances of each deployment
and revision, and executes the decision through their agents. What is hard: there are several
gateways and only one may decide. Agents report to every router its rank among the routers that
watch them; the router with rank 0 at most of the instances decides. If two routers ever do so, the
epoch of the role lets only one SetRole request succeed.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

import grpc

from cleave.policy import role_flipping
from cleave.policy.role_flipping import NONE, Terms
from cleave.router.instance import ROLES, Instance, Ledger
from cleave.router.registry import Directory
from cleave.rpc import role_epochs
from cleave.rpc.channel import dial
from cleave.rpc.enum_names import name_of
from cleave.rpc.v1 import agent_pb2, agent_pb2_grpc

log = logging.getLogger(__name__)

Role: TypeAlias = "agent_pb2.Role.ValueType"

_NUMBERS = {role: number for number, role in enumerate(ROLES)}
"""Role -> its number in `policy.role_flipping`."""

PERIOD_S = 1.0
ORDER_TIMEOUT_S = 20.0
"""Timeout of SetRole, as in the operator: the agent may have to test the KV path first. Meanwhile
other flips of this gateway wait, but not requests."""
REST_S = 10.0
"""Delay after a failed SetRole until the next one in the same deployment and revision."""


class Flipping(Enum):
    """Whether instances change roles with the traffic."""

    OFF = "Off"
    """No flips; flipped instances flip back."""
    ADVISORY = "Advisory"
    """Flips are logged and counted, but not executed."""
    AUTO = "Auto"


@dataclass(frozen=True, slots=True)
class Flip:
    """The decision to give one instance another role."""

    instance: str
    model: str
    agent: str
    boot_id: str
    epoch: int
    """The new epoch of the role."""
    origin: Role
    role: Role
    prompts: float
    """Pressure of prefill."""
    decodes: float
    """Pressure of decode."""

    @property
    def labels(self) -> tuple[str, str, str]:
        """(model, from, to), for metrics."""
        return self.model, name_of(agent_pb2.Role, self.origin), name_of(agent_pb2.Role, self.role)

    def describe(self) -> str:
        """A description for the log."""
        return (
            f"{self.instance}: {' -> '.join(self.labels[1:])}; "
            f"pressure of prompts {self.prompts:.2f}, of decoding {self.decodes:.2f}"
        )


class Pools:
    """The state of role flipping of one deployment and revision, between two checks."""

    def __init__(self) -> None:
        self.rest_until_s = 0.0
        self.advised: Flip | None = None
        self._names: list[str] = []
        self._members = role_flipping.make_members(0)
        self._watch = role_flipping.make_watch()

    def look(
        self, instances: list[Instance], terms: Terms, now_s: float, lends: bool = True
    ) -> Flip | None:
        """The flip to execute now, or None; `lends`: False while flipping is off."""
        now_ms = now_s * 1000
        self._follow([instance.name for instance in instances])
        present = _find_present([instance.ledger for instance in instances])
        for member, instance in zip(self._members, instances, strict=True):
            _measure(member, instance, present, now_ms)
        if lends:
            slot, role = role_flipping.decide(self._members, self._watch, terms, now_ms)
        else:
            slot, role = role_flipping.recall(self._members, now_ms)
        if slot == NONE:
            return None
        instance, registration = instances[slot], instances[slot].registration
        return Flip(
            instance.name,
            registration.model,
            instance.agent,
            registration.boot_id,
            registration.epoch + 1,
            registration.role,
            ROLES[role],
            self._find_pressure(0, terms),
            self._find_pressure(1, terms),
        )

    def take(self, flip: Flip, now_s: float) -> None:
        """Record an executed flip."""
        slot = self._names.index(flip.instance)
        role_flipping.take(self._members, slot, _NUMBERS[flip.role], now_s * 1000)

    def _find_pressure(self, side: int, terms: Terms) -> float:
        return role_flipping.find_pressure(self._members, side, terms, True)

    def _follow(self, names: list[str]) -> None:
        """Adapt the members to the present instances, keeping the state of those that remain."""
        if names == self._names:
            return
        members = role_flipping.make_members(len(names))
        for slot, name in enumerate(names):
            if name in self._names:
                members[slot] = self._members[self._names.index(name)]
        self._names, self._members = names, members


class PoolManager:
    """Flips roles of the instances of all models in a directory."""

    def __init__(
        self,
        directory: Directory,
        flipping: Flipping,
        terms: Terms,
        clock: Callable[[], float],
        note: Callable[[Flip], None],
        order: Callable[[Flip], Awaitable[None]] | None = None,
    ) -> None:
        """`note`: called for each flip; `order`: executes a flip or raises AioRpcError."""
        self._directory = directory
        self._flipping = flipping
        self._terms = terms
        self._clock = clock
        self._note = note
        self._order = order or send
        self._pools: dict[tuple[str, str], Pools] = {}
        self._left_alone: set[str] = set()
        """Names of instances that cannot change roles and for which this has been logged."""

    async def run(self) -> None:
        """Check once per PERIOD_S until cancelled."""
        while True:
            await asyncio.sleep(PERIOD_S)
            await self.look()

    async def look(self) -> None:
        """Check all deployments and revisions; at most one flip for each of them."""
        present = set()
        # Adapters have the score tables of their base models.
        bases = [model for model in self._directory.models.values() if not model.base]
        for model in bases:
            for board in model.boards:
                registration = board.instances[0].registration
                key = registration.deployment, registration.revision
                present.add(key)
                if _is_manager(board.instances):
                    flippable = [each for each in board.instances if self._may_flip(each)]
                    await self._tend(self._pools.setdefault(key, Pools()), flippable)
        for key in self._pools.keys() - present:
            del self._pools[key]
        self._left_alone &= self._directory.instances.keys()

    def _may_flip(self, instance: Instance) -> bool:
        """Whether an instance can change its role; if not, the reason is logged once."""
        registration = instance.registration
        roles = {registration.role, registration.home or registration.role}
        if registration.epoch < role_epochs.LAST and roles <= _NUMBERS.keys():
            self._left_alone.discard(instance.name)
            return True
        if instance.name not in self._left_alone:
            self._left_alone.add(instance.name)
            log.warning(
                "%s is excluded from role changes: role %s, home %s, epoch %d",
                instance.name,
                name_of(agent_pb2.Role, registration.role),
                name_of(agent_pb2.Role, registration.home),
                registration.epoch,
            )
        return False

    async def _tend(self, pools: Pools, instances: list[Instance]) -> None:
        now = self._clock()
        lends = self._flipping is not Flipping.OFF
        flip = pools.look(instances, self._terms, now, lends)
        if flip is None:
            pools.advised = None
        elif self._flipping is Flipping.ADVISORY:
            if pools.advised is None or pools.advised.instance != flip.instance:
                log.info("would flip %s", flip.describe())
                self._note(flip)
            pools.advised = flip
        elif now >= pools.rest_until_s:
            await self._carry_out(pools, flip)

    async def _carry_out(self, pools: Pools, flip: Flip) -> None:
        try:
            await self._order(flip)
        except grpc.aio.AioRpcError as error:
            pools.rest_until_s = self._clock() + REST_S
            log.warning("not flipped: %s; %s", flip.describe(), error.details())
            return
        log.info("flipped %s", flip.describe())
        pools.take(flip, self._clock())
        self._note(flip)


async def send(flip: Flip) -> None:
    """Send SetRole to the instance's agent. Raises AioRpcError."""
    async with dial(flip.agent) as channel:
        request = agent_pb2.SetRoleRequest(role=flip.role, epoch=flip.epoch, boot_id=flip.boot_id)
        await agent_pb2_grpc.AgentStub(channel).SetRole(request, timeout=ORDER_TIMEOUT_S)


def _find_present(ledgers: list[Ledger]) -> float:
    claimed = sum(each.resident.pending for each in ledgers)
    # Other routers' requests count as resident only from their prefill on, so `others` is excluded.
    pending = sum(each.prompt.pending - each.prompt.others for each in ledgers)
    return role_flipping.find_present(claimed, pending)


def _measure(
    member: role_flipping.Members, instance: Instance, present: float, now_ms: float
) -> None:
    """Fill in the inputs of the policy; `present`: the result of `_find_present`."""
    registration, ledger = instance.registration, instance.ledger
    queue = ledger.queue
    pending = ledger.prompt.pending
    pending_ms = queue.predict_ms(pending, ledger.count_prompts(pending))
    # The start of a prompt of another router is not known.
    worked_ms = max(now_ms - queue.since_ms, 0.0) if ledger.prompt.own >= 1.0 else 0.0
    capacity = registration.kv_blocks_total * registration.kv_block_size
    role = _NUMBERS[registration.role]
    if member["role"] != role:
        # The operator, a user or another gateway has changed the role.
        member["since_ms"] = now_ms
    member["wait_ms"] = max(pending_ms - worked_ms, 0.0)
    member["use"] = present * ledger.resident.pending / capacity if capacity else 0.0
    member["home"] = _NUMBERS[registration.home or registration.role]
    member["role"] = role
    member["is_open"] = instance.selectable and registration.kv_path.verified


def _is_manager(instances: list[Instance]) -> bool:
    """Whether this router has rank 0 at most of these instances."""
    return 2 * sum(each.router_rank == 0 for each in instances) > len(instances)
