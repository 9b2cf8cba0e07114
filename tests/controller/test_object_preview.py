"""The objects that `cleave render` prints are those that the operator creates."""

import dataclasses

from cleave.api.manifest import validate
from cleave.controller.object_preview import list_objects
from cleave.controller.settings import OperatorSettings
from cleave.manifests.container import Images
from cleave.manifests.network_policies import NetworkIsolation
from cleave.manifests.topology import NodeTopology

from tests.support.built_pools import choose_placement

SETTINGS = OperatorSettings(
    isolation=NetworkIsolation(),
    account="system:serviceaccount:cleave-system:cleave-operator",
    images=Images("registry.example/cleave/"),
)
NODES = NodeTopology(gpus_per_node={"NVIDIA-H100-80GB-HBM3": 8})


def render(*pools, **spec):
    document = {
        "apiVersion": "cleave.dev/v1alpha1",
        "kind": "LLMDeployment",
        "metadata": {"name": "chat", "namespace": "team"},
        "spec": {
            "model": "meta-llama/Llama-3.1-70B",
            "slo": {"ttftMs": 600, "tpotMs": 40},
            "placement": {"manual": list(pools)},
            **spec,
        },
    }
    deployment = validate(document)
    return list(list_objects(deployment, choose_placement(deployment), NODES, SETTINGS))


def test_no_pod_names_a_user_where_the_cluster_assigns_it() -> None:
    document = {
        "apiVersion": "cleave.dev/v1alpha1",
        "kind": "LLMDeployment",
        "metadata": {"name": "chat", "namespace": "team"},
        "spec": {"model": "a/b", "slo": {"ttftMs": 600, "tpotMs": 40}},
    }
    deployment = validate(document)
    settings = dataclasses.replace(SETTINGS, has_assigned_user=True)
    objects = list(list_objects(deployment, choose_placement(deployment), NODES, settings))
    specs = [each["spec"] for each in objects if each["kind"] == "Pod"]
    specs += [each["spec"]["template"]["spec"] for each in objects if each["kind"] == "Deployment"]
    assert len(specs) == 3
    for spec in specs:
        # What OpenShift's constraint restricted-v2 accepts.
        assert spec["securityContext"] == {
            "runAsNonRoot": True,
            "seccompProfile": {"type": "RuntimeDefault"},
        }
        for container in spec["containers"]:
            assert {"name": "USER", "value": "cleave"} in container["env"]
            assert "CLEAVE_CALLER_ACCOUNTS" in {variable["name"] for variable in container["env"]}


def pool(role, tensor, **more):
    return {"role": role, "parallelism": {"tensor": tensor}, **more}


def test_all_kinds_of_objects_are_there_and_one_pod_for_each_pool() -> None:
    objects = render(pool("prefill", 2, replicas=3), pool("decode", 4))
    kinds = [each["kind"] for each in objects]
    assert {"ServiceAccount", "RoleBinding", "Service", "Deployment", "NetworkPolicy"} < {*kinds}
    pods = {each["metadata"]["name"]: each for each in objects if each["kind"] == "Pod"}
    assert list(pods) == ["chat-prefill-0", "chat-decode-0"]
    assert {each["metadata"]["namespace"] for each in objects} == {"team"}
    (container,) = pods["chat-decode-0"]["spec"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "4"
    assert container["image"].startswith("registry.example/cleave/")
    names = {variable["name"] for variable in container["env"]}
    assert "CLEAVE_CALLER_ACCOUNTS" in names
    accounts = [each["metadata"]["name"] for each in objects if each["kind"] == "ServiceAccount"]
    assert {each["spec"]["serviceAccountName"] for each in pods.values()} == {accounts[1]}


def test_what_one_machine_cannot_run_is_rendered() -> None:
    claim = {"cache": {"persistentVolumeClaim": {"claimName": "models"}}}
    model = {"source": "meta-llama/Llama-3.1-70B", **claim}
    objects = render(pool("mixed", 4), model=model, gateway={"keysSecret": "keys"})
    (pod,) = (each for each in objects if each["kind"] == "Pod")
    claims = [volume.get("persistentVolumeClaim") for volume in pod["spec"]["volumes"]]
    assert {"claimName": "models", "readOnly": False} in claims or {"claimName": "models"} in claims


def test_an_instance_over_two_nodes_has_two_pods() -> None:
    objects = render(pool("mixed", 8) | {"parallelism": {"tensor": 8, "pipeline": 2}})
    names = [each["metadata"]["name"] for each in objects if each["kind"] == "Pod"]
    assert names == ["chat-mixed-0", "chat-mixed-0-1"]


def test_a_cell_is_one_pod() -> None:
    cell = pool("prefill", 2, perCell=1), pool("decode", 4, perCell=1)
    objects = render(*cell, engine={"connector": "Nixl"})
    (pod,) = (each for each in objects if each["kind"] == "Pod")
    assert pod["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "6"
