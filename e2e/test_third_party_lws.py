"""The real LeaderWorkerSet makes the pods of an instance over two nodes from Cleave's manifest.

No node runs them: their engines need 16 GPUs. How such an engine serves is tested without
Kubernetes (test_vllm_multi_node).
"""

from collections.abc import Iterator

import pytest
import yaml

from e2e.cluster.cluster import Cluster, wait_until
from e2e.support import third_party
from e2e.test_cluster_operator import READY_S, Chat, installation, read_log

pytestmark = pytest.mark.timeout(400)

WAIT_S = 60
HOME = "lws-system"
OVER_TWO_NODES = """
apiVersion: cleave.dev/v1alpha1
kind: LLMDeployment
metadata: {name: chat}
spec:
  model: {source: meta-llama/Llama-3.1-70B, servedName: chat}
  slo: {ttftMs: 4000, tpotMs: 100}
  template:
    nodeSelector: {example.com/none: "1"}
    annotations: {example.com/checked: "yes"}
  placement:
    manual: [{role: mixed, replicas: 1, parallelism: {tensor: 16}}]
"""


@pytest.fixture(scope="module")
def with_sets(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster with LeaderWorkerSet, installed by its chart, and then with Cleave."""
    built, folder = third_party.find("lws"), tmp_path_factory.mktemp("lws")
    if cluster.control_plane is None or cluster.nodes is None:
        pytest.skip("needs a control plane and process nodes of its own")
    config = third_party.install_chart(
        *(cluster, built / "manifests" / "lws", HOME, "--set=replicaCount=0"),
        config="lws-manager-config",
    )
    account = cluster.control_plane.service_account(HOME, "lws-controller-manager")
    config["health"] = {"healthProbeBindAddress": "0"}
    env = {"KUBECONFIG": str(account)}
    with third_party.served_webhook(cluster, HOME, "lws", config, folder) as file:
        line = [built / "cmd", f"--config={file}", "--zap-log-level=2"]
        with third_party.running(line, folder / "lws.log", env), installation(cluster):
            yield cluster
    cluster.helm("uninstall", "lws", "-n", HOME, "--wait")


def test_an_instance_over_two_nodes_is_one_group_of_pods(
    with_sets: Cluster, namespace: str
) -> None:
    chat = Chat(with_sets, namespace)
    with_sets.kubectl("apply", "-n", namespace, "-f", "-", input=OVER_TWO_NODES)
    try:
        wait_until(lambda: len(pods(chat)) == 2, WAIT_S, "a leader and a worker are created")
        leader, worker = pods(chat)
        (name,) = sets(chat)
        assert [each["metadata"]["name"] for each in (leader, worker)] == [
            f"{name}-0",
            f"{name}-0-1",
        ]
        for pod, component in ((leader, "worker"), (worker, "follower")):
            assert pod["metadata"]["labels"]["cleave.dev/component"] == component
            assert pod["metadata"]["labels"]["cleave.dev/instance"] == f"{name}-0"
            assert pod["metadata"]["annotations"]["example.com/checked"] == "yes"
        env = {each["name"]: each.get("value") for each in worker["spec"]["containers"][0]["env"]}
        assert env["LWS_LEADER_ADDRESS"] == f"{name}-0.{name}.{namespace}"
        # A changed template replaces the group; the reconcile before it changed nothing.
        before = {pod["metadata"]["uid"] for pod in pods(chat)}
        chat.edit({"engine": {"env": [{"name": "EDITED", "value": "1"}]}})
        wait_until(
            lambda: (
                len(pods(chat)) == 2 and not before & {p["metadata"]["uid"] for p in pods(chat)}
            ),
            READY_S,
            "the group is replaced",
        )
    except AssertionError as error:
        raise AssertionError(f"{error}\n{read_log(with_sets, namespace)}") from error
    finally:
        with_sets.kubectl("delete", "llmd", "--all", "-n", namespace, timeout_s=180)
    wait_until(lambda: not pods(chat) and not sets(chat), WAIT_S, "nothing of the group is left")


def pods(chat: Chat) -> list[dict]:
    """Of instances, leaders first."""
    found = chat.cluster.list("pods", chat.namespace, "cleave.dev/component in (worker,follower)")
    return sorted(found, key=lambda pod: pod["metadata"]["name"])


def sets(chat: Chat) -> list[str]:
    text = chat.cluster.kubectl("get", "leaderworkersets", "-n", chat.namespace, "-o", "yaml")
    return [each["metadata"]["name"] for each in yaml.safe_load(text)["items"]]
