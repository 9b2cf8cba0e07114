"""The supervisor: runs the pods of a deployment on this machine until it is stopped.

`up` runs it in the foreground, or starts `python -m cleave.local.supervisor FOLDER` for
`--detach`. What is hard: the order of shutdown. The gateway drains first so that no new
requests arrive; decode stops before prefill because it still pulls KV from prefill.
"""

import asyncio
import os
import signal
import sys
from pathlib import Path

from cleave.local.kubelet.kubelet import Kubelet
from cleave.local.kubelet.network import AddressShortageError
from cleave.local.kubelet.pod_spec import PodError, PodSpec
from cleave.local.kubelet.pod_status import Facts
from cleave.local.launch_plan import Job
from cleave.local.state import PodView, Snapshot, StateFolder
from cleave.manifests.labels import AGENT_PORT, COMPONENT, GATEWAY, ROLE

_STOP_ORDER = (GATEWAY, "decode", "mixed", "prefill")
_PUBLISH_DELAY_S = 0.05


class Supervisor:
    """One run of a job. The caller has locked the state folder."""

    def __init__(self, folder: StateFolder, job: Job) -> None:
        self._folder = folder
        self._job = job
        self._kubelet: Kubelet | None = None
        self._publishing: asyncio.TimerHandle | None = None
        self._fault = ""
        self._stopping = asyncio.Event()
        self._at_once = asyncio.Event()

    def stop(self) -> None:
        """Stop all pods in order; a second call kills them."""
        if self._stopping.is_set():
            self._at_once.set()
        self._stopping.set()
        self._changed()

    @property
    def is_stopping(self) -> bool:
        """Whether shutdown has begun."""
        return self._stopping.is_set()

    async def stopping(self) -> None:
        """Wait until shutdown begins."""
        await self._stopping.wait()

    async def run(self) -> None:
        """Run the pods until stopped; all their processes have ended on return."""
        job = self._job
        try:
            async with Kubelet(
                job.node,
                self._folder.path,
                allow_shared_cores=job.allow_shared_cores,
                changed=self._changed,
            ) as self._kubelet:
                self._start(self._kubelet)
                await self._stopping.wait()
                await self._end(self._kubelet)
        except AddressShortageError as error:
            self._give_up(error)
            await self._stopping.wait()
        finally:
            if self._publishing is not None:
                self._publishing.cancel()
            self._folder.clear()

    def _start(self, kubelet: Kubelet) -> None:
        try:
            for pod in self._job.pods:
                kubelet.run(pod)
        except PodError as error:
            self._give_up(error)
        self._publish()

    def _give_up(self, error: Exception) -> None:
        """Publish why the pods cannot run; the waiting process then stops the supervisor."""
        self._fault = str(error)
        self._publish()

    async def _end(self, kubelet: Kubelet) -> None:
        hurry = asyncio.create_task(self._hurry(kubelet))
        try:
            for role in _STOP_ORDER:
                names = [spec.name for spec, _ in kubelet.observed() if role_of(spec) == role]
                await asyncio.gather(*map(kubelet.stop, names))
        finally:
            hurry.cancel()
            await asyncio.gather(hurry, return_exceptions=True)

    async def _hurry(self, kubelet: Kubelet) -> None:
        await self._at_once.wait()
        await asyncio.gather(*(kubelet.stop(spec.name, 0) for spec, _ in kubelet.observed()))

    def _changed(self) -> None:
        # Several pods often change at once: write the file once for all.
        if self._publishing is None:
            loop = asyncio.get_running_loop()
            self._publishing = loop.call_later(_PUBLISH_DELAY_S, self._publish)

    def _publish(self) -> None:
        self._publishing = None
        observed = self._kubelet.observed() if self._kubelet else []
        self._folder.write(
            Snapshot(
                deployment=self._job.deployment,
                supervisor_pid=os.getpid(),
                url=self._job.url,
                internal_url=self._job.internal_url,
                pods=tuple(view(spec, facts) for spec, facts in observed),
                fault=self._fault,
                stopping=self._stopping.is_set(),
                plan=self._job.plan,
            )
        )


def role_of(spec: PodSpec) -> str:
    """A worker's role, or `gateway`."""
    if spec.labels.get(COMPONENT) == GATEWAY:
        return GATEWAY
    return spec.labels.get(ROLE, "")


def view(spec: PodSpec, facts: Facts) -> PodView:
    """The state of a pod for display."""
    port = spec.ports[0] if spec.ports else AGENT_PORT
    return PodView(
        name=spec.name,
        role=role_of(spec),
        address=f"{facts.pod_ip}:{port}",
        pid=facts.pid,
        ready=facts.ready,
        restarts=facts.restarts,
        waiting=facts.waiting,
        last_exit_code=facts.last.exit_code if facts.last else None,
        admitted_at=facts.admitted_at,
    )


async def run(folder: StateFolder) -> None:
    """Run the job saved in `folder` until SIGTERM or SIGINT; a second signal kills the pods."""
    supervisor = Supervisor(folder, Job.load(folder))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, supervisor.stop)
    await supervisor.run()


if __name__ == "__main__":
    asyncio.run(run(StateFolder(Path(sys.argv[1]))))
