"""config.json from a server like Hugging Face: what is read, kept, refused and tried again."""

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest
from aiohttp import web

from cleave.api.model import ModelSpec
from cleave.controller.cluster.model_hub import RETRY_S, ModelHub
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


PATH = "/org/new/resolve/main/config.json"


async def test_what_plans_read_is_kept_and_read_once(hub: Hub) -> None:
    hub.answers[PATH] = "/moved"
    hub.answers["/moved"] = json.dumps(CONFIG)
    reader = ModelHub(hub.url + "/", Clock())
    config = await reader.read_config(MODEL)
    assert config == {name: each for name, each in CONFIG.items() if name != "id2label"}
    assert await reader.read_config(ModelSpec(source="hf://org/new")) == config
    assert [path for path, _ in hub.seen] == [PATH, "/moved"]


async def test_a_revision_is_one_part_of_the_path(hub: Hub) -> None:
    path = "/org/new/resolve/refs%2Fpr%2F1/config.json"
    hub.answers[path] = json.dumps(CONFIG)
    model = ModelSpec(source="org/new", revision="refs/pr/1")
    assert await ModelHub(hub.url, Clock()).read_config(model)
    assert hub.seen == [(path, None)]


async def test_a_token_is_sent_to_the_hub_and_to_no_other_host(
    hub: Hub, caplog: pytest.LogCaptureFixture
) -> None:
    other = hub.url.replace("127.0.0.1", "localhost")
    hub.answers[PATH] = f"{other}/elsewhere"
    hub.answers["/elsewhere"] = "[]"
    assert await ModelHub(hub.url, Clock(), "secret").read_config(MODEL) is None
    assert hub.seen == [(PATH, "Bearer secret"), ("/elsewhere", None)]
    assert "secret" not in caplog.text


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (401, "it answers 401"),
        (500, "it answers 500"),
        ("[]", "it holds no object"),
        ("{ [", "is no JSON"),
        ("{}", "hidden_size"),
        (" " * 300_000, "longer than 262,144 bytes"),
    ],
)
async def test_what_is_not_usable_is_logged_and_tried_again_later(
    hub: Hub, caplog: pytest.LogCaptureFixture, answer: str | int, why: str
) -> None:
    clock = Clock()
    hub.answers[PATH] = answer
    reader = ModelHub(hub.url, clock)
    assert await reader.read_config(MODEL) is None
    assert await reader.read_config(MODEL) is None
    assert len(hub.seen) == 1
    assert f"config.json of org/new is not read from {hub.url}" in caplog.text
    assert why in caplog.text
    clock.now_s += RETRY_S
    hub.answers[PATH] = json.dumps(CONFIG)
    assert await reader.read_config(MODEL)


async def test_a_hub_that_is_away_is_none() -> None:
    assert await ModelHub("http://127.0.0.1:1", Clock()).read_config(MODEL) is None


async def test_endless_redirects_end(hub: Hub) -> None:
    hub.answers[PATH] = PATH
    assert await ModelHub(hub.url, Clock()).read_config(MODEL) is None
    assert len(hub.seen) <= 4
