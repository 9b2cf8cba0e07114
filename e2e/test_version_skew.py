"""Agents, engines and gateways of this version and the one before it, together on one machine.

`e2e/test_cluster_upgrade.py` adds the operator, `e2e/test_vllm_version_skew.py` vLLM. Instances
have one revision, as while an operator replaces them after an upgrade, so engines of both versions
hand KV to each other.
"""

import concurrent.futures
import random
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from e2e.chaos.expected_output import COMPLETIONS, expect
from e2e.chaos.gateways import Gateway
from e2e.support.deployments import Deployment, deployed, emulated, until
from tests.support.previous_version import PreviousVersion, extract

READY_S = 60
REQUESTS = 60
CLIENTS = 8
PREVIOUS = {"skew-prefill-0", "skew-decode-0"}
"""Instances of the previous version; PRESENT are the others, so each version hands KV to both."""
PRESENT = {"skew-prefill-1", "skew-decode-1"}


@pytest.fixture(scope="module")
def previous(tmp_path_factory: pytest.TempPathFactory) -> PreviousVersion:
    return extract(tmp_path_factory.mktemp("previous"))


@pytest.fixture(scope="module")
def gateways(
    previous: PreviousVersion, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Gateway]]:
    """A gateway of each version in front of the same emulated instances."""
    folder = tmp_path_factory.mktemp("skew")
    choice = previous.choose_for("|".join(PREVIOUS), folder / "choice")
    manifest: dict[str, Any] = emulated("skew", 2, 2)
    manifest["spec"]["engine"]["env"] = [{"name": "PYTHONPATH", "value": str(choice)}]
    # All four pairs serve however slow the machine is: one is missed once in 10^7 runs.
    manifest["spec"]["routing"] = {"policy": "Random"}
    with deployed(manifest, folder, READY_S) as deployment:
        assert set((choice / "chosen").read_text().split()) == PREVIOUS
        env = {"PYTHONPATH": str(previous.sources)}
        found = {
            "present": Gateway("present", deployment, folder),
            "previous": Gateway("previous", deployment, folder, env=env),
        }
        try:
            for gateway in found.values():
                gateway.start()
                until(lambda g=gateway: sees_all(g), READY_S, f"{gateway.name}: all selectable")
            yield found
        finally:
            for gateway in found.values():
                if gateway.process is not None:
                    gateway.kill()


def sees_all(gateway: Gateway) -> bool:
    instances = gateway.fleet().instances
    names = {each.name for each in instances}
    return names == PREVIOUS | PRESENT and all(each.selectable for each in instances)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("version", ["present", "previous"])
def test_every_answer_is_right_and_every_handoff_is_used(
    gateways: dict[str, Gateway], version: str
) -> None:
    gateway = gateways[version]
    before = gateway.count()
    rng = random.Random(version)
    bodies = [
        {
            "model": "skew",
            "prompt": [rng.randrange(1000) for _ in range(rng.randrange(1, 600))],
            "max_tokens": rng.randrange(1, 40),
        }
        for _ in range(REQUESTS)
    ]
    with concurrent.futures.ThreadPoolExecutor(CLIENTS) as pool:
        answers = list(pool.map(lambda body: complete(gateway, body), bodies))
    served: set[tuple[str, str]] = set()
    for body, answer in zip(bodies, answers, strict=True):
        text = answer.json()["choices"][0]["text"]
        assert text == expect(COMPLETIONS, body, "skew").texts[0]
        served.add((answer.headers["x-cleave-prefill"], answer.headers["x-cleave-decode"]))
    counted = {name: n - before.get(name, 0) for name, n in gateway.count().items()}
    counted = {name: number for name, number in counted.items() if number}
    assert counted.pop('handoffs{result="used"}') == REQUESTS
    assert not [name for name in counted if name.startswith(("retries", "recoveries", "handoffs"))]
    assert len(served) == 4, "KV went from either version to either version"


def complete(gateway: Gateway, body: dict[str, Any]) -> httpx.Response:
    response = httpx.post(f"{gateway.url}{COMPLETIONS}", json=body, timeout=60)
    assert response.status_code == 200, response.text
    return response


def test_agents_of_both_versions_are_read_and_none_was_restarted(
    gateways: dict[str, Gateway],
) -> None:
    deployment: Deployment = gateways["present"].deployment
    registrations = deployment.instances()
    assert registrations.keys() == PREVIOUS | PRESENT
    for each in registrations.values():
        assert each.kv_path.verified, each.kv_path.detail
        assert each.restarts == 0
