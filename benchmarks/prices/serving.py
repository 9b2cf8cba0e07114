"""Published end-to-end measurements of vLLM beside a closed loop over the predicted iterations.

The measurements are those that aiconfigurator-core quotes in `systems/silicon_sample.csv`: of
InferenceX and of its own authors, each with its date. None was used for a constant of Cleave.
"""

import csv
import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import before
import engines
from closed_loop import ClosedLoop, Load
from engines import Engine

from cleave.perf import host_launch
from cleave.perf.hardware.gpu import find_gpu
from cleave.perf.hardware.link import build_node_link
from cleave.perf.hardware.memory import MemoryReserve, compute_kv_capacity_tokens
from cleave.perf.kernels import composition, tables
from cleave.perf.model import model_shape
from cleave.perf.model.model_shape import ModelShape
from cleave.perf.model.quantization import Quantization
from cleave.perf.profile import operator_fit
from cleave.perf.roofline.efficiency import select_efficiency
from cleave.perf.roofline.roofline import VLLM, Roofline
from cleave.perf.timing import EngineTiming

GPUS = {"h100_sxm": "H100-SXM-80GB", "h200_sxm": "H200-SXM-141GB", "b200_sxm": "B200-SXM-180GB"}
FP8 = Quantization("modelopt", 8, is_8_bit_compute=True)
FP8_BLOCK = Quantization("fp8", 8, is_8_bit_compute=True, is_blockwise=True)
NVFP4 = Quantization("modelopt", 4.5, is_8_bit_compute=False, is_4_bit_compute=True)
MODELS: dict[tuple[str, str], tuple[str, Quantization | None]] = {
    ("openai/gpt-oss-120b", "fp4"): ("gpt-oss-120b", None),
    ("meta-llama/Llama-3.1-70B", "fp8"): ("llama-3.1-70b", FP8),
    ("meta-llama/Llama-3.1-70B", "fp4"): ("llama-3.1-70b", NVFP4),
    ("MiniMaxAI/MiniMax-M2.5", "fp4"): ("minimax-m2.5", NVFP4),
    ("Qwen/Qwen3-32B", ""): ("qwen3-32b", None),
    ("Qwen/Qwen3-32B", "fp8"): ("qwen3-32b", FP8_BLOCK),
    ("nvidia/Llama-3.1-8B-Instruct-FP8", "fp8"): ("llama-3.1-8b", FP8),
    ("Qwen/Qwen3-235B-A22B-FP8", "fp8"): ("qwen3-235b-a22b", FP8_BLOCK),
    ("MiniMaxAI/MiniMax-M2.5", "fp8"): ("minimax-m2.5", FP8_BLOCK),
}
"""(model, precision) of the source -> known model and its quantisation."""
MINIMAX = {
    "model_type": "minimax_m2",
    "num_hidden_layers": 62,
    "hidden_size": 3072,
    "num_attention_heads": 48,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 1536,
    "num_local_experts": 256,
    "num_experts_per_tok": 8,
    "vocab_size": 200064,
    "max_position_embeddings": 196608,
    "torch_dtype": "bfloat16",
}
"""Of the config.json of MiniMaxAI/MiniMax-M2.5."""
RATED_SHARE = 0.9
"""Runs that need more of the GPUs' rated speeds contradict their published number of requests; they
are left out, and counted."""
LOW_LOAD = 4
"""Requests at a time up to which the time to first token is compared: beyond, it is a queue."""
LONGEST_FRONT_END_MS = 30
SHORTEST = 0.8
"""InferenceX draws lengths evenly from this share of the nominal ones on."""


@dataclass(frozen=True)
class Measurement:
    """One run with a fixed number of requests at a time. Its times are means over all requests, as
    InferenceX publishes them."""

    gpu: str
    model: str
    shape: ModelShape
    tensor: int
    batch: int
    prompt_tokens: int
    output_tokens: int
    ttft_ms: float
    tpot_ms: float
    date: str
    """Of the measurement; empty: not known."""
    is_inferencex: bool
    engine: Engine

    @property
    def batched_tokens(self) -> int:
        """Of the largest iteration."""
        return self.engine.batched_prompts * self.prompt_tokens or self.engine.batched_tokens


