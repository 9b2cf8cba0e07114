"""An engine gets the adapters that are ordered, over its HTTP API."""

import asyncio
import contextlib
import json
import os
import signal
import urllib.request
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from aiohttp import web

from cleave.policy.adapters import AdapterSource, format_adapters, hash_adapters
from cleave.rpc.v1 import agent_pb2
from cleave_worker.agent.adapters.adapter_keeper import keep_loaded
from cleave_worker.agent.config import AgentConfig
from cleave_worker.agent.instance import AdaptersRefused, StaleAdapters, WorkerInstance
from cleave_worker.agent.weights import model_hub

SECONDS = 20
EMULATED = ("--engine", "emulated", "--model", "opt-13b", "--served-model-name", "m")
FAST = ("--time-scale", "0.1")
OLD, NEW = AdapterSource("sql", "/a/1"), AdapterSource("sql", "/a/2")
LAW = AdapterSource("law", "/a/law")


@dataclass
class Engine:
    """An engine's paths for adapters."""

    url: str
    instance: WorkerInstance
    config: AgentConfig
    loaded: list[str]
    calls: list[str]
    faults: dict[str, int]
    """How often loading from a source fails."""
    paths: list[str] = field(default_factory=list)
    """From where adapters were loaded."""
    on_load: Callable[[], object] = lambda: None

    def start(self) -> asyncio.Task[None]:
        run = keep_loaded(self.config, self.instance, self.url, {"x-key": "k"})
        return asyncio.create_task(run)

    @property
    def reported(self) -> list[tuple[str, bool, str]]:
        """(engine name, loaded, fault) of each adapter that the agent reports."""
        registration = self.instance.copy_registration()
        return [(e.engine_name, e.loaded, e.fault) for e in registration.runtime_adapters]

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(SECONDS):
            while not condition():
                await self.instance.wait_for_change(0.02)


@pytest.fixture
async def engine(config: AgentConfig) -> AsyncIterator[Engine]:
    loaded: list[str] = []
    calls: list[str] = []
    faults: dict[str, int] = {}

    async def load(request: web.Request) -> web.Response:
        assert request.headers["x-key"] == "k"
        body = await request.json()
        calls.append(f"load {body['lora_name']}")
        engine.paths.append(body["lora_path"])
        engine.on_load()
        if faults.get(body["lora_path"], 0) > 0:
            faults[body["lora_path"]] -= 1
            message = f"Loading lora {body['lora_name']} failed: rank 64 is above max_lora_rank"
            return web.json_response({"error": {"message": message}}, status=500)
        if body["lora_name"] in loaded:
            return web.json_response({"error": {"message": "already loaded"}}, status=400)
        loaded.append(body["lora_name"])
        return web.Response(text="Success")

    async def unload(request: web.Request) -> web.Response:
        name = (await request.json())["lora_name"]
        calls.append(f"unload {name}")
        loaded.remove(name)
        return web.Response(text="Success")

    async def list_models(_: web.Request) -> web.Response:
        cards = [{"id": "m", "parent": None}, *({"id": n, "parent": "m"} for n in loaded)]
        return web.json_response({"data": cards})

    app = web.Application()
    app.router.add_post("/v1/load_lora_adapter", load)
    app.router.add_post("/v1/unload_lora_adapter", unload)
    app.router.add_get("/v1/models", list_models)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    timing = replace(config.timing, adapter_overlap=0.05, adapter_linger=0.05, adapter_check=0.1)
    config = replace(config, engine_args=("--enable-lora",), timing=timing)
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    engine = Engine(url, WorkerInstance(config), config, loaded, calls, faults)
    yield engine
    await runner.cleanup()


@contextlib.asynccontextmanager
async def running(engine: Engine) -> AsyncIterator[None]:
    task = engine.start()
    try:
        yield
        assert not task.done(), task.exception()
    finally:
        task.cancel()
        await asyncio.wait({task})


