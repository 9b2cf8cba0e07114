"""Disaggregated against colocated serving: DistServe's Table 1, and Azure's two services.

Called by run.py. The paper's factor compares two engines, DistServe's and the vLLM of 2023, the
latter with one parallelism and whole prompts first. Here the factor is taken apart: against vLLM's
own coefficients as the paper ran it; against the same engine, whole prompts first, with its best
parallelism; and against the same engine with chunked prefill and its best limits, which is what
somebody would run today.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from facts import APPLICATIONS, Application
from setting import pose

from cleave.planner import colocated, high_affinity, low_affinity, published
from cleave.planner.candidates import Candidate, candidates
from cleave.planner.draft import describe
from cleave.planner.problem import PAPER, Policies, Problem
from cleave.planner.rating import Rated
from cleave.planner.trials import CONFIRMED, Targets, Trials
from cleave.planner.workload import Demand
from cleave.simulator.fleet import Batching

ATTAINMENT = 0.9
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
    vllm: Best
    """Its own coefficients, the paper's parallelism, whole prompts first."""
    prefill_first: Best
    """DistServe's coefficients, best parallelism."""
    chunked: Best
    """The same with chunked prefill and its best limits."""


def applications() -> list[Gain]:
    """The five rows of Table 1, two of them also with the targets of the authors' plots."""
    return [_application(row) for row in APPLICATIONS]


def azure() -> list[Gain]:
    """Azure's services on OPT-66B. Their SLOs are not published: those of DistServe's chatbot for
    conversation, and for code the double TTFT, as its prompts are twice as long."""
    rows = (
        ("Azure conversation OPT-66B", "azure-conversation", Targets(400, 100, ATTAINMENT)),
        ("Azure code OPT-66B", "azure-code", Targets(800, 100, ATTAINMENT)),
    )
    return [
        _gain(name, "opt-66b", published.find(workload).demand(1.0, 1.0), targets, 4, "-")
        for name, workload, targets in rows
    ]


def _application(row: Application) -> Gain:
    return _gain(
        row.name,
        row.model,
        published.find(row.dataset).demand(),
        Targets(row.ttft_ms, row.tpot_ms, ATTAINMENT),
        row.vllm_tp,
        row.gain,
    )


def _gain(
    name: str,
    model: str,
    demand: Demand,
    targets: Targets,
    vllm_tp: int,
    paper: str,
) -> Gain:
    question = pose(model, demand, targets)
    baseline = pose(model, demand, targets, engine="vllm")
    today = pose(model, demand, targets, policies=CHUNKED)
    found = candidates(question)
    trials = Trials(question.demand, precision=CONFIRMED)
    own = [each for each in candidates(baseline) if _is(each, vllm_tp, 1)]
    return Gain(
        name=name,
        ttft_ms=targets.ttft_ms,
        tpot_ms=targets.tpot_ms,
        paper=paper,
        algorithm_1=_algorithm_1(question, trials, found, targets),
        algorithm_2=_best(low_affinity.optimise(question, trials, found, targets)),
        vllm=_best(_plain(baseline, trials, own, targets)),
        prefill_first=_best(_plain(question, trials, found, targets)),
        chunked=_best(colocated.optimise(today, trials, candidates(today), targets)),
    )


def _algorithm_1(
    question: Problem, trials: Trials, found: Sequence[Candidate], targets: Targets
) -> Best:
    """Both phases in the ratio that leaves neither idle: a request takes 1 / goodput of each."""
    (phases,) = high_affinity.optimise(question, trials, found, targets)
    if phases.prefill is None or phases.decode is None:
        return Best("none", 0.0)
    together = 1 / (1 / phases.prefill.per_resource + 1 / phases.decode.per_resource)
    return Best(f"{describe(phases.prefill.draft)} + {describe(phases.decode.draft)}", together)


def _plain(
    question: Problem, trials: Trials, found: Sequence[Candidate], targets: Targets
) -> Rated | None:
    """Colocated as the paper's vLLM: whole prompts first."""
    assert question.policies.mixed == PAPER.mixed
    return colocated.optimise(question, trials, found, targets)


def _best(rated: Rated | None) -> Best:
    return Best("none", 0.0) if rated is None else Best(describe(rated.draft), rated.per_resource)


def _is(candidate: Candidate, tensor: int, pipeline: int) -> bool:
    size = candidate.parallelism
    return (size.tensor, size.pipeline) == (tensor, pipeline)
