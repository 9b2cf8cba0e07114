"""The Kubernetes status of a pod, derived from the facts that the kubelet observes.

Pure; called whenever the status of a pod is requested.
"""

from dataclasses import dataclass
from datetime import UTC, datetime

from cleave.local.kubelet.network import HOST_IP
from cleave.local.kubelet.pod_spec import PodSpec
from cleave.manifests.labels import Manifest


@dataclass(frozen=True, slots=True)
class ContainerTermination:
    """A termination of a container."""

    exit_code: int
    """As a container runtime reports it: 128 + signal when a signal ended the process."""
    started_at: float
    finished_at: float
    reason: str
    """`Completed`, `Error`, or why the kubelet stopped it."""


@dataclass(slots=True)
class PodState:
    """What the kubelet has observed of a pod. Times are seconds since the epoch."""

    pod_ip: str
    admitted_at: float
    pid: int | None = None
    """Id of the running process."""
    started_at: float | None = None
    ready: bool = False
    started: bool = False
    """Whether the startup probe has passed."""
    restarts: int = 0
    waiting: str = "ContainerCreating"
    waiting_message: str = ""
    last: ContainerTermination | None = None
    deleting: bool = False


def build_status(spec: PodSpec, facts: PodState) -> Manifest:
    """The `status` of the pod."""
    return {
        "phase": get_phase(facts),
        "conditions": [
            _build_condition("PodScheduled", True),
            _build_condition("Initialized", True),
            _build_condition("ContainersReady", facts.ready),
            _build_condition("Ready", facts.ready),
        ],
        "hostIP": HOST_IP,
        "podIP": facts.pod_ip,
        "podIPs": [{"ip": facts.pod_ip}],
        "startTime": format_timestamp(facts.admitted_at),
        "containerStatuses": [_build_container_status(spec, facts)],
    }


def get_phase(facts: PodState) -> str:
    """Pending, Running, Succeeded or Failed."""
    if facts.pid is not None:
        return "Running"
    if facts.last is None:
        return "Pending"
    if facts.waiting:
        return "Running"
    return "Succeeded" if facts.last.exit_code == 0 else "Failed"


def format_timestamp(seconds: float) -> str:
    """Seconds since the epoch as Kubernetes writes times."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _build_condition(kind: str, holds: bool) -> Manifest:
    return {"type": kind, "status": "True" if holds else "False"}


def _build_container_status(spec: PodSpec, facts: PodState) -> Manifest:
    last = {"terminated": _build_terminated(facts.last)} if facts.last else {}
    state = _build_container_state(facts)
    return {
        "name": spec.container,
        "image": spec.image,
        "imageID": "",
        "ready": facts.ready,
        "started": facts.started,
        "restartCount": facts.restarts,
        "state": state,
        # As in Kubernetes: after the final exit, the termination is the state, not the last state.
        "lastState": {} if "terminated" in state else last,
    }


def _build_container_state(facts: PodState) -> Manifest:
    if facts.pid is not None and facts.started_at is not None:
        return {"running": {"startedAt": format_timestamp(facts.started_at)}}
    if facts.waiting or facts.last is None:
        waiting = {"reason": facts.waiting}
        if facts.waiting_message:
            waiting["message"] = facts.waiting_message
        return {"waiting": waiting}
    return {"terminated": _build_terminated(facts.last)}


def _build_terminated(ended: ContainerTermination) -> Manifest:
    return {
        "exitCode": ended.exit_code,
        "reason": ended.reason,
        "startedAt": format_timestamp(ended.started_at),
        "finishedAt": format_timestamp(ended.finished_at),
    }
