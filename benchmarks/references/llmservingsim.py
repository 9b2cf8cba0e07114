"""LLMServingSim's four recorded runs of vLLM, predicted from its layer profiles.

    git clone https://github.com/casys-kaist/LLMServingSim                       # 5daddb2, MIT
    .venv/bin/python benchmarks/references/llmservingsim.py LLMServingSim        # predictions alone
    .venv/bin/python benchmarks/references/llmservingsim.py LLMServingSim --measured --times WHICH

Its profiles become `Operators`, as those of Cleave's own profiler do, and the simulator serves the
recorded arrivals, lengths and prompts. Without `--measured` only arrivals and lengths of a
recording are read. Written after the comparison: `--times apart` is what was predicted first, with
decoding beside prompts as long as alone, `tabled` has all of the profiles' attention, `cleave`
Cleave's own times instead of the profiles, `linked` those with the link of the recordings' machine.
What is hard: a recording has two clocks.
"""

import argparse
import itertools
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from layer_profile import LINK_GB_PER_S, read_csv, read_operators
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from tabled_attention import TabledAttention, TabledReference

from cleave.api.cluster import Cluster
from cleave.api.enums import DispatchPolicy
from cleave.perf.estimator import build_estimator
from cleave.perf.hardware import memory
from cleave.perf.hardware.gpu import find_gpu
from cleave.perf.model.model_shape import load_shape
from cleave.perf.profile import operator_fit
from cleave.perf.timing import EngineTiming
from cleave.simulator.fleet import SimulatedEngine, SimulatedFleet, SimulatedPool
from cleave.simulator.run import simulate
from cleave.simulator.trace import PromptBlocks, Trace

PERCENTILES = (50, 90, 95, 99)
BLOCK_TOKENS = 16


@dataclass(frozen=True)
class Run:
    """One recording."""

    folder: str
    gpu: str
    model: str
    """As in Cleave's table of models."""


RUNS = (
    Run("RTXPRO6000/Llama-3.1-8B", "RTX-PRO-6000-Server", "llama-3.1-8b"),
    Run("RTXPRO6000/Qwen3-32B", "RTX-PRO-6000-Server", "qwen3-32b"),
    Run("RTXPRO6000/Qwen3-30B-A3B-Instruct-2507", "RTX-PRO-6000-Server", "qwen3-30b-a3b"),
    Run("RTX4090/Llama-3.1-8B", "RTX-4090", "llama-3.1-8b"),
)
Times = dict[str, NDArray[np.float64]]
"""TTFT and TPOT in ms, by request in order of arrival."""


def find_profile(root: Path, run: Run) -> Path:
    """The folder of the profile for a recording's model, GPU and tensor parallel size."""
    flags = _read_meta(root, run)["engine_kwargs"]
    models = root / "profiler/perf" / run.folder.split("/")[0]
    return models / flags["model"] / "bf16" / f"tp{flags['tensor_parallel_size']}"


def _read_meta(root: Path, run: Run) -> dict[str, Any]:
    file = root / "bench/examples" / run.folder / "vllm/meta.json"
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def build_fleet(root: Path, run: Run) -> SimulatedFleet:
    """The engine of a recording with its flags."""
    meta = _read_meta(root, run)
    flags, shape = meta["engine_kwargs"], load_shape(run.model)
    tensor, ranks = flags["tensor_parallel_size"], flags["data_parallel_size"]
    operators = read_operators(find_profile(root, run), shape, tensor, ranks)
    timing: EngineTiming = operator_fit.to_timing(operators, tensor)
    reserve = replace(memory.VLLM_RESERVE, utilisation=0.9)
    engine = SimulatedEngine(
        replace(timing, schedules_ahead=True),
        # One of the recordings says how much KV its engine had.
        meta.get("kv_cache", {}).get("num_kv_tokens")
        or memory.compute_kv_capacity_tokens(
            shape, find_gpu(run.gpu), tensor, 1, reserve, data=ranks
        ),
        BLOCK_TOKENS,
        max_num_seqs=flags["max_num_seqs"],
        max_num_batched_tokens=flags["max_num_batched_tokens"],
        ranks=ranks,
    )
    # vLLM gives a request to the rank with fewest waiting and running ones.
    policy = DispatchPolicy.LEAST_REQUESTS
    return SimulatedFleet(mixed=(SimulatedPool(engine, 1),), dispatch=policy, has_connector=False)


def read_trace(root: Path, run: Run) -> Trace:
    """Arrivals as sent, lengths and prompts of a recording."""
    requests = _read_lines(root / "bench/examples" / run.folder / "vllm/requests.jsonl")
    dataset = _read_meta(root, run)["dataset_path"]
    texts = [each["input_tok_ids"] for each in _read_lines(root / dataset)]
    sent = np.array([each["arrival_time"] for each in requests]) * 1000
    return Trace(
        sent - sent[0],
        np.array([each["input_toks"] for each in requests]),
        np.array([each["output_toks"] for each in requests]),
        blocks=_number_blocks(texts),
    )


def _number_blocks(texts: Sequence[Sequence[int]]) -> PromptBlocks:
    known: dict[tuple[int, ...], int] = {}
    numbers, starts = [], [0]
    for text in texts:
        ends = itertools.chain(range(BLOCK_TOKENS, len(text), BLOCK_TOKENS), (len(text),))
        numbers += [known.setdefault(tuple(text[:end]), len(known)) for end in ends]
        starts.append(len(numbers))
    return PromptBlocks(BLOCK_TOKENS, np.array(starts), np.array(numbers, np.int64), len(known))


