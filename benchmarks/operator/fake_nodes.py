"""Nodes that run nothing: every pod bound to them is ready at once.

Run as a process of its own (`python fake_nodes.py KUBECONFIG NODES`) beside the operator that is
measured; ends with its standard input. What is hard: ten thousand pods come within a minute, so
each costs one patch and nothing else.
"""

import asyncio
import json
import sys
from datetime import UTC, datetime
from ipaddress import ip_network
from pathlib import Path

import aiohttp

from e2e.cluster.client import ApiError, Client, Manifest
from e2e.cluster.nodes import Shape, gpu_node, manifest

WORKERS = 48
HEARTBEAT_S = 4.0
LEASES = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
PODS_NETWORK = "10.77.128.0/17"
PODS = "/api/v1/pods?fieldSelector=spec.nodeName!%3D"
REFUSED = (ApiError, aiohttp.ClientError, TimeoutError, OSError)


class FakeNodes:
    """All nodes and their pods."""

    def __init__(self, api: Client, count: int) -> None:
        self._api = api
        self._shapes = [gpu_node(f"node-{n}") for n in range(count)]
        self._addresses = map(str, ip_network(PODS_NETWORK).hosts())
        self._done: set[tuple[str, bool]] = set()
        self._jobs: asyncio.Queue[Manifest] = asyncio.Queue()

    async def register(self) -> None:
        await asyncio.gather(*map(self._register, self._shapes))
        await self._beat_once(create=True)

    async def _register(self, shape: Shape) -> None:
        node = manifest(shape, "10.77.0.1")
        for condition in node["status"]["conditions"]:
            condition |= {"lastHeartbeatTime": now(), "lastTransitionTime": now()}
        await self._api.post("/api/v1/nodes", node)

    async def live(self) -> None:
        """Go on until cancelled."""
        tasks = [
            asyncio.create_task(self._beat()),
            asyncio.create_task(self._api.follow(PODS, self._listed, self._saw)),
            *(asyncio.create_task(self._work()) for _ in range(WORKERS)),
        ]
        await asyncio.gather(*tasks)

    def _listed(self, pods: list[Manifest]) -> None:
        for pod in pods:
            self._take(pod)

    def _saw(self, event: Manifest) -> None:
        if event["type"] != "DELETED":
            self._take(event["object"])

    def _take(self, pod: Manifest) -> None:
        leaving = "deletionTimestamp" in pod["metadata"]
        job = pod["metadata"]["uid"], leaving
        if job not in self._done:
            self._done.add(job)
            self._jobs.put_nowait(pod)

    async def _work(self) -> None:
        while True:
            pod = await self._jobs.get()
            meta = pod["metadata"]
            path = f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}"
            try:
                if "deletionTimestamp" in meta:
                    await self._api.delete(path, {"gracePeriodSeconds": 0})
                else:
                    await self._api.patch(
                        f"{path}/status", {"status": ready(pod, next(self._addresses))}
                    )
            except REFUSED as error:
                if not isinstance(error, ApiError) or error.status not in (404, 409):
                    self._jobs.put_nowait(pod)
                    await asyncio.sleep(0.2)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            try:
                await self._beat_once(create=False)
            except REFUSED as error:
                print(f"heartbeat: {error}", file=sys.stderr)

    async def _beat_once(self, *, create: bool) -> None:
        await asyncio.gather(*(self._renew(shape.name, create=create) for shape in self._shapes))

    async def _renew(self, name: str, *, create: bool) -> None:
        renewed = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        spec = {"holderIdentity": name, "leaseDurationSeconds": 40, "renewTime": renewed}
        if create:
            await self._create_lease(name, spec)
        else:
            await self._api.patch(f"{LEASES}/{name}", {"spec": spec})

    async def _create_lease(self, name: str, spec: Manifest) -> None:
        lease = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": name},
            "spec": spec,
        }
        for _ in range(50):
            try:
                await self._api.post(LEASES, lease)
                return
            except ApiError as error:
                # The namespace comes a moment after the API server is ready.
                if error.status != 404:
                    raise
                await asyncio.sleep(0.2)


def ready(pod: Manifest, address: str) -> Manifest:
    """Status of a pod all of whose containers are well."""
    moment = now()
    kinds = ("PodReadyToStartContainers", "Initialized", "ContainersReady", "Ready")
    return {
        "phase": "Running",
        "podIP": address,
        "podIPs": [{"ip": address}],
        "startTime": moment,
        "conditions": [
            {"type": kind, "status": "True", "lastTransitionTime": moment} for kind in kinds
        ],
        "containerStatuses": [
            {
                "name": container["name"],
                "image": container["image"],
                "imageID": "none",
                "ready": True,
                "started": True,
                "restartCount": 0,
                "state": {"running": {"startedAt": moment}},
            }
            for container in pod["spec"]["containers"]
        ],
    }


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


async def main(kubeconfig: Path, count: int) -> None:
    async with Client(kubeconfig) as api:
        nodes = FakeNodes(api, count)
        await nodes.register()
        print(json.dumps("ready"), flush=True)
        living = asyncio.create_task(nodes.live())
        ended = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
        await asyncio.wait({living, ended}, return_when=asyncio.FIRST_COMPLETED)
        if living.done():
            living.result()
        living.cancel()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2])))
