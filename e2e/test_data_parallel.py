"""Instances of data-parallel ranks behind a gateway, with emulated engines."""

import concurrent.futures
import json
import os
import signal
import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial

import httpx
import psutil
import pytest

from cleave.rpc.v1 import agent_pb2

from e2e.support.deployments import Deployment, deployed, emulated, until
from e2e.support.spread_ranks import SpreadRanks, spread
from e2e.support.vllm_prompts import metric

pytestmark = pytest.mark.timeout(600)

TIMEOUT_S = 120
STREAMS = 12
VICTIM = "ranks-decode-0.rank-1"
NAMES = [
    *(f"ranks-prefill-0.rank-{rank}" for rank in range(2)),
    *(f"ranks-decode-{number}.rank-{rank}" for number in range(2) for rank in range(2)),
]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """A prefill and two decode instances, of two ranks each."""
    manifest = emulated("ranks", 1, 2)
    spec = manifest["spec"]
    for pool in spec["placement"]["manual"]:  # type: ignore[index]
        pool["parallelism"] = {"data": 2}
    with deployed(manifest, tmp_path_factory.mktemp("ranks"), 120) as deployment:
        yield deployment


def ask(deployment: Deployment | SpreadRanks, prompt: str, max_tokens: int = 2_000) -> str:
    """The text of one stream, whole."""
    body = {"model": deployment.name, "prompt": prompt, "max_tokens": max_tokens, "stream": True}
    answer = httpx.post(
        f"{deployment.url}/v1/completions", json=body | {"ignore_eos": True}, timeout=TIMEOUT_S
    )
    assert answer.text.endswith("data: [DONE]\n\n"), answer.text[-500:]
    lines = [line for line in answer.text.splitlines() if line.startswith("data: {")]
    return "".join(
        choice["text"]
        for line in lines
        for choice in json.loads(line.removeprefix("data: "))["choices"]
    )


def are_verified(deployment: Deployment) -> bool:
    found = deployment.instances()
    return {*found} == {*NAMES} and all(
        each.state == agent_pb2.STATE_READY and each.kv_path.verified for each in found.values()
    )


def count_answers(deployment: Deployment) -> dict[str, float]:
    """Requests that each engine has finished, by its name."""
    return {
        name: metric(each.engine_url, "vllm:request_success_total")
        for name, each in deployment.instances().items()
    }


def test_each_rank_is_an_instance_for_gateways_and_all_are_one_for_the_user(
    ranks: Deployment,
) -> None:
    until(lambda: are_verified(ranks), TIMEOUT_S, "every rank has handed KV over")
    (found,) = json.loads(ranks.cleave("status", "ranks", "-o", "json").stdout)
    names = [row["instance"] for row in found["instances"]]
    assert [n for n in names if "gateway" not in n] == [
        "ranks-prefill-0", "ranks-decode-0", "ranks-decode-1",
    ]  # fmt: skip


def test_streams_of_all_ranks_go_on_when_one_engine_dies_and_all_are_restarted(
    ranks: Deployment,
) -> None:
    until(lambda: are_verified(ranks), TIMEOUT_S, "every rank has handed KV over")
    with concurrent.futures.ThreadPoolExecutor(STREAMS) as pool:

        def do_all_answer() -> bool:
            prompts = [f"question {uuid.uuid4()} " * 20 for _ in range(STREAMS)]
            assert all(pool.map(partial(ask, ranks, max_tokens=20), prompts))
            return all(count_answers(ranks).values())

        until(do_all_answer, TIMEOUT_S, "all have taken part")
        before = ranks.instances()
        urls = [each.engine_url for name, each in before.items() if "decode" in name]
        streams = start_streams(pool, ranks, urls)
        os.kill(ranks.engine(VICTIM).pid, signal.SIGKILL)
        found = [each.result(2 * TIMEOUT_S) for each in streams.values()]
        assert found == [*pool.map(partial(ask, ranks), streams)], "as without the fault"
    until(lambda: are_verified(ranks), TIMEOUT_S, "all ranks are ready again")
    now = ranks.instances()
    changed = {name for name in NAMES if now[name].boot_id != before[name].boot_id}
    assert changed == {"ranks-decode-0.rank-0", VICTIM}


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SpreadRanks]:
    """Two mixed instances of two ranks, each rank in a pod with an address of its own."""
    manifest = emulated("wide", 1, 1)
    pool = {"role": "mixed", "replicas": 2, "parallelism": {"data": 2}}
    manifest["spec"]["placement"] = {"manual": [pool]}  # type: ignore[index]
    with spread(manifest, tmp_path_factory.mktemp("wide") / "d") as found:
        until(lambda: found.are_verified(4), TIMEOUT_S, "every rank has handed KV over")
        yield found


