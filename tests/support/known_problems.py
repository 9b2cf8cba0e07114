"""Planning problems with known results: DistServe's measured instances on nodes of A100."""

import math
from dataclasses import dataclass, replace

from cleave.api.deployment import Slo
from cleave.api.planning import Planning
from cleave.api.role import Role
from cleave.perf.estimate import Confidence, Estimate, LatencySource
from cleave.perf.hardware.link import Link, LinkKind
from cleave.perf.model.model_shape import load_shape
from cleave.perf.named_profiles import to_timing
from cleave.perf.pipeline import scale_timing
from cleave.perf.published import distserve
from cleave.planner.problem import DISTSERVE_POLICIES, Policies, Problem, Supply
from cleave.planner.search.candidate_placement import CandidatePlacement, InstanceGroup
from cleave.planner.search.candidates import (
    Candidate,
    build_decode,
    build_mixed,
    build_prefill,
    list_candidates,
)
from cleave.planner.search.context import SearchContext
from cleave.planner.search.trials import Targets
from cleave.traffic.workload import (
    Demand,
    GeneratedRequests,
    IndependentLengths,
    LogNormal,
    build_fixed,
)

NVLINK = Link(LinkKind.NVLINK, 300.0)
INFINIBAND = Link(LinkKind.INFINIBAND, 25.0, 5.0)
SLOW_NETWORK = Link(LinkKind.ETHERNET, 25 / 8, 50.0)


@dataclass(frozen=True)
class Kind:
    """A GPU type other than DistServe's A100; `prompt`, `decode`: factors on iteration times."""

    prompt: float = 1.0
    decode: float = 1.0
    power_watts: float = 400.0
    price_per_hour: float = 2.0


@dataclass(frozen=True)
class Fits:
    """An estimator with DistServe's coefficients; GPU types not in `kinds` are its A100."""

    engine: str = "distserve"
    model: str = "opt-13b"
    kinds: tuple[tuple[str, Kind], ...] = ()

    def estimate(
        self, gpu: str, tensor: int, pipeline: int, data: int = 1, *, expert: bool = False
    ) -> Estimate | None:
        size = tensor, pipeline
        fit = distserve.FITS.get(f"{self.engine}/{self.model}/tp{tensor}")
        capacity = distserve.KV_CAPACITY_TOKENS[self.model].get(size)
        if fit is None or capacity is None:
            return None
        kind = dict(self.kinds).get(gpu, Kind())
        shape = load_shape(self.model)
        timing = to_timing(fit, pipeline)
        return Estimate(
            timing=scale_timing(timing, prompt=kind.prompt, decode=kind.decode),
            kv_capacity_tokens=capacity,
            prefill_saturation_tokens=512,
            max_model_len=shape.max_model_len,
            kv_bytes_per_token=shape.kv_bytes_per_token,
            flops_per_token=shape.flops_per_token,
            power_watts=kind.power_watts * math.prod(size),
            cost_per_hour=kind.price_per_hour * math.prod(size),
            confidence=Confidence(LatencySource.MEASURED, "DistServe's coefficients", 0.1),
        )

    def explain_unsupported(
        self, gpu: str, tensor: int, pipeline: int, data: int = 1, *, expert: bool = False
    ) -> str | None:
        size = tensor, pipeline
        return None if self.estimate(gpu, *size) else f"{self.model}: no fit for {size}"


def nodes(
    num_nodes: int = 4,
    network: Link = INFINIBAND,
    gpus_per_node: int = 8,
    gpu: str = "A100",
    max_gpus: int | None = None,
) -> Supply:
    total = num_nodes * gpus_per_node
    return Supply(gpu, num_nodes, gpus_per_node, max_gpus or total, NVLINK, network)


def chat(rate: float = 10.0, prompt: float = 330, output: float = 240) -> Demand:
    """Log-normal lengths similar to ShareGPT's."""
    lengths = IndependentLengths(
        LogNormal.from_mean_and_p90(prompt, prompt * 2.1),
        LogNormal.from_mean_and_p90(output, output * 2.0),
    )
    return Demand(rate, GeneratedRequests(lengths)).with_max_model_len(2048)


def problem(
    demand: Demand | None = None,
    slo: Slo | None = None,
    *,
    engine: str = "distserve",
    model: str = "opt-13b",
    supplies: tuple[Supply, ...] | None = None,
    policies: Policies = DISTSERVE_POLICIES,
    planning: Planning | None = None,
    kinds: tuple[tuple[str, Kind], ...] = (),
    seed: int = 0,
) -> Problem:
    return Problem(
        demand=demand or chat(),
        slo=slo or Slo(ttft_ms=200, tpot_ms=100),
        supplies=supplies or (nodes(),),
        shape=load_shape(model),
        estimator=Fits(engine, model, kinds),
        planning=planning or Planning(),
        policies=policies,
        seed=seed,
    )


def blog(
    rate: float = 1.0, engine: str = "distserve", policies: Policies = DISTSERVE_POLICIES
) -> Problem:
    """The DistServe blog's 13B case: 512 in, 64 out on A100."""
    slo = Slo(ttft_ms=400, tpot_ms=40, attainment=0.9)
    return problem(build_fixed(512, 64, rate), slo, engine=engine, policies=policies)


def targets(planning_problem: Problem) -> Targets:
    return Targets(
        planning_problem.slo.ttft_ms, planning_problem.slo.tpot_ms, planning_problem.slo.attainment
    )


def search(planning_problem: Problem, search_targets: Targets | None = None) -> SearchContext:
    """A search of the problem in short trials, with its own targets unless others are given."""
    found = SearchContext.from_problem(planning_problem)
    return replace(found, targets=search_targets or found.targets)


def of_size(planning_problem: Problem, tensor: int = 1, pipeline: int = 1) -> Candidate:
    return next(
        each
        for each in list_candidates(planning_problem)
        if (each.parallelism.tensor, each.parallelism.pipeline) == (tensor, pipeline)
    )


def split(
    planning_problem: Problem, prefill: Candidate, n: int, decode: Candidate, m: int
) -> CandidatePlacement:
    return CandidatePlacement(
        (
            InstanceGroup(Role.PREFILL, build_prefill(planning_problem, prefill), n),
            InstanceGroup(Role.DECODE, build_decode(planning_problem, decode), m),
        )
    )


def whole(planning_problem: Problem, candidate: Candidate, n: int = 1) -> CandidatePlacement:
    instance = build_mixed(planning_problem, candidate, planning_problem.policies.mixed[0])
    return CandidatePlacement((InstanceGroup(Role.MIXED, instance, n),))
