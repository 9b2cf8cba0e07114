"""The endpoint picker: Envoy's external processing service on the gateway's router and load
accounting.

Started by the gateway if it has a port; called by proxies of an InferencePool (Gateway API
Inference Extension). Requests that can be split, that no instance can take yet, or that are no
completions are sent to this gateway, which handles them; if so configured, the others go directly
to an instance. What is hard: the protocol has two modes. In full duplex the proxy forwards only the
body that is sent back to it; otherwise it buffers the body itself, and the stream may be closed
early.
"""

import asyncio
import ipaddress
from collections.abc import Sequence

import grpc
from grpc_health.v1 import health_pb2_grpc

from cleave.gateway.admission.tenants import EVERYBODY
from cleave.gateway.context import Context
from cleave.gateway.endpoint_picker import ext_proc
from cleave.gateway.endpoint_picker.credentials import PickerError, make_credentials
from cleave.gateway.endpoint_picker.direct_request import Direct, has_prefill, name_endpoint
from cleave.gateway.endpoint_picker.ext_proc import Head
from cleave.gateway.endpoint_picker.health import PickerHealth
from cleave.gateway.failover.resumption import RESUMABLE
from cleave.gateway.http.completion_request import (
    TOKENS_KEY,
    Completion,
    build_whole,
    read_completion,
)
from cleave.gateway.http.errors import ApiError, from_router, refuse_size
from cleave.router.errors import NoInstance, RouterError
from cleave.rpc.v1 import external_processor_pb2 as pb
from cleave.rpc.v1 import external_processor_pb2_grpc

_DUPLEX = pb.FULL_DUPLEX_STREAMED
_Stream = grpc.aio.ServicerContext[pb.ProcessingRequest, pb.ProcessingResponse]


