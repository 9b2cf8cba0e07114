"""Whether another plan takes the place of what runs. The door of replanning. Pure.

Called by the operator, in the planner's process, after the traffic has changed or the model was
corrected, and by the benchmark that plays whole days. DistServe, section 4.3, replans when the
pattern shifts; what a change costs, and that a model may be wrong, is left open there. What is
hard: to act seldom and rightly. A plan is acted upon only if the model is right about what runs,
if it is better by more than a little, if what it wins is more than what the change costs, and not
soon after the last change.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from cleave.perf import corrected
from cleave.perf.corrected import NONE, Correction
from cleave.planner import search
from cleave.planner.bench import to_draft
from cleave.planner.guard import FEWEST, SETTLE_S, THRESHOLD, Judgement, judge
from cleave.planner.plan import Answer, Plan, PlannedPool
from cleave.planner.predict import predict
from cleave.planner.problem import Problem
from cleave.planner.replay import Running, draft_of, find_attainment
from cleave.planner.restarts import count_begun, count_kinds, spare
from cleave.planner.trials import CONFIRMED, Targets, Trials
from cleave.planner.words import percent, pool_label
from cleave.traffic.refit import find_margin, to_demand
from cleave.traffic.window import Window, list_settled

_SPARE = 0.05
"""Traffic that a plan which takes less must stand beyond what may come by chance: it may rest on a
model that is a little fast."""
_ROOM = 0.25
"""Of what the goal leaves, that a plan must have to spare where it takes less: else the next gust
of traffic would bring the former one back."""


class Verdict(StrEnum):
    """What becomes of what runs."""

    KEEP = "Keep"
    """It stays."""
    CORRECT = "Correct"
    """It stays, as the model is wrong about it; the model is corrected first."""
    PROPOSE = "Propose"
    """Another plan is better, and is only told."""
    APPLY = "Apply"
    """Another plan is better, and takes its place."""


@dataclass(frozen=True, slots=True)
class Terms:
    """How readily plans are changed."""

    is_advisory: bool = False
    """Plans are told, not applied."""
    min_gain: float = 0.1
    """Smallest relative gain that is worth a change."""
    threshold: float = THRESHOLD
    """Prediction error beyond which nothing is acted upon."""
    horizon_s: float = 3600.0
    """For how long the traffic is taken to stay as it is: the time to win back a change's cost."""
    settle_s: float = SETTLE_S
    """So long after a change latencies are of before and after it."""
    start_s: float = 120.0
    """From making an instance to its first request."""
    cooldown_s: float = 600.0
    """Between two changes; and less is taken only where traffic was seen for so long."""


@dataclass(frozen=True, slots=True)
class Left:
    """Pools that were in force."""

    pools: tuple[PlannedPool, ...]
    at_s: float
    """Until when."""


@dataclass(frozen=True, slots=True)
class Outlook:
    """What some pools do at the traffic that was seen, by the corrected model."""

    pools: tuple[PlannedPool, ...]
    attainment: float
    resources: float
    """What the objective counts: GPUs, price of an hour, or watts."""
    seen: float = 1.0
    """Attainment that was seen; 1 where nothing was, as of a plan that does not run."""

    @property
    def worst(self) -> float:
        """What it is taken to attain."""
        return min(self.attainment, self.seen)


@dataclass(frozen=True, slots=True)
class Decision:
    """What is to be done, and why."""

    verdict: Verdict
    reason: str
    """One sentence."""
    gain: float = 0.0
    """Relative: more requests in time, or, where both plans hold the targets, less taken."""


@dataclass(frozen=True, slots=True)
class Revision:
    """One look at what runs."""

    decision: Decision
    judgement: Judgement
    answer: Answer | None = None
    """The planner's; None: it was not asked, as its model is wrong."""
    proposed: Plan | None = None
    """What was weighed against what runs."""


