"""What must be free, whole and closed again when no request runs any more."""

from collections.abc import Sequence
from dataclasses import dataclass

import httpx

from e2e.chaos.gateways import Gateway
from e2e.support.deployments import Deployment

FILES_MORE = 16
"""Open files above those of the beginning: idle connections come and go."""
RESIDENT_MORE_MB = 64


@dataclass
class Baseline:
    """Of gateways that have served nothing yet, or little."""

    files: int
    resident_mb: float


def measure_baseline(gateways: Sequence[Gateway]) -> Baseline:
    return Baseline(max(g.num_files() for g in gateways), max(g.resident_mb() for g in gateways))


def find_leftovers(
    deployment: Deployment, gateways: Sequence[Gateway], names: set[str], baseline: Baseline
) -> list[str]:
    """What is not yet as it must be, in words."""
    left = []
    for gateway in gateways:
        try:
            left += _look_at_gateway(gateway, names, baseline)
        except httpx.HTTPError as error:
            left.append(f"gateway {gateway.name} does not answer: {error}")
    healths = deployment.healths()
    missing = names - {health.registration.instance for health in healths}
    left += [f"the agent of {name} does not answer" for name in sorted(missing)]
    for health in healths:
        load, name = health.load, health.registration.instance
        if load.num_running or load.num_waiting or load.kv_cache_usage:
            left.append(
                f"{name} has {load.num_running} running, {load.num_waiting} waiting, "
                f"{load.kv_cache_usage:.2%} of its KV taken"
            )
    return left


def _look_at_gateway(gateway: Gateway, names: set[str], baseline: Baseline) -> list[str]:
    left, title = [], f"gateway {gateway.name}"
    gateway.count()
    if gateway.in_flight:
        left.append(f"{title} has {gateway.in_flight:.0f} requests in flight")
    fleet = gateway.fleet().instances
    usable = {one.name for one in fleet if one.selectable and one.kv_path.verified}
    left += [f"{title} cannot use {name}" for name in sorted(names - usable)]
    left += [
        f"{title} has {one.requests_in_flight} requests, {one.pending_tokens} tokens in the book "
        f"of {one.name}"
        for one in fleet
        if one.requests_in_flight or one.pending_tokens
    ]
    files, resident_mb = gateway.num_files(), gateway.resident_mb()
    if files > baseline.files + FILES_MORE:
        left.append(f"{title} has {files} files open, {baseline.files} at the beginning")
    if resident_mb > baseline.resident_mb + RESIDENT_MORE_MB:
        left.append(
            f"{title} takes {resident_mb:.0f} MB, {baseline.resident_mb:.0f} at the beginning"
        )
    return left
