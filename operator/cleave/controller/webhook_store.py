"""Where the webhook's certificate is kept: a Secret, and the ValidatingWebhookConfiguration.

Both are made by the installation, empty; the operator has the right to change these two only.
"""

from typing import Any

from cleave.controller.kube import KINDS, MANAGER, Api, ApiError, Kube
from cleave.controller.webhook import StoreError

_CONFLICT = 409
_CONFIGURATIONS = Api(
    "admissionregistration.k8s.io/v1", "validatingwebhookconfigurations", is_namespaced=False
)
_JSON_PATCH = "application/json-patch+json"


class KubeStore:
    """Implements `cleave.controller.webhook.Store`; Secret and configuration have one name."""

    def __init__(self, kube: Kube, namespace: str, name: str) -> None:
        self._kube = kube
        self._secret = KINDS["Secret"].path(namespace, name)
        self._configuration = _CONFIGURATIONS.path(name=name)

    async def read_secret(self) -> dict[str, Any]:
        """The Secret. Raises StoreError."""
        return await self._request("GET", self._secret)

    async def replace_secret(self, secret: dict[str, Any]) -> bool:
        """False: somebody has changed it since it was read. Raises StoreError."""
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
        """`caBundle` of each webhook; empty text where there is none. Raises StoreError."""
        found = await self._request("GET", self._configuration)
        return [hook["clientConfig"].get("caBundle", "") for hook in found.get("webhooks", ())]

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
