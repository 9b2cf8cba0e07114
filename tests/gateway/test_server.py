"""Start, end, and the command itself."""

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import grpc
import pytest

from cleave.api.enums import FlippingMode
from cleave.cli.main import app as cleave
from cleave.gateway.config import GatewayConfig
from cleave.gateway.main import main
from cleave.gateway.server import ACCEPTS_PER_TURN, GatewayServer
from cleave.rpc.v1 import agent_pb2, agent_pb2_grpc, router_pb2, router_pb2_grpc

from tests.support.certificates import Files
from tests.support.fake_api_server import build_slice, serve_slices
from tests.support.ports import find_free_port

ASK = {"model": "m", "prompt": "hello", "max_tokens": 3}
STREAM = ASK | {"stream": True}


async def test_running_answers_are_finished_before_the_end(single) -> None:
    async def slow(engine, request, writer):
        await engine.stream(writer, ["t"] * 30, pause_s=0.02)

    single.engines["x"].script = slow
    client, idle = await single.connect(), await single.connect()
    await idle.ask(None, "/health")
    client.send(STREAM)
    await client.read_head()
    stopping = asyncio.create_task(single.gateway.stop())
    assert await idle.is_closed()
    with pytest.raises(ConnectionRefusedError):
        await single.connect()
    count = 0
    while await client.read_chunk():
        count += 1
    assert count >= 30
    assert await client.is_closed()
    await stopping


async def test_many_connections_are_accepted_in_one_turn_of_the_event_loop(single) -> None:
    """Otherwise a flood of them makes others wait for a turn for each."""
    count = 8 * ACCEPTS_PER_TURN
    address = "127.0.0.1", single.gateway.port
    connections = [socket.create_connection(address) for _ in range(count)]
    turns = 0
    while len(single.context.clients) < count:
        turns += 1
        await asyncio.sleep(0)
    for connection in connections:
        connection.close()
    assert turns < count / 2


async def test_health_says_that_the_gateway_drains(single) -> None:
    single.context.draining = True
    response = await single.ask(None, "/health")
    assert (response.status, response.json()["status"]) == (503, "draining")
    assert response.headers["connection"] == "close"


async def test_a_gateway_that_goes_still_serves_who_has_not_heard_of_it(make_stage) -> None:
    """Until every node knows that the pod goes, new connections still come."""
    stage = await make_stage({"x": "mixed"}, shutdown_delay_s=2.0)
    idle = await stage.connect()
    await idle.ask(None, "/v1/models")
    stopping = asyncio.create_task(stage.gateway.stop())
    await stage.until(lambda: stage.context.draining, "it drains")
    assert (await stage.ask(None, "/health")).status == 503
    late = await stage.ask(ASK)
    assert (late.status, late.headers["connection"]) == (200, "close")
    assert (await idle.ask(ASK)).status == 200
    assert not stopping.done()
    await stopping
    with pytest.raises(ConnectionRefusedError):
        await stage.connect()


async def test_a_gateway_ends_when_a_part_of_it_fails(single, monkeypatch, caplog) -> None:
    def fail() -> None:
        raise RuntimeError("there is a mistake in it")

    assert not single.gateway.failed
    monkeypatch.setattr(single.gateway, "_take_clients", fail)
    await single.until(single.gateway.stop_requested.is_set, "it wants to end")
    assert single.gateway.failed
    assert "there is a mistake in it" in caplog.text


async def test_what_outlasts_the_drain_time_is_cut(make_stage) -> None:
    stage = await make_stage({"x": "mixed"}, drain_s=0.2)

    async def hang(engine, request, writer):
        await asyncio.sleep(600)

    stage.engines["x"].script = hang
    client = await stage.connect()
    client.send(STREAM)
    await stage.until(lambda: bool(stage.engines["x"].requests), "it runs")
    await stage.gateway.stop()
    assert await client.is_closed()
    await stage.until(lambda: stage.engines["x"].requests[0].cut, "the engine is stopped")


