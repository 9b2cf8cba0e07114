"""vLLM on CPU with checkpoints: a decode engine is killed, its streams go on from their KV."""

import concurrent.futures
import json
import os
import random
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from e2e.support.deployments import Deployment, deployed, start_fast, tiny_vllm, until
from e2e.support.vllm_prompts import TIMEOUT_S, engine_url, metric

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
STREAMS, TOKENS = 3, 500
SOURCES = "vllm:prompt_tokens_by_source_total"


@pytest.fixture
def checkpoint_folder() -> Iterator[Path]:
    """A folder in memory: no checkpoint is written to a disk that is nearly full."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.fixture
def vllm(tiny_model: Path, tmp_path: Path, checkpoint_folder: Path) -> Iterator[Deployment]:
    settings = {"kv_connector_extra_config": {"checkpoints": {"folder": str(checkpoint_folder)}}}
    args = ["--kv-transfer-config", json.dumps(settings)]
    engine = start_fast(connector="Cleave", args=args)
    # Less than is usual for vLLM: the model is small.
    room = {"requests": {"memory": "4Gi"}, "limits": {"memory": "4Gi"}}
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


def files(checkpoint_folder: Path) -> int:
    return len(list(checkpoint_folder.glob("*-0")))


def test_streams_of_a_killed_engine_go_on_from_checkpoints(
    vllm: Deployment, checkpoint_folder: Path
) -> None:
    expected = [ask(vllm.url, number) for number in range(STREAMS)]
    assert all(expected)
    # The engine's next step hears of the last stream's end, and a thread removes the files.
    until(lambda: not files(checkpoint_folder), TIMEOUT_S, "no checkpoint outlives its stream")
    prefill = engine_url(vllm, "prefill")
    restored, cached = (
        metric(prefill, f'{SOURCES}{{engine="0",model_name="tiny",source="{source}"}}')
        for source in ("external_kv_transfer", "local_cache_hit")
    )
    engine = vllm.engine("tiny-decode-0")
    with concurrent.futures.ThreadPoolExecutor(STREAMS) as pool:
        streams = [pool.submit(ask, vllm.url, number) for number in range(STREAMS)]
        # Prompts alone have two blocks and more each; these hold answers, too.
        until(
            lambda: files(checkpoint_folder) >= 4 * STREAMS, TIMEOUT_S, "answers have checkpoints"
        )
        os.kill(engine.pid, signal.SIGKILL)
        assert [each.result(4 * TIMEOUT_S) for each in streams] == expected
    for source, before in (("external_kv_transfer", restored), ("local_cache_hit", cached)):
        name = f'{SOURCES}{{engine="0",model_name="tiny",source="{source}"}}'
        assert metric(prefill, name) > before, source
    how = 'cleave_gateway_recoveries_total{how="continued",model="tiny"}'
    assert metric(vllm.url, how) > 0
