"""Published end-to-end measurements of vLLM beside a closed loop over the predicted iterations.

The measurements are those that aiconfigurator-core quotes in `systems/silicon_sample.csv`: of
InferenceX and of its own authors, each with its date. None was used for a constant of Cleave.
"""

import bisect
import csv
import math
import random
import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import before

from cleave.perf import host_launch
from cleave.perf.hardware.gpu import find_gpu
from cleave.perf.hardware.link import build_node_link
from cleave.perf.kernels import composition, tables
from cleave.perf.model import model_shape
from cleave.perf.model.model_shape import ModelShape
from cleave.perf.model.quantization import Quantization
from cleave.perf.profile import operator_fit
from cleave.perf.roofline.efficiency import select_efficiency
from cleave.perf.roofline.roofline import VLLM, Roofline
from cleave.perf.timing import EngineTiming, PromptChunk

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
FP8_KV = {
    ("H100-SXM-80GB", "llama-3.1-70b"),
    ("H200-SXM-141GB", "llama-3.1-70b"),
    ("B200-SXM-180GB", "llama-3.1-70b"),
    ("B200-SXM-180GB", "gpt-oss-120b"),
    ("B200-SXM-180GB", "minimax-m2.5"),
    ("H200-SXM-141GB", "minimax-m2.5"),
    ("H200-SXM-141GB", "llama-3.1-8b"),
}
"""(GPU, model) that ran with KV of 8 bits: `--kv-cache-dtype fp8` in InferenceX's scripts
(github.com/SemiAnalysisAI/InferenceX, Apache-2.0: benchmarks/70b_fp8_*.sh of October 2025,
benchmarks/single_node/fixed_seq_len/deprecated at 843c625), or a checkpoint with such scales."""
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
FUSED = {("B200-SXM-180GB", "llama-3.1-70b"), ("B200-SXM-180GB", "gpt-oss-120b")}
"""(GPU, model) whose scripts fuse all-reduces with norms."""
FUSED_BY_DEFAULT = (0, 17)
"""Version of vLLM from which it does so without a flag (pull request 34299 of February 2026)."""
GRAPH_TOKENS = {
    ("B200-SXM-180GB", "llama-3.1-70b"): 0,
    ("B200-SXM-180GB", "minimax-m2.5"): 2048,
    ("B200-SXM-180GB", "gpt-oss-120b"): 2048,
    ("H100-SXM-80GB", "gpt-oss-120b"): 2048,
    ("H200-SXM-141GB", "gpt-oss-120b"): 2048,
}
"""(GPU, model) -> largest iteration with prompts that ran as a CUDA graph, by the same scripts:
`cudagraph_mode: FULL_DECODE_ONLY` or `max-cudagraph-capture-size`."""
DEFAULT_GRAPH_TOKENS = 512
"""Of vLLM's versions that these runs had."""
RATED_SHARE = 0.9
"""Runs that need more of the GPUs' rated speeds contradict their published number of requests; they
are left out, and counted."""
MAX_BATCHED_TOKENS = 8192
LOW_LOAD = 4
"""Requests at a time up to which the time to first token is compared: beyond, it is a queue."""
LONGEST_FRONT_END_MS = 30
SHORTEST = 0.8
"""InferenceX draws lengths evenly from this share of the nominal ones on."""
REQUESTS_PER_CLIENT = 10
"""A run has this many times as many requests as at a time. The first ones arrive together."""


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
    fuses_reduces: bool
    graph_tokens: int
    """Largest iteration with prompts that ran as a CUDA graph."""


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
            if (gpu, model[0]) in FP8_KV:
                shape = replace(shape, kv_dtype_bytes=1)
            name, date = row["silicon_data_source"], ""
            if match := re.search(r"measured=(\d{4}-\d\d-\d\d)", name):
                date = match[1]
            measured = Measurement(
                gpu,
                model[0] + ("" if model[1] is None else f"-{row['precision'] or 'fp8'}"),
                shape,
                int(float(row["tp_size"])),
                int(float(row["batch_size"])),
                int(row["isl"]),
                int(row["osl"]),
                float(row["silicon_ttft_ms"]),
                float(row["silicon_tpot_ms"]),
                date,
                bool(date),
                (gpu, model[0]) in FUSED or is_fused_by_default(row["backend_version"] or ""),
                GRAPH_TOKENS.get((gpu, model[0]), DEFAULT_GRAPH_TOKENS),
            )
            key = (gpu, measured.model, measured.tensor, measured.batch)
            equal = (*key, measured.prompt_tokens, measured.output_tokens)
            if equal not in found or found[equal].date <= date:
                found[equal] = measured
    return list(found.values())


def is_fused_by_default(version: str) -> bool:
    """Whether this version of vLLM fuses all-reduces by itself; False where it is not given."""
    found = re.match(r"(\d+)\.(\d+)\.", version)
    return found is not None and (int(found[1]), int(found[2])) >= FUSED_BY_DEFAULT


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
    share = 1.0 if experts is None else experts.count_activated(run.batch) / experts.count
    context = run.batch * (run.prompt_tokens + run.output_tokens / 2)
    read = (shape.weight_bytes * share + context * shape.kv_bytes_per_token) / run.tensor
    read_ms = read / (gpu.memory_gbps * 1e6)
    flops = run.batch * run.prompt_tokens / run.output_tokens * shape.flops_per_token / run.tensor
    return run.tpot_ms > (read_ms + flops / (tflops * 1e9)) / RATED_SHARE


