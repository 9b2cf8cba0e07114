"""Router and simulator pick the same instances after any history, under every policy.

Both supply what they know to `policy`. Each history is a random fleet and random arrivals, answers,
ends, losses, flips of roles and lost instances; after each arrival both must have picked alike.
HISTORIES=10000 draws so many for each policy.
"""

import dataclasses
import os
import random
from collections.abc import Callable

import numpy as np
import pytest

from cleave.api.enums import DispatchPolicy
from cleave.perf.published.aladdin import Coefficients
from cleave.perf.timing import EngineTiming
from cleave.policy.best_fit import BestFitModel
from cleave.router.registry import InstanceRegistry
from cleave.router.router import Pick, RequestPhase, Router, RoutingRules
from cleave.rpc.v1 import agent_pb2
from cleave.simulator.dispatch import (
    dispatch_request,
    remove_prompt_load,
    remove_resident_load,
    update_scores,
)
from cleave.simulator.fleet import SimulatedEngine, SimulatedFleet, SimulatedPool
from cleave.simulator.record_access import get_instance, get_request, get_score
from cleave.simulator.records import NONE, State
from cleave.simulator.role_flipping import _change_role
from cleave.simulator.run import compile_loop, lay_out, prepare_fleet
from cleave.simulator.trace import Trace

HISTORIES = int(os.environ.get("HISTORIES", "100"))
REQUESTS = 24
ARRIVE, ANSWER, END, LOSE, FLIP, SCORE = range(6)
ROLES = (agent_pb2.ROLE_PREFILL, agent_pb2.ROLE_DECODE, agent_pb2.ROLE_MIXED)
PREFILL, DECODE, MIXED = range(3)
TIMING = EngineTiming(1.0, (1.0, 2.0), 0.0, (1.0, 1.0), (0.0,))
BLOCK = 16
TICK_S = 1 / 1024
"""Milliseconds of such times are exact, so that both clocks show the same."""


def apply(state: State, closed: int, kind: int, which: int, role: int, now: float) -> None:
    """One event of a history, in a simulation without engines; compiled. `closed`: a bit for each
    instance."""
    state.now = now
    if kind == ARRIVE:
        dispatch_request(state, which)
    elif kind == ANSWER:
        get_request(state, which).prefill_end = now
        remove_prompt_load(state, which)
    elif kind == END:
        remove_resident_load(state, which)
    elif kind == LOSE:
        # Nothing is learnt of a prompt that is never answered.
        request = get_request(state, which)
        i = request.prefill if request.prefill != NONE else request.decode
        inst = get_instance(state, i)
        inst.pending_prompt_tokens -= request.prompt
        inst.waiting -= 1
        if request.prefill != NONE:
            inst.requests -= 1
            update_scores(state, i)
        remove_resident_load(state, which)
    elif kind == FLIP:
        _change_role(state, which, role, now)
    elif kind == SCORE:
        update_scores(state, which)
    for i in range(state.num_instances):
        if closed >> i & 1:
            for use in range(3):
                get_score(state, use * state.num_instances + i).value = np.inf


@pytest.fixture(scope="module")
def compiled() -> Callable[..., None]:
    return compile_loop(apply, int, int, int, int, float)


class Known:
    """Predicts the given lengths."""

    tokens = 0

    def predict(self, prompt_tokens: int, limit: int = 0) -> float:
        return self.tokens

    def observe(self, prompt_tokens: int, output_tokens: int) -> None: ...


