"""Worker pods: one agent with its engine per instance. Pure; called by `cleave.local`."""

from cleave.api.engine import EngineType
from cleave.api.pool import InstancePool, InstancePoolSpec
from cleave.perf.gpu import UnknownGpuError, find
from cleave.pods.container import HOME, addresses, container_security, image, pod_security, scratch
from cleave.pods.labels import AGENT_PORT, Manifest, agents_source, worker_labels
from cleave.pods.resources import GPU_PRODUCT, Device, resources

DRAIN_TIMEOUT_S = 30
"""How long running requests may take to end when a worker is stopped."""

GRACE_S = DRAIN_TIMEOUT_S + 15
"""Drain, then up to 10 s for the engine to stop, and some slack; then Kubernetes kills the pod."""


def worker_pod(pool: InstancePool, ordinal: int, *, device: Device = "gpu") -> Manifest:
    """Pod of the instance `ordinal` (from 0) of a pool, for nodes that compute on `device`."""
    spec = pool.spec
    name = f"{pool.name}-{ordinal}"
    volumes, mounts = _storage(spec)
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": pool.namespace,
            "labels": worker_labels(spec.deployment, pool.name, spec.role),
        },
        "spec": {
            "restartPolicy": "Always",
            "terminationGracePeriodSeconds": GRACE_S,
            "automountServiceAccountToken": False,
            # Kubernetes would set VLLM_PORT for a Service named vllm, which vLLM would obey.
            "enableServiceLinks": False,
            "securityContext": pod_security(),
            **_scheduling(spec, device),
            "containers": [
                {
                    "name": "worker",
                    "image": spec.engine.image or _default_image(spec, device),
                    "command": command(pool, name),
                    "env": _env(pool),
                    "ports": [{"name": "agent", "containerPort": AGENT_PORT}],
                    "resources": resources(spec, device),
                    **_probes(),
                    "securityContext": container_security(),
                    "volumeMounts": mounts,
                }
            ],
            "volumes": volumes,
        },
    }


def command(pool: InstancePool, name: str) -> list[str]:
    """Command line of the agent; what stands behind `--` goes to the engine."""
    spec, model = pool.spec, pool.spec.model
    line = ["python", "-m", "cleave_worker.agent.main"]
    line += ["--name", name, "--deployment", spec.deployment, "--revision", spec.revision]
    line += ["--role", str(spec.role), "--model", model.locator]
    line += ["--served-model-name", model.name, "--engine", spec.engine.type.lower()]
    line += ["--host", "$(POD_IP)", "--port", str(AGENT_PORT)]
    line += ["--tensor-parallel-size", str(spec.parallelism.tensor)]
    line += ["--pipeline-parallel-size", str(spec.parallelism.pipeline)]
    if model.max_model_len is not None:
        line += ["--max-model-len", str(model.max_model_len)]
    line += ["--drain-timeout", str(DRAIN_TIMEOUT_S)]
    extra = [*_engine_args(spec), *spec.engine.args]
    return [*line, "--", *extra] if extra else line


def _engine_args(spec: InstancePoolSpec) -> list[str]:
    args = ["--dtype", str(spec.model.dtype)] if spec.model.dtype else []
    if spec.engine.type is EngineType.EMULATED:
        emulation = spec.engine.emulation
        return [
            *args,
            *("--latency", emulation.latency),
            *("--time-scale", f"{emulation.time_scale:g}"),
        ]
    return [*args, "--revision", spec.model.revision] if spec.model.revision else args


def _env(pool: InstancePool) -> list[Manifest]:
    agents = agents_source(pool.spec.deployment, pool.namespace)
    own = [{"name": var.name, "value": var.value} for var in pool.spec.engine.env]
    return [*addresses(agents), *own]


def _default_image(spec: InstancePoolSpec, device: Device) -> str:
    if spec.engine.type is EngineType.EMULATED:
        return image("worker-emulated")
    return image("worker-cuda" if device == "gpu" else "worker-cpu")


def _scheduling(spec: InstancePoolSpec, device: Device) -> Manifest:
    fields: Manifest = {}
    if selector := {**_gpu_selector(spec, device), **spec.template.node_selector}:
        fields["nodeSelector"] = selector
    if spec.template.tolerations:
        fields["tolerations"] = [
            toleration.model_dump(mode="json", exclude_none=True)
            for toleration in spec.template.tolerations
        ]
    return fields


def _gpu_selector(spec: InstancePoolSpec, device: Device) -> dict[str, str]:
    """The label of nodes with the pool's kind of GPU, as NVIDIA's feature discovery writes it."""
    if spec.gpu is None or device != "gpu":
        return {}
    try:
        return {GPU_PRODUCT: find(spec.gpu).product}
    except UnknownGpuError:
        return {GPU_PRODUCT: spec.gpu}


def _probes() -> Manifest:
    # The agent answers within seconds, whatever the engine does, unless many start at once on few
    # cores: hence the patient liveness probe. Readiness is the engine's, told by the agent.
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


def _storage(spec: InstancePoolSpec) -> tuple[list[Manifest], list[Manifest]]:
    """Volumes and mounts: scratch space and, for a model in a folder, the folder of the node."""
    pairs = [
        scratch("tmp", "/tmp"),  # noqa: S108 - a mount inside the container
        scratch("home", HOME),
        # Processes of one engine talk through shared memory; the default of 64 MiB is too small.
        scratch("shm", "/dev/shm", medium="Memory"),  # noqa: S108
    ]
    if folder := spec.model.folder:
        pairs.append(
            (
                {"name": "model", "hostPath": {"path": folder, "type": "Directory"}},
                {"name": "model", "mountPath": folder, "readOnly": True},
            )
        )
    volumes, mounts = zip(*pairs, strict=True)
    return list(volumes), list(mounts)
