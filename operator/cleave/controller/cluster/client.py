"""Client of the Kubernetes API server: JSON in, JSON out, with a time-out on every call.

Used by the executor, the leader election and the resync. Address, certificates and token come from
`cleave.rpc.kube_api`, also for kopf's watches; the `kubernetes` package, with a class for each
kind, would be a quarter of the operator's image.
"""

import asyncio
import contextlib
import json
import random
import ssl
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from urllib.parse import quote, urlencode

import aiohttp
import kopf
from yarl import URL

from cleave.manifests.labels import Manifest
from cleave.rpc.kube_api import AccessError, ApiServerAccess, find_access

FIELD_MANAGER = "cleave"
"""Field manager of everything that the operator writes."""

_TIMEOUT_S = 15.0
_MAX_CONNECTIONS = 64
_TOKEN_LIFE_S = 60.0
"""Seconds after which the token is read again; the kubelet replaces it before it expires."""
_ATTEMPTS = 5
_FIRST_BACKOFF_S = 0.2
_MAX_BACKOFF_S = 10.0
_NOT_FOUND = 404
_TOO_MANY_REQUESTS = 429
_INTERNAL_SERVER_ERROR = 500

JSON = "application/json"
MERGE_PATCH = "application/merge-patch+json"
APPLY_PATCH = "application/apply-patch+yaml"


class KubeApiError(RuntimeError):
    """The API server refused the request, or could not be reached (status 0)."""

    def __init__(
        self, status: int, reason: str, message: str, retry_after_s: float | None = None
    ) -> None:
        super().__init__(f"{status} {reason}: {message}" if status else message)
        self.status, self.reason, self.message = status, reason, message
        self.retry_after_s = retry_after_s
        """Seconds after which the server allows a retry (Retry-After); None: not given."""

    @property
    def is_transient(self) -> bool:
        """Whether the error is transient, so that a retry may succeed."""
        return self.status in (0, _TOO_MANY_REQUESTS) or self.status >= _INTERNAL_SERVER_ERROR


@dataclass(frozen=True, slots=True)
class ApiResource:
    """The API resource of a kind."""

    version: str
    """As in `apiVersion`."""
    plural: str
    is_namespaced: bool = True

    def build_path(self, namespace: str = "", name: str = "", subresource: str = "") -> str:
        """Return the URL path of a list, an object or a subresource."""
        root = "/api" if "/" not in self.version else "/apis"
        scope = f"/namespaces/{quote(namespace)}" if self.is_namespaced and namespace else ""
        parts = "".join(f"/{quote(part)}" for part in (name, subresource) if part)
        return f"{root}/{self.version}{scope}/{self.plural}{parts}"


KINDS: Mapping[str, ApiResource] = {
    "LLMDeployment": ApiResource("cleave.dev/v1alpha1", "llmdeployments"),
    "InstancePool": ApiResource("cleave.dev/v1alpha1", "instancepools"),
    "Pod": ApiResource("v1", "pods"),
    "Service": ApiResource("v1", "services"),
    "ServiceAccount": ApiResource("v1", "serviceaccounts"),
    "ConfigMap": ApiResource("v1", "configmaps"),
    "Secret": ApiResource("v1", "secrets"),
    "Event": ApiResource("v1", "events"),
    "Node": ApiResource("v1", "nodes", is_namespaced=False),
    "Deployment": ApiResource("apps/v1", "deployments"),
    "PodDisruptionBudget": ApiResource("policy/v1", "poddisruptionbudgets"),
    "NetworkPolicy": ApiResource("networking.k8s.io/v1", "networkpolicies"),
    "RoleBinding": ApiResource("rbac.authorization.k8s.io/v1", "rolebindings"),
    "Lease": ApiResource("coordination.k8s.io/v1", "leases"),
    "LeaderWorkerSet": ApiResource("leaderworkerset.x-k8s.io/v1", "leaderworkersets"),
    "ValidatingWebhookConfiguration": ApiResource(
        "admissionregistration.k8s.io/v1", "validatingwebhookconfigurations", is_namespaced=False
    ),
}
"""Every kind that the operator reads or writes."""