def simulate_closed_loop(
    timing: EngineTiming, run: Measurement, front_end_ms: float
) -> tuple[float, float]:
    """(mean time to first token, mean time per output token) in ms over a run: `run.batch` clients
    start together, and each sends its next request when it has the answer. A request reaches the
    engine after `front_end_ms`, as in the planner's simulation. Prompts run in chunks beside
    decoding requests, first come first served. InferenceX's engines scheduled one iteration ahead,
    by a flag or since vLLM 0.14 by default, the others (0.12) did not."""
    rng = random.Random(0)
    shortest = SHORTEST if run.is_inferencex else 1.0

    def draw(tokens: int) -> int:
        return rng.randint(int(tokens * shortest), tokens)

    def arrive(sent_ms: float) -> _Request:
        return _Request(sent_ms, draw(run.prompt_tokens), draw(run.output_tokens))

    is_ahead = timing.schedules_ahead and run.is_inferencex
    now = scheduled_ms = front_end_ms
    """`scheduled_ms`: when the next iteration was scheduled, if anything was to be computed."""
    left = run.batch * (REQUESTS_PER_CLIENT - 1)
    requests = [arrive(0.0) for _ in range(run.batch)]
    """Sent and without a first token, the oldest first."""
    decoding: list[_Request] = []
    ttft: list[float] = []
    tpot: list[float] = []
    while requests or decoding:
        if not is_ahead or not (decoding or requests[0].sent_ms + front_end_ms <= scheduled_ms):
            scheduled_ms = now
        waiting = [each for each in requests if each.sent_ms + front_end_ms <= scheduled_ms]
        scheduled_ms = now
        context = sum(each.prompt_tokens + each.generated for each in decoding)
        count, computed = 1, []
        if waiting:
            chunks, computed = _take_chunks(waiting, MAX_BATCHED_TOKENS - len(decoding))
            now += timing.predict_iteration_ms(chunks, len(decoding), context)
        elif decoding:
            until = requests[0].sent_ms + front_end_ms if requests else math.inf
            left_tokens = min(each.output_tokens - each.generated for each in decoding)
            count, ms, last_ms = sum_decode_ms(
                timing, len(decoding), context, left_tokens, until - now, int(is_ahead)
            )
            scheduled_ms = now + ms - last_ms
            now += ms
        else:
            now = scheduled_ms = requests[0].sent_ms + front_end_ms
        for each in decoding:
            each.generated += count
        for each in computed:
            each.generated, each.first_ms = 1, now
            ttft.append(now - each.sent_ms)
            requests.remove(each)
        done = [each for each in decoding if each.generated >= each.output_tokens]
        decoding = [each for each in decoding if each.generated < each.output_tokens] + computed
        for each in done:
            tpot.append((now - each.first_ms) / (each.output_tokens - 1))
            if left > 0:
                requests.append(arrive(now))
                left -= 1
    return statistics.mean(ttft), statistics.mean(tpot)


def sum_decode_ms(
    timing: EngineTiming, batch: int, context: int, most: int, until_ms: float, ahead: int
) -> tuple[int, float, float]:
    """(number, ms, ms of the last) of decode iterations from a sum of contexts of `context` on:
    `most`, or as many as start before `until_ms` and `ahead` more. Each is longer than the one
    before by the same time."""
    first = timing.predict_decode_ms(batch, context)
    growth = timing.predict_decode_ms(batch, context + batch) - first

    def total(count: int) -> float:
        return count * first + growth * count * (count - 1) / 2

    count = bisect.bisect_left(range(most), until_ms, key=total) + ahead
    count = min(max(count, 1), most)
    return count, total(count), first + growth * (count - 1)


@dataclass(eq=False)
class _Request:
    sent_ms: float
    prompt_tokens: int
    output_tokens: int
    computed: int = 0
    generated: int = 0
    first_ms: float = 0.0


def _take_chunks(
    waiting: Sequence[_Request], budget: int
) -> tuple[list[PromptChunk], list[_Request]]:
    """The chunks of an iteration, and the requests whose prompts they complete."""
    chunks: list[PromptChunk] = []
    completed: list[_Request] = []
    for request in waiting:
        count = min(budget, request.prompt_tokens - request.computed)
        if count <= 0:
            break
        chunks.append(PromptChunk(request.computed, request.computed + count))
        request.computed += count
        budget -= count
        if request.computed == request.prompt_tokens:
            completed.append(request)
    return chunks, completed


def build_timings(run: Measurement) -> dict[str, EngineTiming]:
    """Iteration times by source: kernel tables if there are any, the roofline, the old roofline.
    All-reduces and CUDA graphs are as the run's engine had them."""
    shape, tensor, found = run.shape, run.tensor, find_gpu(run.gpu)
    known = tables.find_tables(found)
    if known is not None and not run.fuses_reduces:
        known = replace(known, fused_limits={})
    operators = composition.build_operators(shape, known, tensor) if known else None
    launch = host_launch.select_host_launch(shape, found)
    launch = replace(launch, graph_tokens=run.graph_tokens)
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
        groups[each.gpu, each.model, each.tensor, each.fuses_reduces].append(each)
    for group in groups.values():
        yield build_timings(group[0]), group


def predict_front_ends(root: Path) -> list[tuple[Measurement, list[float]]]:
    """InferenceX's runs at low load, with the relative error of the time to first token by
    kernel tables for every front end of 0, 1, 2, ... ms."""
    runs = [e for e in read_measurements(root) if e.is_inferencex and e.batch <= LOW_LOAD]
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
