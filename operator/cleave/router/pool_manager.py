"""The pool manager: lets pools lend each other instances. Run by the gateway.

Once a second it fills in what `policy.pooling` looks at, for the instances of each deployment and
revision, and carries out what that decides through their agents. What is hard: there are several
gateways and only one may decide. Agents tell every router its place among those that follow them;
the one that comes first at most of its instances manages, and should two ever think so, the epoch
lets only one order through.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

import grpc

from cleave.policy import pooling
from cleave.policy.pooling import NONE, Terms
from cleave.router.directory import Directory
from cleave.router.instance import ROLES, Instance, Ledger
from cleave.rpc import epochs
from cleave.rpc.channel import dial
from cleave.rpc.names import name_of
from cleave.rpc.v1 import agent_pb2, agent_pb2_grpc

log = logging.getLogger(__name__)

Role: TypeAlias = "agent_pb2.Role.ValueType"

_NUMBERS = {role: number for number, role in enumerate(ROLES)}
"""The policy's numbers."""

PERIOD_S = 1.0
ORDER_TIMEOUT_S = 20.0
"""As of the operator's orders: the agent may have to test the way of the KV first. Flips of other
pools of this gateway wait meanwhile; requests do not."""
REST_S = 10.0
"""After an order that an agent refused or did not hear, until the next one to the same fleet."""


class Flipping(Enum):
    """Whether instances change roles as traffic does."""

    OFF = "Off"
    """Nobody is lent; who was goes home."""
    ADVISORY = "Advisory"
    """What would be done is told and counted, and not done."""
    AUTO = "Auto"


@dataclass(frozen=True, slots=True)
class Flip:
    """One instance gets another role."""

    instance: str
    model: str
    agent: str
    boot_id: str
    epoch: int
    """The new one."""
    origin: Role
    role: Role
    prompts: float
    """Pressure."""
    decodes: float

    @property
    def labels(self) -> tuple[str, str, str]:
        """(model, from, to), for metrics."""
        return self.model, name_of(agent_pb2.Role, self.origin), name_of(agent_pb2.Role, self.role)

    def describe(self) -> str:
        """In a sentence, for people."""
        return (
            f"{self.instance}: {' -> '.join(self.labels[1:])}; "
            f"pressure of prompts {self.prompts:.2f}, of decoding {self.decodes:.2f}"
        )


class Pools:
    """The pools of one deployment and revision: what is kept from one look to the next."""

    def __init__(self) -> None:
        self.rest_until_s = 0.0
        self.advised: Flip | None = None
        self._names: list[str] = []
        self._members = pooling.make_members(0)
        self._watch = pooling.make_watch()

    def look(
        self, instances: list[Instance], terms: Terms, now_s: float, lends: bool = True
    ) -> Flip | None:
        """What should be done now."""
        now_ms = now_s * 1000
        self._follow([instance.name for instance in instances])
        present = _find_present([instance.ledger for instance in instances])
        for member, instance in zip(self._members, instances, strict=True):
            _measure(member, instance, present, now_ms)
        if lends:
            slot, role = pooling.decide(self._members, self._watch, terms, now_ms)
        else:
            slot, role = pooling.recall(self._members, now_ms)
        if slot == NONE:
            return None
        instance, stated = instances[slot], instances[slot].registration
        return Flip(
            instance.name,
            stated.model,
            instance.agent,
            stated.boot_id,
            stated.epoch + 1,
            stated.role,
            ROLES[role],
            self._find_pressure(0, terms),
            self._find_pressure(1, terms),
        )

    def take(self, flip: Flip, now_s: float) -> None:
        """It was done."""
        slot = self._names.index(flip.instance)
        pooling.take(self._members, slot, _NUMBERS[flip.role], now_s * 1000)

    def _find_pressure(self, side: int, terms: Terms) -> float:
        return pooling.find_pressure(self._members, side, terms, True)

    def _follow(self, names: list[str]) -> None:
        """Keep what is known of those that are still there."""
        if names == self._names:
            return
        members = pooling.make_members(len(names))
        for slot, name in enumerate(names):
            if name in self._names:
                members[slot] = self._members[self._names.index(name)]
        self._names, self._members = names, members