class EndpointPicker(external_processor_pb2_grpc.ExternalProcessorServicer):
    """Picks an endpoint for each request."""

    def __init__(self, context: Context, address: str, direct: bool) -> None:
        """`address`: ip:port of this gateway. `direct`: requests that are not split go to
        instances."""
        self._context = context
        self._address = address
        self._direct = direct
        self._wait_s = context.config.timeouts.idle_s

    async def Process(  # type: ignore[override]  # noqa: N802 - reads and writes, and yields nothing
        self, request_iterator: object, context: _Stream
    ) -> None:
        """Process one HTTP request."""
        del request_iterator
        first = await context.read()
        if _is_end(first) or first.observability_mode:
            return
        if not first.HasField("request_headers"):
            # Without them there is no message to which the endpoint could be the response.
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "send the request's headers")
        head = ext_proc.read_head(first)
        try:
            if self._direct and self._may_go_direct(head):
                await self._choose(context, head)
            else:
                await self._send_to_gateway(context, head, ())
        except ApiError as error:
            await context.write(ext_proc.refuse_with(error))
        except TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "the request body stalled")

    # --- to this gateway ---

    async def _send_to_gateway(
        self, stream: _Stream, head: Head, read: Sequence[pb.ProcessingRequest]
    ) -> None:
        """Name this gateway as the endpoint; `read`: messages of the body received so far.

        Raises ApiError (503) when the proxy does not allow this endpoint.
        """
        if not self._may_name_itself(head):
            raise from_router(NoInstance(f"{self._address} is not among the endpoints allowed"))
        await stream.write(ext_proc.name_endpoint(self._address, {}))
        if head.request_mode == _DUPLEX and not head.bodiless:
            await self._return_request(stream, read)
        if head.response_mode == _DUPLEX:
            # Closing the stream now would lose body bytes of which the proxy keeps no copy.
            await self._follow(stream, head, None)

    async def _return_request(self, stream: _Stream, read: Sequence[pb.ProcessingRequest]) -> None:
        """Send the request's body back as it comes."""
        pieces = iter(read)
        while (message := next(pieces, None) or await self._read(stream)) is not None:
            if message.HasField("request_trailers"):
                await stream.write(ext_proc.CONTINUE_REQUEST_TRAILERS)
                return
            piece = message.request_body
            for response in ext_proc.stream_request_body(piece.body, piece.end_of_stream):
                await stream.write(response)
            if piece.end_of_stream:
                return

    def _may_name_itself(self, head: Head) -> bool:
        return head.subset is None or self._address in head.subset

    # --- to an instance ---

    def _may_go_direct(self, head: Head) -> bool:
        """Whether it may be a completion whose body comes before the endpoint must be named."""
        return (
            not head.bodiless
            and head.request_mode in (_DUPLEX, pb.BUFFERED)
            and head.headers.get(":method") == b"POST"
            and head.headers.get(":path", b"").partition(b"?")[0] in RESUMABLE
            and self._context.keys.accept(head.headers.get("authorization"))
        )

    async def _choose(self, stream: _Stream, head: Head) -> None:
        """Read a completion, name its endpoint and process its response. Raises ApiError."""
        if head.request_mode != _DUPLEX:
            await stream.write(ext_proc.CONTINUE_REQUEST_HEADERS)
        read = await self._read_body(stream)
        if read is None:
            return
        try:
            completion = read_completion(b"".join([each.request_body.body for each in read]))
        except ApiError:
            self._context.metrics.requests["", "refused"] += 1
            raise
        if self._is_for_gateway(head, completion):
            if head.request_mode == _DUPLEX:
                await self._send_to_gateway(stream, head, read)
            else:
                await stream.write(ext_proc.name_endpoint_late(self._address))
            return
        if completion.numbered and not completion.asks_ids:
            # The ids could not be removed from a response that bypasses the gateway.
            del completion.fields[TOKENS_KEY]
        await self._send_direct(stream, head, completion, read[-1].HasField("request_trailers"))

    def _is_for_gateway(self, head: Head, completion: Completion) -> bool:
        """Whether the request can be split, or has to wait for an instance."""
        if not self._may_name_itself(head):
            return False
        router = self._context.router
        if completion.splittable and has_prefill(router, completion.model):
            return True
        if self._context.config.timeouts.wake_s <= 0:
            return False
        models = router.directory.models
        return not models or (
            completion.model in models and bool(router.find_obstacle(completion.model))
        )

    async def _send_direct(
        self, stream: _Stream, head: Head, completion: Completion, trailers: bool
    ) -> None:
        """Pick an instance, name it, and process the response. Raises ApiError."""
        context = self._context
        tenant = context.keys.find(head.headers.get("authorization")) or EVERYBODY
        direct = Direct(context, completion, tenant)
        outcome = "cancelled"
        try:
            await direct.enter()
            session = head.headers.get(context.session_header.decode())
            endpoint = name_endpoint(direct.pick(self._find_outside(head), session))
            if self._may_name_itself(head):
                endpoint = f"{endpoint},{self._address}"
            for response in self._name(head, endpoint, build_whole(completion), trailers):
                await stream.write(response)
            await self._follow(stream, head, direct)
        except RouterError as error:
            outcome = "unavailable" if isinstance(error, NoInstance) else "refused"
            raise from_router(error) from None
        except ApiError:
            outcome = "shed"
            raise
        finally:
            direct.end(outcome)

    def _name(
        self, head: Head, endpoint: str, body: bytes, trailers: bool
    ) -> list[pb.ProcessingResponse]:
        """The messages that make the proxy send the request."""
        # A new id for each attempt, because engines mix up requests with equal ids.
        headers = {"x-request-id": self._context.make_id().decode()}
        if head.request_mode != _DUPLEX:
            return [ext_proc.name_endpoint_with_body(endpoint, headers, body)]
        responses = [ext_proc.name_endpoint(endpoint, headers)]
        responses += ext_proc.stream_request_body(body, not trailers)
        if trailers:
            responses.append(ext_proc.CONTINUE_REQUEST_TRAILERS)
        return responses

    def _find_outside(self, head: Head) -> list[str]:
        """Instances that the proxy does not allow."""
        if head.subset is None:
            return []
        instances = self._context.router.directory.instances
        return [
            name
            for name, instance in instances.items()
            if name_endpoint(instance.target) not in head.subset
        ]

    async def _follow(self, stream: _Stream, head: Head, direct: Direct | None) -> None:
        """Process the response's messages to their end; `direct` None: the gateway handles the
        request."""
        while not _is_end(message := await stream.read()):
            responses = [ext_proc.CONTINUE_REQUEST_TRAILERS]
            ends = False
            match message.WhichOneof("request"):
                case "response_headers":
                    if direct is not None:
                        direct.answer(ext_proc.read_status(message), ext_proc.read_served(message))
                    responses = [ext_proc.CONTINUE_RESPONSE_HEADERS]
                    ends = message.response_headers.end_of_stream
                case "response_body":
                    piece = message.response_body
                    if direct is not None:
                        direct.receive(piece.body)
                    responses = [ext_proc.CONTINUE_RESPONSE_BODY]
                    if head.response_mode == _DUPLEX:
                        responses = ext_proc.stream_response_body(piece)
                    ends = piece.end_of_stream
                case "response_trailers":
                    responses = [ext_proc.CONTINUE_RESPONSE_TRAILERS]
                    ends = True
            if ends and direct is not None:
                # Before the proxy gets the response, after which it resets the stream at once.
                direct.complete()
            for response in responses:
                await stream.write(response)
            if ends:
                return
        if head.response_mode == pb.NONE and direct is not None:
            direct.complete()

    # --- reading ---

    async def _read_body(self, stream: _Stream) -> list[pb.ProcessingRequest] | None:
        """All messages of a request's body, perhaps with trailers; None when the proxy has
        cancelled it.

        Raises ApiError (413) and TimeoutError.
        """
        limit = self._context.config.max_body_bytes
        read: list[pb.ProcessingRequest] = []
        remaining = limit
        while (message := await self._read(stream)) is not None:
            read.append(message)
            remaining -= len(message.request_body.body)
            if remaining < 0:
                raise refuse_size(limit)
            if message.request_body.end_of_stream or message.HasField("request_trailers"):
                return read
        return None

    async def _read(self, stream: _Stream) -> pb.ProcessingRequest | None:
        """The next message; None at the end of the stream. Raises TimeoutError."""
        async with asyncio.timeout(self._wait_s):
            message = await stream.read()
        return None if _is_end(message) else message


