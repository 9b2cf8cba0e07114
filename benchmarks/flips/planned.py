"""Plans at their goodput, with fixed roles and with flips, beside what they predict; simulated."""

import math
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from statistics import fmean

from cleave.api.cluster import Cluster
from cleave.api.manifest import validate
from cleave.perf.hardware.gpu import CATALOGUE
from cleave.perf.model.known_models import CONFIGS
from cleave.planner import plan_search, problem_from_cluster
from cleave.planner.placement import PlanError
from cleave.planner.pool_simulation import to_candidate_placement
from cleave.planner.problem import Problem
from cleave.planner.result.text import format_plan
from cleave.planner.search.candidate_placement import CandidatePlacement, build_deployed_cell
from cleave.planner.search.goodput import compute_half_interval
from cleave.planner.search.long_trials import sample_service
from cleave.planner.search.trials import CONFIRMATION_PRECISION, Targets, Trials

FIRST_SEED, SEEDS = 1_000, 200
"""Of the requests that are served; plans are made with others."""
DRAW_SEED, HELD_OUT_SEED, DRAWN = 2026, 2027, 20
MODELS = sorted(CONFIGS)
"""Of the drawn workloads."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """One workload of one model on four nodes of eight GPUs."""

    model: str
    gpu: str
    rate: float
    prompt: int
    """Mean tokens."""
    output: int
    ttft_ms: float
    tpot_ms: float

    def __str__(self) -> str:
        model, targets = self.model.split("/")[-1], f"{self.ttft_ms:g}/{self.tpot_ms:g} ms"
        return f"{model} {self.gpu} {self.prompt}+{self.output} {targets}"


TRAFFICS = (
    Traffic("facebook/opt-13b", "A100-SXM-80GB", 28, 400, 90, 400, 30),
    Traffic("facebook/opt-13b", "A100-SXM-80GB", 14, 1200, 30, 400, 60),
    Traffic("facebook/opt-13b", "A100-SXM-80GB", 16, 500, 220, 400, 60),
    Traffic("meta-llama/Llama-2-13b", "A100-SXM-80GB", 40, 700, 250, 1_000, 35),
    Traffic("meta-llama/Llama-2-7b-hf", "A100-SXM-80GB", 40, 500, 300, 600, 25),
    Traffic("meta-llama/Llama-3.1-8B", "H100-SXM-80GB", 130, 1_000, 200, 500, 20),
    Traffic("meta-llama/Llama-3.1-8B", "H100-SXM-80GB", 45, 4_000, 300, 1_000, 10),
    Traffic("meta-llama/Llama-3.1-8B", "H200-SXM-141GB", 30, 8_000, 100, 2_000, 12),
    Traffic("meta-llama/Llama-3.1-8B", "A10G", 24, 600, 200, 1_500, 60),
    Traffic("meta-llama/Llama-3.1-8B", "L40S", 40, 1_000, 250, 1_000, 35),
    Traffic("facebook/opt-13b", "A100-SXM-80GB", 20, 800, 150, 800, 40),
    Traffic("facebook/opt-30b", "A100-SXM-80GB", 12, 400, 150, 800, 50),
    Traffic("meta-llama/Llama-3.1-70B", "H200-SXM-141GB", 20, 3_000, 300, 2_000, 40),
    Traffic("meta-llama/Llama-2-13b", "L40S", 12, 400, 200, 1_000, 60),
    Traffic("mistralai/Mistral-7B-Instruct-v0.3", "A10", 35, 400, 250, 1_000, 60),
    Traffic("Qwen/Qwen2.5-7B-Instruct", "A100-SXM-80GB", 90, 1_200, 350, 2_500, 15),
    Traffic("meta-llama/Llama-2-7b-hf", "A10", 12, 300, 150, 800, 50),
    Traffic("Qwen/Qwen3-32B", "A100-SXM-80GB", 20, 1_000, 400, 4_000, 45),
    Traffic("Qwen/Qwen3-8B", "L40S", 35, 800, 300, 250, 35),
    Traffic("mistralai/Mixtral-8x7B-Instruct-v0.1", "H100-SXM-80GB", 60, 1_500, 200, 1_000, 35),
)


@dataclass(frozen=True, slots=True)
class Row:
    """One plan at its goodput. Shares of the requests within both targets."""

    traffic: str
    plan: str
    rate: float
    fixed: float
    """Mean over the seeds with fixed roles."""
    flipping: float
    flips: float
    """Per seed."""
    predicted: float
    """With flips, as the planner confirms the selected plan."""
    error: float
    """Half of the 95 % confidence interval of `predicted`."""
    measured_error: float
    """The same of `flipping`."""


def run(quick: bool) -> Iterator[dict[str, object]]:
    """The workloads with which the thresholds were chosen."""
    return _measure_all(iter(TRAFFICS), 2 if quick else len(TRAFFICS), 1 if quick else SEEDS)


def run_drawn(quick: bool) -> Iterator[dict[str, object]]:
    """The first workloads of a random generator that have a plan with an instance that may flip."""
    return _measure_all(_draw_traffics(), 1 if quick else DRAWN, 1 if quick else SEEDS)


def run_held_out(quick: bool) -> Iterator[dict[str, object]]:
    """The same of another seed: none of them was planned before the method was settled."""
    traffics = _draw_traffics(HELD_OUT_SEED)
    return _measure_all(traffics, 1 if quick else DRAWN, 1 if quick else SEEDS)


def _draw_traffics(seed: int = DRAW_SEED) -> Iterator[Traffic]:
    """Any models and GPUs that plans know; numbers are log-uniform. Without end."""
    draw = random.Random(seed)

    def scale(low: float, high: float) -> float:
        return float(f"{math.exp(draw.uniform(math.log(low), math.log(high))):.2g}")

    while True:
        model, gpu = draw.choice(MODELS), draw.choice(CATALOGUE).name
        rate, prompt, output = scale(5, 150), int(scale(200, 6_000)), int(scale(50, 500))
        yield Traffic(model, gpu, rate, prompt, output, scale(250, 4_000), scale(10, 80))


def _measure_all(
    traffics: Iterator[Traffic], count: int, seeds: int
) -> Iterator[dict[str, object]]:
    rows = (_measure(traffic, seeds) for traffic in traffics)
    return islice((asdict(row) for row in rows if row is not None), count)


def _measure(traffic: Traffic, seeds: int) -> Row | None:
    """Plan with fixed roles, then serve at the goodput with both; None: the rate has no plan whose
    instances may flip."""
    flipping = _build_problem(traffic)
    fixed = replace(flipping, policies=replace(flipping.policies, flipping=None))
    try:
        best = plan_search.plan(fixed).selected
    except PlanError:
        return None
    if best is None:
        return None
    rate = float(f"{best.prediction.goodput:.3g}")
    fixed, flipping = (
        replace(each, demand=each.demand.with_rate(rate)) for each in (fixed, flipping)
    )
    placement = to_candidate_placement(flipping, best.pools, best.algorithm, best.cells)
    if all(group.replicas == 1 for group in placement.groups):
        return None
    serve = partial(_serve, placement=placement, whole_below_tokens=best.whole_below_tokens)
    own = [serve(fixed, seed=FIRST_SEED + number)[0] for number in range(seeds)]
    shares, flips = zip(
        *(serve(flipping, seed=FIRST_SEED + number) for number in range(seeds)), strict=True
    )
    fleet = build_deployed_cell(flipping, placement, best.whole_below_tokens)
    trials = Trials(flipping.demand, flipping.seed, CONFIRMATION_PRECISION)
    targets = Targets.from_slo(flipping.slo)
    share = flipping.rate / placement.copies
    span = trials.compute_span(share, targets)
    found = sample_service(trials, fleet, share, span, targets, is_shown=True)
    means = fmean(own), fmean(shares), fmean(flips)
    errors = found.error, compute_half_interval(shares) if seeds > 1 else math.inf
    return Row(str(traffic), format_plan(best), rate, *means, found.attainment, *errors)


def _build_problem(traffic: Traffic) -> Problem:
    """Planned with both pools: mixed instances have no other role."""
    spec = {
        "model": traffic.model,
        "slo": {"ttftMs": traffic.ttft_ms, "tpotMs": traffic.tpot_ms},
        "workload": {
            "rate": traffic.rate,
            "promptTokens": {"mean": traffic.prompt, "p90": 2.1 * traffic.prompt},
            "outputTokens": {"mean": traffic.output, "p90": 2.1 * traffic.output},
        },
        "planning": {"disaggregation": "Always"},
    }
    header = {"apiVersion": "cleave.dev/v1alpha1", "kind": "LLMDeployment"}
    deployment = validate(header | {"metadata": {"name": "chat"}, "spec": spec})
    nodes = [{"count": 4, "gpu": traffic.gpu, "gpusPerNode": 8}]
    network = {"kind": "InfiniBand", "bandwidthGbps": 100}
    cluster = Cluster.model_validate({"nodes": nodes, "network": network})
    return problem_from_cluster.build_problem(deployment, cluster)


def _serve(
    problem: Problem, placement: CandidatePlacement, whole_below_tokens: int, seed: int
) -> tuple[float, int]:
    """(share within both targets, flips) of one cell in a trial as long as that of a prediction."""
    rate, targets = problem.rate / placement.copies, Targets.from_slo(problem.slo)
    trials = Trials(problem.demand, seed, CONFIRMATION_PRECISION)
    span = trials.compute_span(rate, targets)
    fleet = build_deployed_cell(problem, placement, whole_below_tokens)
    outcome = trials.simulate(fleet, rate, span)
    is_met = (outcome.ttft_ms <= targets.ttft_ms) & (outcome.tpot_ms <= targets.tpot_ms)
    return float(is_met[span.window].mean()), outcome.num_flips
