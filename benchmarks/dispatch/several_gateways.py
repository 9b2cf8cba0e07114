"""Best fit by several gateways: the highest rate of a fleet that they share.

Called by run.py. The routers are the product's own, under a simulated clock; each knows its own
requests, and of the others' what instances report each 100 ms. Instances take what Aladdin's Eq. 2
and 3 say of their iterations, which the routers learn from their own responses, as in production.
Requests come to one of the gateways at random. What is hard: a gateway that takes others' load for
too small overfills instances, and one that learns iteration times from its own batches alone takes
its instances for slow; both lower the rate.
"""

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from fleets import Worker
from goodput import MOST_TOKENS, WARM_UP, Targets, bisect
from registrations import state
from traces import draw

from cleave.api.enums import DispatchPolicy
from cleave.perf.published.aladdin import Coefficients
from cleave.policy.queue_model import INTERVAL_MS, choose_report_interval_ms
from cleave.router.registry import InstanceRegistry
from cleave.router.router import Pick, RequestPhase, Router, RoutingRules
from cleave.rpc.v1 import agent_pb2
from cleave.simulator.trace import Trace

BLOCK_TOKENS = 16
"""Of `registrations.state`."""
ITERATION_TOKENS = 2048
"""Prompt tokens that one iteration computes at most; longer prompts take several."""
ROLES = {
    "mixed": agent_pb2.ROLE_MIXED,
    "prefill": agent_pb2.ROLE_PREFILL,
    "decode": agent_pb2.ROLE_DECODE,
}

Counts = dict[str, int]
"""Instances by role."""


@dataclass(slots=True, eq=False)
class Request:
    """What clients see of it, and its accounting in the gateway that it came to."""

    arrival_ms: float
    prompt: int
    output: int
    router: Router
    pick: Pick
    left: int
    """Prompt tokens that are not computed yet."""
    first_ms: float = 0.0
    end_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Row:
    """Goodput of a fleet under one policy."""

    fleet: str
    policy: str
    per_gpu: dict[int, float]
    """req/s, by number of gateways."""


