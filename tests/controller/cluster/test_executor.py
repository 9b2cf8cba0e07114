"""The executor: what it asks of the API server, and what it makes of the answers."""

from typing import Any

import pytest

from cleave.api.role import Role
from cleave.controller.cluster import client
from cleave.controller.cluster.actions import (
    Apply,
    Create,
    Delete,
    Emit,
    ObjectReference,
    OrderAdapters,
    PatchStatus,
    PlanJob,
    Repurpose,
    RequestPlan,
    Requeue,
    SetFinalizers,
    SetLabels,
)
from cleave.controller.cluster.agent_client import AgentError
from cleave.controller.cluster.client import KubeApiError
from cleave.controller.cluster.executor import Executor, NameTakenError, NotLeadingError, StaleError
from cleave.controller.metrics import OperatorMetrics
from cleave.manifests.labels import Manifest
from cleave.policy.adapters import AdapterSource
from cleave.rpc.credentials import AgentEndpoint

POD: Manifest = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {"name": "chat-decode-1", "namespace": "llm"},
}
POOL = ObjectReference("InstancePool", "llm", "chat-decode", "u1")


class Server:
    """Answers in order; an exception is raised instead."""

    def __init__(self, *answers: Manifest | KubeApiError) -> None:
        self.answers = list(answers)
        self.requests: list[tuple[str, str, dict[str, Any]]] = []

    async def request(self, method: str, path: str, **options: Any) -> Manifest:
        self.requests.append((method, path, options))
        answer = self.answers.pop(0) if self.answers else {"metadata": {"name": "x"}}
        if isinstance(answer, KubeApiError):
            raise answer
        return answer

    async def get(self, kind: str, namespace: str, name: str) -> Manifest:
        return await self.request("GET", client.KINDS[kind].build_path(namespace, name))


AGENT = AgentEndpoint("10.0.0.1:9000", "chat-decode-1", "i1")
OWNERS = {("llm", "chat"): {"u1", "u2"}}
"""Uids of the pools by hand that name the deployment."""


class Hands:
    def __init__(
        self, *answers: Manifest | KubeApiError, may_write: bool = True, refusal: str = ""
    ) -> None:
        self.orders: list[tuple[AgentEndpoint, Role]] = []
        self.adapter_orders: list[tuple[Any, ...]] = []
        self.refusal = refusal
        self.server = Server(*answers)
        self.seen: list[Manifest] = []
        self.gone: list[ObjectReference] = []
        self.metrics = OperatorMetrics()
        self.executor = Executor(
            self.server,  # type: ignore[arg-type]
            get_lease_s=lambda: 60.0 if may_write else 0.0,
            on_change=self.seen.append,
            on_delete=self.gone.append,
            clock=lambda: 0.0,
            metrics=self.metrics,
            set_role=self.order,
            send_adapters=self.order_adapters,
            list_owners=lambda namespace, deployment: OWNERS.get((namespace, deployment), set()),
        )

    async def order_adapters(self, agent: AgentEndpoint, adapters: Any, generation: int) -> None:
        self.adapter_orders.append((agent, tuple(adapters), generation))
        if self.refusal:
            raise AgentError(self.refusal)

    async def order(self, agent: AgentEndpoint, role: Role) -> None:
        self.orders.append((agent, role))
        if self.refusal:
            raise AgentError(self.refusal)


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_FIRST_BACKOFF_S", 0.0)


async def test_an_apply_is_forced_under_the_operators_name() -> None:
    hands = Hands(POD)
    await hands.executor.carry_out([Apply(POD)])
    ((method, path, options),) = hands.server.requests
    assert (method, path) == ("PATCH", "/api/v1/namespaces/llm/pods/chat-decode-1")
    assert options["content_type"] == "application/apply-patch+yaml"
    expected = {"fieldManager": "cleave", "force": "true", "timeout": "15.000s"}
    assert options["query"] == expected
    assert hands.seen == [POD]


async def test_pod_groups_of_volcano_and_of_kubernetes_have_the_same_kind() -> None:
    for version in ("scheduling.k8s.io/v1beta1", "scheduling.volcano.sh/v1beta1"):
        hands = Hands()
        meta = {"name": "chat-decode-1", "namespace": "llm"}
        group = {"apiVersion": version, "kind": "PodGroup", "metadata": meta}
        await hands.executor.carry_out([Apply(group)])
        ((_, path, _),) = hands.server.requests
        assert path == f"/apis/{version}/namespaces/llm/podgroups/chat-decode-1"


