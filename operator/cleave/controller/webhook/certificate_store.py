"""Stores the webhook's certificate in a Secret and its CA in the webhook configuration.

The chart creates both, empty; the operator may update these two only.
"""

from typing import Any

from cleave.controller.cluster.client import KINDS, MANAGER, Api, ApiError, Kube
from cleave.controller.webhook.server import StoreError

_CONFLICT = 409
_CONFIGURATIONS = Api(
    "admissionregistration.k8s.io/v1", "validatingwebhookconfigurations", is_namespaced=False
)
_JSON_PATCH = "application/json-patch+json"


class KubeStore:
    """Implements `cleave.controller.webhook.server.Store`; Secret and configuration have the same
    name.
    """

    def __init__(self, kube: Kube, namespace: str, name: str) -> None:
        self._kube = kube
        self._secret = KINDS["Secret"].path(namespace, name)
        self._configuration = _CONFIGURATIONS.path(name=name)

    async def read_secret(self) -> dict[str, Any]:
        """Return the Secret. Raises StoreError."""
        return await self._request("GET", self._secret)

    async def replace_secret(self, secret: dict[str, Any]) -> bool:
        """Replace the Secret; False: it was changed since it was read. Raises StoreError."""
        try:
            await self._kube.request(
                "PUT", self._secret, body=secret, query={"fieldManager": MANAGER}
            )
        except ApiError as error:
            if error.status == _CONFLICT:
                return False
            raise StoreError(str(error)) from error
        return True

    async def read_bundles(self) -> list[str]:
        """Return `caBundle` of each webhook, empty text if unset. Raises StoreError."""
        configuration = await self._request("GET", self._configuration)
        return [
            hook["clientConfig"].get("caBundle", "") for hook in configuration.get("webhooks", ())
        ]

    async def write_bundle(self, bundle: str, count: int) -> None:
        """Write `caBundle` of the first `count` webhooks. Raises StoreError."""
        patch = [
            {"op": "add", "path": f"/webhooks/{index}/clientConfig/caBundle", "value": bundle}
            for index in range(count)
        ]
        await self._request("PATCH", self._configuration, patch)

    async def _request(self, method: str, path: str, patch: object = None) -> dict[str, Any]:
        query = {"fieldManager": MANAGER} if patch is not None else None
        try:
            return await self._kube.request(
                method,
                path,
                body=patch,
                query=query,
                content_type=_JSON_PATCH if patch is not None else "application/json",
            )
        except ApiError as error:
            raise StoreError(str(error)) from error
