"""Published deployments of gpt-oss-120b, predicted with Cleave's tables and simulator.

    .venv/bin/python benchmarks/references/deployments.py                 # predictions, a minute
    .venv/bin/python benchmarks/references/deployments.py --measured CHECKOUT [--host-ms MS]

`CHECKOUT`: github.com/anyscale/ray-serve-llm-perf-examples (04ba8ab), whose `prefill_decode` has
the results of its runs. What is hard: a closed loop. Its arrivals are the ends of earlier requests,
so the simulator runs until they agree. `--host-ms`, written after the comparison: the host's time
for each iteration of engines that do not schedule ahead.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from cleave.api.cluster import Cluster
from cleave.api.enums import DispatchPolicy
from cleave.perf import estimator
from cleave.perf.hardware.kv_transfer import build_kv_transfer
from cleave.perf.hardware.link import build_node_link
from cleave.perf.model.model_shape import load_shape
from cleave.simulator.fleet import (
    SimulatedEngine,
    SimulatedFleet,
    SimulatedPool,
    SimulatedTransfer,
)
from cleave.simulator.outcome import SimulationResult
from cleave.simulator.run import simulate
from cleave.simulator.trace import Trace

MODEL = "openai/gpt-oss-120b"
PROMPT_TOKENS, OUTPUT_TOKENS = 5000, 250
CONCURRENCIES = (4, 8, 16, 32, 48, 64)
REQUESTS_PER_CLIENT = 5
Pool = tuple[int, int]
"""Instances, and tensor parallel GPUs of each."""


@dataclass(frozen=True)
class Deployment:
    """Instances on nodes of eight GPUs, as published. Pools are empty where they are (0, 0)."""

    name: str
    gpu: str
    prefill: Pool = (0, 0)
    decode: Pool = (0, 0)
    mixed: Pool = (0, 0)
    nodes: int = 1
    schedules_ahead: bool = False
    """vLLM's default since 0.14."""
    dispatch: DispatchPolicy = DispatchPolicy.POWER_OF_TWO

    @property
    def is_split(self) -> bool:
        """Whether prompts are computed elsewhere."""
        return self.prefill != (0, 0)


RAY = "gptoss_itl5000_otl250_mixed_"
DEPLOYMENTS = (
    Deployment(f"{RAY}baseline_4xtp2", "H100-SXM-80GB", mixed=(4, 2)),
    Deployment(f"{RAY}baseline_2xtp4", "H100-SXM-80GB", mixed=(2, 4)),
    *(
        Deployment(f"{RAY}pd_p{p}xtp{tp}-d{d}xtp{td}", "H100-SXM-80GB", (p, tp), (d, td))
        for p, tp, d, td in (
            *((1, 2, 1, 2), (1, 2, 2, 2), (1, 2, 3, 2), (2, 2, 1, 2)),
            *((3, 2, 1, 2), (2, 2, 1, 4), (1, 4, 1, 4)),
        )
    ),
    Deployment("gptoss_H200_itl5000_otl250_mixed_pack_p1xtp4-d1xtp4", "H200", (1, 4), (1, 4)),
)
"""Ray Serve's runs of vLLM 0.11 on one node, over NIXL with UCX."""
LLM_D = Deployment(
    *("llm-d 8P TP1 + 2D TP4", "H200", (8, 1), (2, 4)),
    nodes=2,
    schedules_ahead=True,
    dispatch=DispatchPolicy.PREFIX_AWARE,
)
RATES = (10, 20, 30, 40, 45, 50, 60)
LLM_D_SECONDS = 120


def build_fleet(deployment: Deployment, host_ms: float = 0.0) -> SimulatedFleet:
    """The deployment as Cleave would predict it; KV goes over NVLink in a node, else 400 Gbit/s.
    `host_ms`: added to every iteration."""
    shape = load_shape(MODEL)
    network = {"kind": "InfiniBand", "bandwidthGbps": 400}
    nodes = [{"count": deployment.nodes, "gpu": deployment.gpu, "gpusPerNode": 8}]
    cluster = Cluster.model_validate({"nodes": nodes, "network": network})
    known = estimator.build_estimator(shape, cluster)
    ((gpu, machine),) = known.machines.items()
    front_end_ms = 0.0

    def build_pools(pool: Pool) -> tuple[SimulatedPool, ...]:
        nonlocal front_end_ms
        replicas, tensor = pool
        if not replicas:
            return ()
        found = known.estimate(gpu, tensor, 1)
        assert found is not None
        front_end_ms = found.front_end_ms
        timing = replace(
            found.timing,
            prompt_ms=tuple(ms + host_ms for ms in found.timing.prompt_ms),
            decode_ms=tuple(ms + host_ms for ms in found.timing.decode_ms),
            schedules_ahead=deployment.schedules_ahead,
        )
        return (SimulatedPool(SimulatedEngine(timing, found.kv_capacity_tokens), replicas),)

    transfer = SimulatedTransfer()
    if deployment.is_split:
        link = build_node_link(machine.gpu) if deployment.nodes == 1 else machine.network
        sizes = ((tensor, 1) for _, tensor in (deployment.prefill, deployment.decode))
        moved = build_kv_transfer(shape, link, *sizes, compute_token_ms=0.0)
        transfer = SimulatedTransfer(moved.latency_ms, moved.token_ms)
    pools = [build_pools(each) for each in (deployment.prefill, deployment.decode)]
    return SimulatedFleet(
        *pools,
        build_pools(deployment.mixed),
        transfer=transfer,
        dispatch=deployment.dispatch,
        dispatch_ms=front_end_ms,
    )


