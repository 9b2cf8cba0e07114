"""Certificates of a test cluster: one authority that signs servers, users and nothing else.

Every user of the cluster is a client certificate (common name: user, organisations: groups), so
that a test can be anybody, a service account of a chart among them, without asking the API server.
"""

import datetime
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_LIFE = datetime.timedelta(days=1)
_SIGNS = x509.KeyUsage(
    key_cert_sign=True, crl_sign=True, digital_signature=False, content_commitment=False,
    key_encipherment=False, data_encipherment=False, key_agreement=False, encipher_only=False,
    decipher_only=False,
)  # fmt: skip


@dataclass(frozen=True)
class Pair:
    """A certificate and its private key, both PEM."""

    certificate: bytes
    key: bytes


class Authority:
    """Signs certificates that are valid for a day."""

    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name("cluster-ca", ())
        constraint = x509.BasicConstraints(ca=True, path_length=0)
        builder = self._builder(self._name, self._key.public_key())
        builder = builder.add_extension(constraint, critical=True)
        certificate = builder.add_extension(_SIGNS, critical=True).sign(self._key, hashes.SHA256())
        self.certificate: bytes = certificate.public_bytes(serialization.Encoding.PEM)

    def user(self, name: str, groups: Sequence[str] = ()) -> Pair:
        """Who is `name` in `groups` to the API server."""
        return self._issue(_name(name, groups), ExtendedKeyUsageOID.CLIENT_AUTH, ())

    def server(self, hosts: Sequence[str]) -> Pair:
        """A server that answers at `hosts`: names and addresses."""
        names = [_host(host) for host in hosts]
        return self._issue(_name(hosts[0], ()), ExtendedKeyUsageOID.SERVER_AUTH, names)

    def _issue(
        self, subject: x509.Name, use: x509.ObjectIdentifier, hosts: Sequence[x509.GeneralName]
    ) -> Pair:
        key = ec.generate_private_key(ec.SECP256R1())
        builder = self._builder(subject, key.public_key())
        builder = builder.add_extension(x509.ExtendedKeyUsage([use]), critical=False)
        if hosts:
            builder = builder.add_extension(x509.SubjectAlternativeName(hosts), critical=False)
        certificate = builder.sign(self._key, hashes.SHA256())
        return Pair(certificate.public_bytes(serialization.Encoding.PEM), private_pem(key))

    def _builder(
        self, subject: x509.Name, key: ec.EllipticCurvePublicKey
    ) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        # Strict clients want to see which keys sign and are signed.
        of = x509.SubjectKeyIdentifier.from_public_key(key)
        by = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(minutes=5))
            .not_valid_after(now + _LIFE)
            .add_extension(of, critical=False)
            .add_extension(by, critical=False)
        )


def new_key() -> ec.EllipticCurvePrivateKey:
    """A key to sign service accounts' tokens with."""
    return ec.generate_private_key(ec.SECP256R1())


def private_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    """The private half, as the API server reads it to sign and to check."""
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.TraditionalOpenSSL,
        serialization.NoEncryption(),
    )


def _name(common: str, organisations: Sequence[str]) -> x509.Name:
    parts = [x509.NameAttribute(NameOID.ORGANIZATION_NAME, group) for group in organisations]
    return x509.Name([*parts, x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
