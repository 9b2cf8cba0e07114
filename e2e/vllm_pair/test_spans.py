"""vLLM continues the gateway's traces."""

import secrets

import pytest

from e2e.support.deployments import Deployment, until
from e2e.support.traces import CLIENT, send_marked_prompt
from tests.support.otel_collector import Collector

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


def test_spans_of_vllm_hang_below_the_calls_to_it(
    vllm_pair: Deployment, collector: tuple[Collector, str]
) -> None:
    received, _ = collector
    mine = secrets.token_bytes(16)
    send_marked_prompt(vllm_pair.url, "tiny")
    traceparent = f"00-{mine.hex()}-{CLIENT:016x}-01"
    send_marked_prompt(vllm_pair.url, "tiny", traceparent=traceparent)

    def find_parents() -> list[str]:
        of_mine = Collector()
        of_mine.spans = [span for span in received.spans if span.trace_id == mine]
        return of_mine.find_parents("llm_request")

    # Gateway and engines send their spans at different times.
    until(
        lambda: find_parents() == ["decode", "prefill"],
        120,
        "both engines' spans have come, and the gateway's above them",
    )