class PickerServer:
    """The gRPC server of the endpoint picker, with the health service."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._server: grpc.aio.Server | None = None

    async def start(self, port: int, gateway_port: int) -> int:
        """Listen on the gateway's host; returns the port. Raises OSError, PickerError and
        TlsError."""
        config = self._context.config
        if config.tls_certificate is not None:
            raise PickerError(
                "--endpoint-picker-port: proxies speak plain HTTP to it: leave out --tls-cert"
            )
        address = name_gateway(config.host, gateway_port)
        credentials = make_credentials(config)
        self._server = grpc.aio.server(
            options=(
                ("grpc.so_reuseport", 0),
                ("grpc.max_receive_message_length", config.max_body_bytes + (1 << 20)),
            ),
            maximum_concurrent_rpcs=config.max_clients,
        )
        external_processor_pb2_grpc.add_ExternalProcessorServicer_to_server(
            EndpointPicker(self._context, address, config.endpoint_picker_direct), self._server
        )
        health_pb2_grpc.add_HealthServicer_to_server(PickerHealth(self._context), self._server)
        address_and_port = name_gateway(config.host, port)
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


def _is_end(message: object) -> bool:
    """Whether the stream has ended; the type stubs lack grpc.aio.EOF."""
    return message is grpc.aio.EOF


def name_gateway(host: str, port: int) -> str:
    """This gateway's address as proxies name it. Raises PickerError."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        raise PickerError(f"--host {host}: an endpoint picker names IP addresses only") from None
    if address.is_unspecified:
        raise PickerError(
            f"--host {host}: an endpoint picker names its gateway: give the address of this one"
        )
    return f"[{address}]:{port}" if address.version == 6 else f"{address}:{port}"
