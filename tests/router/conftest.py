"""Instances as agents would state them."""

from collections.abc import Callable

import pytest

from cleave.api.enums import DispatchPolicy
from cleave.router.registry import InstanceRegistry
from cleave.router.router import Router, RoutingRules, SharedRouter
from cleave.rpc.v1 import agent_pb2

ROLES = {
    "prefill": agent_pb2.ROLE_PREFILL,
    "decode": agent_pb2.ROLE_DECODE,
    "mixed": agent_pb2.ROLE_MIXED,
}

State = Callable[..., agent_pb2.WatchEvent]


@pytest.fixture
def make_event() -> State:
    """Makes a registration; the boot id is the name with a suffix unless given."""

    def make(name: str, role: str, *, verified: bool = True, **fields: object):
        registration = agent_pb2.Registration(
            instance=name,
            deployment="d",
            model="m",
            revision="r1",
            boot_id=f"{name}-boot",
            role=ROLES[role],
            state=agent_pb2.STATE_READY,
            engine_url="http://127.0.0.1:8000",
            kv_block_size=16,
            kv_blocks_total=1_000,
            kv_path=agent_pb2.KvPath(verified=verified),
        )
        registration.MergeFrom(agent_pb2.Registration(**fields))
        return agent_pb2.WatchEvent(registration=registration)

    return make


@pytest.fixture
def loaded() -> State:
    """Makes a load report."""

    def make(name: str, prompt: int = 0, blocks_used: int = 0, boot_id: str = "", **fields: object):
        return agent_pb2.WatchEvent(
            load=agent_pb2.LoadReport(
                boot_id=boot_id or f"{name}-boot",
                pending_prompt_tokens=prompt,
                kv_blocks_free=1_000 - blocks_used,
                **fields,
            )
        )

    return make


@pytest.fixture
def registry() -> InstanceRegistry:
    return InstanceRegistry()


@pytest.fixture
def fleet_of(registry: InstanceRegistry, make_event: State) -> Callable[..., InstanceRegistry]:
    """A registry with `name=role` instances, each at an address of its own name."""

    def make(**roles: str) -> InstanceRegistry:
        for name, role in roles.items():
            registry.on_event(name, make_event(name, role), 0.0)
        return registry

    return make


@pytest.fixture
def routed(make_event, clock):
    """A router with PrefixAware over `name=role` instances."""

    def make(roles: dict[str, str], rules: RoutingRules | None = None, **fields: object) -> Router:
        memory, shared = fields.pop("memory", None), fields.pop("shared_load", None)
        registry = InstanceRegistry(DispatchPolicy.PREFIX_AWARE, shared)
        for name, role in roles.items():
            registry.on_event(name, make_event(name, role, **fields), 0.0)
        router = SharedRouter if shared else Router
        return router(registry, rules=rules, clock=clock, seed=5, prefix_memory=memory)

    return make
