"""Times of dispatch and combine beside published ones."""

from dataclasses import replace

import pytest

from cleave.perf.hardware.all_to_all import (
    AllToAllBackend,
    GpuGroup,
    compute_all_to_all_ms,
    count_distinct,
)
from cleave.perf.hardware.gpu import find_gpu
from cleave.perf.hardware.link import Link, LinkKind, build_network_link, build_node_link


def group(gpus: int, gpu: str = "H200", per_node: int = 8) -> GpuGroup:
    found = find_gpu(gpu)
    return GpuGroup(gpus, per_node, build_node_link(found), build_network_link(found, 400, 5))


def predict(at: GpuGroup, backend: AllToAllBackend, rows: int) -> float:
    return compute_all_to_all_ms(at, backend, rows, 7168, 8)


@pytest.mark.parametrize(
    ("gpus", "microseconds"),
    [(16, 118 + 195), (32, 155 + 273), (64, 173 + 314), (128, 192 + 369), (256, 194 + 360)],
)
def test_low_latency_is_close_to_deepeps_own_figures(gpus: int, microseconds: float) -> None:
    # github.com/deepseek-ai/DeepEP, docs/legacy.md: H800, 128 tokens.
    found = predict(group(gpus), AllToAllBackend.LOW_LATENCY, 128) * 1e3
    assert found == pytest.approx(microseconds, rel=0.12)


def test_a_prompt_takes_high_throughput_and_a_token_low_latency() -> None:
    at = group(32)
    high, low, both = (
        AllToAllBackend.HIGH_THROUGHPUT,
        AllToAllBackend.LOW_LATENCY,
        AllToAllBackend.DEEPEP,
    )
    assert predict(at, both, 16) == predict(at, low, 16) < predict(at, high, 16)
    assert predict(at, both, 4096) == predict(at, high, 4096) < predict(at, low, 4096)


def test_all_gather_grows_with_the_gpus_and_deepep_hardly_does() -> None:
    for backend, least in ((AllToAllBackend.ALL_GATHER, 2.5), (AllToAllBackend.DEEPEP, 1.0)):
        ratio = predict(group(128), backend, 256) / predict(group(32), backend, 256)
        assert least < ratio < least + 1.6


def test_without_rdma_tokens_are_gathered() -> None:
    network = Link(LinkKind.ETHERNET, 25.0)
    over, within = (replace(group(gpus), network=network) for gpus in (16, 8))
    backends = AllToAllBackend.DEEPEP, AllToAllBackend.ALL_GATHER
    assert predict(over, backends[0], 64) == predict(over, backends[1], 64)
    assert predict(within, backends[0], 64) < predict(within, backends[1], 64)


def test_an_nvlink_domain_spares_the_network() -> None:
    inside = group(64, "GB200", per_node=72)
    assert inside.nodes == 1
    # 17 + 42 + 72 us (aiconfigurator-core 0.12.0, TensorRT-LLM 1.3.0rc10)
    assert predict(inside, AllToAllBackend.NVLINK, 256) == pytest.approx(0.131, rel=0.1)
    assert predict(inside, AllToAllBackend.NVLINK, 256) < 0.2 * predict(
        group(64, "GB200", per_node=4), AllToAllBackend.NVLINK, 256
    )


def test_one_gpu_exchanges_nothing() -> None:
    assert predict(group(1), AllToAllBackend.DEEPEP, 100) == 0.0
    assert count_distinct(1, 8) == 1.0
    assert count_distinct(4, 8) == pytest.approx(4 * (1 - 0.75**8))
