"""Chooses machine types and counts: clusters of prompt and token machines within one budget.

Splitwise, sections IV-D and VI: machine types for prompt and token pools (AA, HH, HA, HHcap are
pairs of two types, a power-capped one among them) and their counts, for the highest throughput at
equal power or cost, or the lowest cost or power at a throughput, within nine slowdown limits. What
is hard: every point of the plane of counts is a simulation. More machines never serve worse, so the
cheapest point that meets the limits is found along the edge of the feasible region, and rates are
only searched where neither the bound nor one trial excludes a pair of counts. Machines help the
other pool, as the router does it (`policy.role_flipping`; Splitwise's mixed pool), also for long:
so the bound of a pair that lends is that of machines which all compute both.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import islice

from cleave.perf.estimate import Estimate
from cleave.perf.timing import EngineTiming
from cleave.planner.provision import slowdown
from cleave.planner.provision.slowdown import SPLITWISE_TABLE_VI, Slowdowns, UnloadedLatencies
from cleave.planner.search import capacity_bound
from cleave.planner.search.trials import Trials
from cleave.simulator.fleet import (
    Batching,
    FlipThresholds,
    SimulatedEngine,
    SimulatedFleet,
    SimulatedPool,
    SimulatedTransfer,
)
from cleave.traffic.workload import Demand

PROMPT_BATCH_TOKENS = 2048
"""Token limit of prompt batches (Splitwise, section IV-B); throughput falls above it (fig. 6a)."""

MAX_PENDING_TOKENS = 8192
"""Pending tokens of a prompt machine from which token machines help: those of Splitwise's simulator
(Mutinifni/splitwise-sim at 8f99e7d, configs/orchestrator_repo/schedulers/mixed_pool.yaml)."""

_TOLERANCE = 0.01
"""Relative width of the bracket at which a search for the rate ends."""
_TRIAL_S = 60.0
_MIN_REQUESTS = 1000
_BOUND_MARGIN = 1.05
"""Tolerance on bounds: requests of a sample may be a little lighter than its mean lengths."""


class ProvisioningError(ValueError):
    """The request has no budget, no rate or no machines; one line."""


class ProvisioningObjective(StrEnum):
    """What is maximised or minimised."""

    THROUGHPUT = "Throughput"
    """Highest rate within a budget of power, cost or machines."""
    COST = "Cost"
    """Lowest cost at a rate."""
    POWER = "Power"
    """Lowest provisioned power at a rate."""


@dataclass(frozen=True, slots=True)
class MachineType:
    """A machine type: one instance of the model on all GPUs of a node."""

    name: str
    estimate: Estimate
    """Step times, memory, cost and power of the GPUs, with a power cap included."""
    host_watts: float = 0.0
    """Power of the rest of the machine: processors, network, fans."""

    @property
    def power_watts(self) -> float:
        """Provisioned power of the whole machine."""
        return self.estimate.power_watts + self.host_watts

    def build_engine(self, batching: Batching, max_num_batched_tokens: int) -> SimulatedEngine:
        """The engine in the simulator's type."""
        return SimulatedEngine(
            self.estimate.timing,
            self.estimate.kv_capacity_tokens,
            batching=batching,
            max_num_batched_tokens=max_num_batched_tokens,
        )


