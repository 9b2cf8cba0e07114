"""Models that Cleave does not know: planned from a ConfigMap, and from what an engine reports."""

import json
import secrets
from pathlib import Path

import pytest

from cleave.api.deployment import LLMDeployment
from cleave.controller.cluster.inventory import build_inventory
from cleave.controller.cluster.reported_model import apply_report
from cleave.controller.replan.inputs import PlanInputs
from cleave.perf.model import model_report
from cleave.planner.resolved_deployment import resolve_in_cluster

from e2e.cluster.cluster import Cluster, wait_until
from e2e.test_cluster_operator import (
    READY_S,
    Chat,
    condition,
    deployed,
    installed,
    message,
    read_log,
)

__all__ = ["installed"]
pytestmark = pytest.mark.timeout(900)

CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 12,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "intermediate_size": 4096,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}
KV_BYTES = 12 * 2 * 4 * 64 * 2


def manifest(model: dict[str, object]) -> str:
    """A deployment whose instances are planned."""
    spec = {
        "model": {"servedName": "chat", **model},
        "slo": {"ttftMs": 400, "tpotMs": 40},
        "engine": {"type": "Emulated", "emulated": {"timeScale": 0.2}},
        "workload": {"rate": 2, "promptTokens": {"mean": 200}, "outputTokens": {"mean": 20}},
        "planning": {"maxGPUs": 4},
    }
    head = {"apiVersion": "cleave.dev/v1alpha1", "kind": "LLMDeployment"}
    return json.dumps({**head, "metadata": {"name": "chat"}, "spec": spec})


def read_deployment(chat: Chat) -> LLMDeployment:
    """The deployment as the operator's decisions see it, with a reported config in place."""
    found = chat.deployment
    document = {name: found[name] for name in ("apiVersion", "kind", "spec")}
    document["metadata"] = {"name": "chat", "namespace": chat.namespace}
    parsed = LLMDeployment.model_validate_json(json.dumps(document))
    return apply_report(parsed, found.get("status", {}))


def is_planned(chat: Chat) -> bool:
    """Whether the plan in force was made from the present inputs."""
    inputs = PlanInputs(resolve_in_cluster(read_deployment(chat)), build_inventory([]))
    plan = chat.deployment.get("status", {}).get("plan") or {}
    return chat.is_ready() and plan.get("inputs") == inputs.hash_with(None)


def test_an_unknown_model_is_planned_from_what_its_first_engine_reports(
    installed: Cluster, namespace: str, tmp_path: Path
) -> None:
    folder = tmp_path / f"unknown-{secrets.token_hex(4)}"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**CONFIG, "id2label": {"0": "LABEL_0"}}))
    for path in (folder, *folder.parents):
        if path.is_relative_to(tmp_path.parent.parent):
            path.chmod(0o755)
    with deployed(installed, namespace, manifest({"source": str(folder)})) as chat:
        try:
            wait_until(lambda: "reportedModel" in chat.deployment["status"], 120, "it is reported")
            reported = chat.deployment["status"]["reportedModel"]
            assert reported["config"] == model_report.select_config(CONFIG)
            assert reported["source"] == str(folder)
            assert [each["bytesPerToken"] for each in reported["cacheGroups"]] == [KV_BYTES]
            assert condition(chat.deployment, "ModelAsReported") == "True"
            assert read_deployment(chat).spec.model.config is not None
            wait_until(lambda: is_planned(chat), READY_S, "the plan counts with the reported model")
            assert condition(chat.deployment, "PlanReady") == "True"
            assert chat.ask() == ""
        except AssertionError as error:
            raise AssertionError(f"{error}\n{read_log(installed, namespace)}") from error


def test_a_model_is_planned_from_a_config_map(installed: Cluster, namespace: str) -> None:
    source = {
        "source": "org/unknown-1",
        "config": {"configMapKeyRef": {"name": "unknown", "key": "config.json"}},
    }
    chat = Chat(installed, namespace)
    installed.kubectl("apply", "-n", namespace, "-f", "-", input=manifest(source))
    try:
        wait_until(
            lambda: "does not exist" in message(chat.deployment, "PlanReady"), 120, "it is missed"
        )
        assert not chat.workers()
        text = json.dumps(CONFIG, indent=2)
        installed.kubectl(
            *("create", "configmap", "unknown", "-n", namespace),
            f"--from-literal=config.json={text}",
        )
        # It is read once a minute.
        chat.until_ready()
        assert condition(chat.deployment, "PlanReady") == "True"
        assert chat.ask() == ""
    finally:
        installed.kubectl("delete", "llmd", "--all", "-n", namespace, timeout_s=180)
