"""Certificate files for TLS tests: written, renewed, or with only one of two files renewed."""

import datetime
import ipaddress
import os
import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

NAME = "gateway.test"
PLAIN = serialization.NoEncryption()


@dataclass(frozen=True)
class Files:
    """A certificate and its key in one folder."""

    folder: Path

    @property
    def certificate(self) -> Path:
        return self.folder / "tls.crt"

    @property
    def key(self) -> Path:
        return self.folder / "tls.key"

    def write(
        self,
        *,
        certificate: bool = True,
        key: bool = True,
        lock=PLAIN,
        starts_in: float = -1.0,
        ends_in: float = 1.0,
        address: str = "127.0.0.1",
    ) -> "Files":
        """Write a new pair; `certificate` or `key` False leaves that file unchanged. `starts_in`,
        `ends_in`: days from now. `address`: for which it is, besides its name."""
        private = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, NAME)])
        names = x509.DNSName(NAME), x509.IPAddress(ipaddress.ip_address(address))
        now = datetime.datetime.now(datetime.UTC)
        certificate_object = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(private.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now + datetime.timedelta(days=starts_in))
            .not_valid_after(now + datetime.timedelta(days=ends_in))
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .sign(private, hashes.SHA256())
        )
        if certificate:
            replace(self.certificate, certificate_object.public_bytes(serialization.Encoding.PEM))
        if key:
            form = serialization.PrivateFormat.PKCS8
            raw = private.private_bytes(serialization.Encoding.PEM, form, lock)
            replace(self.key, raw)
        return self

    def dial(self, port: int, shown: "Files | None" = None) -> grpc.aio.Channel:
        """A gRPC channel to a local port with this certificate. `shown`: the caller's own."""
        own = (shown.key.read_bytes(), shown.certificate.read_bytes()) if shown else ()
        trusted = grpc.ssl_channel_credentials(self.certificate.read_bytes(), *own)
        # Else channels of one process to one address share a connection.
        options = (("grpc.ssl_target_name_override", NAME), ("grpc.use_local_subchannel_pool", 1))
        return grpc.aio.secure_channel(f"127.0.0.1:{port}", trusted, options)

    def trust(self) -> ssl.SSLContext:
        """A client context that trusts only this certificate."""
        return ssl.create_default_context(cafile=self.certificate)


def replace(file: Path, raw: bytes) -> None:
    """Replace a file atomically, so that no reader gets partial content."""
    (new := file.with_suffix(".new")).write_bytes(raw)
    os.rename(new, file)
