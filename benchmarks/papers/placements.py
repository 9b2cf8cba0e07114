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
from cleave.planner.search.candidate_placement import Draft, Group, cell_fleet
from cleave.planner.search.candidates import (
    Candidate,
    candidates,
    decode_instance,
    prefill_instance,
)
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
    question = pose(row.model, published.find(row.dataset).demand(), targets)
    trials, found = Trials(question.demand), candidates(question)
    drafts = [
        draft
        for prefill in found
        for decode in found
        if (draft := _pair(question, prefill, decode)).gpus <= MAX_GPUS
    ]
    entries = ranking.entries(question, trials, drafts)
    best = ranking.best(trials, entries, targets, lambda draft: float(draft.gpus))
    paper = PLACEMENTS[row.model, row.dataset]
    theirs = next((draft for draft in drafts if _sizes(draft) == paper), None)
    rate = goodput.find(trials, cell_fleet(question, theirs), targets).rate if theirs else 0.0
    return Row(
        name=row.name,
        ttft_ms=row.ttft_ms,
        best=_sizes(best.draft) if best else None,
        best_per_gpu=best.per_resource if best else 0.0,
        paper=paper,
        paper_per_gpu=rate / theirs.gpus if theirs else 0.0,
    )


def _pair(question: Problem, prefill: Candidate, decode: Candidate) -> Draft:
    return Draft(
        (
            Group(Role.PREFILL, prefill_instance(question, prefill), 1),
            Group(Role.DECODE, decode_instance(question, decode), 1),
        ),
        is_in_node=True,
    )


def _sizes(draft: Draft) -> tuple[Parallel, Parallel]:
    prefill, decode = (group.instance.candidate.parallelism for group in draft.groups)
    return (prefill.tensor, prefill.pipeline), (decode.tensor, decode.pipeline)
