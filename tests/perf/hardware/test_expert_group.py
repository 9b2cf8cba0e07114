"""Experts that several engines share."""

from dataclasses import replace

import pytest

from cleave.perf.hardware.all_to_all import GpuGroup
from cleave.perf.hardware.expert_group import BALANCED, ExpertGroup, ExpertSettings
from cleave.perf.hardware.gpu import find_gpu
from cleave.perf.hardware.link import build_network_link, build_node_link
from cleave.perf.kernels import composition, tables
from cleave.perf.model.model_shape import load_shape
from cleave.perf.roofline import operators
from cleave.perf.roofline.operators import EXPERTS, MatrixProduct

H200 = find_gpu("H200")
SHAPE = load_shape("deepseek-v3")


def group(
    data: int, tensor: int = 1, *, is_whole: bool = True, imbalance: float = 1.0
) -> ExpertGroup:
    gpus = GpuGroup(data * tensor, 8, build_node_link(H200), build_network_link(H200, 400, 5))
    return ExpertGroup(data, is_whole, gpus, ExpertSettings(imbalance=imbalance))


def experts(rows: float, tensor: int = 1, shared: ExpertGroup | None = None) -> MatrixProduct:
    products = operators.iter_matrix_products(SHAPE, tensor, rows, shared)
    return next(each for each in products if each.name == EXPERTS)


def test_ranks_compute_the_tokens_of_all_with_their_share_of_the_experts() -> None:
    alone, one_of_eight = experts(8 * 64), experts(64, 1, group(8))
    assert one_of_eight.flops == pytest.approx(alone.flops / 8)
    assert one_of_eight.size_bytes == pytest.approx(alone.size_bytes / 8)


def test_slices_of_experts_on_eight_gpus_are_tensor_parallelism() -> None:
    assert experts(64, 8, group(1, 8, is_whole=False)) == experts(64, 8)
    shared = experts(64, 1, group(8, is_whole=False))
    assert shared.flops == pytest.approx(experts(8 * 64, 8).flops)


def test_the_busiest_gpu_has_more_tokens_but_no_more_weights() -> None:
    even, uneven = experts(64, 1, group(32)), experts(64, 1, group(32, imbalance=BALANCED))
    assert uneven.flops == pytest.approx(BALANCED * even.flops)
    assert even.size_bytes < uneven.size_bytes < BALANCED * even.size_bytes


def test_gpus_of_one_rank_divide_what_it_sends() -> None:
    one, four = group(32), group(8, 4)
    sent, divided = (each.compute_exchange_ms(256, 7168, 8) for each in (one, replace(four)))
    assert divided < sent
    assert group(1, 8).compute_exchange_ms(256, 7168, 8) == 0.0


def test_kernels_of_whole_experts_take_their_share_of_one_gpus_time() -> None:
    found = tables.find_tables(H200)
    assert found is not None
    rows = [point.ms for point in _points(found, None)]
    shared = [point.ms for point in _points(found, group(32))]
    start_ms = 0.04 * (1 - 3 / 61)
    # 128 rows on each of 32 ranks are the 4,096 of one GPU.
    few, many = composition.ROWS.tolist().index(128), composition.ROWS.tolist().index(4096)
    assert shared[few] - start_ms == pytest.approx((rows[many] - start_ms) / 32, rel=0.01)


def _points(found: tables.KernelTables, shared: ExpertGroup | None) -> list:  # type: ignore[type-arg]
    built = composition.build_operators(SHAPE, found, 1, shared)
    assert built is not None
    has_exchange = any(point.operator == "all_to_all" for point in built.layer)
    assert has_exchange is (shared is not None)
    return [point for point in built.layer if point.operator == "experts"]