class KubeClient:
    """A connection to one API server."""

    def __init__(self, access: ApiServerAccess) -> None:
        self._access, self._read_at = access, time.monotonic()
        connector = aiohttp.TCPConnector(limit=_MAX_CONNECTIONS, ssl=access.tls or True)
        self._session = aiohttp.ClientSession(connector=connector)

    async def close(self) -> None:
        """Close the connections."""
        await self._session.close()

    def _get_token(self) -> str:
        """The token as it was at most _TOKEN_LIFE_S ago, or the last one that could be read."""
        if time.monotonic() - self._read_at > _TOKEN_LIFE_S:
            self._read_at = time.monotonic()
            with contextlib.suppress(AccessError):
                self._access = find_access()
        return self._access.token

    async def request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: object = None,
        content_type: str = JSON,
        accept: str = JSON,
        timeout_s: float = _TIMEOUT_S,
    ) -> Manifest:
        """Send one request and return the decoded response. Raises KubeApiError."""
        headers = {"Accept": accept, "Content-Type": content_type, "User-Agent": "cleave-operator"}
        if token := self._get_token():
            headers["Authorization"] = f"Bearer {token}"
        url = f"{self._access.url}{path}"
        if query:
            url += f"?{urlencode(query)}"
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._session.request(
                    method,
                    URL(url, encoded=True),
                    headers=headers,
                    data=None if body is None else json.dumps(body),
                    server_hostname=self._access.server_name,
                    allow_redirects=False,
                ) as response,
            ):
                data = await response.read()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise KubeApiError(0, "Unreachable", str(error) or type(error).__name__) from error
        if response.status >= 400:
            raise _to_error(response.status, response.headers.get("Retry-After"), data)
        decoded = json.loads(data) if data else {}
        return decoded if isinstance(decoded, dict) else {}

    async def get(
        self, kind: str, namespace: str, name: str, timeout_s: float = _TIMEOUT_S
    ) -> Manifest:
        """Return one object. Raises KubeApiError."""
        path = KINDS[kind].build_path(namespace, name)
        return await self.request("GET", path, timeout_s=timeout_s)

    async def serves(self, kind: str) -> bool:
        """Whether the API server has this kind. Raises KubeApiError."""
        api = KINDS[kind]
        try:
            listed = await self.request("GET", f"/apis/{api.version}")
        except KubeApiError as error:
            if error.status == _NOT_FOUND:
                return False
            raise
        return any(each["name"] == api.plural for each in listed.get("resources", ()))


async def connect() -> KubeClient:
    """Connect with the file in KUBECONFIG, or else the service account. Raises KubeApiError."""
    try:
        return KubeClient(find_access())
    except AccessError as error:
        raise KubeApiError(0, "NoCluster", str(error)) from error


@dataclass(frozen=True, kw_only=True)
class WatchLogin(kopf.ConnectionInfo):
    """What kopf's watches connect with; TLS is that of `ApiServerAccess`."""

    tls: ssl.SSLContext | None = None

    def as_ssl_context(self) -> ssl.SSLContext:
        """Return the TLS settings; kopf calls it for each login."""
        return self.tls or ssl.create_default_context()


def log_in(**_: object) -> WatchLogin:
    """Log kopf in, at the start and whenever the API server refuses the token."""
    try:
        access = find_access()
    except AccessError as error:
        raise kopf.LoginError(str(error)) from error
    return WatchLogin(server=access.url, token=access.token or None, tls=access.tls)


async def retry_transient(
    call: Callable[[], Awaitable[Manifest]],
    *,
    attempts: int = _ATTEMPTS,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> Manifest:
    """Retry transient errors; `call` must be safe to repeat. Raises the last KubeApiError."""
    pause_s = _FIRST_BACKOFF_S
    for remaining in reversed(range(attempts)):
        try:
            return await call()
        except KubeApiError as error:
            if not error.is_transient or remaining == 0:
                raise
            delay_s = error.retry_after_s if error.retry_after_s is not None else pause_s
            # Jitter, so that clients do not all retry at the same moment.
            await sleep(min(delay_s, _MAX_BACKOFF_S) * random.uniform(0.75, 1.25))
            pause_s *= 2
    raise AssertionError("unreachable")


def _to_error(status: int, retry_after: str | None, data: bytes) -> KubeApiError:
    try:
        status_object = json.loads(data)
        reason, message = str(status_object["reason"]), str(status_object["message"])
    except (ValueError, KeyError, TypeError):
        reason, message = "Refused", data[:200].decode(errors="replace")
    pause_s = float(retry_after) if retry_after and retry_after.isdigit() else None
    return KubeApiError(status, reason, message, pause_s)
