"""What the API server itself says of resources, and of the manifests that are made from them.

The cases are those of tests/api: what is refused there has to be refused here, with words that a
reader can act on, and what is taken there has to be taken here with the same defaults.
"""

import json
from typing import Any

import pytest

from cleave.api.deployment import LLMDeployment
from cleave.api.pool import InstancePool
from cleave.manifests.credentials import name_accounts
from cleave.manifests.gateway import build_gateway_deployment, build_gateway_service
from cleave.manifests.multi_node import build_node_pods
from cleave.manifests.owned_objects import (
    build_accounts,
    build_gateway_budget,
    build_pool_budget,
    build_workers_service,
)
from cleave.manifests.pool import build_pools
from cleave.manifests.topology import CLIQUE, NodeTopology
from cleave.manifests.worker import build_worker_pod
from cleave.planner.placement import choose_placement
from cleave.planner.resolved_deployment import resolve_in_cluster

from e2e.cluster.cluster import CRDS, Cluster, CommandError, wait_until
from tests.support.resource_cases import REFUSED, UNUSUAL, Case, manifest, said

pytestmark = pytest.mark.timeout(900)

H100 = "NVIDIA-H100-80GB-HBM3"
MODELS = {"LLMDeployment": LLMDeployment, "InstancePool": InstancePool}


@pytest.fixture(scope="module")
def server(cluster: Cluster) -> Cluster:
    """A cluster that knows the resources."""
    cluster.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(CRDS))
    kinds = "llmdeployments.cleave.dev,instancepools.cleave.dev"
    wait_until(lambda: cluster.kubectl("get", kinds, "-o", "name", "-A") or True, 30, "both known")
    return cluster


def tried(
    server: Cluster, *manifests: dict[str, Any], namespace: str = "default"
) -> list[dict[str, Any]]:
    """What the API server would store. Raises CommandError; warnings are errors."""
    text = json.dumps({"apiVersion": "v1", "kind": "List", "items": manifests})
    args = ("--dry-run=server", "--warnings-as-errors", "-n", namespace, "-o", "json", "-f", "-")
    found = json.loads(server.kubectl("apply", *args, input=text))
    return found["items"] if found["kind"] == "List" else [found]


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case.name)
def test_what_is_wrong_is_refused_in_words(server: Cluster, case: Case) -> None:
    with pytest.raises(CommandError) as refused:
        server.apply(case.manifest)
    assert case.server in refused.value.text


@pytest.mark.parametrize("case", UNUSUAL, ids=lambda case: case.name)
def test_unusual_valid_values_are_accepted_with_pythons_defaults(
    server: Cluster, case: Case
) -> None:
    (stored,) = tried(server, case.manifest)
    if isinstance(stored["spec"]["model"], str):
        stored["spec"]["model"] = {"source": stored["spec"]["model"]}
    own = MODELS[case.kind].model_validate_json(json.dumps(case.manifest))
    python = own.model_dump(mode="json", exclude_none=True)
    if "witness" not in case.manifest["spec"]:
        # The API server does not write defaults of fields that the version before does not know.
        python["spec"].pop("witness", None)
    assert said(stored["spec"]) == said(python["spec"])


CACHES = {
    "volume": {"persistentVolumeClaim": {"claimName": "models"}},
    "folder": {"hostPath": {"path": "/var/models"}},
    "image": {"image": {"reference": "registry.example/llama:1"}},
}


def everything(cache: dict[str, Any]) -> dict[str, Any]:
    """A deployment whose pods have every part there is."""
    size = {"tensor": 8, "pipeline": 2}
    return manifest(
        model={"source": "org/model", "cache": cache},
        placement={
            "manual": [
                {"role": "prefill", "gpu": H100, "perCell": 1, "parallelism": size},
                {"role": "decode", "gpu": H100, "perCell": 1, "parallelism": size},
                {"role": "mixed", "args": ["--enforce-eager"], "env": [{"name": "TZ"}]},
            ]
        },
        engine={
            "env": [
                {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}}
            ]
        },
        gateway={"keysSecret": "chat-keys", "tlsSecret": "chat-tls"},
        template={
            "nodeSelector": {"a": "b"},
            "tolerations": [{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}],
            "resources": {"limits": {"rdma/ib": 1}},
        },
    )


