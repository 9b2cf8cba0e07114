"""Status of the instances of a deployment, from worker agents, the kubelet and the gateway.

Used by the start-up progress, `status`, `demo` and `profile`. Every request has a timeout;
instances whose agent does not respond are shown with the state of their pod.
"""

import asyncio
import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path

import grpc

from cleave.local import files
from cleave.local.state import DeploymentSnapshot, PodView, get_folder, list_running
from cleave.manifests.labels import GATEWAY
from cleave.rpc.channel import dial
from cleave.rpc.credentials import sign_with_token
from cleave.rpc.enum_names import get_enum_name
from cleave.rpc.http_client import HttpError, get, open_response
from cleave.rpc.v1 import agent_pb2, agent_pb2_grpc
from cleave.rpc.weights_report import merge_weights

_REQUEST_TIMEOUT_S = 2.0
_HANDOFFS_METRIC = 'cleave_gateway_handoffs_total{result="used"}'


@dataclass(frozen=True, slots=True)
class InstanceRow:
    """One line of `cleave status`. Figures are None while the agent does not respond."""

    instance: str
    role: str
    state: str
    engine: str = ""
    num_running: int | None = None
    num_waiting: int | None = None
    kv_cache_usage: float | None = None
    """Used share, 0..1."""
    epoch: int | None = None
    restarts: int = 0
    """Restarts of the pod and of its engine."""
    pid: int | None = None
    url: str = ""
    reason: str = ""
    """Why it is not ready."""
    last_failure: str = ""
    """Reason of the last restart of its engine or process; empty: none."""
    kv_path: str = ""
    """Result of its KV self-test; empty for the gateway."""
    kv_pairs: str = ""
    """What canary handoffs to it have shown; empty: none was tested yet."""
    weights: str = ""
    """Digest of what its engine has loaded; empty: nothing, or not known yet."""
    weights_read_s: float = 0.0
    """When that was read, in seconds since 1970."""
    weights_fault: str = ""
    """Why other weights could have the same digest; empty: they could not."""


async def collect_rows(snapshot: DeploymentSnapshot) -> list[InstanceRow]:
    """A row per pod; all agents are requested concurrently."""
    healths = await _get_agent_healths(snapshot)
    boots = {each.registration.boot_id for each in healths.values() if each is not None}
    return [
        build_row(
            pod,
            snapshot,
            merge_ranks([healths.get(each) for each in (pod.address, *pod.further_addresses)]),
            boots,
        )
        for pod in snapshot.pods
    ]


async def find_engine_key(url: str) -> str:
    """The key that the engine at `url` asks for, if a deployment on this machine has it; else
    empty. Raises StateError."""
    snapshots = await asyncio.gather(*(folder.read_restored() for folder in list_running()))
    for snapshot in filter(None, snapshots):
        for health in (await _get_agent_healths(snapshot)).values():
            if health is not None and health.registration.engine_url == url:
                return str(health.registration.engine_key)
    return ""


def merge_ranks(
    healths: Sequence[agent_pb2.HealthResponse | None],
) -> agent_pb2.HealthResponse | None:
    """The health of a pod from those of its engines, which are data-parallel ranks if there are
    several: the first that is not ready, with the requests of all. None: an agent does not respond.
    """
    known = [each for each in healths if each is not None]
    if len(known) < len(healths):
        return None
    merged = agent_pb2.HealthResponse()
    ready = agent_pb2.STATE_READY
    merged.CopyFrom(next((e for e in known if e.registration.state != ready), known[0]))
    read = [(each.registration.weights_read_ms, each.registration.weights) for each in known]
    merged.registration.weights = merge_weights(read)
    merged.registration.weights_read_ms = max(at for at, _ in read)
    merged.registration.restarts = max(each.registration.restarts for each in known)
    merged.load.num_running = sum(each.load.num_running for each in known)
    merged.load.num_waiting = sum(each.load.num_waiting for each in known)
    merged.load.kv_cache_usage = max(each.load.kv_cache_usage for each in known)
    del merged.pairs.proofs[:]
    merged.pairs.proofs.extend(proof for each in known for proof in each.pairs.proofs)
    return merged


