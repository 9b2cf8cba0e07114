"""Disaggregated against colocated serving: DistServe's Table 1, and Azure's two services.

Called by run.py. The paper's factor compares two engines, DistServe's and the vLLM of 2023, the
latter with one parallelism and whole prompts first. Here the factor is taken apart: against vLLM's
own coefficients as the paper ran it; against the same engine, whole prompts first, with its best
parallelism; and against the same engine with chunked prefill and its best limits, which is what
somebody would run today.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from facts import APPLICATIONS, Application
from testbeds import Known, pose

from cleave.planner.problem import Policies, Problem
from cleave.planner.search import colocated, high_affinity, low_affinity
from cleave.planner.search.candidate_placement import describe
from cleave.planner.search.candidates import Candidate, list_candidates
from cleave.planner.search.context import SearchContext
from cleave.planner.search.ranking import RankedPlacement
from cleave.planner.search.trials import CONFIRMATION_PRECISION, Targets, Trials
from cleave.simulator.fleet import Batching
from cleave.traffic import history, published
from cleave.traffic.workload import build_from_trace

ATTAINMENT = 0.9
LLAMA = "llama-2-70b"
CHUNKED = Policies(
    prefill=Batching.PREFILL_FIRST, mixed=(Batching.VLLM,), first_token_by_decode=False
)
"""Only colocated instances differ from the paper's."""


@dataclass(frozen=True, slots=True)
class Best:
    """The best plan of one kind."""

    plan: str
    per_gpu: float
    """Goodput, req/s."""


@dataclass(frozen=True, slots=True)
class Gain:
    """One row."""

    name: str
    ttft_ms: float
    tpot_ms: float
    paper: str
    algorithm_1: Best
    algorithm_2: Best
    vllm: Best | None
    """Its own coefficients, the paper's parallelism, whole prompts first; None: no such figure."""
    prefill_first: Best
    """DistServe's coefficients, best parallelism."""
    chunked: Best
    """The same with chunked prefill and its best limits."""


def applications() -> list[Gain]:
    """The five rows of Table 1, two of them also with the targets of the authors' plots."""
    return [_application(row) for row in APPLICATIONS]


def azure(data: Path) -> list[Gain]:
    """Azure's services on Llama-2-70B as Splitwise measured it, recorded requests as they came.

    Their SLOs are not published: TTFT 2 s and TPOT 100 ms, about twice what a request alone takes.
    """
    targets = Targets(2000, 100, ATTAINMENT)
    rows = []
    for service, name in (("conv", "Azure conversation"), ("code", "Azure code")):
        trace = history.read_trace(data / f"AzureLLMInferenceTrace_2023_{service}.csv")
        question = pose(LLAMA, build_from_trace(trace), targets, engine=None)
        question = replace(question, estimator=Known(question.estimator))
        rows.append(_gain(f"{name} Llama-2-70B", "-", question, None, targets))
    return rows


def _application(row: Application) -> Gain:
    targets = Targets(row.ttft_ms, row.tpot_ms, ATTAINMENT)
    demand = published.get_workload(row.dataset).build_demand()
    question = pose(row.model, demand, targets)
    baseline = pose(row.model, demand, targets, engine="vllm")
    own = [each for each in list_candidates(baseline) if _is(each, row.vllm_tp, 1)]
    vllm = _best(colocated.optimize(_search(baseline, targets), own))
    return _gain(row.name, row.gain, question, vllm, targets)


def _gain(name: str, paper: str, question: Problem, vllm: Best | None, targets: Targets) -> Gain:
    found, search = list_candidates(question), _search(question, targets)
    chunked = replace(search, problem=replace(question, policies=CHUNKED))
    return Gain(
        name=name,
        ttft_ms=targets.ttft_ms,
        tpot_ms=targets.tpot_ms,
        paper=paper,
        algorithm_1=_algorithm_1(search, found),
        algorithm_2=_best(low_affinity.optimize(search, found)),
        vllm=vllm,
        prefill_first=_best(colocated.optimize(search, found)),
        chunked=_best(colocated.optimize(chunked, found)),
    )


def _search(question: Problem, targets: Targets) -> SearchContext:
    trials = Trials(question.demand, precision=CONFIRMATION_PRECISION)
    return SearchContext(question, trials, targets)


def _algorithm_1(search: SearchContext, found: Sequence[Candidate]) -> Best:
    """Both phases in the ratio that leaves neither idle: a request takes 1 / goodput of each."""
    (phases,) = high_affinity.optimize(search, found)
    if phases.prefill is None or phases.decode is None:
        return Best("none", 0.0)
    together = 1 / (1 / phases.prefill.per_resource + 1 / phases.decode.per_resource)
    return Best(
        f"{describe(phases.prefill.placement)} + {describe(phases.decode.placement)}", together
    )


def _best(rated: RankedPlacement | None) -> Best:
    return (
        Best("none", 0.0) if rated is None else Best(describe(rated.placement), rated.per_resource)
    )


def _is(candidate: Candidate, tensor: int, pipeline: int) -> bool:
    size = candidate.parallelism
    return (size.tensor, size.pipeline) == (tensor, pipeline)
