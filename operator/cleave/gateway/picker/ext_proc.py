"""Messages between Envoy and an endpoint picker, as values and back. Pure; used by the picker.

The words are those of the endpoint picker protocol of the Gateway API Inference Extension
(docs/proposals/004-endpoint-picker-protocol there): an endpoint is named in a header and, the same,
in dynamic metadata; the proxy may say which endpoints may be named at all.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from google.protobuf.struct_pb2 import Struct, Value

from cleave.gateway.errors import ApiError
from cleave.rpc.v1 import external_processor_pb2 as pb

ENDPOINT = "x-gateway-destination-endpoint"
"""Header and metadata: `ip:port`, or several with commas, tried in turn."""
NAMESPACE = "envoy.lb"
SERVED = "x-gateway-destination-endpoint-served"
SUBSET_NAMESPACE = "envoy.lb.subset_hint"
SUBSET = "x-gateway-destination-endpoint-subset"

CHUNK_BYTES = 62_000
"""Of a body that is streamed back; proxies take 64 KiB and no more."""

CONTINUE_REQUEST_HEADERS = pb.ProcessingResponse(request_headers=pb.HeadersResponse())
CONTINUE_REQUEST_TRAILERS = pb.ProcessingResponse(request_trailers=pb.TrailersResponse())
CONTINUE_RESPONSE_HEADERS = pb.ProcessingResponse(response_headers=pb.HeadersResponse())
CONTINUE_RESPONSE_BODY = pb.ProcessingResponse(response_body=pb.BodyResponse())
CONTINUE_RESPONSE_TRAILERS = pb.ProcessingResponse(response_trailers=pb.TrailersResponse())

_OVERWRITE = pb.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
# What is the same in every answer, made once.
_METADATA = Struct(fields={NAMESPACE: Value(struct_value=Struct())})


@dataclass(frozen=True, slots=True)
class Head:
    """What the first message of a stream tells."""

    headers: dict[str, bytes]
    """By name in small letters; of equal ones the last."""
    bodiless: bool
    request_mode: int
    """How bodies come, as `BodySendMode`. A proxy that says nothing streams both in full duplex, as
    the protocol asks of it."""
    response_mode: int
    subset: frozenset[str] | None
    """Endpoints that may be named; None: any."""


def read_head(message: pb.ProcessingRequest) -> Head:
    """The first message of a stream, which holds the request's headers."""
    stated = message.request_headers
    modes = message.protocol_config
    told = message.HasField("protocol_config")
    return Head(
        headers={
            each.key: each.raw_value or each.value.encode() for each in stated.headers.headers
        },
        bodiless=stated.end_of_stream,
        request_mode=modes.request_body_mode if told else pb.FULL_DUPLEX_STREAMED,
        response_mode=modes.response_body_mode if told else pb.FULL_DUPLEX_STREAMED,
        subset=_read_subset(message.metadata_context),
    )


def read_status(message: pb.ProcessingRequest) -> int:
    """Of the response's headers; 0 when they have none."""
    for each in message.response_headers.headers.headers:
        if each.key == ":status":
            text = each.raw_value or each.value.encode()
            return int(text) if text.isdigit() else 0
    return 0


def read_served(message: pb.ProcessingRequest) -> str:
    """The endpoint that answered; empty when the proxy does not tell."""
    metadata = message.metadata_context.filter_metadata
    if NAMESPACE not in metadata:
        return ""
    served = metadata[NAMESPACE].fields
    return served[SERVED].string_value if SERVED in served else ""


def name_endpoint(endpoint: str, headers: dict[str, str]) -> pb.ProcessingResponse:
    """The answer to the request's headers: where it goes, and headers that are set."""
    answer = pb.ProcessingResponse()
    _fill(answer, answer.request_headers.response, endpoint, headers)
    return answer


def name_endpoint_with_body(
    endpoint: str, headers: dict[str, str], body: bytes
) -> pb.ProcessingResponse:
    """The same as the answer to a body that came as a whole, with what is sent instead."""
    answer = pb.ProcessingResponse()
    response = answer.request_body.response
    _fill(answer, response, endpoint, {**headers, "content-length": str(len(body))})
    response.body_mutation.body = body
    return answer


def name_endpoint_late(endpoint: str) -> pb.ProcessingResponse:
    """The same, with the body as it came."""
    answer = pb.ProcessingResponse()
    _fill(answer, answer.request_body.response, endpoint, {})
    return answer


def stream_request_body(body: bytes, end: bool = True) -> Iterator[pb.ProcessingResponse]:
    """A request's body in pieces, in full duplex."""
    for start in range(0, max(len(body), 1), CHUNK_BYTES):
        answer = pb.ProcessingResponse()
        streamed = answer.request_body.response.body_mutation.streamed_response
        streamed.body = body[start : start + CHUNK_BYTES]
        streamed.end_of_stream = end and start + CHUNK_BYTES >= len(body)
        yield answer


def stream_response_body(piece: pb.HttpBody) -> list[pb.ProcessingResponse]:
    """A piece of a response's body as it came, in full duplex."""
    body = piece.body
    answers = []
    for start in range(0, max(len(body), 1), CHUNK_BYTES):
        answer = pb.ProcessingResponse()
        streamed = answer.response_body.response.body_mutation.streamed_response
        streamed.body = body[start : start + CHUNK_BYTES]
        streamed.end_of_stream = piece.end_of_stream and start + CHUNK_BYTES >= len(body)
        answers.append(answer)
    return answers


def refuse_with(error: ApiError) -> pb.ProcessingResponse:
    """The answer instead of any instance's."""
    answer = pb.ProcessingResponse()
    told = answer.immediate_response
    told.status.code = error.status
    told.body = error.to_json()
    told.details = error.code or "refused"
    _set(told.headers, "content-type", "application/json")
    if error.retry_after_s is not None:
        _set(told.headers, "retry-after", str(error.retry_after_s))
    return answer


def _fill(
    answer: pb.ProcessingResponse,
    response: pb.CommonResponse,
    endpoint: str,
    headers: dict[str, str],
) -> None:
    response.clear_route_cache = True
    _set(response.header_mutation, ENDPOINT, endpoint)
    for name, value in headers.items():
        _set(response.header_mutation, name, value)
    answer.dynamic_metadata.CopyFrom(_METADATA)
    told = answer.dynamic_metadata.fields[NAMESPACE].struct_value
    told.fields[ENDPOINT].string_value = endpoint


def _set(mutation: pb.HeaderMutation, name: str, value: str) -> None:
    option = mutation.set_headers.add()
    option.header.key, option.header.raw_value = name, value.encode()
    # A client may have sent one of the same name.
    option.append_action = _OVERWRITE


def _read_subset(metadata: pb.Metadata) -> frozenset[str] | None:
    """Endpoints as a list, or as text with commas; both are met."""
    if SUBSET_NAMESPACE not in metadata.filter_metadata:
        return None
    fields = metadata.filter_metadata[SUBSET_NAMESPACE].fields
    if SUBSET not in fields:
        return None
    stated = fields[SUBSET]
    texts = [stated.string_value, *(each.string_value for each in stated.list_value.values)]
    names = (name.strip() for text in texts for name in text.split(","))
    return frozenset(name for name in names if name)
