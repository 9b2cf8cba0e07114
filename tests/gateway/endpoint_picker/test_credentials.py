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


async def ask(port: int, trusted: bytes | None, name: str = "", shown: Files | None = None) -> int:
    """The health of the picker; without `trusted` over a plain channel. `shown`: the caller's own
    certificate."""
    options = [("grpc.ssl_target_name_override", name)] if name else []
    # Else channels of one process to one address share a connection.
    options += [("grpc.use_local_subchannel_pool", 1)]
    address = f"{HOST}:{port}"
    async with contextlib.AsyncExitStack() as stack:
        if trusted is None:
            channel = grpc.aio.insecure_channel(address, options=options)
        else:
            own = (shown.key.read_bytes(), shown.certificate.read_bytes()) if shown else ()
            proof = grpc.ssl_channel_credentials(trusted, *own)
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


@pytest.fixture
def make_files(tmp_path: Path):
    """Makes files of certificates in a folder of this name."""

    def make(name: str) -> Files:
        (folder := tmp_path / name).mkdir()
        return Files(folder).write()

    return make


async def test_a_direct_picker_serves_proxies_alone(make_picker, port, make_files) -> None:
    picker, proxy, stranger = map(make_files, ("picker", "proxy", "stranger"))
    await make_picker(
        endpoint_picker_direct=True,
        endpoint_picker_certificate=picker.certificate,
        endpoint_picker_key=picker.key,
        endpoint_picker_client_ca=proxy.certificate,
    )
    trusted = picker.certificate.read_bytes()
    assert await ask(port, trusted, NAME, proxy) == health_pb2.HealthCheckResponse.SERVING
    for shown in (None, stranger, picker):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await ask(port, trusted, NAME, shown)
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    with pytest.raises(grpc.aio.AioRpcError):
        await ask(port, None)


async def test_another_authority_of_proxies_is_for_new_connections(
    make_picker, port, make_files, caplog
) -> None:
    old, new = make_files("old"), make_files("new")
    (authority := old.folder / "ca.crt").write_bytes(old.certificate.read_bytes())
    await make_picker(endpoint_picker_client_ca=authority)
    own = x509.load_der_x509_certificate(await shown(port)).public_bytes(PEM)
    authority.write_text("half of a")
    assert await ask(port, own, shown=old)
    assert [r.levelno for r in caplog.records if "stays as it was" in r.message] == [logging.ERROR]
    authority.write_bytes(new.certificate.read_bytes())
    assert await ask(port, own, shown=new)
    with pytest.raises(grpc.aio.AioRpcError):
        await ask(port, own, shown=old)


@pytest.mark.parametrize(
    ("text", "reason"),
    [(None, "No such file"), ("", "has no certificates"), ("\u00e9", "has no certificates")],
)
def test_an_authority_that_cannot_be_used_is_one_clear_error(
    tmp_path: Path, text: str | None, reason: str
) -> None:
    file = tmp_path / "ca.crt"
    if text is not None:
        file.write_text(text)
    with pytest.raises(TlsError, match=f"ca.crt: {reason}"):
        make_credentials(GatewayConfig("", endpoint_picker_client_ca=file), None)


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
        (["--endpoint-picker-client-ca=a", "--endpoint-picker-plain"], "leave out one of them"),
        (["--endpoint-picker-direct"], "give --endpoint-picker-client-ca"),
        (["--endpoint-picker-direct", "--endpoint-picker-plain"], "--endpoint-picker-client-ca"),
        (
            ["--endpoint-picker-direct", "--endpoint-picker-cert=a", "--endpoint-picker-key=b"],
            "give --endpoint-picker-client-ca",
        ),
    ],
)
def test_options_that_do_not_fit_together_are_refused(flags, message, capsys) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--agents", "", *flags])
    assert message in capsys.readouterr().err
