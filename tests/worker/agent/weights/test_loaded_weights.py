"""The identity of what an engine loads, and what has changed of it."""

import asyncio
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from cleave.rpc.v1 import agent_pb2
from cleave_worker.agent.config import AgentConfig
from cleave_worker.agent.weights import loaded_weights, model_hub
from cleave_worker.agent.weights.loaded_weights import (
    NO_WEIGHTS,
    WeightReader,
    Weights,
    WeightsError,
    find_change,
    make_reader,
    read_weights,
    run_reading,
)
from cleave_worker.agent.weights.weight_sources import WeightSource, list_sources

OLD, NEW = "a" * 40, "b" * 40


def read(reader: WeightReader, model: object, *arguments: str) -> Weights:
    return reader.read(list_sources(str(model), arguments), lambda share: None)


def check(reader: WeightReader, weights: Weights) -> str:
    return reader.find_change(weights, lambda share: None)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def reader(cache: Path) -> WeightReader:
    """Of a vLLM engine that may not use the hub."""
    return WeightReader({"HF_HUB_CACHE": str(cache)}, offline=True)


@pytest.fixture
def move(cache: Path) -> Callable[..., None]:
    """Moves what a branch of org/m is in the cache."""

    def set_commit(commit: str, name: str = "org--m") -> None:
        path = cache / f"models--{name}" / "refs" / "main"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(commit)

    return set_commit


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"weights")
    return model


def test_a_folder_is_known_by_its_content_wherever_it_lies(
    reader: WeightReader, folder: Path, tmp_path: Path
) -> None:
    before = read(reader, folder)
    folder.rename(tmp_path / "elsewhere")
    assert read(reader, tmp_path / "elsewhere").id == before.id
    (tmp_path / "elsewhere" / "model.safetensors").write_bytes(b"other weights")
    after = read(reader, tmp_path / "elsewhere")
    assert len(after.id) == 12
    assert after.id != before.id
    assert (after.pins, after.fault) == ({}, "")


def test_a_branch_is_pinned_to_its_commit(reader: WeightReader, move: Callable[..., None]) -> None:
    move(OLD)
    before = read(reader, "org/m")
    assert (before.pins, before.fault) == ({"--revision": OLD}, "")
    move(NEW)
    assert read(reader, "org/m").pins == {"--revision": NEW}
    assert read(reader, "org/m").id != before.id
    # The engine loads what was found, not what the branch is by now.
    assert check(reader, before) == ""
    assert read(reader, "org/m", "--revision", OLD).id == before.id


def test_a_tokenizer_and_adapters_are_part_of_the_identity(
    reader: WeightReader, folder: Path, tmp_path: Path, move: Callable[..., None]
) -> None:
    move(OLD, "org--t")
    adapter = tmp_path / "sql"
    adapter.mkdir()
    (adapter / "adapter_model.safetensors").write_bytes(b"1")
    arguments = ("--tokenizer", "org/t", "--lora-modules", f"sql={adapter}")
    before = read(reader, folder, *arguments)
    assert before.pins == {"--tokenizer-revision": OLD}
    assert before.id != read(reader, folder).id
    (adapter / "adapter_model.safetensors").write_bytes(b"2")
    changed = read(reader, folder, *arguments)
    move(NEW, "org--t")
    assert len({before.id, changed.id, read(reader, folder, *arguments).id}) == 3
    # Another name of the same content is another adapter for clients.
    assert read(reader, folder, "--lora-modules", f"law={adapter}").id not in (
        read(reader, folder, "--lora-modules", f"sql={adapter}").id,
    )


@pytest.mark.parametrize("model", ["s3://bucket/m", "org/none", "org/m:Q4_K_M"])
def test_what_cannot_be_read_is_known_by_name_only_and_says_so(
    reader: WeightReader, model: str
) -> None:
    weights = read(reader, model)
    assert weights.id == read(reader, model).id != read(reader, "gs://bucket/m").id
    assert weights.pins == {}
    assert weights.fault.startswith(f"the content of {model}")
    assert check(reader, weights) == ""


@pytest.mark.parametrize("template", ["{{ a }}/" * 200, "x" * 300, "a/b", "chat\n{{ b }}", "\0"])
def test_a_chat_template_within_the_arguments_is_no_file(
    reader: WeightReader, folder: Path, template: str
) -> None:
    assert read(reader, folder, "--chat-template", template).id == read(reader, folder).id


