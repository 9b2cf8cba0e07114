"""What one pick costs, by policy, number of instances and closed pairs. Called by run.py."""

import time
from collections.abc import Callable
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


@dataclass(frozen=True, slots=True)
class PairsRow:
    prefills: int
    decodes: int
    closed: str
    """Which pairs are closed."""
    pick_us: float
    result_us: float
    """To apply the result of one more pair."""
    sweep_us: float
    """To look for results that have expired, twice a second."""


def measure(policy: DispatchPolicy, instances: int) -> Row:
    """The best of some rounds: CPU time of a pick, and of a release."""
    clock = Clock()
    rules = RoutingRules(0, 2_000.0, 100.0)
    registry = fill(instances - instances // 2, instances // 2, policy)
    router = Router(registry, rules=rules, clock=lambda: clock.now_s, seed=1)
    teach(router, clock, instances)
    for number in range(IN_FLIGHT * instances):
        router.pick("m", 200 + number % 900, 300, text=TEXT)
    return Row(policy.value, instances, *time_picks(router))


CLOSED: dict[str, Callable[[int, int], bool]] = {
    "none": lambda prefill, decode: False,
    "one": lambda prefill, decode: prefill == decode == 0,
    "one of each prefill": lambda prefill, decode: prefill == decode,
    "half": lambda prefill, decode: (prefill + decode) % 2 == 0,
    "all of half of the prefills": lambda prefill, decode: prefill % 2 == 0,
}
"""(prefill, decode) -> whether the pair is closed."""


def measure_closed_pairs(prefills: int, decodes: int, closed: str) -> PairsRow:
    """The best of some rounds, with the default policy and pairs closed by the witness."""
    registry = fill(prefills, decodes, DispatchPolicy.SHORTEST_WAIT)
    for decode in range(decodes):
        proofs = agent_pb2.PairProofs(boot_id=f"decode-{decode:04d}-boot")
        for prefill in range(prefills):
            is_closed = CLOSED[closed](prefill, decode)
            proofs.proofs.add(
                prefill=f"prefill-{prefill:04d}",
                prefill_boot_id=f"prefill-{prefill:04d}-boot",
                trust=agent_pb2.TRUST_FAILED if is_closed else agent_pb2.TRUST_PROVEN,
            )
        registry.on_event(f"decode-{decode:04d}", agent_pb2.WatchEvent(pairs=proofs), 0.0)
    router = Router(registry, clock=lambda: 0.0, seed=1)
    for number in range(IN_FLIGHT * (prefills + decodes)):
        router.pick("m", 200 + number % 900, 300)
    pick_us, _ = time_picks(router)
    some = registry.instances["decode-0001"]
    proven = some.pairs["prefill-0000-boot"]
    results, sweeps = [], []
    for number in range(20):
        start = time.process_time()
        registry.record_pair(some, "prefill-0000-boot", proven, 0.0)
        middle = time.process_time()
        registry.update_connectivity(number / 1000)
        results.append((middle - start) * 1e6)
        sweeps.append((time.process_time() - middle) * 1e6)
    return PairsRow(prefills, decodes, closed, pick_us, min(results), min(sweeps))


def time_picks(router: Router, rounds: int = 7, picks: int = 200) -> tuple[float, float]:
    """CPU time of a pick and of a release, us; the best of some rounds."""
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
    return min(picked), min(released)


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


def fill(prefills: int, decodes: int, policy: DispatchPolicy) -> InstanceRegistry:
    """Instances of both roles."""
    registry = InstanceRegistry(policy)
    for role, phase, count in (
        (agent_pb2.ROLE_PREFILL, "prefill", prefills),
        (agent_pb2.ROLE_DECODE, "decode", decodes),
    ):
        for number in range(count):
            name = f"{phase}-{number:04d}"
            registry.on_event(name, state(name, role), 0.0)
    return registry
