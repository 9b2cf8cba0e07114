"""The supervisor: runs the pods of a deployment on this machine until it is stopped.

`up` runs it in the foreground, or starts `python -m cleave.local.supervisor FOLDER` for `--detach`.
The order of shutdown matters: the gateway drains first so that no new requests arrive; decode stops
before prefill because it still pulls KV from prefill.
"""

import asyncio
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

from cleave.local.files import OwnedFiles
from cleave.local.kubelet.kubelet import Kubelet
from cleave.local.kubelet.network import AddressShortageError
from cleave.local.kubelet.pod_spec import PodError, PodSpec
from cleave.local.kubelet.pod_status import PodState
from cleave.local.launch_plan import LaunchPlan
from cleave.local.state import DeploymentSnapshot, PodView, StateFolder
from cleave.manifests.labels import AGENT_PORT, COMPONENT, GATEWAY, ROLE

_STOP_ORDER = (GATEWAY, "decode", "mixed", "prefill")
_PUBLISH_DELAY_S = 0.05


class DeploymentSupervisor:
    """One run of a job. The caller has locked the state folder."""

    def __init__(self, folder: StateFolder, job: LaunchPlan) -> None:
        self._folder = folder
        self._job = job
        self._kubelet: Kubelet | None = None
        self._owned = OwnedFiles()
        self._publish_timer: asyncio.TimerHandle | None = None
        self._fault = ""
        self._stop_requested = asyncio.Event()
        self._force_requested = asyncio.Event()

    def stop(self) -> None:
        """Stop all pods in order; a second call kills them."""
        if self._stop_requested.is_set():
            self._force_requested.set()
        self._stop_requested.set()
        self._schedule_publish()

    @property
    def is_stopping(self) -> bool:
        """Whether shutdown has begun."""
        return self._stop_requested.is_set()

    async def wait_for_stop(self) -> None:
        """Wait until shutdown begins."""
        await self._stop_requested.wait()

    async def run(self) -> None:
        """Run the pods until stopped; all their processes have ended on return."""
        job, folder, on_change = self._job, self._folder.path, self._schedule_publish
        try:
            async with Kubelet(
                job.node, folder, job.allow_shared_cores, on_change, self._owned
            ) as self._kubelet:
                self._start_pods(self._kubelet)
                await self._stop_requested.wait()
                await self._stop_in_order(self._kubelet)
        except AddressShortageError as error:
            self._report_failure(error)
            await self._stop_requested.wait()
        finally:
            if self._publish_timer is not None:
                self._publish_timer.cancel()
            self._folder.clear()

    def _start_pods(self, kubelet: Kubelet) -> None:
        try:
            for pod in self._job.pods:
                kubelet.run_pod(pod)
        except PodError as error:
            self._report_failure(error)
        self._publish()

    def _report_failure(self, error: Exception) -> None:
        """Publish why the pods cannot run; the waiting process then stops the supervisor."""
        self._fault = str(error)
        self._publish()

    async def _stop_in_order(self, kubelet: Kubelet) -> None:
        force_task = asyncio.create_task(self._stop_when_forced(kubelet))
        try:
            for role in _STOP_ORDER:
                specs = [spec for spec, _ in kubelet.list_pod_states() if get_role(spec) == role]
                await asyncio.gather(*(kubelet.stop_pod(spec.name) for spec in specs))
        finally:
            force_task.cancel()
            await asyncio.gather(force_task, return_exceptions=True)

    async def _stop_when_forced(self, kubelet: Kubelet) -> None:
        await self._force_requested.wait()
        specs = [spec for spec, _ in kubelet.list_pod_states()]
        await asyncio.gather(*(kubelet.stop_pod(spec.name, 0) for spec in specs))

    def _schedule_publish(self) -> None:
        # Several pods often change at once: write the file once for all.
        if self._publish_timer is None:
            loop = asyncio.get_running_loop()
            self._publish_timer = loop.call_later(_PUBLISH_DELAY_S, self._publish)

    def _publish(self) -> None:
        self._publish_timer = None
        observed = self._kubelet.list_pod_states() if self._kubelet else []
        snapshot = DeploymentSnapshot(
            deployment=self._job.deployment,
            supervisor_pid=os.getpid(),
            url=self._job.url,
            internal_url=self._job.internal_url,
            pods=tuple(build_pod_view(spec, pod_state) for spec, pod_state in observed),
            fault=self._fault,
            stopping=self._stop_requested.is_set(),
            plan=self._job.plan,
        )
        # Where it cannot be written now, the kubelet writes it later.
        with suppress(OSError):
            self._folder.write(snapshot, self._owned)


def get_role(spec: PodSpec) -> str:
    """A worker's role, or `gateway`."""
    if spec.labels.get(COMPONENT) == GATEWAY:
        return GATEWAY
    return spec.labels.get(ROLE, "")


def build_pod_view(spec: PodSpec, pod_state: PodState) -> PodView:
    """The state of a pod for display."""
    return PodView(
        name=spec.name,
        role=get_role(spec),
        address=f"{pod_state.pod_ip}:{spec.ports[0] if spec.ports else AGENT_PORT}",
        pid=pod_state.pid,
        ready=pod_state.ready,
        restarts=pod_state.restarts,
        waiting=pod_state.waiting,
        last_exit_code=pod_state.last.exit_code if pod_state.last else None,
        admitted_at=pod_state.admitted_at,
        further_addresses=tuple(f"{pod_state.pod_ip}:{port}" for port in spec.agent_ports[1:]),
    )


async def run(folder: StateFolder) -> None:
    """Run the job saved in `folder` until SIGTERM or SIGINT; a second signal kills the pods."""
    supervisor = DeploymentSupervisor(folder, LaunchPlan.load(folder))
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, supervisor.stop)
    await supervisor.run()


if __name__ == "__main__":
    asyncio.run(run(StateFolder(Path(sys.argv[1]))))
