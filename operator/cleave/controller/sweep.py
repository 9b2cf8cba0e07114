"""Lists everything now and then: what the watches missed, and whether they still live.

Run by `main`. A watch tells of changes, but one that ends unnoticed tells nothing, and objects that
went while it was being set up anew are never spoken of again. So every object is listed before the
work begins and every few minutes; whatever a watch should have told, and has not told a moment
later, is put right here and counted against the watch.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from cleave.controller.controller import Controller
from cleave.controller.kube import KINDS, ApiError, Kube
from cleave.pods.labels import COMPONENT, DEPLOYMENT, Manifest

log = logging.getLogger(__name__)

PERIOD_S = 300.0
PATIENCE_S = 15.0
"""How late a watch may be."""
_STALE_TWICE = 2
_PAGE = 500
_GONE = 410


@dataclass(frozen=True, slots=True)
class Watched:
    """A kind of objects that is watched."""

    kind: str
    selector: str = ""
    """Label selector; empty: all of them."""


WATCHED = (
    Watched("Node"),
    Watched("LLMDeployment"),
    Watched("InstancePool"),
    Watched("Pod", COMPONENT),
    Watched("Deployment", DEPLOYMENT),
    Watched("Service", DEPLOYMENT),
    Watched("PodDisruptionBudget", DEPLOYMENT),
)
"""In the order in which they are listed: owners before what they own."""


class Sweep:
    """Compares the index with the cluster."""

    def __init__(
        self,
        kube: Kube,
        controller: Controller,
        namespaces: Sequence[str] = (),
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._kube, self._controller = kube, controller
        self._namespaces = namespaces
        self._patience_s = patience_s
        self._stale: dict[str, int] = defaultdict(int)

    @property
    def dead(self) -> list[str]:
        """Kinds whose watch has missed something twice in a row."""
        return [kind for kind, times in self._stale.items() if times >= _STALE_TWICE]

    async def fill(self) -> None:
        """Put everything that is there into the index. Raises ApiError."""
        for watched in WATCHED:
            async for item in self._objects(watched, []):
                self._controller.seen(item)

    async def run(self, period_s: float = PERIOD_S) -> None:
        """Sweep for ever."""
        while True:
            await asyncio.sleep(period_s)
            for watched in WATCHED:
                try:
                    await self.sweep(watched)
                except ApiError as error:
                    log.warning("cannot list %s: %s", watched.kind, error)

    async def sweep(self, watched: Watched) -> int:
        """Put right what the watch of one kind has missed; how many objects. Raises ApiError."""
        store = self._controller.store
        listed: dict[tuple[str, str], str] = {}
        late: list[Manifest] = []
        versions: list[int] = []
        async for item in self._objects(watched, versions):
            meta = item["metadata"]
            place = meta.get("namespace", ""), meta["name"]
            listed[place] = meta["uid"]
            if store.version(watched.kind, *place) < int(meta["resourceVersion"]):
                late.append(item)
        await asyncio.sleep(self._patience_s)
        missed = [item for item in late if self._is_missed(watched, item)]
        for item in missed:
            self._controller.seen(item)
        lost = self._controller.lost(watched.kind, listed, min(versions, default=0))
        self._stale[watched.kind] = self._stale[watched.kind] + 1 if missed or lost else 0
        if missed or lost:
            log.warning("the watch of %s has missed %d changes", watched.kind, len(missed) + lost)
        return len(missed) + lost

    def _is_missed(self, watched: Watched, item: Manifest) -> bool:
        meta = item["metadata"]
        known = self._controller.store.version(
            watched.kind, meta.get("namespace", ""), meta["name"]
        )
        return known < int(meta["resourceVersion"])

    async def _objects(self, watched: Watched, versions: list[int]) -> AsyncIterator[Manifest]:
        """Every object of a kind; `versions` gets that of each list."""
        api = KINDS[watched.kind]
        places = self._namespaces if self._namespaces and api.is_namespaced else ("",)
        for namespace in places:
            query = {"limit": str(_PAGE)}
            if watched.selector:
                query["labelSelector"] = watched.selector
            while True:
                page = await self._kube.request("GET", api.path(namespace), query=query)
                for item in page.get("items", ()):
                    yield {**item, "apiVersion": api.version, "kind": watched.kind}
                meta = page.get("metadata", {})
                versions.append(int(meta.get("resourceVersion") or 0))
                if not meta.get("continue"):
                    break
                query["continue"] = meta["continue"]
