"""Leader election with a Lease: one operator writes, the others are on standby.

Run by `main`. Clocks differ. So a standby operator takes over a Lease that has not changed for its
whole duration, by its own clock. The leader counts from before it sent the renewal, and stops
writing before anybody may take over.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from cleave.controller.cluster.client import FIELD_MANAGER, KINDS, KubeApiError, KubeClient
from cleave.manifests.labels import Manifest

log = logging.getLogger(__name__)

_CONFLICT = 409
_NOT_FOUND = 404


@dataclass(frozen=True, slots=True)
class LeaseConfig:
    """Times of the election, in seconds."""

    lease_s: int = 4
    """A Lease that was not renewed for this long may be taken over."""
    renew_deadline_s: float = 3.0
    """The leader writes for this long after a renewal; less than `lease_s`."""
    renew_s: float = 1.0
    retry_s: float = 0.5
    """Period at which standby operators read the Lease."""


class LeaderElector:
    """Takes part in the election for this operator."""

    def __init__(
        self,
        kube: KubeClient,
        namespace: str,
        name: str,
        identity: str,
        config: LeaseConfig = LeaseConfig(),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._kube = kube
        self._namespace, self._name, self._identity = namespace, name, identity
        self._config = config
        self._clock = clock
        self._until_s = float("-inf")
        self._observed_record: tuple[str, str] = ("", "")
        self._observed_at_s = self._attempted_at_s = clock()
        self._fault = ""
        self.elected = asyncio.Event()
        """Set while this operator leads."""

    @property
    def is_leading(self) -> bool:
        """Whether this operator may write now."""
        return self._clock() < self._until_s

    @property
    def idle_s(self) -> float:
        """Seconds since the last attempt to read or renew the Lease."""
        return self._clock() - self._attempted_at_s

    async def run(self) -> None:
        """Take part until cancelled."""
        while True:
            self._attempted_at_s = self._clock()
            await self._try_acquire()
            if self.elected.is_set() and not self.is_leading:
                log.warning("%s has lost the lease %s", self._identity, self._name)
                self.elected.clear()
            await asyncio.sleep(self._config.renew_s if self.is_leading else self._config.retry_s)

    async def resign(self) -> None:
        """Release the Lease, so that another operator can lead at once."""
        if not self.is_leading:
            return
        self._until_s = float("-inf")
        self.elected.clear()
        try:
            lease = await self._kube.get("Lease", self._namespace, self._name)
            if lease["spec"].get("holderIdentity") == self._identity:
                lease["spec"]["holderIdentity"] = ""
                await self._replace_lease(lease)
        except KubeApiError as error:
            log.warning("cannot release the lease: %s", error)

    async def _try_acquire(self) -> None:
        """Renew the Lease, or take it when it is free; otherwise observe it."""
        began_s = self._clock()
        try:
            is_holder = await self._acquire_or_renew()
        except KubeApiError as error:
            # Log each error once: there are two attempts a second.
            if error.status != _CONFLICT and str(error) != self._fault:
                log.warning("leader election: %s", error)
            self._fault = str(error)
            return
        self._fault = ""
        if is_holder:
            self._until_s = began_s + self._config.renew_deadline_s
            if not self.elected.is_set():
                log.info("%s leads", self._identity)
                self.elected.set()

    async def _acquire_or_renew(self) -> bool:
        """Whether the Lease was written for this operator. Raises KubeApiError."""
        try:
            timeout_s = self._config.renew_s
            lease = await self._kube.get("Lease", self._namespace, self._name, timeout_s=timeout_s)
        except KubeApiError as error:
            if error.status != _NOT_FOUND:
                raise
            path = KINDS["Lease"].build_path(self._namespace)
            query = {"fieldManager": FIELD_MANAGER}
            await self._kube.request("POST", path, body=self._build_lease({}), query=query)
            return True
        spec = lease.get("spec", {})
        if not self._is_free(spec):
            return False
        await self._replace_lease(self._build_lease(lease))
        return True

    def _is_free(self, spec: Manifest) -> bool:
        """Whether this operator may take the Lease: no other holder, or an expired one."""
        holder = spec.get("holderIdentity") or ""
        record = holder, str(spec.get("renewTime"))
        now_s = self._clock()
        if record != self._observed_record:
            self._observed_record, self._observed_at_s = record, now_s
        if holder in ("", self._identity):
            return True
        lease_s = spec.get("leaseDurationSeconds") or self._config.lease_s
        return now_s - self._observed_at_s >= lease_s

    def _build_lease(self, before: Manifest) -> Manifest:
        """The Lease with this operator as holder, renewed now."""
        spec = before.get("spec", {})
        now = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
        new = {"name": self._name, "namespace": self._namespace}
        is_ours = spec.get("holderIdentity") == self._identity
        return {
            "apiVersion": KINDS["Lease"].version,
            "kind": "Lease",
            "metadata": before.get("metadata") or new,
            "spec": {
                "holderIdentity": self._identity,
                "leaseDurationSeconds": self._config.lease_s,
                "acquireTime": spec.get("acquireTime", now) if is_ours else now,
                "renewTime": now,
                "leaseTransitions": spec.get("leaseTransitions", 0) + (not is_ours),
            },
        }

    async def _replace_lease(self, lease: Manifest) -> None:
        """Replace the Lease, unless it has changed since it was read. Raises KubeApiError."""
        path = KINDS["Lease"].build_path(self._namespace, self._name)
        await self._kube.request("PUT", path, body=lease, timeout_s=self._config.renew_s)