def test_modelscope_is_another_hub_whose_commits_are_not_known(
    cache: Path, move: Callable[..., None]
) -> None:
    move(OLD)
    env = {"HF_HUB_CACHE": str(cache), "VLLM_USE_MODELSCOPE": "1"}
    assert "org/m@main" in read(WeightReader(env, offline=True), "org/m").fault


def test_a_branch_that_only_the_engine_could_read_is_found_once_it_has(
    reader: WeightReader, move: Callable[..., None]
) -> None:
    weights = read(reader, "org/m")
    assert check(reader, weights) == ""
    move(OLD)
    assert check(reader, weights) == "org/m has changed while it was loaded"
    assert check(reader, read(reader, "org/m")) == ""


def test_a_repository_that_cannot_be_pinned_is_checked_after_it_was_loaded(
    reader: WeightReader, folder: Path, move: Callable[..., None]
) -> None:
    move(OLD, "org--sql")
    weights = read(reader, folder, "--lora-modules", "sql=org/sql")
    assert check(reader, weights) == ""
    move(NEW, "org--sql")
    assert check(reader, weights) == "org/sql has changed while it was loaded"


def test_files_that_change_while_they_are_loaded_are_found_and_a_touch_is_no_change(
    reader: WeightReader, folder: Path
) -> None:
    weights = read(reader, folder)
    assert check(reader, weights) == ""
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes())
    path.touch()
    assert check(reader, weights) == ""
    path.write_bytes(b"WEIGHTS")
    assert check(reader, weights) == f"{folder} has changed while it was loaded"


def test_a_link_that_is_turned_to_another_folder_is_found(
    reader: WeightReader, folder: Path, tmp_path: Path
) -> None:
    other, link = tmp_path / "v2", tmp_path / "current"
    other.mkdir()
    (other / "config.json").write_text("{ }")
    link.symlink_to(folder)
    weights = read(reader, link)
    link.unlink()
    link.symlink_to(other)
    assert "has changed" in check(reader, weights)


def test_files_that_vanish_after_they_were_loaded_leave_what_was_loaded(
    reader: WeightReader, folder: Path, tmp_path: Path
) -> None:
    weights = read(reader, folder)
    folder.rename(tmp_path / "away")
    assert check(reader, weights) == ""


def test_an_emulated_engine_loads_only_what_is_there_and_gets_no_commit(
    config: AgentConfig, cache: Path, folder: Path, move: Callable[..., None]
) -> None:
    emulated = make_reader(config, {"HF_HUB_CACHE": str(cache)})
    assert read(emulated, "org/m") == NO_WEIGHTS
    assert read(emulated, "org/m", "--lora-modules", "sql=/none") == NO_WEIGHTS
    move(OLD)
    before = read(emulated, "org/m")
    assert (before.pins, before.fault) == ({}, "")
    move(NEW)
    assert check(emulated, before) != ""
    assert read(emulated, "org/m").id not in (before.id, "")
    assert read(emulated, folder).id


def test_an_engine_with_a_folder_uses_no_hub_for_anything_else(
    config: AgentConfig, folder: Path
) -> None:
    vllm = replace(config, engine="vllm", model="org/m")
    assert not make_reader(vllm, {}).offline
    assert make_reader(vllm, {"HF_HUB_OFFLINE": "1"}).offline
    assert make_reader(replace(vllm, model=str(folder)), {}).offline


async def test_the_start_of_an_engine_waits_for_what_it_loads(
    config: AgentConfig, folder: Path
) -> None:
    with_folder = replace(config, model=str(folder))
    before = time.time()
    weights = await read_weights(with_folder, {}, lambda share: None)
    assert before <= weights.read_s <= time.time()
    assert await find_change(with_folder, {}, weights) == ""
    (folder / "config.json").write_text('{"x": 1}')
    assert "has changed" in await find_change(with_folder, {}, weights)


async def test_a_slow_reading_reports_progress_and_ends_in_time() -> None:
    shares: list[float] = []

    def crawl(check: Callable[[float], None]) -> None:
        for part in range(10_000):
            check(part / 10_000)
            time.sleep(0.01)

    with pytest.raises(WeightsError, match=r"not read within 0\.8 s"):
        await run_reading(crawl, 0.8, shares.append)
    assert shares == sorted(shares)
    assert shares[-1] > 0


async def test_a_cancelled_reading_ends_its_thread() -> None:
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()

    def crawl(check: Callable[[float], None]) -> None:
        try:
            while True:
                check(0.0)
                time.sleep(0.01)
        finally:
            loop.call_soon_threadsafe(ended.set)

    reading = asyncio.create_task(run_reading(crawl, 60, lambda share: None))
    await asyncio.sleep(0.1)
    reading.cancel()
    async with asyncio.timeout(20):
        await ended.wait()


