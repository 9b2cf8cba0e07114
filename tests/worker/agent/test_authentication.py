"""Every method of an agent asks its caller for a token, over a real server."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import message_factory
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cleave.rpc.credentials import METADATA_KEY, TOKEN_ENV, build_metadata
from cleave.rpc.v1 import agent_pb2, agent_pb2_grpc
from cleave.shm.access_page import AccessPage
from cleave.shm.load_page import LoadPage
from cleave_worker.agent import authentication, service
from cleave_worker.agent.authentication import AgentMethod, SharedToken
from cleave_worker.agent.config import AgentConfig
from cleave_worker.agent.instance import EnginePages, WorkerInstance
from cleave_worker.agent.service import AgentServer


@asynccontextmanager
async def serving(
    config: AgentConfig, token_file: Path
) -> AsyncIterator[tuple[grpc.aio.Channel, WorkerInstance]]:
    async def refuse(*_: object) -> Any:
        raise AssertionError

    instance = WorkerInstance(config)
    server = AgentServer(instance, refuse, refuse, config.address, SharedToken(token_file))
    await server.start()
    async with grpc.aio.insecure_channel(config.address) as channel:
        yield channel, instance
    instance.end()
    await server.stop(0)


async def test_every_method_of_the_agent_asks_for_the_token_and_probes_do_not(
    config: AgentConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token_file = tmp_path / "token"
    token_file.write_text("right\n")
    async with serving(config, token_file) as (channel, _):
        agent = agent_pb2_grpc.AgentStub(channel)
        methods = agent_pb2.DESCRIPTOR.services_by_name["Agent"].methods_by_name

        async def call(name: str, metadata: Any) -> grpc.StatusCode:
            request = message_factory.GetMessageClass(methods[name].input_type)()
            answer = getattr(agent, name)(request, timeout=5, metadata=metadata)
            try:
                await (anext(aiter(answer)) if methods[name].server_streaming else answer)
            except grpc.aio.AioRpcError as error:
                return error.code()
            return grpc.StatusCode.OK

        for metadata in ((), ((METADATA_KEY, "Bearer wrong"),), ((METADATA_KEY, "right"),)):
            for name in methods:
                assert await call(name, metadata) is grpc.StatusCode.UNAUTHENTICATED
        monkeypatch.setenv(TOKEN_ENV, str(token_file))
        answer = await agent.Health(agent_pb2.HealthRequest(), timeout=5, metadata=build_metadata())
        assert answer.registration.instance == config.name
        async for event in agent.Watch(
            agent_pb2.WatchRequest(), timeout=5, metadata=build_metadata(token_file)
        ):
            assert event.HasField("registration")
            break
        probe = health_pb2_grpc.HealthStub(channel)
        await probe.Check(health_pb2.HealthCheckRequest(), timeout=5)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await anext(aiter(probe.Watch(health_pb2.HealthCheckRequest(), timeout=5)))
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_every_method_of_agents_has_a_rule() -> None:
    service = agent_pb2.DESCRIPTOR.services_by_name["Agent"]
    methods = {f"/{service.full_name}/{each.name}" for each in service.methods}
    assert methods <= set(AgentMethod)


async def test_a_method_without_a_rule_is_refused_also_with_the_token(
    config: AgentConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token_file = tmp_path / "token"
    token_file.write_text("right\n")
    checked = authentication._CHECKED_METHODS - {AgentMethod.DRAIN}
    monkeypatch.setattr(authentication, "_CHECKED_METHODS", checked)
    async with serving(config, token_file) as (channel, _):
        agent = agent_pb2_grpc.AgentStub(channel)
        metadata = build_metadata(token_file)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await agent.Drain(agent_pb2.DrainRequest(), timeout=5, metadata=metadata)
        assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED


async def test_routers_that_send_no_key_open_the_engine_until_they_leave(
    config: AgentConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token_file = tmp_path / "token"
    token_file.write_text("right\n")
    monkeypatch.setenv(TOKEN_ENV, str(token_file))
    with LoadPage(tmp_path / "load") as load, AccessPage(tmp_path / "access") as access:
        async with serving(config, token_file) as (channel, instance):
            agent = agent_pb2_grpc.AgentStub(channel)
            instance.start_boot("b1", "http://h:1", EnginePages(load, None, access), 0, "secret")

            async def follow(**fields: object) -> tuple[Any, agent_pb2.Registration]:
                request = agent_pb2.WatchRequest(**fields)
                events = agent.Watch(request, metadata=build_metadata())
                async for event in events:
                    return events, event.registration
                raise AssertionError

            keyed, registration = await follow(router="new", sends_engine_key=True)
            assert registration.engine_key == "secret"
            reader, _ = await follow()
            assert not access.is_open()
            old, _ = await follow(router="old")
            assert access.is_open()
            instance.start_boot("b2", "http://h:1", EnginePages(load, None, access), 0, "other")
            assert access.is_open(), "also of an engine that starts meanwhile"
            old.cancel()
            async with asyncio.timeout(10):
                while access.is_open():  # noqa: ASYNC110 - of another process
                    await asyncio.sleep(0.01)
            for events in (keyed, reader):
                events.cancel()


async def test_agents_of_an_earlier_version_test_handoffs_without_a_key_for_a_while(
    config: AgentConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token_file = tmp_path / "token"
    token_file.write_text("right\n")
    monkeypatch.setenv(TOKEN_ENV, str(token_file))
    monkeypatch.setattr(service, "_KEYLESS_PEERS_S", 0.5)
    with LoadPage(tmp_path / "load") as load, AccessPage(tmp_path / "access") as access:
        async with serving(config, token_file) as (channel, instance):
            agent = agent_pb2_grpc.AgentStub(channel)
            instance.start_boot("b1", "http://h:1", EnginePages(load, None, access), 0, "secret")
            present = agent_pb2.HealthRequest(sends_engine_key=True)
            await agent.Health(present, metadata=build_metadata())
            assert not access.is_open()
            for _ in range(2):
                await agent.Health(agent_pb2.HealthRequest(), metadata=build_metadata())
                assert access.is_open()
            async with asyncio.timeout(10):
                while access.is_open():  # noqa: ASYNC110 - of another process
                    await asyncio.sleep(0.01)
