"""TLS of the endpoint picker's port, over real channels of gRPC."""

import asyncio
import contextlib
import logging
import socket
import ssl
import sys
from pathlib import Path

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cleave.gateway.config import GatewayConfig
from cleave.gateway.endpoint_picker.credentials import EndpointPickerError, make_credentials
from cleave.gateway.main import main
from cleave.gateway.server import GatewayServer
from cleave.gateway.tls import TlsError

from tests.support.certificates import NAME, Files
from tests.support.ports import find_free_port

PATIENCE_S = 60.0
HOST = "127.0.0.1"
PEM = serialization.Encoding.PEM


@pytest.fixture
def port() -> int:
    return find_free_port()


@pytest.fixture
def make_picker(make_stage, port):
    async def make(**options: object) -> None:
        await make_stage({"x": "mixed"}, endpoint_picker_port=port, **options)

    return make


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path).write()


async def ask(port: int, trusted: bytes | None, name: str = "") -> int:
    """The health of the picker; without `trusted` over a plain channel."""
    options = [("grpc.ssl_target_name_override", name)] if name else []
    # Else channels of one process to one address share a connection.
    options += [("grpc.use_local_subchannel_pool", 1)]
    address = f"{HOST}:{port}"
    async with contextlib.AsyncExitStack() as stack:
        if trusted is None:
            channel = grpc.aio.insecure_channel(address, options=options)
        else:
            proof = grpc.ssl_channel_credentials(trusted)
            channel = grpc.aio.secure_channel(address, proof, options=options)
        await stack.enter_async_context(channel)
        request = health_pb2.HealthCheckRequest(service="readiness")
        check = health_pb2_grpc.HealthStub(channel).Check(request, timeout=PATIENCE_S)
        return (await check).status


async def shown(port: int) -> bytes:
    """What the picker shows a proxy that checks nothing, as most do."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    _, writer = await asyncio.open_connection(HOST, port, ssl=context)
    connection = writer.get_extra_info("ssl_object")
    assert connection.selected_alpn_protocol() == "h2"
    writer.transport.abort()
    return connection.getpeercert(binary_form=True)


async def test_without_files_it_speaks_tls_with_a_certificate_of_its_own(make_picker, port) -> None:
    await make_picker()
    own = x509.load_der_x509_certificate(await shown(port))
    own.verify_directly_issued_by(own)
    assert await ask(port, own.public_bytes(PEM)) == health_pb2.HealthCheckResponse.SERVING
    with pytest.raises(grpc.aio.AioRpcError):
        await ask(port, None)


async def test_each_start_signs_anew(make_stage, make_picker, port) -> None:
    await make_picker()
    first = await shown(port)
    with socket.socket() as free:
        free.bind((HOST, 0))
        other = free.getsockname()[1]
    await make_stage({}, endpoint_picker_port=other)
    assert await shown(other) != first


async def test_it_shows_the_certificate_that_is_given(make_picker, port, files: Files) -> None:
    await make_picker(endpoint_picker_certificate=files.certificate, endpoint_picker_key=files.key)
    trusted = files.certificate.read_bytes()
    assert await ask(port, trusted, NAME) == health_pb2.HealthCheckResponse.SERVING


async def test_a_renewed_certificate_is_for_new_connections(
    make_picker, port, files: Files, caplog
) -> None:
    await make_picker(endpoint_picker_certificate=files.certificate, endpoint_picker_key=files.key)
    old = files.certificate.read_bytes()
    files.write(key=False)
    assert await ask(port, old, NAME), "half a renewal changes nothing"
    assert [r.levelno for r in caplog.records if "stays as it was" in r.message] == [logging.ERROR]
    files.write()
    assert await ask(port, files.certificate.read_bytes(), NAME)


async def test_without_tls_it_is_plain_grpc(make_picker, port) -> None:
    await make_picker(endpoint_picker_plain=True)
    assert await ask(port, None) == health_pb2.HealthCheckResponse.SERVING


def test_files_that_cannot_be_used_are_one_clear_error(files: Files, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no certificate")
    config = GatewayConfig(
        "", endpoint_picker_certificate=tmp_path / "text", endpoint_picker_key=files.key
    )
    with pytest.raises(TlsError, match="not both are PEM"):
        GatewayServer(config)


def test_without_the_library_it_says_what_to_install(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(EndpointPickerError, match="needs the extra gateway"):
        make_credentials(GatewayConfig(""), None)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--endpoint-picker-cert", "tls.crt"], "give both or neither"),
        (
            ["--endpoint-picker-cert=a", "--endpoint-picker-key=b", "--endpoint-picker-plain"],
            "leave out one of them",
        ),
    ],
)
def test_options_that_do_not_fit_together_are_refused(flags, message, capsys) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--agents", "", *flags])
    assert message in capsys.readouterr().err
