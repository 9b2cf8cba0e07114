"""What one pick of the router costs, by policy and number of instances. Called by run.py."""

import time
from dataclasses import dataclass

from registrations import state

from cleave.api.enums import DispatchPolicy
from cleave.router.registry import InstanceRegistry
from cleave.router.router import RequestPhase, Router, RoutingRules
from cleave.rpc.v1 import agent_pb2

IN_FLIGHT = 8
"""Requests at each instance while picks are timed."""
TEXT = b"The quick brown fox jumps over the lazy dog. " * 91
"""4 KiB of prompt."""


@dataclass(frozen=True, slots=True)
class Row:
    policy: str
    instances: int
    pick_us: float
    release_us: float


def measure(policy: DispatchPolicy, instances: int, rounds: int = 7, picks: int = 200) -> Row:
    """The best of some rounds: CPU time of a pick, and of a release."""
    clock = Clock()
    rules = RoutingRules(0, 2_000.0, 100.0)
    router = Router(fill(instances, policy), rules=rules, clock=lambda: clock.now_s, seed=1)
    teach(router, clock, instances)
    for number in range(IN_FLIGHT * instances):
        router.pick("m", 200 + number % 900, 300, text=TEXT)
    picked, released = [], []
    for _ in range(rounds):
        start = time.process_time()
        some = [router.pick("m", 500 + n, 300, text=TEXT) for n in range(picks)]
        middle = time.process_time()
        for each in some:
            router.release(each)
        end = time.process_time()
        picked.append((middle - start) / picks * 1e6)
        released.append((end - middle) / picks * 1e6)
    return Row(policy.value, instances, min(picked), min(released))


class Clock:
    """Stands still while picks are timed."""

    now_s = 0.0


def teach(router: Router, clock: Clock, instances: int) -> None:
    """Answers enough for BestFit to know what passes take."""
    for number in range(40):
        size = 2 + number % 7
        total = size * instances // 2
        picks = [router.pick("m", 100 + number * 97 % 900, 300) for _ in range(total)]
        for pick in picks:
            clock.now_s += 0.01 + 0.0001 * pick.prompt_tokens
            router.release(pick, RequestPhase.PREFILL)
        clock.now_s += 300 * (0.015 + 0.0001 * size)
        for pick in picks:
            router.observe_completion(pick, 300)
            router.release(pick)


def fill(instances: int, policy: DispatchPolicy) -> InstanceRegistry:
    """Half of the instances prefill, half decode."""
    directory = InstanceRegistry(policy)
    for number in range(instances):
        name = f"chat-{number:04d}"
        role = agent_pb2.ROLE_DECODE if number % 2 else agent_pb2.ROLE_PREFILL
        directory.on_event(name, state(name, role), 0.0)
    return directory
