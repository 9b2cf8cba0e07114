"""A change of role changes how the engine schedules, at once and without a restart."""

import itertools
import json
import urllib.request
from dataclasses import replace
from pathlib import Path

from cleave.rpc.v1 import agent_pb2
from cleave.shm.load_page import LoadPage
from cleave_worker.agent.config import AgentConfig
from cleave_worker.agent.instance import EnginePages, WorkerInstance
from cleave_worker.scheduling.config import RoleSchedulingConfig
from cleave_worker.scheduling.config_page import SchedulingPage

PREFILL, DECODE = agent_pb2.ROLE_PREFILL, agent_pb2.ROLE_DECODE
SMALL = RoleSchedulingConfig(max_num_batched_tokens=8)


async def test_the_engine_gets_the_terms_of_each_role(config: AgentConfig, tmp_path: Path) -> None:
    instance = WorkerInstance(replace(config, scheduling={DECODE: SMALL}))
    with (
        LoadPage(tmp_path / "load") as load,
        SchedulingPage(tmp_path / "scheduling") as page,
        SchedulingPage(tmp_path / "scheduling") as engine,
    ):
        instance.start_boot("b1", "http://h:1", EnginePages(load, page))
        assert engine.read_if_changed() == RoleSchedulingConfig()
        instance.set_role(DECODE, 2)
        assert engine.read_if_changed() == SMALL
        instance.start_boot("b2", "http://h:1", EnginePages(load, page))
        assert engine.read_if_changed() == SMALL
        instance.set_role(PREFILL, 3)
        assert engine.read_if_changed() == RoleSchedulingConfig()


def test_an_emulated_engine_follows_its_role(agents) -> None:
    agent = agents.start(
        *("w-0", "prefill", "--engine", "emulated", "--model", "opt-13b"),
        *("--served-model-name", "m"),
        *("--scheduling", json.dumps({"decode": {"max_num_batched_tokens": 8}})),
        engine_args=("--time-scale", "0.01"),
    )
    registration = agent.until(lambda now: now.state == agent_pb2.STATE_READY)
    boot = registration.boot_id

    starts = itertools.count(100)

    def passes() -> int:
        """How many a prompt of 64 tokens takes that is not cached."""
        before = count_passes(registration.engine_url)
        complete(registration.engine_url, [next(starts)] * 64)
        return count_passes(registration.engine_url) - before

    assert passes() == 1
    for epoch, (role, expected) in enumerate([(DECODE, 8), (PREFILL, 1), (DECODE, 8)], 2):
        order = agent_pb2.SetRoleRequest(role=role, epoch=epoch, boot_id=boot)
        agent.stub.SetRole(order, timeout=20)
        assert passes() == expected
    assert agent.health().registration.boot_id == boot


def count_passes(url: str) -> int:
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    (line,) = [each for each in lines if each.startswith("vllm:iteration_tokens_total_count")]
    return round(float(line.split()[-1]))


def complete(url: str, prompt: list[int]) -> None:
    body = {"model": "m", "prompt": prompt, "max_tokens": 1}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    urllib.request.urlopen(request, timeout=60).close()
