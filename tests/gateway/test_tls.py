"""HTTPS: whom it serves, and certificates that change, break or never were any."""

import asyncio
import logging
import ssl
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization

from cleave.gateway import context as context_module
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
    stage.gateway._certificate.refresh()
    second = await connect(stage, files.trust())
    assert (await first.ask(ASK)).status == (await second.ask(ASK)).status == 200


@pytest.mark.parametrize("half", [{"certificate": False}, {"key": False}])
async def test_half_a_renewal_changes_nothing_until_it_is_whole(
    stage, files: Files, caplog, half: dict[str, bool]
) -> None:
    old = files.trust()
    files.write(**half)
    stage.gateway._certificate.refresh()
    (record,) = [r for r in caplog.records if r.levelno == logging.ERROR]
    assert "do not belong together" in record.getMessage()
    await connect(stage, old)
    files.write()
    stage.gateway._certificate.refresh()
    await connect(stage, files.trust())


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
