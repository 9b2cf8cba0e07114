"""Certificates of the gateway's ports; read at the start and when their files change.

What is hard: certificates are renewed while the gateway runs, and a half-written renewal must not
break the port. New files are tried in a separate context first; if they are invalid, new
connections continue with the previous certificate.
"""

import logging
import ssl
from pathlib import Path

from cleave.gateway.admission.api_keys import get_file_version

log = logging.getLogger(__name__)


class TlsError(ValueError):
    """The certificate cannot be used."""


class TlsCertificate:
    """A certificate with its key; `refresh` reads them again when they have changed."""

    def __init__(self, certificate: Path, key: Path) -> None:
        """Both in PEM, the certificate with its chain. Raises TlsError when they cannot be used."""
        self._files = certificate, key
        self._file_versions = self._get_file_versions()
        self.context = _build_context(*self._files)
        """Used by new connections; the same object for the gateway's life."""

    def refresh(self) -> bool:
        """Read the files again if they have changed; returns whether there is a new certificate.
        Called every few seconds, or before each connection."""
        stamps = self._get_file_versions()
        if stamps == self._file_versions:
            return False
        self._file_versions = stamps
        try:
            # A pair that does not match would leave the context in use without a key.
            _build_context(*self._files)
            _load_certificate(self.context, *self._files)
        except TlsError as error:
            log.error("the TLS certificate stays as it was: %s", error)
            return False
        log.info("TLS certificate read again")
        return True

    def _get_file_versions(self) -> list[tuple[int, int, int] | None]:
        return [get_file_version(file) for file in self._files]


def _build_context(certificate: Path, key: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    _load_certificate(context, certificate, key)
    return context


def _load_certificate(context: ssl.SSLContext, certificate: Path, key: Path) -> None:
    def refuse_password() -> str:
        # Otherwise OpenSSL asks for it on the terminal.
        raise TlsError(f"{key}: is encrypted; give a key without a password")

    for file in (certificate, key):
        try:
            file.read_bytes()
        except OSError as error:
            raise TlsError(f"{file}: {error.strerror}") from None
    try:
        context.load_cert_chain(certificate, key, refuse_password)
    except (ssl.SSLError, OSError) as error:
        reason = "they do not belong together" if _is_key_mismatch(error) else "not both are PEM"
        raise TlsError(f"{certificate} and {key} are no certificate and key: {reason}") from None


def _is_key_mismatch(error: OSError) -> bool:
    return isinstance(error, ssl.SSLError) and error.reason == "KEY_VALUES_MISMATCH"
