"""Worker pods: one agent with its engine per instance. Pure.

Called by `cleave.local` and the controller. Further pods of an instance that spans nodes have no
agent: see `cleave.manifests.multi_node`.
"""

import json

from cleave.api.engine import Connector, EngineType, EnvVar, TransferMode
from cleave.api.pool import InstancePool, InstancePoolSpec
from cleave.manifests.container import (
    build_address_env,
    build_container_security,
    build_pod_defaults,
    get_image,
)
from cleave.manifests.labels import (
    AGENT_PORT,
    CELL,
    ENGINE_PORT,
    ROLE,
    SEGMENT,
    Manifest,
    build_worker_labels,
    get_agents_source,
    get_workers_name,
)
from cleave.manifests.resources import Device, build_resources, has_rdma
from cleave.manifests.scheduling import build_scheduling, build_segment
from cleave.manifests.scheduling_args import build_scheduling_args
from cleave.manifests.storage import build_storage, get_hub_cache, get_loaded_path

_ROLE_ENV = "CLEAVE_ROLE"
GRACE_SLACK_S = 15
"""Seconds between the end of the drain and SIGKILL: up to 10 s for the engine to stop, and some
slack."""


def build_worker_pod(
    pool: InstancePool,
    name: str | int,
    *,
    device: Device = "gpu",
    cell: int | None = None,
    image_prefix: str = "",
) -> Manifest:
    """Pod of one instance of a pool, for nodes that compute on `device`.

    `name` may be the instance's number instead, from 0. `cell`: number of the cell of an instance
    in a pool with colocation (`cleave.manifests.topology.assign_cells`).
    """
    instance = name if isinstance(name, str) else f"{pool.name}-{name}"
    labels = build_worker_labels(pool, instance)
    if cell is not None:
        labels |= {CELL: str(cell), SEGMENT: build_segment(pool, cell, rank=0)}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": instance, "namespace": pool.namespace, "labels": labels},
        "spec": {
            **build_worker_spec(pool, labels, device),
            **_build_host_name(pool, instance),
            "containers": [_build_container(pool, instance, device, cell, image_prefix)],
        },
    }


def build_worker_spec(pool: InstancePool, labels: dict[str, str], device: Device) -> Manifest:
    """Fields that the pod specs of an instance share, except for the container."""
    spec = pool.spec
    return {
        **build_pod_defaults(spec.deployment),
        "terminationGracePeriodSeconds": spec.template.drain_timeout_s + GRACE_SLACK_S,
        **build_scheduling(pool, labels, device),
        "volumes": build_storage(spec.model)[0],
    }


def _build_container(
    pool: InstancePool, instance: str, device: Device, cell: int | None, image_prefix: str
) -> Manifest:
    spec = pool.spec
    return {
        **build_container_base(spec, device, image_prefix),
        "command": build_agent_command(pool, instance, cell),
        "env": build_environment(pool),
        # A fixed port of the engine, so that Prometheus finds its metrics.
        "ports": [
            {"name": "agent", "containerPort": AGENT_PORT},
            {"name": "engine", "containerPort": ENGINE_PORT},
        ],
        **_build_probes(),
    }


def build_container_base(spec: InstancePoolSpec, device: Device, image_prefix: str) -> Manifest:
    """Fields that the containers of an instance's pods share."""
    # RDMA needs memory that is locked (not swapped).
    more = ("IPC_LOCK",) if has_rdma(spec.template.resources) else ()
    return {
        "name": "worker",
        "image": spec.engine.image or _get_default_image(spec, device, image_prefix),
        "resources": build_resources(spec, device),
        "securityContext": build_container_security(*more),
        "volumeMounts": build_storage(spec.model)[1],
    }


def build_agent_command(pool: InstancePool, name: str, cell: int | None = None) -> list[str]:
    """Command line of the agent; arguments after `--` go to the engine."""
    spec = pool.spec
    args = ["python", "-m", "cleave_worker.agent.main"]
    args += ["--name", name, "--deployment", spec.deployment, "--revision", spec.revision]
    if cell is not None:
        args += ["--cell", str(cell)]
    args += ["--role", f"$({_ROLE_ENV})", *build_engine_flags(spec)]
    args += ["--engine", spec.engine.type.lower()]
    args += ["--host", "$(POD_IP)", "--port", str(AGENT_PORT), "--engine-port", str(ENGINE_PORT)]
    args += ["--drain-timeout", str(spec.template.drain_timeout_s)]
    if spec.engine.scheduling:
        args += ["--scheduling", json.dumps(build_scheduling_args(spec.engine.scheduling))]
    extra = [*build_multi_node_args(spec, "0", "$(POD_IP)"), *build_engine_args(spec)]
    return [*args, "--", *extra] if extra else args


