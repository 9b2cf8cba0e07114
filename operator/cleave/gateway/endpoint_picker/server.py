"""The endpoint picker: Envoy's external processing service, which names this gateway.

Started by the gateway if it has a port; called by proxies of an InferencePool (Gateway API
Inference Extension). The gateway that is named splits, retries and counts the request. What is
hard: the protocol has two modes. In full duplex the proxy forwards only the body that is sent back
to it; otherwise it keeps the body itself, and the stream may be closed early.
"""

import asyncio
import ipaddress
from collections.abc import AsyncIterator

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cleave.gateway.config import GatewayConfig
from cleave.gateway.context import GatewayContext
from cleave.gateway.endpoint_picker import ext_proc
from cleave.gateway.endpoint_picker.credentials import EndpointPickerError, make_credentials
from cleave.gateway.endpoint_picker.ext_proc import ExtProcRequest
from cleave.gateway.http.errors import convert_router_error
from cleave.router.errors import NoInstance
from cleave.rpc.channel import SERVER_OPTIONS
from cleave.rpc.v1 import external_processor_pb2 as pb
from cleave.rpc.v1 import external_processor_pb2_grpc
from cleave.time_slices import run_in_slices

_DUPLEX = pb.FULL_DUPLEX_STREAMED
_Stream = grpc.aio.ServicerContext[pb.ProcessingRequest, pb.ProcessingResponse]
_HealthStream = grpc.aio.ServicerContext[object, object]

POLL_INTERVAL_S = 1.0
"""Between two checks for a change of health."""
_ALIVE = frozenset(("", "liveness"))
_READY = frozenset(("readiness", "envoy.service.ext_proc.v3.ExternalProcessor"))


class EndpointPicker(external_processor_pb2_grpc.ExternalProcessorServicer):
    """Names this gateway as the endpoint of each request."""

    def __init__(self, config: GatewayConfig, address: str) -> None:
        """`address`: ip:port of this gateway."""
        self._address = address
        timeouts = config.timeouts
        self._idle_s = timeouts.idle_s
        self._response_s = timeouts.wake_s + timeouts.first_byte_s + timeouts.response_s
        """Between two messages of a response: as long as the gateway may be silent."""

    async def Process(  # type: ignore[override]  # noqa: N802 - reads and writes, and yields nothing
        self, request_iterator: object, context: _Stream
    ) -> None:
        """Process one HTTP request."""
        del request_iterator
        try:
            first = await self._read_message(context, self._idle_s)
            if first is None or first.observability_mode:
                return
            if not first.HasField("request_headers"):
                # Without them there is no message to which the endpoint could be the response.
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "send the request's headers")
            await self._process_request(context, ext_proc.read_request(first))
        except TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "the request stalled")
        except _UnreadError:
            # A status would have to wait, too. The call ends with the proxy's connection.
            return

    async def _process_request(self, stream: _Stream, head: ExtProcRequest) -> None:
        """Raises TimeoutError and _UnreadError."""
        if head.subset is not None and self._address not in head.subset:
            reason = f"{self._address} is not among the endpoints allowed"
            error = convert_router_error(NoInstance(reason))
            await self._write(stream, ext_proc.build_immediate_response(error))
            return
        await self._write(stream, ext_proc.build_endpoint_response(self._address))
        if head.request_mode == _DUPLEX and not head.has_no_body:
            await self._echo_request(stream)
        if head.response_mode == _DUPLEX:
            # Closing the stream now would lose body bytes of which the proxy keeps no copy.
            await self._echo_response(stream)

    async def _echo_request(self, stream: _Stream) -> None:
        """Send the request's body back as it comes."""
        while (message := await self._read_message(stream, self._idle_s)) is not None:
            if message.HasField("request_trailers"):
                await self._write(stream, ext_proc.CONTINUE_REQUEST_TRAILERS)
                return
            piece = message.request_body
            for response in ext_proc.stream_request_body(piece):
                await self._write(stream, response)
            if piece.end_of_stream:
                return

    async def _echo_response(self, stream: _Stream) -> None:
        """Send the response's messages back to their end, or until none comes for too long."""
        while (message := await self._read_response(stream)) is not None:
            responses = [ext_proc.CONTINUE_REQUEST_TRAILERS]
            ends = False
            match message.WhichOneof("request"):
                case "response_headers":
                    responses = [ext_proc.CONTINUE_RESPONSE_HEADERS]
                    ends = message.response_headers.end_of_stream
                case "response_body":
                    responses = ext_proc.stream_response_body(message.response_body)
                    ends = message.response_body.end_of_stream
                case "response_trailers":
                    responses = [ext_proc.CONTINUE_RESPONSE_TRAILERS]
                    ends = True
            for response in responses:
                await self._write(stream, response)
            if ends:
                return

    async def _read_response(self, stream: _Stream) -> pb.ProcessingRequest | None:
        """The next message of a response; None: the stream has ended, or is silent."""
        try:
            return await self._read_message(stream, self._response_s)
        except TimeoutError:
            # Where proxies need no more messages they go on.
            return None

    async def _read_message(self, stream: _Stream, timeout_s: float) -> pb.ProcessingRequest | None:
        """The next message; None at the end of the stream. Raises TimeoutError."""
        async with asyncio.timeout(timeout_s):
            message: object = await stream.read()
        # The type stubs lack grpc.aio.EOF.
        return message if isinstance(message, pb.ProcessingRequest) else None

    async def _write(self, stream: _Stream, response: pb.ProcessingResponse) -> None:
        """Raises _UnreadError."""
        try:
            async with asyncio.timeout(self._idle_s):
                await stream.write(response)
        except TimeoutError:
            raise _UnreadError from None


