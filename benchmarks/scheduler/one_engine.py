"""One engine and its traffic, near TetriInfer's: OPT-13B on two GPUs, chunks of 512 tokens.

The passes are those that DistServe measured on A100; TetriInfer had V100.
"""

from dataclasses import replace

import numpy as np

from cleave.perf import named_profiles
from cleave.perf.published import distserve
from cleave.simulator.fleet import SimulatedEngine
from cleave.simulator.trace import Trace
from cleave.traffic import published

ENGINE = SimulatedEngine(
    named_profiles.to_timing(distserve.FITS["distserve/opt-13b/tp2"]),
    # 64 GB less the weights, at 0.82 MB a token.
    kv_capacity_tokens=41_600,
    max_num_seqs=256,
    max_num_batched_tokens=512,
    # As in TetriInfer's vLLM.
    prefix_caching=False,
)
WORKLOADS = ("sharegpt", "chat-1m")
BURST = 256
"""Requests that come all at once, as in the paper's tests."""


def burst(workload: str, requests: int = BURST, seed: int = 0) -> Trace:
    """So many requests at one moment."""
    trace = published.get_workload(workload).build_demand().draw(requests, seed=seed)
    return replace(trace, arrival_ms=np.zeros(requests))


def stream(workload: str, load: float, requests: int, seed: int = 0) -> Trace:
    """Poisson arrivals; `load`: of what the engine computes of such prompts in whole chunks."""
    demand = published.get_workload(workload).build_demand()
    prompts = demand.draw(requests, seed=seed).prompt_tokens
    chunk = ENGINE.max_num_batched_tokens
    prompt_ms = prompts.mean() / chunk * ENGINE.timing.predict_prefill_ms([chunk])
    return demand.draw(requests, load * 1_000 / prompt_ms, seed)
