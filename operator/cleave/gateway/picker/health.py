"""How an endpoint picker is, in gRPC's health protocol, as gateways of InferencePools ask for it.

Alive whenever it answers; ready as long as a request could be placed, for what a proxy does without
a picker is stated in its InferencePool.
"""

import asyncio
from collections.abc import AsyncIterator

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cleave.gateway.context import Context

LOOK_S = 1.0
_ALIVE = frozenset(("", "liveness"))
_READY = frozenset(("readiness", "envoy.service.ext_proc.v3.ExternalProcessor"))
_Context = grpc.aio.ServicerContext[object, object]


class PickerHealth(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """Answers from what the router knows at the moment."""

    def __init__(self, context: Context) -> None:
        self._context = context

    async def Check(  # noqa: N802
        self, request: health_pb2.HealthCheckRequest, context: _Context
    ) -> health_pb2.HealthCheckResponse:
        """How one service is."""
        status = self._find_status(request.service)
        if status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no service {request.service!r}")
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(  # noqa: N802
        self, request: health_pb2.HealthCheckRequest, context: _Context
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        """How one service is, and again whenever that changes.

        It ends when the gateway drains, which would wait for it else.
        """
        del context
        told = None
        while True:
            # Before the status, which is then that of a gateway that drains.
            ends = self._context.draining
            status = self._find_status(request.service)
            if status != told:
                told = status
                yield health_pb2.HealthCheckResponse(status=status)
            if ends:
                return
            await asyncio.sleep(LOOK_S)

    def _find_status(self, service: str) -> int:
        answer = health_pb2.HealthCheckResponse
        if service in _ALIVE:
            return int(answer.SERVING)
        if service not in _READY:
            return int(answer.SERVICE_UNKNOWN)
        router = self._context.router
        served = any(not router.find_obstacle(name) for name in router.directory.models)
        ready = served and not self._context.draining
        return int(answer.SERVING if ready else answer.NOT_SERVING)
