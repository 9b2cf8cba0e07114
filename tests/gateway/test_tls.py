"""HTTPS: whom it serves, and certificates that change, break or never were any."""

import asyncio
import logging
import ssl
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization

from cleave.gateway import context as context_module
from cleave.gateway import tls
from cleave.gateway.app import client_connection as client_module
from cleave.gateway.config import GatewayConfig
from cleave.gateway.main import main, run
from cleave.gateway.tls import TlsCertificate, TlsError

from tests.support.certificates import NAME, Files

ASK = {"model": "m", "prompt": "hello", "max_tokens": 3}


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path).write()


@pytest.fixture
async def stage(make_stage, files: Files):
    return await make_stage(
        {"p": "prefill", "d": "decode"}, tls_certificate=files.certificate, tls_key=files.key
    )


async def connect(stage, context: ssl.SSLContext):
    """A client of conftest's kind, over TLS."""
    plain = await stage.connect()
    reader, writer = await asyncio.open_connection(
        "127.0.0.1", stage.gateway.port, ssl=context, server_hostname=NAME
    )
    plain.close()
    plain.reader, plain.writer = reader, writer
    return plain


async def test_requests_pass_as_without_it(stage, files: Files) -> None:
    client = await connect(stage, files.trust())
    for body in (ASK, ASK | {"stream": True}, ASK | {"prompt": "x" * 3_000_000}, ASK):
        assert (await client.ask(body)).status == 200
    await stage.until_idle()


async def test_a_refusal_can_be_read(stage, files: Files, monkeypatch) -> None:
    monkeypatch.setattr(client_module, "LINGERING_CLOSE_S", 0.1)
    client = await connect(stage, files.trust())
    client.writer.write(b"NONSENSE\r\n\r\n")
    assert (await client.read()).status == 400
    assert await client.is_closed()


async def test_a_client_that_leaves_stops_the_engine(stage, files: Files) -> None:
    async def endless(engine, request, writer):
        await engine.stream(writer, ["t"] * 10_000, pause_s=0.01)

    stage.engines["d"].script = endless
    client = await connect(stage, files.trust())
    client.send(ASK | {"stream": True})
    await client.read_head()
    client.close()
    await stage.until_idle()
    await stage.until(lambda: stage.engines["d"].requests[0].cut, "its engine sees that it left")


async def test_without_the_key_no_report_is_accepted(stage) -> None:
    client = await stage.connect()
    client.send(ASK)
    assert await client.is_closed()


async def test_old_versions_are_refused(stage, files: Files) -> None:
    context = files.trust()
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        context.maximum_version = ssl.TLSVersion.TLSv1_1
    context.set_ciphers("ALL:@SECLEVEL=0")
    with pytest.raises((ssl.SSLError, ConnectionError)):
        await connect(stage, context)


async def test_a_renewed_certificate_is_for_new_connections(
    stage, files: Files, monkeypatch
) -> None:
    first = await connect(stage, files.trust())
    files.write()
    stage.context.refresh_certificates()
    second = await connect(stage, files.trust())
    assert (await first.ask(ASK)).status == (await second.ask(ASK)).status == 200


@pytest.mark.parametrize("half", [{"certificate": False}, {"key": False}])
async def test_half_a_renewal_changes_nothing_until_it_is_whole(
    stage, files: Files, caplog, half: dict[str, bool]
) -> None:
    old = files.trust()
    files.write(**half)
    stage.context.refresh_certificates()
    (record,) = [r for r in caplog.records if r.levelno == logging.ERROR]
    assert "do not belong together" in record.getMessage()
    assert "stays as it was, valid until" in record.getMessage()
    await connect(stage, old)
    files.write()
    stage.context.refresh_certificates()
    await connect(stage, files.trust())


