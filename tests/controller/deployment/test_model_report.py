"""What the operator takes up of engines' reports about an unknown model."""

import json
from dataclasses import replace
from typing import Any

import pytest

from cleave.api.deployment import LLMDeployment, LLMDeploymentStatus
from cleave.controller.cluster.actions import PatchStatus, RequestPlan
from cleave.controller.cluster.inventory import build_inventory
from cleave.controller.cluster.objects import ObservedPod, parse_node
from cleave.controller.cluster.reported_model import apply_report
from cleave.controller.deployment.model_report import MODEL_AS_REPORTED
from cleave.controller.deployment.reconcile import reconcile
from cleave.controller.views import DeploymentView
from cleave.manifests.labels import Manifest
from cleave.manifests.topology import NodeTopology
from cleave.perf.model import model_report, model_shape
from cleave.perf.model.known_models import CONFIGS
from cleave.perf.model.model_report import EngineFacts, GroupFacts, SizeFacts
from cleave.planner.deployment_shape import load_shape
from cleave.planner.resolved_deployment import resolve_in_cluster
from cleave.rpc.fleet_status import FleetInstance

from tests.support.built_pools import build_pools
from tests.support.engine_sizes import build_sizes
from tests.support.fake_cluster import chat, manual_placement, node

CONFIG = CONFIGS["qwen3-8b"]
KV_BYTES = 147_456
"""Of one token: 36 layers, 8 heads of 128 values of 2 bytes, keys and values."""
WORKLOAD = {"rate": 1, "promptTokens": {"mean": 100}, "outputTokens": {"mean": 10}}


def deployment(source: str = "org/new", **spec: Any) -> LLMDeployment:
    declared = chat(**{"model": source, "engine": {"type": "vLLM"}, "workload": WORKLOAD, **spec})
    meta = {**declared["metadata"], "uid": "u1", "resourceVersion": "7", "generation": 2}
    meta["finalizers"] = ["cleave.dev/drain"]
    return LLMDeployment.model_validate({**declared, "metadata": meta})


def report(
    config: dict = CONFIG,
    kv_bytes: int = KV_BYTES,
    pipeline: int = 1,
    sizes: SizeFacts | None = None,
) -> str:
    group = GroupFacts("FullAttentionSpec", 36, 16, kv_bytes)
    facts = EngineFacts(config, 4096, 16, "bfloat16", "auto", 1, pipeline, [group], sizes=sizes)
    return model_report.encode(facts)


def view(
    resource: LLMDeployment, text: str, status: Manifest | None = None, **pod: Any
) -> DeploymentView:
    """A deployment of which the instance `p` reports `text`."""
    pools = build_pools(resource, NodeTopology())
    revision = pod.pop("revision", pools[0].spec.revision)
    role = pools[0].spec.role
    seen = ObservedPod("p", "u", role, revision, **{"ready": True, **pod})
    return DeploymentView(
        resolve_in_cluster(resource),
        build_inventory([parse_node(node("n1"))]),
        1_000.0,
        status=status or {},
        pools=tuple(pools),
        pods=(seen,),
        instances={"p": FleetInstance("p", model_report=text)},
    )


def report_status(seen: DeploymentView) -> Manifest:
    (patch,) = (each for each in reconcile(seen) if isinstance(each, PatchStatus))
    LLMDeploymentStatus.model_validate_json(json.dumps(patch.status))
    return patch.status


def find_condition(status: Manifest) -> tuple[str, str, str]:
    (found,) = (each for each in status["conditions"] if each["type"] == MODEL_AS_REPORTED)
    return found["status"], found["reason"], found["message"]


