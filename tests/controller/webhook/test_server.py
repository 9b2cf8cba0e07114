import asyncio
import base64
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import aiohttp
import pytest

from cleave.controller.webhook import certificates, server
from cleave.controller.webhook.certificates import CertificateError
from cleave.controller.webhook.server import (
    CertificateRotator,
    CertificateStoreError,
    WebhookConfig,
    WebhookServer,
)

from tests.support.ports import find_free_port

NAMES = ("localhost",)
NOW = datetime(2026, 5, 1, tzinfo=UTC)


class Shelf:
    """A Secret and a configuration in memory; replaces are checked against the version."""

    def __init__(self) -> None:
        self.secret = {"metadata": {"resourceVersion": "1"}}
        self.bundles = [""]
        self.writes = 0
        self.faults: list[Exception] = []

    async def read_secret(self):
        if self.faults:
            raise self.faults.pop(0)
        return {**self.secret, "metadata": dict(self.secret["metadata"])}

    async def replace_secret(self, secret):
        await asyncio.sleep(0)
        version = self.secret["metadata"]["resourceVersion"]
        if secret["metadata"]["resourceVersion"] != version:
            return False
        self.secret = {**secret, "metadata": {"resourceVersion": str(int(version) + 1)}}
        self.writes += 1
        return True

    async def read_bundles(self):
        return list(self.bundles)

    async def write_bundle(self, bundle, count):
        self.bundles = [bundle] * count


def rotator(shelf, *, issues=True, now=NOW, names=NAMES) -> CertificateRotator:
    return CertificateRotator(shelf, names, issues_certificate=issues, now=lambda: now)


async def test_an_empty_secret_is_filled_and_the_ca_bundle_is_written() -> None:
    shelf = Shelf()
    rotated = await rotator(shelf).rotate()
    certificates.check(rotated, NAMES, NOW)
    assert certificates.from_secret(shelf.secret) == rotated
    assert base64.b64decode(shelf.bundles[0]).decode() == rotated.ca_bundle


async def test_nothing_is_written_while_the_certificate_is_good() -> None:
    shelf = Shelf()
    first = await rotator(shelf).rotate()
    assert await rotator(shelf, now=NOW + timedelta(days=30)).rotate() == first
    assert shelf.writes == 1


async def test_it_is_renewed_before_its_end() -> None:
    shelf = Shelf()
    first = await rotator(shelf).rotate()
    second = await rotator(shelf, now=NOW + timedelta(days=70)).rotate()
    assert second.cert_chain != first.cert_chain
    assert first.ca_bundle in second.ca_bundle


async def test_operators_that_start_together_show_one_certificate() -> None:
    shelf = Shelf()
    rotated = await asyncio.gather(*(rotator(shelf).rotate() for _ in range(4)))
    assert len(set(rotated)) == 1
    assert shelf.writes == 1


async def test_an_emptied_bundle_is_written_again() -> None:
    shelf = Shelf()
    await rotator(shelf).rotate()
    shelf.bundles = ["", ""]
    rotated = await rotator(shelf).rotate()
    assert [base64.b64decode(each).decode() for each in shelf.bundles] == [rotated.ca_bundle] * 2


async def test_cert_managers_secret_is_read_and_never_written() -> None:
    shelf = Shelf()
    with pytest.raises(CertificateError, match=r"has no tls\.crt and tls\.key yet"):
        await rotator(shelf, issues=False).rotate()
    theirs = certificates.issue(NAMES, NOW - timedelta(days=80))
    shelf.secret["data"] = certificates.to_secret(theirs)
    assert await rotator(shelf, issues=False).rotate() == theirs
    assert shelf.writes == 0
    assert shelf.bundles == [""]


async def test_a_secret_that_is_always_changed_by_others_is_given_up() -> None:
    shelf = Shelf()

    async def lose(secret):
        return False

    shelf.replace_secret = lose
    with pytest.raises(CertificateError, match="changed 5 times"):
        await rotator(shelf).rotate()


