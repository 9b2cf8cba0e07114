"""Probes of pods over gRPC or HTTP, and the thresholds that turn results into a state.

Called by `PodWorker`. Counting is pure. A probe is bounded by its timeout, and any error counts as
a failure.
"""

import asyncio
import ssl
from dataclasses import dataclass, replace

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cleave.local.kubelet.pod_spec import Probe, ProbeKind
from cleave.rpc.channel import dial


@dataclass(frozen=True, slots=True)
class ProbeState:
    """Consecutive results of one probe; `passed` changes only at the probe's thresholds."""

    passed: bool
    successes: int = 0
    failures: int = 0

    def record(self, probe: Probe, success: bool) -> "ProbeState":
        """The state after one more result."""
        if success:
            successes = self.successes + 1
            passed = self.passed or successes >= probe.success_threshold
            return replace(self, passed=passed, successes=successes, failures=0)
        failures = self.failures + 1
        passed = self.passed and failures < probe.failure_threshold
        return replace(self, passed=passed, successes=0, failures=failures)


def build_prober(probe: Probe, address: str) -> "GrpcProber | HttpProber":
    """The prober for `probe` of the pod at `address`."""
    return (GrpcProber if probe.kind is ProbeKind.GRPC else HttpProber)(probe, address)


class GrpcProber:
    """Calls grpc.health.v1 on one channel for the life of the container."""

    def __init__(self, probe: Probe, address: str) -> None:
        self._probe = probe
        self._channel = dial(f"{address}:{probe.port}", (("grpc.max_reconnect_backoff_ms", 1000),))
        self._health = health_pb2_grpc.HealthStub(self._channel)

    async def check(self) -> bool:
        """True when the service is SERVING."""
        request = health_pb2.HealthCheckRequest(service=self._probe.target)
        try:
            response = await self._health.Check(request, timeout=self._probe.timeout_s)
        except grpc.aio.AioRpcError:
            return False
        return bool(response.status == health_pb2.HealthCheckResponse.SERVING)

    async def close(self) -> None:
        """Close the channel."""
        await self._channel.close()


class HttpProber:
    """Sends one GET on a new connection, over TLS where the probe's scheme is HTTPS."""

    def __init__(self, probe: Probe, address: str) -> None:
        self._probe = probe
        self._address = address
        self._tls = _build_tls() if probe.kind is ProbeKind.HTTPS else None

    async def check(self) -> bool:
        """True on a status of 200 to 399."""
        try:
            async with asyncio.timeout(self._probe.timeout_s):
                status = await self._get_status()
        except (OSError, TimeoutError, ValueError, IndexError):
            return False
        return 200 <= status < 400

    async def close(self) -> None:
        """Do nothing: no connection is kept."""

    async def _get_status(self) -> int:
        reader, writer = await asyncio.open_connection(
            self._address, self._probe.port, ssl=self._tls
        )
        try:
            host = f"{self._address}:{self._probe.port}"
            request = f"GET {self._probe.target} HTTP/1.1\r\nHost: {host}\r\nConnection: close"
            writer.write(f"{request}\r\n\r\n".encode())
            return int((await reader.readline()).split()[1])
        finally:
            writer.close()


def _build_tls() -> ssl.SSLContext:
    """As Kubernetes' kubelet, which verifies no certificate of a probe."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context
