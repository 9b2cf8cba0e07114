"""One node: registers, shows signs of life, and runs the pods that the scheduler gives it."""

import asyncio
import contextlib
import itertools
import os
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import aiohttp

from cleave.local.kubelet import pod_spec
from cleave.local.kubelet.kubelet import CoreShortageError, allocate_cores

from e2e.cluster.client import ApiError, Client, Manifest
from e2e.cluster.nodes import Shape, manifest
from e2e.cluster.pod import Place, Runner

_HEARTBEAT_S = 2.0
_LEASE_S = 10
_LEASES = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
_REGISTER_TIMEOUT_S = 20
_REFUSED = (ApiError, aiohttp.ClientError, TimeoutError, OSError)


class Cores:
    """This machine's cores, for all nodes: pods that want whole ones get them while they last.

    A node offers more than the machine has, so a pod that comes too late runs on all of them.
    """

    def __init__(self) -> None:
        self._all = frozenset(os.sched_getaffinity(0))
        self._allocated: dict[str, frozenset[int]] = {}

    def take(self, uid: str, count: int) -> frozenset[int]:
        """Cores for a pod; none means any."""
        free = self._all.difference(*self._allocated.values())
        with contextlib.suppress(CoreShortageError):
            self._allocated[uid] = allocate_cores(free, count)
        return self._allocated.get(uid, frozenset())

    def give_back(self, uid: str) -> None:
        """The pod is gone."""
        self._allocated.pop(uid, None)


class Node:
    """A node with number `index` among those of its process."""

    def __init__(self, api: Client, shape: Shape, index: int, machine: Cores, folder: Path) -> None:
        self._api = api
        self._shape = shape
        self._index = index
        self._machine = machine
        self._folder = folder
        self._address = f"10.77.0.{index + 1}"
        self._hosts = _hosts()
        self._pods: dict[str, Runner] = {}
        self._gpus: dict[str, tuple[int, ...]] = {}

    async def start(self) -> None:
        """Register, then live. Raises ApiError when the API server does not want it."""
        async with asyncio.timeout(_REGISTER_TIMEOUT_S):
            await self._register()
            await self._renew(create=True)
        self._heart = asyncio.create_task(self._beat())

    async def lose(self) -> None:
        """Fall silent; nothing of any pod runs afterwards."""
        self._heart.cancel()
        runners = list(self._pods.values())
        self._pods.clear()
        await asyncio.gather(*(runner.kill() for runner in runners))

    def kill(self, pod: str) -> bool:
        """SIGKILL a pod's process, which is then restarted; whether it ran here."""
        return any(runner.crash() for runner in self._pods.values() if runner.name == pod)

    def listed(self, pods: list[Manifest]) -> None:
        """All pods of this node, as they are now."""
        for uid in self._pods.keys() - {pod["metadata"]["uid"] for pod in pods}:
            self._pods[uid].delete(0)
        for pod in pods:
            self.saw(pod)

    def saw(self, pod: Manifest, *, deleted: bool = False) -> None:
        """A pod of this node is new, has changed or is gone."""
        metadata = pod["metadata"]
        runner = self._pods.get(metadata["uid"])
        if deleted:
            if runner is not None:
                runner.delete(0)
            return
        if runner is None:
            if pod.get("status", {}).get("phase") in ("Succeeded", "Failed"):
                return
            runner = Runner(self._api, pod, self._place(pod), self._forget)
            self._pods[metadata["uid"]] = runner
        if metadata.get("deletionTimestamp"):
            runner.delete(float(metadata.get("deletionGracePeriodSeconds") or 0))

    def _place(self, pod: Manifest) -> Place:
        metadata = pod["metadata"]
        uid, name = metadata["uid"], f"{metadata['namespace']}_{metadata['name']}_{metadata['uid']}"
        try:
            spec = pod_spec.parse_pod(pod)
            num_cores, gpus = spec.exclusive_cores, spec.gpus
        except pod_spec.PodError:
            num_cores = gpus = 0  # the runner says what is wrong
        allocated = set(itertools.chain.from_iterable(self._gpus.values()))
        free = [index for index in range(self._shape.gpus) if index not in allocated]
        self._gpus[uid] = tuple(free[:gpus])
        folder = self._folder / "pods" / name
        folder.mkdir(parents=True, exist_ok=True)
        return Place(
            node=self._shape.name,
            node_ip=self._address,
            pod_ip=self._free_address(),
            cores=self._machine.take(uid, num_cores) if num_cores else frozenset(),
            gpus=self._gpus[uid],
            folder=folder,
            log=folder.with_suffix(".log"),
            hosts=self._folder / "hosts",
            versions=self._folder / "versions",
        )

    def _free_address(self) -> str:
        used_addresses = {runner.place.pod_ip for runner in self._pods.values()}
        addresses = (f"10.77.{self._index + 1}.{host}" for host in self._hosts)
        return next(address for address in addresses if address not in used_addresses)

    def _forget(self, runner: Runner) -> None:
        self._pods.pop(runner.uid, None)
        self._gpus.pop(runner.uid, None)
        self._machine.give_back(runner.uid)

    async def _register(self) -> None:
        try:
            await self._api.post("/api/v1/nodes", self._manifest())
        except ApiError as error:
            if error.status != 409:
                raise
            await self._be_ready()

    async def _be_ready(self) -> None:
        """Say that it is, if the cluster has come to believe otherwise."""
        path = f"/api/v1/nodes/{self._shape.name}"
        conditions = (await self._api.get(path))["status"].get("conditions") or []
        if not any(each["type"] == "Ready" and each["status"] == "True" for each in conditions):
            await self._api.patch(f"{path}/status", {"status": self._manifest()["status"]})

    def _manifest(self) -> Manifest:
        """The Node object as of now."""
        node = manifest(self._shape, self._address)
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        for condition in node["status"]["conditions"]:
            condition |= {"lastHeartbeatTime": now, "lastTransitionTime": now}
        return node

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(_HEARTBEAT_S)
            with contextlib.suppress(*_REFUSED):
                await self._renew()
                await self._be_ready()

    async def _renew(self, *, create: bool = False) -> None:
        spec = {
            "holderIdentity": self._shape.name,
            "leaseDurationSeconds": _LEASE_S,
            "renewTime": datetime.fromtimestamp(time.time(), UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        }
        path = f"{_LEASES}/{self._shape.name}"
        lease = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": self._shape.name},
            "spec": spec,
        }
        while create:
            try:
                await self._api.post(_LEASES, lease)
                return
            except ApiError as error:
                if error.status == 409:
                    break
                # The namespace comes a moment after the API server is ready.
                await asyncio.sleep(0.2)
        await self._api.patch(path, {"spec": spec})


def _hosts() -> Iterator[int]:
    """Last parts of addresses, all others before one comes again."""
    return itertools.cycle(range(1, 255))
