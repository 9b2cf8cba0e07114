"""Traces and the access log of a deployment, enabled in its manifest."""

from pathlib import Path

import httpx
import pytest

from e2e.support.deployments import Deployment, deployed, until
from tests.support.otel_collector import Collector, read, serve_grpc

PROMPT = "MARKER-PROMPT and some more words"
CLIENT = 0xC11E47
TRACEPARENT = f"00-{0xABCDEF:032x}-{CLIENT:016x}-01"


def build_manifest(spec: dict[str, object], url: str, share: float) -> dict[str, object]:
    return {
        "apiVersion": "cleave.dev/v1alpha1",
        "kind": "LLMDeployment",
        "metadata": {"name": "traced"},
        "spec": {
            "slo": {"ttftMs": 1000, "tpotMs": 200},
            "gateway": {"tracing": {"endpoint": url, "share": share}, "accessLog": True},
            **spec,
        },
    }


def ask(url: str, model: str, **headers: str) -> None:
    body = {"model": model, "prompt": PROMPT, "max_tokens": 4, "stream": True}
    answer = httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=60)
    assert answer.text.endswith("data: [DONE]\n\n")


def find_parents(collector: Collector, name: str) -> list[str]:
    """Names of the parents of all spans of this name."""
    names = {span.span_id: span.name for span in collector.spans}
    return sorted(names.get(span.parent_span_id, "") for span in collector.find(name))


def test_a_manifest_asks_for_traces_and_an_access_log(tmp_path: Path) -> None:
    emulated = {"model": "facebook/opt-13b", "engine": {"type": "Emulated"}}
    with serve_grpc() as (collector, url):
        manifest = build_manifest(emulated, url, share=0.0)
        with deployed(manifest, tmp_path, timeout_s=60) as deployment:
            ask(deployment.url, "facebook/opt-13b")
            ask(deployment.url, "facebook/opt-13b", traceparent=TRACEPARENT)
            until(lambda: collector.find("kv_transfer"), 20, "the spans have come")
            logs = deployment.cleave("logs", "traced").stdout
    server = collector.only("POST /v1/completions")
    assert server.parent_span_id == CLIENT.to_bytes(8)
    assert find_parents(collector, "prefill") == find_parents(collector, "decode") == ["attempt"]
    assert read(collector.only("prefill"))["cleave.handoff.blocks"] > 0
    access = [line for line in logs.splitlines() if "cleave.access" in line]
    assert len(access) == 2
    assert "trace_id=" + f"{0xABCDEF:032x}" in access[1]
    assert "MARKER" not in logs


@pytest.mark.vllm
@pytest.mark.timeout(600)
def test_spans_of_vllm_hang_below_the_calls_to_it(
    vllm_pair: Deployment, collector: tuple[Collector, str]
) -> None:
    received, _ = collector
    ask(vllm_pair.url, "tiny")
    ask(vllm_pair.url, "tiny", traceparent=TRACEPARENT)
    mine = (0xABCDEF).to_bytes(16)
    until(
        lambda: len([s for s in received.find("llm_request") if s.trace_id == mine]) == 2,
        30,
        "both engines' spans have come",
    )
    received.spans = [span for span in received.spans if span.trace_id == mine]
    assert find_parents(received, "llm_request") == ["decode", "prefill"]