def service(uid: str, deployment: str = "chat", applied: str = "x") -> Manifest:
    meta = {
        "name": "chat",
        "namespace": "llm",
        "labels": {"cleave.dev/deployment": deployment} if deployment else {},
        "annotations": {"cleave.dev/applied": applied},
        "ownerReferences": [{"uid": uid}],
    }
    return {"apiVersion": "v1", "kind": "Service", "metadata": meta}


async def test_an_uncached_object_is_read_before_it_is_created() -> None:
    hands = Hands(KubeApiError(404, "NotFound", "none"), service("u1"))
    await hands.executor.carry_out([Apply(service("u1"), is_new=True)])
    assert [method for method, _, _ in hands.server.requests] == ["GET", "PATCH"]


async def test_an_unchanged_object_is_not_written_again() -> None:
    hands = Hands(service("u1"))
    await hands.executor.carry_out([Apply(service("u1"), is_new=True)])
    assert [method for method, _, _ in hands.server.requests] == ["GET"]
    assert hands.seen == [service("u1")]


KINDS = (
    "Service", "ServiceAccount", "Role", "RoleBinding", "NetworkPolicy", "PodDisruptionBudget",
    "Deployment", "InstancePool",
)  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "theirs",
    [
        service("u9", ""),
        service("u9", "chat-workers"),
        # Whoever may label an object is not its owner.
        service("u9"),
        {**service("u9"), "metadata": {**service("u9")["metadata"], "ownerReferences": []}},
    ],
    ids=["unlabelled", "of another deployment", "with the label", "without an owner"],
)
async def test_objects_of_another_owner_are_never_adopted(kind: str, theirs: Manifest) -> None:
    hands = Hands({**theirs, "kind": kind})
    with pytest.raises(NameTakenError, match=f"{kind} chat exists already and belongs to"):
        await hands.executor.carry_out([Apply({**service("u1"), "kind": kind}, is_new=True)])
    assert [method for method, _, _ in hands.server.requests] == ["GET"]


@pytest.mark.parametrize("kind", KINDS)
async def test_what_another_one_creates_in_that_moment_is_not_taken_over(kind: str) -> None:
    conflict = KubeApiError(409, "Conflict", 'conflict with "helm" using apps/v1: .spec.selector')
    hands = Hands(KubeApiError(404, "NotFound", "none"), conflict)
    with pytest.raises(StaleError, match="helm"):
        await hands.executor.carry_out([Apply({**service("u1"), "kind": kind}, is_new=True)])
    _, (_, _, options) = hands.server.requests
    assert options["query"]["force"] == "false"


async def test_an_own_object_that_somebody_has_edited_is_written_again() -> None:
    policy = {**service("u1"), "kind": "NetworkPolicy"}
    hands = Hands({**service("u1", applied="other"), "kind": "NetworkPolicy"}, policy)
    await hands.executor.carry_out([Apply(policy, is_new=True)])
    _, (_, _, options) = hands.server.requests
    assert options["query"]["force"] == "true"


@pytest.mark.parametrize(("lease_s", "timeout_s"), [(60.0, 15.0), (3.5, 3.5)])
async def test_no_write_outlasts_the_lease(lease_s: float, timeout_s: float) -> None:
    hands = Hands(POD)
    hands.executor._get_lease_s = lambda: lease_s
    await hands.executor.carry_out([Apply(POD)])
    ((_, _, options),) = hands.server.requests
    assert options["timeout_s"] == timeout_s
    assert options["query"]["timeout"] == f"{timeout_s:.3f}s"


async def test_pools_by_hand_share_what_one_deployment_would_have() -> None:
    hands = Hands(service("u2", applied="other"), service("u1"))
    await hands.executor.carry_out([Apply(service("u1"), is_new=True)])
    assert [method for method, _, _ in hands.server.requests] == ["GET", "PATCH"]


async def test_an_existing_pod_is_adopted_unchanged() -> None:
    existing = {**POD, "spec": {"nodeName": "n1"}}
    hands = Hands(KubeApiError(409, "AlreadyExists", "it is there"), existing)
    await hands.executor.carry_out([Create(POD)])
    assert hands.seen == [existing]


