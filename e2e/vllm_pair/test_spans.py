"""vLLM continues the gateway's traces."""

import pytest

from e2e.support.deployments import Deployment, until
from e2e.support.traces import TRACEPARENT, send_marked_prompt
from tests.support.otel_collector import Collector

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


def test_spans_of_vllm_hang_below_the_calls_to_it(
    vllm_pair: Deployment, collector: tuple[Collector, str]
) -> None:
    received, _ = collector
    send_marked_prompt(vllm_pair.url, "tiny")
    send_marked_prompt(vllm_pair.url, "tiny", traceparent=TRACEPARENT)
    mine = (0xABCDEF).to_bytes(16)
    until(
        lambda: len([s for s in received.find("llm_request") if s.trace_id == mine]) == 2,
        30,
        "both engines' spans have come",
    )
    received.spans = [span for span in received.spans if span.trace_id == mine]
    assert received.find_parents("llm_request") == ["decode", "prefill"]
