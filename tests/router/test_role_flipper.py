"""The role flipper over a registry: who decides, what agents get, and the result."""

from collections.abc import Callable

import grpc
import pytest

from cleave.api.enums import FlippingMode
from cleave.policy.role_flipping import FlipThresholds
from cleave.router.registry import InstanceRegistry
from cleave.router.role_flipper import RoleFlip, RoleFlipper
from cleave.rpc.v1 import agent_pb2

from tests.support.doubles import Clock

WAITING = 100_000
"""Prompt tokens that take far longer than the terms allow."""


class Agents:
    """Carry orders out and say so, or refuse them."""

    def __init__(self, registry: InstanceRegistry, clock: Clock) -> None:
        self.registry, self.clock = registry, clock
        self.orders: list[tuple[str, str, int]] = []
        self.refuse = False
        self.silent = False
        """They do not state their new role, not before the manager has gone on at any rate."""

    async def __call__(self, flip: RoleFlip) -> None:
        self.orders.append((flip.instance, _name(flip.role), flip.epoch))
        if self.refuse:
            empty = grpc.aio.Metadata()
            raise grpc.aio.AioRpcError(grpc.StatusCode.FAILED_PRECONDITION, empty, empty, "no")
        if self.silent:
            return
        registration = agent_pb2.Registration()
        registration.CopyFrom(self.registry.instances[flip.instance].registration)
        registration.role, registration.epoch = flip.role, flip.epoch
        event = agent_pb2.WatchEvent(registration=registration)
        self.registry.on_event(flip.agent, event, self.clock.now_s)


class Managed:
    """A manager whose clock is set by hand."""

    def __init__(self, registry: InstanceRegistry, clock: Clock, flipping: FlippingMode) -> None:
        self.clock, self.agents = clock, Agents(registry, clock)
        self.noted: list[RoleFlip] = []
        self._manager = RoleFlipper(
            registry,
            flipping,
            FlipThresholds(wait_ms=100.0, rise_ms=1_000.0),
            clock,
            self.noted.append,
            self.agents,
        )

    async def run(self, seconds: int) -> list[tuple[str, str, int]]:
        before = len(self.agents.orders)
        for _ in range(seconds):
            self.clock.now_s += 1
            await self._manager.check()
        return self.agents.orders[before:]


Manage = Callable[..., Managed]


@pytest.fixture
def manage(registry: InstanceRegistry, clock: Clock, make_event) -> Manage:
    def make(flipping: FlippingMode = FlippingMode.AUTO, **roles: str) -> Managed:
        for name, role in (roles or {"p": "prefill", "d1": "decode", "d2": "decode"}).items():
            registry.on_event(name, make_event(name, role, epoch=1, home=_role(role)), clock.now_s)
        return Managed(registry, clock, flipping)

    return make


async def test_a_decode_instance_helps_with_prompts_and_goes_home_again(
    manage: Manage, registry: InstanceRegistry, loaded
) -> None:
    managed = manage()
    registry.on_event("p", loaded("p", prompt=WAITING), managed.clock.now_s)
    assert await managed.run(1) == []
    assert await managed.run(1) == [("d1", "mixed", 2)]
    registry.on_event("p", loaded("p"), managed.clock.now_s)
    assert await managed.run(60) == [("d1", "decode", 3)]
    assert [flip.role for flip in managed.noted] == [agent_pb2.ROLE_MIXED, agent_pb2.ROLE_DECODE]
    assert "d1: decode -> mixed; pressure of prompts" in managed.noted[0].describe()


RANKS = ("a.rank-0", "a.rank-1", "b.rank-0", "b.rank-1")
"""Of two decode instances."""


@pytest.fixture
def with_ranks(manage: Manage, registry: InstanceRegistry, make_event) -> Managed:
    """A prefill instance, and two decode instances with two data-parallel ranks each."""
    managed = manage(p="prefill")
    for name in RANKS:
        event = make_event(name, "decode", epoch=1, home=_role("decode"), data_parallel_size=2)
        registry.on_event(name, event, managed.clock.now_s)
    return managed


