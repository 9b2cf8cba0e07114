"""Links against measured collectives."""

import statistics
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cleave.perf.hardware.gpu import find_gpu
from cleave.perf.hardware.link import (
    Link,
    LinkKind,
    build_network_link,
    build_node_link,
    select_slower,
)

A100 = find_gpu("A100-SXM-80GB")
H100 = find_gpu("H100-SXM-80GB")

# Medians in ms from Vidur's operator profiles (github.com/microsoft/vidur at 7d47513, MIT):
# (GPUs, bytes) -> all-reduce in one node.
A100_REDUCE = {
    (2, 1017856): 0.061,
    (2, 13139968): 0.133,
    (2, 67108864): 0.430,
    (4, 1017856): 0.063,
    (4, 13139968): 0.194,
    (4, 67108864): 0.603,
    (8, 1017856): 0.047,
    (8, 13139968): 0.223,
    (8, 67108864): 0.675,
}
H100_REDUCE = {
    (2, 1017856): 0.037,
    (2, 13139968): 0.063,
    (2, 67108864): 0.245,
    (4, 1017856): 0.041,
    (4, 13139968): 0.079,
    (4, 67108864): 0.318,
    (8, 1017856): 0.033,
    (8, 13139968): 0.108,
    (8, 67108864): 0.322,
}
# bytes -> send and receive: in one node, and between two DGX H100.
H100_SEND = {1017856: 0.010, 13139968: 0.044, 67108864: 0.193}
H100_NETWORK_SEND = {1017856: 0.057, 13139968: 0.378, 67108864: 1.871}


@pytest.mark.parametrize(("gpu", "measured"), [(A100, A100_REDUCE), (H100, H100_REDUCE)])
def test_all_reduces_take_what_was_measured(gpu, measured: dict[tuple[int, int], float]) -> None:
    link = build_node_link(gpu)
    errors = [
        abs(link.compute_all_reduce_ms(size, gpus) / ms - 1)
        for (gpus, size), ms in measured.items()
    ]
    assert statistics.mean(errors) < 0.15
    assert max(errors) < 0.35


def test_sends_take_what_was_measured() -> None:
    near, far = build_node_link(H100), build_network_link(H100, 400, 5)
    for size, ms in H100_SEND.items():
        assert near.compute_send_ms(size) == pytest.approx(ms, rel=0.10)
    for size, ms in H100_NETWORK_SEND.items():
        assert far.compute_send_ms(size) == pytest.approx(ms, rel=0.20)


def test_networks_are_declared_in_bits_and_computed_in_bytes() -> None:
    assert build_network_link(A100, 200, 5).gb_per_s == 25


def test_a_network_is_no_faster_than_the_way_to_it() -> None:
    assert build_network_link(A100, 800, 5).gb_per_s == A100.pcie_gbps


def test_gpus_without_nvlink_share_pcie() -> None:
    link = build_node_link(find_gpu("L40S"))
    assert (link.kind, link.gb_per_s) == (LinkKind.PCIE, 32)
    assert build_node_link(A100).kind is LinkKind.NVLINK


def test_bytes_through_the_hosts_are_slower_than_past_them() -> None:
    rdma = build_network_link(A100, 25, 5)
    tcp = build_network_link(A100, 25, 5, LinkKind.ETHERNET)
    assert tcp.compute_send_ms(1e6) > rdma.compute_send_ms(1e6)


def test_between_different_gpus_the_slower_side_counts() -> None:
    fast, slow = build_network_link(H100, 400, 2), build_network_link(A100, 200, 5)
    assert (
        select_slower(fast, slow) == select_slower(slow, fast) == Link(LinkKind.INFINIBAND, 25, 5)
    )


@pytest.mark.parametrize(
    ("name", "measured"),
    [
        (
            "H200",
            {(2, 16384): 0.00455, (8, 16384): 0.00515, (8, 1 << 24): 0.0872, (4, 1 << 27): 0.609},
        ),
        ("RTX-PRO-6000", {(2, 256): 0.0041, (4, 256): 0.0126, (8, 256): 0.0236}),
    ],
)
def test_all_reduces_in_graphs_start_sooner_than_calls_of_nccl(
    name: str, measured: dict[tuple[int, int], float]
) -> None:
    # aiconfigurator-core 0.12.0, vLLM 0.22 and 0.24
    link = build_node_link(find_gpu(name))
    for (gpus, size), ms in measured.items():
        found = link.compute_all_reduce_ms(size, gpus, in_graphs=True)
        assert found == pytest.approx(ms, rel=0.55)
        if name == "H200" and size < 1e6:
            assert found < 0.25 * link.compute_all_reduce_ms(size, gpus)


def test_measured_all_reduces_over_pcie_replace_those_of_another_host() -> None:
    # Two RTX PRO 6000 of LLMServingSim's: two messages of 20 us, and 16 GB/s.
    gpu = replace(find_gpu("RTX-PRO-6000"), all_reduce_gbps=16.0)
    ms = build_node_link(gpu).compute_all_reduce_ms(128 * 10240, 2, in_graphs=True)
    assert ms == pytest.approx(0.04 + 128 * 10240 / 16e6)
    eight = build_node_link(gpu).compute_all_reduce_ms(1e9, 8)
    assert eight == pytest.approx(2 * 7 / 8 * 1e9 / 16e6, rel=0.01)


def test_one_gpu_needs_no_all_reduce() -> None:
    assert build_node_link(A100).compute_all_reduce_ms(1e9, 1) == 0


@given(
    size=st.floats(0, 1e10),
    more=st.floats(1, 1e9),
    gpus=st.integers(2, 64),
    gbps=st.floats(1, 2000),
)
def test_more_bytes_more_gpus_and_slower_links_take_longer(
    size: float, more: float, gpus: int, gbps: float
) -> None:
    link = Link(LinkKind.NVLINK, gbps)
    assert (
        link.compute_all_reduce_ms(size + more, gpus) > link.compute_all_reduce_ms(size, gpus) > 0
    )
    assert link.compute_all_reduce_ms(size + more, gpus + 1) > link.compute_all_reduce_ms(
        size + more, gpus
    )
    assert link.compute_send_ms(size + more) > link.compute_send_ms(size) > 0
    assert Link(LinkKind.NVLINK, gbps * 2).compute_send_ms(more) < link.compute_send_ms(more)
