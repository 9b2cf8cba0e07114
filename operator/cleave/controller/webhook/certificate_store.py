"""Stores the webhook's certificate in a Secret and its CA in the webhook configuration.

The chart creates both, empty; the operator may update these two only.
"""

from typing import Any

from cleave.controller.cluster.client import (
    FIELD_MANAGER,
    KINDS,
    ApiResource,
    KubeApiError,
    KubeClient,
)
from cleave.controller.webhook.server import CertificateStoreError

_CONFLICT = 409
_CONFIGURATIONS = ApiResource(
    "admissionregistration.k8s.io/v1", "validatingwebhookconfigurations", is_namespaced=False
)
_JSON_PATCH = "application/json-patch+json"


class SecretCertificateStore:
    """Implements `cleave.controller.webhook.server.CertificateStore`; Secret and configuration have
    the same name.
    """

    def __init__(self, kube: KubeClient, namespace: str, name: str) -> None:
        self._kube = kube
        self._secret = KINDS["Secret"].build_path(namespace, name)
        self._configuration = _CONFIGURATIONS.build_path(name=name)

    async def read_secret(self) -> dict[str, Any]:
        """Return the Secret. Raises CertificateStoreError."""
        return await self._request("GET", self._secret)

    async def replace_secret(self, secret: dict[str, Any]) -> bool:
        """Replace the Secret; False: it was changed since it was read. Raises
        CertificateStoreError.
        """
        try:
            await self._kube.request(
                "PUT", self._secret, body=secret, query={"fieldManager": FIELD_MANAGER}
            )
        except KubeApiError as error:
            if error.status == _CONFLICT:
                return False
            raise CertificateStoreError(str(error)) from error
        return True

    async def read_bundles(self) -> list[str]:
        """Return `caBundle` of each webhook, empty text if unset. Raises CertificateStoreError."""
        configuration = await self._request("GET", self._configuration)
        return [
            hook["clientConfig"].get("caBundle", "") for hook in configuration.get("webhooks", ())
        ]

    async def write_bundle(self, bundle: str, count: int) -> None:
        """Write `caBundle` of the first `count` webhooks. Raises CertificateStoreError."""
        patch = [
            {"op": "add", "path": f"/webhooks/{index}/clientConfig/caBundle", "value": bundle}
            for index in range(count)
        ]
        await self._request("PATCH", self._configuration, patch)

    async def _request(self, method: str, path: str, patch: object = None) -> dict[str, Any]:
        query = {"fieldManager": FIELD_MANAGER} if patch is not None else None
        try:
            return await self._kube.request(
                method,
                path,
                body=patch,
                query=query,
                content_type=_JSON_PATCH if patch is not None else "application/json",
            )
        except KubeApiError as error:
            raise CertificateStoreError(str(error)) from error
