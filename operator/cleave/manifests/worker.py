"""Worker pods: one agent with its engine per instance. Pure.

Called by `cleave.local` and the controller. Further pods of an instance that spans nodes have no
agent: see `cleave.manifests.multi_node`.
"""

import json
from enum import IntEnum

from cleave.api.engine import (
    Connector,
    EngineType,
    EnvVar,
    TransferMode,
)
from cleave.api.pods.worker_template import WorkerTemplate
from cleave.api.pool import InstancePool, InstancePoolSpec
from cleave.api.role import Role
from cleave.api.scheduling import PromptOrder, Scheduling
from cleave.manifests import container
from cleave.manifests.container import OWN_IMAGES, Images
from cleave.manifests.labels import (
    AGENT_PORT,
    CELL,
    ENGINE_PORT,
    ROLE,
    SEGMENT,
    Manifest,
    build_object,
    build_worker_labels,
    get_agents_source,
    get_workers_name,
)
from cleave.manifests.resources import (
    Device,
    build_resources,
    build_scratch_sizes,
    find_weight_bytes,
)
from cleave.manifests.scheduling import build_scheduling, build_segment
from cleave.manifests.storage import (
    build_storage,
    convert_token_variable,
    get_hub_cache,
    get_loaded_path,
    limit_scratch,
    list_compile_caches,
)
from cleave.planner.problem import ADMISSIONS, ORDERS
from cleave.policy.adapters import ENV as ADAPTERS_ENV
from cleave.policy.adapters import AdapterSource, format_adapters

RoleSchedulingArgs = dict[str, str | int]
"""Scheduling arguments of one role, as the agent's `--scheduling` takes them."""

_ROLE_ENV = "CLEAVE_ROLE"
_START_S = 900
_LOAD_BYTES_PER_S = 10**8
_START_UNKNOWN_S = 3600
"""Limits of an engine's start on GPUs: for compilation and CUDA graphs, and for weights, which come
from the network at 0.1 GB/s in the worst case; of a model whose size is not known."""
GRACE_SLACK_S = 15
"""Seconds between the end of the drain and SIGKILL: up to 10 s for the engine to stop, and some
slack."""


def build_worker_pod(
    pool: InstancePool,
    name: str | int,
    *,
    device: Device = "gpu",
    cell: int | None = None,
    images: Images = OWN_IMAGES,
) -> Manifest:
    """Pod of one instance of a pool, for nodes that compute on `device`.

    `name` may be the instance's number instead, from 0. `cell`: number of the cell of an instance
    in a pool with colocation (`cleave.manifests.topology.assign_cells`).
    """
    instance = name if isinstance(name, str) else f"{pool.name}-{name}"
    labels = build_worker_labels(pool, instance)
    if cell is not None:
        labels |= {CELL: str(cell), SEGMENT: build_segment(pool, cell, rank=0)}
    # DNS name under which further pods reach the leader.
    host_name = {"hostname": instance, "subdomain": get_workers_name(pool.spec.deployment)}
    spec = {
        **build_worker_spec(pool, labels, device),
        **(host_name if pool.spec.nodes > 1 else {}),
        "containers": [_build_container(pool, instance, device, cell, images)],
    }
    pod = build_object("v1", "Pod", instance, pool.namespace, labels, spec=spec)
    return with_annotations(pod, pool.spec.template)


def with_annotations(pod: Manifest, template: WorkerTemplate) -> Manifest:
    """Add the template's annotations to a pod, or to the template of one."""
    if template.annotations:
        pod["metadata"]["annotations"] = dict(template.annotations)
    return pod


def build_worker_spec(pool: InstancePool, labels: dict[str, str], device: Device) -> Manifest:
    """Fields that the pod specs of an instance share, except for the container."""
    spec = pool.spec
    return {
        **container.build_pod_defaults(),
        "terminationGracePeriodSeconds": spec.template.drain_timeout_s + GRACE_SLACK_S,
        **build_scheduling(pool, labels, device),
        **_build_template_fields(spec.template),
        "volumes": limit_scratch(
            build_storage(spec.model, spec.template, spec.engine)[0],
            build_scratch_sizes([spec], device),
        ),
    }


