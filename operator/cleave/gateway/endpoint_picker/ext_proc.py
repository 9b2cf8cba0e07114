"""Messages between Envoy and an endpoint picker: parsed to values and built from them. Pure.

The terms are those of the endpoint picker protocol of the Gateway API Inference Extension
(docs/proposals/004-endpoint-picker-protocol there): an endpoint is named in a header and also in
dynamic metadata; the proxy may restrict which endpoints are allowed.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from google.protobuf.struct_pb2 import Struct, Value

from cleave.gateway.http.errors import GatewayError
from cleave.rpc.v1 import external_processor_pb2 as pb

ENDPOINT_KEY = "x-gateway-destination-endpoint"
"""Header and metadata key: `ip:port`, or several with commas, tried in order."""
NAMESPACE = "envoy.lb"
SERVED_KEY = "x-gateway-destination-endpoint-served"
SUBSET_NAMESPACE = "envoy.lb.subset_hint"
SUBSET_KEY = "x-gateway-destination-endpoint-subset"

CHUNK_BYTES = 62_000
"""Of a body that is streamed back; proxies accept up to 64 KiB."""

CONTINUE_REQUEST_HEADERS = pb.ProcessingResponse(request_headers=pb.HeadersResponse())
CONTINUE_REQUEST_TRAILERS = pb.ProcessingResponse(request_trailers=pb.TrailersResponse())
CONTINUE_RESPONSE_HEADERS = pb.ProcessingResponse(response_headers=pb.HeadersResponse())
CONTINUE_RESPONSE_BODY = pb.ProcessingResponse(response_body=pb.BodyResponse())
CONTINUE_RESPONSE_TRAILERS = pb.ProcessingResponse(response_trailers=pb.TrailersResponse())

_OVERWRITE = pb.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
# Built once, because it is the same in every response.
_METADATA = Struct(fields={NAMESPACE: Value(struct_value=Struct())})


@dataclass(frozen=True, slots=True)
class ExtProcRequest:
    """The first message of a stream."""

    headers: dict[str, bytes]
    """By lower-case name; of equal ones the last."""
    has_no_body: bool
    request_mode: int
    """How bodies are sent (`BodySendMode`); full duplex if unset, as the protocol requires."""
    response_mode: int
    subset: frozenset[str] | None
    """Endpoints that are allowed; None: any."""

    @property
    def path(self) -> bytes:
        """Without the query."""
        return self.headers.get(":path", b"").partition(b"?")[0]


def read_request(message: pb.ProcessingRequest) -> ExtProcRequest:
    """Parse the first message of a stream, which contains the request's headers."""
    request, modes = message.request_headers, message.protocol_config
    has_config = message.HasField("protocol_config")
    return ExtProcRequest(
        headers=_read_headers(request.headers),
        has_no_body=request.end_of_stream,
        request_mode=modes.request_body_mode if has_config else pb.FULL_DUPLEX_STREAMED,
        response_mode=modes.response_body_mode if has_config else pb.FULL_DUPLEX_STREAMED,
        subset=_read_subset(message.metadata_context),
    )


def read_status(message: pb.ProcessingRequest) -> int:
    """Status of the response's headers; 0 when they have none."""
    text = _read_headers(message.response_headers.headers).get(":status", b"")
    return int(text) if len(text) == 3 and text.isdigit() else 0


def _read_headers(headers: pb.HeaderMap) -> dict[str, bytes]:
    return {each.key: each.raw_value or each.value.encode() for each in headers.headers}


def read_served(message: pb.ProcessingRequest) -> str:
    """The endpoint that responded; empty when the proxy does not say."""
    metadata = message.metadata_context.filter_metadata
    if NAMESPACE not in metadata:
        return ""
    served = metadata[NAMESPACE].fields
    return served[SERVED_KEY].string_value if SERVED_KEY in served else ""


def build_endpoint_response(
    endpoint: str, headers: dict[str, str], removed: Collection[str] = ()
) -> pb.ProcessingResponse:
    """Response to the request's headers: the endpoint, headers to set and headers to remove."""
    message = pb.ProcessingResponse()
    _set_endpoint(message, message.request_headers.response, endpoint, headers, removed)
    return message


