"""Objects beside the pods: Services, accounts, permissions and budgets. Pure.

Called by the controller, for a deployment or a manually created pool.
"""

from cleave.api.deployment import LLMDeployment
from cleave.api.pool import InstancePool
from cleave.api.role import MAX_POD_ENGINES
from cleave.manifests.credentials import Accounts
from cleave.manifests.labels import (
    AGENT_PORT,
    DEPLOYMENT,
    GATEWAY,
    POOL,
    WORKER,
    Manifest,
    build_component_labels,
    build_object,
    get_agent_port_name,
    get_gateway_name,
    get_workers_name,
)
from cleave.rpc.plan_thresholds import PlanThresholds

DeploymentOrPool = LLMDeployment | InstancePool


def build_workers_service(
    owner: DeploymentOrPool,
    thresholds: PlanThresholds = PlanThresholds(),  # noqa: B008 - a frozen value
) -> Manifest:
    """The headless Service by which agents are discovered, including those that are not ready. Its
    labels give gateways the `thresholds` of the plan in force."""
    deployment = get_deployment_name(owner)
    labels = build_component_labels(deployment, WORKER)
    # A pod has the ports of its own agents only: Kubernetes omits the others for it.
    names = map(get_agent_port_name, range(MAX_POD_ENGINES))
    ports = [
        {"name": name, "port": AGENT_PORT + 2 * number, "targetPort": name}
        for number, name in enumerate(names)
    ]
    spec = {
        "type": "ClusterIP",
        "clusterIP": "None",
        # Workers discover peers, and are probed, before they are ready.
        "publishNotReadyAddresses": True,
        "selector": labels,
        "ports": [{**port, "protocol": "TCP", "appProtocol": "grpc"} for port in ports],
    }
    name, labelled = get_workers_name(deployment), {**labels, **thresholds.to_labels()}
    return build_object("v1", "Service", name, owner.namespace, labelled, spec=spec)


def build_accounts(owner: DeploymentOrPool, accounts: Accounts) -> list[Manifest]:
    """The service accounts of gateways and of workers, each with what it may do: find agents, and
    request tokens of its own. Two, as agents let gateways change roles, and workers not."""
    group, namespace = "rbac.authorization.k8s.io", owner.namespace
    labels = {DEPLOYMENT: get_deployment_name(owner)}
    objects: list[Manifest] = []
    for name in accounts.names:
        role = {"apiGroup": group, "kind": "Role", "name": name}
        subject = {"kind": "ServiceAccount", "name": name, "namespace": namespace}
        objects += [
            build_object(
                "v1", "ServiceAccount", name, namespace, labels, automountServiceAccountToken=False
            ),
            build_object(f"{group}/v1", "Role", name, namespace, labels, rules=_build_rules(name)),
            build_object(
                f"{group}/v1", "RoleBinding", name, namespace, labels,
                roleRef=role, subjects=[subject],
            ),
        ]  # fmt: skip
    return objects


def _build_rules(account: str) -> list[Manifest]:
    return [
        {
            "apiGroups": ["discovery.k8s.io"],
            "resources": ["endpointslices"],
            "verbs": ["get", "list", "watch"],
        },
        {
            "apiGroups": [""],
            "resources": ["serviceaccounts/token"],
            "resourceNames": [account],
            "verbs": ["create"],
        },
    ]


def build_pool_budget(pool: InstancePool, *, keeps_last: bool = False) -> Manifest:
    """The disruption budget of a pool: a node drain may evict one instance at a time.

    Kubernetes counts pods, and an instance that spans nodes has several. The last instance may be
    evicted, as its node could not be drained otherwise, unless the operator replaces it first
    (`keeps_last`, see `cleave.controller.pool.relocation`). minAvailable, not maxUnavailable:
    for that Kubernetes would read the pool's scale subresource, which it cannot find in the first
    seconds after the CRDs were created, and it does not retry.
    """
    spec = pool.spec
    least = spec.replicas if keeps_last else max(0, spec.replicas - 1)
    allowed: Manifest = {"minAvailable": least * spec.nodes}
    labels = {DEPLOYMENT: spec.deployment, POOL: pool.name}
    return _build_budget(pool.name, pool.namespace, labels, allowed)


def build_gateway_budget(deployment: LLMDeployment) -> Manifest:
    """The disruption budget of the gateway: one pod at a time."""
    labels = build_component_labels(deployment.name, GATEWAY)
    name = get_gateway_name(deployment.name)
    return _build_budget(name, deployment.namespace, labels, {"maxUnavailable": 1})


def _build_budget(name: str, namespace: str, labels: dict[str, str], allowed: Manifest) -> Manifest:
    spec = {
        **allowed,
        "selector": {"matchLabels": labels},
        # A pod that is not ready serves no requests; it must not block the node's drain.
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
    }
    return build_object("policy/v1", "PodDisruptionBudget", name, namespace, labels, spec=spec)


def get_deployment_name(owner: DeploymentOrPool) -> str:
    """Name of the deployment that a pool belongs to, or of the deployment itself."""
    return owner.spec.deployment if isinstance(owner, InstancePool) else owner.name
