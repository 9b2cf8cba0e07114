"""Which published runs had the planner's engine."""

from collections.abc import Callable
from types import ModuleType

import pytest

Import = Callable[[str], ModuleType]


@pytest.mark.parametrize(
    ("model", "gpu", "date", "version", "differs"),
    [
        ("qwen3-32b", "H100-SXM-80GB", "", "0.12.0", "synchronous scheduling"),
        ("qwen3-32b", "H100-SXM-80GB", "", "0.14.0", ""),
        ("llama-3.1-70b-fp8", "H100-SXM-80GB", "2025-10-29", "", "synchronous scheduling"),
        ("llama-3.1-70b-fp8", "H200-SXM-141GB", "2025-10-29", "", ""),
        ("llama-3.1-70b-fp4", "B200-SXM-180GB", "2025-10-29", "", "CUTLASS's products of 4 bits"),
        ("gpt-oss-120b", "H200-SXM-141GB", "2025-11-02", "", ""),
        ("gpt-oss-120b", "H200-SXM-141GB", "2026-03-27", "0.18.0", "Marlin's experts"),
        ("minimax-m2.5-fp8", "H200-SXM-141GB", "2026-03-01", "0.16.0", "FlashInfer's experts"),
        ("minimax-m2.5-fp8", "H200-SXM-141GB", "2026-03-28", "0.18.0", "expert parallelism"),
        ("minimax-m2.5-fp8", "B200-SXM-180GB", "2026-04-22", "0.19.0", ""),
    ],
)
def test_scripts_and_versions_decide_which_engine_is_another_one(
    module: Import, model: str, gpu: str, date: str, version: str, differs: str
) -> None:
    assert module("engines").find_engine(model, gpu, date, version).differs == differs


def test_options_are_those_of_the_script_of_that_day(module: Import) -> None:
    find = module("engines").find_engine
    early, late = (
        find("minimax-m2.5-fp8", "B200-SXM-180GB", date, version)
        for date, version in (("2026-03-28", "0.17.0"), ("2026-04-22", "0.19.0"))
    )
    assert (early.kv_bytes, late.kv_bytes) == (2, 1)
    assert (early.batched_prompts, late.batched_prompts) == (0, 2)
    old, new = (
        find("gpt-oss-120b", "B200-SXM-180GB", date, "") for date in ("2025-11-02", "2026-02-25")
    )
    assert (old.kv_bytes, new.kv_bytes) == (2, 1)


@pytest.mark.parametrize(
    ("version", "is_fused"), [("0.16.0", False), ("0.17.0", True), ("1.0.0", True), ("", False)]
)
def test_all_reduces_are_fused_from_a_version_on(
    module: Import, version: str, is_fused: bool
) -> None:
    engine = module("engines").find_engine("other", "H100-SXM-80GB", "", version)
    assert engine.fuses_reduces is is_fused
