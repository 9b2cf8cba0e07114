"""Agents of a newer version: shown on every page, given no requests, and no page fails for them."""

import math

import msgspec
import pytest

from cleave.rpc.fleet_status import FleetStatus
from cleave.rpc.v1 import agent_pb2

ASK = {"model": "m", "prompt": "hello", "max_tokens": 3}
ODD = {"role": {"role": 9}, "state": {"state": 9}, "home": {"home": 9}, "all": {}}
ODD["all"] = ODD["role"] | ODD["state"] | ODD["home"]


@pytest.fixture(params=ODD)
async def odd(make_stage, internal_port, request):
    """One instance as always, and one that states what is not known here."""
    stage = await make_stage({"x": "mixed", "y": "mixed"}, internal_port=internal_port)
    event = stage.engines["y"].registration()
    event.registration.MergeFrom(agent_pb2.Registration(**ODD[request.param]))
    stage.context.router.registry.on_event("y", event, stage.context.clock())
    return stage, ODD[request.param]


async def test_every_page_shows_it(odd, internal_port: int) -> None:
    stage, fields = odd
    words = dict.fromkeys(fields, "unknown_9")
    health = (await stage.ask(None, "/health")).json()
    instance = next(each for each in health["models"]["m"]["instances"] if each["name"] == "y")
    assert instance["role"] == words.get("role", "mixed")
    assert instance["state"] == words.get("state", "ready")
    stage.gateway.port = internal_port
    metrics = await stage.ask(None, "/metrics")
    role, state = words.get("role", "mixed"), words.get("state", "ready")
    assert metrics.status == 200
    line = f'cleave_gateway_instances{{model="m",role="{role}",state="{state}"}}'
    assert line in metrics.body.decode()
    page = msgspec.json.decode((await stage.ask(None, "/fleet")).body, type=FleetStatus)
    instance = page.instances[1]
    assert (instance.role, instance.state) == (role, state)
    assert instance.home == words.get("home", role)


@pytest.mark.parametrize("odd", ["role", "state", "all"], indirect=True)
async def test_requests_go_to_the_others(odd) -> None:
    stage, _ = odd
    assert [(await stage.ask(ASK)).status for _ in range(4)] == [200] * 4
    assert len(stage.engines["x"].requests) == 4


async def test_numbers_that_json_does_not_have_leave_the_page_readable(
    make_stage, internal_port: int
) -> None:
    stage = await make_stage({"x": "mixed"}, internal_port=internal_port)
    kv_path = agent_pb2.KvPath(verified=True, transfer_ms=math.inf, bytes_per_s=math.nan)
    stage.state(stage.engines["x"], kv_path=kv_path)
    load = agent_pb2.LoadReport(boot_id="boot-x", kv_cache_usage=math.nan)
    stage.context.router.registry.on_event("x", agent_pb2.WatchEvent(load=load), 0.0)
    stage.gateway.port = internal_port
    page = msgspec.json.decode((await stage.ask(None, "/fleet")).body, type=FleetStatus)
    (instance,) = page.instances
    assert (
        instance.kv_cache_usage,
        instance.kv_path.transfer_ms,
        instance.kv_path.bytes_per_s,
    ) == (0, 0, 0)
    assert (await stage.ask(None, "/metrics")).status == 200