def _build_template_fields(template: WorkerTemplate) -> Manifest:
    fields: Manifest = {
        "resourceClaims": [claim.model_dump() for claim in template.resource_claims],
        "imagePullSecrets": [{"name": name} for name in template.image_pull_secrets],
        "priorityClassName": template.priority_class_name,
        "schedulerName": template.scheduler_name,
        "runtimeClassName": template.runtime_class_name,
        "hostNetwork": template.host_network,
        # Otherwise such a pod finds no Service.
        "dnsPolicy": "ClusterFirstWithHostNet" if template.host_network else None,
    }
    return {name: value for name, value in fields.items() if value}


def _build_container(
    pool: InstancePool, instance: str, device: Device, cell: int | None, images: Images
) -> Manifest:
    spec = pool.spec
    return {
        **build_container_base(spec, device, images),
        "command": build_agent_command(pool, instance, cell, device),
        "env": build_environment(pool, device),
        # A fixed port of the engine, so that Prometheus finds its metrics.
        "ports": [
            {"name": "agent", "containerPort": AGENT_PORT},
            {"name": "engine", "containerPort": ENGINE_PORT},
        ],
        **_build_probes(),
    }


def build_container_base(spec: InstancePoolSpec, device: Device, images: Images) -> Manifest:
    """Fields that the containers of an instance's pods share."""
    return {
        "name": "worker",
        "image": spec.engine.image or _get_default_image(spec, device, images),
        "resources": build_resources(spec, device),
        "securityContext": container.build_container_security(),
        "volumeMounts": build_storage(spec.model, spec.template, spec.engine)[1],
    }


def build_agent_command(
    pool: InstancePool,
    name: str,
    cell: int | str | None = None,
    device: Device = "gpu",
    *,
    role: str = f"$({_ROLE_ENV})",
    port: int = AGENT_PORT,
    data_parallel: tuple[int, int] = (1, 0),
) -> list[str]:
    """Command line of the agent; arguments after `--` go to the engine. The engine's port is the
    one after `port`. `data_parallel`: number of ranks of the instance, and which one this is."""
    spec = pool.spec
    scheduling = spec.engine.scheduling
    flags = {
        "--name": name,
        "--deployment": spec.deployment,
        "--revision": spec.revision,
        "--cell": cell,
        "--role": role,
        **build_engine_flags(spec),
        **_build_rank_flags(*data_parallel),
        "--engine": spec.engine.type.lower(),
        "--start-timeout": get_start_timeout_s(spec, device),
        "--host": "$(POD_IP)",
        "--port": port,
        "--engine-port": port + 1,
        "--drain-timeout": spec.template.drain_timeout_s,
        "--scheduling": scheduling and json.dumps(build_scheduling_args(scheduling)),
    }
    extra = build_engine_args(spec, "0", "$(POD_IP)")
    separated = ["--", *extra] if extra else []
    return ["python", "-m", "cleave_worker.agent.main", *container.build_flags(flags), *separated]


def _build_rank_flags(size: int, rank: int) -> dict[str, object]:
    return {"--data-parallel-size": size, "--data-parallel-rank": rank} if size > 1 else {}


def get_start_timeout_s(spec: InstancePoolSpec, device: Device) -> int | None:
    """Seconds that the engine may take to start; None: the agent's default."""
    if spec.engine.start_timeout_s or spec.engine.type is EngineType.EMULATED or device == "cpu":
        return spec.engine.start_timeout_s
    weights = find_weight_bytes(spec.model)
    return _START_S + weights // _LOAD_BYTES_PER_S if weights else _START_UNKNOWN_S


def build_engine_flags(spec: InstancePoolSpec) -> dict[str, object]:
    """Flags about model and parallelism, for every process that starts an engine."""
    model, size, engine = spec.model, spec.parallelism, spec.engine
    return {
        "--model": get_loaded_path(model),
        "--served-model-name": model.name,
        "--tensor-parallel-size": size.tensor,
        "--pipeline-parallel-size": size.pipeline,
        "--expert-parallel": size.expert,
        "--max-model-len": model.max_model_len,
        "--connector": engine.kv_connector is not Connector.NIXL and engine.kv_connector.lower(),
        "--transfer": engine.transfer is not TransferMode.PULL and engine.transfer.lower(),
        "--media-domains": ",".join(engine.media_domains) or None,
    }


