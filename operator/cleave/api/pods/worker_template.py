"""Overrides for worker pods: what a template of them may say. Part of both resources."""

import re
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, GetJsonSchemaHandler, WithJsonSchema
from pydantic_core import CoreSchema, PydanticCustomError

from cleave.api.base import (
    ApiModel,
    ValidationRule,
    build_unique_rule,
    declare_list_map_key,
    format_cel_list,
)
from cleave.api.pods.names import (
    DNS_LABEL,
    DNS_NAME,
    KEY_SHAPE,
    MAX_KEY,
    MAX_NAME,
    LabelValue,
    build_cel_check,
    build_key_rule,
    is_qualified_name,
)
from cleave.api.pods.node_affinity import WorkerAffinity
from cleave.api.pods.quantity import QUANTITY_PATTERN


class Toleration(ApiModel):
    """A toleration of the worker pods, as in a pod spec."""

    key: Annotated[str, Field(max_length=MAX_KEY)] | None = None
    """Key of the taint; absent: every key."""
    operator: Literal["Exists", "Equal"] = "Equal"
    """Exists: the value is ignored. Equal: the value must match."""
    value: LabelValue | None = None
    """Value of the taint."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """Effect of the taint; absent: every effect."""
    toleration_seconds: int | None = None
    """Seconds for which a NoExecute taint is tolerated; absent: for ever."""

    rules = (
        ValidationRule(
            cel=f"!has(self.key) || self.key == '' || {build_cel_check('self.key')}",
            is_valid=lambda t: not t.key or is_qualified_name(t.key),
            message=f"must be a key that Kubernetes takes: {KEY_SHAPE}",
            field="key",
            list_offenders=lambda t: [t.key],
        ),
        ValidationRule(
            cel="has(self.key) && self.key != '' || self.operator == 'Exists'",
            is_valid=lambda t: t.key or t.operator == "Exists",
            message="must be Exists without a key: it tolerates every taint",
            field="operator",
        ),
        ValidationRule(
            cel="!has(self.value) || self.value == '' || self.operator == 'Equal'",
            is_valid=lambda t: not t.value or t.operator == "Equal",
            message="must be absent with operator Exists; remove one of them",
            field="value",
        ),
        ValidationRule(
            cel="!has(self.tolerationSeconds) || has(self.effect) && self.effect == 'NoExecute'",
            is_valid=lambda t: t.toleration_seconds is None or t.effect == "NoExecute",
            message="needs effect NoExecute",
            field="tolerationSeconds",
        ),
    )


_GPU_RESOURCE = f"^({DNS_NAME.strip('^$')}/[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$"
_OWN_RESOURCES = ("cpu", "memory", "ephemeral-storage")
_QUANTITY_SCHEMA = {
    "anyOf": [{"type": "integer"}, {"type": "string"}],
    "x-kubernetes-int-or-string": True,
    "pattern": QUANTITY_PATTERN,
}


def _check_quantity(value: object) -> str:
    text = str(value)
    if isinstance(value, bool | float) or not re.fullmatch(QUANTITY_PATTERN, text):
        fault = 'must be a quantity: a whole number, or text such as "500m" or "6Gi"'
        raise PydanticCustomError("quantity", fault)
    return text


Quantity = Annotated[str, BeforeValidator(_check_quantity), WithJsonSchema(_QUANTITY_SCHEMA)]
"""A quantity; whole numbers are converted to text."""


def _is_resource_name(name: str) -> bool:
    has_prefix = "/" in name or name.startswith("hugepages-")
    return is_qualified_name(name) and (has_prefix or name in _OWN_RESOURCES)


def _build_resource_rule(field: str) -> ValidationRule:
    def list_offenders(resources: Any) -> list[str]:  # noqa: ANN401 - a class below
        return [name for name in getattr(resources, field) if not _is_resource_name(name)]

    return ValidationRule(
        cel=f"!has(self.{field}) || self.{field}.all(k, {build_cel_check('k')} && "
        "(k.contains('/') || k.startsWith('hugepages-') || "
        f"k in {format_cel_list(_OWN_RESOURCES)}))",
        is_valid=lambda resources: not list_offenders(resources),
        message=f"must name {', '.join(_OWN_RESOURCES)}, hugepages-SIZE or a device with its "
        "domain, such as rdma/ib",
        field=field,
        list_offenders=list_offenders,
    )


class Resources(ApiModel):
    """Resources of one worker container; each one named here replaces its default."""

    requests: dict[str, Quantity] = Field(default_factory=dict, max_length=64)
    """Requested amounts, by resource name; absent: equal to the limit."""
    limits: dict[str, Quantity] = Field(default_factory=dict, max_length=64)
    """Maximum amounts, by resource name."""

    rules = (_build_resource_rule("requests"), _build_resource_rule("limits"))


class DeletionPolicy(StrEnum):
    """What happens to running requests when a resource is deleted."""

    DRAIN = "Drain"
    IMMEDIATE = "Immediate"


class NamedObject(ApiModel):
    """An object of a pod spec, which the API server checks when a pod is created."""

    model_config = ConfigDict(extra="allow")

    name: Annotated[str, Field(max_length=MAX_NAME, pattern=DNS_LABEL)]
    """Name within the pod; the other fields are those of a pod spec."""

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """Keep the other fields, which a structural schema would prune."""
        schema = super().__get_pydantic_json_schema__(core_schema, handler)
        target = handler.resolve_ref_schema(schema)
        del target["additionalProperties"]
        target["x-kubernetes-preserve-unknown-fields"] = True
        return schema


ObjectName = Annotated[str, Field(max_length=253, pattern=DNS_NAME)]

OWN_LABELS = "cleave.dev/"
"""Prefix of Cleave's own labels and annotations of pods."""
OWN_VOLUMES = ("tmp", "home", "shm", "model", "cleave-hub-token")
"""Volumes that every worker has. A name that joins them makes stored resources that have it
invalid, so it should be one that no user would choose."""


