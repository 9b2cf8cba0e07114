"""What `cleave plan --explain` says of a loss."""

import io

import pytest
from rich.console import Console

from cleave.api.deployment import Slo
from cleave.cli.planning import explanation
from cleave.cli.planning.explanation import print_explanation
from cleave.perf.estimate import Confidence, LatencySource
from cleave.planner.plan import Percentiles, Plan, PlanningResult, PlanVerdict, Prediction
from cleave.planner.problem import Policies
from cleave.planner.result.targets_worth import TargetsWorth
from cleave.planner.scaling_law import growth
from cleave.planner.scaling_law.aladdin import ScalingError
from cleave.planner.search.candidate_placement import to_planned_pools

from tests.support.known_problems import Kind, chat, nodes, of_size, problem, split


def explained() -> str:
    kinds = (("A100-SXM-80GB", Kind()),)
    supplies = (nodes(gpu="A100-SXM-80GB"),)
    slo, policies = Slo(ttft_ms=1000, tpot_ms=60), Policies()
    question = problem(chat(8.0), slo, policies=policies, supplies=supplies, kinds=kinds)
    single = of_size(question)
    tpot = Percentiles(30.0, 30.0, 30.0)
    trust = Confidence(LatencySource.MEASURED, "DistServe's coefficients", None)
    seen = Prediction(8.0, (8.0, 8.0), 0.9, tpot, tpot, tpot, 1.0, 1.0, trust)
    plan = Plan(to_planned_pools(split(question, single, 2, single, 1)), seen, "Algorithm 1", 1.0)
    answer = PlanningResult(PlanVerdict.DISAGGREGATE, plan, (), "", "", None, (), 1, 1, 0.1)
    page = io.StringIO()
    print_explanation(Console(file=page, width=1000), question, answer)
    return page.getvalue()


@pytest.fixture(autouse=True)
def _no_simulation(monkeypatch) -> None:
    def refuse(*_: object) -> None:
        raise ScalingError("not asked here")

    monkeypatch.setattr(growth, "fit_growth", refuse)


def test_the_cost_of_a_loss_is_reported() -> None:
    lost = next(line for line in explained().splitlines() if "computed again in" in line)
    assert lost.startswith("recovery")
    assert "where its prompt is still cached; all its streams in" in lost


def read_worth(monkeypatch, goodput: float) -> list[str]:
    """What is said of engines that keep targets where the plan serves 8 req/s."""
    worth = TargetsWorth(goodput, (0.9 * goodput, 1.1 * goodput), 0.8, 0.1)
    monkeypatch.setattr(explanation, "measure_worth_of_targets", lambda *_: worth)
    lines = explained().splitlines()
    at = next(at for at, line in enumerate(lines) if line.startswith("targets"))
    return [line.strip() for line in lines[at : at + 2]]


@pytest.mark.parametrize(
    ("goodput", "expected"),
    [
        (12.0, "serve 12.0 instead of 8.00 req/s within"),
        (4.0, "serve less: 4.00 instead of 8.00 req/s within"),
        (8.5, "serve about as much (8.50 req/s) within"),
    ],
)
def test_the_worth_of_engines_that_keep_targets_is_reported(monkeypatch, goodput, expected) -> None:
    served, overload = read_worth(monkeypatch, goodput)
    assert expected in served
    assert overload.startswith("at 12.0 req/s, 80 % instead of 10 % of the requests")
