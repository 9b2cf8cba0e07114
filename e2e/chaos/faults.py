"""Faults that befall a fleet: to whom each may happen and how long it lasts. Pure.

Drawn from a seed; what is drawn does not depend on what happens, but it has to wait while the fleet
could not bear it (see `run`). `worker_faults`, `gateway_faults` and `machine_faults` say what each
kind does.
"""

import random
from dataclasses import dataclass

WORKER_KINDS = {
    "kill engine": 5,
    "kill agent": 3,
    "kill worker": 3,
    "hang engine": 5,
    "hang agent": 3,
    "freeze loop": 4,
    "slow": 5,
    "refuse": 4,
    "drop streams": 6,
    "corrupt hand-off": 6,
    "stale hand-off": 4,
    "short hand-off": 4,
    "swap hand-off": 6,
    "slow start": 2,
}
"""Kind -> how often, against the others."""
CUTS = {"cut engine": 5, "cut KV": 5, "cut agent": 4, "cut worker": 2}
GATEWAY_KINDS = {
    "kill gateway": 2,
    "kill gateway process": 2,
    "freeze gateway": 3,
    "freeze gateway process": 3,
    "freeze gateway loop": 3,
    "starve gateway": 3,
    "fill buffers": 3,
}
FLEET_KINDS = {"poison request": 2, "freeze kubelet": 2}
MACHINE_KINDS = {"fill disk": 3, "jump clock": 3}
"""Need a file system and a clock of the run's own (see `machine`)."""
FLEET = "fleet"
"""The victim of faults that happen to all of it."""
SILENT_KINDS = {"wrong KV": 1}
"""What nothing notices but a client: shows that a run can fail."""
FIRST_OF_PAIRS = frozenset(
    (
        *("corrupt hand-off", "stale hand-off", "short hand-off", "swap hand-off"),
        *("cut KV", "wrong KV"),
    )
)
"""Kinds that only mean something to instances that hand over."""
ONE_PROCESS = frozenset(("kill gateway process", "freeze gateway process"))
"""Kinds that only mean something to gateways of several processes."""
LONG_S = {
    "slow start": 10.0,
    "freeze gateway": 8.0,
    "freeze gateway process": 8.0,
    "freeze gateway loop": 8.0,
    "starve gateway": 8.0,
    "freeze kubelet": 8.0,
    "fill disk": 8.0,
    "hang engine": 6.0,
    "hang agent": 12.0,
    "freeze loop": 6.0,
    "cut engine": 6.0,
    "cut worker": 20.0,
}
"""Where it is not USUAL_S at most."""
USUAL_S = 3.0
CRIPPLING = frozenset(
    (
        *("kill engine", "kill agent", "kill worker", "hang engine", "hang agent", "freeze loop"),
        *("refuse", "drop streams", "cut engine", "cut agent"),
        *("cut worker", "slow start"),
    )
)
"""Kinds that take the instance away as long as they last, or longer."""


@dataclass(frozen=True)
class Fault:
    """One that is to happen."""

    number: int
    kind: str
    victims: tuple[str, ...]
    """The first of them that it may happen to."""
    seconds: float
    gap_s: float
    """After the fault before it."""
    amount: int

    @property
    def cripples(self) -> bool:
        return self.kind in CRIPPLING


def draw(
    rng: random.Random,
    count: int,
    kinds: dict[str, int],
    roles: dict[str, str],
    gateways: dict[str, int],
    gap_s: float,
) -> list[Fault]:
    """So many faults. `roles`: by instance; `gateways`: how many processes each has."""
    faults = []
    for number in range(count):
        (kind,) = rng.choices(list(kinds), list(kinds.values()))
        victims = sorted(gateways if kind in GATEWAY_KINDS else roles)
        if kind in FLEET_KINDS or kind in MACHINE_KINDS:
            victims = [FLEET]
        if kind in ONE_PROCESS:
            victims = [name for name in victims if gateways[name] > 1]
        if kind in FIRST_OF_PAIRS:
            victims = [name for name in victims if roles[name] == "prefill"]
        seconds = rng.uniform(0.2, LONG_S.get(kind, USUAL_S))
        gap = min(rng.expovariate(1 / gap_s), 4 * gap_s)
        order = tuple(rng.sample(victims, len(victims)))
        faults.append(Fault(number, kind, order, seconds, gap, rng.randint(1, 4)))
    return faults