def _build_own_keys_rule(field: str) -> ValidationRule:
    return ValidationRule(
        cel=f"!has(self.{field}) || self.{field}.all(k, !k.startsWith('{OWN_LABELS}'))",
        is_valid=lambda t: not any(key.startswith(OWN_LABELS) for key in getattr(t, field)),
        message=f"must not hold a key that begins with {OWN_LABELS}: Cleave sets these",
        field=field,
    )


MAX_ANNOTATIONS = 261_120
"""Most bytes of a template's annotations. Kubernetes takes 256 KiB, and 1 KiB is for Cleave's."""


def _count_bytes(annotations: dict[str, str]) -> int:
    return sum(len(key.encode()) + len(value.encode()) for key, value in annotations.items())


class WorkerTemplate(ApiModel):
    """Overrides for the worker pods."""

    labels: dict[str, LabelValue] = Field(default_factory=dict, max_length=64)
    """Further labels of the pods, such as kueue.x-k8s.io/queue-name."""
    annotations: dict[str, str] = Field(default_factory=dict, max_length=64)
    """Annotations of the pods, such as k8s.v1.cni.cncf.io/networks for a network card."""

    node_selector: dict[str, LabelValue] = Field(default_factory=dict, max_length=64)
    """Labels that a node must have."""
    affinity: WorkerAffinity = WorkerAffinity()
    """Nodes where one value of a label does not say it, as in a pod spec. Plans count the nodes
    that both allow."""
    tolerations: list[Toleration] = Field(default_factory=list, max_length=64)
    """Taints that the pods tolerate."""
    resources: Resources = Resources()
    """CPU, memory and devices of one engine; a pod of several engines requests their sum. A whole
    number of cores as limit gives it exclusive cores on nodes with the static CPU manager policy.
    RDMA devices of the nodes are requested by default: rdma/*, and nvidia.com/hostdev where
    annotations name k8s.v1.cni.cncf.io/networks. One named here replaces them."""
    gpu_resource: Annotated[str, Field(max_length=253, pattern=_GPU_RESOURCE)] = "nvidia.com/gpu"
    """Resource that a worker requests for each GPU: nvidia.com/mig-3g.40gb, amd.com/gpu, ... Empty:
    none, as a claim of resourceClaims allocates the GPUs."""
    resource_claims: list[NamedObject] = declare_list_map_key(
        "name", default_factory=list, max_length=32
    )
    """Claims of dynamic resource allocation, as in a pod spec; the worker's container uses all of
    them. With a ComputeDomain's claim GPUs of several nodes share NVLink (GB200)."""
    volumes: list[NamedObject] = declare_list_map_key("name", default_factory=list, max_length=64)
    """Further volumes, as in a pod spec."""
    volume_mounts: Annotated[list[NamedObject], Field(max_length=64)] = Field(default_factory=list)
    """Where the worker's container mounts them, as in a pod spec."""
    image_pull_secrets: list[ObjectName] = Field(default_factory=list, max_length=16)
    """Names of Secrets with which the images of workers and gateways are pulled."""
    priority_class_name: ObjectName | None = None
    """PriorityClass of the pods; absent: the cluster's default."""
    scheduler_name: ObjectName | None = None
    """Scheduler of the pods; absent: the cluster's default."""
    host_network: bool = False
    """Whether the pods use their node's network. Their ports are then the node's, so one worker of
    any deployment fits on a node. NetworkPolicies do not protect such pods, and engines require no
    key."""
    runtime_class_name: ObjectName | None = None
    """RuntimeClass of the pods, such as nvidia; absent: the node's default."""
    drain_timeout_s: Annotated[int, Field(ge=0, le=86_400)] = 600
    """Seconds that running requests may take to finish when a worker is stopped; then they are
    aborted."""

    rules = (
        _build_own_keys_rule("labels"),
        _build_own_keys_rule("annotations"),
        build_key_rule("labels", "labels"),
        build_key_rule("annotations", "annotations"),
        build_key_rule("node_selector", "nodeSelector"),
        ValidationRule(
            # In characters: to count bytes would cost more than the API server allows.
            cel="!has(self.annotations) || self.annotations.map(k, "
            f"size(k) + size(self.annotations[k])).sum() <= {MAX_ANNOTATIONS}",
            is_valid=lambda t: _count_bytes(t.annotations) <= MAX_ANNOTATIONS,
            message=f"must have at most {MAX_ANNOTATIONS:,} bytes together, keys included: "
            "Kubernetes takes 262,144 bytes, and Cleave adds some",
            field="annotations",
        ),
        ValidationRule(
            cel=f"!has(self.volumes) || self.volumes.all(v, !(v.name in "
            f"{format_cel_list(OWN_VOLUMES)}))",
            is_valid=lambda t: not any(volume.name in OWN_VOLUMES for volume in t.volumes),
            message="must not name a volume that every worker has: " + ", ".join(OWN_VOLUMES),
            field="volumes",
        ),
        ValidationRule(
            cel="!has(self.volumeMounts) || size(self.volumeMounts) == 0 || has(self.volumes) && "
            "self.volumeMounts.all(m, self.volumes.exists(v, v.name == m.name))",
            is_valid=lambda t: {m.name for m in t.volume_mounts} <= {v.name for v in t.volumes},
            message="must name volumes of template.volumes",
            field="volumeMounts",
        ),
        ValidationRule(
            cel="!has(self.gpuResource) || self.gpuResource != '' || "
            "has(self.resourceClaims) && size(self.resourceClaims) > 0",
            is_valid=lambda t: bool(t.gpu_resource or t.resource_claims),
            message="needs a claim in resourceClaims when it is empty: no GPU would be allocated",
            field="gpuResource",
        ),
        build_unique_rule("volumes", "name", "volume"),
    )

    @property
    def has_gpu_parts(self) -> bool:
        """Whether workers request parts of NVIDIA's GPUs: MIG devices or time slices."""
        return "/mig-" in self.gpu_resource or self.gpu_resource.endswith(".shared")

    @property
    def has_whole_gpus(self) -> bool:
        """Whether workers request NVIDIA's GPUs as wholes, of which several engines share a pod."""
        return self.gpu_resource == "nvidia.com/gpu" and not self.resource_claims
