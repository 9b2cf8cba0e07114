"""gRPC health service of the endpoint picker, which gateways of an InferencePool query.

Live whenever it responds; ready while any model can be served. What a proxy does without a ready
picker is set in its InferencePool.
"""

import asyncio
from collections.abc import AsyncIterator

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cleave.gateway.context import GatewayContext

POLL_INTERVAL_S = 1.0
_ALIVE = frozenset(("", "liveness"))
_READY = frozenset(("readiness", "envoy.service.ext_proc.v3.ExternalProcessor"))
_GrpcContext = grpc.aio.ServicerContext[object, object]


class EndpointPickerHealth(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """Reports the router's current state."""

    def __init__(self, context: GatewayContext) -> None:
        self._context = context

    async def Check(  # noqa: N802
        self, request: health_pb2.HealthCheckRequest, context: _GrpcContext
    ) -> health_pb2.HealthCheckResponse:
        """The status of one service."""
        status = self._get_status(request.service)
        if status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no service {request.service!r}")
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(  # noqa: N802
        self, request: health_pb2.HealthCheckRequest, context: _GrpcContext
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        """The status of one service, and again whenever it changes.

        It ends when the gateway drains, which would otherwise wait for this call.
        """
        del context
        last_status = None
        while True:
            # Read before the status, so that the last status sent is that of draining.
            ends = self._context.draining
            status = self._get_status(request.service)
            if status != last_status:
                last_status = status
                yield health_pb2.HealthCheckResponse(status=status)
            if ends:
                return
            await asyncio.sleep(POLL_INTERVAL_S)

    def _get_status(self, service: str) -> int:
        response = health_pb2.HealthCheckResponse
        if service in _ALIVE:
            return int(response.SERVING)
        if service not in _READY:
            return int(response.SERVICE_UNKNOWN)
        router = self._context.router
        can_serve = any(not router.explain_unavailable(name) for name in router.registry.models)
        ready = can_serve and not self._context.draining
        return int(response.SERVING if ready else response.NOT_SERVING)