async def test_ordered_adapters_are_loaded_and_reported(engine: Engine) -> None:
    engine.instance.order_adapters([OLD, LAW], 3)
    assert engine.reported == []
    async with running(engine):
        both = [(each.engine_name, True, "") for each in (OLD, LAW)]
        await engine.until(lambda: engine.reported == both)
    assert engine.loaded == [OLD.engine_name, LAW.engine_name]


async def test_a_changed_source_is_loaded_before_the_old_one_goes(engine: Engine) -> None:
    engine.instance.order_adapters([OLD], 1)
    async with running(engine):
        await engine.until(lambda: engine.loaded == [OLD.engine_name])
        engine.instance.order_adapters([NEW], 2)
        await engine.until(lambda: engine.loaded == [NEW.engine_name])
    names = [f"load {OLD.engine_name}", f"load {NEW.engine_name}", f"unload {OLD.engine_name}"]
    assert engine.calls == names


async def test_both_sources_are_reported_while_the_new_one_spreads(engine: Engine) -> None:
    engine.config = replace(
        engine.config, timing=replace(engine.config.timing, adapter_overlap=1_000.0)
    )
    engine.instance.order_adapters([OLD], 1)
    async with running(engine):
        await engine.until(lambda: engine.loaded == [OLD.engine_name])
        engine.instance.order_adapters([NEW], 2)
        both = [(NEW.engine_name, True, ""), (OLD.engine_name, True, "")]
        await engine.until(lambda: engine.reported == both)
        registration = engine.instance.copy_registration()
        assert [each.generation for each in registration.runtime_adapters] == [2, 1]


async def test_a_removed_adapter_takes_no_requests_before_it_is_unloaded(engine: Engine) -> None:
    engine.config = replace(
        engine.config, timing=replace(engine.config.timing, adapter_linger=1_000.0)
    )
    engine.instance.order_adapters([OLD], 1)
    async with running(engine):
        await engine.until(lambda: engine.loaded == [OLD.engine_name])
        engine.instance.order_adapters([], 2)
        await engine.until(lambda: engine.reported == [])
        assert engine.loaded == [OLD.engine_name]
        engine.instance.order_adapters([OLD], 3)
        await engine.until(lambda: engine.reported == [(OLD.engine_name, True, "")])
    assert engine.calls == [f"load {OLD.engine_name}"], "it was still there"


async def test_a_failed_load_is_reported_in_the_engines_words_and_tried_again(
    engine: Engine,
) -> None:
    engine.faults[OLD.source] = 1
    engine.instance.order_adapters([OLD], 1)
    seen = []
    async with running(engine):

        def is_loaded() -> bool:
            seen.extend(fault for _, loaded, fault in engine.reported if not loaded and fault)
            return engine.loaded == [OLD.engine_name]

        await engine.until(is_loaded)
    rank = "Loading lora sql failed: rank 64 is above max_lora_rank"
    assert set(seen) == {f"the engine answers 500: {rank}"}


async def test_an_adapter_that_the_engine_has_already_counts_as_loaded(engine: Engine) -> None:
    engine.loaded.append(OLD.engine_name)
    engine.instance.order_adapters([OLD], 1)
    async with running(engine):
        await engine.until(lambda: engine.reported == [(OLD.engine_name, True, "")])


async def test_the_next_boot_of_the_engine_gets_what_is_ordered_then(engine: Engine) -> None:
    engine.instance.order_adapters([OLD, LAW], 1)
    async with running(engine):
        await engine.until(lambda: len(engine.loaded) == 2)
    assert engine.reported == [(OLD.engine_name, False, ""), (LAW.engine_name, False, "")]
    engine.loaded.clear()
    engine.instance.order_adapters([LAW], 2)
    async with running(engine):
        await engine.until(lambda: engine.reported == [(LAW.engine_name, True, "")])
    assert engine.loaded == [LAW.engine_name]


async def test_an_engine_that_is_not_reached_is_tried_again(engine: Engine) -> None:
    engine.url = "http://127.0.0.1:9"
    engine.instance.order_adapters([OLD], 1)
    async with running(engine):
        await engine.until(lambda: any(fault for _, _, fault in engine.reported))