def _read_lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def read_measured(root: Path, run: Run) -> Times:
    """What the recording says. Arrivals are of another clock than the rest: the least difference
    between arrival and queue is theirs, as if the quickest request had not waited at all."""
    requests = _read_lines(root / "bench/examples" / run.folder / "vllm/requests.jsonl")
    names = ("arrival_time", "queued_ts", "first_token_ts", "last_token_ts", "output_toks")
    sent, queued, first, last, tokens = (
        np.array([each[name] for each in requests], float) for name in names
    )
    sent += np.min(queued - sent)
    gaps = np.maximum(tokens - 1, 1)
    return {"TTFT": (first - sent) * 1000, "TPOT": (last - first) * 1000 / gaps}


def predict(root: Path, run: Run) -> Times:
    """What the simulator says."""
    return _simulate(root, run, build_fleet(root, run))


def predict_apart(root: Path, run: Run) -> Times:
    """The same from profiles without iterations of prompts and decoding together."""
    return _simulate(root, run, _build_fleet_apart(root, run))


def _simulate(root: Path, run: Run, fleet: SimulatedFleet) -> Times:
    outcome = simulate(fleet, read_trace(root, run))
    return {"TTFT": outcome.ttft_ms, "TPOT": outcome.tpot_ms}


def _build_fleet_apart(root: Path, run: Run) -> SimulatedFleet:
    fleet = build_fleet(root, run)
    return _replace_timing(fleet, replace(fleet.mixed[0].engine.timing, mixed_context_ms=()))


def _replace_timing(fleet: SimulatedFleet, timing: EngineTiming) -> SimulatedFleet:
    (pool,) = fleet.mixed
    return replace(fleet, mixed=(replace(pool, engine=replace(pool.engine, timing=timing)),))


def predict_tabled(root: Path, run: Run) -> Times:
    """What the tests' slow simulator says with all of the profile's attention."""
    folder, shape = find_profile(root, run), load_shape(run.model)
    names = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")
    meta = yaml.safe_load((folder.parent / "meta.yaml").read_text())
    ms = {
        tuple(int(row[name]) for name in names): float(row["time_us"]) / 1000
        for row in read_csv(folder / "attention.csv")
    }
    fits = meta["skew_fit"].get("per_tp", {})
    alpha = fits.get(int(folder.name[2:]), {}).get("alpha_default", 0.0)
    attention = TabledAttention(ms, shape.num_layers, alpha)
    found = TabledReference(_build_fleet_apart(root, run), read_trace(root, run), attention).run()
    columns = ("arrival", "first_token", "end", "output")
    sent, first, end, tokens = (
        np.array([getattr(each, name) for each in found.requests], float) for name in columns
    )
    return {"TTFT": first - sent, "TPOT": (end - first) / np.maximum(tokens - 1, 1)}


def predict_by_cleave(root: Path, run: Run, *, has_link: bool = False) -> Times:
    """What the simulator says with Cleave's own times: kernel tables, or the roofline. `has_link`:
    with the bandwidth between the GPUs of the recordings' machine."""
    flags, shape = _read_meta(root, run)["engine_kwargs"], load_shape(run.model)
    nodes = [{"count": 1, "gpu": run.gpu, "gpusPerNode": 8}]
    network = {"kind": "Ethernet", "nodeAllReduceGbps": 8 * LINK_GB_PER_S} if has_link else None
    cluster = Cluster.model_validate({"nodes": nodes, "network": network})
    ranks = flags["data_parallel_size"]
    found = build_estimator(shape, cluster).estimate(
        run.gpu, flags["tensor_parallel_size"], 1, ranks, expert=ranks > 1
    )
    assert found is not None
    timing = replace(found.timing, schedules_ahead=True)
    return _simulate(root, run, _replace_timing(build_fleet(root, run), timing))


PREDICTORS = {
    "profile": predict,
    "apart": predict_apart,
    "tabled": predict_tabled,
    "cleave": predict_by_cleave,
    "linked": partial(predict_by_cleave, has_link=True),
}


def describe(values: NDArray[np.float64]) -> list[str]:
    """Percentiles in ms."""
    return [f"{each:,.1f}" for each in np.percentile(values, PERCENTILES)]


def compare(predicted: NDArray[np.float64], measured: NDArray[np.float64]) -> list[str]:
    """Relative errors of percentiles, then the median error of requests."""
    sides = (np.percentile(side, PERCENTILES) for side in (predicted, measured))
    errors = np.divide(*sides) - 1
    each = np.median(np.abs(predicted / measured - 1))
    return [*(f"{error:+.1%}" for error in errors), f"{each:.1%}"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--measured", action="store_true", help="compare with what was recorded")
    parser.add_argument("--times", choices=PREDICTORS, default="profile")
    options = parser.parse_args(arguments)
    columns = ["run", "", *(f"P{each}" for each in PERCENTILES)]
    table = Table(*columns, *(["each request"] if options.measured else []))
    errors: dict[tuple[str, str], list[NDArray[np.float64]]] = defaultdict(list)
    for run in RUNS:
        found = PREDICTORS[options.times](options.checkout, run)
        seen = read_measured(options.checkout, run) if options.measured else {}
        for name in found:
            cells = compare(found[name], seen[name]) if seen else describe(found[name])
            table.add_row(run.folder, name, *cells)
            if seen:
                for gpu in (run.gpu, "any"):
                    errors[gpu, name].append(np.abs(found[name] / seen[name] - 1))
    console = Console(width=110)
    console.print(table)
    for (gpu, name), parts in errors.items():
        median, high = np.percentile(np.concatenate(parts), (50, 90))
        console.print(f"{gpu}, all requests: {name} {median:.1%} ({high:.0%})")


if __name__ == "__main__":
    main()