@dataclass(frozen=True)
class ServingError:
    """Relative errors of one measurement by each source of times; 0.1 is 10 % too long."""

    measured: Measurement
    tpot: dict[str, float]
    ttft: dict[str, float]


def read_measurements(root: Path) -> list[Measurement]:
    """Runs of vLLM with tensor parallelism alone, each once; the newest of equal ones."""
    found: dict[tuple[object, ...], Measurement] = {}
    with (root / "silicon_sample.csv").open() as file:
        for row in csv.DictReader(file):
            model = MODELS.get((row["model_path"], row["precision"]))
            gpu = GPUS.get(row["system"])
            is_plain = row["backend"] == "vllm" and row["mode"] == "agg"
            if model is None or gpu is None or not is_plain or not row["tp_size"]:
                continue
            ranks = float(row["tp_size"]), float(row["moe_tp_size"] or row["tp_size"])
            is_sparse = load_shape(model[0]).experts is not None
            if float(row["attention_dp_size"] or 1) > 1 or (is_sparse and ranks[0] != ranks[1]):
                continue
            if is_sparse and float(row["moe_ep_size"] or 1) > 1:
                continue
            shape = load_shape(model[0])
            if model[1] is not None:
                shape = replace(shape, quantization=model[1])
            name = model[0] + ("" if model[1] is None else f"-{row['precision'] or 'fp8'}")
            origin = row["silicon_data_source"]
            match = re.search(r"measured=(\d{4}-\d\d-\d\d)", origin)
            is_inferencex = match is not None and "dynamo_version" not in origin
            date = match[1] if match and is_inferencex else ""
            engine = engines.find_engine(name, gpu, date, row["backend_version"] or "")
            shape = replace(shape, kv_dtype_bytes=engine.kv_bytes)
            measured = Measurement(
                gpu,
                name,
                shape,
                int(float(row["tp_size"])),
                int(float(row["batch_size"])),
                int(row["isl"]),
                int(row["osl"]),
                float(row["silicon_ttft_ms"]),
                float(row["silicon_tpot_ms"]),
                date,
                is_inferencex,
                engine,
            )
            key = (gpu, measured.model, measured.tensor, measured.batch)
            equal = (*key, measured.prompt_tokens, measured.output_tokens)
            if equal not in found or found[equal].date <= date:
                found[equal] = measured
    return list(found.values())


def load_shape(name: str) -> ModelShape:
    """A known model, or MiniMax's, which only this benchmark has."""
    if name == "minimax-m2.5":
        return model_shape.from_config(name, MINIMAX)
    return model_shape.load_shape(name)


def is_plausible(run: Measurement) -> bool:
    """Whether a token takes long enough for what its number of requests implies: reading weights
    and KV, and the FLOPs of the others' prompts, all at nine tenths of the rated speeds."""
    gpu, shape = find_gpu(run.gpu), run.shape
    quantization = shape.quantization
    is_8_bit = quantization is not None and quantization.is_8_bit_compute
    is_4_bit = quantization is not None and quantization.is_4_bit_compute
    tflops = gpu.get_tflops(is_8_bit or is_4_bit) * (2 if is_4_bit else 1)
    experts = shape.experts
    mean = run.prompt_tokens + run.output_tokens / 2
    # KV may have no room for all at a time.
    batch = min(run.batch, count_kv_tokens(run) / mean)
    share = 1.0 if experts is None else experts.count_activated(batch) / experts.count
    context = batch * mean
    read = (shape.weight_bytes * share + context * shape.kv_bytes_per_token) / run.tensor
    read_ms = read / (gpu.memory_gbps * 1e6)
    flops = batch * run.prompt_tokens / run.output_tokens * shape.flops_per_token / run.tensor
    return run.tpot_ms > (read_ms + flops / (tflops * 1e9)) / RATED_SHARE


