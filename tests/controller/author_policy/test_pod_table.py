"""The table of what pods may have, against everything that Kubernetes' PodSpec has."""

from typing import Any

import pytest
from kubernetes.client import models

from cleave.api.engine import RESERVED_ENV
from cleave.api.manifest import validate
from cleave.controller.author_policy import container_table, volume_table
from cleave.controller.author_policy.allow_lists import NAMES, add_own_images
from cleave.controller.author_policy.pod_rules import AllowLists
from cleave.controller.author_policy.violations import build_pods, list_pod_faults
from cleave.controller.settings import OperatorSettings

from tests.support.fake_cluster import chat
from tests.support.node_terms import PREFERRED, REQUIRED
from tests.support.pod_schema import add_field, list_fields

SETTINGS = OperatorSettings(account="system:serviceaccount:cleave-system:cleave-operator")
GATEWAY, WORKER = build_pods(validate(chat(engine={"type": "vLLM"})), SETTINGS)
_BASE = WORKER["spec"]
_LEFT_OUT = ("env", "volumeMounts", "livenessProbe", "readinessProbe", "resources", "ports")
SMALL = {
    "serviceAccountName": "chat-workers",
    "securityContext": _BASE["securityContext"],
    "containers": [{k: v for k, v in _BASE["containers"][0].items() if k not in _LEFT_OUT}],
}
"""What is needed, so that it is quickly judged."""
FIELDS = list(list_fields())

WHOLLY = (
    # The scheduler's choice among nodes and when it is made; authors cannot set them.
    "affinity.podAffinity", "affinity.podAntiAffinity", "topologySpreadConstraints",
    "schedulingGates", "schedulingGroup", "readinessGates",
    # What the API server's plug-ins write: users cannot.
    "overhead", "priority", "preemptionPolicy",
    # Which account a pod may have is a rule of its own.
    "serviceAccount", "serviceAccountName", "automountServiceAccountToken",
    "enableServiceLinks", "hostname", "subdomain", "restartPolicy", "shareProcessNamespace",
    "terminationGracePeriodSeconds", "volumes.name", "volumes.emptyDir", "volumes.downwardAPI",
    "volumes.projected.sources.downwardAPI", "volumes.projected.sources.clusterTrustBundle",
    "containers.name", "containers.imagePullPolicy", "containers.resizePolicy",
    "containers.resources.claims", "containers.terminationMessagePolicy",
)  # fmt: skip
"""Fields of which everything is allowed, with all below them."""
PARTLY = {
    "affinity": "nodeAffinity",
    "affinity.nodeAffinity": f"{REQUIRED} {PREFERRED}",
    f"affinity.nodeAffinity.{REQUIRED}": "nodeSelectorTerms",
    f"affinity.nodeAffinity.{PREFERRED}": "weight preference",
    "containers": "",
    "containers.livenessProbe": "failureThreshold grpc httpGet initialDelaySeconds periodSeconds "
    "successThreshold terminationGracePeriodSeconds timeoutSeconds",
    "containers.livenessProbe.grpc": "mode port service",
    "containers.livenessProbe.httpGet": "path port scheme",
    "containers.readinessProbe": "failureThreshold grpc httpGet initialDelaySeconds periodSeconds "
    "successThreshold terminationGracePeriodSeconds timeoutSeconds",
    "containers.readinessProbe.grpc": "mode port service",
    "containers.readinessProbe.httpGet": "path port scheme",
    "containers.ports": "containerPort name protocol",
    "containers.resources": "",
    "containers.securityContext": "capabilities readOnlyRootFilesystem runAsGroup runAsNonRoot "
    "runAsUser seLinuxOptions seLinuxOptions.level seccompProfile",
    "containers.volumeMounts": "name readOnly recursiveReadOnly subPath",
    "securityContext": "fsGroup fsGroupChangePolicy runAsGroup runAsNonRoot runAsUser "
    "seLinuxOptions seLinuxOptions.level seccompProfile supplementalGroupsPolicy",
    "volumes": "",
    "volumes.projected": "defaultMode sources sources.serviceAccountToken "
    "sources.serviceAccountToken.expirationSeconds sources.serviceAccountToken.path",
}
"""Fields with others that are allowed, with any value or with those of `list_fields`."""
ALLOWED = {
    *PARTLY,
    *(f"{field}.{name}" for field, names in PARTLY.items() for name in names.split()),
}
OPENED = {
    "configMaps": "containers.volumeMounts volumes.configMap volumes.projected.sources.configMap",
    "env": "containers.env",
    "fields": "affinity.nodeAffinity containers.ports.hostPort hostNetwork nodeSelector "
    "resourceClaims runtimeClassName schedulerName tolerations",
    "images": "containers.image",
    "labels": "",
    "args": "",
    "priorityClasses": "priorityClassName",
    "resources": "containers.resources.limits containers.resources.requests",
    "secrets": "imagePullSecrets volumes.secret volumes.projected.sources.secret",
    "volumes": " ".join(f"volumes.{kind}" for kind in volume_table.VOLUMES),
}
"""Beginnings of the fields that each list opens."""


