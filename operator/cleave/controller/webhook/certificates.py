"""Issues the webhook's serving certificate. Pure but for the random keys.

Called by `cleave.controller.webhook.server`, which stores the result in a Secret. Standby operators
serve the old certificate until they read the Secret again, so the old certificate authority (CA)
stays trusted, beside the new one, for as long as it is valid. The CA's private key is discarded at
once: it signs one certificate only and cannot be stolen from the Secret.
"""

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

VALIDITY = timedelta(days=90)
RENEW_BEFORE = timedelta(days=30)
"""A certificate that expires sooner than this is replaced."""
_SKEW = timedelta(hours=1)
"""Certificates are valid from this long ago, for clients whose clocks are behind."""
_CA_ENTRY = "ca.crt"
_ENTRIES = (_CA_ENTRY, "tls.crt", "tls.key")


@dataclass(frozen=True, slots=True)
class ServingCertificate:
    """The contents of the Secret, as PEM text."""

    ca_bundle: str
    """`ca.crt`: the CA certificates that the API server trusts."""
    cert_chain: str
    """`tls.crt`: the server's certificate chain."""
    key: str
    """`tls.key`: the server's private key."""


class CertificateError(ValueError):
    """The Secret holds no usable certificate; the message gives the reason."""


def issue(names: Sequence[str], now: datetime, trusted: str = "") -> ServingCertificate:
    """Issue a certificate from a new CA; valid CA certificates in `trusted` stay in the bundle."""
    authority_key, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "cleave webhook authority")])
    authority = (
        _make_builder(subject, subject, authority_key.public_key(), now)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_build_key_usage(signs=True), critical=True)
        .sign(authority_key, hashes.SHA256())
    )
    leaf_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "cleave webhook")])
    alternatives = x509.SubjectAlternativeName([x509.DNSName(name) for name in names])
    leaf = (
        _make_builder(leaf_name, subject, key.public_key(), now)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_build_key_usage(signs=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(alternatives, critical=False)
        .sign(authority_key, hashes.SHA256())
    )
    still_valid = [each for each in _parse_chain(trusted) if each.not_valid_after_utc > now]
    return ServingCertificate(
        ca_bundle="".join(_to_pem(each) for each in (authority, *still_valid)),
        cert_chain=_to_pem(leaf),
        key=key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        ).decode(),
    )


def check(certificate: ServingCertificate, names: Sequence[str], now: datetime) -> None:
    """Raise CertificateError unless it serves these names, is trusted and is valid long enough."""
    check_usable(certificate, now)
    cert_chain = _parse_chain(certificate.cert_chain)
    authorities = _parse_chain(certificate.ca_bundle)
    leaf = cert_chain[0]
    if leaf.not_valid_after_utc - now < RENEW_BEFORE:
        raise CertificateError(f"ends at {leaf.not_valid_after_utc:%Y-%m-%d %H:%M} UTC")
    if missing := set(names) - _read_dns_names(leaf):
        raise CertificateError(f"is not for {', '.join(sorted(missing))}")
    if not any(_is_signed(cert_chain[-1], authority) for authority in authorities):
        raise CertificateError("ca.crt holds no CA that signed tls.crt")


def check_usable(certificate: ServingCertificate, now: datetime) -> None:
    """Raise CertificateError unless it can be served, and is valid now."""
    chain = _parse_chain(certificate.cert_chain)
    if not chain:
        raise CertificateError("tls.crt holds no certificate")
    leaf = chain[0]
    if not _is_key_of(certificate.key, leaf):
        raise CertificateError("tls.key is not the key of tls.crt")
    if now >= leaf.not_valid_after_utc:
        raise CertificateError(f"has expired at {leaf.not_valid_after_utc:%Y-%m-%d %H:%M} UTC")
    if now < leaf.not_valid_before_utc:
        raise CertificateError(
            f"is not valid before {leaf.not_valid_before_utc:%Y-%m-%d %H:%M} UTC"
        )


def find_expiry(certificate: ServingCertificate) -> datetime:
    """When it expires. Raises CertificateError."""
    chain = _parse_chain(certificate.cert_chain)
    if not chain:
        raise CertificateError("tls.crt holds no certificate")
    return chain[0].not_valid_after_utc


def from_secret(secret: Mapping[str, object]) -> ServingCertificate | None:
    """Decode the certificate from a Secret; None: the Secret is empty or incomplete. One of type
    kubernetes.io/tls may have no CA."""
    data = secret.get("data")
    if not isinstance(data, Mapping):
        return None
    try:
        trusted, cert_chain, key = (
            base64.b64decode(text, validate=True).decode()
            for text in (data.get(_CA_ENTRY, ""), *(data[name] for name in _ENTRIES[1:]))
        )
    except (KeyError, TypeError, UnicodeDecodeError, binascii.Error):
        return None
    return ServingCertificate(trusted, cert_chain, key)


def to_secret(certificate: ServingCertificate) -> dict[str, str]:
    """Return the `data` of the Secret."""
    entries = zip(
        _ENTRIES, (certificate.ca_bundle, certificate.cert_chain, certificate.key), strict=True
    )
    return {name: base64.b64encode(text.encode()).decode() for name, text in entries}


def _make_builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, now: datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _SKEW)
        .not_valid_after(now + VALIDITY)
    )


def _build_key_usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        key_cert_sign=signs,
        crl_sign=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _parse_chain(text: str) -> list[x509.Certificate]:
    if not text.strip():
        return []
    try:
        return x509.load_pem_x509_certificates(text.encode())
    except ValueError:
        return []


def _to_pem(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(serialization.Encoding.PEM).decode()


def _read_dns_names(leaf: x509.Certificate) -> set[str]:
    try:
        extension = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except x509.ExtensionNotFound:
        return set()
    return set(extension.value.get_values_for_type(x509.DNSName))


def _is_key_of(key: str, leaf: x509.Certificate) -> bool:
    try:
        private = serialization.load_pem_private_key(key.encode(), password=None)
    except (ValueError, TypeError):
        return False
    return private.public_key() == leaf.public_key()


def _is_signed(certificate: x509.Certificate, authority: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True