@asynccontextmanager
async def serving(shelf, monkeypatch) -> AsyncIterator[tuple[str, WebhookServer]]:
    monkeypatch.setattr(server, "_RETRY_S", 0.01)
    monkeypatch.setattr(server, "_ROTATION_CHECK_S", 0.02)
    port = find_free_port()
    config = WebhookConfig(("127.0.0.1",), port, NAMES, issues_certificate=True)
    served = WebhookServer(
        config, CertificateRotator(shelf, NAMES, issues_certificate=True), lambda: None
    )
    task = asyncio.create_task(served.run())
    try:
        async with asyncio.timeout(10):
            while not served.is_listening:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        yield f"https://localhost:{port}/validate", served
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def trusting(shelf) -> ssl.SSLContext:
    """As the API server trusts: only the CA of the configuration."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cadata=base64.b64decode(shelf.bundles[0]).decode())
    return context


REVIEW = {
    "request": {
        "uid": "u",
        "object": {
            "apiVersion": "cleave.dev/v1alpha1",
            "kind": "LLMDeployment",
            "metadata": {"name": "chat"},
            "spec": {"model": "a/b", "slo": {"ttftMs": 0, "tpotMs": 1}},
        },
    }
}


async def test_it_answers_over_tls_that_the_configuration_trusts(monkeypatch) -> None:
    shelf = Shelf()
    async with (
        serving(shelf, monkeypatch) as (url, _),
        aiohttp.ClientSession() as session,
        session.post(url, json=REVIEW, ssl=trusting(shelf)) as answer,
    ):
        said = (await answer.json())["response"]
    assert said["allowed"] is False
    assert said["status"]["message"] == "spec.slo.ttftMs: must be > 0 (got 0)"


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"{}", b"[" * 100_000, b'{"a":1,' * 20_001])
async def test_what_is_no_question_is_answered_400(monkeypatch, body) -> None:
    shelf = Shelf()
    async with (
        serving(shelf, monkeypatch) as (url, _),
        aiohttp.ClientSession() as session,
        session.post(url, data=body, ssl=trusting(shelf)) as answer,
    ):
        assert answer.status == 400


async def test_an_unavailable_api_server_is_retried_at_the_start(monkeypatch) -> None:
    shelf = Shelf()
    shelf.faults = [CertificateStoreError("away"), CertificateStoreError("away")]
    async with serving(shelf, monkeypatch) as (_, served):
        assert served.is_listening
    assert not served.is_listening


async def test_a_new_certificate_is_shown_without_a_restart(monkeypatch) -> None:
    shelf = Shelf()
    async with serving(shelf, monkeypatch) as (url, _):
        new = certificates.issue(NAMES, datetime.now(UTC))
        shelf.secret = {"metadata": {"resourceVersion": "9"}, "data": certificates.to_secret(new)}
        only_new = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        only_new.load_verify_locations(cadata=new.ca_bundle)
        async with asyncio.timeout(10):
            while not await shows(url, only_new):  # noqa: ASYNC110
                await asyncio.sleep(0.02)


async def shows(url: str, context: ssl.SSLContext) -> bool:
    async with aiohttp.ClientSession() as session:
        try:
            async with session.post(url, json=REVIEW, ssl=context) as answer:
                return answer.status == 200
        except aiohttp.ClientConnectorCertificateError:
            return False


async def test_what_takes_too_long_is_left_to_the_failure_policy(monkeypatch) -> None:
    shelf = Shelf()
    monkeypatch.setattr(server, "_TIMEOUT_S", 0.01)
    monkeypatch.setattr(server, "review_admission", lambda *_: __import__("time").sleep(0.2))
    async with (
        serving(shelf, monkeypatch) as (url, _),
        aiohttp.ClientSession() as session,
        session.post(url, json=REVIEW, ssl=trusting(shelf)) as answer,
    ):
        assert answer.status == 503


@pytest.mark.parametrize("kind", ["expired", "early", "mismatched", "half", "empty"])
async def test_a_certificate_of_no_use_is_not_shown_while_the_present_one_is_of_any(
    monkeypatch, caplog, kind: str
) -> None:
    shelf, now = Shelf(), datetime.now(UTC)
    async with serving(shelf, monkeypatch) as (url, served):
        served._rotator = rotator(shelf, issues=False, now=now)
        trusted, expiry = trusting(shelf), served._metrics.webhook_expiry_s
        days = {"expired": -100, "early": 2}.get(kind, 0)
        new = certificates.issue(NAMES, now + timedelta(days=days))
        if kind == "mismatched":
            new = replace(new, key=certificates.issue(NAMES, now).key)
        elif kind in ("half", "empty"):
            new = replace(new, cert_chain=new.cert_chain[:300] if kind == "half" else "")
        shelf.secret = {"metadata": {"resourceVersion": "9"}, "data": certificates.to_secret(new)}
        async with asyncio.timeout(10):
            while "stays as it was, valid until" not in caplog.text:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        assert await shows(url, trusted)
        assert served._metrics.webhook_expiry_s == expiry
        assert expiry == pytest.approx((now + certificates.VALIDITY).timestamp(), abs=60)


async def test_at_the_start_an_expired_certificate_is_shown_and_named(monkeypatch, caplog) -> None:
    shelf = Shelf()
    old = certificates.issue(NAMES, datetime.now(UTC) - timedelta(days=100))
    shelf.secret["data"] = certificates.to_secret(old)
    served = WebhookServer(
        WebhookConfig(("127.0.0.1",), 0, NAMES, issues_certificate=False),
        rotator(shelf, issues=False),
        lambda: None,
    )
    assert await served._load()
    assert "the API server refuses the webhook's certificate: has expired at" in caplog.text