class History:
    """One fleet, known to a router and to a simulation."""

    def __init__(self, policy: DispatchPolicy, seed: int, apply: Callable[..., None]) -> None:
        self.draw = draw = random.Random(f"{policy} {seed}")
        self.apply, self.now_s = apply, 1.0
        self.roles = [PREFILL] * draw.randint(1, 4) + [DECODE] * draw.randint(1, 4)
        self.roles += [MIXED] * draw.choice([0, 0, 1, 2])
        self.homes = list(self.roles)
        self.blocks = [draw.randint(60, 250) for _ in (PREFILL, DECODE, MIXED)]
        """KV of the instances, by the role that they begin with."""
        self.is_closed = np.zeros(len(self.roles), np.int64)
        slope = draw.choice([0.001, 0.01])
        fit = Coefficients(k1=0.1, c1=5.0, k2=slope, c2=0.5, c3=5.0)
        packing = BestFitModel(fit, draw.choice([40.0, 200.0]), draw.choice([12.0, 30.0]))
        short = draw.choice([0, 0, 80, 250])
        self.packing = packing
        self.headroom_ms = draw.choice([0.0, 4.0, 40.0])
        self._start_simulation(policy, packing, short)
        self._start_router(policy, packing, short)
        self.waiting: dict[int, Pick] = {}
        self.decoding: dict[int, Pick] = {}
        self.number = 0

    def _start_simulation(self, policy: DispatchPolicy, packing: BestFitModel, short: int) -> None:
        draw = self.draw
        engines = [SimulatedEngine(TIMING, blocks * BLOCK, BLOCK) for blocks in self.blocks]
        pools = [
            (SimulatedPool(engines[role], count),) if (count := self.roles.count(role)) else ()
            for role in (PREFILL, DECODE, MIXED)
        ]
        fleet = SimulatedFleet(*pools, dispatch=policy, best_fit=packing, short_prompt_tokens=short)
        self.trace = Trace(
            np.zeros(REQUESTS),
            np.array([draw.randint(1, draw.choice([60, 400])) for _ in range(REQUESTS)]),
            np.array([draw.randint(1, draw.choice([60, 400])) for _ in range(REQUESTS)]),
        )
        predicted = [draw.randint(1, draw.choice([60, 400])) for _ in range(REQUESTS)]
        self.trace = dataclasses.replace(self.trace, predicted_tokens=np.array(predicted))
        self.arrays, self.state = lay_out(prepare_fleet(fleet), self.trace, 0)
        self.state["random"] = 1 + draw.randrange(1 << 30)
        self.state["headroom_ms"] = self.headroom_ms
        for i in range(len(self.roles)):
            self.simulate(SCORE, i)

    def _start_router(self, policy: DispatchPolicy, packing: BestFitModel, short: int) -> None:
        directory = InstanceRegistry(policy)
        rules = RoutingRules(short, packing.ttft_ms, packing.tpot_ms, self.headroom_ms)
        seed = int(self.state["random"][0])
        self.router = Router(directory, rules=rules, clock=lambda: self.now_s, seed=seed)
        self.router.length_predictor = self.lengths = Known()
        # The simulation knows the passes from the start.
        self.router._iteration_times.best_fit = packing
        self.router._iteration_times.add_prompt = lambda *_: None  # type: ignore[method-assign]
        for i in range(len(self.roles)):
            self.register(i)

    def register(self, i: int) -> None:
        registration = agent_pb2.Registration(
            instance=f"i{i:02}",
            model="m",
            boot_id=f"boot{i}",
            role=ROLES[self.roles[i]],
            home=ROLES[self.homes[i]],
            state=agent_pb2.STATE_READY,
            engine_url="http://127.0.0.1:8000",
            kv_block_size=BLOCK,
            kv_blocks_total=self.blocks[self.homes[i]],
            kv_path=agent_pb2.KvPath(verified=True),
        )
        event = agent_pb2.WatchEvent(registration=registration)
        self.router.registry.on_event(f"agent{i}", event, self.now_s)

    def step(self) -> None:
        """One event; fails when an arrival is placed on different instances."""
        self.now_s += self.draw.choice([0, 1, 3, 40]) * TICK_S
        kind = self.draw.choices(range(5), (45, 25, 15, 7, 8))[0]
        if kind == ARRIVE:
            self.arrive()
        elif kind == ANSWER and self.waiting:
            r = self.draw.choice(list(self.waiting))
            self.decoding[r] = self.waiting.pop(r)
            self.simulate(ANSWER, r)
            self.router.release(self.decoding[r], RequestPhase.PREFILL)
        elif kind == END and self.decoding:
            r = self.draw.choice(list(self.decoding))
            self.simulate(END, r)
            self.router.release(self.decoding.pop(r))
        elif kind == LOSE and self.waiting:
            r = self.draw.choice(list(self.waiting))
            self.simulate(LOSE, r)
            self.router.release(self.waiting.pop(r))
        elif kind == FLIP:
            self.change(self.draw.randrange(len(self.roles)))

    def arrive(self) -> None:
        r, self.number = self.number, self.number + 1
        assert self.trace.predicted_tokens is not None
        self.lengths.tokens = int(self.trace.predicted_tokens[r])
        self.simulate(ARRIVE, r)
        pick = self.router.pick("m", int(self.trace.prompt_tokens[r]))
        self.waiting[r] = pick
        request = self.arrays["requests"][r]
        first, second = int(request["prefill"]), int(request["decode"])
        routed = pick.prefill.instance if pick.prefill else None, pick.decode.instance
        assert routed == (f"i{first:02}" if first != NONE else None, f"i{second:02}")

    def change(self, i: int) -> None:
        """Flip an instance, or lose it or hear it again; unless nothing could serve then."""
        roles, is_closed = list(self.roles), self.is_closed.copy()
        if self.draw.random() < 0.5:
            roles[i] = self.draw.randrange(3)
        else:
            is_closed[i] = not is_closed[i]
        left = {role for role, gone in zip(roles, is_closed, strict=True) if not gone}
        if MIXED not in left and not {PREFILL, DECODE} <= left:
            return
        self.roles, was_closed = roles, self.is_closed
        self.is_closed = is_closed
        if is_closed[i] and not was_closed[i]:
            self.router.registry.on_disconnect(f"agent{i}")
        elif not is_closed[i]:
            self.register(i)
        # A lost agent reports its role when it is back.
        self.simulate(FLIP, i, roles[i])

    def simulate(self, kind: int, which: int, role: int = NONE) -> None:
        closed = sum(1 << i for i, gone in enumerate(self.is_closed) if gone)
        self.apply(self.state, closed, kind, which, role, self.now_s * 1000)


@pytest.mark.parametrize("policy", list(DispatchPolicy))
def test_the_simulator_picks_what_the_router_picks(
    policy: DispatchPolicy, compiled: Callable[..., None]
) -> None:
    for seed in range(HISTORIES):
        history = History(policy, seed, compiled)
        while history.number < REQUESTS:
            history.step()