async def test_an_engine_without_enable_lora_says_what_is_missing(engine: Engine) -> None:
    engine.config = replace(engine.config, engine_args=())
    engine.instance.order_adapters([OLD], 1)
    async with running(engine):
        await engine.until(lambda: any("--enable-lora" in fault for _, _, fault in engine.reported))
        engine.instance.order_adapters([], 2)
        await engine.until(lambda: engine.reported == [])
    assert engine.calls == []


@pytest.fixture
def sql(tmp_path: Path) -> AdapterSource:
    """An adapter whose files are there."""
    folder = tmp_path / "sql"
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_bytes(b"1")
    return AdapterSource("sql", str(folder))


def write_adapter(adapter: AdapterSource, content: bytes) -> None:
    Path(adapter.source, "adapter_model.safetensors").write_bytes(content)


async def test_another_content_of_a_source_is_loaded_under_another_name(
    engine: Engine, sql: AdapterSource
) -> None:
    engine.instance.order_adapters([sql], 4)
    async with running(engine):
        await engine.until(lambda: len(engine.loaded) == 1)
        (before,) = engine.loaded
        assert before not in (sql.engine_name, OLD.engine_name)
        write_adapter(sql, b"2")
        await engine.until(lambda: len(engine.loaded) == 1 and engine.loaded != [before])
        (after,) = engine.loaded
        await engine.until(lambda: engine.reported == [(after, True, "")])
    assert engine.calls == [f"load {before}", f"load {after}", f"unload {before}"]
    registration = engine.instance.copy_registration()
    assert [each.generation for each in registration.runtime_adapters] == [4]
    # The same content has the same name on another node.
    engine.loaded.clear()
    async with running(engine):
        await engine.until(lambda: engine.loaded == [after])


async def test_an_adapter_that_is_being_written_is_not_loaded_before_it_is_at_rest(
    engine: Engine, sql: AdapterSource
) -> None:
    engine.instance.order_adapters([sql], 1)
    async with running(engine):
        await engine.until(lambda: len(engine.loaded) == 1)
        (before,) = engine.loaded
        for part in range(40):
            write_adapter(sql, b"2" * (part + 2))
            assert engine.loaded == [before]
            await asyncio.sleep(0.02)
        await engine.until(lambda: len(engine.loaded) == 1 and engine.loaded != [before])
    assert len([call for call in engine.calls if call.startswith("load")]) == 2


async def test_an_adapter_that_changes_while_it_is_loaded_is_not_used(
    engine: Engine, sql: AdapterSource
) -> None:
    path = Path(sql.source, "adapter_model.safetensors")

    def change_once() -> None:
        if path.read_bytes() == b"1":
            path.write_bytes(b"3")

    engine.on_load = change_once
    engine.instance.order_adapters([sql], 1)
    async with running(engine):
        await engine.until(lambda: any("have changed" in fault for _, _, fault in engine.reported))
        (first,) = [name for name, _, _ in engine.reported]
        await engine.until(lambda: any(loaded for _, loaded, _ in engine.reported))
        ((name, loaded, fault),) = engine.reported
    assert (loaded, fault) == (True, "")
    assert engine.loaded == [name] != [first]


