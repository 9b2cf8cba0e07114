"""A bad pair of a whole deployment: every process of its gateway avoids it, and status shows it."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from cleave.rpc.engine_key import build_headers
from cleave.rpc.v1 import agent_pb2

from e2e.support.deployments import Deployment, deployed, emulated, until

pytestmark = pytest.mark.timeout(600)

PATIENCE_S = 150
"""What a fault may take to be found, on a machine on which much else runs."""


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    manifest = emulated("witnessed", 2, 2, time_scale=0.2)
    spec = manifest["spec"]
    kv_transfer = {"kv_load_failure_policy": "recompute"}
    args = ["--fault-injection", "--kv-transfer-config", json.dumps(kv_transfer)]
    spec["engine"]["args"] = args  # type: ignore[index]
    spec |= {"gateway": {"processes": 2}, "witness": {"engineShare": 0.05}}  # type: ignore[operator]
    with deployed(manifest, tmp_path_factory.mktemp("witnessed"), 180) as deployment:
        yield deployment


def find_trusts(deployment: Deployment) -> dict[tuple[str, str], int]:
    return {
        (proof.prefill, health.registration.instance): proof.trust
        for health in deployment.healths()
        for proof in health.pairs.proofs
    }


def are_proven(deployment: Deployment) -> bool:
    return list(find_trusts(deployment).values()) == [agent_pb2.TRUST_PROVEN] * 4


def inject(engine: agent_pb2.Registration, pairs: dict[str, str]) -> None:
    url, headers = f"{engine.engine_url}/emulator/faults", build_headers(engine.engine_key)
    httpx.post(url, json={"pairs": pairs}, headers=headers, timeout=30).raise_for_status()


def ask(deployment: Deployment, number: int, **fields: object) -> httpx.Response:
    body = {"model": deployment.name, "prompt": f"{number} and a question " * 30, "max_tokens": 6}
    response = httpx.post(f"{deployment.url}/v1/completions", json=body | fields, timeout=60)
    assert response.status_code == 200
    return response


def test_a_bad_pair_is_avoided_by_all_processes_and_shown(four: Deployment) -> None:
    until(lambda: are_proven(four), PATIENCE_S, "all pairs are proven")
    instances = four.instances()
    prefill, decode = "witnessed-prefill-0", "witnessed-decode-1"
    answers: list[httpx.Response] = []
    served: set[tuple[str, str]] = set()

    def have_all_served() -> bool:
        # Each on a new connection, which the kernel gives to any process; several at a time, so
        # that both decode instances are needed.
        with ThreadPoolExecutor(8) as pool:
            numbers = range(len(answers), len(answers) + 40)
            answers.extend(pool.map(lambda number: ask(four, number), numbers))
        for answer in answers:
            # Where the decode instance has computed the prompt itself, there is none.
            if first := answer.headers.get("x-cleave-prefill"):
                served.add((first, answer.headers["x-cleave-decode"]))
        return {name for pair in served for name in pair} == set(instances)

    def is_shown() -> bool:
        shown = four.cleave("status", four.name).stdout
        return (
            f"{decode}: 1 of 2 pairs proven" in shown
            and f"{prefill} -> {decode}: the first token after" in shown
        )

    try:
        inject(instances[decode], {instances[prefill].boot_id: "layout"})
        bad = {(prefill, decode): agent_pb2.TRUST_FAILED}
        until(lambda: bad.items() <= find_trusts(four).items(), PATIENCE_S, "it is found")
        until(have_all_served, PATIENCE_S, "all four have served")
        for number, split in enumerate(answers):
            whole = ask(four, number, n=2, cache_salt=f"salt {number}")
            assert split.json()["choices"][0]["text"] == whole.json()["choices"][0]["text"]
        assert (prefill, decode) not in served
        until(is_shown, PATIENCE_S, "status shows it")
    finally:
        inject(instances[decode], {})
    until(lambda: are_proven(four), PATIENCE_S, "it is back")
