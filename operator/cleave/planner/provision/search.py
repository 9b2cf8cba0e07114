"""Chooses machine types and counts: clusters of prompt and token machines within one budget.

Splitwise, sections IV-D and VI: machine types for prompt and token pools (AA, HH, HA, HHcap are
pairs of two types, a power-capped one among them) and their counts, for the highest throughput at
equal power or cost, or the lowest cost or power at a throughput, within nine slowdown limits. What
is hard: every point of the plane of counts is a simulation. More machines never serve worse, so the
cheapest point that meets the limits is found along the edge of the feasible region, and rates are
only searched where neither the bound nor one trial excludes a pair of counts. Unlike in Splitwise's
own simulator, machines keep their role: there is no mixed pool that takes overflow.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import islice

from cleave.perf.estimate import Estimate
from cleave.perf.timing import Timing
from cleave.planner.provision import slowdown
from cleave.planner.provision.slowdown import TABLE_VI, Alone, Slowdowns
from cleave.planner.search import capacity_bound
from cleave.planner.search.trials import Span, Trials
from cleave.simulator.fleet import Batching, Engine, Fleet, Pool, Transfer
from cleave.traffic.workload import Demand

PROMPT_BATCH_TOKENS = 2048
"""Token limit of prompt batches (Splitwise, section IV-B); throughput falls above it (fig. 6a)."""

_TOLERANCE = 0.01
"""Relative width of the bracket at which a search for the rate ends."""
_TRIAL_S = 60.0
_MIN_REQUESTS = 1000
_SLACK = 1.05
"""Tolerance on bounds: a sample's requests may be a little lighter than its mean lengths
suggest."""


class ProvisioningError(ValueError):
    """The request has no budget, no rate or no machines; one line."""


class Goal(StrEnum):
    """What is maximised or minimised."""

    THROUGHPUT = "Throughput"
    """Highest rate within a budget of power, cost or machines."""
    COST = "Cost"
    """Lowest cost at a rate."""
    POWER = "Power"
    """Lowest provisioned power at a rate."""


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine type: one instance of the model on all GPUs of a node."""

    name: str
    estimate: Estimate
    """Step times, memory, cost and power, with a power cap included."""

    def engine(self, batching: Batching, max_num_batched_tokens: int) -> Engine:
        """The engine in the simulator's type."""
        return Engine(
            self.estimate.timing,
            self.estimate.kv_capacity_tokens,
            batching=batching,
            max_num_batched_tokens=max_num_batched_tokens,
        )


@dataclass(frozen=True, slots=True)
class Pair:
    """Machine types of both pools."""

    name: str
    prompt: Machine
    token: Machine | None
    """None: all machines are mixed, as in Splitwise's baselines."""
    transfer: Transfer = Transfer()  # noqa: RUF009 - a frozen value

    def fleet(self, num_prompt: int, num_token: int) -> Fleet:
        """A fleet of these counts; the prompt machine produces the first token, as in Splitwise."""
        if self.token is None:
            # Splitwise's mixed continuous batching: unchunked prompts join the decoding requests.
            mixed = self.prompt.engine(Batching.ORCA_PAGED, PROMPT_BATCH_TOKENS)
            return Fleet(mixed=(Pool(mixed, num_prompt),))
        prompt = self.prompt.engine(Batching.PREFILL_FIRST, PROMPT_BATCH_TOKENS)
        token = self.token.engine(Batching.VLLM, PROMPT_BATCH_TOKENS)
        return Fleet(
            prefill=(Pool(prompt, num_prompt),),
            decode=(Pool(token, num_token),),
            transfer=self.transfer,
            first_token_by_decode=False,
        )

    def cost_per_hour(self, num_prompt: int, num_token: int) -> float:
        """Price of all machines."""
        token = self.token.estimate.cost_per_hour if self.token else 0.0
        return num_prompt * self.prompt.estimate.cost_per_hour + num_token * token

    def power_watts(self, num_prompt: int, num_token: int) -> float:
        """Provisioned power of all machines."""
        token = self.token.estimate.power_watts if self.token else 0.0
        return num_prompt * self.prompt.estimate.power_watts + num_token * token


