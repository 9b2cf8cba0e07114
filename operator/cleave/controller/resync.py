"""Lists all objects periodically, and corrects changes that the watches have missed.

Run by `main`. A watch that ends unnoticed reports nothing, and deletions while it is re-established
are never reported. So every object is listed before the first reconcile and then every few minutes.
A change that a watch has not reported shortly after the list is corrected here and counted as
missed.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence

from cleave.controller.cluster.client import KINDS, KubeApiError, KubeClient
from cleave.controller.controller import Controller
from cleave.manifests.labels import COMPONENT, DEPLOYMENT, Manifest

log = logging.getLogger(__name__)

PERIOD_S = 300.0
WATCH_GRACE_S = 15.0
"""How late a watch event may be, in seconds."""
_RECHECK_S = 30.0
_MAX_STALE_RESYNCS = 2
_PAGE = 500
_GONE = 410


WATCHED_KINDS: Mapping[str, str] = {
    "Node": "",
    "ResourceQuota": "",
    "LLMDeployment": "",
    "InstancePool": "",
    "Pod": COMPONENT,
    "Deployment": DEPLOYMENT,
    "Service": DEPLOYMENT,
    "PodDisruptionBudget": DEPLOYMENT,
    "ServiceAccount": DEPLOYMENT,
    "Role": DEPLOYMENT,
    "RoleBinding": DEPLOYMENT,
    "NetworkPolicy": DEPLOYMENT,
}
"""Kinds that are watched, with their label selectors (empty: all objects).

In the order in which they are listed: owners before the objects they own.
"""


class Resync:
    """Compares the cache with the cluster."""

    def __init__(
        self,
        kube: KubeClient,
        controller: Controller,
        namespaces: Sequence[str] = (),
        grace_s: float = WATCH_GRACE_S,
    ) -> None:
        self._kube, self._controller = kube, controller
        self._namespaces = namespaces
        self._grace_s = grace_s
        self._stale: dict[str, int] = defaultdict(int)

    @property
    def stale_watches(self) -> list[str]:
        """Kinds whose watch has missed changes in two consecutive lists."""
        return [kind for kind, times in self._stale.items() if times >= _MAX_STALE_RESYNCS]

    async def fill(self) -> None:
        """Put every object of the cluster into the cache. Raises KubeApiError."""
        for kind in WATCHED_KINDS:
            async for item in self._list_objects(kind, []):
                self._controller.on_change(item)

    async def run(self, period_s: float = PERIOD_S) -> None:
        """List every `period_s` seconds, sooner after a watch has missed changes; never returns."""
        while True:
            await asyncio.sleep(_RECHECK_S if any(self._stale.values()) else period_s)
            for kind in WATCHED_KINDS:
                try:
                    await self.resync(kind)
                except KubeApiError as error:
                    log.warning("cannot list %s: %s", kind, error)

    async def resync(self, kind: str) -> int:
        """Correct changes that a watch has missed; returns their number. Raises KubeApiError."""
        listed: dict[tuple[str, str], str] = {}
        unreported: list[Manifest] = []
        versions: list[int] = []
        async for item in self._list_objects(kind, versions):
            meta = item["metadata"]
            listed[meta.get("namespace", ""), meta["name"]] = meta["uid"]
            if self._is_unreported(kind, item):
                unreported.append(item)
        await asyncio.sleep(self._grace_s)
        missed = [item for item in unreported if self._is_unreported(kind, item)]
        for item in missed:
            self._controller.on_change(item)
        deleted = self._controller.forget_missing(kind, listed, min(versions, default=0))
        count = len(missed) + deleted
        self._stale[kind] = self._stale[kind] + 1 if count else 0
        if count:
            log.warning("the watch of %s has missed %d changes", kind, count)
        return count

    def _is_unreported(self, kind: str, item: Manifest) -> bool:
        meta = item["metadata"]
        key = kind, meta.get("namespace", ""), meta["name"]
        return self._controller.cache.get_version(*key) < int(meta["resourceVersion"])

    async def _list_objects(self, kind: str, versions: list[int]) -> AsyncIterator[Manifest]:
        """Yield every object of a kind; `versions` gets the resource version of each list."""
        api = KINDS[kind]
        namespaces = self._namespaces if self._namespaces and api.is_namespaced else ("",)
        for namespace in namespaces:
            query = {"limit": str(_PAGE)}
            if selector := WATCHED_KINDS[kind]:
                query["labelSelector"] = selector
            while True:
                page = await self._kube.request("GET", api.build_path(namespace), query=query)
                for item in page.get("items", ()):
                    yield {**item, "apiVersion": api.version, "kind": kind}
                meta = page.get("metadata", {})
                versions.append(int(meta.get("resourceVersion") or 0))
                if not meta.get("continue"):
                    break
                query["continue"] = meta["continue"]
