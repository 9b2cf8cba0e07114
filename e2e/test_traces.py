"""Traces and the access log of a deployment, enabled in its manifest."""

from pathlib import Path

import pytest

from e2e.support.deployments import deployed, emulated, until
from e2e.support.traces import CLIENT, TRACEPARENT, send_marked_prompt
from tests.support.otel_collector import read, serve_grpc


@pytest.mark.timeout(600)
def test_a_manifest_asks_for_traces_and_an_access_log(tmp_path: Path) -> None:
    manifest = emulated("traced", 1, 1)
    with serve_grpc() as (collector, url):
        tracing = {"endpoint": url, "share": 0.0}
        manifest["spec"]["gateway"] = {"tracing": tracing, "accessLog": True}
        with deployed(manifest, tmp_path, timeout_s=180) as deployment:
            send_marked_prompt(deployment.url, "traced")
            send_marked_prompt(deployment.url, "traced", traceparent=TRACEPARENT)
            until(lambda: collector.find("kv_transfer"), 60, "the spans have come")
            logs = deployment.cleave("logs", "traced").stdout
    server = collector.only("POST /v1/completions")
    assert server.parent_span_id == CLIENT.to_bytes(8)
    assert collector.find_parents("prefill") == collector.find_parents("decode") == ["attempt"]
    assert read(collector.only("prefill"))["cleave.handoff.blocks"] > 0
    access = [line for line in logs.splitlines() if "cleave.access" in line]
    assert len(access) == 2
    assert "trace_id=" + f"{0xABCDEF:032x}" in access[1]
    assert "MARKER" not in logs
