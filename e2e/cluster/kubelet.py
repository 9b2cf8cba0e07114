"""The process of a test cluster's nodes: `python -m e2e.cluster.kubelet KUBECONFIG FOLDER`.

Orders are lines of JSON on standard input (`["add", SHAPE]`, `["lose", NODE]`, `["kill", POD]`),
each answered with `done` or `failed`; when input ends, so does everything that runs here. Stands
in for kube-proxy too.
"""

import asyncio
import json
import sys
import traceback
from pathlib import Path

from e2e.cluster.client import Client, Manifest
from e2e.cluster.node import Cores, Node
from e2e.cluster.nodes import Shape
from e2e.cluster.services import Forwarder

_PODS = "/api/v1/pods?fieldSelector=spec.nodeName!%3D"


class Kubelet:
    """All nodes of this process, and what they have in common."""

    def __init__(self, api: Client, folder: Path) -> None:
        self._api = api
        self._folder = folder
        self._nodes: dict[str, Node] = {}
        self._machine = Cores()
        self._index = 0
        self._pods: dict[str, Manifest] = {}

    async def obey(self, verb: str, what: object) -> None:
        """Carry out one order."""
        match verb, what:
            case "add", dict(fields):
                shape = Shape(**fields)
                node = Node(self._api, shape, self._index, self._machine, self._folder)
                self._index += 1
                await node.start()
                self._nodes[shape.name] = node
                node.listed([pod for pod in self._pods.values() if _node(pod) == shape.name])
            case "lose", str(name):
                await self._nodes.pop(name).lose()
            case "kill", str(pod):
                killed = [node for node in self._nodes.values() if node.kill(pod)]
                if not killed:
                    raise ValueError(f"no pod {pod} runs")
            case _:
                raise ValueError(f"unknown order {verb}")

    async def close(self) -> None:
        """End every pod at once."""
        await asyncio.gather(*(node.lose() for node in self._nodes.values()))

    def listed(self, pods: list[Manifest]) -> None:
        """All pods that are on nodes."""
        self._pods = {pod["metadata"]["uid"]: pod for pod in pods}
        for name, node in self._nodes.items():
            node.listed([pod for pod in pods if _node(pod) == name])

    def saw(self, event: Manifest) -> None:
        """One event of the watch."""
        pod, deleted = event["object"], event["type"] == "DELETED"
        if deleted:
            self._pods.pop(pod["metadata"]["uid"], None)
        else:
            self._pods[pod["metadata"]["uid"]] = pod
        if (node := self._nodes.get(_node(pod))) is not None:
            node.saw(pod, deleted=deleted)


def _node(pod: Manifest) -> str:
    return str(pod["spec"].get("nodeName", ""))


async def main(kubeconfig: Path, folder: Path) -> None:
    """Serve orders until there are no more."""
    loop = asyncio.get_running_loop()
    orders = asyncio.StreamReader(limit=2**20)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(orders), sys.stdin)
    async with Client(kubeconfig) as api, Forwarder(api) as forwarder:
        kubelet = Kubelet(api, folder)
        tasks = [
            asyncio.create_task(api.follow(_PODS, kubelet.listed, kubelet.saw)),
            *forwarder.tasks(),
        ]
        for task in tasks:
            task.add_done_callback(_complain)
        print("ready", flush=True)
        try:
            while line := await orders.readline():
                try:
                    await kubelet.obey(*json.loads(line))
                except Exception:  # noqa: BLE001 - fails one test; others need the nodes
                    traceback.print_exc()
                    print("failed", flush=True)
                else:
                    print("done", flush=True)
        finally:
            for task in tasks:
                task.cancel()
            await kubelet.close()


def _complain(task: asyncio.Task[None]) -> None:
    """Say in the log when a task that never ends has ended."""
    if not task.cancelled() and (error := task.exception()):
        traceback.print_exception(error)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2])))