@dataclass(frozen=True, slots=True)
class Question:
    """The input of a provisioning search."""

    demand: Demand
    pairs: tuple[Pair, ...]
    reference: Timing
    """Latency model of the machine whose unloaded latency is slowdown 1 (Splitwise: DGX-A100)."""
    goal: Goal
    rate: float | None = None
    """Iso-throughput, in req/s; required for COST and POWER."""
    max_cost_per_hour: float | None = None
    """Iso-cost."""
    max_power_watts: float | None = None
    """Iso-power."""
    max_machines: int = 128
    """Largest count of each type."""
    limits: Slowdowns = TABLE_VI
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Design:
    """One cluster."""

    name: str
    """Name of its pair."""
    num_prompt: int
    """Mixed machines where there are no token machines."""
    num_token: int
    rate: float
    """Highest rate within the limits, or the requested one."""
    cost_per_hour: float
    power_watts: float
    slowdowns: Slowdowns
    """At `rate`."""

    @property
    def machines(self) -> int:
        """Number of all machines: the space that the cluster needs."""
        return self.num_prompt + self.num_token


def provision(
    request: Question, progress: Callable[[int, int, str], None] | None = None
) -> tuple[Design, ...]:
    """The best cluster of each pair that has one, best first.

    `progress` is called with (pairs done, number of pairs, name). Raises ProvisioningError.
    """
    _check(request)
    designs = []
    for done, pair in enumerate(request.pairs):
        if progress is not None:
            progress(done, len(request.pairs), pair.name)
        search = Search(request, pair)
        designs.append(
            search.most_throughput() if request.goal is Goal.THROUGHPUT else search.least()
        )
    return tuple(sorted((each for each in designs if each), key=lambda each: _rank(request, each)))