def build_row(
    pod: PodView,
    snapshot: DeploymentSnapshot,
    health: agent_pb2.HealthResponse | None,
    boots: Collection[str] = (),
) -> InstanceRow:
    """The row of a pod from the kubelet's view and, if it responded, its agent's health.
    `boots`: of all engines that run."""
    if health is None:
        return InstanceRow(
            instance=pod.name,
            role=pod.role,
            state=_describe_pod_state(pod, snapshot),
            restarts=pod.restarts,
            pid=pod.pid,
            url=snapshot.url if pod.role == GATEWAY else "",
            reason=pod.last_end if pod.waiting and pod.last_exit_code else "",
            last_failure=_describe_pod_failure(pod),
        )
    registration, load = health.registration, health.load
    return InstanceRow(
        instance=pod.name,
        role=get_enum_name(agent_pb2.Role, registration.role),
        state=get_enum_name(agent_pb2.State, registration.state),
        engine=registration.engine,
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        kv_cache_usage=load.kv_cache_usage,
        epoch=registration.epoch,
        restarts=pod.restarts + registration.restarts,
        pid=pod.pid,
        url=registration.engine_url,
        reason=registration.reason,
        last_failure=registration.last_failure or _describe_pod_failure(pod),
        kv_path=_describe_kv_path(registration.kv_path),
        kv_pairs=_describe_pairs([p for p in health.pairs.proofs if p.prefill_boot_id in boots]),
        weights=registration.weights,
        weights_read_s=registration.weights_read_ms / 1000,
        weights_fault=registration.weights_fault,
    )


def _describe_pod_state(pod: PodView, snapshot: DeploymentSnapshot) -> str:
    if snapshot.stopping:
        return "stopping"
    if pod.waiting:
        return pod.waiting
    return "ready" if pod.ready else "starting"


def _describe_pod_failure(pod: PodView) -> str:
    return f"ended with {pod.last_end}" if pod.last_end else ""


def _describe_kv_path(path: agent_pb2.KvPath) -> str:
    if not path.verified:
        return f"not verified: {path.detail}" if path.detail else "not verified"
    first = f"{path.transfer_ms:.1f} ms to the first token"
    return f"{path.transport}, verified, {path.detail}, {first}"


def _describe_pairs(proofs: Sequence[agent_pb2.PairProof]) -> str:
    if not proofs:
        return ""
    proven = [each for each in proofs if each.trust == agent_pb2.TRUST_PROVEN]
    rates = [each.bytes_per_s for each in proven if each.bytes_per_s > 0]
    oldest_s = max((each.age_ms for each in proven), default=0) / 1000
    parts = [f"{len(proven)} of {len(proofs)} pairs proven"]
    parts += [f"oldest {oldest_s:.0f} s"] if proven else []
    parts += [f"{min(rates) / 1e9:.3g} GB/s at least"] if rates else []
    faults = [each.reason for each in proofs if each.trust != agent_pb2.TRUST_PROVEN]
    return "; ".join([", ".join(parts), *faults[:1]])


@dataclass(frozen=True, slots=True)
class GatewayHealth:
    """The gateway's response to GET /health."""

    serving: bool
    reason: str = ""
    has_answered: bool = True


async def get_gateway_health(url: str) -> GatewayHealth:
    """The health of the gateway at `url`; without a response it is not serving."""
    try:
        async with (
            asyncio.timeout(_REQUEST_TIMEOUT_S),
            open_response("GET", f"{url}/health", seconds=_REQUEST_TIMEOUT_S) as response,
        ):
            body = await response.read()
    except (HttpError, TimeoutError) as error:
        return GatewayHealth(False, f"no response: {error}", has_answered=False)
    serving = response.status == HTTPStatus.OK
    return GatewayHealth(serving, "" if serving else _parse_reason(body))


async def count_handoffs(url: str) -> int:
    """KV handoffs that the gateway at `url` has used since its start; 0 without a response."""
    try:
        page = await get(f"{url}/metrics", seconds=_REQUEST_TIMEOUT_S)
    except HttpError:
        return 0
    for line in page.decode(errors="replace").splitlines():
        if line.startswith(_HANDOFFS_METRIC):
            return round(float(line.rpartition(" ")[2]))
    return 0


def _parse_reason(body: bytes) -> str:
    """The reasons in the body of /health; its first bytes if it is not that of a gateway."""
    try:
        health = json.loads(body)
        return "; ".join(map(str, health["reasons"])) or str(health["status"])
    except (ValueError, KeyError, TypeError):
        return body[:200].decode(errors="replace").strip()


async def _get_agent_healths(
    snapshot: DeploymentSnapshot,
) -> dict[str, agent_pb2.HealthResponse | None]:
    """What the agents report, by address; None: it does not respond."""
    running = [pod for pod in snapshot.pods if pod.role != GATEWAY and pod.pid is not None]
    agents = [each for pod in running for each in (pod.address, *pod.further_addresses)]
    token_file = get_folder(snapshot.deployment).path / files.TOKEN_FILE
    responses = await asyncio.gather(*(_get_agent_health(each, token_file) for each in agents))
    return dict(zip(agents, responses, strict=True))


async def _get_agent_health(address: str, token_file: Path) -> agent_pb2.HealthResponse | None:
    async with dial(address) as channel:
        stub = agent_pb2_grpc.AgentStub(channel)
        try:
            return await stub.Health(
                agent_pb2.HealthRequest(),
                timeout=_REQUEST_TIMEOUT_S,
                metadata=sign_with_token(token_file, address),
            )
        except grpc.aio.AioRpcError:
            return None
