"""Gateways without a process: what the operator reads from gateways, for all pods of gateways.

Run as a process of its own (`python fake_gateways.py KUBECONFIG`) beside nodes that run nothing;
ends with its standard input. One listener serves the internal port of every address of
`scripts/isolated`; the address that a client has called says which deployment's gateway it means.
Each gateway sends requests to all workers of its deployment that are ready.
"""

import asyncio
import json
import sys
import time
from collections import defaultdict
from pathlib import Path

import msgspec
from sightings import is_ready

from cleave.gateway.metrics.gateway_metrics import (
    GatewayMetrics,
    SloTargets,
    record_completed,
)
from cleave.manifests.labels import COMPONENT, DEPLOYMENT, GATEWAY, INTERNAL_PORT, REVISION, ROLE
from cleave.rpc.fleet_status import FleetInstance, FleetStatus, KvPath

from e2e.cluster.client import Client, Manifest
from tests.support.metrics_page import write_gateway_page

PODS = f"/api/v1/pods?labelSelector={COMPONENT}"
BACKLOG = 4_096
TIMEOUT_S = 10


class FakeGateways:
    """The state of all deployments, from a watch of their pods."""

    def __init__(self) -> None:
        self._deployments: dict[str, str] = {}
        """By address of a gateway."""
        self._workers: dict[str, dict[str, FleetInstance]] = defaultdict(dict)
        """By deployment and name."""
        self._metrics = build_metrics_page()
        self.num_requests = 0

    def listed(self, pods: list[Manifest]) -> None:
        self._deployments.clear()
        self._workers.clear()
        for pod in pods:
            self.saw({"type": "ADDED", "object": pod})

    def saw(self, event: Manifest) -> None:
        pod, is_gone = event["object"], event["type"] == "DELETED"
        name, labels = pod["metadata"]["name"], pod["metadata"]["labels"]
        deployment, address = labels.get(DEPLOYMENT, ""), pod.get("status", {}).get("podIP", "")
        if labels[COMPONENT] == GATEWAY:
            if is_gone:
                self._deployments.pop(address, None)
            elif address:
                self._deployments[address] = deployment
        elif is_gone or not is_ready(pod):
            self._workers[deployment].pop(name, None)
        elif ROLE in labels:
            self._workers[deployment][name] = describe(name, labels)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one request of one connection."""
        try:
            async with asyncio.timeout(TIMEOUT_S):
                head = await reader.readuntil(b"\r\n\r\n")
                address = writer.get_extra_info("sockname")[0]
                body = self.answer(head.split(b" ", 2)[1], address)
                status = b"200 OK" if body else b"404 Not Found"
                writer.write(
                    b"HTTP/1.1 %s\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s"
                    % (status, len(body), body)
                )
                await writer.drain()
        except (OSError, EOFError, TimeoutError):
            pass
        finally:
            writer.close()

    def answer(self, path: bytes, address: str) -> bytes:
        """The body of a response; empty: 404."""
        self.num_requests += 1
        deployment = self._deployments.get(address)
        if deployment is None:
            return b""
        match path:
            case b"/fleet":
                workers = tuple(self._workers[deployment].values())
                return msgspec.json.encode(FleetStatus(workers))
            case b"/health":
                return b'{"requests_in_flight":0}'
            case b"/metrics":
                return self._metrics
        return b""


def describe(name: str, labels: Manifest) -> FleetInstance:
    """A worker that is ready and whose KV path works."""
    role = labels[ROLE]
    path = KvPath(verified=True, transport="emulated", transfer_ms=5.0, bytes_per_s=1e9)
    return FleetInstance(
        name=name,
        deployment=labels[DEPLOYMENT],
        revision=labels[REVISION],
        role=role,
        home=role,
        state="ready",
        contact="fresh",
        selectable=True,
        kv_path=path,
    )


def build_metrics_page() -> bytes:
    """The page of a gateway that has served requests."""
    metrics = GatewayMetrics(SloTargets(0.4, 0.04))
    for _ in range(100):
        record_completed(metrics, "chat", "", "ok", 1_000, 200, (0.2, 4.0))
    return write_gateway_page(metrics)


async def main(kubeconfig: Path) -> None:
    gateways = FakeGateways()
    server = await asyncio.start_server(gateways.serve, "0.0.0.0", INTERNAL_PORT, backlog=BACKLOG)
    async with Client(kubeconfig) as api, server:
        print(json.dumps("ready"), flush=True)
        living = asyncio.create_task(api.follow(PODS, gateways.listed, gateways.saw))
        ended = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
        began = time.monotonic()
        await asyncio.wait({living, ended}, return_when=asyncio.FIRST_COMPLETED)
        if living.done():
            living.result()
        living.cancel()
        elapsed_s = time.monotonic() - began
        print(f"{gateways.num_requests} requests in {elapsed_s:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
