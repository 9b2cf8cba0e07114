"""One pod on a node: from the manifest to a process, from what is observed to the status.

What is hard: a pod may be deleted in any phase, by a grace that changes, or vanish at once; its
process must be gone when the pod is deleted from the API server.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from cleave.local.kubelet import environment
from cleave.local.kubelet.pod_spec import PodError, PodSpec, parse_pod
from cleave.local.kubelet.pod_status import PodState, build_status, format_timestamp
from cleave.local.kubelet.pod_worker import ContainerCommand, PodWorker
from cleave.manifests.container import HOME_FOLDER, LISTEN_ON

from e2e.cluster import mounts, volumes
from e2e.cluster.client import ApiError, Client, Manifest
from e2e.cluster.tools import REPOSITORY
from e2e.cluster.volumes import NotYetError

_AGAIN_S = 0.5
_REFRESH_S = 10
"""Between two looks at the Secrets and ConfigMaps of volumes; a kubelet takes about a minute."""
_REACHABLE = (sys.prefix, sys.base_prefix, str(REPOSITORY))
"""What every process needs, wherever volumes are mounted."""


@dataclass(frozen=True)
class Place:
    """What a node gives a pod."""

    node: str
    node_ip: str
    pod_ip: str
    cores: frozenset[int]
    gpus: tuple[int, ...]
    folder: Path
    """For what is made for the pod."""
    hosts: Path
    """What all pods see as /etc/hosts, instead of the cluster's DNS."""
    versions: Path
    """Folder of `Nodes.install`: sources by tag of an image."""
    log: Path


