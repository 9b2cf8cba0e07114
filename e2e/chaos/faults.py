"""Faults that befall a fleet: what each does, to whom it may happen, how long it lasts.

Drawn from a seed; what is drawn does not depend on what happens, but it has to wait while the fleet
could not bear it (see `storm`).
"""

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass

import httpx
import psutil

from e2e.chaos import network
from e2e.chaos.gateways import Gateway
from e2e.support.deployments import Deployment
from e2e.support.engine_keys import headers_for

ASK_S = 3.0
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
}
"""Kind -> how often, against the others."""
CUTS = {"cut engine": 5, "cut KV": 5, "cut agent": 4, "cut worker": 2}
GATEWAY_KINDS = {"kill gateway": 2, "kill gateway process": 2}
SILENT_KINDS = {"wrong KV": 1}
"""What nothing notices but a client: shows that a run can fail."""
FIRST_OF_PAIRS = frozenset(
    (
        *("corrupt hand-off", "stale hand-off", "short hand-off", "swap hand-off"),
        *("cut KV", "wrong KV"),
    )
)
"""Kinds that only mean something to instances that hand over."""
LONG_S = {
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
        "cut worker",
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
        if kind == "kill gateway process":
            victims = [name for name in victims if gateways[name] > 1]
        if kind in FIRST_OF_PAIRS:
            victims = [name for name in victims if roles[name] == "prefill"]
        seconds = rng.uniform(0.2, LONG_S.get(kind, USUAL_S))
        gap = min(rng.expovariate(1 / gap_s), 4 * gap_s)
        order = tuple(rng.sample(victims, len(victims)))
        faults.append(Fault(number, kind, order, seconds, gap, rng.randint(1, 4)))
    return faults


class Worker:
    """The processes of one instance, as they are now."""

    def __init__(self, deployment: Deployment, name: str) -> None:
        self.agent = deployment.agent(name)
        self.engine = deployment.engine(name)
        self.tree = [self.agent, *self.agent.children(recursive=True)]
        instance = deployment.instances()[name]
        self.url = instance.engine_url
        host, _, port = instance.engine_url.removeprefix("http://").rpartition(":")
        self.host, self.engine_port = host, int(port)

    def find_ports(self, kind: str) -> set[int]:
        """What a cut of this kind concerns."""
        if kind == "cut agent":
            return {AGENT_PORT}
        if kind == "cut engine":
            return {self.engine_port}
        listening = {
            c.laddr.port for c in self.engine.net_connections() if c.status == psutil.CONN_LISTEN
        }
        if kind == "cut KV":
            return listening - {self.engine_port}
        return {*listening, AGENT_PORT}

    def inject(self, **faults: object) -> None:
        url, headers = f"{self.url}/emulator/faults", headers_for(self.url)
        httpx.post(url, json=faults, headers=headers, timeout=ASK_S).raise_for_status()

    def clear(self) -> None:
        """It may have died of something else meanwhile."""
        with suppress(httpx.TransportError):
            url, headers = f"{self.url}/emulator/faults", headers_for(self.url)
            httpx.delete(url, headers=headers, timeout=ASK_S)


@contextmanager
def inflicted(fault: Fault, worker: Worker) -> Iterator[None]:
    """The fault lasts while this is open; what is killed stays dead."""
    match fault.kind:
        case "kill engine":
            worker.engine.kill()
            yield
        case "kill agent":
            worker.agent.kill()
            yield
        case "kill worker":
            for process in worker.tree:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            yield
        case "hang engine":
            with stopped([worker.engine, *worker.engine.children(recursive=True)]):
                yield
        case "hang agent":
            with stopped([worker.agent]):
                yield
        case "cut engine" | "cut KV" | "cut agent" | "cut worker":
            with ExitStack() as stack:
                for port in worker.find_ports(fault.kind):
                    cut = network.Cut(worker.host, port, one_way=fault.amount > 2)
                    cut.make()
                    stack.callback(cut.mend)
                yield
        case kind:
            worker.inject(**INJECTED[kind](fault.amount))
            try:
                yield
            finally:
                worker.clear()


@contextmanager
def stopped(processes: list[psutil.Process]) -> Iterator[None]:
    try:
        for process in processes:
            process.suspend()
        yield
    finally:
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.resume()


AGENT_PORT = 9000
INJECTED = {
    "freeze loop": lambda amount: {"hang": True},
    "slow": lambda amount: {"slow": 10},
    "refuse": lambda amount: {"refuse": True},
    "drop streams": lambda amount: {"drop": 5 * amount - 5},
    "corrupt hand-off": lambda amount: {"corrupt_handoff": amount},
    "stale hand-off": lambda amount: {"stale_handoff": amount},
    "short hand-off": lambda amount: {"short_handoff": amount},
    "swap hand-off": lambda amount: {"swap_handoff": amount},
    "wrong KV": lambda amount: {"wrong_kv": amount},
}
"""The faults that the emulated engine gets."""


@contextmanager
def inflicted_on_gateway(fault: Fault, gateway: Gateway) -> Iterator[None]:
    """The same for a gateway, which comes back when this is closed."""
    if fault.kind == "kill gateway process":
        gateway.kill_process(random.Random(fault.number))
        yield
        return
    gateway.count()
    gateway.kill()
    try:
        yield
    finally:
        gateway.start()