class _UnreadError(Exception):
    """The proxy does not read what is sent to it."""


class EndpointPickerHealth(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """gRPC health of the endpoint picker, which gateways of an InferencePool query.
    Live whenever it responds; ready while any model can be served. What a proxy does without a
    ready picker is set in its InferencePool."""

    def __init__(self, context: GatewayContext) -> None:
        self._context = context

    async def Check(  # noqa: N802
        self, request: health_pb2.HealthCheckRequest, context: _HealthStream
    ) -> health_pb2.HealthCheckResponse:
        """The status of one service."""
        status = await self._get_status(request.service)
        if status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no service {request.service!r}")
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(  # noqa: N802
        self, request: health_pb2.HealthCheckRequest, context: _HealthStream
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        """The status of one service, and again whenever it changes.
        It ends when the gateway drains, which would otherwise wait for this call."""
        del context
        last_status = None
        while True:
            # Read before the status, so that the last status sent is that of draining.
            ends = self._context.draining
            status = await self._get_status(request.service)
            if status != last_status:
                last_status = status
                yield health_pb2.HealthCheckResponse(status=status)
            if ends:
                return
            await asyncio.sleep(POLL_INTERVAL_S)

    async def _get_status(self, service: str) -> int:
        response = health_pb2.HealthCheckResponse
        if service in _ALIVE:
            return int(response.SERVING)
        if service not in _READY:
            return int(response.SERVICE_UNKNOWN)
        can_serve = await run_in_slices(self._context.can_serve())
        ready = can_serve and not self._context.draining
        return int(response.SERVING if ready else response.NOT_SERVING)


class EndpointPickerServer:
    """The gRPC server of the endpoint picker, with the health service."""

    def __init__(self, context: GatewayContext) -> None:
        self._context = context
        self._server: grpc.aio.Server | None = None

    async def start(self, port: int, gateway_port: int) -> int:
        """Listen; returns the port. Raises OSError and EndpointPickerError."""
        config = self._context.config
        if config.tls_certificate is not None:
            raise EndpointPickerError(
                "--endpoint-picker-port: proxies speak plain HTTP to it: leave out --tls-cert"
            )
        address = format_gateway_address(config.host, gateway_port)
        credentials = make_credentials(config, self._context.certificates.get("endpoint_picker"))
        self._server = grpc.aio.server(
            options=SERVER_OPTIONS, maximum_concurrent_rpcs=config.max_clients
        )
        picker = EndpointPicker(config, address)
        external_processor_pb2_grpc.add_ExternalProcessorServicer_to_server(picker, self._server)
        health = EndpointPickerHealth(self._context)
        health_pb2_grpc.add_HealthServicer_to_server(health, self._server)
        address_and_port = format_gateway_address(config.host, port)
        try:
            if credentials is None:
                port = self._server.add_insecure_port(address_and_port)
            else:
                port = self._server.add_secure_port(address_and_port, credentials)
        except RuntimeError as error:
            raise OSError(str(error)) from None
        await self._server.start()
        return port

    async def stop(self, drain_s: float) -> None:
        """Accept no more requests, and let running ones finish within so many seconds."""
        if self._server is not None:
            await self._server.stop(drain_s)


def format_gateway_address(host: str, port: int) -> str:
    """This gateway's address as proxies name it. Raises EndpointPickerError."""
    problem = f"--host {host}: an endpoint picker names"
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        raise EndpointPickerError(f"{problem} IP addresses only") from None
    if address.is_unspecified:
        raise EndpointPickerError(f"{problem} its gateway: give the address of this one")
    return f"[{address}]:{port}" if address.version == 6 else f"{address}:{port}"
