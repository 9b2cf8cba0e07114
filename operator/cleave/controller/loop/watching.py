"""Looks at the gateways of all deployments, round after round, while this operator leads.

Used by the controller, which is told whom to look at again. Two rounds: what has been counted,
every few seconds; and every second whether requests wait for deployments without instances.
"""

import asyncio
from collections.abc import Callable

from cleave.api.deployment import LLMDeployment
from cleave.api.pool import InstancePool
from cleave.controller import scaling
from cleave.controller.loop import replanning
from cleave.controller.loop.counting import Counting
from cleave.controller.loop.drift import Course
from cleave.controller.loop.sleepers import PERIOD_S, Sleepers
from cleave.controller.scaling import Demand
from cleave.controller.store import DEPLOYMENTS, Key, Store
from cleave.pods.labels import Manifest


class Watching:
    """What was seen of the traffic of each deployment; `look_again` takes one that has news."""

    def __init__(
        self, store: Store, look_again: Callable[[Key], None], now: Callable[[], float]
    ) -> None:
        """`now` is Unix time."""
        self._store, self._look_again = store, look_again
        self.counting: Counting[Key] = Counting(now)
        self._sleepers: Sleepers[Key] = Sleepers()
        self._courses: dict[Key, Course] = {}

    async def watch_traffic(self, elected: asyncio.Event, period_s: float) -> None:
        """Look at what the gateways have counted."""
        loop = asyncio.get_running_loop()
        while True:
            await elected.wait()
            began = loop.time()
            await asyncio.gather(*(self.look(key) for key in self._deployments()))
            await asyncio.sleep(max(period_s / 4, period_s - (loop.time() - began)))

    async def watch_sleepers(self, elected: asyncio.Event) -> None:
        """See to it that a request without an instance does not wait for the next round."""
        while True:
            await elected.wait()
            await asyncio.gather(*(self.look_at_sleeper(key) for key in self._deployments()))
            await asyncio.sleep(PERIOD_S)

    async def look(self, key: Key) -> None:
        """Read what the gateways of one deployment have counted, if that is of use."""
        resource, gateways = self._resource(key), self._store.gateways(key)
        if resource is None or not gateways:
            return
        follows = scaling.watches(resource)
        if not (follows or replanning.watches(resource)):
            return
        has_come = await self.counting.look(key, gateways)
        is_news = has_come and (self.counting.is_news(key) or self._is_urgent(key, resource))
        # Known peaks come whether or not the gateways answer.
        if follows or is_news:
            self._look_again(key)

    async def look_at_sleeper(self, key: Key) -> None:
        """Ask the gateways of one deployment, if it sleeps, whether requests wait."""
        resource = self._resource(key)
        known = (each.resource for each in self._store.pools(key))
        pools = [pool for pool in known if isinstance(pool, InstancePool)]
        if resource is None or not scaling.is_asleep(resource, pools):
            self._sleepers.forget(key)
        elif await self._sleepers.look(key, self._store.gateways(key)):
            self.counting.stir(key)
            self._look_again(key)

    def demand(self, key: Key, deployment: LLMDeployment) -> Demand | None:
        """What its instances follow; None: nothing is known, or nobody asked for it."""
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
        """How its traffic compares with what was planned for; what is new is compared once."""
        known, windows = self._courses.get(key, Course()), self.counting.windows(key)
        course = replanning.follow_course(known, deployment, status, windows)
        self._courses[key] = course
        return course

    def forget(self, key: Key) -> None:
        """The deployment is gone."""
        self._courses.pop(key, None)
        self.counting.forget(key)
        self._sleepers.forget(key)

    def _is_urgent(self, key: Key, deployment: LLMDeployment) -> bool:
        seen = self._store.seen(key)
        status = seen.status if seen else {}
        course = self.course(key, deployment, status)
        return replanning.is_urgent(course, deployment, status)

    def _deployments(self) -> list[Key]:
        return [key for key in self._store.resources() if key.kind == DEPLOYMENTS]

    def _resource(self, key: Key) -> LLMDeployment | None:
        seen = self._store.seen(key)
        resource = seen.resource if seen else None
        return resource if isinstance(resource, LLMDeployment) else None