def build_engine_args(spec: InstancePoolSpec, rank: str, leader: str) -> list[str]:
    """Arguments of the engine itself; `rank` and `leader`: of an instance that spans nodes."""
    flags: dict[str, object] = {}
    if spec.nodes > 1:
        flags = {"--nnodes": spec.nodes, "--node-rank": rank, "--master-addr": leader}
    flags["--dtype"] = spec.model.dtype
    flags["--kv-offloading-size"] = spec.engine.kv_offloading_gib
    if spec.engine.type is EngineType.EMULATED:
        emulation = spec.engine.emulation
        flags |= {"--latency": emulation.latency, "--time-scale": emulation.time_scale}
    elif not get_loaded_path(spec.model).startswith("/"):
        flags["--revision"] = spec.model.revision
    return [*container.build_flags(flags), *spec.engine.args]


def build_scheduling_args(scheduling: Scheduling) -> dict[str, RoleSchedulingArgs]:
    """Return the scheduling arguments of each role, for the phases that it serves."""
    prompts: RoleSchedulingArgs = {
        "order": _format_choice(ORDERS[scheduling.order]),
        "prefill_sched_batch": scheduling.sorted_prompts,
        "long_prefill_token_threshold": scheduling.long_prompt_tokens or 0,
    }
    decodes: RoleSchedulingArgs = {
        "admission": _format_choice(ADMISSIONS[scheduling.admission]),
        "preemption_limit": scheduling.preemption_limit or 0,
    }
    if scheduling.order is PromptOrder.IN_TIME_FIRST:
        decodes["order"] = prompts["order"]
    phases = {Role.PREFILL: prompts, Role.DECODE: decodes, Role.MIXED: prompts | decodes}
    args_by_role: dict[str, RoleSchedulingArgs] = {}
    for role, args in phases.items():
        limits = scheduling.get_limits(role)
        args_by_role[str(role)] = args | {
            "max_num_seqs": limits.max_num_seqs or 0,
            "max_num_batched_tokens": limits.max_num_batched_tokens or 0,
        }
    return args_by_role


def _format_choice(choice: IntEnum) -> str:
    return choice.name.lower().replace("_", "-")


def build_environment(pool: InstancePool, device: Device) -> list[Manifest]:
    """Environment variables of a worker's container; the user's come last."""
    spec = pool.spec
    variables = container.build_address_env(get_agents_source(spec.deployment, pool.namespace))
    # From the label, which changes when the pod changes pools: a container that is restarted
    # afterwards takes the new role.
    label = {"fieldRef": {"fieldPath": f"metadata.labels['{ROLE}']"}}
    variables.append({"name": _ROLE_ENV, "valueFrom": label})
    if folder := get_hub_cache(spec.model):
        variables.append({"name": "HF_HOME", "value": folder})
    if device == "gpu" and spec.engine.type is EngineType.VLLM:
        caches = list_compile_caches(spec.model, spec.gpu)
        variables += [{"name": name, "value": path} for name, path in caches.items()]
    if spec.adapters:
        adapters = [AdapterSource(each.name, each.source) for each in spec.adapters]
        variables.append({"name": ADAPTERS_ENV, "value": format_adapters(adapters)})
    if spec.nodes > 1:
        variables.append({"name": "VLLM_HOST_IP", "value": "$(POD_IP)"})
    own = {variable.name: _build_variable(variable) for variable in spec.engine.env}
    return [each for each in variables if each["name"] not in own] + list(own.values())


def _build_variable(variable: EnvVar) -> Manifest:
    if variable.value_from is None:
        return {"name": variable.name, "value": variable.value}
    if file := convert_token_variable(variable):
        return file
    source = variable.value_from.model_dump(mode="json", exclude_defaults=True)
    return {"name": variable.name, "valueFrom": source}


def _get_default_image(spec: InstancePoolSpec, device: Device, images: Images) -> str:
    if spec.engine.type is EngineType.EMULATED:
        return images.get("worker-emulated")
    return images.get("worker-cuda" if device == "gpu" else "worker-cpu")


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
