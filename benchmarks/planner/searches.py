"""DistServe's two placement searches as Cleave runs them, timed.

Called by run.py. The question is that of simdistserve's README, for larger clusters: OPT-13B
with DistServe's coefficients on nodes of eight A100, ShareGPT, TTFT 200 ms and TPOT 100 ms for 90 %
of the requests. Trials count at least 1,000 requests, beside those that fill and empty the fleet.
"""

import math
import time
from dataclasses import dataclass

from cleave.api.deployment import Slo
from cleave.perf.estimate import Confidence, Estimate, LatencySource
from cleave.perf.hardware.link import Link, LinkKind
from cleave.perf.model.model_shape import load_shape
from cleave.perf.named_profiles import to_timing
from cleave.perf.published import distserve
from cleave.planner import plan_search
from cleave.planner.problem import DISTSERVE_POLICIES, Problem, Supply
from cleave.planner.search import high_affinity, low_affinity
from cleave.planner.search.candidate_placement import describe
from cleave.planner.search.candidates import Candidate, list_candidates
from cleave.planner.search.context import SearchContext
from cleave.planner.search.low_affinity import MaxReplicas
from cleave.planner.search.trials import Trials
from cleave.traffic import published

WORKLOAD = "sharegpt"
TARGETS_MS = (200.0, 100.0)
ATTAINMENT = 0.9
RATE_PER_GPU = 2.0
NVLINK = Link(LinkKind.NVLINK, 300.0)
NETWORK = Link(LinkKind.INFINIBAND, 25.0, 5.0)
PAIR = MaxReplicas(prefill=1, decode=1)
"""simdistserve always searches one prefill and one decode instance."""


class Coefficients:
    """DistServe's for OPT-13B on A100-80G, and nothing else: the grid of simdistserve."""

    def estimate(
        self, gpu: str, tensor: int, pipeline: int, data: int = 1, *, expert: bool = False
    ) -> Estimate | None:
        size = tensor, pipeline
        fit = distserve.FITS.get(f"distserve/opt-13b/tp{tensor}")
        capacity = distserve.KV_CAPACITY_TOKENS["opt-13b"].get(size)
        if fit is None or capacity is None:
            return None
        shape = load_shape("opt-13b")
        return Estimate(
            timing=to_timing(fit, pipeline),
            kv_capacity_tokens=capacity,
            prefill_saturation_tokens=512,
            max_model_len=shape.max_model_len,
            kv_bytes_per_token=shape.kv_bytes_per_token,
            flops_per_token=shape.flops_per_token,
            power_watts=400.0 * math.prod(size),
            cost_per_hour=float(math.prod(size)),
            confidence=Confidence(LatencySource.MEASURED, "DistServe's coefficients", None),
        )

    def explain_unsupported(
        self, gpu: str, tensor: int, pipeline: int, data: int = 1, *, expert: bool = False
    ) -> str | None:
        """Why `estimate` returns None; None: it returns an estimate."""
        size = tensor, pipeline
        return None if self.estimate(gpu, *size) else f"DistServe fitted none of {size}"


@dataclass(frozen=True, slots=True)
class Search:
    """What one search found and took."""

    best: str
    goodput_per_gpu: float
    num_candidates: int
    num_trials: int | None
    """None: not counted."""
    num_requests: int
    """Simulated."""
    cpu_s: float


def algorithm_1(num_nodes: int) -> Search:
    """Phases apart. The goodput per GPU is that of both in their best ratio."""
    question = problem(num_nodes)
    started = time.process_time()
    search, found = _prepare(question)
    phases = high_affinity.optimize(search, found)
    seconds = time.process_time() - started
    (one,) = phases
    assert one.prefill is not None
    assert one.decode is not None
    # One request takes 1 / goodput per GPU of each phase.
    together = 1 / (1 / one.prefill.per_resource + 1 / one.decode.per_resource)
    best = f"{describe(one.prefill.placement)}, {describe(one.decode.placement)}"
    return _result(best, together, 2 * len(found), search.trials, seconds)


def algorithm_2(
    num_nodes: int, most: MaxReplicas = low_affinity.UNLIMITED, gpus_per_node: int = 8
) -> Search:
    """Prefill and decode instances within nodes, simulated jointly."""
    question = problem(num_nodes, gpus_per_node)
    started = time.process_time()
    search, found = _prepare(question)
    rated = low_affinity.optimize(search, found, max_replicas=most)
    seconds = time.process_time() - started
    assert rated is not None
    count = len(low_affinity.list_configurations(question, found, most))
    return _result(describe(rated.placement), rated.per_resource, count, search.trials, seconds)


def whole_answer(num_nodes: int) -> Search:
    """`plan_search.plan`: both algorithms, the best colocated plan, replicas for a rate that needs
    most of the GPUs, predictions with confidence intervals, verdict and runner-up.
    """
    gpus = 8 * num_nodes
    question = problem(num_nodes, rate=RATE_PER_GPU * gpus)
    started = time.process_time()
    answer = plan_search.plan(question)
    seconds = time.process_time() - started
    chosen = answer.selected
    pools = chosen.pools if chosen is not None else ()
    plan = " + ".join(
        f"{pool.replicas} {pool.role} (TP {pool.parallelism.tensor})" for pool in pools
    )
    return Search(
        best=f"{answer.verdict}: {plan}",
        goodput_per_gpu=chosen.goodput_per_gpu if chosen is not None else 0.0,
        num_candidates=answer.num_candidates,
        num_trials=None,
        num_requests=answer.num_simulated_requests,
        cpu_s=seconds,
    )


def problem(num_nodes: int, gpus_per_node: int = 8, rate: float = 10.0) -> Problem:
    """Of so many nodes."""
    gpus = num_nodes * gpus_per_node
    return Problem(
        demand=published.get_workload(WORKLOAD).build_demand(rate),
        slo=Slo(ttft_ms=TARGETS_MS[0], tpot_ms=TARGETS_MS[1], attainment=ATTAINMENT),
        supplies=(Supply("A100", num_nodes, gpus_per_node, gpus, NVLINK, NETWORK),),
        shape=load_shape("opt-13b"),
        estimator=Coefficients(),
        policies=DISTSERVE_POLICIES,
    )


def _prepare(question: Problem) -> tuple[SearchContext, tuple[Candidate, ...]]:
    return SearchContext.from_problem(question), list_candidates(question)


def _result(
    best: str, goodput_per_gpu: float, num_candidates: int, trials: Trials, seconds: float
) -> Search:
    return Search(
        best, goodput_per_gpu, num_candidates, trials.tally.trials, trials.tally.requests, seconds
    )
