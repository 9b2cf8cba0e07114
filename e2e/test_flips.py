"""Roles change while requests run: nothing fails, no token is wrong, and pools help each other."""

import concurrent.futures
import itertools
import threading
from collections.abc import Iterator
from typing import Any

import grpc
import httpx
import pytest

from cleave.rpc.v1 import agent_pb2, agent_pb2_grpc

from e2e.support.deployments import Deployment, deployed, emulated, idle, until

pytestmark = pytest.mark.timeout(600)

TIMEOUT_S = 60
ROLES = (agent_pb2.ROLE_MIXED, agent_pb2.ROLE_PREFILL, agent_pb2.ROLE_DECODE)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """Two of each, which keep the roles that a test gives them; engines follow their terms."""
    manifest = emulated("flips", 2, 2, time_scale=0.02)
    spec: dict[str, Any] = manifest["spec"]  # type: ignore[assignment]
    spec["pools"] = {"flipping": "Off"}
    spec["engine"]["scheduling"] = {
        "order": "ShortestFirst",
        "sortedPrompts": 4,
        "longPromptTokens": 64,
        "admission": "ReserveDynamic",
        "limits": [
            {"role": "prefill", "maxNumBatchedTokens": 512},
            {"role": "decode", "maxNumSeqs": 4},
            {"role": "mixed", "maxNumSeqs": 2, "maxNumBatchedTokens": 64},
        ],
    }
    with deployed(manifest, tmp_path_factory.mktemp("flips"), 180) as deployment:
        yield deployment


def ask(deployment: Deployment, prompt: str, max_tokens: int = 20) -> httpx.Response:
    body = {"model": deployment.name, "prompt": prompt, "max_tokens": max_tokens}
    fields = {"ignore_eos": True}
    return httpx.post(f"{deployment.url}/v1/completions", json=body | fields, timeout=TIMEOUT_S)


def agents(deployment: Deployment) -> dict[str, str]:
    """Addresses of agents by instance."""
    found = {}
    (file,) = deployment.state_dir.rglob("agents")
    for address in file.read_text().split():
        with grpc.insecure_channel(address) as channel:
            stub = agent_pb2_grpc.AgentStub(channel)
            request, token = agent_pb2.HealthRequest(), deployment.sign(address)
            health = stub.Health(request, timeout=20, metadata=token)
            found[health.registration.instance] = address
    return found


def test_a_hundred_flips_under_load_fail_nothing_and_change_no_token(four: Deployment) -> None:
    prompts = [f"question {i} " * 30 for i in range(20)]
    expected = {prompt: ask(four, prompt).json()["choices"][0]["text"] for prompt in prompts}
    ended = threading.Event()

    def load(prompt: str) -> int:
        count = 0
        while not ended.is_set():
            answer = ask(four, prompt)
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["text"] == expected[prompt]
            count += 1
        return count

    addresses = agents(four)
    base = max(each.epoch for each in four.instances().values())
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        running = [pool.submit(load, prompt) for prompt in prompts[:8]]
        try:
            turns = zip(
                itertools.cycle(addresses), itertools.cycle(ROLES), range(100), strict=False
            )
            for instance, role, number in turns:
                with grpc.insecure_channel(addresses[instance]) as channel:
                    order = agent_pb2.SetRoleRequest(role=role, epoch=base + number + 1)
                    stub = agent_pb2_grpc.AgentStub(channel)
                    own = four.sign(addresses[instance])
                    stub.SetRole(order, timeout=60, metadata=own)
        finally:
            ended.set()
        assert sum(future.result(timeout=TIMEOUT_S) for future in running) > 0
    until(lambda: idle(four), TIMEOUT_S, "nothing is held")


def test_an_order_that_came_too_late_changes_nothing(four: Deployment) -> None:
    instance, address = next(iter(agents(four).items()))
    before = four.instances()[instance]
    order = agent_pb2.SetRoleRequest(role=agent_pb2.ROLE_MIXED, epoch=before.epoch)
    with grpc.insecure_channel(address) as channel:
        agent = agent_pb2_grpc.AgentStub(channel)
        with pytest.raises(grpc.RpcError) as refused:
            agent.SetRole(order, timeout=60, metadata=four.sign(address))
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    after = four.instances()[instance]
    assert (after.role, after.epoch, after.home) == (before.role, before.epoch, before.home)


def test_a_decode_instance_helps_with_long_prompts_and_goes_home(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    manifest = emulated("helped", 1, 2, time_scale=1.0)
    manifest["spec"]["slo"]["ttftMs"] = 300  # type: ignore[index]
    with deployed(manifest, tmp_path_factory.mktemp("helped"), 180) as deployment:
        answers: list[concurrent.futures.Future[httpx.Response]] = []
        with concurrent.futures.ThreadPoolExecutor(30) as pool:

            def is_helped() -> bool:
                while sum(not answer.done() for answer in answers) < 60:
                    prompt = f"a long question {len(answers)} " * 150
                    answers.append(pool.submit(ask, deployment, prompt, 5))
                return bool(away(deployment))

            until(is_helped, 90, "an instance helps")
            for answer in answers:
                assert answer.result(timeout=TIMEOUT_S).status_code == 200
        page = httpx.get(f"{deployment.url}/metrics", timeout=TIMEOUT_S).text
        flips = 'cleave_gateway_flips_total{from="decode",model="helped",to="mixed"} '
        assert float(page.partition(flips)[2].split()[0]) > 0
        until(lambda: not away(deployment), 90, "all are home")


def away(deployment: Deployment) -> list[str]:
    """Instances that serve something else than they were made for."""
    return [name for name, each in deployment.instances().items() if each.role != each.home]