def list_allowed(lists: AllowLists) -> set[str]:
    lists = add_own_images(lists, SETTINGS.images)
    pods = ((path, {**WORKER, "spec": add_field(SMALL, path[0], value)}) for path, value in FIELDS)
    return {".".join(path) for path, pod in pods if next(list_pod_faults(pod, lists), None) is None}


def test_of_all_fields_of_a_pod_only_the_listed_ones_are_allowed() -> None:
    assert len(FIELDS) > 1100
    allowed = list_allowed({})
    unexpected = {
        path
        for path in allowed - ALLOWED
        if not any(path == each or path.startswith(f"{each}.") for each in WHOLLY)
    }
    assert not unexpected
    assert allowed >= {*WHOLLY} - {"volumes.name"}


@pytest.mark.parametrize("name", NAMES)
def test_a_list_opens_its_own_fields_only(name: str) -> None:
    opened = list_allowed({name: ("",) if name == "folders" else ("*",)}) - list_allowed({})
    own = tuple(OPENED.get(name, "containers.volumeMounts").split())
    assert {path for path in opened if not path.startswith(own)} == set()
    assert opened or not own


def test_with_all_kinds_of_volumes_secrets_folders_and_images_in_them_are_looked_at() -> None:
    allowed = list_allowed({"volumes": ("*",)})
    named = {path for path in allowed if "ecret" in path and path.startswith("volumes.")}
    # Other drivers name them as parameters of StorageClasses, or by a claim.
    assert not named
    assert "volumes.hostPath.path" not in allowed
    assert "volumes.image.reference" not in allowed
    assert "volumes.persistentVolumeClaim.claimName" in allowed
    assert "volumes.gitRepo.repository" not in list_allowed(dict.fromkeys(NAMES, ("*",)))


def test_all_kinds_of_volumes_of_kubernetes_are_known() -> None:
    known = {*volume_table.VOLUME.rules} | {"gitRepo"}
    assert {*models.V1Volume.attribute_map.values()} == known


@pytest.mark.parametrize("pod", [GATEWAY, WORKER], ids=["gateway", "worker"])
def test_what_must_be_in_a_pod_is_missed(pod: dict[str, Any]) -> None:
    lists = add_own_images({}, SETTINGS.images)
    assert not list(list_pod_faults(pod, lists))
    spec = pod["spec"]
    (container,) = spec["containers"]
    for whole in ({"securityContext": {}}, {"securityContext": {"runAsNonRoot": True}}):
        assert list(list_pod_faults({**pod, "spec": {**spec, **whole}}, lists))
    for name in ("securityContext", "command", "image"):
        less = {key: value for key, value in container.items() if key != name}
        assert list(list_pod_faults({**pod, "spec": {**spec, "containers": [less]}}, lists))
    for name in ("allowPrivilegeEscalation", "capabilities", "readOnlyRootFilesystem"):
        security = {k: v for k, v in container["securityContext"].items() if k != name}
        less = {**container, "securityContext": security}
        assert list(list_pod_faults({**pod, "spec": {**spec, "containers": [less]}}, lists))


def test_variables_of_cleave_cannot_be_set_by_authors_unless_their_values_are_checked() -> None:
    own = {*container_table._OWN_ENV} - {"VLLM_HOST_IP", "USER"}
    # Appended after those of authors, and the last one counts.
    appended = {"CLEAVE_CALLER_ACCOUNTS", "CLEAVE_PEER_ACCOUNTS"}
    assert own - appended <= {*RESERVED_ENV}
    code = ("PYTHON", "LD_", "VLLM_PLUGINS", "PATH", "PROXY", "ENDPOINT", "PLUGIN", "FILE", "DIR")
    harmless = {*container_table._HARMLESS_ENV}
    assert not {name for name in harmless if any(each in name.upper() for each in code)}