def test_bad_usage_is_exit_code_2(tmp_path, monkeypatch) -> None:
    monkeypatch.delenv("CLEAVE_AGENTS", raising=False)
    with pytest.raises(SystemExit) as missing:
        main(["--port", "0"])
    assert missing.value.code == 2
    assert main(["--port", "0", "--agents", "nowhere"]) == 2
    assert main(["--port", "0", "--agents", "", "--api-keys", str(tmp_path / "none")]) == 2
    (tmp_path / "empty").write_text("# nothing\n")
    assert main(["--port", "0", "--agents", "", "--api-keys", str(tmp_path / "empty")]) == 2


@pytest.mark.parametrize(
    ("option", "value", "fault"),
    [
        ("--allowed-origins", "https://a.example/", "'https://a.example/' is not an origin"),
        ("--allowed-origins", "*,A.example", "'A.example' is not an origin as browsers send it"),
        ("--allowed-origins", "https://*.a.example", "'https://*.a.example' is not an origin"),
        ("--allowed-origins", "https://b\xfccher.example", "'https://b\xfccher.example' is not an"),
        ("--port", "99999999", "99999999 is not a port: it must be from 0 to 65535"),
        ("--max-body", "5parsecs", "'5parsecs' is not a size such as 16MiB"),
        ("--queue-limit", "0", "0 is not at least 1"),
        ("--min-decode", "-1", "-1 is not a whole number between 0 and"),
        ("--idle-timeout", "nan", "nan is not between 0 and"),
        ("--ttft-ms", "soon", "'soon' is not a number"),
    ],
)
def test_a_value_out_of_bounds_is_two_lines(option, value, fault, capsys) -> None:
    with pytest.raises(SystemExit) as refused:
        main(["--agents", "", f"{option}={value}"])
    assert refused.value.code == 2
    usage, error = capsys.readouterr().err.splitlines()
    assert usage.endswith("--help lists the options")
    assert f"error: argument {option}: {fault}" in error


def test_a_body_must_fit_into_what_may_be_received(capsys) -> None:
    with pytest.raises(SystemExit) as refused:
        main(["--port", "0", "--agents", "", "--max-body", "65MiB"])
    assert refused.value.code == 2
    output = capsys.readouterr().err
    assert "--max-buffered 67108864 is below --max-body 68157440" in output


@pytest.mark.parametrize(
    ("command_main", "program"),
    [(main, "python -m cleave.gateway.main"), (cleave, "cleave gateway")],
    ids=["module", "command"],
)
def test_the_help_names_the_command_that_was_called(
    command_main, program: str, monkeypatch, capsys
) -> None:
    arguments = ["--help"] if command_main is main else ["gateway", "--help"]
    monkeypatch.setattr(sys, "argv", ["x", *arguments])
    with pytest.raises(SystemExit):
        command_main()
    assert capsys.readouterr().out.startswith(f"usage: {program} ")


def test_an_occupied_port_is_exit_code_1() -> None:
    with socket.socket() as occupied:
        occupied.bind(("127.0.0.1", 0))
        occupied.listen()
        assert main(["--port", str(occupied.getsockname()[1]), "--agents", ""]) == 1


@pytest.fixture
def process() -> Iterator[subprocess.Popen[str]]:
    started = subprocess.Popen(
        [sys.executable, "-m", "cleave.gateway.main", "--port", "0"],
        env=os.environ | {"CLEAVE_AGENTS": "file:/nonexistent"},
        stderr=subprocess.PIPE,
        text=True,
    )
    with started:
        yield started
        started.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_command_serves_until_a_signal_and_ends_with_0(process, number) -> None:
    lines = iter(process.stderr.readline, "")
    assert any("listening on http://127.0.0.1:" in line for line in lines)
    process.send_signal(number)
    assert process.wait(15) == 0


class FakeAgent(agent_pb2_grpc.AgentServicer):
    def __init__(self, registration: agent_pb2.WatchEvent) -> None:
        self._registration = registration

    async def Watch(self, request, context):  # noqa: N802
        yield self._registration
        while True:
            await asyncio.sleep(0.1)
            boot_id = self._registration.registration.boot_id
            yield agent_pb2.WatchEvent(load=agent_pb2.LoadReport(boot_id=boot_id))


