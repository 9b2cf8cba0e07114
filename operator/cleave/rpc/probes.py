"""The standard health protocol for probes: `Check`, which signs nothing.

Used by the servers of agents and of the launcher. What is hard: anyone may call it, so a call may
never send its message. `grpc_health` would wait for it as long as the call lasts.
So `Check` reads its message itself, for a bounded time. `Watch` is not served: no probe uses it.
"""

import asyncio

import grpc
from grpc_health.v1 import health_pb2

_SERVICE = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
_MESSAGE_S = 5.0
"""From the begin of a call to its message, which probes send with it."""
_MAX_CALLS = 16
"""At once, of a connection: held calls take about as much memory as the connection itself."""

OPTIONS = (("grpc.max_concurrent_streams", _MAX_CALLS),)
"""Of servers with this service. A limit of all calls at once would let callers without a credential
take the places of those with one."""

_Context = grpc.aio.ServicerContext[health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse]


class Probes:
    """Whether the services of one server serve."""

    def __init__(self) -> None:
        self._serving: dict[str, bool] = {}

    def set(self, service: str, *, is_serving: bool) -> None:
        """Report this from now on."""
        self._serving[service] = is_serving

    def add_to(self, server: grpc.aio.Server) -> None:
        """Serve the protocol; call it before the server starts."""
        check = grpc.stream_stream_rpc_method_handler(
            self._check,
            health_pb2.HealthCheckRequest.FromString,
            health_pb2.HealthCheckResponse.SerializeToString,
        )
        handler = grpc.method_handlers_generic_handler(_SERVICE, {"Check": check})
        server.add_generic_rpc_handlers((handler,))

    async def _check(self, _requests: object, context: _Context) -> None:
        try:
            async with asyncio.timeout(_MESSAGE_S):
                request = await context.read()
        except TimeoutError:
            fault = f"no message came within {_MESSAGE_S:.0f} s"
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, fault)
        if request is grpc.aio.EOF:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the call has no message")
        serving = self._serving.get(request.service)
        if serving is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "there is no such service")
        response = health_pb2.HealthCheckResponse
        status = response.SERVING if serving else response.NOT_SERVING
        await context.write(response(status=status))
