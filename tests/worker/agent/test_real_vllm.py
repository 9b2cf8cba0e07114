"""Two agents over real vLLM engines on two cores of this machine."""

import os
import time

import grpc
import pytest

from cleave.local import tiny_model
from cleave.rpc.v1 import agent_pb2

START_SECONDS = 300.0


@pytest.fixture
def model(tmp_path):
    """A tiny random Llama."""
    folder = tmp_path / "tiny"
    tiny_model.build(folder)
    return str(folder)


@pytest.fixture
def pair(agents, model):
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("two engines need two cores")
    options = ("--engine", "vllm", "--model", model, "--served-model-name", "tiny")
    both = [
        agents.start(
            name, role, *options, "--max-model-len", "4096",
            engine_args=("--dtype", "float32"), timing={},
        )
        for name, role in (("p-0", "prefill"), ("d-0", "decode"))
    ]  # fmt: skip
    for agent in both:
        agent.until(lambda told: told.kv_path.verified, START_SECONDS)
    return both


@pytest.mark.vllm
@pytest.mark.timeout(600)
def test_vllm_engines_prove_their_kv_path_report_and_leave_nothing_behind(pair, all_gone) -> None:
    prefill, decode = pair
    told = prefill.health()
    assert told.registration.engine.startswith("vllm 0.")
    assert told.registration.kv_path.transport == "nixl"
    assert told.registration.kv_block_size == 128
    assert told.load.kv_blocks_free == told.registration.kv_blocks_total > 0
    assert told.load.sampled_ns > 0
    assert cores_of(prefill).isdisjoint(cores_of(decode))

    family = prefill.descendants()
    assert len(family) >= 3
    prefill.process.kill()
    prefill.wait()
    all_gone(family)

    family = decode.descendants()
    begun = time.monotonic()
    assert decode.stub.Drain(agent_pb2.DrainRequest(timeout_ms=60_000), timeout=90).empty
    assert decode.wait() == 0
    assert time.monotonic() - begun < 60
    all_gone(family, seconds=0)
    with pytest.raises(grpc.RpcError):
        decode.stub.Health(agent_pb2.HealthRequest(), timeout=5)


def cores_of(agent) -> set[int]:
    """Cores of the warden, which are the engine's."""
    return os.sched_getaffinity(agent.descendants()[0])