def revise(
    problem: Problem,
    running: Running,
    windows: Sequence[Window],
    correction: Correction = NONE,
    terms: Terms = Terms(),
    left: Sequence[Left] = (),
) -> Revision:
    """Judge the model by what runs, plan anew if it is right, and decide.

    The traffic of `problem` gives way to that of `windows`, in which nothing but `running` served;
    its model is the one without a correction. `left`: plans that were in force before. Raises
    RefitError when too few requests came, and PlanError.
    """
    demand = replace(to_demand(windows), max_model_len=problem.demand.max_model_len)
    asked = replace(problem, demand=demand)
    judgement = judge(asked, running, windows, correction, terms.threshold, terms.settle_s)
    if not judgement.holds:
        return Revision(Decision(Verdict.CORRECT, judgement.reason), judgement)
    estimator = corrected.correct(problem.estimator, judgement.correction)
    at_mean = replace(problem, demand=demand, estimator=estimator)
    # What runs gets the benefit of the doubt about the traffic, but for what was seen to fail.
    now = replace(_look_at(at_mean, running), seen=_find_seen(windows, terms.settle_s))
    margin = find_margin(windows) + (_SPARE if now.worst >= problem.slo.attainment else 0.0)
    at_most = replace(at_mean, demand=demand.at(demand.rate * (1 + margin)))
    answer = search.plan(at_most)
    best = answer.best
    if best is None:
        return Revision(Decision(Verdict.KEEP, answer.reason), judgement, answer)
    best = _spare_restarts(at_most, running.pools, best, terms)
    then = _look_at(at_most, replace(running, pools=best.pools, algorithm=best.algorithm))
    seen_s = sum(each.length_s for each in windows)
    decision = decide(at_mean, now, then, terms, windows[-1].end_s, left, seen_s)
    return Revision(decision, judgement, answer, best)


def decide(
    problem: Problem,
    now: Outlook,
    then: Outlook,
    terms: Terms,
    at_s: float,
    left: Sequence[Left] = (),
    seen_s: float = math.inf,
) -> Decision:
    """Whether `then` takes the place of `now`; `seen_s`: how long traffic was seen for that."""
    if count_kinds(now.pools) == count_kinds(then.pools):
        return Decision(Verdict.KEEP, "the plan that runs is still the best")
    goal = problem.slo.attainment
    gain = _find_gain(now, then, goal)
    keep = (
        _why_wait(now, goal, terms, at_s, left)
        or _why_too_little(problem, now, then, terms, gain)
        or (_why_not_less(then, terms, at_s, left, seen_s) if now.worst >= goal else None)
    )
    if keep is not None:
        return Decision(Verdict.KEEP, keep, gain)
    verdict = Verdict.PROPOSE if terms.is_advisory else Verdict.APPLY
    return Decision(verdict, _tell(now, then, goal), gain)


def _spare_restarts(
    problem: Problem, now: tuple[PlannedPool, ...], best: Plan, terms: Terms
) -> Plan:
    """`best`, or the same with limits of running instances where that serves as well.

    Who starts anew does not serve meanwhile, which better limits have to win back.
    """

    def attain(pools: tuple[PlannedPool, ...]) -> float:
        return find_attainment(problem, Running(pools, best.algorithm))

    goal, at_best = problem.slo.attainment, attain(best.pools)
    least = min(at_best, goal + _ROOM * (1 - goal))

    def serves(pools: tuple[PlannedPool, ...], spared: int) -> bool:
        lost = spared / _count(pools) * terms.start_s / terms.horizon_s
        return attain(pools) >= max(least, at_best - lost)

    pools = spare(now, best.pools, serves)
    if pools == best.pools:
        return best
    draft = to_draft(problem, pools, best.algorithm)
    trials, targets = Trials(problem.demand, problem.seed).at(CONFIRMED), Targets.of(problem.slo)
    return predict(problem, trials, draft, targets, best.algorithm).plan


def _look_at(problem: Problem, running: Running) -> Outlook:
    resources = draft_of(problem, running).resources(problem.planning.objective)
    return Outlook(running.pools, find_attainment(problem, running), resources)