async def test_a_disk_that_fails_is_one_clear_error() -> None:
    def fail(check: Callable[[float], None]) -> None:
        raise OSError(5, "Input/output error", "/m/model.safetensors")

    with pytest.raises(WeightsError, match=r"cannot be read: .*Input/output error"):
        await run_reading(fail, 60, lambda share: None)


def test_uses_are_part_of_the_identity() -> None:
    sources = [WeightSource(use, "/x") for use in ("--model", "--tokenizer")]
    found = [loaded_weights.ReadSource(each, "same") for each in sources]
    ids = {loaded_weights.build_weights(0.0, part).id for part in (found, found[:1], found[1:])}
    assert len(ids) == 3
    assert model_hub.DEFAULT_REVISION == "main"


FAST = ("--time-scale", "0.1")


def write_model(folder: Path, content: str) -> None:
    """Replace the model's weights at once."""
    (folder / "new").write_text(content)
    (folder / "new").rename(folder / "model.safetensors")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model for emulated engines."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
    sizes |= {"vocab_size": 512, "intermediate_size": 128, "max_position_embeddings": 512}
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **sizes}))
    write_model(folder, "1")
    return folder


def is_ready(registration: agent_pb2.Registration) -> bool:
    return registration.state == agent_pb2.STATE_READY


def test_an_agent_reports_the_weights_of_each_start_of_its_engine(agents, model: Path) -> None:
    options = ("--engine", "emulated", "--model", str(model), "--served-model-name", "m")
    agent = agents.start("x-0", "mixed", *options, engine_args=FAST)
    before = agent.until(is_ready)
    assert before.revision == f"r1@{before.weights}"
    assert abs(before.weights_read_ms / 1000 - time.time()) < 120
    write_model(model, "2")
    # What runs has loaded what was there.
    assert agent.health().registration.weights == before.weights
    (engine,) = (
        process for process in agent.descendants()
        if b"emulator.main" in Path(f"/proc/{process}/cmdline").read_bytes()
        and b"subreaper" not in Path(f"/proc/{process}/cmdline").read_bytes()
    )  # fmt: skip
    os.kill(engine, signal.SIGKILL)
    after = agent.until(lambda r: is_ready(r) and r.boot_id != before.boot_id)
    assert after.weights not in (before.weights, "")
    assert after.weights_read_ms > before.weights_read_ms


def test_an_engine_whose_files_change_while_it_loads_them_is_started_again(
    agents, model: Path
) -> None:
    ended = threading.Event()

    def change() -> None:
        number = 0
        while not ended.wait(0.02):
            number += 1
            write_model(model, str(number))
        write_model(model, "end")

    changing = threading.Thread(target=change)
    changing.start()
    try:
        options = ("--engine", "emulated", "--model", str(model), "--served-model-name", "m")
        agent = agents.start("x-0", "mixed", *options, engine_args=FAST)
        lost = agent.until(lambda registration: registration.restarts > 0)
        # A file may also be away just when it is read.
        said = ("has changed while it was loaded", "its files cannot be read")
        assert any(text in lost.last_failure for text in said)
        assert not is_ready(lost)
    finally:
        ended.set()
        changing.join()
    ready = agent.until(is_ready)
    reader = WeightReader({}, offline=True, loads_repositories=False)
    assert ready.weights == read(reader, model).id


def test_engines_with_different_weights_do_not_test_their_kv_path_together(
    agents, model: Path
) -> None:
    options = ("--engine", "emulated", "--model", str(model), "--served-model-name", "m")
    quick = ("--peer-wait", "0.5", *options)
    kv = ("--kv-transfer-config", '{"kv_connector": "NixlConnector", "kv_role": "kv_both"}', *FAST)
    one = agents.start("p-0", "prefill", *quick, engine_args=kv)
    one.until(is_ready)
    write_model(model, "2")
    other = agents.start("d-0", "decode", *quick, engine_args=kv)
    for agent in (one, other):
        assert not agent.until(is_ready).kv_path.verified
    same = agents.start("d-1", "decode", *quick, engine_args=kv)
    third = agents.start("p-1", "prefill", *quick, engine_args=kv)
    for agent in (same, third):
        ready = agent.until(lambda r: is_ready(r) and r.kv_path.verified)
        assert "p-0" not in ready.kv_path.detail
    assert not one.health().registration.kv_path.verified
