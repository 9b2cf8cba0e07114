"""The closed loop, and which published runs are compared."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from cleave.perf.timing import EngineTiming

Import = Callable[[str], ModuleType]

HEADER = (
    "id,silicon_data_source,backend,model_path,system,precision,mode,isl,osl,batch_size,tp_size,"
    "attention_dp_size,moe_tp_size,moe_ep_size,silicon_ttft_ms,silicon_tpot_ms,backend_version"
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
    ttft_ms, tpot_ms = serving.simulate_closed_loop(timing, run, 0.0)
    assert tpot_ms == pytest.approx(10.0, rel=0.05)
    assert 10 <= ttft_ms <= 60
    alone = serving.replace(run, batch=1)
    assert serving.simulate_closed_loop(timing, alone, 0.0)[0] == pytest.approx(10.0)
    assert serving.simulate_closed_loop(timing, alone, 7.0)[0] == pytest.approx(17.0)


def test_a_request_waits_for_the_iteration_during_which_it_reaches_the_engine(
    module: Import, tmp_path: Path
) -> None:
    (run,) = read(module, tmp_path, DENSE.format(source="", tpot=8))
    serving = module("serving")
    timing = EngineTiming(1024.0, (0.0, 0.0), 0.0, (10.0, 10.0), (0.0,))
    few = serving.replace(run, batch=2, prompt_tokens=1, output_tokens=100)
    # Prompts take no time; both clients end and start together, so none waits for the other.
    assert serving.simulate_closed_loop(timing, few, 3.0)[0] == pytest.approx(3.0)


def test_beside_decoding_it_waits_for_the_scheduled_iteration_too(
    module: Import, tmp_path: Path
) -> None:
    (run,) = read(module, tmp_path, DENSE.format(source="measured=2026-02-01", tpot=8))
    serving = module("serving")
    timing = EngineTiming(1024.0, (0.0, 0.0), 0.0, (10.0, 10.0), (0.0,))
    few = serving.replace(run, batch=2, prompt_tokens=10, output_tokens=100)
    ahead = serving.replace(timing, schedules_ahead=True)
    first, later = (serving.simulate_closed_loop(each, few, 3.0)[0] for each in (timing, ahead))
    # The first two of 20 requests find an idle engine, and maybe a few others.
    assert 7.0 <= later - first <= 9.0
    old = serving.replace(few, engine=serving.replace(run.engine, schedules_ahead=False))
    assert serving.simulate_closed_loop(ahead, old, 3.0) == serving.simulate_closed_loop(
        timing, old, 3.0
    )


def test_runs_with_8_bit_kv_read_half_as_much(module: Import, tmp_path: Path) -> None:
    (run,) = read(module, tmp_path, DENSE.format(source="measured=2025-10-29", tpot=8))
    (other,) = read(module, tmp_path, EXPERTS.format(tp=4, moe_tp=4, ep=1).replace("b200", "h200"))
    assert (run.shape.kv_dtype_bytes, other.shape.kv_dtype_bytes) == (1, 2)


def test_all_reduces_are_fused_as_the_run_s_engine_did(module: Import, tmp_path: Path) -> None:
    serving = module("serving")
    (run,) = read(module, tmp_path, DENSE.format(source="measured=2025-10-29", tpot=8))
    assert not run.engine.fuses_reduces
    engines = [serving.replace(run.engine, fuses_reduces=each) for each in (False, True)]
    ms = [serving.build_timings(serving.replace(run, engine=each))["tables"] for each in engines]
    assert ms[1].predict_decode_ms(1, 1024) < 0.95 * ms[0].predict_decode_ms(1, 1024)


def test_prompts_without_graphs_take_the_time_of_the_host(module: Import, tmp_path: Path) -> None:
    serving = module("serving")
    row = DENSE.format(source="measured=2025-10-29", tpot=8).replace("h200", "b200")
    (run,) = read(module, tmp_path, row)
    assert run.engine.graph_tokens == 0, "its script has FULL_DECODE_ONLY"
    engines = [serving.replace(run.engine, graph_tokens=tokens) for tokens in (0, 2048)]
    ms = [serving.build_timings(serving.replace(run, engine=each)) for each in engines]
    for name in ("tables", "roofline"):
        host, graph = (each[name].predict_prefill_ms([1024]) for each in ms)
        assert host > 1.5 * graph
        assert ms[0][name].predict_decode_ms(4, 4096) == ms[1][name].predict_decode_ms(4, 4096)


def test_the_front_end_is_fitted_to_the_runs_of_one_gpu(module: Import, tmp_path: Path) -> None:
    rows = [DENSE, DENSE.replace("h200", "h100")]
    first, other = read(module, tmp_path, *(row.format(source="", tpot=8) for row in rows))
    found = [(first, [-0.3, -0.1, 0.2]), (other, [0.0, 0.5, 0.5])]
    assert module("serving").fit_front_end(found, first.gpu) == 1
    assert module("serving").fit_front_end(found, other.gpu) == 0
