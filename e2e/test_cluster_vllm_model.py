"""A model that Cleave does not know, with vLLM on a real control plane: the smallest pair serves it
until vLLM has reported the model, and the plan that follows from the report serves it then.

Run by `make e2e-vllm`: three engines start one after the other.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from cleave.perf.model import model_report

from e2e.cluster.cluster import Cluster
from e2e.test_cluster_operator import Chat, condition
from e2e.test_cluster_scaling import homes
from e2e.test_cluster_vllm import START_S, serving_vllm

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200)]


@pytest.fixture
def chat(cluster: Cluster, namespace: str, tiny_model: Path) -> Iterator[Chat]:
    """Without config and placement; ready once the plan's instances serve instead of the pair."""
    workload = {"rate": 1, "promptTokens": {"mean": 100}, "outputTokens": {"mean": 20}}
    planning = {"maxGPUs": 2}
    with serving_vllm(
        cluster, namespace, tiny_model, 2 * START_S, workload=workload, planning=planning
    ) as found:
        yield found


def test_what_vllm_reports_is_planned_and_serves(chat: Chat, tiny_model: Path) -> None:
    reported = chat.deployment["status"]["reportedModel"]
    config = json.loads((tiny_model / "config.json").read_text())
    assert reported["config"] == model_report.select_config(config)
    assert condition(chat.deployment, "ModelAsReported") == "True"
    # One instance that computes both phases holds the traffic of such a small model.
    assert homes(chat) == {"mixed": 1}
    assert condition(chat.deployment, "PlanReady") == "True"
    assert chat.ask(tokens=12) == ""
