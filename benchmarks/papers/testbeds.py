"""The testbeds of the papers as problems for the planner. Used by every comparison here."""

import math
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from cleave.api.cluster import Cluster, NetworkSpec, NodeGroup
from cleave.api.deployment import Slo
from cleave.perf.estimate import Estimate, Estimator, LatencySource
from cleave.perf.estimator import ModelEstimator, build_estimator
from cleave.perf.hardware import inventory
from cleave.perf.hardware.gpu import find_gpu
from cleave.perf.hardware.link import build_node_link
from cleave.perf.model import model_shape
from cleave.perf.model.model_shape import ModelShape
from cleave.perf.named_profiles import to_timing
from cleave.perf.pipeline import find_prefill_saturation_tokens
from cleave.perf.published import distserve
from cleave.planner.problem import DISTSERVE_POLICIES, Policies, Problem, Supply
from cleave.planner.search.trials import Targets
from cleave.traffic.workload import Demand

sys.path.append(str(Path(__file__).parents[2]))

from tests.support import splitwise_runs

A100 = "A100-SXM-80GB"
H100 = "H100-SXM-80GB"
TESTBED_GBPS = 25.0
"""Between nodes (DistServe, section 6.1)."""


@dataclass(frozen=True, slots=True)
class Published:
    """An estimator with what DistServe published of OPT on A100: capacities for KV, and the
    coefficients of one engine, then only where there are any."""

    estimator: Estimator
    engine: str | None
    """`distserve` or `vllm`; None: passes are computed."""
    model: str

    def estimate(
        self, gpu: str, tensor: int, pipeline: int, data: int = 1, *, expert: bool = False
    ) -> Estimate | None:
        known = self.estimator.estimate(gpu, tensor, pipeline)
        fit = distserve.FITS.get(f"{self.engine}/{self.model}/tp{tensor}")
        if known is None or (self.engine is not None and fit is None):
            return None
        published = distserve.KV_CAPACITY_TOKENS[self.model].get((tensor, pipeline))
        known = replace(known, kv_capacity_tokens=published or known.kv_capacity_tokens)
        if fit is None:
            return known
        timing = replace(to_timing(fit, pipeline), hop_ms=known.timing.hop_ms)
        return replace(
            known,
            timing=timing,
            prefill_saturation_tokens=find_prefill_saturation_tokens(timing, known.max_model_len),
            front_end_ms=0.0,
        )


@dataclass(frozen=True, slots=True)
class Known:
    """An estimator that says nothing where passes would be computed rather than measured."""

    estimator: Estimator

    def estimate(
        self, gpu: str, tensor: int, pipeline: int, data: int = 1, *, expert: bool = False
    ) -> Estimate | None:
        found = self.estimator.estimate(gpu, tensor, pipeline)
        computed = (LatencySource.KERNELS, LatencySource.ROOFLINE)
        return None if found is None or found.confidence.kind in computed else found


def build_measured(shape: ModelShape, cluster: Cluster) -> ModelEstimator:
    """An estimator with Splitwise's runs where there are any: the papers' vLLM is that of 2023,
    which plans of today do not use."""
    runs = [splitwise_runs.find_profile(*each) for each in splitwise_runs.list_profiles()]
    machines = build_estimator(shape, cluster).machines
    return ModelEstimator(shape, machines, [each for each in runs if each])


def pose(
    name: str,
    demand: Demand,
    targets: Targets,
    *,
    engine: str | None = "distserve",
    gpus: tuple[str, ...] = (A100,),
    num_nodes: int = 4,
    gpus_per_node: int = 8,
    network_gbps: float = TESTBED_GBPS,
    policies: Policies = DISTSERVE_POLICIES,
) -> Problem:
    """A model on nodes of each kind of GPU; `engine` None or a model that DistServe did not serve:
    as Splitwise measured it, or estimated."""
    shape = model_shape.load_shape(name)
    cluster = Cluster(
        nodes=[NodeGroup(count=num_nodes, gpu=gpu, gpus_per_node=gpus_per_node) for gpu in gpus],
        network=NetworkSpec(bandwidth_gbps=network_gbps),
    )
    estimator: Estimator = build_measured(shape, cluster)
    if engine is not None and name in distserve.KV_CAPACITY_TOKENS:
        has_fits = any(fit.startswith(f"{engine}/{name}/") for fit in distserve.FITS)
        estimator = Published(estimator, engine if has_fits else None, name)
    supplies = tuple(
        Supply(
            gpu=gpu,
            num_nodes=num_nodes,
            gpus_per_node=gpus_per_node,
            max_gpus=num_nodes * gpus_per_node,
            node_link=build_node_link(find_gpu(gpu)),
            network_link=inventory.find_network_link(cluster, find_gpu(gpu)),
        )
        for gpu in gpus
    )
    return Problem(
        demand=demand.with_max_model_len(shape.max_model_len),
        slo=Slo(
            ttft_ms=_finite(targets.ttft_ms),
            tpot_ms=_finite(targets.tpot_ms),
            attainment=targets.attainment,
        ),
        supplies=supplies,
        shape=shape,
        estimator=estimator,
        policies=policies,
    )


def _finite(target_ms: float) -> float:
    return target_ms if math.isfinite(target_ms) else 1e12