async def test_agents_are_followed_and_picks_are_offered_to_others(make_stage, tmp_path) -> None:
    """Through real gRPC: an agent states an instance, a second gateway's router serves it to
    callers with a certificate of its authority, and to no other."""

    def make_files(name: str) -> Files:
        (folder := tmp_path / name).mkdir()
        return Files(folder).write()

    stage = await make_stage({"d": "decode"})
    server = grpc.aio.server()
    registration = stage.engines["d"].registration()
    agent_pb2_grpc.add_AgentServicer_to_server(FakeAgent(registration), server)
    agent_port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    router_port = find_free_port()
    files, caller, stranger = map(make_files, ("gateway", "caller", "stranger"))
    config = GatewayConfig(
        agents=f"127.0.0.1:{agent_port}",
        port=0,
        router_port=router_port,
        router_certificate=files.certificate,
        router_key=files.key,
        router_client_ca=caller.certificate,
    )
    gateway = GatewayServer(config)
    await gateway.start()
    try:
        registry = gateway.context.router.registry
        await stage.until(lambda: "d" in registry.instances, "the agent is followed")
        stage.gateway.port = gateway.port
        assert (await stage.ask(ASK)).status == 200
        async with files.dial(router_port, caller) as channel:
            stub = router_pb2_grpc.RouterStub(channel)
            picked = await stub.Pick(router_pb2.PickRequest(model="m"))
        assert picked.decode.instance == "d"
        for shown in (None, stranger, files):
            async with files.dial(router_port, shown) as channel:
                pick = router_pb2_grpc.RouterStub(channel).Pick(router_pb2.PickRequest(model="m"))
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await pick
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        expiries = gateway.context.metrics.certificate_expiries
        assert abs(expiries["router"] - time.time() - 86_400) < 60
    finally:
        await gateway.stop()
        await server.stop(0)


async def test_thresholds_of_another_plan_are_applied_while_it_serves(
    make_stage, tmp_path, monkeypatch
) -> None:
    """And exported, as a review of the plan must know what was in force."""
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    async with serve_slices(tmp_path / "kubeconfig") as server:
        server.slices = {"one": build_slice("one", version=1, short_prompt_tokens=256)}
        agents = "endpoints:prod/chat-workers:9000"
        stage = await make_stage({}, agents=agents, ahead_from_tokens=64)

        async def read_thresholds() -> tuple[str, ...]:
            page = (await stage.ask(None, "/metrics")).body.decode()
            pattern = r'plan_threshold_tokens{threshold="%s"} (\d+)'
            names = "short_prompt", "overlap_min"
            return tuple(re.findall(pattern % name, page)[0] for name in names)

        context = stage.context
        await stage.until(lambda: context.metrics.whole_below_tokens == 256, "the first plan's")
        assert context.ahead_from_tokens == 64, "the flag counts where the plan says nothing"
        assert await read_thresholds() == ("256", "64")
        server.put(build_slice("one", version=2, short_prompt_tokens=32, overlap_min_tokens=512))
        await stage.until(lambda: context.metrics.whole_below_tokens == 32, "the next plan's")
        assert context.ahead_from_tokens == 512
        assert context.router._short_prompt_tokens == 32
        server.put(build_slice("one", version=3))
        await stage.until(lambda: context.metrics.whole_below_tokens == 0, "a plan without any")
        assert await read_thresholds() == ("0", "64")


@pytest.mark.parametrize(
    ("flipping", "headroom_ms"), [(FlippingMode.AUTO, 1_250.0), (FlippingMode.OFF, 0.0)]
)
def test_prompts_wait_before_mixed_instances_take_them_where_roles_flip(
    flipping: FlippingMode, headroom_ms: float
) -> None:
    config = GatewayConfig(agents="", port=0, ttft_slo_ms=2_500.0, flipping=flipping)
    selector = GatewayServer(config).context.router._selector
    assert selector._headroom._wait_ms == headroom_ms