@pytest.mark.parametrize("domain", ["kubernetes.io/hostname", CLIQUE])
@pytest.mark.parametrize("cache", [None, *CACHES])
def test_the_api_server_accepts_all_created_objects_without_a_warning(
    server: Cluster, namespace: str, domain: str, cache: str | None
) -> None:
    document = everything(CACHES[cache]) if cache else manifest()
    document["metadata"]["namespace"] = namespace
    chat = LLMDeployment.model_validate_json(json.dumps(document))
    accounts = build_accounts(chat, name_accounts(namespace, chat.name))
    created = [
        document,
        build_workers_service(chat),
        build_gateway_service(chat),
        build_gateway_deployment(chat),
        build_gateway_budget(chat),
    ]
    resolved = resolve_in_cluster(chat)
    for pool in build_pools(resolved, choose_placement(resolved), NodeTopology({H100: 8}, domain)):
        leader = build_worker_pod(
            pool, f"{pool.name}-x7k2p", cell=0 if pool.spec.colocation else None
        )
        created += [build_pool_budget(pool), leader, *build_node_pods(pool, leader)]
        stored = pool.model_dump(mode="json", exclude_none=True, exclude={"metadata"})
        meta = {"name": pool.name, "namespace": namespace, "labels": pool.metadata.labels}
        created.append({**stored, "metadata": meta})
    # Pods are not even tried without it.
    server.apply(*accounts, namespace=namespace)
    assert len(tried(server, *created, namespace=namespace)) == len(created)


def test_kubectl_explains_every_field_of_the_spec(server: Cluster) -> None:
    output = server.kubectl("explain", "llmdeployments.spec", "--recursive")
    for field in ("ttftMs", "perCell", "persistentVolumeClaim", "pendingTimeoutS", "keysSecret"):
        assert field in output
    assert "DistServe" in server.kubectl("explain", "llmd.spec.placement.manual.perCell")


def test_what_no_operator_has_looked_at_has_observed_no_generation(
    server: Cluster, namespace: str
) -> None:
    for kind in MODELS:
        server.apply(manifest(kind), namespace=namespace)
    for found in (*server.list("llmd", namespace), *server.list("ipool", namespace)):
        assert found["status"]["observedGeneration"] < found["metadata"]["generation"]


def test_the_gateways_of_a_deployment_are_scaled_like_any_workload(
    server: Cluster, namespace: str
) -> None:
    server.apply(manifest("LLMDeployment"), namespace=namespace)
    server.kubectl("scale", "llmd/chat", "--replicas=7", "-n", namespace)
    assert server.get("llmd", "chat", namespace)["spec"]["gateway"]["replicas"] == 7
    with pytest.raises(CommandError, match="greater than or equal to 1"):
        server.kubectl("scale", "llmd/chat", "--replicas=0", "-n", namespace)


def test_pools_are_scaled_and_listed_like_any_workload(server: Cluster, namespace: str) -> None:
    server.apply(manifest("InstancePool", owner="Manual"), namespace=namespace)
    server.kubectl("scale", "ipool/chat-mixed", "--replicas=7", "-n", namespace)
    assert server.get("ipool", "chat-mixed", namespace)["spec"]["replicas"] == 7
    head, row = server.kubectl("get", "cleave", "-n", namespace).splitlines()
    assert head.split() == ["NAME", "ROLE", "TP", "PP", "GPU", "DESIRED", "READY", "SERVING", "AGE"]
    assert row.split()[:4] == ["instancepool.cleave.dev/chat-mixed", "mixed", "1", "1"]