async def test_an_adapter_of_a_repository_is_loaded_at_the_commit_that_its_name_contains(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    commits = {"main": "a" * 40}
    monkeypatch.setattr(model_hub, "find_commit", lambda *_, offline: commits["main"])
    monkeypatch.setattr(
        model_hub, "fetch_snapshot", lambda name, commit, _: Path("/hub", name, commit)
    )
    timing = replace(engine.config.timing, adapter_hub_check=0.1)
    engine.config = replace(engine.config, engine="vllm", timing=timing)
    engine.instance.order_adapters([AdapterSource("sql", "org/sql")], 1)
    async with running(engine):
        await engine.until(lambda: len(engine.loaded) == 1)
        (before,) = engine.loaded
        commits["main"] = "b" * 40
        await engine.until(lambda: len(engine.loaded) == 1 and engine.loaded != [before])
    assert engine.paths == [f"/hub/org/sql/{'a' * 40}", f"/hub/org/sql/{'b' * 40}"]


async def test_an_adapter_that_cannot_be_downloaded_is_tried_again(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(name: str, commit: str, cache: Path) -> Path:
        raise OSError("no space left on device")

    monkeypatch.setattr(model_hub, "find_commit", lambda *_, offline: "a" * 40)
    monkeypatch.setattr(model_hub, "fetch_snapshot", fail)
    engine.config = replace(engine.config, engine="vllm")
    engine.instance.order_adapters([AdapterSource("sql", "org/sql")], 1)
    async with running(engine):
        await engine.until(lambda: any("no space left" in fault for _, _, fault in engine.reported))
    assert not engine.paths


def test_an_order_is_checked_and_must_not_be_older(config: AgentConfig) -> None:
    instance = WorkerInstance(config)
    instance.order_adapters([OLD], 5)
    digest = instance.copy_registration().adapters_digest
    assert digest
    with pytest.raises(StaleAdapters, match="generation 4 is older than 5"):
        instance.order_adapters([], 4)
    with pytest.raises(AdaptersRefused, match="named twice"):
        instance.order_adapters([OLD, NEW], 6)
    assert instance.copy_registration().adapters_digest == digest
    assert instance.ordered_adapters == (OLD,)


def test_a_report_that_changes_nothing_wakes_no_watcher(config: AgentConfig) -> None:
    instance = WorkerInstance(config)
    report = [agent_pb2.RuntimeAdapter(name="sql", engine_name="sql@1", loaded=True)]
    instance.report_adapters(report)
    version = instance.version
    instance.report_adapters(report)
    assert instance.version == version


def test_a_worker_begins_with_the_adapters_of_its_start_until_others_are_ordered(
    config: AgentConfig,
) -> None:
    instance = WorkerInstance(replace(config, adapters=(OLD,)))
    assert instance.ordered_adapters == (OLD,)
    instance.order_adapters([LAW], 1)
    assert instance.ordered_adapters == (LAW,)


def test_an_engine_that_was_killed_comes_back_with_the_adapters(agents, tmp_path) -> None:
    for name in ("sql", "law"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text("{}")
    sql, law = (AdapterSource(name, str(tmp_path / name)) for name in ("sql", "law"))

    def has_loaded(*adapters: AdapterSource) -> Callable[[agent_pb2.Registration], bool]:
        names = [each.name for each in adapters]
        return lambda registration: (
            registration.state == agent_pb2.STATE_READY
            and [e.name for e in registration.runtime_adapters if e.loaded] == names
        )

    options = (*EMULATED, "--adapters", format_adapters([sql]))
    agent = agents.start("x-0", "mixed", *options, engine_args=(*FAST, "--enable-lora"))
    before = agent.until(has_loaded(sql))
    assert before.adapters_digest == hash_adapters([sql])
    sources = [agent_pb2.AdapterSource(name=e.name, source=e.source) for e in (sql, law)]
    request = agent_pb2.SetAdaptersRequest(adapters=sources, generation=2)
    agent.stub.SetAdapters(request, timeout=SECONDS, metadata=agent.sign())
    agent.until(has_loaded(sql, law))
    commands = {p: Path(f"/proc/{p}/cmdline").read_bytes() for p in agent.descendants()}
    (engine,) = [p for p, c in commands.items() if b"emulator" in c and b"subreaper" not in c]
    os.kill(engine, signal.SIGKILL)
    after = agent.until(lambda r: has_loaded(sql, law)(r) and r.boot_id != before.boot_id)
    engine_names = [each.engine_name for each in after.runtime_adapters]
    # What lies at the sources is part of the names.
    assert not {sql.engine_name, law.engine_name} & {*engine_names}
    ask = {"model": engine_names[1], "prompt": "hello", "max_tokens": 2}
    url = f"{after.engine_url}/v1/completions"
    answer = urllib.request.Request(url, json.dumps(ask).encode())
    with urllib.request.urlopen(answer, timeout=SECONDS) as response:
        assert json.load(response)["model"] == engine_names[1]
