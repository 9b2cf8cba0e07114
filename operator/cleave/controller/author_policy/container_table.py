"""The containers of deployments' pods, as rules. Values only; part of `pod_table`."""

from collections.abc import Mapping

from cleave.controller.author_policy.commands import COMMAND
from cleave.controller.author_policy.pod_rules import (
    ANY,
    Fields,
    Folder,
    Gated,
    Items,
    Keys,
    Listed,
    PodRule,
    accept,
)
from cleave.controller.author_policy.volume_table import IMAGE, SECRET
from cleave.policy.adapters import ENV as ADAPTERS_ENV
from cleave.rpc.credentials import CALLERS_ENV, PEERS_ENV

MODEL_FOLDERS = ("/data", "/mnt", "/model", "/models", "/srv", "/var/cache/cleave")
"""Where volumes may be mounted: nothing in Cleave's images is loaded from there."""
_ACCOUNT_FOLDER = "/var/run/secrets/kubernetes.io/serviceaccount"

COMPILED_CODE_ENV = (
    "VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE",
)  # fmt: skip
"""Folders of compiled kernels, which engines load as code. Where policy.allow.env lacks them, pods
keep their kernels to themselves."""

_OWN_ENV = (
    "POD_IP", "CLEAVE_POD_NAME", "CLEAVE_AGENTS", "CLEAVE_ROLE", "CLEAVE_LEADER", ADAPTERS_ENV,
    CALLERS_ENV, PEERS_ENV, "VLLM_HOST_IP", "USER",
)  # fmt: skip
"""Set by Cleave, over what authors set, or harmless."""
_HARMLESS_ENV = (
    "CLEAVE_ALLOW_SHARED_CORES", "CLEAVE_LOG_FORMAT", "CUDA_DEVICE_ORDER", "GLOO_SOCKET_IFNAME",
    "HF_HUB_DISABLE_XET", "HF_HUB_OFFLINE", "HF_TOKEN", "LANG", "NCCL_CUMEM_ENABLE", "NCCL_DEBUG",
    "NCCL_IB_DISABLE", "NCCL_IB_GID_INDEX", "NCCL_IB_HCA", "NCCL_NVLS_ENABLE", "NCCL_P2P_DISABLE",
    "NCCL_SHM_DISABLE", "NCCL_SOCKET_IFNAME", "OMP_NUM_THREADS", "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF", "TOKENIZERS_PARALLELISM", "TRANSFORMERS_OFFLINE", "TZ",
    "UCX_IB_GID_INDEX", "UCX_LOG_LEVEL", "UCX_NET_DEVICES", "UCX_RCACHE_MAX_UNRELEASED", "UCX_TLS",
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN", "VLLM_CPU_KVCACHE_SPACE", "VLLM_CPU_NUM_OF_RESERVED_CPU",
    "VLLM_ENGINE_READY_TIMEOUT_S", "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", "VLLM_LOGGING_LEVEL",
    "VLLM_LOG_STATS_INTERVAL", "VLLM_USE_DEEP_GEMM", "VLLM_USE_FLASHINFER_SAMPLER",
)  # fmt: skip
"""Names whose values are neither code, nor a path, nor an address. No pattern: NCCL_NET_PLUGIN and
VLLM_PLUGINS load code, NCCL_DEBUG_FILE writes files."""


def _build_value(value: PodRule) -> Fields:
    """A variable with a value only."""
    return Fields({"name": ANY, "value": value})


_SOURCE = Fields({
    "fieldRef": ANY,
    "resourceFieldRef": ANY,
    "secretKeyRef": Fields({"name": SECRET, "key": ANY, "optional": ANY}, required=("name",)),
})  # fmt: skip
_VARIABLES = Items(
    Fields({
        "name": Listed("env", _OWN_ENV + _HARMLESS_ENV),
        "value": ANY,
        "valueFrom": _SOURCE,
    }),
    by_name={
        "HF_HOME": _build_value(Folder("folders", MODEL_FOLDERS)),
        "HF_TOKEN_PATH": _build_value(accept("/etc/cleave/hub-token/token")),
    },
)  # fmt: skip


def _build_mount(path: str) -> Fields:
    return Fields({
        "name": ANY, "mountPath": accept(path), "readOnly": ANY, "recursiveReadOnly": ANY,
    })  # fmt: skip


_OWN_MOUNTS = {
    "tmp": "/tmp",  # noqa: S108 - inside containers
    "home": "/home/cleave",
    "shm": "/dev/shm",  # noqa: S108
    "cleave-hub-token": "/etc/cleave/hub-token",
    **{name: f"/etc/cleave/{name}" for name in ("keys", "tls", "picker-tls")},
}
_MOUNTS = Items(
    Fields({
        "name": ANY,
        "mountPath": Folder("folders", (*MODEL_FOLDERS, _ACCOUNT_FOLDER)),
        "readOnly": ANY,
        "recursiveReadOnly": ANY,
        "subPath": ANY,
    }),
    by_name={name: _build_mount(path) for name, path in _OWN_MOUNTS.items()},
)  # fmt: skip

_RESOURCES = Keys(
    Listed("resources", (
        "cpu", "memory", "ephemeral-storage", "amd.com/gpu", "nvidia.com/gpu", "nvidia.com/gpu.*",
        "nvidia.com/mig-*", "nvidia.com/hostdev", "rdma/*",
    ))
)  # fmt: skip

_TIMING = (
    "failureThreshold", "initialDelaySeconds", "periodSeconds", "successThreshold",
    "terminationGracePeriodSeconds", "timeoutSeconds",
)  # fmt: skip
_PROBE = Fields({
    "grpc": ANY,
    "httpGet": Fields({"path": ANY, "port": ANY, "scheme": ANY}),
    **dict.fromkeys(_TIMING, ANY),
})  # fmt: skip

USERS: Mapping[str, PodRule] = {
    "runAsUser": ANY,
    "runAsGroup": ANY,
    "runAsNonRoot": accept(True),
    "seLinuxOptions": Fields({"level": ANY}),
    "seccompProfile": Fields({"type": accept("RuntimeDefault")}),
}
"""Any user but root; OpenShift assigns users and levels."""

CONTAINER = Fields(
    {
        "name": ANY,
        "image": IMAGE,
        "imagePullPolicy": ANY,
        "command": COMMAND,
        "env": _VARIABLES,
        "ports": Items(Fields({
            "name": ANY, "containerPort": ANY, "protocol": ANY,
            "hostPort": Gated("fields", "hostNetwork"),
        })),
        "resources": Fields({"requests": _RESOURCES, "limits": _RESOURCES, "claims": ANY}),
        "resizePolicy": ANY,
        "readinessProbe": _PROBE,
        "livenessProbe": _PROBE,
        "securityContext": Fields(
            {
                **USERS,
                "allowPrivilegeEscalation": accept(False),
                "capabilities": Fields({"drop": accept(["ALL"])}, required=("drop",)),
                "readOnlyRootFilesystem": accept(True),
            },
            required=("allowPrivilegeEscalation", "capabilities", "readOnlyRootFilesystem"),
        ),
        "volumeMounts": _MOUNTS,
        "terminationMessagePath": accept("/dev/termination-log"),
        "terminationMessagePolicy": ANY,
    },
    required=("image", "command", "securityContext"),
)  # fmt: skip
