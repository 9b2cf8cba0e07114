"""Brings up what is hurt: a fleet through the command line, and gateways of its own before it."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from e2e.chaos.expected_output import ADAPTERS
from e2e.chaos.gateways import Gateway
from e2e.support.deployments import Deployment, deployed, emulated, until

LEASE_S = 4
"""Short, so that leases end in the middle of faults; vLLM's are 30 s."""
TIME_SCALE = 0.5
READY_S = 60
KEYS = ("sk-chaos-first-tenant", "sk-chaos-second-tenant")


@dataclass(frozen=True)
class Shape:
    """Instances of each role."""

    prefill: int
    decode: int
    mixed: int

    @property
    def roles(self) -> dict[str, int]:
        counts = {"prefill": self.prefill, "decode": self.decode, "mixed": self.mixed}
        return {role: number for role, number in counts.items() if number}


@dataclass(frozen=True)
class Fleet:
    """A deployment and the gateways that clients ask."""

    deployment: Deployment
    gateways: list[Gateway]
    roles: dict[str, str]
    """By instance."""


def emulated_manifest(name: str, shape: Shape) -> dict[str, Any]:
    """Emulated instances that take faults."""
    manifest: dict[str, Any] = emulated(name, 1, 1, TIME_SCALE, LEASE_S)
    spec = manifest["spec"]
    adapters = [f"{name}=/of-no-account" for name in ADAPTERS]
    spec["engine"]["args"] += ["--fault-injection", "--enable-lora", "--lora-modules", *adapters]
    pools = [{"role": role, "replicas": number} for role, number in shape.roles.items()]
    spec["placement"]["manual"] = pools
    return manifest


@contextmanager
def raised(manifest: dict[str, Any], shape: Shape, folder: Path, timeout_s: int) -> Iterator[Fleet]:
    """A fleet with two gateways; nothing of it is left afterwards.

    One has several processes, the other asks for keys.
    """
    name = manifest["metadata"]["name"]
    with deployed(manifest, folder, timeout_s) as deployment:
        first = Gateway("first", deployment, folder, processes=2)
        second = Gateway("second", deployment, folder, keys=KEYS)
        roles = {
            f"{name}-{role}-{number}": role
            for role, count in shape.roles.items()
            for number in range(count)
        }
        fleet = Fleet(deployment, [first, second], roles)
        try:
            for gateway in fleet.gateways:
                gateway.start()
            until(lambda: sees_all(fleet), READY_S, "both gateways see every instance")
            yield fleet
        finally:
            for gateway in fleet.gateways:
                with suppress(AssertionError, OSError):
                    gateway.kill()


def sees_all(fleet: Fleet) -> bool:
    return all(
        {i.name for i in gateway.fleet().instances if i.selectable} == fleet.roles.keys()
        for gateway in fleet.gateways
    )
