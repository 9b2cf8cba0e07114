"""Published deployments, predicted with Cleave's tables and simulator.

    .venv/bin/python benchmarks/references/deployments.py                 # predictions, a minute
    .venv/bin/python benchmarks/references/deployments.py --measured CHECKOUT [--host-ms MS]

`CHECKOUT`: github.com/anyscale/ray-serve-llm-perf-examples (04ba8ab), whose `prefill_decode` has
the results of its runs. What is hard: a closed loop. Its arrivals are the ends of earlier requests,
so the simulator runs until they agree. `--host-ms`, written after the comparison: the host's time
for each iteration of engines that do not schedule ahead.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
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
    model: str = "openai/gpt-oss-120b"
    prompt_tokens: int = 5000
    output_tokens: int = 250

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
LMCACHE = Deployment(
    *("LMCache 1P TP1 + 1D TP1", "H100-SXM-80GB", (1, 1), (1, 1)),
    model="meta-llama/Llama-3.1-8B-Instruct",
    prompt_tokens=8000,
    output_tokens=200,
)
"""blog.lmcache.ai, April 2025: vLLM v1 with NIXL in a node with NVLink, 3.6 requests/s."""
LMCACHE_RATES = (1, 2, 3, 3.6, 4)
LMCACHE_REQUESTS = 2000


def build_fleet(deployment: Deployment, host_ms: float = 0.0) -> SimulatedFleet:
    """The deployment as Cleave would predict it; KV goes over NVLink in a node, else 400 Gbit/s.
    `host_ms`: added to every iteration."""
    shape = load_shape(deployment.model)
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
        has_connector=deployment.is_split,
    )


def build_trace(deployment: Deployment, arrival_ms: NDArray[np.float64]) -> Trace:
    """Requests of equal lengths."""
    ones = np.ones(len(arrival_ms), np.int64)
    return Trace(arrival_ms, ones * deployment.prompt_tokens, ones * deployment.output_tokens)


def simulate_closed_loop(
    deployment: Deployment, fleet: SimulatedFleet, clients: int
) -> SimulationResult:
    """Each client sends its next request when the one before has ended."""
    arrival_ms = np.zeros(clients * REQUESTS_PER_CLIENT)
    while True:
        outcome = simulate(fleet, build_trace(deployment, arrival_ms))
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
            found = summarize(simulate_closed_loop(deployment, fleet, clients))
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


def show_open_loop(
    console: Console, deployment: Deployment, arrivals: Mapping[float, NDArray[np.float64]]
) -> None:
    """Print a row for each rate; `arrivals`: by rate, in ms."""
    columns = ("TTFT P50 ms", "mean", "P99", "TPOT P50 ms", "mean", "P99", "output tokens/s")
    table = Table(f"{deployment.name}, req/s", *columns)
    fleet = build_fleet(deployment)
    for rate, arrival_ms in arrivals.items():
        outcome = simulate(fleet, build_trace(deployment, arrival_ms))
        cells = [
            f"{each:,.{digits}f}"
            for times, digits in ((outcome.ttft_ms, 0), (outcome.tpot_ms, 2))
            for each in (np.median(times), np.mean(times), np.percentile(times, 99))
        ]
        tokens = summarize(outcome)[2] * deployment.output_tokens
        table.add_row(f"{rate:g}", *cells, f"{tokens:,.0f}")
    console.print(table)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measured", type=Path, metavar="CHECKOUT")
    parser.add_argument("--host-ms", type=float, default=0.0, help="with every iteration on Ray")
    options = parser.parse_args(arguments)
    console = Console(width=110)
    even = {rate: np.arange(rate * LLM_D_SECONDS) * 1000 / rate for rate in RATES}
    show_open_loop(console, LLM_D, even)
    gaps = np.random.default_rng(0).exponential(1000, LMCACHE_REQUESTS)
    show_open_loop(console, LMCACHE, {rate: gaps.cumsum() / rate for rate in LMCACHE_RATES})
    show_ray(console, options.measured, options.host_ms)


if __name__ == "__main__":
    main()