class PoolManager:
    """Looks at all pools of all models that a directory knows."""

    def __init__(
        self,
        directory: Directory,
        flipping: Flipping,
        terms: Terms,
        clock: Callable[[], float],
        note: Callable[[Flip], None],
        order: Callable[[Flip], Awaitable[None]] | None = None,
    ) -> None:
        """`note` hears of each flip; `order` carries one out and raises AioRpcError."""
        self._directory = directory
        self._flipping = flipping
        self._terms = terms
        self._clock = clock
        self._note = note
        self._order = order or send
        self._pools: dict[tuple[str, str], Pools] = {}
        self._left_alone: set[str] = set()
        """Instances that cannot be given another role, as has been logged."""

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(PERIOD_S)
            await self.look()

    async def look(self) -> None:
        """One look at everything; at most one flip for each deployment and revision."""
        seen = set()
        # Adapters have their base's boards.
        bases = [known for known in self._directory.models.values() if not known.base]
        for known in bases:
            for board in known.boards:
                stated = board.instances[0].registration
                key = stated.deployment, stated.revision
                seen.add(key)
                if _is_manager(board.instances):
                    flippable = [each for each in board.instances if self._may_flip(each)]
                    await self._tend(self._pools.setdefault(key, Pools()), flippable)
        for key in self._pools.keys() - seen:
            del self._pools[key]
        self._left_alone &= self._directory.instances.keys()

    def _may_flip(self, instance: Instance) -> bool:
        """Whether it can be given another role; why not is logged once."""
        stated = instance.registration
        roles = {stated.role, stated.home or stated.role}
        if stated.epoch < epochs.LAST and roles <= _NUMBERS.keys():
            self._left_alone.discard(instance.name)
            return True
        if instance.name not in self._left_alone:
            self._left_alone.add(instance.name)
            log.warning(
                "%s is excluded from role changes: role %s, home %s, epoch %d",
                instance.name,
                name_of(agent_pb2.Role, stated.role),
                name_of(agent_pb2.Role, stated.home),
                stated.epoch,
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
    """Tell the agent. Raises AioRpcError."""
    async with dial(flip.agent) as channel:
        request = agent_pb2.SetRoleRequest(role=flip.role, epoch=flip.epoch, boot_id=flip.boot_id)
        await agent_pb2_grpc.AgentStub(channel).SetRole(request, timeout=ORDER_TIMEOUT_S)


def _find_present(ledgers: list[Ledger]) -> float:
    claimed = sum(each.resident.pending for each in ledgers)
    # What others sent is claimed when their engines hold it, and prompts that wait hold nothing.
    pending = sum(each.prompt.pending - each.prompt.others for each in ledgers)
    return pooling.find_present(claimed, pending)


def _measure(member: pooling.Members, instance: Instance, present: float, now_ms: float) -> None:
    """Fill in what the policy looks at; `present`: share of claimed KV that is there."""
    stated, ledger = instance.registration, instance.ledger
    queue = ledger.queue
    pending = ledger.prompt.pending
    pending_ms = queue.predict_ms(pending, ledger.count_prompts(pending))
    # Of what others have sent nobody here knows when it began.
    worked_ms = max(now_ms - queue.since_ms, 0.0) if ledger.prompt.own >= 1.0 else 0.0
    capacity = stated.kv_blocks_total * stated.kv_block_size
    role = _NUMBERS[stated.role]
    if member["role"] != role:
        # Somebody else flipped it.
        member["since_ms"] = now_ms
    member["wait_ms"] = max(pending_ms - worked_ms, 0.0)
    member["use"] = present * ledger.resident.pending / capacity if capacity else 0.0
    member["home"] = _NUMBERS[stated.home or stated.role]
    member["role"] = role
    member["is_open"] = instance.selectable and stated.kv_path.verified


def _is_manager(instances: list[Instance]) -> bool:
    """Whether this router is the first that follows most of these."""
    return 2 * sum(each.router_rank == 0 for each in instances) > len(instances)
