"""Messages between Envoy and an endpoint picker: parsed to values and built from them. Pure.

The terms are those of the endpoint picker protocol of the Gateway API Inference Extension
(docs/proposals/004-endpoint-picker-protocol there): an endpoint is named in a header and also in
dynamic metadata; the proxy may restrict which endpoints are allowed.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from google.protobuf.struct_pb2 import Struct, Value

from cleave.gateway.http.errors import GatewayError
from cleave.rpc.v1 import external_processor_pb2 as pb

ENDPOINT_KEY = "x-gateway-destination-endpoint"
"""Header and metadata key: `ip:port`."""
NAMESPACE = "envoy.lb"
SUBSET_NAMESPACE = "envoy.lb.subset_hint"
SUBSET_KEY = "x-gateway-destination-endpoint-subset"

CHUNK_BYTES = 62_000
"""Of a body that is streamed back; proxies accept up to 64 KiB."""

CONTINUE_REQUEST_TRAILERS = pb.ProcessingResponse(request_trailers=pb.TrailersResponse())
CONTINUE_RESPONSE_HEADERS = pb.ProcessingResponse(response_headers=pb.HeadersResponse())
CONTINUE_RESPONSE_TRAILERS = pb.ProcessingResponse(response_trailers=pb.TrailersResponse())

_OVERWRITE = pb.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
# Built once, because it is the same in every response.
_METADATA = Struct(fields={NAMESPACE: Value(struct_value=Struct())})


@dataclass(frozen=True, slots=True)
class ExtProcRequest:
    """The first message of a stream."""

    has_no_body: bool
    request_mode: int
    """How bodies are sent (`BodySendMode`); full duplex if unset, as the protocol requires."""
    response_mode: int
    subset: frozenset[str] | None
    """Endpoints that are allowed; None: any."""


def read_request(message: pb.ProcessingRequest) -> ExtProcRequest:
    """Parse the first message of a stream, which contains the request's headers."""
    modes = message.protocol_config
    has_config = message.HasField("protocol_config")
    return ExtProcRequest(
        has_no_body=message.request_headers.end_of_stream,
        request_mode=modes.request_body_mode if has_config else pb.FULL_DUPLEX_STREAMED,
        response_mode=modes.response_body_mode if has_config else pb.FULL_DUPLEX_STREAMED,
        subset=_read_subset(message.metadata_context),
    )


def build_endpoint_response(endpoint: str) -> pb.ProcessingResponse:
    """Response to the request's headers: the endpoint."""
    message = pb.ProcessingResponse()
    common = message.request_headers.response
    common.clear_route_cache = True
    _set_header(common.header_mutation, ENDPOINT_KEY, endpoint)
    message.dynamic_metadata.CopyFrom(_METADATA)
    metadata = message.dynamic_metadata.fields[NAMESPACE].struct_value
    metadata.fields[ENDPOINT_KEY].string_value = endpoint
    return message


def stream_request_body(piece: pb.HttpBody) -> list[pb.ProcessingResponse]:
    """A piece of a request's body, unchanged, for full duplex."""
    messages = []
    for chunk, is_end in _split_body(piece.body, piece.end_of_stream):
        messages.append(message := pb.ProcessingResponse())
        streamed = message.request_body.response.body_mutation.streamed_response
        streamed.body, streamed.end_of_stream = chunk, is_end
    return messages


def stream_response_body(piece: pb.HttpBody) -> list[pb.ProcessingResponse]:
    """A piece of a response's body, unchanged, for full duplex."""
    messages = []
    for chunk, is_end in _split_body(piece.body, piece.end_of_stream):
        messages.append(message := pb.ProcessingResponse())
        streamed = message.response_body.response.body_mutation.streamed_response
        streamed.body, streamed.end_of_stream = chunk, is_end
    return messages


def _split_body(body: bytes, end: bool) -> Iterator[tuple[bytes, bool]]:
    """Each chunk, and whether it ends the body."""
    for start in range(0, max(len(body), 1), CHUNK_BYTES):
        yield body[start : start + CHUNK_BYTES], end and start + CHUNK_BYTES >= len(body)


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
