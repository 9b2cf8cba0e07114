"""Deployments with status, pools and traffic, as the input of reconciles."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from cleave.api.deployment import LLMDeployment
from cleave.api.replan_status import CurrentPrediction, LatencyCorrection
from cleave.api.workload import LengthDistribution, Workload
from cleave.controller.cluster.actions import PlanJob, ReviewResult
from cleave.controller.cluster.inventory import build_inventory
from cleave.controller.cluster.objects import ObservedChild, format_timestamp
from cleave.controller.replan.inputs import PlanInputs, read_placement
from cleave.controller.replan.reconcile import update_drift
from cleave.controller.views import DeploymentView, DriftState
from cleave.gateway.metrics.gateway_metrics import TPOT_BOUNDS_S, TTFT_BOUNDS_S
from cleave.manifests.credentials import name_accounts
from cleave.manifests.labels import Manifest
from cleave.manifests.pool import build_pools
from cleave.planner.replan.revision import ReplanVerdict
from cleave.planner.resolved_deployment import resolve_in_cluster
from cleave.traffic.window import TrafficWindow
from cleave.traffic.workload import build_from_spec

from tests.support.fake_cluster import chat
from tests.support.traffic_windows import PERIOD_S, count, draw

NOW_S = 1_700_000_000.0
INVENTORY = build_inventory([])
DECLARED = {"rate": 4, "promptTokens": {"mean": 300}, "outputTokens": {"mean": 30}}
POOLS = [{"role": "prefill", "replicas": 1}, {"role": "decode", "replicas": 1}]
MORE = [{"role": "prefill", "replicas": 1}, {"role": "decode", "replicas": 3}]
INTERVAL_S = 300


def deployment(replan: Manifest | None = None, **spec: Any) -> LLMDeployment:
    planning = {**spec.pop("planning", {}), "replan": replan or {}}
    manifest = chat(**{"workload": DECLARED, "planning": planning, **spec})
    meta = {**manifest["metadata"], "uid": "u1", "resourceVersion": "7", "generation": 2}
    meta["finalizers"] = ["cleave.dev/drain"]
    return LLMDeployment.model_validate({**manifest, "metadata": meta})


def plan(digest: str, pools: list[Manifest] = POOLS) -> Manifest:
    base = {"revision": "a", "reason": "it is enough", "gpus": 2}
    return {**base, "pools": pools, "inputs": digest}


def status(
    deployment_object: LLMDeployment, settled_s: float = NOW_S - 1000, **more: Any
) -> Manifest:
    """The status of a deployment whose plan has been applied since `settled_s`."""
    condition = {
        "type": "Progressing",
        "status": "False",
        "reason": "Settled",
        "message": "",
        "lastTransitionTime": format_timestamp(settled_s),
    }
    return {
        "plan": plan(PlanInputs(resolve_in_cluster(deployment_object), INVENTORY).hash_with(None)),
        "conditions": [condition],
        **more,
    }


def traffic(rate: float, seconds: float = 450, end_s: float = NOW_S) -> tuple[TrafficWindow, ...]:
    """Windows of requests with default lengths at `rate` until `end_s`, with short latencies."""
    return tuple(map(_answered, ask(rate, seconds, end_s)))


def _answered(window: TrafficWindow) -> TrafficWindow:
    num = int(window.prompts.num)
    ttft, tpot = count(np.full(num, 0.1), TTFT_BOUNDS_S), count(np.full(num, 0.02), TPOT_BOUNDS_S)
    return replace(window, ttft=ttft, tpot=tpot)


def ask(rate: float, seconds: float = 450, end_s: float = NOW_S) -> tuple[TrafficWindow, ...]:
    """The same without latencies."""
    workload = Workload(
        rate=rate,
        prompt_tokens=LengthDistribution(mean=300, p90=400),
        output_tokens=LengthDistribution(mean=30, p90=40),
    )
    periods = round(seconds / PERIOD_S)
    return tuple(draw(build_from_spec(workload, Path()), periods, end_s - seconds))


def own_accounts(deployment_object: LLMDeployment) -> dict[tuple[str, str], ObservedChild]:
    """The service accounts of a deployment, as the first step of a reconcile makes them."""
    namespace, uid = deployment_object.namespace, deployment_object.metadata.uid or ""
    names = name_accounts(namespace, deployment_object.name, uid).names
    kind = "ServiceAccount"
    return {(kind, name): ObservedChild(kind, namespace, name, "", "") for name in names}


def view(deployment_object: LLMDeployment, status: Manifest, **fields: Any) -> DeploymentView:
    """The controller's view of a deployment, with drift computed from `windows`."""
    pools = build_pools(resolve_in_cluster(deployment_object), read_placement(status["plan"]))
    drift = update_drift(DriftState(), deployment_object, status, fields.get("windows", ()))
    return DeploymentView(
        resolve_in_cluster(deployment_object),
        INVENTORY,
        NOW_S,
        status=status,
        pools=tuple(pools),
        drift=drift,
        **{"children": own_accounts(deployment_object), **fields},
    )


def reviewed(
    question: PlanJob,
    verdict: ReplanVerdict,
    deployment_object: LLMDeployment,
    *,
    holds: bool = True,
    decode: float = 1.0,
    pools: list[Manifest] | None = None,
) -> PlanJob:
    """The planner's result of the review `question`."""
    assert question.review is not None
    at = format_timestamp(question.review.at_s)
    prediction = CurrentPrediction.model_validate({"at": at, "attainment": 0.9, "error": 0.1})
    model_hash = PlanInputs(resolve_in_cluster(deployment_object), INVENTORY).model_hash
    correction = None if decode == 1 else LatencyCorrection(decode=decode, of=model_hash)
    result = ReviewResult(verdict, "because", holds, "it holds", prediction, correction)
    return replace(question, review_result=result, plan=plan("", pools) if pools else None)
