"""The endpoint picker: Envoy's external processing service on the gateway's router.

Started by the gateway if it has a port; called by proxies of an InferencePool (Gateway API
Inference Extension). Requests that can be split, that no instance can take yet, or that are no
completions are sent to this gateway, which handles them; if so configured, the others go directly
to an instance. What is hard: the protocol has two modes. In full duplex the proxy forwards only the
body that is sent back to it; otherwise it buffers the body itself, and the stream may be closed
early.
"""

import asyncio
import dataclasses
import ipaddress
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cleave.gateway.admission.tenants import DEFAULT_TENANT
from cleave.gateway.context import GatewayContext
from cleave.gateway.endpoint_picker import ext_proc
from cleave.gateway.endpoint_picker.credentials import EndpointPickerError, make_credentials
from cleave.gateway.endpoint_picker.direct_request import DirectRequest, has_prefill_instance
from cleave.gateway.endpoint_picker.ext_proc import ExtProcRequest
from cleave.gateway.failover.resumption import RESUMABLE_PATHS
from cleave.gateway.http.completion_request import (
    CompletionRequest,
    encode_fields,
    parse_completion,
    raise_priority,
    set_cache_salt,
)
from cleave.gateway.http.engine_fields import CLIENT_HEADERS
from cleave.gateway.http.errors import (
    RECEIVE_LIMIT_REACHED,
    SUSPECT_REQUEST,
    GatewayError,
    build_payload_too_large,
    convert_router_error,
)
from cleave.gateway.http.headers import FORWARDED_FOR
from cleave.gateway.http.request_parser import MIN_BODY_RATE
from cleave.gateway.upstream.suspect_senders import get_sender
from cleave.router.errors import NoInstance, RouterError
from cleave.rpc.channel import SERVER_OPTIONS
from cleave.rpc.engine_key import build_headers
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
    """Picks an endpoint for each request."""

    def __init__(self, context: GatewayContext, address: str, direct: bool) -> None:
        """`address`: ip:port of this gateway. `direct`: unsplit requests go to instances."""
        self._context = context
        self._address = address
        self._routes_directly = direct
        timeouts = context.config.timeouts
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
        try:
            if self._routes_directly and self._may_go_direct(head):
                await self._route_completion(stream, head)
            else:
                await self._send_to_gateway(stream, head, None)
        except GatewayError as error:
            await self._write(stream, ext_proc.build_immediate_response(error))

    # --- to this gateway ---

    async def _send_to_gateway(
        self, stream: _Stream, head: ExtProcRequest, read: "_ReadBody | None"
    ) -> None:
        """Name this gateway as the endpoint; `read`: the body, None: it is to come. Raises
        GatewayError (503) when the proxy does not allow this endpoint."""
        if not self._may_name_itself(head):
            reason = f"{self._address} is not among the endpoints allowed"
            raise convert_router_error(NoInstance(reason))
        await self._write(stream, ext_proc.build_endpoint_response(self._address, {}))
        if head.request_mode == _DUPLEX and not head.has_no_body:
            if read is None:
                await self._echo_request(stream)
            else:
                for response in read.stream():
                    await self._write(stream, response)
        if head.response_mode == _DUPLEX:
            # Closing the stream now would lose body bytes of which the proxy keeps no copy.
            await self._process_response(stream, head, None)

    async def _echo_request(self, stream: _Stream) -> None:
        """Send the request's body back as it comes."""
        while (message := await self._read_message(stream, self._idle_s)) is not None:
            if message.HasField("request_trailers"):
                await self._write(stream, ext_proc.CONTINUE_REQUEST_TRAILERS)
                return
            piece = message.request_body
            for response in ext_proc.stream_request_body(piece.body, piece.end_of_stream):
                await self._write(stream, response)
            if piece.end_of_stream:
                return

    def _may_name_itself(self, head: ExtProcRequest) -> bool:
        return head.subset is None or self._address in head.subset

    # --- to an instance ---

    def _may_go_direct(self, head: ExtProcRequest) -> bool:
        """Whether it may be a completion whose body comes before the endpoint must be named."""
        return (
            not head.has_no_body
            and head.request_mode in (_DUPLEX, pb.BUFFERED)
            and head.headers.get(":method") == b"POST"
            and head.path in RESUMABLE_PATHS
            and self._context.api_keys.accepts(head.headers.get("authorization"))
        )

    async def _route_completion(self, stream: _Stream, head: ExtProcRequest) -> None:
        """Read a completion, name its endpoint and process its response. Raises GatewayError."""
        if head.request_mode != _DUPLEX:
            await self._write(stream, ext_proc.CONTINUE_REQUEST_HEADERS)
        read = await self._read_body(stream)
        if read is None:
            return
        try:
            await self._route_body(stream, head, read)
        finally:
            self._context.buffer_budget.release(len(read.content))

    async def _route_body(self, stream: _Stream, head: ExtProcRequest, read: "_ReadBody") -> None:
        """Name the endpoint of a completion and process its response. Raises GatewayError."""
        try:
            steps = parse_completion(head.path, read.content, is_relayed=False)
            completion = await run_in_slices(steps)
        except GatewayError:
            self._context.metrics.requests["", "refused"] += 1
            raise
        if self._needs_gateway(head, completion):
            if head.request_mode == _DUPLEX:
                await self._send_to_gateway(stream, head, read)
            else:
                await self._write(stream, ext_proc.build_endpoint_response_to_body(self._address))
            return
        await self._send_direct(stream, head, completion, read.has_trailers)

    def _needs_gateway(self, head: ExtProcRequest, completion: CompletionRequest) -> bool:
        """Whether the request can be split, has to wait for an instance, or must be counted."""
        tenant = self._context.api_keys.find_tenant(head.headers.get("authorization"))
        if tenant is not None and tenant.limits.tokens_per_minute:
            # Nothing else counts the tokens of a stream exactly.
            return True
        if not self._may_name_itself(head):
            return False
        router, model = self._context.router, completion.model
        if completion.can_disaggregate and has_prefill_instance(router, model):
            return True
        models = router.registry.models
        if model in models and models[model].engine_name:
            # The engine's name of the adapter or model would stand in its response.
            return True
        if self._context.config.timeouts.wake_s <= 0:
            return False
        return not models or (model in models and bool(router.explain_unavailable(model)))

    async def _send_direct(
        self, stream: _Stream, head: ExtProcRequest, completion: CompletionRequest, trailers: bool
    ) -> None:
        """Pick an instance, name it, and process the response. Raises GatewayError."""
        context = self._context
        tenant = context.api_keys.find_tenant(head.headers.get("authorization")) or DEFAULT_TENANT
        if tenant.min_request_priority is not None:
            raise_priority(completion, tenant.min_request_priority)
        if tenant.cache_salt:
            set_cache_salt(completion, tenant.cache_salt)
        if context.suspect_requests.contains(head.path, completion):
            context.metrics.requests[completion.model, "refused"] += 1
            raise SUSPECT_REQUEST
        direct = DirectRequest(context, completion, tenant)
        outcome = "cancelled"
        try:
            await direct.wait_for_admission()
            session = head.headers.get(context.session_header.decode())
            forwarded_for = head.headers.get(FORWARDED_FOR.decode())
            sender = get_sender(tenant.name, "", forwarded_for)
            target = direct.pick_instance(self._list_disallowed(head), session, sender)
            endpoint = target.endpoint
            if self._may_name_itself(head):
                endpoint = f"{endpoint},{self._address}"
            key = build_headers(target.engine_key)
            for response in self._build_responses(head, endpoint, key, completion, trailers):
                await self._write(stream, response)
            await self._process_response(stream, head, direct)
        except RouterError as error:
            outcome = "unavailable" if isinstance(error, NoInstance) else "refused"
            raise convert_router_error(error) from None
        except GatewayError:
            outcome = "shed"
            raise
        finally:
            direct.end(outcome)

    def _build_responses(
        self,
        head: ExtProcRequest,
        endpoint: str,
        key: dict[str, str],
        completion: CompletionRequest,
        trailers: bool,
    ) -> Iterator[pb.ProcessingResponse]:
        """The messages that make the proxy send the request."""
        # A new id for each attempt, because engines mix up requests with equal ids.
        request_id = self._context.make_request_id().decode()
        headers = {"content-type": "application/json", "x-request-id": request_id, **key}
        removed = [name for name in CLIENT_HEADERS if name in head.headers]
        body = b"".join(encode_fields(completion.fields))
        if head.request_mode != _DUPLEX:
            yield ext_proc.build_endpoint_response_with_body(endpoint, headers, body, removed)
            return
        yield ext_proc.build_endpoint_response(endpoint, headers, removed)
        yield from ext_proc.stream_whole_request(body, has_trailers=trailers)

    def _list_disallowed(self, head: ExtProcRequest) -> list[str]:
        """Instances that the proxy does not allow."""
        allowed, instances = head.subset, self._context.router.registry.instances.values()
        if allowed is None:
            return []
        return [each.name for each in instances if each.target.endpoint not in allowed]

    async def _process_response(
        self, stream: _Stream, head: ExtProcRequest, direct: DirectRequest | None
    ) -> None:
        """Process the response's messages to their end, or until none comes for too long;
        `direct` None: it is the gateway's."""
        while (message := await self._read_response(stream)) is not None:
            responses = [ext_proc.CONTINUE_REQUEST_TRAILERS]
            ends = False
            match message.WhichOneof("request"):
                case "response_headers":
                    if direct is not None:
                        status = ext_proc.read_status(message)
                        direct.on_response_head(status, ext_proc.read_served(message))
                    responses = [ext_proc.CONTINUE_RESPONSE_HEADERS]
                    ends = message.response_headers.end_of_stream
                case "response_body":
                    piece = message.response_body
                    if direct is not None:
                        direct.on_response_body(piece.body)
                    responses = [ext_proc.CONTINUE_RESPONSE_BODY]
                    if head.response_mode == _DUPLEX:
                        responses = ext_proc.stream_response_body(piece)
                    ends = piece.end_of_stream
                case "response_trailers":
                    responses = [ext_proc.CONTINUE_RESPONSE_TRAILERS]
                    ends = True
            if ends and direct is not None:
                # Before the proxy gets the response, after which it resets the stream at once.
                direct.on_response_complete()
            for response in responses:
                await self._write(stream, response)
            if ends:
                return
        if head.response_mode == pb.NONE and direct is not None:
            direct.on_response_complete()

    # --- reading ---

    async def _read_body(self, stream: _Stream) -> "_ReadBody | None":
        """A request's body; None: the proxy cancelled it. Its bytes are reserved in the buffer
        budget; messages are not kept, as many may be small or empty. Raises
        GatewayError (413, 503) and TimeoutError."""
        context, limit = self._context, self._context.config.max_body_bytes
        began_at, content, is_complete = context.clock(), bytearray(), False
        try:
            while True:
                slowest_s = self._idle_s + len(content) / MIN_BODY_RATE
                left_s = min(self._idle_s, began_at + slowest_s - context.clock())
                message = await self._read_message(stream, left_s)
                if message is None:
                    return None
                piece, has_trailers = message.request_body, message.HasField("request_trailers")
                if len(content) + len(piece.body) > limit:
                    raise build_payload_too_large(limit)
                is_last = piece.end_of_stream or has_trailers
                if not context.buffer_budget.reserve(len(piece.body)):
                    # A copy: its traceback refers to the body.
                    raise dataclasses.replace(RECEIVE_LIMIT_REACHED)
                content += piece.body
                if is_last:
                    is_complete = True
                    return _ReadBody(content, has_trailers)
        finally:
            if not is_complete:
                context.buffer_budget.release(len(content))

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


@dataclass(frozen=True, slots=True)
class _ReadBody:
    """A whole body of a request, without the messages in which it came."""

    content: bytearray
    has_trailers: bool

    def stream(self) -> Iterator[pb.ProcessingResponse]:
        """The messages that send it back."""
        return ext_proc.stream_whole_request(
            memoryview(self.content), has_trailers=self.has_trailers
        )


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
        limit = "grpc.max_receive_message_length", config.max_body_bytes + (1 << 20)
        options = (*SERVER_OPTIONS, limit)
        self._server = grpc.aio.server(options=options, maximum_concurrent_rpcs=config.max_clients)
        picker = EndpointPicker(self._context, address, config.endpoint_picker_direct)
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