async def test_a_deletion_names_the_very_object_and_its_end_is_no_error() -> None:
    hands = Hands(KubeApiError(404, "NotFound", "gone"))
    target = ObjectReference("Pod", "llm", "chat-decode-1", "u7")
    await hands.executor.carry_out([Delete(target, grace_s=1)])
    ((method, path, options),) = hands.server.requests
    assert (method, path) == ("DELETE", "/api/v1/namespaces/llm/pods/chat-decode-1")
    assert options["body"]["preconditions"] == {"uid": "u7"}
    assert options["body"]["gracePeriodSeconds"] == 1
    assert hands.gone == [target]


async def test_another_object_of_the_name_is_left_alone() -> None:
    hands = Hands(KubeApiError(409, "Conflict", "another uid"))
    target = ObjectReference("Pod", "llm", "chat-decode-1", "u7")
    await hands.executor.carry_out([Delete(target)])
    assert hands.gone == [target]


async def test_a_status_goes_to_the_status_of_the_very_object() -> None:
    hands = Hands()
    await hands.executor.carry_out([PatchStatus(POOL, {"ready": 1})])
    ((_, path, options),) = hands.server.requests
    assert path == "/apis/cleave.dev/v1alpha1/namespaces/llm/instancepools/chat-decode/status"
    assert options["body"]["metadata"]["uid"] == "u1"
    assert options["body"]["status"] == {"ready": 1}


async def test_finalizers_are_set_only_on_what_was_seen() -> None:
    hands = Hands(KubeApiError(409, "Conflict", "changed"))
    with pytest.raises(StaleError):
        await hands.executor.carry_out([SetFinalizers(POOL, ("a",), "12")])
    ((_, _, options),) = hands.server.requests
    assert options["body"] == {"metadata": {"finalizers": ["a"], "resourceVersion": "12"}}


async def test_errors_that_pass_are_tried_again_and_others_are_not() -> None:
    busy = KubeApiError(429, "TooManyRequests", "later", retry_after_s=0)
    hands = Hands(busy, KubeApiError(503, "Unavailable", "later"), POD)
    await hands.executor.carry_out([Apply(POD)])
    assert len(hands.server.requests) == 3
    hands = Hands(KubeApiError(422, "Invalid", "no"))
    with pytest.raises(KubeApiError, match="422"):
        await hands.executor.carry_out([Apply(POD)])
    assert len(hands.server.requests) == 1


async def test_tries_are_bounded() -> None:
    hands = Hands(*[KubeApiError(500, "InternalError", "no")] * 9)
    with pytest.raises(KubeApiError, match="500"):
        await hands.executor.carry_out([Apply(POD)])
    assert len(hands.server.requests) == 5


async def test_nothing_is_written_without_the_lease() -> None:
    hands = Hands(may_write=False)
    with pytest.raises(NotLeadingError):
        await hands.executor.carry_out([Apply(POD)])
    assert not hands.server.requests


async def test_what_comes_after_a_failure_is_not_done() -> None:
    hands = Hands(KubeApiError(403, "Forbidden", "no"))
    with pytest.raises(KubeApiError):
        await hands.executor.carry_out([Apply(POD), PatchStatus(POOL, {})])
    assert len(hands.server.requests) == 1


async def test_the_other_actions_of_a_kind_run_when_one_fails() -> None:
    hands = Hands(KubeApiError(403, "Forbidden", "no"))
    with pytest.raises(KubeApiError):
        await hands.executor.carry_out([Apply(POD), Apply(POD)])
    assert hands.seen


async def test_an_event_that_is_rejected_stops_nothing() -> None:
    hands = Hands(KubeApiError(403, "Forbidden", "no"), POD)
    await hands.executor.carry_out([Emit(POOL, "Ready", "it is"), Apply(POD)])
    assert len(hands.server.requests) == 2


async def test_questions_and_waits_are_not_its_affair() -> None:
    hands = Hands()
    await hands.executor.carry_out([RequestPlan(PlanJob("a")), Requeue(3)])
    assert not hands.server.requests
    assert not hands.metrics.actions


MOVE = Repurpose(
    ObjectReference("Pod", "llm", "chat-decode-1", "i1"),
    agent=AGENT,
    role=Role.PREFILL,
    metadata={"labels": {"cleave.dev/role": "prefill"}},
    pool=POOL,
)


async def test_an_instance_gets_its_role_before_its_pod_is_labelled() -> None:
    hands = Hands(POD)
    await hands.executor.carry_out([MOVE])
    assert hands.orders == [(AGENT, Role.PREFILL)]
    (method, path, options), (_, _, sent_options) = hands.server.requests
    assert (method, path) == ("PATCH", "/api/v1/namespaces/llm/pods/chat-decode-1")
    assert options["content_type"] == "application/merge-patch+json"
    assert options["body"]["metadata"] == {"labels": {"cleave.dev/role": "prefill"}, "uid": "i1"}
    assert sent_options["body"]["reason"] == "Repurposed"
    assert hands.seen == [POD]