def _find_seen(windows: Sequence[Window], settle_s: float) -> float:
    """Attainment while no backlog drained; 1 where too little was seen to doubt it."""
    settled = list_settled(windows, settle_s)
    judged = sum(each.judged for each in settled)
    return sum(each.attained for each in settled) / judged if judged >= FEWEST else 1.0


def _find_gain(now: Outlook, then: Outlook, goal: float) -> float:
    if now.worst >= goal and then.attainment >= goal:
        return now.resources / then.resources - 1
    return then.attainment / now.worst - 1 if now.worst else math.inf


def _why_wait(
    now: Outlook, goal: float, terms: Terms, at_s: float, left: Sequence[Left]
) -> str | None:
    """Not twice in a short time, unless what runs fails badly."""
    since_s = at_s - max((each.at_s for each in left), default=-math.inf)
    if since_s >= terms.cooldown_s or now.worst < goal / 2:
        return None
    return f"the plan was changed {since_s:.0f} s ago; it stays for {terms.cooldown_s:.0f} s"


def _why_not_less(
    then: Outlook, terms: Terms, at_s: float, left: Sequence[Left], seen_s: float
) -> str | None:
    """What is missing costs requests, what is too much costs little: less is taken with care."""
    if seen_s < terms.cooldown_s:
        return (
            f"traffic was seen for {seen_s:.0f} s; {terms.cooldown_s:.0f} s are asked to take less"
        )
    for each in left:
        age_s = at_s - each.at_s
        if age_s < 2 * terms.cooldown_s and count_kinds(each.pools) == count_kinds(then.pools):
            return f"{_label(then.pools)} was left {age_s:.0f} s ago; traffic may swing back"
    return None


def _why_too_little(
    problem: Problem, now: Outlook, then: Outlook, terms: Terms, gain: float
) -> str | None:
    goal, begun = problem.slo.attainment, count_begun(now.pools, then.pools)
    if now.worst >= goal and then.attainment < goal + _ROOM * (1 - goal):
        return f"what runs holds the targets; {_label(then.pools)} hardly would"
    if now.worst >= goal:
        if gain < terms.min_gain:
            return f"what runs holds the targets; {_label(then.pools)} takes hardly less"
        spent = begun / _count(then.pools) * then.resources * terms.start_s
        if (now.resources - then.resources) * terms.horizon_s <= spent:
            return f"starting {begun} instances takes more than {_label(then.pools)} saves"
        return None
    if now.attainment >= goal and then.resources <= now.resources:
        # The model knows not why; it would be as wrong about another plan of that size.
        return f"what runs misses more than predicted; {_label(then.pools)} takes no more than it"
    if gain < terms.min_gain and then.attainment < goal:
        return f"{_label(then.pools)} would serve {max(gain, 0):.0%} more in time; too little"
    won = (then.attainment - now.worst) * problem.rate * terms.horizon_s
    # Those that end before others have begun do not serve meanwhile.
    replaced = min(begun, count_begun(then.pools, now.pools))
    share = replaced / _count(now.pools)
    cost = share * now.worst * problem.rate * terms.start_s
    if won <= cost:
        return f"the change would cost {cost:.0f} requests and win {max(won, 0):.0f}"
    return None


def _tell(now: Outlook, then: Outlook, goal: float) -> str:
    attained = f"{_label(then.pools)} has {percent(then.attainment)} of the requests in time"
    if now.worst < goal:
        return f"{attained} where {_label(now.pools)} has {percent(now.worst)}"
    taken = then.resources / now.resources
    return f"{attained} for {percent(taken)} of what {_label(now.pools)} takes"


def _label(pools: Iterable[PlannedPool]) -> str:
    return " + ".join(map(pool_label, pools))


def _count(pools: Iterable[PlannedPool]) -> int:
    return sum(pool.replicas for pool in pools)