def list_boots(wide: SpreadRanks) -> dict[str, str]:
    return {name: each.boot_id for name, each in wide.instances().items()}


def find_engine(wide: SpreadRanks, name: str) -> int:
    """The process that serves this rank's API."""
    host, _, port = wide.instances()[name].engine_url.removeprefix("http://").rpartition(":")
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            line = process.cmdline()
            if "cleave_worker.emulator.main" in line and {host, port} <= {*line}:
                return process.pid
    raise AssertionError(f"no engine of {name}")


def start_streams(
    pool: concurrent.futures.ThreadPoolExecutor,
    deployment: Deployment | SpreadRanks,
    urls: Sequence[str],
) -> dict[str, concurrent.futures.Future[str]]:
    """Streams by prompt, started one by one, at most STREAMS at a time, until all engines at `urls`
    decode. No prompt repeats: each goes where it is cached, which may be another engine."""
    streams: dict[str, concurrent.futures.Future[str]] = {}

    def do_all_decode() -> bool:
        if sum(not each.done() for each in streams.values()) < STREAMS:
            prompt = f"question {uuid.uuid4()} " * 20
            streams[prompt] = pool.submit(ask, deployment, prompt)
        return all(metric(url, "vllm:num_requests_running") > 0 for url in urls)

    until(do_all_decode, TIMEOUT_S, "these engines decode")
    return streams


def test_streams_go_on_when_a_rank_on_another_node_dies(wide: SpreadRanks) -> None:
    until(lambda: wide.are_verified(4), TIMEOUT_S, "all ranks are ready")
    victim = "wide-mixed-0.rank-1"
    before = list_boots(wide)
    assert {*before} == {f"wide-mixed-{n}.rank-{rank}" for n in range(2) for rank in range(2)}
    with concurrent.futures.ThreadPoolExecutor(STREAMS) as pool:
        streams = start_streams(pool, wide, [wide.instances()[victim].engine_url])
        os.kill(find_engine(wide, victim), signal.SIGKILL)
        found = [each.result(2 * TIMEOUT_S) for each in streams.values()]
        assert found == [*pool.map(partial(ask, wide), streams)], "as without the fault"
    until(lambda: wide.are_verified(4), TIMEOUT_S, "all ranks are ready again")
    now = list_boots(wide)
    changed = {name for name in now if now[name] != before[name]}
    assert changed == {"wide-mixed-0.rank-0", victim}


def test_all_ranks_on_both_nodes_change_their_role(wide: SpreadRanks) -> None:
    first = ask(wide, "role " * 30, 50)
    wide.set_role("wide-mixed-0", agent_pb2.ROLE_PREFILL)
    roles = {name: each.role for name, each in wide.instances().items()}
    prefill, mixed = agent_pb2.ROLE_PREFILL, agent_pb2.ROLE_MIXED
    assert list(roles.values()) == [prefill, prefill, mixed, mixed]
    assert [ask(wide, "role " * 30, 50) for _ in range(4)] == [first] * 4
    wide.set_role("wide-mixed-0", mixed)
    assert {each.role for each in wide.instances().values()} == {mixed}


def test_the_deletion_of_one_pod_drains_its_instance_on_both_nodes(wide: SpreadRanks) -> None:
    first, further = wide.pods[2:]
    assert first.process is not None
    assert further.process is not None
    if first.process.poll() is not None or further.process.poll() is not None:
        # This is the second attempt: the first one has ended them.
        for pod in (first, further):
            pod.kill()
            pod.start(wide.env)
    until(lambda: wide.are_verified(4), TIMEOUT_S, "all ranks are ready")
    urls = [wide.instances()[f"wide-mixed-1.rank-{rank}"].engine_url for rank in range(2)]
    with concurrent.futures.ThreadPoolExecutor(STREAMS) as pool:
        streams = start_streams(pool, wide, urls)
        assert further.stop() == 0
        assert first.process.wait(TIMEOUT_S) == 0
        found = [each.result(2 * TIMEOUT_S) for each in streams.values()]
        assert {*wide.instances()} == {"wide-mixed-0.rank-0", "wide-mixed-0.rank-1"}
        assert found == [*pool.map(partial(ask, wide), streams)], "as the other instance answers"
