"""TLS credentials of the endpoint picker's port. Used by the picker at its start.

A proxy speaks TLS to the picker of its InferencePool by default and does not verify the
certificate: so without files the picker uses a self-signed one, as that of the extension does.
"""

import ipaddress
from datetime import UTC, datetime, timedelta

import grpc

from cleave import distribution
from cleave.gateway.config import GatewayConfig
from cleave.gateway.tls import KeyAndCertificate, TlsCertificate, make_grpc_credentials

_VALIDITY = timedelta(days=3_650)
"""Longer than any process runs; the key exists only in its memory."""
_CLOCK_SKEW = timedelta(days=1)
_COMMON_NAME = "cleave endpoint picker"


class EndpointPickerError(ValueError):
    """The endpoint picker cannot run as configured."""


def make_credentials(
    config: GatewayConfig, certificate: TlsCertificate | None
) -> grpc.ServerCredentials | None:
    """Credentials of the port; None: plain gRPC. `certificate`: the configured one, None: a
    self-signed one is made. Raises EndpointPickerError, TlsError."""
    if config.endpoint_picker_plain:
        return None
    if certificate is not None:
        return make_grpc_credentials(certificate.read_again, None)
    self_signed = _make_self_signed(config.host)
    return make_grpc_credentials(lambda: self_signed, None)


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
