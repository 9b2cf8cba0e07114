"""The queries of docs/observe.md: they name what is there, and Prometheus answers them."""

import json
import re
import subprocess
from pathlib import Path

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from cleave.rpc.v1 import agent_pb2

ROOT = Path(__file__).parents[3]
GUIDE = (ROOT / "docs" / "observe.md").read_text()
QUERIES = [
    (comment.removeprefix("# "), query)
    for block in re.findall(r"```promql\n(.*?)```", GUIDE, re.S)
    for part in block.strip().split("\n\n")
    for comment, *queries in [part.splitlines()]
    for query in queries
]
ALERT = "Worth an alert"
PANELS = [
    (f"{file.stem}: {panel['title']}", target["expr"])
    for file in sorted((ROOT / "charts" / "cleave" / "files" / "dashboards").glob("*.json"))
    for panel in json.loads(file.read_text())["panels"]
    for target in panel.get("targets", ())
]
"""Of Grafana's dashboards."""
GRAFANA = {"$namespace": ".*", "$model": ".*", "$__rate_interval": "5m"}
EMPTY_PANELS = {
    "pools: Cached share of prompts",
    "pools: KV lost",
    "pools: Rate of the slowest pair",
}
"""Panels that have nothing to show of a fleet in which all goes well, and which is not dispatched
by caches."""
NAMES = re.compile(r"\b(?:cleave_gateway_|vllm:)\w+")
SELECTORS = re.compile(r"\b((?:cleave_gateway_|vllm:)\w+)\{(.*?)\}")
TENANTS = """
tenants:
- {name: search, keys: [search-key-of-tenant]}
- {name: batch, keys: [batch-key-of-tenant], requestsPerMinute: 1}
"""
STREAM = {"model": "m", "stream": True, "max_tokens": 12, "ignore_eos": True}
MINUTE_S = 60.0


class Watched:
    """A fleet with a history, and what scrapes of it have returned so far."""

    def __init__(self, stage, engines, internal_port: int) -> None:
        self.stage = stage
        self.engines = engines
        self.internal_port = internal_port
        self.pages: list[dict] = []
        self.now = 0.0

    async def ask(self, key: str = "search-key-of-tenant") -> int:
        body = STREAM | {"prompt": "tell me a story " * 20}
        return (await self.stage.ask(body, authorization=f"Bearer {key}")).status

    async def scrape(self) -> None:
        """A minute later."""
        self.now += MINUTE_S
        for instance in self.stage.context.router.registry.instances.values():
            tokens, boot_id = round(50 * self.now), instance.registration.boot_id
            hits = {"prefix_cache_queries": tokens, "prefix_cache_hits": tokens // 2}
            instance.update_load(agent_pb2.LoadReport(boot_id=boot_id, **hits), self.now)
        urls = {name: engine.url for name, engine in self.engines.items()}
        urls["gateway"] = f"http://127.0.0.1:{self.internal_port}"
        async with aiohttp.ClientSession() as session:
            for name, url in urls.items():
                async with session.get(f"{url}/metrics") as answer:
                    self._keep(name, await answer.text())

    def _keep(self, instance: str, text: str) -> None:
        self.pages.append({"at": self.now, "labels": {"instance": instance}, "text": text})

    def list_labels(self) -> dict[str, set[str]]:
        """Of every series, by its name, over all pages."""
        found: dict[str, set[str]] = {}
        for page in self.pages:
            for family in text_string_to_metric_families(page["text"]):
                found.setdefault(family.name, set())
                for sample in family.samples:
                    found.setdefault(sample.name, set()).update(sample.labels)
        return found


@pytest.fixture
async def watched(make_fleet, internal_port, tmp_path):
    """Streams, one that outlived an engine, one that was shed; scraped before and after."""
    keys = tmp_path / "keys"
    keys.write_text(TENANTS)
    roles = {"p1": "prefill", "p2": "prefill", "d1": "decode", "d2": "decode"}
    slo = {"ttft_slo_ms": 5_000.0, "tpot_slo_ms": 500.0, "itl_p99_slo_ms": 900.0}
    settings = {"api_keys": keys, "internal_port": internal_port, "resume_s": 0.5}
    watched = Watched(*await make_fleet(roles, **settings, **slo), internal_port)
    for round_ in range(2):
        for _ in range(12):
            assert await watched.ask() == 200
        watched.engines["d1"].engine.faults.drop = 5
        assert await watched.ask() == 200
        assert await watched.ask() == 200
        watched.engines["d1"].engine.faults.clear()
        assert await watched.ask("batch-key-of-tenant") == (429 if round_ else 200)
        assert await watched.ask("batch-key-of-tenant") == 429
        # The witness would take turns with the requests above.
        watched.stage.context.metrics.canaries["good"] += 1
        await watched.scrape()
    return watched


async def test_the_guide_names_only_metrics_and_labels_that_there_are(watched) -> None:
    known = watched.list_labels()
    # Of counters without a series only the family's name is there.
    exported = known.keys() | {f"{name}_total" for name in known}
    assert {*NAMES.findall(GUIDE)} <= exported
    for name, matchers in SELECTORS.findall(GUIDE):
        labels = known.get(name) or known.get(f"{name}_count") or set()
        label_names = {re.split("[=!]", part)[0].strip() for part in matchers.split(",")}
        # What happens rarely has no series yet.
        assert not labels or label_names <= labels, name


def evaluate(watched: Watched, queries: list[str]) -> list[dict]:
    """Prometheus' answers at the time of the last scrape."""
    found = subprocess.run(
        [ROOT / "scripts" / "promql", "--built"], capture_output=True, text=True, check=False
    )
    if found.returncode:
        pytest.skip("Prometheus' query engine is not here; scripts/promql builds it")
    request = json.dumps({"pages": watched.pages, "queries": queries, "at": watched.now})
    completed = subprocess.run(
        [found.stdout.strip()], input=request, capture_output=True, text=True, check=True
    )
    return json.loads(completed.stdout)


async def test_every_query_of_the_guide_is_answered(watched) -> None:
    answers = evaluate(watched, [query for _, query in QUERIES])
    assert len(answers) == len(QUERIES) > 10
    for (comment, query), answer in zip(QUERIES, answers, strict=True):
        assert "error" not in answer, query
        values = [float(sample["value"]) for sample in answer["samples"]]
        if comment.startswith(ALERT):
            assert not values, f"{query} fires although all is well"
        else:
            assert values, f"{query} finds nothing"
            assert all(value == value for value in values), f"{query} is not a number"


def test_panels_lie_side_by_side_and_ask_the_chosen_source() -> None:
    assert len(PANELS) > 30
    for file in (ROOT / "charts" / "cleave" / "files" / "dashboards").glob("*.json"):
        board = json.loads(file.read_text())
        graphs = [panel for panel in board["panels"] if panel["type"] != "row"]
        assert all(panel["description"] for panel in graphs)
        assert {panel["datasource"]["uid"] for panel in graphs} == {"${datasource}"}
        places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in graphs]
        assert len({*places}) == len(places), "no panel covers another"


