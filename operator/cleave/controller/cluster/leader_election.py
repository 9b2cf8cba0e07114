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
from cleave.options import declare, declare_seconds

log = logging.getLogger(__name__)

_CONFLICT = 409
_NOT_FOUND = 404


@dataclass(frozen=True, slots=True)
class LeaseConfig:
    """Times of the election, in seconds; by default those of Kubernetes' own controllers, which
    outlast an API server that pauses for seconds. Raises ValueError when they contradict."""

    lease_s: int = declare(
        "--lease-duration",
        15,
        "a standby operator leads when the leader has not renewed for this long",
        metavar="S",
    )
    renew_deadline_s: float = declare_seconds(
        "--renew-deadline", 10.0, "the leader writes for this long after it has renewed"
    )
    retry_s: float = declare_seconds(
        "--retry-period", 2.0, "between two attempts to renew or to lead"
    )

    def __post_init__(self) -> None:
        if not 0 < self.retry_s < self.renew_deadline_s < self.lease_s:
            raise ValueError(
                f"--retry-period {self.retry_s:g} must be below --renew-deadline "
                f"{self.renew_deadline_s:g}, and that below --lease-duration {self.lease_s}"
            )

    @property
    def timeout_s(self) -> float:
        """Of one request."""
        return self.renew_deadline_s / 2


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
        self._held: Manifest | None = None
        """The Lease as this operator wrote it last; None: it has to be read first."""
        self._fault = ""
        self.elected = asyncio.Event()
        """Set while this operator leads."""

    @property
    def is_leading(self) -> bool:
        """Whether this operator may write now."""
        return self.remaining_s > 0

    @property
    def remaining_s(self) -> float:
        """Seconds for which this operator may still write; none are left at 0 and below."""
        return self._until_s - self._clock()

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
            await asyncio.sleep(self._config.retry_s)

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
            # Log each error once, not at each attempt.
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
        timeout_s = self._config.timeout_s
        if self._held is not None and self.is_leading:
            # Without a read, so that a leader outlasts an API server that is slow all the time.
            lease, self._held = self._held, None
            self._held = await self._replace_lease(self._build_lease(lease))
            return True
        try:
            lease = await self._kube.get("Lease", self._namespace, self._name, timeout_s=timeout_s)
        except KubeApiError as error:
            if error.status != _NOT_FOUND:
                raise
            path = KINDS["Lease"].build_path(self._namespace)
            query = {"fieldManager": FIELD_MANAGER}
            self._held = await self._kube.request(
                "POST", path, body=self._build_lease({}), query=query, timeout_s=timeout_s
            )
            return True
        spec = lease.get("spec", {})
        if not self._is_free(spec):
            return False
        self._held = await self._replace_lease(self._build_lease(lease))
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

    async def _replace_lease(self, lease: Manifest) -> Manifest:
        """Replace the Lease, unless it has changed since it was read; returns it as it is now.
        Raises KubeApiError."""
        path = KINDS["Lease"].build_path(self._namespace, self._name)
        return await self._kube.request("PUT", path, body=lease, timeout_s=self._config.timeout_s)
