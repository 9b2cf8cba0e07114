"""Processes are killed; clients get answers or clear errors, and the service comes back."""

import concurrent.futures
import json
import os
import signal
import time
from collections.abc import Iterator

import httpx
import psutil
import pytest

from e2e.support.deployments import Deployment, deployed, emulated, idle, until

pytestmark = pytest.mark.timeout(600)

TIMEOUT_S = 90
BACK_S = 150
"""What the end of a process may take to be made good, on a machine on which much else runs."""
LEASE_S = 6


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """One prefill and one decode instance."""
    with deployed(emulated("pair", 1, 1), tmp_path_factory.mktemp("pair"), 180) as deployment:
        yield deployment


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """Two of each: something is left when one dies."""
    manifest = emulated("four", 2, 2, lease_s=LEASE_S)
    with deployed(manifest, tmp_path_factory.mktemp("four"), 180) as deployment:
        yield deployment


def ask(
    deployment: Deployment, prompt: str, max_tokens: int = 20, **fields: object
) -> httpx.Response:
    body = {
        "model": deployment.name,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "ignore_eos": True,
    }
    return httpx.post(f"{deployment.url}/v1/completions", json=body | fields, timeout=TIMEOUT_S)


def healthy(deployment: Deployment, instances: int) -> bool:
    found = deployment.instances().values()
    return (
        len(found) == instances
        and all(r.kv_path.verified and not r.reason for r in found)
        and httpx.get(f"{deployment.url}/health", timeout=TIMEOUT_S).status_code == 200
    )


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("victim", ["engine", "agent"])
def test_the_only_one_of_a_role_is_killed(pair: Deployment, role: str, victim: str) -> None:
    until(lambda: healthy(pair, 2), BACK_S, "both are there")
    expected = ask(pair, "the same question").json()["choices"][0]["text"]
    instance = f"pair-{role}-0"
    boot_id = pair.instances()[instance].boot_id
    process = pair.engine(instance) if victim == "engine" else pair.agent(instance)
    tree = process.children(recursive=True)
    os.kill(process.pid, signal.SIGKILL)

    during = ask(pair, "the same question")
    if during.status_code == 200:
        assert during.json()["choices"][0]["text"] == expected
    else:
        assert during.status_code in (502, 503)
        assert during.json()["error"]["message"]

    _, alive = psutil.wait_procs(tree, timeout=60)
    assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]
    until(
        lambda: healthy(pair, 2) and pair.instances()[instance].boot_id != boot_id,
        BACK_S,
        "the instance is back",
    )
    assert ask(pair, "the same question").json()["choices"][0]["text"] == expected


def test_one_of_two_is_killed_under_load_and_no_answer_is_wrong(four: Deployment) -> None:
    until(lambda: healthy(four, 4), BACK_S, "all four are there")
    prompts = [f"question {i} " * 40 for i in range(40)]
    expected = {p: ask(four, p).json()["choices"][0]["text"] for p in prompts}
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        failed = 0
        # Other requests for each: one that was on both engines when they ended is refused.
        for instance in ("four-prefill-1", "four-decode-0"):
            answers = [(p, pool.submit(ask, four, p)) for p in prompts * 3]
            time.sleep(0.5)
            os.kill(four.engine(instance).pid, signal.SIGKILL)
            for prompt, future in answers:
                response = future.result(timeout=TIMEOUT_S)
                if response.status_code == 200:
                    assert response.json()["choices"][0]["text"] == expected[prompt]
                else:
                    failed += 1
                    assert response.json()["error"]["message"]
    # Nothing had reached these clients yet, so every request could be started again elsewhere.
    assert failed == 0
    until(lambda: healthy(four, 4), BACK_S, "all four are back")
    # What a dead decode engine never pulled is freed when its lease has run out.
    until(lambda: idle(four), LEASE_S + 60, "nothing is held")


def test_a_stream_whose_decode_engine_is_lost_goes_on_with_the_same_text(pair: Deployment) -> None:
    until(lambda: healthy(pair, 2), BACK_S, "both are there")
    body = {"model": "pair", "prompt": "a long story", "max_tokens": 500, "ignore_eos": True}
    undisturbed = httpx.post(f"{pair.url}/v1/completions", json=body, timeout=TIMEOUT_S)
    events = []
    # Another client than those whose requests were there when engines ended, in the tests before.
    client = httpx.Client(transport=httpx.HTTPTransport(local_address="127.0.0.9"))
    with (
        client,
        client.stream(
            "POST", f"{pair.url}/v1/completions", json=body | {"stream": True}, timeout=TIMEOUT_S
        ) as response,
    ):
        assert response.status_code == 200
        for line in response.iter_lines():
            if not line or line.startswith(":"):
                continue
            events.append(line.removeprefix("data: "))
            if len(events) == 5:
                os.kill(pair.engine("pair-decode-0").pid, signal.SIGKILL)
    assert events.pop() == "[DONE]"
    text = "".join(json.loads(event)["choices"][0]["text"] for event in events)
    assert text == undisturbed.json()["choices"][0]["text"]
    until(lambda: healthy(pair, 2), BACK_S, "the instance is back")


def test_a_killed_gateway_comes_back(pair: Deployment) -> None:
    def answers() -> bool:
        try:
            return ask(pair, "still there?").status_code == 200
        except httpx.TransportError:
            return False

    until(answers, BACK_S, "the gateway is there")
    (gateway,) = [p for p in pair.processes() if "cleave.gateway.main" in " ".join(p.cmdline())]
    os.kill(gateway.pid, signal.SIGKILL)
    until(answers, BACK_S, "the gateway is back")
