"""The fleets that the simulator serves: models on GPUs whose passes were published."""

import sys
from dataclasses import dataclass
from pathlib import Path

from cleave.api.cluster import Cluster, NetworkSpec, NodeGroup
from cleave.perf.estimate import Estimate
from cleave.perf.estimator import ModelEstimator, build_estimator
from cleave.perf.hardware import inventory
from cleave.perf.hardware.gpu import find_gpu
from cleave.perf.hardware.kv_transfer import build_kv_transfer
from cleave.perf.model import model_shape
from cleave.perf.profile import curve
from cleave.perf.published.aladdin import Coefficients
from cleave.perf.timing import EngineTiming
from cleave.simulator.fleet import Batching, SimulatedEngine, SimulatedTransfer

sys.path.append(str(Path(__file__).parents[2]))

from tests.support import splitwise_runs

NETWORK_GBPS = 200.0
SHORT_TOKENS = 500
"""Context of which a full KV cache makes the largest batch that passes are fitted for."""


@dataclass(frozen=True, slots=True)
class Worker:
    """An instance and what is known of it."""

    name: str
    gpus: int
    estimate: Estimate
    coefficients: Coefficients
    transfer: SimulatedTransfer
    """To another one of its kind."""

    def engine(
        self, batching: Batching = Batching.VLLM, most_tokens: int = 2048
    ) -> SimulatedEngine:
        return SimulatedEngine(
            timing=self.estimate.timing,
            kv_capacity_tokens=self.estimate.kv_capacity_tokens,
            batching=batching,
            max_num_batched_tokens=most_tokens,
        )


def worker(name: str, gpu: str, tensor: int) -> Worker:
    shape = model_shape.load_shape(name)
    cluster = Cluster(
        nodes=[NodeGroup(count=4, gpu=gpu, gpus_per_node=8)],
        network=NetworkSpec(bandwidth_gbps=NETWORK_GBPS),
    )
    found = splitwise_runs.find_profile(name, gpu, tensor)
    machines = build_estimator(shape, cluster).machines
    estimate = ModelEstimator(shape, machines, [found] if found else []).estimate(gpu, tensor, 1)
    assert estimate is not None
    link = inventory.find_network_link(cluster, find_gpu(gpu))
    moved = build_kv_transfer(shape, link, (tensor, 1), (tensor, 1), compute_token_ms=0.0)
    return Worker(
        f"{name}, TP {tensor} on {gpu}",
        tensor,
        estimate,
        fit_timing(estimate.timing, min(256, estimate.kv_capacity_tokens // SHORT_TOKENS)),
        SimulatedTransfer(latency_ms=moved.latency_ms, token_ms=moved.token_ms),
    )


def fit_timing(
    timing: EngineTiming, largest_batch: int = 256, longest_tokens: int = 4096
) -> Coefficients:
    """The coefficients that approximate `timing` best, by relative error.

    Fitted over prompts up to `longest_tokens`, and over batches from two to `largest_batch` with
    contexts up to `longest_tokens` per request.
    """
    lengths = [longest_tokens * step // 16 for step in range(1, 17)]
    prompts = [((float(tokens), 1.0), timing.predict_prefill_ms([tokens])) for tokens in lengths]
    batches = [max(2, largest_batch >> shift) for shift in range(8)]
    contexts = (longest_tokens // 16, longest_tokens // 4, longest_tokens)
    decodes = [
        ((float(batch * each), float(batch), 1.0), timing.predict_decode_ms(batch, batch * each))
        for batch in batches
        for each in contexts
    ]
    coefficients: list[float] = []
    for samples in (prompts, decodes):
        rows, values = zip(*samples, strict=True)
        coefficients += curve.solve_least_squares(rows, values, [value**-2 for value in values])
    return Coefficients(*coefficients)
