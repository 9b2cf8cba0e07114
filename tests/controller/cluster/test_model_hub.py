"""config.json from a server like Hugging Face: what is read, kept, refused and tried again."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest
from aiohttp import web

from cleave.api.model import ModelSpec
from cleave.controller.cluster.model_hub import RETRY_S, HubAnswer, ModelHub
from cleave.perf.model.known_models import CONFIGS

CONFIG = {**CONFIGS["qwen3-8b"], "id2label": {"0": "LABEL_0"}}
MODEL = ModelSpec(source="org/new")


@dataclass
class Hub:
    """A server that answers each path with a text or a status."""

    url: str = ""
    answers: dict[str, str | int] = field(default_factory=dict)
    seen: list[tuple[str, str | None]] = field(default_factory=list)
    """Path and Authorization of each request."""

    async def answer(self, request: web.Request) -> web.Response:
        self.seen.append((request.raw_path, request.headers.get("Authorization")))
        found = self.answers.get(request.raw_path, 404)
        if isinstance(found, int):
            return web.Response(status=found)
        if found.startswith(("/", "http")):
            return web.Response(status=307, headers={"Location": found})
        return web.Response(text=found)


@pytest.fixture
async def hub() -> AsyncIterator[Hub]:
    found = Hub()
    app = web.Application()
    app.router.add_get("/{path:.*}", found.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0]
    found.url = f"http://{host}:{port}"
    yield found
    await runner.cleanup()


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


async def find(reader: ModelHub, model: ModelSpec = MODEL) -> HubAnswer:
    """The answer, once it is there."""
    is_read = asyncio.Event()
    if (known := reader.find(model, is_read.set)) is not None:
        return known
    async with asyncio.timeout(20):
        await is_read.wait()
    answer = reader.find(model, is_read.set)
    assert answer is not None
    return answer


PATH = "/org/new/resolve/main/config.json"
BESIDE = "/org/new/resolve/main/hf_quant_config.json"


async def test_what_plans_read_is_kept_and_read_once(hub: Hub) -> None:
    hub.answers[PATH] = "/moved"
    hub.answers["/moved"] = json.dumps(CONFIG)
    reader = ModelHub(hub.url + "/", Clock())
    config = (await find(reader)).config
    assert config == {name: each for name, each in CONFIG.items() if name != "id2label"}
    assert (await find(reader, ModelSpec(source="hf://org/new"))).config == config
    assert [path for path, _ in hub.seen] == [PATH, "/moved", BESIDE]


async def test_deployments_of_one_model_share_a_read(hub: Hub) -> None:
    hub.answers[PATH] = json.dumps(CONFIG)
    reader, ends = ModelHub(hub.url, Clock()), asyncio.Queue[int]()
    for number in range(5):
        assert reader.find(MODEL, lambda number=number: ends.put_nowait(number)) is None
    async with asyncio.timeout(20):
        assert [await ends.get() for _ in range(5)] == [*range(5)]
    assert [path for path, _ in hub.seen] == [PATH, BESIDE]


async def test_quantisation_may_be_in_a_file_beside_the_config(hub: Hub) -> None:
    quantization = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4"}}
    hub.answers = {PATH: json.dumps(CONFIG), BESIDE: json.dumps(quantization)}
    config = (await find(ModelHub(hub.url, Clock()))).config
    assert config is not None
    assert config["quantization_config"] == quantization


async def test_a_config_with_quantisation_is_all_that_is_read(hub: Hub) -> None:
    hub.answers[PATH] = json.dumps({**CONFIG, "quantization_config": {"quant_method": "fp8"}})
    assert (await find(ModelHub(hub.url, Clock()))).config
    assert [path for path, _ in hub.seen] == [PATH]


async def test_a_file_beside_the_config_that_cannot_be_read_is_a_fault(hub: Hub) -> None:
    hub.answers = {PATH: json.dumps(CONFIG), BESIDE: 500}
    assert "it answers 500" in (await find(ModelHub(hub.url, Clock()))).fault


async def test_a_revision_is_one_part_of_the_path(hub: Hub) -> None:
    path = "/org/new/resolve/refs%2Fpr%2F1/config.json"
    hub.answers[path] = json.dumps(CONFIG)
    model = ModelSpec(source="org/new", revision="refs/pr/1")
    assert (await find(ModelHub(hub.url, Clock()), model)).config
    assert hub.seen[0] == (path, None)


async def test_a_token_is_sent_to_the_hub_and_to_no_other_host(
    hub: Hub, caplog: pytest.LogCaptureFixture
) -> None:
    other = hub.url.replace("127.0.0.1", "localhost")
    hub.answers[PATH] = f"{other}/elsewhere"
    hub.answers["/elsewhere"] = "[]"
    # A Secret made of `echo TOKEN` ends in a newline.
    assert (await find(ModelHub(hub.url, Clock(), "secret\n"))).config is None
    assert hub.seen == [(PATH, "Bearer secret"), ("/elsewhere", None)]
    assert "secret" not in caplog.text


async def test_a_token_that_no_header_can_have_is_a_fault() -> None:
    assert (await find(ModelHub("http://127.0.0.1:1", Clock(), "a\nb"))).fault


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (401, "it answers 401"),
        (500, "it answers 500"),
        ("[]", "it holds no object"),
        ("{ [", "is no JSON"),
        ("{}", "model_type is missing"),
        (" " * 300_000, "longer than 262,144 bytes"),
    ],
)
async def test_what_is_not_usable_is_logged_and_tried_again_later(
    hub: Hub, caplog: pytest.LogCaptureFixture, answer: str | int, why: str
) -> None:
    clock = Clock()
    hub.answers[PATH] = answer
    reader = ModelHub(hub.url, clock)
    first = await find(reader)
    assert first.config is None
    assert why in first.fault
    requests = len(hub.seen)
    assert await find(reader) is first
    assert len(hub.seen) == requests
    assert f"config.json of org/new on {hub.url}" in caplog.text
    clock.now_s += RETRY_S
    hub.answers[PATH] = json.dumps(CONFIG)
    is_read = asyncio.Event()
    assert reader.find(MODEL, is_read.set) is first, "it holds while it is read again"
    async with asyncio.timeout(20):
        await is_read.wait()
    assert (await find(reader)).config


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "http://127.0.0.1:no-port"])
async def test_a_hub_that_cannot_be_reached_is_a_fault(url: str) -> None:
    assert (await find(ModelHub(url, Clock()))).fault


async def test_endless_redirects_end(hub: Hub) -> None:
    hub.answers[PATH] = PATH
    assert (await find(ModelHub(hub.url, Clock()))).fault
    assert len(hub.seen) <= 4