async def test_every_panel_of_the_dashboards_is_answered(watched) -> None:
    queries = [query for _, query in PANELS]
    for name, value in GRAFANA.items():
        queries = [query.replace(name, value) for query in queries]
    for (title, query), answer in zip(PANELS, evaluate(watched, queries), strict=True):
        assert "error" not in answer, query
        is_operators = "cleave_operator_" in query
        assert answer["samples"] or title in EMPTY_PANELS or is_operators, f"{title}: {query}"


async def test_attainment_is_exported_even_when_no_request_meets_the_targets(
    make_fleet, internal_port
) -> None:
    roles = {"p1": "prefill", "d1": "decode"}
    slo = {"ttft_slo_ms": 0.001, "tpot_slo_ms": 500.0}
    fleet = await make_fleet(roles, internal_port=internal_port, **slo)
    watched = Watched(*fleet, internal_port)
    for _ in range(2):
        assert await watched.ask() == 200
        await watched.scrape()
    attainment = next(query for comment, query in QUERIES if comment.startswith("SLO attainment"))
    ((sample,),) = [answer["samples"] for answer in evaluate(watched, [attainment])]
    assert float(sample["value"]) == 0


async def test_every_alert_of_the_guide_fires(watched) -> None:
    stage = watched.stage
    # As if prompts had waited long.
    for _ in range(100):
        stage.context.metrics.models["m"].ttft["prefill"].observe(60.0)
    for engine in stage.engines.values():
        stage.state(engine, state=agent_pb2.STATE_STARTING)
    for _ in range(2):
        assert await watched.ask() == 503
        await watched.scrape()
    alerts = [query for comment, query in QUERIES if comment.startswith(ALERT)]
    assert len(alerts) >= 3
    for query, answer in zip(alerts, evaluate(watched, alerts), strict=True):
        assert answer.get("samples"), f"{query} is silent: {answer}"