async def test_all_data_parallel_ranks_of_an_instance_change_their_role(
    with_ranks: Managed, registry: InstanceRegistry, loaded
) -> None:
    registry.on_event("p", loaded("p", prompt=WAITING), with_ranks.clock.now_s)
    orders = await with_ranks.run(2)
    assert orders == [("a.rank-0", "mixed", 2), ("a.rank-1", "mixed", 2)]
    # The other one always keeps its role, as min_decode says: ranks are not counted.
    assert await with_ranks.run(10) == []
    registry.on_event("p", loaded("p"), with_ranks.clock.now_s)
    orders = await with_ranks.run(60)
    assert orders == [("a.rank-0", "decode", 3), ("a.rank-1", "decode", 3)]
    assert [flip.whole for flip in with_ranks.noted] == ["a", "a"]


async def test_ranks_of_which_one_refused_go_home_together(
    with_ranks: Managed, registry: InstanceRegistry, loaded, make_event
) -> None:
    event = make_event("a.rank-1", "mixed", epoch=2, home=_role("decode"), data_parallel_size=2)
    registry.on_event("a.rank-1", event, with_ranks.clock.now_s)
    orders = await with_ranks.run(60)
    assert orders == [("a.rank-0", "decode", 2), ("a.rank-1", "decode", 3)]


async def test_an_instance_without_all_its_ranks_is_not_flipped(
    with_ranks: Managed, registry: InstanceRegistry, loaded
) -> None:
    registry.remove_agent("a.rank-1")
    registry.on_event("p", loaded("p", prompt=WAITING), with_ranks.clock.now_s)
    orders = await with_ranks.run(10)
    assert [order[0] for order in orders] in ([], ["b.rank-0", "b.rank-1"])


async def test_decode_instances_are_full_by_what_they_hold_and_not_by_what_is_to_come(
    manage: Manage, registry: InstanceRegistry, loaded
) -> None:
    managed = manage(p1="prefill", p2="prefill", d="decode")
    registry.instances["d"].in_flight.resident.add(1e9)
    room_for_one = loaded("d", kv_cache_usage=0.86, num_running=19)
    registry.on_event("d", room_for_one, managed.clock.now_s)
    assert await managed.run(3) == []
    registry.on_event("d", loaded("d", kv_cache_usage=0.87, num_running=19), managed.clock.now_s)
    assert [order[1] for order in await managed.run(3)] == ["mixed"]


async def test_advice_is_given_once_and_not_followed(
    manage: Manage, registry: InstanceRegistry, loaded
) -> None:
    managed = manage(FlippingMode.ADVISORY)
    registry.on_event("p", loaded("p", prompt=WAITING), managed.clock.now_s)
    assert await managed.run(30) == []
    assert [flip.instance for flip in managed.noted] == ["d1"]


async def test_when_off_it_flips_no_instance_and_returns_flipped_ones(
    manage: Manage, registry: InstanceRegistry, loaded, make_event
) -> None:
    managed = manage(FlippingMode.OFF)
    lent = make_event("d1", "mixed", epoch=2, home=agent_pb2.ROLE_DECODE)
    registry.on_event("d1", lent, managed.clock.now_s)
    registry.on_event("p", loaded("p", prompt=WAITING), managed.clock.now_s)
    assert await managed.run(290) == [], "somebody may try it by hand"
    assert await managed.run(60) == [("d1", "decode", 3)]
    assert await managed.run(600) == []


async def test_only_the_first_router_of_most_instances_decides(
    manage: Manage, registry: InstanceRegistry, loaded
) -> None:
    managed = manage()
    now = managed.clock.now_s
    for name in ("p", "d1", "d2"):
        event = loaded(name, prompt=WAITING if name == "p" else 0)
        event.load.num_routers, event.load.router_rank = 2, int(name != "d2")
        registry.on_event(name, event, now)
    assert await managed.run(30) == []
    event.load.router_rank = 0
    registry.on_event("d1", loaded("d1"), now)
    assert await managed.run(2) == [("d1", "mixed", 2)]


async def test_an_order_that_is_refused_is_given_again_after_a_rest(
    manage: Manage, registry: InstanceRegistry, loaded
) -> None:
    managed = manage()
    managed.agents.refuse = True
    registry.on_event("p", loaded("p", prompt=WAITING), managed.clock.now_s)
    assert len(await managed.run(10)) == 1
    managed.agents.refuse = False
    assert await managed.run(10) == [("d1", "mixed", 2)]
    assert len(managed.noted) == 1