@pytest.mark.parametrize(
    ("days", "fault"), [((-9, -1), "has expired at"), ((1, 9), "is not valid before")]
)
async def test_a_renewal_that_clients_refuse_is_not_taken_without_a_word(
    stage, files: Files, caplog, days: tuple[float, float], fault: str
) -> None:
    old = files.trust()
    files.write(starts_in=days[0], ends_in=days[1])
    for _ in range(3):
        stage.context.refresh_certificates()
    (record,) = [r for r in caplog.records if r.levelno == logging.ERROR]
    assert fault in record.getMessage()
    assert "stays as it was, valid until" in record.getMessage()
    client = await connect(stage, old)
    assert (await client.ask(ASK)).status == 200
    files.write()
    stage.context.refresh_certificates()
    await connect(stage, files.trust())


@pytest.mark.parametrize("file", ["certificate", "key"])
@pytest.mark.parametrize("content", [b"-----BEGIN CERT", b"", b"\xff\x00" * 99, "half", None])
async def test_half_a_file_changes_nothing(stage, files: Files, caplog, file: str, content) -> None:
    old, path = files.trust(), getattr(files, file)
    whole = path.read_bytes()
    if content is None:
        path.unlink()
    else:
        path.write_bytes(whole[: len(whole) // 2] if content == "half" else content)
    stage.context.refresh_certificates()
    assert sum(r.levelno == logging.ERROR for r in caplog.records) == 1
    await connect(stage, old)
    path.write_bytes(whole)
    stage.context.refresh_certificates()
    await connect(stage, old)


def test_one_that_is_not_valid_yet_is_taken_once_it_is(files: Files, clock) -> None:
    now = datetime.now(UTC)
    certificate = TlsCertificate(files.certificate, files.key, clock, lambda: now)
    first = certificate.loaded
    files.write(starts_in=0.5, ends_in=3)
    assert not certificate.refresh()
    now += timedelta(hours=13)
    assert not certificate.refresh(), "it is tried again after some seconds"
    clock.now_s += 6
    assert certificate.refresh()
    assert certificate.loaded is not first


def test_when_both_are_of_no_use_the_new_one_is_taken(files: Files, clock, caplog) -> None:
    now = datetime.now(UTC)
    certificate = TlsCertificate(files.certificate, files.key, clock, lambda: now)
    now += timedelta(days=2)
    files.write(starts_in=3, ends_in=9)
    assert certificate.refresh()
    assert "clients refuse the TLS certificate" in caplog.text


def test_a_fault_is_logged_again_every_hour(files: Files, clock, caplog) -> None:
    now = datetime.now(UTC)
    certificate = TlsCertificate(files.certificate, files.key, clock, lambda: now)
    files.certificate.write_text("half")
    for _ in range(1_000):
        certificate.refresh()
        clock.now_s += 10
    assert len(caplog.records) == 3


def test_files_that_change_while_they_are_read_are_read_again(
    files: Files, clock, monkeypatch, tmp_path: Path
) -> None:
    """A mounted Secret is swapped between the two files."""
    certificate = TlsCertificate(files.certificate, files.key, clock)
    read, first = tls._read, certificate.loaded

    def swap(file: Path) -> bytes:
        content = read(file)
        monkeypatch.setattr(tls, "_read", read)
        files.write()
        return content

    monkeypatch.setattr(tls, "_read", swap)
    files.write()
    assert not certificate.refresh()
    assert certificate.loaded is first
    assert certificate.refresh()
    pair = certificate.loaded
    assert (pair.certificate, pair.key) == (files.certificate.read_bytes(), files.key.read_bytes())


def test_one_that_has_expired_at_the_start_is_used_and_named(files: Files, caplog) -> None:
    files.write(starts_in=-3, ends_in=-1)
    certificate = TlsCertificate(files.certificate, files.key)
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert f"clients refuse the TLS certificate: {files.certificate} has expired" in caplog.text
    assert certificate.context is certificate.loaded.context


async def test_a_metric_says_when_the_certificate_in_use_expires(
    make_stage, files: Files, internal_port: int
) -> None:
    stage = await make_stage(
        {}, tls_certificate=files.certificate, tls_key=files.key, internal_port=internal_port
    )
    stage.gateway.port = internal_port
    name = 'cleave_gateway_certificate_expiry_timestamp_seconds{port="https"} '

    async def read_expiry() -> float:
        page = (await stage.ask(None, "/metrics")).body.decode()
        return float(page.partition(name)[2].partition("\n")[0])

    assert await read_expiry() == pytest.approx(time.time() + 86_400, abs=300)
    files.write(ends_in=9)
    stage.context.refresh_certificates()
    assert await read_expiry() == pytest.approx(time.time() + 9 * 86_400, abs=300)
    files.write(ends_in=-1, starts_in=-2)
    stage.context.refresh_certificates()
    assert await read_expiry() == pytest.approx(time.time() + 9 * 86_400, abs=300)


def test_what_cannot_be_used_is_one_clear_error(files: Files, tmp_path: Path, caplog) -> None:
    other = Files(tmp_path / "other")
    other.folder.mkdir()
    other.write()
    locked = Files(tmp_path / "locked")
    locked.folder.mkdir()
    locked.write(lock=serialization.BestAvailableEncryption(b"secret"))
    (tmp_path / "text").write_text("no certificate")
    for certificate, key, message in (
        (tmp_path / "none", files.key, "none: No such file"),
        (files.certificate, tmp_path, "Is a directory"),
        (tmp_path / "text", files.key, "not both are PEM"),
        (files.certificate, files.certificate, "not both are PEM"),
        (files.certificate, other.key, "do not belong together"),
        (locked.certificate, locked.key, "without a password"),
    ):
        with pytest.raises(TlsError, match=message):
            TlsCertificate(certificate, key)
    caplog.clear()
    bad = GatewayConfig("", port=0, tls_certificate=tmp_path / "text", tls_key=files.key)
    assert run(bad) == 2
    assert len(caplog.records) == 1


def test_a_certificate_needs_its_key(capsys) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--agents", "", "--tls-cert", "tls.crt"])
    assert "give both or neither" in capsys.readouterr().err


def test_a_router_needs_a_certificate_and_the_authority_of_its_callers(capsys) -> None:
    flags = ["--router-port=9003", "--router-cert=tls.crt", "--router-key=tls.key"]
    for given in (flags[:1], flags):
        with pytest.raises(SystemExit, match="2"):
            main(["--agents", "", *given])
        assert "must show a certificate: give --router-cert" in capsys.readouterr().err


@pytest.mark.interpreted
async def test_only_so_many_handshakes_may_be_under_way(
    make_stage, files: Files, monkeypatch
) -> None:
    monkeypatch.setattr(context_module, "MAX_HANDSHAKES", 2)
    stage = await make_stage({"x": "mixed"}, tls_certificate=files.certificate, tls_key=files.key)
    silent = [await stage.connect() for _ in range(2)]
    await stage.until(lambda: len(stage.context.handshake_limiter) == 2, "both are under way")
    await asyncio.gather(*(stage.connect() for _ in range(50)))
    assert [await each.is_closed() for each in silent] == [True, True]
    client = await connect(stage, files.trust())
    assert (await client.ask(ASK)).status == 200
    assert len(stage.context.handshake_limiter) <= 2
    await stage.until(lambda: len(stage.context.clients) <= 3, "the others are closed")


async def test_a_handshake_that_fails_leaves_nothing_behind(stage) -> None:
    gone, garbage = await stage.connect(), await stage.connect()
    await stage.until(lambda: len(stage.context.handshake_limiter) == 2, "both shake hands")
    gone.close()
    garbage.writer.write(b"GET / HTTP/1.1\r\n\r\n")
    assert await garbage.is_closed()
    await stage.until(lambda: len(stage.context.handshake_limiter) == 0, "none is left")
    assert not stage.context.clients
