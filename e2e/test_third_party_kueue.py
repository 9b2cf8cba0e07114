"""The real Kueue admits workers by quota: they wait for it, start when it grows, and leave it."""

from collections.abc import Iterator

import pytest
import yaml

from e2e.cluster.cluster import Cluster, wait_until
from e2e.support import third_party
from e2e.test_cluster_operator import (
    CHAT,
    READY_S,
    deployed,
    installation,
    placement,
)

pytestmark = pytest.mark.timeout(400)

WAIT_S = 60
HOME = "kueue-system"
QUEUE = {"kueue.x-k8s.io/queue-name": "serving"}
UNLIMITED = {"cpu": "1000", "memory": "10Ti", "ephemeral-storage": "10Ti"}
"""What pods request and the quota does not count; Kueue refuses what its queue does not cover."""


@pytest.fixture(scope="module")
def queued(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster with Kueue, installed by its chart, and with Cleave."""
    built, folder = third_party.find("kueue"), tmp_path_factory.mktemp("kueue")
    if cluster.control_plane is None or cluster.nodes is None:
        pytest.skip("needs a control plane and process nodes of its own")
    config = third_party.install_chart(
        *(cluster, built / "manifests" / "kueue", HOME, "--set=controllerManager.replicas=0"),
        config="kueue-manager-config",
    )
    account = cluster.control_plane.service_account(HOME, "kueue-controller-manager")
    config["health"] = {"healthProbeBindAddress": f"{third_party.ADDRESS}:8081"}
    with (
        third_party.served_webhook(cluster, HOME, "kueue", config, folder) as file,
        (
            third_party.running(
                [
                    *(built / "kueue", f"--config={file}", "--zap-log-level=2"),
                    # Its API server finds accounts by what a pod has only.
                    "--feature-gates=VisibilityOnDemand=false",
                ],
                folder / "kueue.log",
                {"KUBECONFIG": str(account), "POD_NAMESPACE": HOME},
            )
        ),
    ):
        wait_until(lambda: try_apply(cluster, queue(3)), WAIT_S, "Kueue's webhooks serve")
        with installation(cluster):
            yield cluster
        # Kueue has to be there to remove its finalizers.
        cluster.kubectl("delete", "localqueues", "--all", "--all-namespaces")
        cluster.kubectl("delete", "clusterqueues,resourceflavors", "--all")
    cluster.helm("uninstall", "kueue", "-n", HOME, "--wait")


def queue(instances: int) -> list[dict]:
    """A queue for that many worker pods."""
    quotas = UNLIMITED | {"pods": str(instances)}
    resources = [{"name": name, "nominalQuota": quota} for name, quota in quotas.items()]
    group = {
        "coveredResources": list(quotas),
        "flavors": [{"name": "any", "resources": resources}],
    }
    kinds = {"apiVersion": "kueue.x-k8s.io/v1beta2"}
    return [
        kinds | {"kind": "ResourceFlavor", "metadata": {"name": "any"}},
        kinds
        | {
            "kind": "ClusterQueue",
            "metadata": {"name": "serving"},
            "spec": {"namespaceSelector": {}, "resourceGroups": [group]},
        },
    ]


def try_apply(cluster: Cluster, manifests: list[dict]) -> bool:
    cluster.apply(*manifests)
    return True


def is_gated(pod: dict) -> bool:
    return bool(pod["spec"].get("schedulingGates"))


def test_workers_wait_for_quota_start_when_it_grows_and_leave_it(
    queued: Cluster, namespace: str
) -> None:
    local = {"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": "LocalQueue"}
    local |= {"metadata": {"name": "serving"}, "spec": {"clusterQueue": "serving"}}
    queued.apply(local, namespace=namespace)
    manifest = yaml.safe_load(CHAT)
    manifest["spec"]["template"] = {"labels": QUEUE}
    with deployed(queued, namespace, yaml.safe_dump(manifest)) as chat:
        assert chat.ask() == ""
        assert admitted(queued) == 3
        # One more than the quota has: it waits, and the others go on.
        chat.edit({"placement": {"manual": placement(prefill=1, decode=3)}})
        wait_until(lambda: any(map(is_gated, chat.workers())), WAIT_S, "one waits for quota")
        assert chat.ask() == ""
        waiting = chat.deployment
        print(yaml.safe_dump(waiting["status"]))
        queued.apply(*queue(4))
        wait_until(lambda: not any(map(is_gated, chat.workers())), WAIT_S, "it is admitted")
        chat.until_ready()
        assert admitted(queued) == 4
    wait_until(lambda: not chat.workers(), READY_S, "Kueue lets go of deleted pods")
    wait_until(lambda: admitted(queued) == 0, WAIT_S, "the quota is free again")


def admitted(cluster: Cluster) -> int:
    """Pods that use the quota."""
    text = cluster.kubectl("get", "clusterqueue", "serving", "-o", "yaml")
    (flavor,) = yaml.safe_load(text)["status"]["flavorsUsage"]
    usage = {each["name"]: each["total"] for each in flavor["resources"]}
    return int(usage["pods"])