@dataclass(frozen=True, slots=True)
class MachinePair:
    """Machine types of both pools."""

    name: str
    prompt: MachineType
    token: MachineType | None
    """None: all machines are mixed, as in Splitwise's baselines."""
    transfer: SimulatedTransfer = SimulatedTransfer()  # noqa: RUF009 - a frozen value

    lends: bool = True
    """Whether machines help the other pool when it is overloaded (Splitwise's mixed pool)."""

    def build_fleet(self, num_prompt: int, num_token: int) -> SimulatedFleet:
        """A fleet of these counts; the prompt machine produces the first token, as in Splitwise."""
        if self.token is None:
            # As vLLM runs them: whole prompts would stall the decoding requests beside them.
            mixed = self.prompt.build_engine(Batching.VLLM, PROMPT_BATCH_TOKENS)
            return SimulatedFleet(mixed=(SimulatedPool(mixed, num_prompt),))
        prompt = self.prompt.build_engine(Batching.PREFILL_FIRST, PROMPT_BATCH_TOKENS)
        token = self.token.build_engine(Batching.VLLM, PROMPT_BATCH_TOKENS)
        return SimulatedFleet(
            prefill=(SimulatedPool(prompt, num_prompt),),
            decode=(SimulatedPool(token, num_token),),
            transfer=self.transfer,
            flipping=FlipThresholds(self._compute_max_wait_ms()) if self.lends else None,
            first_token_by_decode=False,
        )

    def _compute_max_wait_ms(self) -> float:
        """How long prompts wait before a token machine helps."""
        batches = MAX_PENDING_TOKENS / PROMPT_BATCH_TOKENS
        return batches * self.prompt.estimate.timing.predict_prefill_ms([PROMPT_BATCH_TOKENS])

    def compute_cost_per_hour(self, num_prompt: int, num_token: int) -> float:
        """Price of all machines."""
        token = self.token.estimate.cost_per_hour if self.token else 0.0
        return num_prompt * self.prompt.estimate.cost_per_hour + num_token * token

    def compute_power_watts(self, num_prompt: int, num_token: int) -> float:
        """Provisioned power of all machines."""
        token = self.token.power_watts if self.token else 0.0
        return num_prompt * self.prompt.power_watts + num_token * token


@dataclass(frozen=True, slots=True)
class ProvisioningRequest:
    """The input of a provisioning search."""

    demand: Demand
    pairs: tuple[MachinePair, ...]
    reference: EngineTiming
    """Latency model of the machine whose unloaded latency is slowdown 1 (Splitwise: DGX-A100)."""
    objective: ProvisioningObjective
    rate: float | None = None
    """Iso-throughput, in req/s; required for COST and POWER."""
    max_cost_per_hour: float | None = None
    """Iso-cost."""
    max_power_watts: float | None = None
    """Iso-power."""
    max_machines: int = 128
    """Largest count of each type."""
    limits: Slowdowns = SPLITWISE_TABLE_VI
    seed: int = 0


@dataclass(frozen=True, slots=True)
class ClusterDesign:
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
    request: ProvisioningRequest, progress: Callable[[int, int, str], None] | None = None
) -> tuple[ClusterDesign, ...]:
    """The best cluster of each pair that has one, best first. `progress` is called with (pairs
    done, number of pairs, name). Raises ProvisioningError."""
    _check(request)
    designs = []
    for done, pair in enumerate(request.pairs):
        if progress is not None:
            progress(done, len(request.pairs), pair.name)
        search = PairSearch(request, pair)
        designs.append(
            search.maximize_throughput()
            if request.objective is ProvisioningObjective.THROUGHPUT
            else search.find_cheapest()
        )
    return tuple(sorted((each for each in designs if each), key=lambda each: _rank(request, each)))


