"""Every method of an agent asks its caller for a signature, over a real server."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import message_factory
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cleave.rpc import probes
from cleave.rpc.credentials import METADATA_KEY, SCHEME, compute_mac, sign_with_token
from cleave.rpc.v1 import agent_pb2, agent_pb2_grpc
from cleave_worker.agent import authentication
from cleave_worker.agent.authentication import (
    AgentMethod,
    AuthenticationError,
    TokenSignatures,
)
from cleave_worker.agent.config import AgentConfig
from cleave_worker.agent.instance import WorkerInstance
from cleave_worker.agent.service import AgentServer

PATIENCE_S = 20
NUM_CHANNELS, NUM_CALLS = 12, 95


@asynccontextmanager
async def serving(
    config: AgentConfig, token_file: Path
) -> AsyncIterator[tuple[grpc.aio.Channel, WorkerInstance]]:
    async def refuse(*_: object) -> Any:
        raise AssertionError

    instance = WorkerInstance(config)
    own = TokenSignatures(token_file, config.address)
    server = AgentServer(instance, refuse, refuse, config.address, own)
    await server.start()
    async with grpc.aio.insecure_channel(config.address) as channel:
        yield channel, instance
    instance.end()
    await server.stop(0)


async def test_every_method_of_the_agent_asks_for_the_token_and_probes_do_not(
    config: AgentConfig, tmp_path: Path
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

        (tmp_path / "other").write_text("wrong\n")
        refused = (
            (),
            *(((METADATA_KEY, text),) for text in ("Bearer wrong", "right", "Bearer right")),
            sign_with_token(tmp_path / "other", config.address),
            # What the agent next door gets.
            sign_with_token(token_file, config.address.replace(":9000", ":9002")),
        )
        for metadata in refused:
            for name in methods:
                assert await call(name, metadata) is grpc.StatusCode.UNAUTHENTICATED
        own = sign_with_token(token_file, config.address)
        answer = await agent.Health(agent_pb2.HealthRequest(), timeout=5, metadata=own)
        assert answer.registration.instance == config.name
        async for event in agent.Watch(agent_pb2.WatchRequest(), timeout=5, metadata=own):
            assert event.HasField("registration")
            break
        probe = health_pb2_grpc.HealthStub(channel)
        await probe.Check(health_pb2.HealthCheckRequest(), timeout=5)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await anext(aiter(probe.Watch(health_pb2.HealthCheckRequest(), timeout=5)))
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def send_nothing() -> AsyncIterator[bytes]:
    await asyncio.sleep(3_600)
    yield b""


async def get_code(call: "grpc.aio.StreamUnaryCall[bytes, bytes]") -> grpc.StatusCode:
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


@pytest.mark.parametrize(
    ("method", "end"),
    [
        ("/grpc.health.v1.Health/Check", grpc.StatusCode.DEADLINE_EXCEEDED),
        ("/cleave.rpc.v1.Agent/Health", grpc.StatusCode.UNAUTHENTICATED),
        ("/cleave.rpc.v1.Agent/Watch", grpc.StatusCode.UNAUTHENTICATED),
    ],
)
async def test_calls_without_a_message_take_no_places_and_end(
    config: AgentConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    end: grpc.StatusCode,
) -> None:
    monkeypatch.setattr(probes, "_MESSAGE_S", 0.5)
    (token := tmp_path / "token").write_text("right\n")
    own = ("grpc.use_local_subchannel_pool", 1)
    async with serving(config, token) as (channel, _):
        channels = [
            grpc.aio.insecure_channel(config.address, options=[own]) for _ in range(NUM_CHANNELS)
        ]
        calls = [each.stream_unary(method)(send_nothing()) for each in channels * NUM_CALLS]
        async with asyncio.timeout(PATIENCE_S):
            ends = {await get_code(each) for each in calls[::19]}
            # Connections refuse those beyond their limit.
            assert end in ends <= {end, grpc.StatusCode.UNAVAILABLE}
            signed = sign_with_token(token, config.address)
            await agent_pb2_grpc.AgentStub(channel).Health(
                agent_pb2.HealthRequest(), metadata=signed
            )
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        for call in calls:
            call.cancel()
        for each in channels:
            await each.close()


async def test_a_probe_of_an_unknown_service_or_without_a_message_is_refused(
    config: AgentConfig, tmp_path: Path
) -> None:
    (token := tmp_path / "token").write_text("right\n")
    async with serving(config, token) as (channel, _):
        probe = health_pb2_grpc.HealthStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await probe.Check(health_pb2.HealthCheckRequest(service="other"), timeout=PATIENCE_S)
        assert refused.value.code() is grpc.StatusCode.NOT_FOUND
        empty = channel.stream_unary("/grpc.health.v1.Health/Check")(timeout=PATIENCE_S)
        await empty.done_writing()
        assert await get_code(empty) is grpc.StatusCode.INVALID_ARGUMENT


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
        metadata = sign_with_token(token_file, config.address)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await agent.Drain(agent_pb2.DrainRequest(), timeout=5, metadata=metadata)
        assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED


class Clock:
    """Seconds since the epoch, as a test sets them."""

    def __init__(self) -> None:
        self.now_s = 1_000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.mark.parametrize(
    ("issued_s", "now_s", "fault"),
    [
        (1_000.0, 1_000.0, ""),
        (1_050.0, 1_100.0, ""),
        (1_100.0, 1_050.0, ""),
        (1_000.0, 1_061.0, "was signed 61 s ago: repeated"),
        (1_100.0, 1_030.0, "was signed -70 s ago"),
        # Somebody else may have listened there.
        (999.0, 1_010.0, "before this agent started"),
        # The clock was set back: calls go on.
        (800.0, 810.0, ""),
    ],
)
async def test_a_signature_is_good_for_a_minute_and_for_one_life_of_the_agent(
    tmp_path: Path, issued_s: float, now_s: float, fault: str
) -> None:
    clock = Clock()
    (tmp_path / "token").write_text("right")
    agent = TokenSignatures(tmp_path / "token", "127.0.0.1:9000", clock)
    clock.now_s = now_s
    issued_ms = int(issued_s * 1000)
    credential = f"{issued_ms}.{compute_mac(b'right', '127.0.0.1:9000', issued_ms)}"
    if not fault:
        await agent.verify(credential, AgentMethod.WATCH)
        return
    with pytest.raises(AuthenticationError, match=fault):
        await agent.verify(credential, AgentMethod.WATCH)


@pytest.mark.parametrize(
    "credential",
    ["", ".", "x.y", "1.", "-1.aa", "1e9.aa", "\u0661.aa", "9" * 4_400 + ".aa", "nan.aa", "1.\xff"],
)
async def test_a_strange_signature_is_refused_in_one_line(tmp_path: Path, credential: str) -> None:
    (tmp_path / "token").write_text("right")
    with pytest.raises(
        AuthenticationError, match=r"is not signed with|signed with another"
    ) as error:
        await TokenSignatures(tmp_path / "token", "a:1").verify(credential, AgentMethod.WATCH)
    assert "\n" not in str(error.value)


def test_an_empty_token_file_opens_no_agent(tmp_path) -> None:
    """Everyone could sign with it."""
    for text in ("", " \n"):
        (tmp_path / "token").write_text(text)
        with pytest.raises(OSError, match="has no token"):
            TokenSignatures(tmp_path / "token", "127.0.0.1:9000")
        assert sign_with_token(tmp_path / "token", "127.0.0.1:9000") == ()


def test_what_is_sent_does_not_contain_the_token(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("very-secret\n")
    ((name, text),) = sign_with_token(tmp_path / "token", "127.0.0.1:9000")
    assert name == METADATA_KEY
    assert text.startswith(SCHEME)
    assert "very-secret" not in text
    assert sign_with_token(tmp_path / "missing", "127.0.0.1:9000") == ()
