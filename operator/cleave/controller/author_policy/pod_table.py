"""What the pods of deployments consist of, and what the chart may add to it. Values only.

The one source of the profile Restricted: `violations` applies these rules to the pods that the
operator is about to create, and `admission_rules` writes them as CEL, with which the API server
checks the same pods once other webhooks have seen them. What is not here is not allowed: a new
field of Kubernetes, too. Only authors' choices need a rule; `ANY` is what Cleave or the API server
writes, or what harms nobody else.
"""

from collections.abc import Mapping

from cleave.controller.author_policy.container_table import CONTAINER, USERS
from cleave.controller.author_policy.pod_rules import (
    ANY,
    AnyOf,
    Fields,
    Gated,
    Items,
    Keys,
    Listed,
    PodRule,
    accept,
)
from cleave.controller.author_policy.volume_table import SECRET, VOLUME
from cleave.manifests.labels import GATEWAY, NODE_WORKER, WORKER
from cleave.manifests.scheduling import ARCHITECTURE, DRIVER_MAJOR, OLD_DRIVER_MAJOR
from cleave.perf.hardware.gpu import GPU_PRODUCT

FIELDS = (
    "hostNetwork", "nodeSelector", "resourceClaims", "runtimeClassName", "schedulerName",
    "tolerations",
)  # fmt: skip
"""Fields of pods that authors set only where policy.allow.fields has them."""


def _restrict(field: str, usual: PodRule) -> AnyOf:
    """The usual values, or any where policy.allow.fields has the field."""
    return AnyOf((usual, Gated("fields", field)))


# The API server adds tolerations for these taints.
_TOLERATED = Listed(own=(
    "amd.com/gpu", "node.kubernetes.io/memory-pressure", "node.kubernetes.io/not-ready",
    "node.kubernetes.io/unreachable", "nvidia.com/gpu",
))  # fmt: skip
_TOLERATIONS = Items(
    Fields(
        {"key": _TOLERATED, "operator": ANY, "value": ANY, "effect": ANY, "tolerationSeconds": ANY},
        required=("key",),
    )
)

# Labels of nodes by which Cleave's own pods select them.
_NODE_TERM = Fields({
    "matchExpressions": Items(
        Fields(
            {
                "key": Listed(own=(ARCHITECTURE, DRIVER_MAJOR, OLD_DRIVER_MAJOR, GPU_PRODUCT)),
                "operator": ANY,
                "values": ANY,
            },
            required=("key",),
        )
    )
})  # fmt: skip
_NODE_AFFINITY = Fields({
    "requiredDuringSchedulingIgnoredDuringExecution": Fields({
        "nodeSelectorTerms": Items(_NODE_TERM),
    }),
    "preferredDuringSchedulingIgnoredDuringExecution": Items(
        Fields({"weight": ANY, "preference": _NODE_TERM})
    ),
})  # fmt: skip

POD_SPEC = Fields(
    {
        "affinity": Fields(
            {
                "nodeAffinity": _restrict("nodeSelector", _NODE_AFFINITY),
                "podAffinity": ANY,
                "podAntiAffinity": ANY,
            }
        ),
        "automountServiceAccountToken": ANY,
        "containers": Items(CONTAINER),
        "dnsPolicy": accept("ClusterFirst", "ClusterFirstWithHostNet"),
        "enableServiceLinks": ANY,
        "hostNetwork": _restrict("hostNetwork", accept(False)),
        "hostname": ANY,
        "imagePullSecrets": Items(Fields({"name": SECRET})),
        "nodeSelector": _restrict("nodeSelector", Keys(Listed(own=(GPU_PRODUCT,)))),
        "overhead": ANY,
        "preemptionPolicy": ANY,
        "priority": ANY,
        "priorityClassName": Listed("priorityClasses"),
        "readinessGates": ANY,
        "resourceClaims": Gated("fields", "resourceClaims"),
        "restartPolicy": ANY,
        "runtimeClassName": Gated("fields", "runtimeClassName"),
        "schedulerName": _restrict("schedulerName", accept("default-scheduler")),
        "schedulingGates": ANY,
        "schedulingGroup": ANY,
        "securityContext": Fields(
            {**USERS, "fsGroup": ANY, "fsGroupChangePolicy": ANY, "supplementalGroupsPolicy": ANY},
            required=("runAsNonRoot", "seccompProfile"),
        ),
        # Policy NAME-pods of the chart says which account it may be.
        "serviceAccount": ANY,
        "serviceAccountName": ANY,
        "shareProcessNamespace": ANY,
        "subdomain": ANY,
        "terminationGracePeriodSeconds": ANY,
        "tolerations": _restrict("tolerations", _TOLERATIONS),
        "topologySpreadConstraints": ANY,
        "volumes": Items(VOLUME),
    },
    required=("securityContext", "serviceAccountName"),
)

_OWN_LABELS: Mapping[str, PodRule] = {
    "app.kubernetes.io/component": accept(WORKER, NODE_WORKER, GATEWAY),
    "app.kubernetes.io/instance": ANY,
    "app.kubernetes.io/managed-by": accept("cleave-operator"),
    "app.kubernetes.io/name": accept("cleave"),
    "app.kubernetes.io/part-of": accept("cleave"),
}
"""With Cleave's values only: Services of others select by these keys."""
LABELS = Keys(Listed("labels", ("cleave.dev/*",)), _OWN_LABELS)
# The other two come from the API server's plug-ins.
ANNOTATIONS = Keys(
    Listed("labels", ("cleave.dev/*", "kubernetes.io/limit-ranger", "openshift.io/scc"))
)
