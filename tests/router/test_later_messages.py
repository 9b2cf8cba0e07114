"""Events and requests of earlier and later versions: no process ends, no instance gets lost."""

import asyncio
from types import SimpleNamespace

import grpc
import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cleave.controller.cluster.gateway_client import merge, summarize_kv_paths
from cleave.gateway.app.fleet_status import describe_fleet
from cleave.router.grpc_service import RouterService
from cleave.router.registry import InstanceRegistry
from cleave.router.router import Router
from cleave.rpc.fleet_status import FleetStatus
from cleave.rpc.registration_checks import check_registration
from cleave.rpc.v1 import agent_pb2, router_pb2
from cleave.time_slices import run_at_once

from tests.support.later_messages import messages

ROLES = {agent_pb2.ROLE_PREFILL, agent_pb2.ROLE_DECODE, agent_pb2.ROLE_MIXED}
NAMES = st.sampled_from(["other-1", "other-2"])
EVENTS = st.lists(st.tuples(NAMES, messages(agent_pb2.WatchEvent)), max_size=8)


class Aborted(Exception):  # noqa: N818 - not an error of ours
    """A call was refused with a status."""


class Context:
    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        assert code in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED}
        raise Aborted(details)


def registry_with_one() -> InstanceRegistry:
    registry = InstanceRegistry()
    known = agent_pb2.Registration(
        instance="known", deployment="d", model="m", revision="r1", boot_id="b", epoch=1,
        role=agent_pb2.ROLE_MIXED, state=agent_pb2.STATE_READY, engine_url="http://127.0.0.1:8000",
        kv_block_size=16, kv_blocks_total=1_000,
    )  # fmt: skip
    registry.on_event("known", agent_pb2.WatchEvent(registration=known), 0.0)
    return registry


def feed(registry: InstanceRegistry, events: list[tuple[str, agent_pb2.WatchEvent]]) -> None:
    """As the agent watcher does; an agent that sends what cannot be read is disconnected."""
    for name, event in events:
        if event.HasField("registration"):
            # Its name and model make it one that requests could go to.
            event.registration.instance, event.registration.model = name, "m"
        try:
            if event.HasField("registration"):
                check_registration(event.registration, name)
            registry.on_event(name, event, 0.0)
        except ValueError:
            registry.on_disconnect(name)


@given(EVENTS, st.integers(0, 10_000))
@settings(max_examples=100, deadline=None)
def test_requests_go_to_instances_whose_role_and_state_are_known(events, tokens) -> None:
    registry = registry_with_one()
    feed(registry, events)
    router = Router(registry, clock=lambda: 0.0)
    for _ in range(4):
        pick = router.pick("m", tokens, 8)
        for target in filter(None, (pick.prefill, pick.decode)):
            registration = registry.instances[target.instance].registration
            assert registration.role in ROLES
            assert registration.state == agent_pb2.STATE_READY
        router.release(pick)


OTHER = agent_pb2.WatchEvent(registration=agent_pb2.Registration())
HUGE = agent_pb2.WatchEvent(load=agent_pb2.LoadReport(pending_prompt_tokens=(1 << 64) - 1024))


@given(EVENTS)
@example([("other-1", OTHER), ("other-1", HUGE)])
@settings(max_examples=100, deadline=None)
def test_the_fleet_can_be_shown_to_operators_and_other_gateways(events) -> None:
    registry = registry_with_one()
    feed(registry, events)
    router = Router(registry, clock=lambda: 0.0)
    context = SimpleNamespace(router=router, clock=lambda: 1.0, draining=False)
    page = msgspec.json.decode(b"".join(run_at_once(describe_fleet(context))), type=FleetStatus)
    assert {each.name for each in page.instances} == registry.instances.keys()
    merged = merge([page], {})
    assert merged.keys() >= {"known"}
    summarize_kv_paths(merged.values())
    service = RouterService(router, lambda: 1.0)
    snapshot = asyncio.run(service.Fleet(router_pb2.FleetRequest(), None))
    assert {each.registration.instance for each in snapshot.instances} == registry.instances.keys()


@given(messages(router_pb2.PickRequest), messages(router_pb2.ReleaseRequest))
@settings(max_examples=100, deadline=None)
def test_requests_of_other_gateways_are_answered_or_refused(pick, release) -> None:
    registry = registry_with_one()
    service = RouterService(Router(registry, clock=lambda: 0.0), lambda: 0.0)

    async def call() -> None:
        pick.model = "m"
        try:
            picked = await service.Pick(pick, Context())
        except Aborted:
            return
        assert picked.decode.instance == "known"
        release.ticket = picked.ticket
        await service.Release(release, None)
        await service.Release(router_pb2.ReleaseRequest(ticket=picked.ticket), None)

    asyncio.run(call())
    service.expire(1e9)
    assert registry.instances["known"].in_flight.count_requests() == 0


@pytest.mark.parametrize("field", ["a later field", "a later word"])
def test_pages_of_later_gateways_are_read(field: str) -> None:
    instance = {"name": "a", "selectable": True, "role": "mixed", "kv_path": {"verified": True}}
    page = {"instances": [instance], "draining": False}
    if field == "a later field":
        page |= {"later": {"x": 1}}
        instance |= {"later": [1]}
        instance["kv_path"] |= {"later": None}
    else:
        instance |= {"role": "encode", "state": "hibernating", "contact": "faint", "home": "encode"}
    read = msgspec.json.decode(json_of(page), type=FleetStatus)
    assert merge([read], {})["a"].selectable


def json_of(page: dict) -> bytes:
    return msgspec.json.encode(page)
