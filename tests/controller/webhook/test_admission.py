import time

import pytest

from cleave.api import faults
from cleave.api.cluster import Cluster, NodeGroup
from cleave.controller.webhook import admission
from cleave.controller.webhook.admission import ReviewError, check_resource, review_admission

CLUSTER = Cluster(nodes=[NodeGroup(count=2, gpu="A100-SXM-80GB", gpus_per_node=8)])


def deployment(**spec):
    smallest = {"model": "meta-llama/Llama-3.1-8B-Instruct", "slo": {"ttftMs": 400, "tpotMs": 40}}
    return {
        "apiVersion": "cleave.dev/v1alpha1",
        "kind": "LLMDeployment",
        "metadata": {"name": "chat", "namespace": "default"},
        "spec": {**smallest, **spec},
    }


def pool(**spec):
    whole = {
        "deployment": "chat",
        "role": "decode",
        "revision": "abc",
        "model": "meta-llama/Llama-3.1-8B-Instruct",
    }
    return {
        "apiVersion": "cleave.dev/v1alpha1",
        "kind": "InstancePool",
        "metadata": {"name": "chat-decode", "namespace": "default"},
        "spec": {**whole, **spec},
    }


def review(resource):
    return {
        "apiVersion": "admission.k8s.io/v1",
        "kind": "AdmissionReview",
        "request": {"uid": "u-1", "operation": "CREATE", "object": resource},
    }


def test_a_good_resource_is_let_in() -> None:
    said = review_admission(review(deployment()), None)
    assert said["response"] == {"uid": "u-1", "allowed": True}
    assert said["apiVersion"] == "admission.k8s.io/v1"


def test_a_bad_one_is_refused_with_every_fault_in_the_words_of_validate() -> None:
    said = review_admission(review(deployment(slo={"ttftMs": -1, "tpotMs": "x"})), None)["response"]
    assert said["allowed"] is False
    assert said["status"]["reason"] == "Invalid"
    assert said["status"]["message"] == (
        "spec.slo.ttftMs: must be > 0 (got -1); spec.slo.tpotMs: must be a number (got 'x')"
    )


def test_what_cannot_be_planned_and_what_looks_like_seconds_is_let_in_with_whole_warnings() -> None:
    workload = {"rate": 1, "promptTokens": {"mean": 100}, "outputTokens": {"mean": 10}}
    slo = {"ttftMs": 0.4, "tpotMs": 0.04}
    resource = deployment(model="example/unknown-9b", workload=workload, slo=slo)
    said = review_admission(review(resource), CLUSTER)["response"]
    assert said["allowed"] is True
    fields = ["spec.slo.ttftMs", "spec.slo.tpotMs", "spec.model.source", "spec.model.config"]
    assert [each.partition(":")[0] for each in said["warnings"]] == fields
    assert not any(each.endswith("...") for each in said["warnings"])


def test_what_the_api_server_writes_into_metadata_is_not_looked_at() -> None:
    resource = deployment()
    resource["metadata"] |= {
        "selfLink": "/x",
        "uid": "1",
        "managedFields": [{"manager": "kubectl"}],
    }
    assert review_admission(review(resource), None)["response"]["allowed"]


def test_a_status_that_is_older_than_the_types_is_not_looked_at() -> None:
    resource = {**deployment(), "status": {"unknown": 1}}
    assert not check_resource(resource, None).faults


def test_pools_are_validated_too() -> None:
    assert not check_resource(pool(), None).faults
    assert check_resource(pool(role="prefil"), None).faults == (
        "spec.role: must be one of prefill, decode, mixed; did you mean prefill? (got 'prefil')",
    )


@pytest.mark.parametrize("resource", [None, {}, {"kind": "Pod"}])
def test_what_is_none_of_ours_is_let_in(resource) -> None:
    assert review_admission(review(resource), None)["response"]["allowed"]


@pytest.mark.parametrize("body", [{}, {"request": None}, {"request": {"uid": 1}}])
def test_what_is_no_review_is_no_question(body) -> None:
    with pytest.raises(ReviewError):
        review_admission(body, None)


def test_what_today_s_nodes_lack_is_a_warning() -> None:
    placement = {"manual": [{"role": "mixed", "gpu": "H100-SXM-80GB"}]}
    said = review_admission(review(deployment(placement=placement)), CLUSTER)["response"]
    assert said["allowed"]
    (warning,) = said["warnings"]
    assert warning == (
        "spec.placement.manual[0].gpu: no node has H100-SXM-80GB now, there is A100-SXM-80GB; "
        "instances will wait, unless plans leave out nodes with this label"
    )


def test_long_warnings_are_cut_before_the_api_server_cuts_them(monkeypatch) -> None:
    monkeypatch.setattr(
        admission,
        "check_resource",
        lambda *_: admission.ValidationFindings(warnings=("x" * 300,) * 20),
    )
    said = review_admission(review(deployment()), None)["response"]["warnings"]
    assert len(said) == 8
    assert {len(text) for text in said} == {250}
    assert said[0].endswith("...")


def test_known_fields_are_listed_once_and_long_names_are_cut_before_the_search(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    searched: list[str] = []

    def search(word: str, *_: object, **__: object) -> list[str]:
        searched.append(word)
        return []

    monkeypatch.setattr(faults, "get_close_matches", search)
    resource = deployment()
    resource["spec"] |= {f"{number}{'q' * 30_000}": 1 for number in range(100)}
    message = review_admission(review(resource), None)["response"]["status"]["message"]
    assert message.count("known here: ") == 1
    assert len(searched) == 100
    assert max(map(len, searched)) == 100


def test_many_faults_are_counted_and_only_the_first_ones_explained() -> None:
    resource = deployment()
    resource["spec"] |= {f"slos{number}": 1 for number in range(5_000)}
    started = time.thread_time()
    message = review_admission(review(resource), None)["response"]["status"]["message"]
    assert time.thread_time() - started < 2
    assert message.count("did you mean slo?") == 100
    assert message.count("; ") <= 200
    assert message.endswith("and 4900 more faults")
