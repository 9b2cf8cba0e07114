"""The chart's profile Restricted on a real API server: Cleave's own pods, and any other."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from cleave.api.manifest import validate
from cleave.controller.author_policy.allow_lists import add_own_images
from cleave.controller.author_policy.violations import build_pods, list_pod_faults
from cleave.controller.settings import OperatorSettings

from e2e.cluster.client import ApiError, Client
from e2e.cluster.cluster import Cluster, CommandError
from e2e.test_cluster_operator import CHAT, SYSTEM, Chat, deployed, installation
from tests.support.fake_cluster import chat
from tests.support.pod_schema import add_field, list_fields

pytestmark = pytest.mark.timeout(900)

ALLOW = {
    "env": ["NCCL_*"],
    "fields": ["tolerations", "nodeSelector"],
    "folders": ["/x"],
    "images": ["x/*"],
    "volumes": ["hostPath", "nfs", "image", "persistentVolumeClaim"],
}
LISTS = {name: tuple(entries) for name, entries in ALLOW.items()}
PROFILE = "policy.profile Restricted"


@pytest.fixture(scope="module")
def restricted(cluster: Cluster) -> Iterator[Cluster]:
    if cluster.control_plane is None:
        pytest.skip("installs cluster-wide objects")
    allow = ("--set-json", f"policy.allow={json.dumps(ALLOW)}")
    with installation(cluster, "--set", "policy.profile=Restricted", *allow):
        yield cluster


@pytest.fixture(scope="module")
def served(restricted: Cluster) -> Iterator[Chat]:
    with restricted.lend_namespace() as namespace, deployed(restricted, namespace, CHAT) as found:
        yield found


def test_cleaves_own_pods_serve_under_the_restricted_profile(served: Chat) -> None:
    assert served.cluster.list("pods", served.namespace, "cleave.dev/component=worker")
    name = "validatingadmissionpolicy/cleave-operator-authors"
    policy = json.loads(served.cluster.kubectl("get", name, "-o", "json"))
    assert not policy.get("status", {}).get("typeChecking", {}).get("expressionWarnings")


def test_the_webhook_names_the_field_and_the_value_that_would_allow_it(served: Chat) -> None:
    env = '[{"name": "LD_PRELOAD", "value": "/x/evil.so"}]'
    manifest = CHAT.replace("type: Emulated", f"type: Emulated, env: {env}").replace(
        "name: chat}", "name: other}", 1
    )
    with pytest.raises(CommandError) as error:
        served.cluster.kubectl("apply", "-n", served.namespace, "-f", "-", input=manifest)
    assert "spec.engine.env[LD_PRELOAD]" in error.value.text
    assert "policy.allow.env would have to list LD_PRELOAD" in error.value.text


async def test_the_api_server_says_of_each_field_of_a_pod_what_the_operator_says(
    served: Chat,
) -> None:
    """Of 1,141 variants those that it finds valid, as if the operator created them."""
    settings = OperatorSettings(account="system:serviceaccount:cleave-system:cleave-operator")
    _, base = build_pods(validate(chat(engine={"type": "vLLM"})), settings)
    (pod, *_) = served.cluster.list("pods", served.namespace, "cleave.dev/component=worker")
    base["spec"]["serviceAccountName"] = pod["spec"]["serviceAccountName"]
    base["metadata"]["namespace"] = served.namespace
    lists = add_own_images(LISTS, settings.images)
    account = served.cluster.control_plane.service_account(SYSTEM, "cleave-operator")
    compared = {True: 0, False: 0}
    async with Client(account) as client:

        async def admit(spec: dict[str, Any]) -> dict[str, Any] | bool | None:
            """The pod as it would be created; False: the policy refuses it; None: another check."""
            path = f"/api/v1/namespaces/{served.namespace}/pods?dryRun=All"
            try:
                return await client.post(path, {**base, "spec": spec})
            except ApiError as error:
                return False if PROFILE in str(error) else None

        hidden = {**base["spec"], "priorityClassName": "system-node-critical"}
        for _ in range(240):
            # The API server takes a moment until it applies new policies.
            if await admit(hidden) is False:
                break
            await asyncio.sleep(0.5)
        assert await admit(hidden) is False
        assert await admit(base["spec"])
        for path, value in list_fields():
            spec = add_field(base["spec"], path[0], value)
            created = await admit(spec)
            if created is not None:
                # The API server drops fields that it has not enabled, and adds its own.
                pod = created or {**base, "spec": spec}
                faults = list(list_pod_faults(pod, lists))
                assert bool(created) == (not faults), (path, faults)
                compared[bool(created)] += 1
    assert min(compared.values()) > 40, compared
