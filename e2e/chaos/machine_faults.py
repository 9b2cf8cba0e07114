"""What happens to a whole fleet: its machine, its kubelet, a request that ends engines."""

import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import httpx

from cleave_worker.emulator.faults import POISON, POISONED

from e2e.chaos.expected_output import COMPLETIONS
from e2e.chaos.faults import Fault
from e2e.chaos.gateways import CLIENT, Gateway
from e2e.chaos.load import LONGEST_S
from e2e.chaos.machine import Machine
from e2e.chaos.verdict import Case, Seen, check_refusal_of_poison
from e2e.chaos.worker_faults import stopped
from e2e.support.deployments import Deployment, command

SUPERVISOR = "cleave.local.supervisor"


@contextmanager
def inflicted_on_fleet(
    fault: Fault, deployment: Deployment, gateways: Sequence[Gateway], machine: Machine
) -> Iterator[None]:
    """The fault lasts while this is open. Raises AssertionError for a wrong answer to a poison."""
    match fault.kind:
        case "fill disk":
            with machine.full_disk():
                yield
        case "jump clock":
            with machine.wrong_clock(fault.amount if fault.number % 2 else -fault.amount):
                yield
        case "freeze kubelet":
            with stopped([p for p in deployment.processes() if SUPERVISOR in command(p)]):
                yield
        case _:
            alive = [gateway for gateway in gateways if gateway.alive]
            send_poison(fault, deployment.name, random.Random(fault.number).choice(alive))
            yield


def send_poison(fault: Fault, model: str, gateway: Gateway) -> None:
    """Send a request that ends every engine which runs it."""
    body = {"model": model, "prompt": f"{POISON} {fault.number}", "max_tokens": 8}
    head = {"Authorization": f"Bearer {gateway.keys[0]}"} if gateway.keys else {}
    seen = Seen(time.monotonic(), gateway.name)
    try:
        answer = CLIENT.post(gateway.url + COMPLETIONS, json=body, headers=head, timeout=LONGEST_S)
        seen.status, seen.body = answer.status_code, answer.content
    except httpx.TransportError as error:
        seen.broken = f"{type(error).__name__} {error}"
    was_down = gateway.was_down(seen.began_s, time.monotonic())
    verdict = check_refusal_of_poison(seen, was_down)
    assert verdict.case is not Case.WRONG, verdict.reason


def count_poisoned(deployment: Deployment) -> int:
    """Engines that such requests have ended, as their logs say."""
    logs = deployment.state_dir.rglob("*.log")
    return sum(log.read_bytes().count(f"[engine] {POISONED}".encode()) for log in logs)