def build_engine_flags(spec: InstancePoolSpec) -> list[str]:
    """Flags about model and parallelism, for every process that starts an engine."""
    model, size = spec.model, spec.parallelism
    flags = ["--model", get_loaded_path(model), "--served-model-name", model.name]
    flags += ["--tensor-parallel-size", str(size.tensor)]
    flags += ["--pipeline-parallel-size", str(size.pipeline)]
    if model.max_model_len is not None:
        flags += ["--max-model-len", str(model.max_model_len)]
    if spec.engine.connector is not Connector.NIXL:
        flags += ["--connector", spec.engine.connector.lower()]
    if spec.engine.transfer is not TransferMode.PULL:
        flags += ["--transfer", spec.engine.transfer.lower()]
    return flags


def build_engine_args(spec: InstancePoolSpec) -> list[str]:
    """Arguments of the engine itself."""
    args = ["--dtype", str(spec.model.dtype)] if spec.model.dtype else []
    if spec.engine.type is EngineType.EMULATED:
        emulation = spec.engine.emulation
        args += ["--latency", emulation.latency, "--time-scale", f"{emulation.time_scale:g}"]
    elif spec.model.revision and not get_loaded_path(spec.model).startswith("/"):
        args += ["--revision", spec.model.revision]
    return [*args, *spec.engine.args]


def build_multi_node_args(spec: InstancePoolSpec, rank: str, leader: str) -> list[str]:
    """vLLM's arguments for an instance that spans several nodes; empty for others."""
    if spec.nodes == 1:
        return []
    return ["--nnodes", str(spec.nodes), "--node-rank", rank, "--master-addr", leader]


def build_environment(pool: InstancePool) -> list[Manifest]:
    """Environment variables of a worker's container; the user's come last."""
    spec = pool.spec
    variables = build_address_env(get_agents_source(spec.deployment, pool.namespace))
    # From the label, which changes when the pod changes pools: a container that is restarted
    # afterwards takes the new role.
    label = {"fieldRef": {"fieldPath": f"metadata.labels['{ROLE}']"}}
    variables.append({"name": _ROLE_ENV, "valueFrom": label})
    if folder := get_hub_cache(spec.model):
        variables.append({"name": "HF_HOME", "value": folder})
    if spec.nodes > 1:
        variables.append({"name": "VLLM_HOST_IP", "value": "$(POD_IP)"})
    own = {variable.name: _build_variable(variable) for variable in spec.engine.env}
    return [each for each in variables if each["name"] not in own] + list(own.values())


def _build_variable(variable: EnvVar) -> Manifest:
    if variable.value_from is None:
        return {"name": variable.name, "value": variable.value}
    return {"name": variable.name, "valueFrom": variable.value_from.model_dump(mode="json")}


def _get_default_image(spec: InstancePoolSpec, device: Device, prefix: str) -> str:
    if spec.engine.type is EngineType.EMULATED:
        return get_image("worker-emulated", prefix)
    return get_image("worker-cuda" if device == "gpu" else "worker-cpu", prefix)


def _build_host_name(pool: InstancePool, instance: str) -> Manifest:
    """DNS name under which further pods reach the leader."""
    if pool.spec.nodes == 1:
        return {}
    return {"hostname": instance, "subdomain": get_workers_name(pool.spec.deployment)}


def _build_probes() -> Manifest:
    # The agent responds within seconds, regardless of the engine, unless many start at once on few
    # cores: hence the long time of the liveness probe. Readiness is the engine's.
    return {
        "readinessProbe": {
            "grpc": {"port": AGENT_PORT, "service": "ready"},
            "periodSeconds": 2,
            "timeoutSeconds": 2,
            "failureThreshold": 2,
        },
        "livenessProbe": {
            "grpc": {"port": AGENT_PORT},
            "initialDelaySeconds": 60,
            "periodSeconds": 10,
            "timeoutSeconds": 5,
            "failureThreshold": 6,
        },
    }
