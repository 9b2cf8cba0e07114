"""Runs simdistserve as it is, in its own Python, and says how long it took and what it found.

Started by anchor.py: `python simdistserve_driver.py QUESTION ANSWER`, both JSON files, with
DistServe's folder on PYTHONPATH and $DATASET set. Imports nothing of Cleave.
"""

import contextlib
import io
import json
import random
import sys
import time
import warnings
from pathlib import Path

from simdistserve.benchmarks.search_binary import run_binary_search
from simdistserve.benchmarks.search_configs import get_distserve_configs
from simdistserve.benchmarks.simulate_dist import parse_args, run_experiment
from simdistserve.constants import ModelTypes


def main() -> None:
    warnings.simplefilter("ignore")
    question = json.loads(Path(sys.argv[1]).read_text())
    answer = {
        "grids": [search(grid) for grid in question["grids"]],
        "trials": [simulate(trial) for trial in question["trials"]],
    }
    Path(sys.argv[2]).write_text(json.dumps(answer))


def search(grid: dict) -> dict:
    """Bisects the configurations one after another: its own search starts a process for each."""
    model = ModelTypes.model_str_to_object(grid["model"])
    configs = get_distserve_configs(model, grid["nodes"], grid["gpus_per_node"], grid["high"])
    sample = grid["sample"]
    picked = configs if sample is None else random.Random(0).sample(configs, sample)
    found, seconds = [], []
    for config in picked:
        started = time.process_time()
        # It prints a traceback for each configuration that it has no coefficients for.
        with contextlib.redirect_stdout(io.StringIO()):
            rate = run_binary_search(
                model,
                config,
                "distserve",
                tuple(grid["targets"]),
                max_per_gpu_rate=grid["max_per_gpu_rate"],
                esp=grid["tolerance"],
                N=grid["num_requests"],
            )
        seconds.append(time.process_time() - started)
        found.append({"config": config, "goodput_per_gpu": rate})
    return {"num_configs": len(configs), "found": found, "seconds": seconds}


def simulate(trial: dict) -> dict:
    """One simulation of a recorded trace, request by request in the order of the trace."""
    options = {
        "backend": trial["backend"],
        "model": trial["model"],
        "workload": trial["workload"],
        "tp-prefill": trial["prefill"][0],
        "pp-prefill": trial["prefill"][1],
        "tp-decode": trial["decode"][0],
        "pp-decode": trial["decode"][1],
        "N": trial["num_requests"],
        "slas": "[]",
        "slo-scales": "[1]",
    }
    args = parse_args([word for key, value in options.items() for word in (f"--{key}", str(value))])
    outputs: dict = {}
    started = time.process_time()
    run_experiment(args, outputs)
    seconds = time.process_time() - started
    latencies = outputs["per_request_latency_df"].sort_index()
    return {
        "seconds": seconds,
        "ttft_ms": latencies["first_token_latency"].tolist(),
        "tpot_ms": latencies["tpot"].tolist(),
    }


if __name__ == "__main__":
    main()