@dataclass(slots=True)
class Instance:
    """Continuous batching: prompts in order, as many tokens of them as an iteration takes."""

    coefficients: Coefficients
    capacity: int
    """Tokens of KV."""
    context: int = 0
    step: int = 0
    is_busy: bool = False
    queue: deque[Request] = field(default_factory=deque)
    """Requests whose prompt is not computed, or was computed elsewhere and waits for room."""
    computing: list[Request] = field(default_factory=list)
    """Requests whose prompt the present iteration computes to its end."""
    ends: list[tuple[int, int, Request]] = field(default_factory=list)
    """(iteration of the last token, number, request) of those that decode."""
    num_started: int = 0

    def start_iteration(self) -> float:
        """Begin the next one; returns its ms, 0: nothing to do."""
        tokens = self._take_prompts()
        self.is_busy = bool(tokens or self.ends or self.computing)
        if not self.is_busy:
            return 0.0
        fit = self.coefficients
        decode_ms = fit.predict_decode_ms(len(self.ends), self.context) if self.ends else fit.c1
        return decode_ms + fit.k1 * tokens

    def end_iteration(self, now_ms: float) -> tuple[list[Request], list[Request]]:
        """Each decoding request has one more token; returns those that have ended, and those whose
        prompt is computed and that decode elsewhere."""
        self.step += 1
        self.context += len(self.ends)
        ended = []
        while self.ends and self.ends[0][0] <= self.step:
            request = heapq.heappop(self.ends)[2]
            self.context -= request.prompt + request.output
            ended.append(request)
        computed, leaving = self.computing, []
        self.computing = []
        for request in computed:
            request.first_ms = now_ms
            request.router.release(request.pick, RequestPhase.PREFILL)
            if request.output == 1:
                ended.append(request)
            elif request.pick.prefill is None:
                self._begin_decoding(request)
            else:
                leaving.append(request)
        for request in ended:
            request.end_ms = now_ms
            request.router.observe_completion(request.pick, request.output)
            request.router.release(request.pick)
        return ended, leaving

    def report(self) -> agent_pb2.LoadReport:
        """As its agent does."""
        held = self.context + sum(each.prompt for each in self.computing)
        used = -(-held // BLOCK_TOKENS)
        return agent_pb2.LoadReport(
            num_running=len(self.ends) + len(self.computing),
            num_waiting=len(self.queue),
            pending_prompt_tokens=sum(each.left for each in (*self.queue, *self.computing)),
            kv_blocks_free=max(self.capacity // BLOCK_TOKENS - used, 0),
        )

    def _take_prompts(self) -> int:
        """Prompt tokens that this iteration computes."""
        taken, held = 0, self.context
        while self.queue and held + self.queue[0].prompt <= self.capacity:
            request = self.queue[0]
            if not request.left:
                self.queue.popleft()
                self._begin_decoding(request)
                held = self.context
                continue
            part = min(request.left, ITERATION_TOKENS - taken)
            taken += part
            request.left -= part
            held += request.prompt
            if request.left:
                break
            self.computing.append(self.queue.popleft())
        return taken

    def _begin_decoding(self, request: Request) -> None:
        """The first token is there: the prompt's iteration made it."""
        self.num_started += 1
        self.context += request.prompt + 1
        last = self.step + request.output - 1
        heapq.heappush(self.ends, (last, self.num_started, request))


class Fleet:
    """Instances behind several gateways."""

    def __init__(
        self,
        worker: Worker,
        counts: Counts,
        policy: DispatchPolicy,
        gateways: int,
        targets: Targets,
        seed: int,
    ) -> None:
        self.now_ms = 0.0
        self._capacity = worker.estimate.kv_capacity_tokens
        self.instances = {
            f"{role}-{number:04d}": Instance(worker.coefficients, self._capacity)
            for role, count in counts.items()
            for number in range(count)
        }
        self._gateways = gateways
        self._random = np.random.default_rng(seed)
        rules = RoutingRules(0, targets.ttft_ms, targets.tpot_ms)
        self.routers = [self._start_router(policy, rules, number) for number in range(gateways)]
        self._interval_ms = choose_report_interval_ms(INTERVAL_MS, gateways)
        self._events: list[tuple[float, int, str]] = []
        """(ms, gateway that gets a report or -1: an iteration ends, instance)"""
        phases = self._random.uniform(0.0, self._interval_ms, (len(self.instances), gateways))
        for name, row in zip(self.instances, phases.tolist(), strict=True):
            for gateway, at_ms in enumerate(row):
                self._push(at_ms, gateway, name)

    def serve(self, trace: Trace) -> list[Request]:
        """Send each request to a gateway at random; all of them with their times."""
        whose = self._random.integers(0, self._gateways, len(trace.arrival_ms))
        served, left = [], len(whose)
        columns = (trace.arrival_ms, trace.prompt_tokens, trace.output_tokens, whose)
        for arrival_ms, prompt, output, gateway in zip(
            *(column.tolist() for column in columns), strict=True
        ):
            left -= self._advance(arrival_ms)
            served.append(self._send(prompt, output, self.routers[gateway]))
        while left:
            left -= self._advance(self._events[0][0])
        return served

    def _advance(self, until_ms: float) -> int:
        """Everything until then; returns how many requests have ended."""
        ended = 0
        while self._events and self._events[0][0] <= until_ms:
            self.now_ms, gateway, name = heapq.heappop(self._events)
            if gateway < 0:
                done, leaving = self.instances[name].end_iteration(self.now_ms)
                ended += len(done)
                self._continue(name)
                for request in leaving:
                    self._enqueue(request.pick.decode.instance, request)
            else:
                self._report(gateway, name)
                self._push(self.now_ms + self._interval_ms, gateway, name)
        self.now_ms = until_ms
        return ended

    def _send(self, prompt: int, output: int, router: Router) -> Request:
        pick = router.pick("m", prompt)
        request = Request(self.now_ms, prompt, output, router, pick, prompt)
        self._enqueue((pick.prefill or pick.decode).instance, request)
        return request

    def _enqueue(self, name: str, request: Request) -> None:
        self.instances[name].queue.append(request)
        if not self.instances[name].is_busy:
            self._continue(name)

    def _continue(self, name: str) -> None:
        took_ms = self.instances[name].start_iteration()
        if took_ms:
            self._push(self.now_ms + took_ms, -1, name)

    def _report(self, gateway: int, name: str) -> None:
        load = self.instances[name].report()
        load.boot_id, load.num_routers, load.router_rank = f"{name}-boot", self._gateways, gateway
        event = agent_pb2.WatchEvent(load=load)
        self.routers[gateway].registry.on_event(name, event, self.now_ms / 1000)

    def _push(self, at_ms: float, gateway: int, name: str) -> None:
        heapq.heappush(self._events, (at_ms, gateway, name))

    def _start_router(self, policy: DispatchPolicy, rules: RoutingRules, number: int) -> Router:
        registry = InstanceRegistry(policy)
        for name in self.instances:
            role = ROLES[name.partition("-")[0]]
            event = state(name, role, self._capacity // BLOCK_TOKENS)
            registry.on_event(name, event, 0.0)
        return Router(registry, rules=rules, clock=self._read_clock, seed=number + 1)

    def _read_clock(self) -> float:
        return self.now_ms / 1000


def compare(
    worker: Worker,
    counts: Counts,
    lengths: Trace,
    targets: Targets,
    requests: int,
    gateways: Sequence[int],
    seeds: Sequence[int],
) -> list[Row]:
    """Best fit beside pending tokens; attainment is the mean over `seeds`."""
    name = ", ".join(f"{count} {role}" for role, count in counts.items()) + f": {worker.name}"
    total = sum(counts.values())

    def attain(policy: DispatchPolicy, number: int, rate: float, seed: int) -> float:
        fleet = Fleet(worker, counts, policy, number, targets, seed)
        served = fleet.serve(draw(lengths, rate, requests, seed, MOST_TOKENS))
        return measure_attainment(served, targets)

    def measure(policy: DispatchPolicy, number: int) -> float:
        def holds(rate: float) -> bool:
            may_miss = (1 - targets.attainment) * len(seeds)
            for seed in seeds:
                may_miss -= 1 - attain(policy, number, rate, seed)
                if may_miss < 0:
                    return False
            return True

        return bisect(holds, float(total)) / total

    policies = DispatchPolicy.PENDING_TOKENS, DispatchPolicy.BEST_FIT
    return [
        Row(name, each.value, {number: measure(each, number) for number in gateways})
        for each in policies
    ]


def measure_attainment(served: list[Request], targets: Targets) -> float:
    """Share of the requests after the warm-up within both targets."""
    counted = served[int(WARM_UP * len(served)) :]
    met = [
        each.first_ms - each.arrival_ms <= targets.ttft_ms
        and each.end_ms - each.first_ms <= targets.tpot_ms * max(each.output - 1, 1)
        for each in counted
    ]
    return sum(met) / len(met)