def build_trace(arrival_ms: NDArray[np.float64]) -> Trace:
    """Requests of equal lengths."""
    ones = np.ones(len(arrival_ms), np.int64)
    return Trace(arrival_ms, ones * PROMPT_TOKENS, ones * OUTPUT_TOKENS)


def simulate_closed_loop(fleet: SimulatedFleet, clients: int) -> SimulationResult:
    """Each client sends its next request when the one before has ended."""
    arrival_ms = np.zeros(clients * REQUESTS_PER_CLIENT)
    while True:
        outcome = simulate(fleet, build_trace(arrival_ms))
        after = np.concatenate((np.zeros(clients), np.sort(outcome.end_ms)[:-clients]))
        if np.allclose(after, arrival_ms):
            return outcome
        arrival_ms = after


def summarize(outcome: SimulationResult) -> tuple[float, float, float]:
    """Median TTFT and TPOT in ms, and requests per second."""
    rate = len(outcome.end_ms) / float(outcome.end_ms.max() - outcome.arrival_ms.min()) * 1000
    return float(np.median(outcome.ttft_ms)), float(np.median(outcome.tpot_ms)), rate


def read_measured(root: Path, deployment: Deployment, clients: int) -> tuple[float, float, float]:
    """The same of a published run."""
    file = root / "prefill_decode/bm_results" / deployment.name / f"conc{clients}.json"
    run = json.loads(file.read_text())
    return run["median_ttft_ms"], run["median_tpot_ms"], run["request_throughput"]


def show_ray(console: Console, root: Path | None, host_ms: float) -> None:
    """Print a row for each deployment and number of clients; errors if `root` is given."""
    table = Table("deployment", "clients", "TTFT ms", "TPOT ms", "req/s")
    errors: dict[bool, list[tuple[float, ...]]] = {False: [], True: []}
    for deployment in DEPLOYMENTS:
        fleet = build_fleet(deployment, host_ms)
        for clients in CONCURRENCIES:
            found = summarize(simulate_closed_loop(fleet, clients))
            cells = [f"{each:,.{digits}f}" for each, digits in zip(found, (0, 2, 2), strict=True)]
            if root:
                seen = read_measured(root, deployment, clients)
                off = tuple(a / b - 1 for a, b in zip(found, seen, strict=True))
                errors[deployment.is_split].append(off)
                cells = [f"{cell} {each:+.0%}" for cell, each in zip(cells, off, strict=True)]
            table.add_row(deployment.name, str(clients), *cells)
    console.print(table)
    for is_split, rows in errors.items():
        for name, column in zip(("TTFT", "TPOT", "req/s"), np.array(rows).T, strict=False):
            median, high = np.percentile(np.abs(column), (50, 90))
            kind = "split" if is_split else "colocated"
            signed = f"{np.median(column):+.0%}"
            console.print(f"{kind}, {name}: {median:.0%} (P90 {high:.0%}; signed {signed})")


def show_llm_d(console: Console) -> None:
    """Print a row for each rate of evenly spaced arrivals."""
    table = Table("llm-d, req/s", "TTFT P50 ms", "P99", "TPOT P50 ms", "P99", "output tokens/s")
    fleet = build_fleet(LLM_D)
    for rate in RATES:
        outcome = simulate(fleet, build_trace(np.arange(rate * LLM_D_SECONDS) * 1000 / rate))
        times = (
            *np.percentile(outcome.ttft_ms, (50, 99)),
            *np.percentile(outcome.tpot_ms, (50, 99)),
        )
        cells = [f"{each:,.{digits}f}" for each, digits in zip(times, (0, 0, 2, 2), strict=True)]
        table.add_row(str(rate), *cells, f"{summarize(outcome)[2] * OUTPUT_TOKENS:,.0f}")
    console.print(table)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measured", type=Path, metavar="CHECKOUT")
    parser.add_argument("--host-ms", type=float, default=0.0, help="with every iteration on Ray")
    options = parser.parse_args(arguments)
    console = Console(width=110)
    show_llm_d(console)
    show_ray(console, options.measured, options.host_ms)


if __name__ == "__main__":
    main()
