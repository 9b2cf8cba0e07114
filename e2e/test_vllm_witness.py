"""The witness on vLLM engines: damaged and missing KV of a real model is found, and nothing wrong
is served after that."""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from cleave.rpc.v1 import agent_pb2
from cleave_worker.transfer.transport import Transport

from e2e.support import kv_fault_plugin
from e2e.support.deployments import Deployment, deployed, until
from e2e.support.handoffs import tiny_with_connector
from e2e.support.vllm_prompts import ask, engine_url, make_case

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200)]

PATIENCE_S = 240
"""What a fault may take to be found, on a machine on which much else runs; `benchmarks/witness`
measures how long it takes."""


@dataclass(frozen=True)
class Faulty:
    """Engines whose handoffs can be damaged."""

    deployment: Deployment
    switch: Path

    def damage(self, kind: str) -> None:
        """From now on; empty: no more."""
        self.switch.write_text(kind)

    def find_trusts(self) -> set[int]:
        return {
            proof.trust for health in self.deployment.healths() for proof in health.pairs.proofs
        }


@pytest.fixture(scope="module")
def vllm(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Faulty]:
    folder = tmp_path_factory.mktemp("witnessed")
    shutil.copy(kv_fault_plugin.__file__, folder / "sitecustomize.py")
    switch = folder / "fault"
    switch.write_text("")
    env = {"PYTHONPATH": str(folder), kv_fault_plugin.SWITCH: str(switch)}
    manifest = tiny_with_connector(
        tiny_model,
        Transport.SHARED_MEMORY,
        checksums=False,
        env=[{"name": name, "value": value} for name, value in env.items()],
    )
    manifest["spec"] |= {  # type: ignore[operator]
        "witness": {"engineShare": 0.1},
        "template": {"resources": {"limits": {"cpu": "1", "memory": "4Gi"}}},
    }
    with deployed(manifest, folder, timeout_s=420) as deployment:
        yield Faulty(deployment, switch)


# KV that is zero is in tests/gateway/witness and `benchmarks/witness`, on emulated engines.
@pytest.mark.parametrize("kind", ["swapped", "lost"])
def test_damaged_kv_is_found_and_requests_are_served_whole_until_it_is_mended(
    vllm: Faulty, kind: str
) -> None:
    vllm.damage("")
    until(lambda: vllm.find_trusts() == {agent_pb2.TRUST_PROVEN}, PATIENCE_S, "it is proven")
    vllm.damage(kind)
    until(lambda: vllm.find_trusts() == {agent_pb2.TRUST_FAILED}, PATIENCE_S, "it is found")
    cases = [make_case(200 + 150 * n) for n in range(6)]
    for case in cases:
        answer = ask(vllm.deployment.url, case)
        assert answer.tokens == ask(engine_url(vllm.deployment, "prefill"), case).tokens
    vllm.damage("")
    until(lambda: vllm.find_trusts() == {agent_pb2.TRUST_PROVEN}, PATIENCE_S, "it is back")