async def test_a_repeated_event_is_counted_instead_of_created_again() -> None:
    taken = KubeApiError(409, "AlreadyExists", "there")
    hands = Hands({"metadata": {}}, taken, {"metadata": {}}, taken, {"metadata": {}})
    for _ in range(3):
        await hands.executor.carry_out([Emit(POOL, "Ready", "it is")])
    await hands.executor.carry_out([Emit(POOL, "Ready", "it is not")])
    sent = [(method, options["body"].get("count")) for method, _, options in hands.server.requests]
    assert sent == [
        *[("POST", 1)],
        *[("POST", 1), ("PATCH", 2)],
        *[("POST", 1), ("PATCH", 3)],
        *[("POST", 1)],
    ]
    names = {
        options["body"]["metadata"]["name"]
        for method, _, options in hands.server.requests
        if method == "POST"
    }
    assert len(names) == 2


async def test_a_pod_whose_agent_refuses_is_unchanged_and_an_event_reports_it() -> None:
    hands = Hands(refusal="it drains")
    await hands.executor.carry_out([MOVE])
    ((_, path, sent_options),) = hands.server.requests
    assert path == "/api/v1/namespaces/llm/events"
    assert (sent_options["body"]["reason"], sent_options["body"]["type"]) == (
        "NotRepurposed",
        "Warning",
    )
    assert "it drains" in sent_options["body"]["message"]
    assert hands.metrics.actions == {("Repurpose", "failed"): 1}


async def test_no_agent_is_called_without_the_lease() -> None:
    hands = Hands(may_write=False)
    with pytest.raises(NotLeadingError):
        await hands.executor.carry_out([MOVE])
    assert not hands.orders


LOAD = OrderAdapters(
    ObjectReference("Pod", "llm", "chat-decode-1", "u1"),
    agents=(AGENT, AgentEndpoint("10.0.0.1:9002", "chat-decode-1", "i1")),
    adapters=(AdapterSource("sql", "/data/sql"),),
    generation=3,
    deployment=ObjectReference("LLMDeployment", "llm", "chat", "u0"),
)


async def test_adapters_are_ordered_from_every_agent_of_a_pod() -> None:
    hands = Hands()
    await hands.executor.carry_out([LOAD])
    assert hands.adapter_orders == [(agent, LOAD.adapters, 3) for agent in LOAD.agents]
    assert hands.metrics.actions == {("OrderAdapters", "done"): 1}
    assert hands.server.requests == []


async def test_an_order_of_adapters_that_an_agent_refuses_is_an_event_of_the_deployment() -> None:
    hands = Hands({"kind": "Event"}, refusal="agent 10.0.0.1:9000: no answer")
    await hands.executor.carry_out([LOAD])
    ((_, path, options),) = hands.server.requests
    assert path.endswith("/events")
    body = options["body"]
    assert body["reason"] == "AdaptersNotOrdered"
    assert "chat-decode-1 does not load spec.adapters" in str(body)
    assert hands.metrics.actions == {("OrderAdapters", "failed"): 1}


async def test_who_does_not_lead_orders_no_adapters() -> None:
    hands = Hands(may_write=False)
    with pytest.raises(NotLeadingError):
        await hands.executor.carry_out([LOAD])
    assert hands.adapter_orders == []


LABELS = SetLabels(
    ObjectReference("Pod", "llm", "chat-decode-1", "u1"), {"cleave.dev/weights": "a1"}, {"x": "2"}
)


async def test_labels_are_set_beside_others_of_the_same_pod_only() -> None:
    hands = Hands(POD)
    await hands.executor.carry_out([LABELS])
    ((method, path, options),) = hands.server.requests
    assert (method, path.rpartition("/")[2]) == ("PATCH", "chat-decode-1")
    assert options["content_type"] == "application/merge-patch+json"
    assert options["body"] == {
        "metadata": {"labels": LABELS.labels, "annotations": LABELS.annotations, "uid": "u1"}
    }


async def test_who_does_not_lead_sets_no_labels() -> None:
    hands = Hands(may_write=False)
    with pytest.raises(NotLeadingError):
        await hands.executor.carry_out([LABELS])
    assert hands.server.requests == []
