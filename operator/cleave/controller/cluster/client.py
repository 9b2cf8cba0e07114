"""Client of the Kubernetes API server: JSON in, JSON out, with a time-out on every call.

Used by the executor, the leader election and the resync. Addresses, certificates and tokens come
from the `kubernetes` package; its generated classes are not used, because the rest of this package
works on plain manifests.
"""

import asyncio
import json
import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from urllib.parse import quote, urlencode

import aiohttp
from kubernetes.aio import config
from kubernetes.aio.client.api_client import ApiClient
from kubernetes.aio.client.configuration import Configuration

from cleave.manifests.gang import POD_GROUP, POD_GROUP_VERSION
from cleave.manifests.labels import Manifest

FIELD_MANAGER = "cleave"
"""Field manager of everything that the operator writes."""

TIMEOUT_S = 15.0
"""Of a request, unless its caller sets another one."""
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
    "ResourceQuota": ApiResource("v1", "resourcequotas"),
    "Deployment": ApiResource("apps/v1", "deployments"),
    "PodDisruptionBudget": ApiResource("policy/v1", "poddisruptionbudgets"),
    "NetworkPolicy": ApiResource("networking.k8s.io/v1", "networkpolicies"),
    "Role": ApiResource("rbac.authorization.k8s.io/v1", "roles"),
    "RoleBinding": ApiResource("rbac.authorization.k8s.io/v1", "rolebindings"),
    "Lease": ApiResource("coordination.k8s.io/v1", "leases"),
    "LeaderWorkerSet": ApiResource("leaderworkerset.x-k8s.io/v1", "leaderworkersets"),
    POD_GROUP: ApiResource(POD_GROUP_VERSION, "podgroups"),
    "ValidatingWebhookConfiguration": ApiResource(
        "admissionregistration.k8s.io/v1", "validatingwebhookconfigurations", is_namespaced=False
    ),
}
"""Every kind that the operator reads or writes."""


class KubeClient:
    """A connection to one API server."""

    def __init__(self, client: ApiClient) -> None:
        self._client = client

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()  # type: ignore[no-untyped-call]

    async def request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: object = None,
        content_type: str = JSON,
        accept: str = JSON,
        timeout_s: float = TIMEOUT_S,
    ) -> Manifest:
        """Send one request and return the decoded response. Raises KubeApiError."""
        headers = {"Accept": accept, "Content-Type": content_type, "User-Agent": "cleave-operator"}
        await self._client.update_params_for_auth(headers, [], ["BearerToken"], path, method, body)
        url = f"{self._client.configuration.host}{path}"
        if query:
            url += f"?{urlencode(query)}"
        try:
            async with asyncio.timeout(timeout_s):
                response = await self._client.call_api(method, url, headers, body)
                data: bytes = await response.read()  # type: ignore[no-untyped-call]
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise KubeApiError(0, "Unreachable", str(error) or type(error).__name__) from error
        if response.status >= 400:
            raise _to_error(response.status, response.headers.get("Retry-After"), data)
        try:
            decoded = json.loads(data) if data else {}
        except ValueError as error:
            # From a proxy on the way, for example.
            raise KubeApiError(0, "NoJson", f"{method} {path}: the answer is not JSON") from error
        return decoded if isinstance(decoded, dict) else {}

    async def get(
        self, kind: str, namespace: str, name: str, timeout_s: float = TIMEOUT_S
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
    """Connect with the service account, or else the kubeconfig file. Raises KubeApiError."""
    settings = Configuration()
    try:
        config.load_incluster_config(settings)  # type: ignore[no-untyped-call]
    except config.ConfigException:
        try:
            await config.load_kube_config(client_configuration=settings)  # type: ignore[no-untyped-call]
        except (config.ConfigException, OSError) as error:
            text = f"no service account and no kubeconfig ({error}); set KUBECONFIG"
            raise KubeApiError(0, "NoCluster", text) from error
    settings.connection_pool_maxsize = 64
    # As kopf does. Otherwise aiohttp reads the environment and ~/.netrc before each request, each
    # in a thread.
    settings.client_session_kwargs = {"trust_env": False}
    return KubeClient(ApiClient(settings))


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
