"""What the importer keeps of the source's tables."""

from collections.abc import Callable
from types import ModuleType

import numpy as np
import pytest

Import = Callable[[str], ModuleType]


def columns(**values: object) -> dict[str, np.ndarray]:
    return {name: np.array(value) for name, value in values.items()}


def test_rows_off_the_grid_are_left_out_and_gaps_are_nan(module: Import) -> None:
    rows = columns(
        gemm_dtype=["bfloat16", "bfloat16", "bfloat16", "fp8_block"],
        m=[1, 3, 2, 1],
        n=[64, 64, 64, 64],
        k=[256, 256, 100, 256],
        latency=[0.5, 0.6, 0.7, 0.8],
    )
    found = module("import_tables").build_gemm(rows)
    assert found["gemm_keys"].tolist() == [[0, 64, 256]]
    assert found["gemm_ms"][0, 0] == np.float16(0.5)
    assert np.isnan(found["gemm_ms"][0, 1:]).all()


def test_contexts_include_the_new_token(module: Import) -> None:
    rows = columns(
        batch_size=[2, 2],
        step=[511, 512],
        num_heads=[8, 8],
        num_key_value_heads=[2, 2],
        head_dim=[128, 128],
        window_size=[0, 0],
        kv_cache_dtype=["bfloat16", "bfloat16"],
        latency=[0.1, 0.2],
    )
    found = module("import_tables").build_decode(rows)
    assert found["decode_keys"].tolist() == [[128, 0, 8, 2]]
    known = np.argwhere(~np.isnan(found["decode_ms"]))
    assert known.tolist() == [[0, 1, 1]]


def test_head_sizes_without_models_are_left_out(module: Import) -> None:
    rows = columns(
        batch_size=[1],
        isl=[128],
        num_heads=[8],
        num_key_value_heads=[8],
        head_dim=[192],
        window_size=[0],
        kv_cache_dtype=["bfloat16"],
        latency=[0.1],
    )
    assert module("import_tables").build_prefill(rows) == {}


@pytest.mark.parametrize(
    ("offered", "chosen"),
    [(["balanced", "power_law_1.01"], 0.2), (["balanced", "balanced"], 0.2)],
)
def test_uneven_routing_is_preferred(module: Import, offered: list[str], chosen: float) -> None:
    rows = columns(
        moe_dtype=["bfloat16"] * 2,
        num_tokens=[1, 1],
        hidden_size=[4096] * 2,
        inter_size=[14336] * 2,
        topk=[2] * 2,
        num_experts=[8] * 2,
        moe_tp_size=[1] * 2,
        moe_ep_size=[1] * 2,
        distribution=offered,
        latency=[0.1, 0.2],
    )
    found = module("import_tables").build_experts(rows)
    assert found["experts_ms"][0, 0] == np.float16(chosen)
    assert found["routing"] == offered[1]
