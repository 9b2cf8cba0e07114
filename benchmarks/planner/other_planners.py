"""The peers that Cleave's planner is measured beside, each in a Python environment of its own.

Called by run.py with the folders that its options name. What is hard: both peers say little of
their own time. simdistserve is timed inside, by simdistserve_driver.py; Vidur by the lines that it
logs when the simulation begins and ends, so that fitting its regressions is left out.
"""

import json
import marshal
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from cleave.simulator.trace import Trace

DRIVER = Path(__file__).with_name("simdistserve_driver.py")
TIMEOUT_S = 3600.0


Config = tuple[int, int, int, int, int]
"""Stages across nodes, then tensor and pipeline parallel size of prefill, and of decode."""


class AnchorError(RuntimeError):
    """A peer did not run."""


@dataclass(frozen=True, slots=True)
class Grid:
    """One search of simdistserve: bisections of configurations, always one prefill and one decode.

    Its README's settings: P90 TTFT and TPOT apart, 300 requests of seed 0, rates up to 5 per GPU.
    """

    name: str
    nodes: int
    gpus_per_node: int
    high: bool
    sample: int | None = None
    """Measure so many configurations, drawn at random, and scale up; None: all."""
    model: str = "facebook/opt-13b"
    targets: tuple[int, int, int, int] = (200, 100, 90, 90)
    """TTFT and TPOT in ms, and the percentile of each that must hold."""
    max_per_gpu_rate: float = 5
    tolerance: float = 0.25
    num_requests: int = 300


@dataclass(frozen=True, slots=True)
class Trial:
    """One simulation of simdistserve."""

    backend: str
    """`distserve` or `vllm`."""
    model: str
    prefill: tuple[int, int]
    """Tensor and pipeline parallel size."""
    decode: tuple[int, int]
    trace: Trace


@dataclass(frozen=True, slots=True)
class GridResult:
    num_configs: int
    seconds: float
    """For the whole grid; scaled up when it was sampled."""
    is_sampled: bool
    found: tuple[tuple[Config, float | None], ...]
    """Requests per second and GPU of each measured configuration; None: it could not run."""

    @property
    def best(self) -> tuple[Config, float] | None:
        """None when sampled, or when nothing ran."""
        ran = [(config, rate) for config, rate in self.found if rate is not None]
        if self.is_sampled or not ran:
            return None
        return max(ran, key=lambda each: each[1])


@dataclass(frozen=True, slots=True)
class TrialResult:
    seconds: float
    ttft_ms: list[float]
    tpot_ms: list[float]


def run_simdistserve(
    folder: Path, python: Path, dataset: Trace, grids: Sequence[Grid], trials: Sequence[Trial]
) -> tuple[list[GridResult], list[TrialResult]]:
    """`folder` is a clone of LLMServe/DistServe; searches draw from the lengths of `dataset`."""
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        _write_dataset(dataset, scratch / "sharegpt.ds")
        question = {
            "grids": [asdict(grid) for grid in grids],
            "trials": [_describe(trial, scratch / f"{i}.json") for i, trial in enumerate(trials)],
        }
        (scratch / "question.json").write_text(json.dumps(question))
        command = [python, DRIVER, scratch / "question.json", scratch / "answer.json"]
        environment = os.environ | {"PYTHONPATH": str(folder), "DATASET": str(scratch)}
        _run([str(word) for word in command], environment, scratch)
        answer = json.loads((scratch / "answer.json").read_text())
    found = [_read_grid(grid, result) for grid, result in zip(grids, answer["grids"], strict=True)]
    return found, [TrialResult(**result) for result in answer["trials"]]


def run_vidur(folder: Path, python: Path, num_requests: int, rate: float) -> float:
    """Seconds for `num_requests` of arXiv's lengths on one replica under Sarathi, chunks of 512.

    `folder` is a clone of microsoft/vidur at e2d00e9, whose profiles hold CodeLlama-34B with TP 2
    on an A100. Regressions are linear (its own choice, random forests, only trains for longer).
    """
    options = {
        "replica_device": "a100",
        "replica_model_name": "codellama/CodeLlama-34b-Instruct-hf",
        "replica_num_tensor_parallel_workers": 2,
        "replica_num_pipeline_stages": 1,
        "replica_scheduler_provider": "sarathi",
        "execution_time_predictor_provider": "linear_regression",
        "request_generator_provider": "synthetic",
        "synthetic_request_generator_length_provider": "trace",
        "trace_request_length_generator_trace_file": "data/processed_traces/"
        "arxiv_summarization_stats_llama2_tokenizer_filtered_v2.csv",
        "synthetic_request_generator_interval_provider": "poisson",
        "poisson_request_interval_generator_qps": rate,
        "synthetic_request_generator_num_requests": num_requests,
    }
    words = [word for key, value in options.items() for word in (f"--{key}", str(value))]
    command = [str(python), "-m", "simulator.main", *words]
    command += ["--no-write_chrome_trace", "--no-write_metrics"]
    environment = os.environ | {"WANDB_MODE": "disabled", "PYTHONUNBUFFERED": "1"}
    return _time_between(command, environment, folder, "Starting simulation", "Simulation ended")


def _write_dataset(dataset: Trace, path: Path) -> None:
    lengths = zip(dataset.prompt_tokens.tolist(), dataset.output_tokens.tolist(), strict=True)
    requests = [("", prompt, output) for prompt, output in lengths]
    path.write_bytes(marshal.dumps({"dataset_name": "sharegpt", "reqs": requests}))


def _describe(trial: Trial, path: Path) -> dict[str, object]:
    trace = trial.trace
    # The first request of a recorded workload arrives at 0 there, independent of the file.
    arrivals_s = (trace.arrival_ms - trace.arrival_ms[0]) / 1000
    rows = zip(
        arrivals_s.tolist(), trace.prompt_tokens.tolist(), trace.output_tokens.tolist(), strict=True
    )
    keys = ("start_time", "prompt_len", "output_len")
    path.write_text(json.dumps([dict(zip(keys, row, strict=True)) for row in rows]))
    return {
        "backend": trial.backend,
        "model": trial.model,
        "prefill": trial.prefill,
        "decode": trial.decode,
        "num_requests": len(trace),
        "workload": str(path),
    }


def _read_grid(grid: Grid, result: dict) -> GridResult:
    scale = result["num_configs"] / len(result["seconds"])
    return GridResult(
        num_configs=result["num_configs"],
        seconds=sum(result["seconds"]) * scale,
        is_sampled=grid.sample is not None,
        found=tuple((tuple(one["config"]), one["goodput_per_gpu"]) for one in result["found"]),
    )


def _run(command: list[str], environment: dict[str, str], folder: Path) -> None:
    try:
        done = subprocess.run(
            command, env=environment, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise AnchorError(str(error)) from error
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        raise AnchorError(f"{' '.join(command[:2])}: {last[0]}")


def _time_between(
    command: list[str], environment: dict[str, str], folder: Path, begin: str, end: str
) -> float:
    started = ended = None
    try:
        process = subprocess.Popen(
            command,
            env=environment,
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    except OSError as error:
        raise AnchorError(str(error)) from error
    with process:
        assert process.stdout is not None
        last = ""
        for line in process.stdout:
            last = line.strip() or last
            if re.search(begin, line):
                started = time.perf_counter()
            elif re.search(end, line):
                ended = time.perf_counter()
    if process.returncode or started is None or ended is None:
        raise AnchorError(f"{' '.join(command[:3])}: {last or 'no message'}")
    return ended - started
