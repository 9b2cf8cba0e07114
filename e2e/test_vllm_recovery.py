"""vLLM on CPU: a decode engine is killed, and its streams continue with the same tokens."""

import concurrent.futures
import json
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from e2e.support.deployments import Deployment, deployed, start_fast, tiny_vllm, until
from e2e.support.vllm_prompts import TIMEOUT_S, engine_url, metric

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
STREAMS, TOKENS = 3, 500
GENERATED = 'vllm:generation_tokens_total{engine="0",model_name="tiny"}'


@pytest.fixture
def vllm(tiny_model: Path, tmp_path: Path) -> Iterator[Deployment]:
    # Less than is usual for vLLM: the model is small.
    room = {"requests": {"memory": "4Gi"}, "limits": {"memory": "4Gi"}}
    engine = start_fast(connector="Cleave")
    manifest = tiny_vllm(tiny_model, engine=engine, template={"resources": room})
    with deployed(manifest, tmp_path, timeout_s=420) as deployment:
        yield deployment


def ask(url: str, number: int) -> str:
    """The text of one stream."""
    body = {
        "model": "tiny",
        "prompt": random.Random(number).choices(range(100, 400), k=300 + 50 * number),
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=2 * TIMEOUT_S)
    assert answer.text.endswith("data: [DONE]\n\n"), answer.text[-500:]
    events = [
        json.loads(line.removeprefix("data: "))
        for line in answer.text.splitlines()
        if line.startswith("data: {")
    ]
    return "".join(event["choices"][0]["text"] for event in events)


def test_streams_of_a_killed_engine_continue_with_the_same_tokens(vllm: Deployment) -> None:
    expected = [ask(vllm.url, number) for number in range(STREAMS)]
    assert all(expected)
    decode, engine = engine_url(vllm, "decode"), vllm.engine("tiny-decode-0")
    generated = metric(decode, GENERATED)
    with concurrent.futures.ThreadPoolExecutor(STREAMS) as pool:
        streams = [pool.submit(ask, vllm.url, number) for number in range(STREAMS)]
        until(
            lambda: metric(decode, GENERATED) >= generated + STREAMS * TOKENS / 4,
            TIMEOUT_S,
            "the streams are under way",
        )
        os.kill(engine.pid, signal.SIGKILL)
        assert [each.result(4 * TIMEOUT_S) for each in streams] == expected
    how = 'cleave_gateway_recoveries_total{how="continued",model="tiny"}'
    assert metric(vllm.url, how) > 0
