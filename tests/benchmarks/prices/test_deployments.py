"""Published runs that plans are compared with."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

Import = Callable[[str], ModuleType]

ROW = (
    "a,measured=2026-03-01,vllm,meta-llama/Llama-3.1-70B,h200_sxm,fp8,agg,1024,1024,{batch},8,,,,"
    "70,{tpot}"
)


def read(module: Import, folder: Path, *rows: str) -> list[Any]:
    header = (
        "id,silicon_data_source,backend,model_path,system,precision,mode,isl,osl,batch_size,"
        "tp_size,attention_dp_size,moe_tp_size,moe_ep_size,silicon_ttft_ms,silicon_tpot_ms,"
        "backend_version"
    )
    text = "\n".join([header, *(f"{row},0.11.0" for row in rows)])
    (folder / "silicon_sample.csv").write_text(text)
    return list(module("serving").read_measurements(folder))


def test_the_run_with_most_requests_per_gpu_counts(module: Import, tmp_path: Path) -> None:
    slow, fast = ROW.format(batch=4, tpot=8), ROW.format(batch=4, tpot=9).replace(",4,8,", ",4,4,")
    runs = read(module, tmp_path, slow, fast, ROW.format(batch=16, tpot=12))
    deployments = module("deployments")
    assert deployments.find_best(runs, 4).tensor == 4
    assert deployments.find_best(runs, 16).tensor == 8
    assert deployments.find_best(runs, 64) is None


def test_a_plan_serves_the_rate_of_eight_gpus_with_the_run_s_kv(
    module: Import, tmp_path: Path
) -> None:
    (run,) = read(module, tmp_path, ROW.format(batch=4, tpot=8))
    deployments = module("deployments")
    problem = deployments.build_problem(run)
    seconds = 0.070 + 0.008 * (922 - 1)
    assert problem.rate == pytest.approx(8 * 4 / seconds / 8, rel=0.01)
    assert problem.slo.tpot_ms == 8
    assert problem.shape.kv_dtype_bytes == 1
    assert problem.estimator.shape == run.shape