def build_endpoint_response_with_body(
    endpoint: str, headers: dict[str, str], body: bytes, removed: Collection[str]
) -> pb.ProcessingResponse:
    """Response to a buffered body: the endpoint, headers to set and to remove, and the body that
    replaces it."""
    message = pb.ProcessingResponse()
    response, length = message.request_body.response, str(len(body))
    _set_endpoint(message, response, endpoint, {**headers, "content-length": length}, removed)
    response.body_mutation.body = body
    return message


def build_endpoint_response_to_body(endpoint: str) -> pb.ProcessingResponse:
    """Response to a buffered body: the endpoint; the body is not changed."""
    message = pb.ProcessingResponse()
    _set_endpoint(message, message.request_body.response, endpoint, {})
    return message


def stream_request_body(body: bytes | memoryview, end: bool) -> Iterator[pb.ProcessingResponse]:
    """A request's body in chunks, for full duplex."""
    for chunk, is_end in _split_body(body, end):
        message = pb.ProcessingResponse()
        streamed = message.request_body.response.body_mutation.streamed_response
        streamed.body, streamed.end_of_stream = chunk, is_end
        yield message


def stream_whole_request(
    body: bytes | memoryview, *, has_trailers: bool
) -> Iterator[pb.ProcessingResponse]:
    """The same to the end of the request."""
    yield from stream_request_body(body, not has_trailers)
    if has_trailers:
        yield CONTINUE_REQUEST_TRAILERS


def stream_response_body(piece: pb.HttpBody) -> list[pb.ProcessingResponse]:
    """A piece of a response's body, unchanged, for full duplex."""
    messages = []
    for chunk, is_end in _split_body(piece.body, piece.end_of_stream):
        messages.append(message := pb.ProcessingResponse())
        streamed = message.response_body.response.body_mutation.streamed_response
        streamed.body, streamed.end_of_stream = chunk, is_end
    return messages


def _split_body(body: bytes | memoryview, end: bool) -> Iterator[tuple[bytes, bool]]:
    """Each chunk, and whether it ends the body."""
    for start in range(0, max(len(body), 1), CHUNK_BYTES):
        yield bytes(body[start : start + CHUNK_BYTES]), end and start + CHUNK_BYTES >= len(body)


def build_immediate_response(error: GatewayError) -> pb.ProcessingResponse:
    """Response to the client instead of any instance's."""
    message = pb.ProcessingResponse()
    immediate = message.immediate_response
    immediate.status.code = error.status
    immediate.body = error.to_json()
    immediate.details = error.code or "refused"
    _set_header(immediate.headers, "content-type", "application/json")
    if error.retry_after_s is not None:
        _set_header(immediate.headers, "retry-after", str(error.retry_after_s))
    return message


def _set_endpoint(
    reply: pb.ProcessingResponse,
    common: pb.CommonResponse,
    endpoint: str,
    headers: dict[str, str],
    removed: Collection[str] = (),
) -> None:
    common.clear_route_cache = True
    _set_header(common.header_mutation, ENDPOINT_KEY, endpoint)
    for name, value in headers.items():
        _set_header(common.header_mutation, name, value)
    common.header_mutation.remove_headers.extend(removed)
    reply.dynamic_metadata.CopyFrom(_METADATA)
    metadata = reply.dynamic_metadata.fields[NAMESPACE].struct_value
    metadata.fields[ENDPOINT_KEY].string_value = endpoint


def _set_header(mutation: pb.HeaderMutation, name: str, value: str) -> None:
    option = mutation.set_headers.add()
    option.header.key, option.header.raw_value = name, value.encode()
    # The client may have sent a header of the same name.
    option.append_action = _OVERWRITE


def _read_subset(metadata: pb.Metadata) -> frozenset[str] | None:
    """Endpoints as a list, or as text with commas; both forms occur."""
    if SUBSET_NAMESPACE not in metadata.filter_metadata:
        return None
    fields = metadata.filter_metadata[SUBSET_NAMESPACE].fields
    if SUBSET_KEY not in fields:
        return None
    value = fields[SUBSET_KEY]
    texts = [value.string_value, *(each.string_value for each in value.list_value.values)]
    names = (name.strip() for text in texts for name in text.split(","))
    return frozenset(name for name in names if name)
