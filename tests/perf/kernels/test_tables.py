"""Kernel times between the measured sizes."""

from dataclasses import replace

import numpy as np
import pytest

from cleave.perf.hardware.gpu import CATALOGUE, find_gpu
from cleave.perf.kernels import tables
from cleave.perf.kernels.tables import BFLOAT16, FP8, KernelTables

H200 = find_gpu("H200")


def load(name: str = "H200") -> KernelTables:
    found = tables.find_tables(find_gpu(name))
    assert found is not None
    return found


def test_a_measured_product_is_returned_as_it_was_measured() -> None:
    found = load()
    rows = found.axes["rows"]
    measured = found.tables["gemm"][BFLOAT16, 4096, 4096]
    predicted = found.predict_product_ms(BFLOAT16, rows, 4096, 4096)
    assert predicted == pytest.approx(measured)


def test_products_between_measured_sides_take_a_time_in_between() -> None:
    found, rows = load(), np.array([16.0, 4096.0])
    small = found.predict_product_ms(BFLOAT16, rows, 5120, 4096)
    between = found.predict_product_ms(BFLOAT16, rows, 6144, 4096)
    large = found.predict_product_ms(BFLOAT16, rows, 7168, 4096)
    assert small is not None
    assert between is not None
    assert large is not None
    assert (small < between).all()
    assert (between < large).all()


def test_beyond_the_table_time_grows_with_the_work() -> None:
    found = load()
    edge = found.predict_product_ms(BFLOAT16, np.array([32768.0]), 65536, 8192)
    double = found.predict_product_ms(BFLOAT16, np.array([32768.0]), 131072, 8192)
    assert edge is not None
    assert double == pytest.approx(2 * edge, rel=0.05)


def test_8_bit_products_are_faster_and_absent_where_the_gpu_has_none() -> None:
    rows = np.array([4096.0])
    wide = load().predict_product_ms(BFLOAT16, rows, 8192, 8192)
    narrow = load().predict_product_ms(FP8, rows, 8192, 8192)
    assert wide is not None
    assert narrow is not None
    assert narrow < 0.8 * wide
    assert load("A100-SXM-80GB").predict_product_ms(FP8, rows, 8192, 8192) is None


def test_attention_uses_the_closest_heads_and_scales_with_its_work() -> None:
    found = load()
    exact = found.find_attention("decode", 128, 0, 32, 8)
    assert exact is not None
    assert exact[1] == 1.0
    many = found.find_attention("decode", 128, 0, 32, 32)
    assert many is not None
    assert many[1] == 4.0
    assert found.find_attention("decode", 96, 0, 32, 8) is None


def test_all_reduces_grow_with_size_and_need_a_measured_number_of_gpus() -> None:
    found = load()
    ms = found.predict_all_reduce_ms(np.array([1e3, 1e6, 1e9]), 8)
    assert ms is not None
    assert (np.diff(ms) > 0).all()
    assert found.predict_all_reduce_ms(np.array([1e3]), 3) is None


def test_experts_are_those_of_measured_shapes() -> None:
    found = load()
    key = (tables.EXPERTS_MXFP4, 2880, 2880, 4, 128, 1)
    ms = found.predict_experts_ms(key, np.array([1.0, 16384.0, 32768.0]))
    assert ms is not None
    assert ms[2] == pytest.approx(2 * ms[1])
    assert found.predict_experts_ms((*key[:4], 100, 1), np.array([1.0])) is None


def test_a_power_cap_or_a_price_keeps_the_tables_and_other_rates_do_not() -> None:
    assert tables.find_tables(replace(H200.with_power_cap(500), price_per_hour=1.0)) is load()
    assert tables.find_tables(replace(H200, memory_gbps=4000)) is None
    assert tables.find_tables(replace(H200, name="mine")) is None


def test_tables_have_the_all_reduces_of_the_host_where_they_were_measured() -> None:
    gpu = replace(find_gpu("RTX-PRO-6000"), all_reduce_gbps=16.0)
    sizes = np.array([4096.0, 1e8])
    for gpus in (2, 8):
        usual, own = (
            tables.find_tables(each).predict_all_reduce_ms(sizes, gpus)  # type: ignore[union-attr]
            for each in (find_gpu("RTX-PRO-6000"), gpu)
        )
        assert own[1] == pytest.approx(2 * (gpus - 1) / gpus * 1e8 / 16e6, rel=0.02)
        assert (own > 1.3 * usual).all()


@pytest.mark.parametrize("gpu", CATALOGUE, ids=lambda gpu: gpu.name)
def test_every_file_names_its_source_and_holds_plausible_times(gpu: object) -> None:
    found = tables.find_tables(gpu)  # type: ignore[arg-type]
    if found is None:
        pytest.skip("no kernels were measured on this GPU")
    assert found.source.endswith("published 2026 with aiconfigurator-core 0.12.0")
    assert found.source.startswith("vLLM 0.")
    for kind, table in found.tables.items():
        for key, ms in table.items():
            known = ms[~np.isnan(ms)]
            assert len(known), (kind, key)
            assert known.min() > 0.001, (kind, key)
    assert 0.001 < found.smallest_kernel_ms < 0.006


@pytest.mark.parametrize("gpu", ["A100-SXM-80GB", "H100", "H200", "B200"])
@pytest.mark.parametrize("gpus", [2, 4, 8])
def test_large_all_reduces_reach_most_of_the_link_and_not_more(gpu: str, gpus: int) -> None:
    found = load(gpu)
    size = float(1 << 29)
    ms = found.predict_all_reduce_ms(np.array([size]), gpus)
    assert ms is not None
    assert found.gpu.nvlink_gbps is not None
    moved = 2 * (gpus - 1) / gpus * size
    assert 0.55 < moved / (float(ms[0]) * 1e6) / found.gpu.nvlink_gbps < 1.1
