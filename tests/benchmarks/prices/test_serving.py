"""The closed loop, and which published runs are compared."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from cleave.perf.timing import EngineTiming

Import = Callable[[str], ModuleType]

HEADER = (
    "id,silicon_data_source,backend,model_path,system,precision,mode,isl,osl,batch_size,tp_size,"
    "attention_dp_size,moe_tp_size,moe_ep_size,silicon_ttft_ms,silicon_tpot_ms"
)
DENSE = "a,{source},vllm,meta-llama/Llama-3.1-70B,h200_sxm,fp8,agg,1024,1024,4,8,,,,70,{tpot}"
EXPERTS = "b,x,vllm,openai/gpt-oss-120b,b200_sxm,fp4,agg,1024,1024,4,{tp},1,{moe_tp},{ep},40,3"


def read(module: Import, folder: Path, *rows: str) -> list[object]:
    (folder / "silicon_sample.csv").write_text("\n".join([HEADER, *rows]))
    return list(module("serving").read_measurements(folder))


def test_equal_runs_count_once_and_the_newest_stays(module: Import, tmp_path: Path) -> None:
    old = DENSE.format(source="measured=2026-02-01", tpot=9)
    new = DENSE.format(source="measured=2026-03-01", tpot=8)
    (run,) = read(module, tmp_path, old, new)
    assert run.tpot_ms == 8
    assert run.is_inferencex
    assert (run.gpu, run.tensor, run.batch) == ("H200-SXM-141GB", 8, 4)
    assert run.shape.quantization.is_8_bit_compute


@pytest.mark.parametrize(("tp", "moe_tp", "ep"), [(4, 1, 4), (1, 4, 1)])
def test_runs_with_other_parallelism_are_left_out(
    module: Import, tmp_path: Path, tp: int, moe_tp: int, ep: int
) -> None:
    assert read(module, tmp_path, EXPERTS.format(tp=tp, moe_tp=moe_tp, ep=ep)) == []
    assert len(read(module, tmp_path, EXPERTS.format(tp=4, moe_tp=4, ep=1))) == 1


def test_runs_faster_than_the_rated_speeds_are_implausible(module: Import, tmp_path: Path) -> None:
    fast, slow = (
        read(module, tmp_path, DENSE.format(source="", tpot=tpot))[0] for tpot in (1.5, 8)
    )
    assert not module("serving").is_plausible(fast)
    assert module("serving").is_plausible(slow)


def test_the_closed_loop_adds_the_others_prompts_to_a_token(module: Import, tmp_path: Path) -> None:
    (run,) = read(module, tmp_path, DENSE.format(source="", tpot=8))
    serving = module("serving")
    # 10 ms an iteration, and as long again for a prompt of 1,024 tokens
    timing = EngineTiming(1024.0, (0.0, 10.0), 0.0, (10.0, 10.0), (0.0,))
    ttft_ms, tpot_ms = serving.simulate_closed_loop(timing, run)
    assert tpot_ms == pytest.approx(10.0, rel=0.05)
    assert 10 <= ttft_ms <= 60
    alone = serving.replace(run, batch=1)
    assert serving.simulate_closed_loop(timing, alone)[0] == pytest.approx(10.0)
