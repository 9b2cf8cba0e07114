"""DistServe's Table 5: the chosen parallelism of one prefill and one decode instance.

Called by run.py. Every pair of sizes that the testbed has room for is simulated jointly, KV over
NVLink; beside the best one, what the paper's own choice reaches here.
"""

from dataclasses import dataclass

from facts import APPLICATIONS, PLACEMENTS, Application, Parallel
from testbeds import pose

from cleave.api.role import Role
from cleave.planner.problem import Problem
from cleave.planner.search import goodput, ranking
from cleave.planner.search.candidate_placement import CandidatePlacement, InstanceGroup, build_cell
from cleave.planner.search.candidates import Candidate, build_decode, build_prefill, list_candidates
from cleave.planner.search.context import SearchContext
from cleave.planner.search.trials import Targets, Trials
from cleave.traffic import published

MAX_GPUS = 32


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the table."""

    name: str
    ttft_ms: float
    best: tuple[Parallel, Parallel] | None
    """Of prefill and decode; None: no pair meets the targets."""
    best_per_gpu: float
    paper: tuple[Parallel, Parallel]
    paper_per_gpu: float
    """Goodput of the paper's choice, simulated here."""


def compare() -> list[Row]:
    return [_compare(row) for row in APPLICATIONS]


def _compare(row: Application) -> Row:
    targets = Targets(row.ttft_ms, row.tpot_ms, 0.9)
    question = pose(row.model, published.get_workload(row.dataset).build_demand(), targets)
    trials, found = Trials(question.demand), list_candidates(question)
    drafts = [
        draft
        for prefill in found
        for decode in found
        if (draft := _pair(question, prefill, decode)).gpus <= MAX_GPUS
    ]
    search = SearchContext(question, trials, targets)
    best = ranking.find_best(search, ranking.bound_placements(search, drafts))
    paper = PLACEMENTS[row.model, row.dataset]
    theirs = next((draft for draft in drafts if _sizes(draft) == paper), None)
    rate = (
        goodput.find_goodput(trials, build_cell(question, theirs), targets).rate if theirs else 0.0
    )
    return Row(
        name=row.name,
        ttft_ms=row.ttft_ms,
        best=_sizes(best.placement) if best else None,
        best_per_gpu=best.per_resource if best else 0.0,
        paper=paper,
        paper_per_gpu=rate / theirs.gpus if theirs else 0.0,
    )


def _pair(question: Problem, prefill: Candidate, decode: Candidate) -> CandidatePlacement:
    return CandidatePlacement(
        (
            InstanceGroup(Role.PREFILL, build_prefill(question, prefill), 1),
            InstanceGroup(Role.DECODE, build_decode(question, decode), 1),
        ),
        is_in_node=True,
    )


def _sizes(draft: CandidatePlacement) -> tuple[Parallel, Parallel]:
    prefill, decode = (group.instance.candidate.parallelism for group in draft.groups)
    return (prefill.tensor, prefill.pipeline), (decode.tensor, decode.pipeline)
