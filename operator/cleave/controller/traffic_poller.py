"""Polls the gateways of all deployments while this operator leads.

Used by the controller, which passes the callback that enqueues a deployment. Two loops: one scrapes
traffic counters every few seconds; one asks every second whether requests wait for deployments that
are scaled to zero.
"""

import asyncio
from collections.abc import Callable

from cleave.api.deployment import LLMDeployment
from cleave.api.pool import InstancePool
from cleave.controller.activator import PERIOD_S, Sleepers
from cleave.controller.cluster.cache import DEPLOYMENTS, Key, Store
from cleave.controller.cluster.traffic_scraper import Counting
from cleave.controller.deployment import scaling
from cleave.controller.deployment.scaling import Demand
from cleave.controller.replan import reconcile
from cleave.controller.replan.drift import Course
from cleave.manifests.labels import Manifest


class Watching:
    """Observed traffic of each deployment; `look_again` enqueues one when it has changed."""

    def __init__(
        self, store: Store, look_again: Callable[[Key], None], now: Callable[[], float]
    ) -> None:
        """`now` is Unix time."""
        self._store, self._look_again = store, look_again
        self.counting: Counting[Key] = Counting(now)
        self._sleepers: Sleepers[Key] = Sleepers()
        self._courses: dict[Key, Course] = {}

    async def watch_traffic(self, elected: asyncio.Event, period_s: float) -> None:
        """Scrape the counters of all gateways periodically; never returns."""
        loop = asyncio.get_running_loop()
        while True:
            await elected.wait()
            began = loop.time()
            await asyncio.gather(*(self.look(key) for key in self._deployments()))
            await asyncio.sleep(max(period_s / 4, period_s - (loop.time() - began)))

    async def watch_sleepers(self, elected: asyncio.Event) -> None:
        """Poll deployments without instances, so that a waiting request starts them at once."""
        while True:
            await elected.wait()
            await asyncio.gather(*(self.look_at_sleeper(key) for key in self._deployments()))
            await asyncio.sleep(PERIOD_S)

    async def look(self, key: Key) -> None:
        """Scrape the gateways of one deployment, if scaling or replanning needs it."""
        resource, gateways = self._resource(key), self._store.gateways(key)
        if resource is None or not gateways:
            return
        is_scaled = scaling.watches(resource)
        if not (is_scaled or reconcile.watches(resource)):
            return
        has_window = await self.counting.look(key, gateways)
        is_complete = has_window and (self.counting.is_news(key) or self._is_urgent(key, resource))
        # Scheduled peaks begin whether or not the gateways answer.
        if is_scaled or is_complete:
            self._look_again(key)

    async def look_at_sleeper(self, key: Key) -> None:
        """Ask the gateways of a deployment that is scaled to zero whether requests wait."""
        resource = self._resource(key)
        resources = (each.resource for each in self._store.pools(key))
        pools = [pool for pool in resources if isinstance(pool, InstancePool)]
        if resource is None or not scaling.is_asleep(resource, pools):
            self._sleepers.forget(key)
        elif await self._sleepers.look(key, self._store.gateways(key)):
            self.counting.stir(key)
            self._look_again(key)

    def demand(self, key: Key, deployment: LLMDeployment) -> Demand | None:
        """Return what its instances are scaled by; None: not known, or scaling is off."""
        if not scaling.watches(deployment):
            return None
        counting = self.counting
        return scaling.measure(
            counting.windows(key) if counting.lately(key) else (),
            deployment.spec.scaling.calm_s,
            in_flight=self._sleepers.waiting(key) or counting.in_flight(key),
            quiet_s=counting.quiet_s(key),
        )

    def course(self, key: Key, deployment: LLMDeployment, status: Manifest) -> Course:
        """Return how its traffic compares with the planned one; each window is compared once."""
        previous, windows = self._courses.get(key, Course()), self.counting.windows(key)
        state = reconcile.follow_course(previous, deployment, status, windows)
        self._courses[key] = state
        return state

    def forget(self, key: Key) -> None:
        """Drop what was observed of a deployment that is gone."""
        self._courses.pop(key, None)
        self.counting.forget(key)
        self._sleepers.forget(key)

    def _is_urgent(self, key: Key, deployment: LLMDeployment) -> bool:
        cached = self._store.seen(key)
        status = cached.status if cached else {}
        state = self.course(key, deployment, status)
        return reconcile.is_urgent(state, deployment, status)

    def _deployments(self) -> list[Key]:
        return [key for key in self._store.resources() if key.kind == DEPLOYMENTS]

    def _resource(self, key: Key) -> LLMDeployment | None:
        cached = self._store.seen(key)
        resource = cached.resource if cached else None
        return resource if isinstance(resource, LLMDeployment) else None