def test_an_unknown_model_is_planned_once_its_first_engine_has_reported_it() -> None:
    resource = deployment()
    seen = view(resource, report())
    assert not [each for each in reconcile(seen) if isinstance(each, RequestPlan)]
    status = report_status(seen)
    assert status["reportedModel"]["config"] == model_report.select_config(CONFIG)
    assert status["reportedModel"]["instance"] == "p"
    assert find_condition(status)[:2] == ("True", "AsReported")

    changed = apply_report(resource, status)
    assert changed.spec.model.config is not None
    (request,) = (
        each for each in reconcile(view(changed, "", status)) if isinstance(each, RequestPlan)
    )
    assert request.job.inputs_hash
    # The status keeps it when nothing is reported any more.
    kept = [each for each in reconcile(view(changed, "", status)) if isinstance(each, PatchStatus)]
    assert all(each.status["reportedModel"] == status["reportedModel"] for each in kept)


def test_engines_keep_running_when_the_config_arrives() -> None:
    resource = deployment()
    changed = apply_report(resource, report_status(view(resource, report())))
    revisions = {
        pool.spec.revision
        for each in (resource, changed)
        for pool in build_pools(each, NodeTopology())
    }
    assert len(revisions) == 1


@pytest.mark.parametrize(
    ("spec", "takes"),
    [
        ({}, True),
        ({"model": "meta-llama/Llama-3.1-8B"}, False),
        ({"model": {"source": "org/new", "config": {"inline": CONFIG}}}, False),
        ({"placement": manual_placement(mixed=1)}, False),
        ({"model": {"source": "org/new", "revision": "v2"}}, False),
        ({"model": "org/newer"}, False),
    ],
)
def test_a_report_counts_only_for_its_model_and_where_nothing_else_knows_it(
    spec: Manifest, takes: bool
) -> None:
    status = report_status(view(deployment(), report()))
    other = deployment(**spec)
    assert (apply_report(other, status) != other) is takes


