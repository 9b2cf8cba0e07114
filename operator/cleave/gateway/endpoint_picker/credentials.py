"""TLS credentials of the endpoint picker's port. Used by the picker at its start.

A proxy speaks TLS to the picker of its InferencePool by default and does not verify the
certificate: so without files the picker uses a self-signed one, as that of the extension does.
"""

import ipaddress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc

from cleave import distribution
from cleave.gateway.config import GatewayConfig
from cleave.gateway.tls import TlsCertificate

_VALIDITY = timedelta(days=3_650)
"""Longer than any process runs; the key exists only in its memory."""
_CLOCK_SKEW = timedelta(days=1)
_COMMON_NAME = "cleave endpoint picker"

KeyAndCertificate = tuple[bytes, bytes]
"""A key and its certificate with the chain, in PEM."""


class EndpointPickerError(ValueError):
    """The endpoint picker cannot run as configured."""


def make_credentials(config: GatewayConfig) -> grpc.ServerCredentials | None:
    """Credentials of the port; None: plain gRPC. Raises EndpointPickerError and TlsError."""
    if config.endpoint_picker_plain:
        return None
    if config.endpoint_picker_certificate is None or config.endpoint_picker_key is None:
        return grpc.ssl_server_credentials([_make_self_signed(config.host)])
    files = _CertificateFiles(config.endpoint_picker_certificate, config.endpoint_picker_key)
    # The type stubs lack None, which means no change.
    return grpc.dynamic_ssl_server_credentials(files.read(), files.read_if_changed)  # type: ignore[arg-type]


class _CertificateFiles:
    """A certificate and its key in files, for gRPC, which asks before each connection."""

    def __init__(self, certificate: Path, key: Path) -> None:
        self._files = key, certificate
        self._certificate = TlsCertificate(certificate, key)

    def read(self) -> grpc.ServerCertificateConfiguration:
        key, certificate = (file.read_bytes() for file in self._files)
        return grpc.ssl_server_certificate_configuration([(key, certificate)])

    def read_if_changed(self) -> grpc.ServerCertificateConfiguration | None:
        return self.read() if self._certificate.refresh() else None


def _make_self_signed(host: str) -> KeyAndCertificate:
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError:
        raise EndpointPickerError(
            "--endpoint-picker-port: signing a certificate needs the extra gateway: "
            f"{distribution.build_install_command(['gateway'])}, or give --endpoint-picker-cert"
        ) from None
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, _COMMON_NAME)])
    now = datetime.now(UTC)
    address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(host))])
    signed = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SKEW)
        .not_valid_after(now + _VALIDITY)
        .add_extension(address, critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    form, lock = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    return key.private_bytes(pem, form, lock), signed.public_bytes(pem)
