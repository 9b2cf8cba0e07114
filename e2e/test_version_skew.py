"""Agents, engines and gateways of this version and the one before it, together on one machine.

`e2e/test_cluster_upgrade.py` adds the operator, `e2e/test_vllm_version_skew.py` vLLM. Instances
have one revision, as while an operator replaces them after an upgrade, so engines of both versions
hand KV to each other.
"""

import concurrent.futures
import random
import time
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
ALL_PAIRS_S = 90
"""The gateway closes a pair whose canaries were slow, as on a busy machine. The pair returns once
they are good, or when its result expires after a minute."""
PAUSE_S = 2
"""Between two rounds of requests: canaries of a closed pair need idle engines."""
PREVIOUS = {"skew-prefill-0", "skew-decode-0"}
"""Instances of the previous version; PRESENT are the others, so each version hands KV to both."""
PRESENT = {"skew-prefill-1", "skew-decode-1"}
PAIRS = {
    (f"skew-prefill-{first}", f"skew-decode-{second}") for first in (0, 1) for second in (0, 1)
}


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


@pytest.mark.timeout(240)
@pytest.mark.parametrize("version", ["present", "previous"])
def test_every_answer_is_right_and_every_handoff_is_used(
    gateways: dict[str, Gateway], version: str
) -> None:
    gateway = gateways[version]
    before = gateway.count()
    rng = random.Random(version)
    served: set[tuple[str, str]] = set()
    num_requests, began_s = 0, time.monotonic()
    while served != PAIRS and time.monotonic() - began_s < ALL_PAIRS_S:
        time.sleep(PAUSE_S if num_requests else 0)
        served |= serve(gateway, rng)
        num_requests += REQUESTS
    counted = {name: n - before.get(name, 0) for name, n in gateway.count().items()}
    counted = {name: number for name, number in counted.items() if number}
    assert counted.pop('handoffs{result="used"}') == num_requests
    assert not [name for name in counted if name.startswith(("retries", "recoveries", "handoffs"))]
    reasons = [each.kv_pairs.reason for each in gateway.fleet().instances if each.kv_pairs.closed]
    assert served == PAIRS, f"{PAIRS - served} had no request; why pairs are closed: {reasons}"


def serve(gateway: Gateway, rng: random.Random) -> set[tuple[str, str]]:
    """Send requests, check the answers, and return the pairs that served them."""
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
    for body, answer in zip(bodies, answers, strict=True):
        text = answer.json()["choices"][0]["text"]
        assert text == expect(COMPLETIONS, body, "skew").texts[0]
    return {
        (answer.headers["x-cleave-prefill"], answer.headers["x-cleave-decode"])
        for answer in answers
    }


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
