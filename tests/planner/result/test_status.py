"""Plans in the resource's own words."""

import json
from dataclasses import replace

from cleave.api.manifest import validate
from cleave.planner.plan import EMULATED_GPU
from cleave.planner.result.status import build_document, build_manual_placement, build_plan_option


def test_latencies_that_never_end_are_absent(answer) -> None:
    endless = build_plan_option(answer.alternatives[-1])
    assert endless.predicted.ttft_ms.p50 == 380.0
    assert endless.predicted.ttft_ms.p99 is None
    json.dumps(endless.model_dump(mode="json"), allow_nan=False)


def test_the_document_contains_verdict_plan_and_the_requested_alternatives(answer) -> None:
    document = build_document(answer, 2)
    assert document["verdict"] == "Disaggregate"
    assert [pool["role"] for pool in document["selected"]["pools"]] == ["prefill", "decode"]
    assert len(document["alternatives"]) == 2
    assert json.loads(json.dumps(document, allow_nan=False)) == document


def test_an_infeasible_answer_names_the_nearest_slo(infeasible) -> None:
    document = build_document(infeasible, 5)
    assert document["selected"] is None
    assert document["nearestSlo"]["ttftMs"] == 180.0


def test_the_placement_block_is_one_that_a_manifest_takes(answer) -> None:
    spec = {"model": "org/model", "slo": {"ttftMs": 1, "tpotMs": 1}}
    deployment = validate(
        {
            "apiVersion": "cleave.dev/v1alpha1",
            "kind": "LLMDeployment",
            "metadata": {"name": "chat"},
            "spec": {**spec, "placement": build_manual_placement(answer.selected)},
        }
    )
    prefill, decode = deployment.spec.placement.manual
    assert (prefill.replicas, prefill.parallelism.tensor, prefill.max_num_seqs) == (2, 2, 256)
    assert decode.role == "decode"


def test_the_placement_block_keeps_kinds_of_gpu_but_not_the_emulated_one(answer) -> None:
    gpus = [pool["gpu"] for pool in build_manual_placement(answer.selected)["manual"]]
    assert gpus == ["A100-SXM-80GB", "A100-SXM-80GB"]
    pools = tuple(replace(pool, gpu=EMULATED_GPU) for pool in answer.selected.pools)
    emulated = replace(answer.selected, pools=pools)
    assert all("gpu" not in pool for pool in build_manual_placement(emulated)["manual"])
