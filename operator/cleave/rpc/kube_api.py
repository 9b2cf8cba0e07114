"""Access to the Kubernetes API server, and its requests: get, watch and create.

Used by endpointslices.py and account_identity.py. Access comes from the kubeconfig in KUBECONFIG,
else from the pod's service account. Credentials are read again for each request: tokens are
replaced every hour, and requests are made only every few minutes.
"""

import base64
import binascii
import os
import ssl
import tempfile
from collections.abc import AsyncGenerator, Mapping
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from cleave.rpc.http_client import HttpError, Response, open_response

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_HEAD_TIMEOUT_S = 10.0
_ACCEPT = "application/json, application/jwk-set+json"
"""The API server serves its public keys as the second one only."""
_MAX_MESSAGE_BYTES = 1 << 16


class AccessError(ValueError):
    """No usable access to the API server; the message is one sentence."""


class ApiServerError(RuntimeError):
    """The API server returned an error status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"the API server answers {status}: {message}")
        self.status = status


@dataclass(frozen=True, slots=True)
class ApiServerAccess:
    """Address and credentials."""

    url: str
    token: str = ""
    tls: ssl.SSLContext | None = None
    """None: plain HTTP."""
    server_name: str | None = None


def find_access(
    env: Mapping[str, str] = os.environ, folder: Path = SERVICE_ACCOUNT
) -> ApiServerAccess:
    """Access from KUBECONFIG, else from the pod's service account. Raises AccessError."""
    if path := env.get("KUBECONFIG"):
        return read_kubeconfig(Path(path.split(os.pathsep)[0]))
    host = env.get("KUBERNETES_SERVICE_HOST")
    if not host:
        raise AccessError("not in a cluster: set KUBECONFIG to reach one")
    host = f"[{host}]" if ":" in host else host
    try:
        token = (folder / "token").read_text().strip()
        tls = _build_context((folder / "ca.crt").read_text())
    except OSError as error:
        remedy = "mount the service account's token (automountServiceAccountToken)"
        raise AccessError(f"{folder}: {error.strerror}: {remedy}") from None
    port = env.get("KUBERNETES_SERVICE_PORT", "443")
    return ApiServerAccess(f"https://{host}:{port}", token, tls)


def read_kubeconfig(path: Path) -> ApiServerAccess:
    """Access of the file's current context. Raises AccessError."""
    import yaml  # pods need none of it: 20 ms of each start

    try:
        config = yaml.safe_load(path.read_text())
        context = _find_entry(config["contexts"], config["current-context"])["context"]
        cluster = _find_entry(config["clusters"], context["cluster"])["cluster"]
        user = _find_entry(config["users"], context["user"])["user"] or {}
        url = str(cluster["server"]).rstrip("/")
        tls = _build_tls(cluster, user, path.parent) if url.startswith("https:") else None
        token = _read_token(user, path.parent)
        return ApiServerAccess(url, token, tls, cluster.get("tls-server-name"))
    except OSError as error:
        raise AccessError(f"{error.filename or path}: {error.strerror}") from None
    except yaml.YAMLError:
        raise AccessError(f"{path}: not YAML") from None
    except (KeyError, TypeError, ValueError) as error:
        raise AccessError(f"{path}: not a kubeconfig with a current context: {error}") from None


async def get_object(access: ApiServerAccess, path: str, seconds: float) -> Any:  # noqa: ANN401 - parsed JSON
    """Get one object or list. Raises ApiServerError, HttpError."""
    async with _open(access, path, seconds) as response:
        await _raise_for_status(response)
        return _decode(await response.read())


async def create_object(access: ApiServerAccess, path: str, body: object, seconds: float) -> Any:  # noqa: ANN401 - parsed JSON
    """Create one object; the object as created. Raises ApiServerError, HttpError."""
    async with _open(access, path, seconds, msgspec.json.encode(body)) as response:
        await _raise_for_status(response)
        return _decode(await response.read())


async def watch_objects(access: ApiServerAccess, path: str) -> AsyncGenerator[dict[str, Any], None]:
    """The events of a watch; the caller sets a timeout. Raises ApiServerError, HttpError."""
    async with _open(access, path, _HEAD_TIMEOUT_S) as response:
        await _raise_for_status(response)
        async with aclosing(response.iter_lines()) as lines:
            async for line in lines:
                yield _decode(line)


def _open(
    access: ApiServerAccess, path: str, seconds: float, body: bytes = b""
) -> AbstractAsyncContextManager[Response]:
    """POST if there is a body."""
    headers = {"Accept": _ACCEPT, "User-Agent": "cleave"}
    if body:
        headers["Content-Type"] = "application/json"
    if access.token:
        headers["Authorization"] = f"Bearer {access.token}"
    url, tls, name = access.url + path, access.tls, access.server_name
    return open_response(
        *("POST" if body else "GET", url),
        seconds=seconds,
        body=body,
        headers=headers,
        tls=tls,
        server_name=name,
    )


async def _raise_for_status(response: Response) -> None:
    if response.status in (200, 201):
        return
    body = await response.read(_MAX_MESSAGE_BYTES)
    try:
        message = str(msgspec.json.decode(body)["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        message = body[:200].decode(errors="replace")
    raise ApiServerError(response.status, message)


def _decode(body: bytes) -> Any:  # noqa: ANN401
    try:
        return msgspec.json.decode(body)
    except msgspec.DecodeError as error:
        raise HttpError(f"the API server sent invalid JSON: {error}") from None


def _find_entry(entries: list[dict[str, Any]], name: str) -> dict[str, Any]:
    for entry in entries:
        if entry["name"] == name:
            return entry
    raise ValueError(f"{name!r} is not defined")


def _read_token(user: dict[str, Any], folder: Path) -> str:
    if "tokenFile" in user:
        return (folder / str(user["tokenFile"])).read_text().strip()
    if "exec" in user or "auth-provider" in user:
        raise ValueError("users that log in with a plug-in are not supported, use a token")
    return str(user.get("token", ""))


def _build_tls(cluster: dict[str, Any], user: dict[str, Any], folder: Path) -> ssl.SSLContext:
    tls = _build_context(_read_pem(cluster, "certificate-authority", folder).decode("ascii"))
    if cluster.get("insecure-skip-tls-verify"):
        tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
    certificate = _read_pem(user, "client-certificate", folder)
    key = _read_pem(user, "client-key", folder)
    if certificate and key:
        # The ssl module takes a certificate and its key from a file only.
        with tempfile.NamedTemporaryFile(prefix="cleave-") as file:
            file.write(certificate + b"\n" + key)
            file.flush()
            tls.load_cert_chain(file.name)
    return tls


def _build_context(authority: str) -> ssl.SSLContext:
    """A TLS context that trusts this CA certificate (PEM); the system's CAs when empty."""
    tls = ssl.create_default_context(cadata=authority or None)
    # The CA certificates of many clusters lack the key identifiers that newer Pythons require.
    tls.verify_flags &= ~ssl.VERIFY_X509_STRICT
    return tls


def _read_pem(entry: dict[str, Any], field: str, folder: Path) -> bytes:
    """The content of FIELD-data (base64) or of the file in FIELD; empty when both are absent."""
    if data := entry.get(f"{field}-data"):
        try:
            return base64.b64decode(data, validate=True)
        except binascii.Error:
            raise ValueError(f"{field}-data is not base64") from None
    return (folder / entry[field]).read_bytes() if entry.get(field) else b""
