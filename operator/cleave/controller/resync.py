"""Lists all objects periodically, and corrects changes that the watches have missed.

Run by `main`. A watch that ends unnoticed reports nothing, and deletions while it is re-established
are never reported. So every object is listed before the first reconcile and then every few minutes.
A change that a watch has not reported shortly after the list is corrected here and counted as
missed.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from cleave.controller.cluster.client import KINDS, KubeApiError, KubeClient
from cleave.controller.controller import Controller
from cleave.manifests.labels import COMPONENT, DEPLOYMENT, Manifest

log = logging.getLogger(__name__)

PERIOD_S = 300.0
WATCH_GRACE_S = 15.0
"""How late a watch event may be, in seconds."""
_MAX_STALE_RESYNCS = 2
_PAGE = 500
_GONE = 410


@dataclass(frozen=True, slots=True)
class WatchedKind:
    """A kind of objects that is watched."""

    kind: str
    selector: str = ""
    """Label selector; empty: all objects."""


WATCHED_KINDS = (
    WatchedKind("Node"),
    WatchedKind("LLMDeployment"),
    WatchedKind("InstancePool"),
    WatchedKind("Pod", COMPONENT),
    WatchedKind("Deployment", DEPLOYMENT),
    WatchedKind("Service", DEPLOYMENT),
    WatchedKind("PodDisruptionBudget", DEPLOYMENT),
)
"""In the order in which they are listed: owners before the objects they own."""


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
        for watched_kind in WATCHED_KINDS:
            async for item in self._list_objects(watched_kind, []):
                self._controller.on_change(item)

    async def run(self, period_s: float = PERIOD_S) -> None:
        """List every `period_s` seconds; never returns."""
        while True:
            await asyncio.sleep(period_s)
            for watched_kind in WATCHED_KINDS:
                try:
                    await self.resync(watched_kind)
                except KubeApiError as error:
                    log.warning("cannot list %s: %s", watched_kind.kind, error)

    async def resync(self, watched_kind: WatchedKind) -> int:
        """Correct changes that the watch of one kind has missed; returns their number.

        Raises KubeApiError.
        """
        store = self._controller.cache
        listed: dict[tuple[str, str], str] = {}
        unreported: list[Manifest] = []
        versions: list[int] = []
        async for item in self._list_objects(watched_kind, versions):
            meta = item["metadata"]
            key = meta.get("namespace", ""), meta["name"]
            listed[key] = meta["uid"]
            if store.get_version(watched_kind.kind, *key) < int(meta["resourceVersion"]):
                unreported.append(item)
        await asyncio.sleep(self._grace_s)
        missed = [item for item in unreported if self._is_missed(watched_kind, item)]
        for item in missed:
            self._controller.on_change(item)
        deleted = self._controller.forget_missing(
            watched_kind.kind, listed, min(versions, default=0)
        )
        self._stale[watched_kind.kind] = (
            self._stale[watched_kind.kind] + 1 if missed or deleted else 0
        )
        if missed or deleted:
            log.warning(
                "the watch of %s has missed %d changes", watched_kind.kind, len(missed) + deleted
            )
        return len(missed) + deleted

    def _is_missed(self, watched_kind: WatchedKind, item: Manifest) -> bool:
        meta = item["metadata"]
        cached_version = self._controller.cache.get_version(
            watched_kind.kind, meta.get("namespace", ""), meta["name"]
        )
        return cached_version < int(meta["resourceVersion"])

    async def _list_objects(
        self, watched_kind: WatchedKind, versions: list[int]
    ) -> AsyncIterator[Manifest]:
        """Yield every object of a kind; `versions` gets the resource version of each list."""
        api = KINDS[watched_kind.kind]
        namespaces = self._namespaces if self._namespaces and api.is_namespaced else ("",)
        for namespace in namespaces:
            query = {"limit": str(_PAGE)}
            if watched_kind.selector:
                query["labelSelector"] = watched_kind.selector
            while True:
                page = await self._kube.request("GET", api.build_path(namespace), query=query)
                for item in page.get("items", ()):
                    yield {**item, "apiVersion": api.version, "kind": watched_kind.kind}
                meta = page.get("metadata", {})
                versions.append(int(meta.get("resourceVersion") or 0))
                if not meta.get("continue"):
                    break
                query["continue"] = meta["continue"]
