"""Published end-to-end measurements of vLLM beside a closed loop over the predicted iterations.

The measurements are those that aiconfigurator-core quotes in `systems/silicon_sample.csv`: of
InferenceX and of its own authors, each with its date. None was used for a constant of Cleave.
"""

import csv
import random
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import before

from cleave.perf.hardware.gpu import find_gpu
from cleave.perf.hardware.link import build_node_link
from cleave.perf.kernels import composition, tables
from cleave.perf.model import model_shape
from cleave.perf.model.layers import Quantization
from cleave.perf.model.model_shape import ModelShape
from cleave.perf.profile import operator_fit
from cleave.perf.roofline.efficiency import select_efficiency
from cleave.perf.roofline.roofline import Roofline
from cleave.perf.timing import EngineTiming, PromptChunk

GPUS = {"h100_sxm": "H100-SXM-80GB", "h200_sxm": "H200-SXM-141GB", "b200_sxm": "B200-SXM-180GB"}
FP8 = Quantization("fp8", 8, is_8_bit_compute=True)
FP8_BLOCK = Quantization("fp8", 8, is_8_bit_compute=True, is_blockwise=True)
MODELS: dict[tuple[str, str], tuple[str, Quantization | None]] = {
    ("openai/gpt-oss-120b", "fp4"): ("gpt-oss-120b", None),
    ("meta-llama/Llama-3.1-70B", "fp8"): ("llama-3.1-70b", FP8),
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
MAX_BATCHED_TOKENS = 8192
SHORTEST = 0.8
"""InferenceX draws lengths evenly from this share of the nominal ones on."""
LOW_LOAD = 8
"""Requests at a time up to which the time to first token is compared: beyond, it is a queue."""


@dataclass(frozen=True)
class Measurement:
    """One run with a fixed number of requests at a time."""

    gpu: str
    model: str
    shape: ModelShape
    tensor: int
    batch: int
    prompt_tokens: int
    output_tokens: int
    ttft_ms: float
    tpot_ms: float
    source: str
    is_inferencex: bool


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
            name, date = row["silicon_data_source"], ""
            if match := re.search(r"measured=(\d{4}-\d\d-\d\d)", name):
                date = match[1]
            measured = Measurement(
                gpu,
                model[0] + ("" if model[1] is None else "-fp8"),
                shape,
                int(float(row["tp_size"])),
                int(float(row["batch_size"])),
                int(row["isl"]),
                int(row["osl"]),
                float(row["silicon_ttft_ms"]),
                float(row["silicon_tpot_ms"]),
                date,
                bool(date),
            )
            key = (gpu, measured.model, measured.tensor, measured.batch)
            found[*key, measured.prompt_tokens, measured.output_tokens] = measured
    return list(found.values())


def load_shape(name: str) -> ModelShape:
    """A known model, or MiniMax's, which only this benchmark has."""
    if name == "minimax-m2.5":
        return model_shape.from_config(name, MINIMAX)
    return model_shape.load_shape(name)


def is_plausible(run: Measurement) -> bool:
    """Whether a token takes long enough for what its number of requests implies: reading weights
    and 8-bit KV, and the FLOPs of the others' prompts, all at nine tenths of the rated speeds."""
    gpu, shape = find_gpu(run.gpu), run.shape
    quantization = shape.quantization
    is_8_bit = quantization is not None and quantization.is_8_bit_compute
    experts = shape.experts
    share = 1.0 if experts is None else experts.count_activated(run.batch) / experts.count
    context = run.batch * (run.prompt_tokens + run.output_tokens / 2)
    read = (shape.weight_bytes * share + context * shape.kv_bytes_per_token / 2) / run.tensor
    read_ms = read / (gpu.memory_gbps * 1e6)
    flops = run.batch * run.prompt_tokens / run.output_tokens * shape.flops_per_token / run.tensor
    return run.tpot_ms > (read_ms + flops / (gpu.get_tflops(is_8_bit) * 1e9)) / RATED_SHARE


def simulate_closed_loop(timing: EngineTiming, run: Measurement) -> tuple[float, float]:
    """(median time to first token, median time per output token) in ms of an engine that always
    has `run.batch` requests: prompts in chunks beside decoding requests, first come first served.
    """
    rng = random.Random(0)
    shortest = SHORTEST if run.is_inferencex else 1.0

    def draw(tokens: int) -> int:
        return rng.randint(int(tokens * shortest), tokens)

    now, left = 0.0, run.batch * 3
    waiting: list[_Request] = []
    for _ in range(run.batch):
        waiting.append(_Request(0.0, draw(run.prompt_tokens), draw(run.output_tokens)))
    decoding: list[_Request] = []
    ttft: list[float] = []
    tpot: list[float] = []
    while left > 0:
        budget = MAX_BATCHED_TOKENS - len(decoding)
        chunks: list[PromptChunk] = []
        finished_prompts: list[_Request] = []
        for request in waiting:
            count = min(budget, request.prompt_tokens - request.computed)
            if count <= 0:
                break
            chunks.append(PromptChunk(request.computed, request.computed + count))
            request.computed += count
            budget -= count
            if request.computed == request.prompt_tokens:
                finished_prompts.append(request)
        context = sum(each.prompt_tokens + each.generated for each in decoding)
        now += timing.predict_iteration_ms(chunks, len(decoding), context)
        for each in decoding:
            each.generated += 1
        for each in finished_prompts:
            each.generated, each.first_ms = 1, now
            ttft.append(now - each.arrival_ms)
            waiting.remove(each)
        done = [each for each in decoding if each.generated >= each.output_tokens]
        decoding = [each for each in decoding if each.generated < each.output_tokens]
        decoding += finished_prompts
        for each in done:
            tpot.append((now - each.first_ms) / (each.output_tokens - 1))
            waiting.append(_Request(now, draw(run.prompt_tokens), draw(run.output_tokens)))
            left -= 1
    return _find_median(ttft), _find_median(tpot)


@dataclass(eq=False)
class _Request:
    arrival_ms: float
    prompt_tokens: int
    output_tokens: int
    computed: int = 0
    generated: int = 0
    first_ms: float = 0.0


def _find_median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


def build_timings(shape: ModelShape, gpu: str, tensor: int) -> dict[str, EngineTiming]:
    """Iteration times by source: kernel tables if there are any, the roofline, the old roofline."""
    found = find_gpu(gpu)
    known = tables.find_tables(found)
    operators = composition.build_operators(shape, known, tensor) if known else None
    timings = {} if operators is None else {"tables": operator_fit.to_timing(operators, tensor)}
    timings["roofline"] = Roofline(
        shape, found, tensor, build_node_link(found), select_efficiency(found)
    ).to_timing()
    timings["before"] = before.build_roofline(shape, found, tensor).to_timing()
    return timings


def iter_errors(root: Path) -> Iterator[ServingError]:
    """Every measurement, grouped so that each instance is estimated once."""
    groups: dict[tuple[str, str, int], list[Measurement]] = defaultdict(list)
    for each in filter(is_plausible, read_measurements(root)):
        groups[each.gpu, each.model, each.tensor].append(each)
    for (gpu, _, tensor), runs in groups.items():
        timings = build_timings(runs[0].shape, gpu, tensor)
        for run in runs:
            tpot, ttft = {}, {}
            for name, timing in timings.items():
                predicted = simulate_closed_loop(timing, run)
                ttft[name] = predicted[0] / run.ttft_ms - 1
                tpot[name] = predicted[1] / run.tpot_ms - 1
            yield ServingError(run, tpot, ttft)
