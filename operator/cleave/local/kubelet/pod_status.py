"""The Kubernetes status of a pod, derived from the state that the kubelet observes. Pure."""

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


def build_status(spec: PodSpec, pod_state: PodState) -> Manifest:
    """The `status` of the pod."""
    return {
        "phase": get_phase(pod_state),
        "conditions": [
            _build_condition("PodScheduled", True),
            _build_condition("Initialized", True),
            _build_condition("ContainersReady", pod_state.ready),
            _build_condition("Ready", pod_state.ready),
        ],
        "hostIP": HOST_IP,
        "podIP": pod_state.pod_ip,
        "podIPs": [{"ip": pod_state.pod_ip}],
        "startTime": format_timestamp(pod_state.admitted_at),
        "containerStatuses": [_build_container_status(spec, pod_state)],
    }


def get_phase(pod_state: PodState) -> str:
    """Pending, Running, Succeeded or Failed."""
    if pod_state.pid is not None:
        return "Running"
    if pod_state.last is None:
        return "Pending"
    if pod_state.waiting:
        return "Running"
    return "Succeeded" if pod_state.last.exit_code == 0 else "Failed"


def format_timestamp(seconds: float) -> str:
    """Seconds since the epoch as Kubernetes writes times."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _build_condition(kind: str, holds: bool) -> Manifest:
    return {"type": kind, "status": "True" if holds else "False"}


def _build_container_status(spec: PodSpec, pod_state: PodState) -> Manifest:
    last = {"terminated": _build_terminated(pod_state.last)} if pod_state.last else {}
    state = _build_container_state(pod_state)
    return {
        "name": spec.container,
        "image": spec.image,
        "imageID": "",
        "ready": pod_state.ready,
        "started": pod_state.started,
        "restartCount": pod_state.restarts,
        "state": state,
        # As in Kubernetes: after the final exit, the termination is the state, not the last state.
        "lastState": {} if "terminated" in state else last,
    }


def _build_container_state(pod_state: PodState) -> Manifest:
    if pod_state.pid is not None and pod_state.started_at is not None:
        return {"running": {"startedAt": format_timestamp(pod_state.started_at)}}
    if pod_state.waiting or pod_state.last is None:
        waiting = {"reason": pod_state.waiting}
        if pod_state.waiting_message:
            waiting["message"] = pod_state.waiting_message
        return {"waiting": waiting}
    return {"terminated": _build_terminated(pod_state.last)}


def _build_terminated(ended: ContainerTermination) -> Manifest:
    return {
        "exitCode": ended.exit_code,
        "reason": ended.reason,
        "startedAt": format_timestamp(ended.started_at),
        "finishedAt": format_timestamp(ended.finished_at),
    }