@dataclass(slots=True)
class Search:
    """The search for one pair, with its simulations."""

    question: Question
    pair: Pair
    num_trials: int = 0
    trials: Trials = field(init=False)
    _alone: dict[int, Alone] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.trials = Trials(self.question.demand, self.question.seed)

    def least(self) -> Design | None:
        """Cheapest cluster that serves the rate; None: none with at most `max_machines` does.

        For each number of prompt machines the fewest token machines, as long as that may still be
        cheaper: one trial per number, and a bisection where it is.
        """
        rate = self.question.rate or 0.0
        first_prompt, first_token = self._fewest(rate)
        max_machines = self.question.max_machines
        best: tuple[int, int] | None = None
        for prompts in range(first_prompt, max_machines + 1):
            tokens = self._most_tokens(prompts, first_token, best)
            if tokens is None:
                if best is not None:
                    break
                continue
            if not self.holds(prompts, tokens, rate):
                continue
            best = prompts, self._fewest_tokens(prompts, first_token, tokens, rate)
        return self._design(*best, rate) if best is not None else None

    def most_throughput(self) -> Design | None:
        """Cluster within the budget that serves the highest rate; None: none serves any.

        Pairs of counts are tried from the highest bound down; one that fails slightly above the
        best rate so far is rejected after that trial.
        """
        best: tuple[float, int, int] | None = None
        for bound, prompts, tokens in sorted(self.splits(), reverse=True):
            floor = best[0] * (1 + _TOLERANCE) if best else 0.0
            if bound <= floor:
                break
            if floor and not self.holds(prompts, tokens, floor):
                continue
            rate = self.highest(prompts, tokens, floor, bound * _SLACK)
            if rate:
                best = rate, prompts, tokens
        return self._design(best[1], best[2], best[0]) if best is not None else None

    def holds(self, prompts: int, tokens: int, rate: float) -> bool:
        """Whether all slowdowns are within their limits."""
        if self.bound(prompts, tokens) * _SLACK < rate:
            return False
        return self.slowdowns(prompts, tokens, rate).within(self.question.limits)

    def bound(self, prompts: int, tokens: int) -> float:
        """Rate bound that a simulation exceeds only by the randomness of its sample."""
        return capacity_bound.fleet_rate(self.pair.fleet(prompts, tokens), self.trials.lengths())

    def slowdowns(self, prompts: int, tokens: int, rate: float) -> Slowdowns:
        """Slowdowns of one simulated cluster."""
        self.num_trials += 1
        counted = max(_MIN_REQUESTS, math.ceil(rate * _TRIAL_S))
        span = Span(ramp=math.ceil(rate * self._life_s()), counted=counted)
        outcome = self.trials.serve(self.pair.fleet(prompts, tokens), rate, span)
        return slowdown.measure(outcome, self._reference(span.total), span.window)

    def _life_s(self) -> float:
        """Mean lifetime of a request within the limits: the time in which a cluster fills."""
        reference = self._reference(_MIN_REQUESTS)
        return float(reference.e2e_ms.mean()) / 1000 * self.question.limits.e2e.p90

    def _reference(self, num: int) -> Alone:
        unloaded = self._alone.get(num)
        if unloaded is None:
            unloaded = slowdown.alone(self.question.reference, self.trials.trace(num, 1.0))
            self._alone[num] = unloaded
        return unloaded

    def _fewest(self, rate: float) -> tuple[int, int]:
        """Machines of each type below which the rate bound is too low."""
        lengths = self.trials.lengths()
        fleet = self.pair.fleet(1, 1)
        if fleet.mixed:
            return max(1, math.ceil(rate / _SLACK / self.bound(1, 0))), 0
        prompts = capacity_bound.prefill_rate(fleet.prefill[0].engine, lengths) * _SLACK
        tokens = capacity_bound.decode_rate(fleet.decode[0].engine, lengths) * _SLACK
        return max(1, math.ceil(rate / prompts)), max(1, math.ceil(rate / tokens))

    def _weight(self, prompts: int, tokens: int) -> float:
        if self.question.goal is Goal.POWER:
            return self.pair.power_watts(prompts, tokens)
        return self.pair.cost_per_hour(prompts, tokens)

    def _most_tokens(self, prompts: int, fewest: int, best: tuple[int, int] | None) -> int | None:
        """Most token machines that are within the budgets and cheaper than `best`; None: none
        are."""
        max_tokens = 0 if self.pair.token is None else self.question.max_machines
        below = self._weight(*best) if best is not None else math.inf
        for tokens in range(max_tokens, fewest - 1, -1):
            if self._weight(prompts, tokens) < below and self._affordable(prompts, tokens):
                return tokens
        return None

    def _fewest_tokens(self, prompts: int, low: int, high: int, rate: float) -> int:
        """Bisection; `high` meets the limits."""
        while low < high:
            middle = (low + high) // 2
            if self.holds(prompts, middle, rate):
                high = middle
            else:
                low = middle + 1
        return high

    def _affordable(self, prompts: int, tokens: int) -> bool:
        cost, power = self.question.max_cost_per_hour, self.question.max_power_watts
        return (cost is None or self.pair.cost_per_hour(prompts, tokens) <= cost) and (
            power is None or self.pair.power_watts(prompts, tokens) <= power
        )

    def splits(self) -> Iterator[tuple[float, int, int]]:
        """(rate bound, prompt machines, token machines) that use up the budget."""
        max_machines = self.question.max_machines
        if self.pair.token is None:
            mixed = (n for n in range(max_machines, 0, -1) if self._affordable(n, 0))
            yield from ((self.bound(n, 0), n, 0) for n in islice(mixed, 1))
            return
        for prompts in range(1, max_machines + 1):
            tokens = self._most_tokens(prompts, 1, None)
            if tokens is None:
                return
            yield self.bound(prompts, tokens), prompts, tokens

    def highest(self, prompts: int, tokens: int, low: float, high: float) -> float:
        """Bisection on the rate; `low` meets the limits or is 0."""
        while high - low > _TOLERANCE * high:
            middle = (low + high) / 2
            if self.holds(prompts, tokens, middle):
                low = middle
            else:
                high = middle
            if high < 1e-3:
                return 0.0
        return low

    def _design(self, prompts: int, tokens: int, rate: float) -> Design:
        return Design(
            self.pair.name,
            prompts,
            tokens,
            rate,
            self.pair.cost_per_hour(prompts, tokens),
            self.pair.power_watts(prompts, tokens),
            self.slowdowns(prompts, tokens, rate),
        )


def _rank(request: Question, design: Design) -> tuple[float, float]:
    if request.goal is Goal.THROUGHPUT:
        return -design.rate, design.cost_per_hour
    if request.goal is Goal.COST:
        return design.cost_per_hour, design.power_watts
    return design.power_watts, design.cost_per_hour


def _check(request: Question) -> None:
    if not request.pairs:
        raise ProvisioningError("pairs: set at least one pair of machine types")
    budgets = (request.max_cost_per_hour, request.max_power_watts)
    if request.goal is Goal.THROUGHPUT and budgets == (None, None):
        raise ProvisioningError("goal Throughput: set max_power_watts or max_cost_per_hour")
    if request.goal is not Goal.THROUGHPUT and request.rate is None:
        raise ProvisioningError(f"goal {request.goal}: set the rate to serve")
    for name in ("rate", "max_cost_per_hour", "max_power_watts", "max_machines"):
        value = getattr(request, name)
        if value is not None and not (math.isfinite(value) and value > 0):
            raise ProvisioningError(f"{name} {value:g}: must be above 0")