@pytest.mark.parametrize(
    ("kv_bytes", "pipeline", "expected"),
    [
        (KV_BYTES, 1, ("True", "AsReported")),
        (KV_BYTES * 100 // 101 + 1, 1, ("True", "AsReported")),
        (KV_BYTES // 2, 1, ("False", "Differs")),
        (0, 1, ("Unknown", "NotReported")),
        (KV_BYTES // 2, 2, ("Unknown", "NotReported")),
    ],
)
def test_the_condition_compares_kv_bytes(
    kv_bytes: int, pipeline: int, expected: tuple[str, str]
) -> None:
    seen = view(deployment(), report(kv_bytes=kv_bytes, pipeline=pipeline))
    assert find_condition(report_status(seen))[:2] == expected


def test_known_models_are_compared_too() -> None:
    known = view(deployment("qwen/Qwen3-8B"), report(kv_bytes=2 * KV_BYTES))
    status, reason, message = find_condition(report_status(known))
    assert (status, reason) == ("False", "Differs")
    assert "294,912 KV bytes per token and GPU, plans count 147,456" in message


def test_a_config_that_cannot_be_planned_is_reported_with_its_fault() -> None:
    status = report_status(view(deployment(), report({**CONFIG, "hidden_size": "x"})))
    assert find_condition(status)[:2] == ("False", "NotUsable")
    assert "hidden_size is 'x'" in find_condition(status)[2]
    resource = deployment()
    assert apply_report(resource, status) == resource


SHAPE = model_shape.from_config("m", CONFIG)
SIZES = build_sizes(SHAPE)
UNKNOWN = {**CONFIG, "model_type": "of_tomorrow"}


def test_a_config_that_is_not_understood_is_planned_by_what_the_engine_has_measured() -> None:
    resource = deployment()
    status = report_status(view(resource, report(UNKNOWN, sizes=SIZES)))
    state, reason, message = find_condition(status)
    assert (state, reason) == ("True", "AsReported")
    assert "plans count with its sizes, as its config.json is not understood" in message
    assert "model_type is 'of_tomorrow'" in message
    changed = apply_report(resource, status)
    shape = load_shape(changed)
    assert shape.kv_bytes_per_token == KV_BYTES
    assert shape.weight_bytes == pytest.approx(SHAPE.weight_bytes, rel=1e-3)
    actions = reconcile(view(changed, "", status))
    assert [each for each in actions if isinstance(each, RequestPlan)]
    kept = [each.status for each in actions if isinstance(each, PatchStatus)]
    assert all(find_condition(each)[2] == message for each in kept)


@pytest.mark.parametrize(
    ("kv_bytes", "weight_bytes"),
    [(2 * KV_BYTES, SIZES.weight_bytes), (KV_BYTES, 2 * SIZES.weight_bytes)],
)
def test_what_an_engine_has_measured_counts_before_what_its_config_says(
    kv_bytes: int, weight_bytes: int
) -> None:
    resource = deployment()
    sizes = replace(SIZES, weight_bytes=weight_bytes)
    status = report_status(view(resource, report(kv_bytes=kv_bytes, sizes=sizes)))
    assert "which are not those of its config.json" in find_condition(status)[2]
    shape = load_shape(apply_report(resource, status))
    assert shape.kv_bytes_per_token == kv_bytes
    assert shape.weight_bytes == pytest.approx(weight_bytes, rel=1e-3)


def test_a_config_that_agrees_with_the_engine_counts() -> None:
    resource = deployment()
    status = report_status(view(resource, report(sizes=SIZES)))
    assert load_shape(apply_report(resource, status)) == replace(SHAPE, name="new")


def test_engine_arguments_that_change_the_weights_are_no_difference() -> None:
    resource = deployment(engine={"type": "vLLM", "args": ["--quantization=fp8"]})
    fp8 = load_shape(
        deployment("qwen/Qwen3-8B", engine={"type": "vLLM", "args": ["--quantization=fp8"]})
    )
    status = report_status(view(resource, report(sizes=build_sizes(fp8))))
    assert find_condition(status)[:2] == ("True", "AsReported")
    changed = apply_report(resource, status)
    assert changed.spec.model.config is not None
    assert changed.spec.model.config.inline == model_report.select_config(CONFIG)


def test_weights_of_known_models_are_compared_too() -> None:
    sizes = replace(SIZES, weight_bytes=2 * SIZES.weight_bytes)
    known = view(deployment("qwen/Qwen3-8B"), report(sizes=sizes))
    state, reason, message = find_condition(report_status(known))
    assert (state, reason) == ("False", "Differs")
    assert f"has {sizes.weight_bytes:,} bytes of weights, plans count" in message


def test_a_report_of_an_earlier_version_has_no_sizes_and_plans_nothing_that_is_unknown() -> None:
    resource = deployment()
    status = report_status(view(resource, report(UNKNOWN)))
    assert find_condition(status)[:2] == ("False", "NotUsable")
    assert apply_report(resource, status) == resource


@pytest.mark.parametrize(
    "change",
    [
        {"layers": 10**12},
        {"layers": 0},
        {"hiddenSize": 0},
        {"linearWeights": 0},
        {"weightBytes": 0},
        {"vocabSize": 10**12},
        {"experts": 10**12, "expertLayers": 10**12, "expertWidth": 1, "expertMatrices": 3},
        {"attentionHeads": 7, "kvHeads": 3, "headSize": 1},
    ],
)
def test_sizes_that_no_model_has_are_planned_or_refused_in_one_line(
    change: dict[str, int],
) -> None:
    resource = deployment()
    own = json.loads(report(UNKNOWN, sizes=SIZES))
    status = report_status(view(resource, json.dumps({**own, "sizes": {**own["sizes"], **change}})))
    changed = apply_report(resource, status)
    if changed.spec.model.config is not None:
        load_shape(changed)
    assert "\n" not in find_condition(status)[2]


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[" * 100_000,
        "[" * 10_000,
        "[]",
        '{"config": {}}',
        '{"config": {"a": ' + "[" * 40 + "]" * 40 + '}, "maxModelLen": 1, "blockSize": 1}',
        '{"config": {}, "maxModelLen": -1, "blockSize": 1}',
        '{"config": {}, "maxModelLen": 1, "blockSize": 1, "dtype": "' + "x" * 65 + '"}',
        '{"config": {"a": "\\ud800"}, "maxModelLen": 1, "blockSize": 1}',
        '{"config": {}, "maxModelLen": 1e400, "blockSize": 1}',
        # The API server would refuse the whole status.
        '{"config": {"a": NaN}, "maxModelLen": 1, "blockSize": 1}',
        '{"config": {"a": [1e400]}, "maxModelLen": 1, "blockSize": 1}',
    ],
)
def test_what_a_hostile_worker_sends_changes_nothing(text: str) -> None:
    assert "reportedModel" not in report_status(view(deployment(), text))


def test_fields_of_a_later_version_are_skipped() -> None:
    text = json.dumps({**json.loads(report()), "experts": 8})
    assert "reportedModel" in report_status(view(deployment(), text))


@pytest.mark.parametrize("pod", [{"ready": False}, {"deleting": True}, {"revision": "older"}])
def test_only_ready_instances_of_the_present_revision_are_believed(pod: dict[str, Any]) -> None:
    assert "reportedModel" not in report_status(view(deployment(), report(), **pod))


def test_the_first_report_of_a_revision_stays() -> None:
    status = report_status(view(deployment(), report()))
    later = view(deployment(), report(kv_bytes=1), status)
    patches = [each for each in reconcile(later) if isinstance(each, PatchStatus)]
    assert all(each.status["reportedModel"] == status["reportedModel"] for each in patches)
    status["reportedModel"]["instanceRevision"] = "older"
    later = view(deployment(), report(kv_bytes=1), status)
    assert report_status(later)["reportedModel"]["cacheGroups"][0]["bytesPerToken"] == 1


def with_engines(seen: DeploymentView, *configs: dict | None) -> DeploymentView:
    """The view with instances `p0`, `p1`, ... that report these configs; None: nothing. Only the
    first instance with a config has the report, as gateways send it."""
    pods, instances, sent = [], {}, set()
    for number, config in enumerate(configs):
        name = f"p{number}"
        pods.append(replace(seen.pods[0], name=name, uid=name))
        instances[name] = FleetInstance(name)
        if config is not None:
            digest, text = model_report.compute_digest(config), report(config)
            instances[name] = FleetInstance(
                name, model_digest=digest, model_report="" if digest in sent else text
            )
            sent.add(digest)
    return replace(seen, pods=tuple(pods), instances=instances)


DEEPER = {**CONFIG, "num_hidden_layers": 48, "transformers_version": "5.1"}


def test_a_report_is_replaced_once_no_engine_reports_it_any_more() -> None:
    resource = deployment()
    status = report_status(with_engines(view(resource, ""), CONFIG, CONFIG))
    assert status["reportedModel"]["instance"] == "p0"
    for configs, layers in (
        ((DEEPER, CONFIG), 36),
        ((DEEPER, None), 36),
        ((None, None), 36),
        ((DEEPER, DEEPER), 48),
    ):
        actions = reconcile(with_engines(view(resource, "", status), *configs))
        patches = [each.status for each in actions if isinstance(each, PatchStatus)]
        later = patches[0] if patches else status
        assert later["reportedModel"]["config"]["num_hidden_layers"] == layers
    changed = [apply_report(resource, each).spec.model.config for each in (status, later)]
    assert changed[0] != changed[1]


def test_a_report_without_a_digest_is_replaced_by_one_that_has_it() -> None:
    status = report_status(with_engines(view(deployment(), ""), CONFIG))
    digest = status["reportedModel"].pop("configDigest")
    later = report_status(with_engines(view(deployment(), "", status), CONFIG))
    assert later["reportedModel"]["configDigest"] == digest


def test_engines_that_report_another_config_are_named_with_what_differs() -> None:
    seen = with_engines(view(deployment(), ""), CONFIG, CONFIG, DEEPER, None)
    status, reason, message = find_condition(report_status(seen))
    assert (status, reason) == ("False", "EnginesDiffer")
    ours, theirs = map(model_report.compute_digest, (CONFIG, DEEPER))
    assert message.startswith(
        f"1 of 3 engines report another config.json than p0 ({ours}), for which plans are made: "
        f"p2 ({theirs}) has num_hidden_layers 48 instead of 36; "
    )