@dataclass(slots=True)
class PairSearch:
    """The search for one pair, with its simulations."""

    request: ProvisioningRequest
    pair: MachinePair
    num_trials: int = 0
    trials: Trials = field(init=False)
    _unloaded: dict[int, UnloadedLatencies] = field(default_factory=dict)
    """By number of requests."""

    def __post_init__(self) -> None:
        self.trials = Trials(self.request.demand, self.request.seed)

    def find_cheapest(self) -> ClusterDesign | None:
        """Cheapest cluster that serves the rate; None: none with at most `max_machines` does.

        For each number of prompt machines the fewest token machines, as long as that may still be
        cheaper: one trial per number, and a bisection where it is.
        """
        rate = self.request.rate or 0.0
        first_prompt, first_token = self._compute_min_machines(rate)
        max_machines = self.request.max_machines
        best: tuple[int, int] | None = None
        for prompts in range(first_prompt, max_machines + 1):
            tokens = self._find_max_token_machines(prompts, first_token, best)
            if tokens is None and best is not None:
                break
            if tokens is not None and self.holds(prompts, tokens, rate):
                best = prompts, self._find_min_token_machines(prompts, first_token, tokens, rate)
        return self._build_design(*best, rate) if best is not None else None

    def maximize_throughput(self) -> ClusterDesign | None:
        """Cluster within the budget that serves the highest rate; None: none serves any.

        Pairs of counts are tried from that which serves most without help between its pools; one
        that fails slightly above the best rate so far is rejected after that trial.
        """
        best: tuple[float, int, int] | None = None

        def compute_rate_alone(split: tuple[float, int, int]) -> float:
            return self._compute_fleet_rate(self.pair.build_fleet(*split[1:]))

        for bound, prompts, tokens in sorted(
            self.list_splits(), key=compute_rate_alone, reverse=True
        ):
            floor = best[0] * (1 + _TOLERANCE) if best else 0.0
            if floor and (bound <= floor or not self.holds(prompts, tokens, floor)):
                continue
            rate = self.find_highest_rate(prompts, tokens, floor, bound * _BOUND_MARGIN)
            if rate:
                best = rate, prompts, tokens
        return self._build_design(best[1], best[2], best[0]) if best is not None else None

    def holds(self, prompts: int, tokens: int, rate: float) -> bool:
        """Whether all slowdowns are within their limits."""
        if self.compute_rate_bound(prompts, tokens) * _BOUND_MARGIN < rate:
            return False
        return self.simulate_slowdowns(prompts, tokens, rate).is_within(self.request.limits)

    def compute_rate_bound(self, prompts: int, tokens: int) -> float:
        """Rate bound: a simulation exceeds it only by the randomness of its sample. A machine that
        may help the other pool counts in both."""
        fleet = self.pair.build_fleet(prompts, tokens)
        if fleet.flipping is not None:
            fleet = replace(fleet, prefill=(), decode=(), mixed=(*fleet.prefill, *fleet.decode))
        return self._compute_fleet_rate(fleet)

    def _compute_fleet_rate(self, fleet: SimulatedFleet) -> float:
        return capacity_bound.compute_fleet_rate(fleet, self.trials.get_lengths())

    def simulate_slowdowns(self, prompts: int, tokens: int, rate: float) -> Slowdowns:
        """Slowdowns of one simulated cluster."""
        self.num_trials += 1
        counted = max(_MIN_REQUESTS, math.ceil(rate * _TRIAL_S))
        span = self.trials.build_span(math.ceil(rate * self._compute_lifetime_s()), counted)
        outcome = self.trials.simulate(self.pair.build_fleet(prompts, tokens), rate, span)
        return slowdown.measure_slowdowns(outcome, self._get_reference(span.total), span.window)

    def _compute_lifetime_s(self) -> float:
        """Mean lifetime of a request within the limits: the time in which a cluster fills."""
        reference = self._get_reference(_MIN_REQUESTS)
        return float(reference.e2e_ms.mean()) / 1000 * self.request.limits.e2e.p90

    def _get_reference(self, num: int) -> UnloadedLatencies:
        if num not in self._unloaded:
            trace = self.trials.build_trace(num, 1.0)
            self._unloaded[num] = slowdown.compute_unloaded_latencies(self.request.reference, trace)
        return self._unloaded[num]

    def _compute_min_machines(self, rate: float) -> tuple[int, int]:
        """Machines of each type below which the rate bound is too low."""
        lengths = self.trials.get_lengths()
        fleet = self.pair.build_fleet(1, 1)
        if fleet.mixed:
            return max(1, math.ceil(rate / _BOUND_MARGIN / self.compute_rate_bound(1, 0))), 0
        if fleet.flipping is not None:
            return 1, 1
        prompts = capacity_bound.compute_prefill_rate(fleet.prefill[0].engine, lengths)
        tokens = capacity_bound.compute_decode_rate(fleet.decode[0].engine, lengths)
        prompt_machines, token_machines = (
            max(1, math.ceil(rate / (each * _BOUND_MARGIN))) for each in (prompts, tokens)
        )
        return prompt_machines, token_machines

    def _compute_weight(self, prompts: int, tokens: int) -> float:
        if self.request.objective is ProvisioningObjective.POWER:
            return self.pair.compute_power_watts(prompts, tokens)
        return self.pair.compute_cost_per_hour(prompts, tokens)

    def _find_max_token_machines(
        self, prompts: int, fewest: int, best: tuple[int, int] | None
    ) -> int | None:
        """Most token machines within the budgets and cheaper than `best`; None: none are."""
        max_tokens = 0 if self.pair.token is None else self.request.max_machines
        below = self._compute_weight(*best) if best is not None else math.inf
        for tokens in range(max_tokens, fewest - 1, -1):
            weight = self._compute_weight(prompts, tokens)
            if weight < below and self._is_affordable(prompts, tokens):
                return tokens
        return None

    def _find_min_token_machines(self, prompts: int, low: int, high: int, rate: float) -> int:
        """Bisection; `high` meets the limits."""
        while low < high:
            middle = (low + high) // 2
            if self.holds(prompts, middle, rate):
                high = middle
            else:
                low = middle + 1
        return high

    def _is_affordable(self, prompts: int, tokens: int) -> bool:
        max_cost, max_power = self.request.max_cost_per_hour, self.request.max_power_watts
        cost = self.pair.compute_cost_per_hour(prompts, tokens)
        power = self.pair.compute_power_watts(prompts, tokens)
        return (max_cost is None or cost <= max_cost) and (max_power is None or power <= max_power)

    def list_splits(self) -> Iterator[tuple[float, int, int]]:
        """(rate bound, prompt machines, token machines) that use up the budget."""
        max_machines = self.request.max_machines
        if self.pair.token is None:
            mixed = (n for n in range(max_machines, 0, -1) if self._is_affordable(n, 0))
            yield from ((self.compute_rate_bound(n, 0), n, 0) for n in islice(mixed, 1))
            return
        for prompts in range(1, max_machines + 1):
            tokens = self._find_max_token_machines(prompts, 1, None)
            if tokens is None:
                return
            yield self.compute_rate_bound(prompts, tokens), prompts, tokens

    def find_highest_rate(self, prompts: int, tokens: int, low: float, high: float) -> float:
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

    def _build_design(self, prompts: int, tokens: int, rate: float) -> ClusterDesign:
        return ClusterDesign(
            self.pair.name,
            prompts,
            tokens,
            rate,
            self.pair.compute_cost_per_hour(prompts, tokens),
            self.pair.compute_power_watts(prompts, tokens),
            self.simulate_slowdowns(prompts, tokens, rate),
        )


def _rank(request: ProvisioningRequest, design: ClusterDesign) -> tuple[float, float]:
    if request.objective is ProvisioningObjective.THROUGHPUT:
        return -design.rate, design.cost_per_hour
    if request.objective is ProvisioningObjective.COST:
        return design.cost_per_hour, design.power_watts
    return design.power_watts, design.cost_per_hour


def _check(request: ProvisioningRequest) -> None:
    if not request.pairs:
        raise ProvisioningError("pairs: set at least one pair of machine types")
    budgets = (request.max_cost_per_hour, request.max_power_watts)
    if request.objective is ProvisioningObjective.THROUGHPUT and budgets == (None, None):
        raise ProvisioningError("goal Throughput: set max_power_watts or max_cost_per_hour")
    if request.objective is not ProvisioningObjective.THROUGHPUT and request.rate is None:
        raise ProvisioningError(f"goal {request.objective}: set the rate to serve")
    for name in ("rate", "max_cost_per_hour", "max_power_watts", "max_machines"):
        value = getattr(request, name)
        if value is not None and not (math.isfinite(value) and value > 0):
            raise ProvisioningError(f"{name} {value:g}: must be above 0")