class Runner:
    """Runs one pod until it is deleted; `done` is called when its place is free again."""

    def __init__(
        self, api: Client, pod: Manifest, place: Place, done: Callable[["Runner"], None]
    ) -> None:
        self.uid: str = pod["metadata"]["uid"]
        self.name: str = pod["metadata"]["name"]
        self.place = place
        self._api = api
        self._pod = pod
        self._done = done
        self._facts = PodState(pod_ip=place.pod_ip, admitted_at=time.time())
        self._life: PodWorker | None = None
        self._transitions: dict[str, tuple[str, str]] = {}
        self._changed = asyncio.Event()
        self._deleted = asyncio.Event()
        self._grace_s: float | None = None
        self._task = asyncio.create_task(self._run(), name=f"pod {self.name}")

    def delete(self, grace_s: float) -> None:
        """End within `grace_s`, then delete the pod from the API server."""
        if self._grace_s is None or grace_s < self._grace_s:
            self._grace_s = grace_s
            self._deleted.set()
            if self._life is not None:
                self._ending = asyncio.create_task(self._life.stop(grace_s))

    def crash(self) -> bool:
        """SIGKILL the process and all it started; whether it ran."""
        if self._facts.pid is None:
            return False
        os.killpg(self._facts.pid, signal.SIGKILL)
        return True

    async def kill(self) -> None:
        """End at once without a word, as when a node is lost."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        if self._life is not None:
            await self._life.stop(0)

    async def _run(self) -> None:
        try:
            self._life = await self._started()
            if self._life is not None:
                refreshing = asyncio.create_task(self._refresh_volumes())
                try:
                    await self._report()
                finally:
                    refreshing.cancel()
            await self._remove()
        finally:
            self._done(self)

    async def _refresh_volumes(self) -> None:
        while True:
            await asyncio.sleep(_REFRESH_S)
            with contextlib.suppress(
                NotYetError, ApiError, aiohttp.ClientError, TimeoutError, OSError
            ):
                await volumes.refresh(self._api, self._pod, self.place.folder)

    async def _started(self) -> PodWorker | None:
        """The pod's life; None when it was deleted before it began."""
        while not self._deleted.is_set():
            try:
                spec = parse_pod(self._pod)
                command = await self._command(spec)
            except (NotYetError, PodError, ApiError, aiohttp.ClientError, TimeoutError) as error:
                self._facts.waiting = "CreateContainerConfigError"
                self._facts.waiting_message = str(error)
                await self._write_status(_waiting(self._pod, self._facts))
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_AGAIN_S):
                        await self._deleted.wait()
                continue
            self._facts.waiting = self._facts.waiting_message = ""
            return PodWorker(spec, self._facts, command, self.place.cores, self._changed.set)
        return None

    async def _command(self, spec: PodSpec) -> ContainerCommand:
        place = self.place
        known = environment.build_downward_api_fields(
            spec, place.pod_ip, place.node_ip, place.node
        ) | {
            "metadata.uid": self.uid,
            "spec.serviceAccountName": self._pod["spec"].get("serviceAccountName", "default"),
        }
        own = environment.resolve_env(await volumes.env(self._api, self._pod), known, {})
        sources = self._find_sources()
        env = self._base_env(spec) | {"PYTHONPATH": ":".join(sources)} | own
        folders = await volumes.folders(self._api, self._pod, place.folder)
        security = self._pod["spec"]["containers"][0].get("securityContext") or {}
        self._publish_name()
        hosts = {"source": str(place.hosts), "target": "/etc/hosts", "readOnly": True}
        plan = {
            "volumes": [*volumes.mounts(self._pod, folders), hosts],
            "keep": [*_REACHABLE, *sources],
            "readOnlyRoot": bool(security.get("readOnlyRootFilesystem")),
        }
        mounter = [sys.executable, "-I", "-S", mounts.__file__, json.dumps(plan)]
        # All pods share one loopback here.
        command = [word.replace(LISTEN_ON, "$(POD_IP)") for word in spec.command]
        return ContainerCommand(
            [*mounter, *environment.build_command_line(command, own)], env, place.log
        )

    def _publish_name(self) -> None:
        """Let all pods find this one by its host name, if it has one in a Service."""
        spec, namespace = self._pod["spec"], self._pod["metadata"]["namespace"]
        if not (spec.get("hostname") and spec.get("subdomain")):
            return
        name = f"{spec['hostname']}.{spec['subdomain']}.{namespace}.svc"
        # Rewritten in place: running pods have this file mounted.
        with self.place.hosts.open("r+") as file:
            lines = [line for line in file.read().splitlines() if line.split()[-1:] != [name]]
            file.seek(0)
            file.write("\n".join([*lines, f"{self.place.pod_ip} {name}", ""]))
            file.truncate()

    def _find_sources(self) -> list[str]:
        """The sources of its image's tag, if that is another version of Cleave."""
        _, _, tag = self._pod["spec"]["containers"][0].get("image", "").rpartition(":")
        sources = self.place.versions / tag
        return [str(sources.resolve())] if tag and sources.is_dir() else []

    def _base_env(self, spec: PodSpec) -> dict[str, str]:
        """What a container finds besides its own variables: programs, home, the API server."""
        targets = {
            mount["mountPath"]
            for mount in self._pod["spec"]["containers"][0].get("volumeMounts") or []
        }
        host, _, port = self._api.url.removeprefix("https://").partition(":")
        cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
        return {
            "PATH": f"{sys.prefix}/bin:{os.defpath}",
            "HOME": HOME_FOLDER if HOME_FOLDER in targets else str(self.place.folder),
            "HOSTNAME": spec.name,
            "LANG": "C.UTF-8",
            # Images hold the compiled simulator.
            "NUMBA_CACHE_DIR": os.environ.get("NUMBA_CACHE_DIR") or cache,
            "KUBERNETES_SERVICE_HOST": host,
            "KUBERNETES_SERVICE_PORT": port,
            "CUDA_VISIBLE_DEVICES": ",".join(map(str, self.place.gpus)),
        }

    async def _report(self) -> None:
        """Keep the pod's status in step with the facts until the process is gone for good."""
        life = self._life
        assert life is not None
        last: Manifest = {}
        gone = asyncio.create_task(self._gone())
        try:
            while not gone.done():
                self._changed.clear()
                if (now := self._status(life.spec)) != last:
                    await self._write_status(now)
                    last = now
                changed = asyncio.create_task(self._changed.wait())
                await asyncio.wait({gone, changed}, return_when=asyncio.FIRST_COMPLETED)
                changed.cancel()
            gone.result()
        finally:
            gone.cancel()

    async def _gone(self) -> None:
        """Return when the pod was deleted and its process has ended."""
        await self._deleted.wait()
        assert self._life is not None
        await self._life.stop(self._grace_s)

    def _status(self, spec: PodSpec) -> Manifest:
        found = build_status(spec, self._facts) | {"hostIP": self.place.node_ip}
        found["hostIPs"] = [{"ip": self.place.node_ip}]
        found["conditions"] = [c for c in found["conditions"] if c["type"] != "PodScheduled"]
        return found

    async def _write_status(self, now: Manifest) -> None:
        """Write the pod's status; an unavailable API server is retried."""
        conditions = [
            each | {"lastTransitionTime": self._since(each)} for each in now["conditions"]
        ]
        path = f"{self._path()}/status"
        body = {"metadata": {"uid": self.uid}, "status": now | {"conditions": conditions}}
        while True:
            try:
                await self._api.patch(path, body)
                return
            except ApiError as error:
                if error.status < 500 and error.status != 429:
                    return  # gone, or another pod of this name
            except (aiohttp.ClientError, TimeoutError, OSError):
                pass
            await asyncio.sleep(_AGAIN_S)

    def _since(self, condition: Manifest) -> str:
        """When the condition became what it is."""
        before = self._transitions.get(condition["type"])
        if before is None or before[0] != condition["status"]:
            before = condition["status"], format_timestamp(time.time())
            self._transitions[condition["type"]] = before
        return before[1]

    async def _remove(self) -> None:
        await self._deleted.wait()
        body = {"gracePeriodSeconds": 0, "preconditions": {"uid": self.uid}}
        while True:
            try:
                await self._api.delete(self._path(), body)
                return
            except (ApiError, aiohttp.ClientError, TimeoutError, OSError):
                await asyncio.sleep(_AGAIN_S)

    def _path(self) -> str:
        metadata = self._pod["metadata"]
        return f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}"


def _waiting(pod: Manifest, facts: PodState) -> Manifest:
    """The status of a pod that cannot start yet."""
    waiting = {"reason": facts.waiting, "message": facts.waiting_message}
    return {
        "phase": "Pending",
        "startTime": format_timestamp(facts.admitted_at),
        "conditions": [
            {"type": "Initialized", "status": "True"},
            {"type": "ContainersReady", "status": "False", "reason": "ContainersNotReady"},
            {"type": "Ready", "status": "False", "reason": "ContainersNotReady"},
        ],
        "containerStatuses": [
            {
                "name": container["name"],
                "image": container.get("image", ""),
                "imageID": "",
                "ready": False,
                "restartCount": 0,
                "state": {"waiting": waiting},
            }
            for container in pod["spec"]["containers"]
        ],
    }