async def test_instances_without_a_verified_path_are_left_alone(
    manage: Manage, registry: InstanceRegistry, loaded, make_event
) -> None:
    managed = manage(p="prefill", d="decode")
    home = agent_pb2.ROLE_DECODE
    registry.on_event("d", make_event("d", "decode", verified=False, epoch=1, home=home), 100.0)
    registry.on_event("p", loaded("p", prompt=WAITING), managed.clock.now_s)
    assert await managed.run(30) == []


async def test_an_instance_that_states_no_role_is_left_alone(
    manage: Manage, registry: InstanceRegistry, loaded, make_event
) -> None:
    managed = manage()
    event = make_event("a", "decode", epoch=1)
    event.registration.role = agent_pb2.ROLE_UNSPECIFIED
    registry.on_event("a", event, managed.clock.now_s)
    registry.on_event("p", loaded("p", prompt=WAITING), managed.clock.now_s)
    assert await managed.run(2) == [("d1", "mixed", 2)]


@pytest.mark.parametrize("flipping", [FlippingMode.AUTO, FlippingMode.OFF])
@pytest.mark.parametrize(
    "odd", [{"epoch": 2**64 - 1}, {"role": 9}, {"home": 9}, {"role": 9, "home": 9}]
)
async def test_an_instance_that_states_what_no_order_can_follow_is_left_alone(
    manage: Manage,
    registry: InstanceRegistry,
    loaded,
    make_event,
    caplog,
    flipping: FlippingMode,
    odd,
) -> None:
    managed = manage(flipping)
    event = make_event("a", "mixed", epoch=2, home=agent_pb2.ROLE_DECODE)
    event.registration.MergeFrom(agent_pb2.Registration(**odd))
    registry.on_event("a", event, managed.clock.now_s)
    assert await managed.run(400) == [], "not the odd one"
    registry.on_event("p", loaded("p", prompt=WAITING), managed.clock.now_s)
    orders = await managed.run(2)
    assert orders == ([("d1", "mixed", 2)] if flipping is FlippingMode.AUTO else [])
    assert caplog.text.count("a is excluded from role changes: role") == 1


async def test_what_is_known_of_an_instance_survives_the_coming_of_others(
    manage: Manage, registry: InstanceRegistry, loaded, make_event
) -> None:
    managed = manage()
    registry.on_event("p", loaded("p", prompt=WAITING), managed.clock.now_s)
    assert await managed.run(2) == [("d1", "mixed", 2)]
    registry.on_event("a", make_event("a", "decode", epoch=1, home=agent_pb2.ROLE_DECODE), 100.0)
    registry.on_event("p", loaded("p"), managed.clock.now_s)
    orders = await managed.run(60)
    assert ("d1", "decode", 3) in orders


async def test_instances_with_adapters_are_logged_once(
    manage: Manage, registry: InstanceRegistry, loaded, make_event
) -> None:
    managed = manage()
    for name, role in (("p", "prefill"), ("d1", "decode"), ("d2", "decode")):
        event = make_event(name, role, epoch=1, home=_role(role), adapters=["tone", "terse"])
        registry.on_event(name, event, managed.clock.now_s)
    assert sorted(registry.models) == ["m", "terse", "tone"]
    managed.agents.silent = True
    registry.on_event("p", loaded("p", prompt=WAITING), managed.clock.now_s)
    assert await managed.run(2) == [("d1", "mixed", 2)]


async def test_pools_that_are_gone_are_forgotten(
    manage: Manage, registry: InstanceRegistry, loaded
) -> None:
    managed = manage()
    registry.on_event("p", loaded("p", prompt=WAITING), managed.clock.now_s)
    await managed.run(1)
    for name in ("p", "d1", "d2"):
        registry.remove_agent(name)
    assert await managed.run(5) == []
    assert managed._manager._states == {}


def _role(name: str) -> "agent_pb2.Role.ValueType":
    return agent_pb2.Role.Value(f"ROLE_{name.upper()}")


def _name(role: "agent_pb2.Role.ValueType") -> str:
    return agent_pb2.Role.Name(role).removeprefix("ROLE_").lower()
