import asyncio
import ssl
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from cleave.local.kubelet.pod_spec import Probe, ProbeKind
from cleave.local.kubelet.probes import ProbeState, build_prober

from tests.support.certificates import Files

PROBE = Probe(ProbeKind.HTTP, 1, "/", failure_threshold=2, success_threshold=2)


def after(tally: ProbeState, answers: str) -> list[bool]:
    seen = []
    for answer in answers:
        tally = tally.record(PROBE, answer == "+")
        seen.append(tally.passed)
    return seen


@pytest.mark.parametrize(
    ("passed", "answers", "then"),
    [
        (False, "++-+--", [False, True, True, True, True, False]),
        (False, "+-+-", [False, False, False, False]),
        (True, "-+--", [True, True, True, False]),
    ],
)
def test_a_probe_changes_its_mind_only_at_its_thresholds(
    passed: bool, answers: str, then: list[bool]
) -> None:
    assert after(ProbeState(passed), answers) == then


@pytest.fixture
async def served() -> AsyncIterator[tuple[health.aio.HealthServicer, int]]:
    servicer = health.aio.HealthServicer()
    server = grpc.aio.server()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield servicer, port
    await server.stop(0)


async def test_a_grpc_probe_passes_only_while_the_service_is_serving(
    served: tuple[health.aio.HealthServicer, int],
) -> None:
    servicer, port = served
    asker = build_prober(Probe(ProbeKind.GRPC, port, "ready", timeout_s=10), "127.0.0.1")
    try:
        assert not await asker.check()
        await servicer.set("ready", health_pb2.HealthCheckResponse.SERVING)
        assert await asker.check()
        await servicer.set("ready", health_pb2.HealthCheckResponse.NOT_SERVING)
        assert not await asker.check()
    finally:
        await asker.close()


@pytest.mark.parametrize(
    ("answer", "passes"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\n", True),
        (b"HTTP/1.1 302 Found\r\n\r\n", True),
        (b"HTTP/1.1 503 Service Unavailable\r\n\r\n", False),
        (b"nonsense\r\n", False),
        (b"", False),
    ],
)
async def test_an_http_probe_goes_by_the_status(answer: bytes, passes: bool) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        probe = Probe(ProbeKind.HTTP, port, "/health", timeout_s=10)
        assert await build_prober(probe, "127.0.0.1").check() is passes


@pytest.mark.parametrize(("kind", "passes"), [(ProbeKind.HTTPS, True), (ProbeKind.HTTP, False)])
async def test_a_server_with_tls_is_probed_over_https(
    tmp_path: Path, kind: ProbeKind, passes: bool
) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        writer.close()

    files = Files(tmp_path).write()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.certificate, files.key)
    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    async with server:
        port = server.sockets[0].getsockname()[1]
        probe = Probe(kind, port, "/health", timeout_s=10)
        assert await build_prober(probe, "127.0.0.1").check() is passes


async def test_a_probe_that_gets_no_answer_fails_in_its_time() -> None:
    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await hold.wait()
        writer.close()

    hold = asyncio.Event()
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        silent = Probe(ProbeKind.HTTP, port, "/", timeout_s=0.1)
        assert not await build_prober(silent, "127.0.0.1").check()
        asker = build_prober(replace(silent, kind=ProbeKind.GRPC), "127.0.0.1")
        assert not await asker.check()
        await asker.close()
        hold.set()