def simulate_closed_loop(
    timing: EngineTiming, run: Measurement, front_end_ms: float
) -> tuple[float, float]:
    """(mean time to first token, mean time per output token) in ms over a run."""
    load = Load(
        clients=run.batch,
        prompt_tokens=run.prompt_tokens,
        output_tokens=run.output_tokens,
        shortest=SHORTEST if run.is_inferencex else 1.0,
        batched_tokens=run.batched_tokens,
        kv_tokens=count_kv_tokens(run),
    )
    is_ahead = timing.schedules_ahead and run.engine.schedules_ahead
    return ClosedLoop(replace(timing, schedules_ahead=is_ahead), load, front_end_ms).run()


def count_kv_tokens(run: Measurement) -> int:
    """Room for KV, as the planner computes it for the share of memory in the run's script."""
    reserve = MemoryReserve(
        utilisation=run.engine.utilisation, max_num_batched_tokens=run.batched_tokens
    )
    return compute_kv_capacity_tokens(run.shape, find_gpu(run.gpu), run.tensor, 1, reserve)


def build_timings(run: Measurement) -> dict[str, EngineTiming]:
    """Iteration times by source: kernel tables if there are any, the roofline, the old roofline.
    All-reduces and CUDA graphs are as the run's engine had them."""
    shape, tensor, found = run.shape, run.tensor, find_gpu(run.gpu)
    known = tables.find_tables(found)
    if known is not None and not run.engine.fuses_reduces:
        known = replace(known, fused_limits={})
    operators = composition.build_operators(shape, known, tensor) if known else None
    launch = host_launch.select_host_launch(shape, found)
    launch = replace(launch, graph_tokens=run.engine.graph_tokens)
    timings = {}
    if operators is not None:
        fitted = operator_fit.to_timing(operators, tensor)
        fitted = replace(fitted, schedules_ahead=VLLM.schedules_ahead)
        timings["tables"] = host_launch.bound_prompts(fitted, shape, tensor, launch)
    roofline = Roofline(shape, found, tensor, build_node_link(found), select_efficiency(found))
    timings["roofline"] = host_launch.bound_prompts(roofline.to_timing(), shape, tensor, launch)
    timings["before"] = before.build_roofline(shape, found, tensor).to_timing()
    return timings


def iter_errors(root: Path) -> Iterator[ServingError]:
    """Every measurement, grouped so that each instance is estimated once."""
    for timings, runs in iter_instances(filter(is_plausible, read_measurements(root))):
        for run in runs:
            tpot, ttft = {}, {}
            for name, timing in timings.items():
                front_end_ms = 0.0 if name == "before" else VLLM.front_end_ms
                predicted = simulate_closed_loop(timing, run, front_end_ms)
                ttft[name] = predicted[0] / run.ttft_ms - 1
                tpot[name] = predicted[1] / run.tpot_ms - 1
            yield ServingError(run, tpot, ttft)


def iter_instances(
    runs: Iterable[Measurement],
) -> Iterator[tuple[dict[str, EngineTiming], list[Measurement]]]:
    """(iteration times by source, runs) of each instance."""
    groups: dict[tuple[object, ...], list[Measurement]] = defaultdict(list)
    for each in runs:
        groups[each.gpu, each.model, each.tensor, each.engine].append(each)
    for group in groups.values():
        yield build_timings(group[0]), group


def predict_front_ends(root: Path) -> list[tuple[Measurement, list[float]]]:
    """InferenceX's runs with the tables' kernels at low load, and the relative error of the time to
    first token by kernel tables for every front end of 0, 1, 2, ... ms."""
    runs = [
        run
        for run in read_measurements(root)
        if run.is_inferencex and run.batch <= LOW_LOAD and run.engine.has_known_kernels
    ]
    return [
        (
            run,
            [
                simulate_closed_loop(timings["tables"], run, float(ms))[0] / run.ttft_ms - 1
                for ms in range(LONGEST_FRONT_END_MS + 1)
            ],
        )
        for timings, group in iter_instances(filter(is_plausible, runs))
        for run in group
        if "tables" in timings
    ]


def fit_front_end(found: Iterable[tuple[Measurement, list[float]]], gpu: str) -> int:
    """The front end in ms with the least mean absolute error over the runs on this GPU."""
    rows = [errors for run, errors in found if run.gpu == gpu]
    means = [statistics.mean(map(abs, column)) for column in zip(*rows, strict=True)]
    return means.index(min(means))
