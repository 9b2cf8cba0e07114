import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from cleave.controller.webhook import certificates
from cleave.controller.webhook.certificates import (
    CertificateError,
    ServingCertificate,
    check,
    issue,
)

NOW = datetime(2026, 5, 1, tzinfo=UTC)
NAMES = ("cleave-webhook.cleave-system.svc",)


def test_a_new_certificate_is_good_for_its_names() -> None:
    check(issue(NAMES, NOW), NAMES, NOW)


def test_the_tls_library_takes_it(tmp_path: Path) -> None:
    certificate = issue(NAMES, datetime.now(UTC))
    (tmp_path / "crt").write_text(certificate.cert_chain)
    (tmp_path / "key").write_text(certificate.key)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(tmp_path / "crt", tmp_path / "key")
    client = ssl.create_default_context(cadata=certificate.ca_bundle)
    assert client.cert_store_stats()["x509_ca"] == 1


def test_it_is_renewed_a_month_before_its_end() -> None:
    certificate = issue(NAMES, NOW)
    check(certificate, NAMES, NOW + timedelta(days=59))
    with pytest.raises(CertificateError, match="ends at 2026-07-30"):
        check(certificate, NAMES, NOW + timedelta(days=61))


def test_it_is_reissued_when_the_service_is_renamed() -> None:
    with pytest.raises(CertificateError, match=r"is not for other\.svc"):
        check(issue(NAMES, NOW), (*NAMES, "other.svc"), NOW)


def test_a_key_of_another_certificate_is_noticed() -> None:
    one, other = issue(NAMES, NOW), issue(NAMES, NOW)
    with pytest.raises(CertificateError, match="not the key"):
        check(ServingCertificate(one.ca_bundle, one.cert_chain, other.key), NAMES, NOW)


def test_an_authority_that_signed_something_else_is_noticed() -> None:
    one, other = issue(NAMES, NOW), issue(NAMES, NOW)
    with pytest.raises(CertificateError, match="no CA that signed"):
        check(ServingCertificate(other.ca_bundle, one.cert_chain, one.key), NAMES, NOW)


@pytest.mark.parametrize("text", ["", "nonsense", "-----BEGIN CERTIFICATE-----\nx\n"])
def test_an_invalid_certificate_is_recognized(text: str) -> None:
    good = issue(NAMES, NOW)
    with pytest.raises(CertificateError, match="holds no certificate"):
        check(ServingCertificate(good.ca_bundle, text, good.key), NAMES, NOW)


def test_operators_that_show_the_old_certificate_stay_trusted() -> None:
    old = issue(NAMES, NOW)
    later = NOW + timedelta(days=61)
    new = issue(NAMES, later, old.ca_bundle)
    check(new, NAMES, later)
    mixed = ServingCertificate(new.ca_bundle, old.cert_chain, old.key)
    check(mixed, NAMES, NOW)


def test_authorities_that_have_ended_are_forgotten() -> None:
    old = issue(NAMES, NOW)
    new = issue(NAMES, NOW + timedelta(days=91), old.ca_bundle)
    assert new.ca_bundle.count("BEGIN CERTIFICATE") == 1


def test_a_secret_gives_back_what_was_put_into_it() -> None:
    certificate = issue(NAMES, NOW)
    assert certificates.from_secret({"data": certificates.to_secret(certificate)}) == certificate


def test_a_secret_of_type_tls_may_lack_the_authority() -> None:
    certificate = issue(NAMES, NOW)
    data = certificates.to_secret(certificate)
    del data["ca.crt"]
    found = certificates.from_secret({"data": data})
    assert found == ServingCertificate("", certificate.cert_chain, certificate.key)


@pytest.mark.parametrize(
    "secret",
    [{}, {"data": None}, {"data": {}}, {"data": {"tls.crt": "!", "tls.key": "", "ca.crt": ""}}],
)
def test_an_empty_secret_holds_none(secret: dict[str, object]) -> None:
    assert certificates.from_secret(secret) is None
