"""Certificates of the gateway's ports; read at the start and when their files change.

What is hard: certificates are renewed while the gateway runs, and a renewal that is half written,
expired or for another key must not break the port, nor be taken without a word. So new files are
tried first, in a context of their own, and new connections continue with the previous certificate
while the new one is of no use; the log says so, again every hour.
"""

import logging
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import grpc

from cleave.gateway.admission.api_keys import get_file_version

log = logging.getLogger(__name__)

RETRY_S = 5.0
"""Between two tries of files that are of no use now."""
REMINDER_S = 3_600.0
"""Between two log lines about the same fault."""

KeyAndCertificate = tuple[bytes, bytes]
"""A key and its certificate with the chain, in PEM."""


class TlsError(ValueError):
    """The certificate cannot be used."""


@dataclass(frozen=True, slots=True)
class LoadedCertificate:
    """What was in the files at one time."""

    context: ssl.SSLContext
    certificate: bytes
    """PEM, with its chain."""
    key: bytes
    """PEM."""
    not_before: datetime
    not_after: datetime

    def find_fault(self, now: datetime) -> str:
        """Why clients refuse it now; empty: they do not."""
        if now >= self.not_after:
            return f"has expired at {_format(self.not_after)}"
        if now < self.not_before:
            return f"is not valid before {_format(self.not_before)}"
        return ""


class TlsCertificate:
    """A certificate with its key; `refresh` reads them again when they have changed."""

    def __init__(
        self,
        certificate: Path,
        key: Path,
        clock: Callable[[], float] = time.monotonic,
        get_now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        """Both in PEM, the certificate with its chain. Raises TlsError when they cannot be used.
        One that has expired is used: clients that do not verify it are served, and so are probes.
        """
        self._files = certificate, key
        self._clock, self._get_now = clock, get_now
        self._file_versions = self._get_file_versions()
        self.loaded = _load(*self._files)
        """Used by new connections."""
        self._retry_at: float | None = None
        """When files that are of no use are tried again; None: those in use are the newest."""
        self._logged: tuple[str, float] = "", 0.0
        """The latest message about a fault, and when it was logged."""
        self._report_fault_in_use()

    @property
    def context(self) -> ssl.SSLContext:
        """For new connections."""
        return self.loaded.context

    def refresh(self) -> bool:
        """Read the files again if they have changed; returns whether there is a new certificate.
        Called every few seconds, or before each connection."""
        versions = self._get_file_versions()
        is_changed = versions != self._file_versions
        if not is_changed and (self._retry_at is None or self._clock() < self._retry_at):
            self._report_fault_in_use()
            return False
        self._file_versions = versions
        self._retry_at = self._clock() + RETRY_S
        try:
            loaded = _load(*self._files)
        except TlsError as error:
            self._report_refused(str(error))
            return False
        if self._get_file_versions() != versions:
            # Written while they were read: perhaps not a pair.
            return False
        now = self._get_now()
        fault = loaded.find_fault(now)
        if fault and not self.loaded.find_fault(now):
            self._report_refused(f"{self._files[0]}: {fault}")
            return False
        self.loaded, self._retry_at = loaded, None
        log.info("TLS certificate read again: valid until %s", _format(loaded.not_after))
        self._report_fault_in_use()
        return True

    def read_again(self) -> KeyAndCertificate:
        """For a server that asks before each connection."""
        self.refresh()
        return self.loaded.key, self.loaded.certificate

    def _report_refused(self, fault: str) -> None:
        until = _format(self.loaded.not_after)
        self._report(f"the TLS certificate stays as it was, valid until {until}: {fault}")

    def _report_fault_in_use(self) -> None:
        if fault := self.loaded.find_fault(self._get_now()):
            self._report(f"clients refuse the TLS certificate: {self._files[0]} {fault}")

    def _report(self, message: str) -> None:
        last, logged_at = self._logged
        if message != last or self._clock() >= logged_at + REMINDER_S:
            self._logged = message, self._clock()
            log.error("%s", message)

    def _get_file_versions(self) -> list[tuple[int, int, int] | None]:
        return [get_file_version(file) for file in self._files]


class ClientAuthority:
    """The authority that signs the certificates of a port's clients."""

    def __init__(self, file: Path) -> None:
        """A file in PEM. Raises TlsError when it cannot be used."""
        self._file = file
        self._file_version = get_file_version(file)
        self._pem = _read_authority(file)

    def read(self) -> bytes:
        """Its certificates; a changed file is read again, unless it cannot be used."""
        version = get_file_version(self._file)
        if version != self._file_version:
            self._file_version = version
            try:
                self._pem = _read_authority(self._file)
                log.info("authority of clients read again")
            except TlsError as error:
                log.error("the authority of clients stays as it was: %s", error)
        return self._pem


def make_grpc_credentials(
    read_pair: Callable[[], KeyAndCertificate], client_ca: Path | None
) -> grpc.ServerCredentials:
    """Credentials of a gRPC port. `client_ca`: the authority of its clients, which then show a
    certificate; None: they need none. Raises TlsError."""
    authority = ClientAuthority(client_ca) if client_ca is not None else None

    def read() -> tuple[KeyAndCertificate, bytes | None]:
        return read_pair(), authority.read() if authority is not None else None

    configured = read()

    def configure() -> grpc.ServerCertificateConfiguration:
        pair, authority_pem = configured
        return grpc.ssl_server_certificate_configuration([pair], authority_pem)

    def refresh() -> grpc.ServerCertificateConfiguration | None:
        """gRPC calls it before each connection; None means no change, which type stubs lack."""
        nonlocal configured
        if (latest := read()) == configured:
            return None
        configured = latest
        return configure()

    return grpc.dynamic_ssl_server_credentials(
        configure(),
        refresh,  # type: ignore[arg-type]
        require_client_authentication=authority is not None,
    )


def _read_authority(file: Path) -> bytes:
    pem = _read(file)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=pem.decode("ascii"))
    except (ssl.SSLError, ValueError):
        raise TlsError(f"{file}: has no certificates in PEM") from None
    return pem


def _load(certificate: Path, key: Path) -> LoadedCertificate:
    """Raises TlsError."""
    # Only gateways with a certificate need the package.
    from cryptography import x509

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["http/1.1"])
    certificate_pem, key_pem = map(_read, (certificate, key))
    _load_pair(context, certificate, key)
    try:
        leaf = x509.load_pem_x509_certificates(certificate_pem)[0]
    except ValueError:
        raise TlsError(f"{certificate}: is no certificate") from None
    return LoadedCertificate(
        context, certificate_pem, key_pem, leaf.not_valid_before_utc, leaf.not_valid_after_utc
    )


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise TlsError(f"{file}: {error.strerror}") from None


def _load_pair(context: ssl.SSLContext, certificate: Path, key: Path) -> None:
    def refuse_password() -> str:
        # Otherwise OpenSSL asks for it on the terminal.
        raise TlsError(f"{key}: is encrypted; give a key without a password")

    try:
        context.load_cert_chain(certificate, key, refuse_password)
    except (ssl.SSLError, OSError) as error:
        reason = "they do not belong together" if _is_key_mismatch(error) else "not both are PEM"
        raise TlsError(f"{certificate} and {key} are no certificate and key: {reason}") from None


def _is_key_mismatch(error: OSError) -> bool:
    return isinstance(error, ssl.SSLError) and error.reason == "KEY_VALUES_MISMATCH"


def _format(moment: datetime) -> str:
    return f"{moment:%Y-%m-%d %H:%M} UTC"
