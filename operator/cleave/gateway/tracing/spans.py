"""Builds the spans of a trace from the record of a request. Pure; `otel_exporter` exports them.

    POST /v1/chat/completions      server
      attempt                      instances picked, the reason, and the recovery mode of a retry
        prefill                    client: the call to the prefill instance
        decode                     client: the call to the decode instance (whole: to the only one)
          kv_transfer              from calling decode to its first bytes, its first step included

Names follow OpenTelemetry's semantic conventions for HTTP and for generative AI; all others begin
with `cleave.`.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from cleave.gateway.tracing.request_record import AttemptRecord, CallRecord, RequestRecord
from cleave.gateway.tracing.traceparent import make_span_id

Attributes = dict[str, str | int | float | bool]

_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
}


@dataclass(frozen=True, slots=True)
class SpanValue:
    """One span; times in seconds of the gateway's clock."""

    name: str
    kind: str
    """server, client or internal."""
    span_id: int
    parent_id: int
    """0: the first span of its trace."""
    started_at: float
    ended_at: float
    attributes: Attributes
    events: tuple[tuple[str, float], ...] = ()
    fault: str = ""
    """Description of the error; empty: none."""


def build_spans(record: RequestRecord) -> Iterator[SpanValue]:
    """The spans of a finished request that is traced.
    The request's own span comes last, so that a collector that has it has all of them."""
    assert record.trace is not None
    for number, attempt in enumerate(record.attempts):
        yield _build_attempt_span(number, attempt, record)
        for leg in attempt.calls:
            yield from _build_call_spans(leg, attempt)
    # A client that disconnects or sends an invalid request is not an error of the server.
    is_fault = record.status >= 500 or record.outcome == "broken"
    yield SpanValue(
        f"{record.method} {record.path}",
        "server",
        record.span_id,
        record.trace.parent_id,
        record.started_at,
        record.ended_at,
        _build_request_attributes(record),
        (("first_token", record.first_byte_at),) if record.first_byte_at else (),
        record.error or record.outcome if is_fault else "",
    )


def _build_request_attributes(record: RequestRecord) -> Attributes:
    attributes: Attributes = {
        "http.request.method": record.method,
        "url.path": record.path,
        "url.scheme": "https" if record.secure else "http",
        "gen_ai.request.model": record.model,
        "gen_ai.request.stream": record.stream,
        "gen_ai.usage.input_tokens": record.prompt_tokens,
        "gen_ai.usage.output_tokens": record.output_tokens,
        "cleave.request_id": record.request_id,
        "cleave.outcome": record.outcome,
    }
    if record.first_byte_at:
        waited_s = record.first_byte_at - record.started_at
        attributes["gen_ai.response.time_to_first_chunk"] = waited_s
    optional: Attributes = {
        "gen_ai.operation.name": _OPERATIONS.get(record.path, ""),
        "http.response.status_code": record.status,
        "error.type": record.error,
        "cleave.tenant": record.tenant,
    }
    return attributes | _drop_empty(optional)


def _build_attempt_span(number: int, attempt: AttemptRecord, record: RequestRecord) -> SpanValue:
    pick = attempt.pick
    attributes: Attributes = {
        "cleave.attempt": number,
        "cleave.dispatch.reason": pick.reason,
        "cleave.decode.instance": pick.decode.instance,
    }
    optional: Attributes = {
        "cleave.prefill.instance": pick.prefill.instance if pick.prefill is not None else "",
        "cleave.recovery": attempt.recovery_mode,
        "error.type": attempt.fault,
    }
    fault = f"{attempt.fault}: instance {attempt.instance} {attempt.reason}"
    return SpanValue(
        "attempt",
        "internal",
        attempt.span_id,
        record.span_id,
        attempt.started_at,
        attempt.ended_at,
        attributes | _drop_empty(optional),
        fault=fault if attempt.fault else "",
    )


def _build_call_spans(call: CallRecord, attempt: AttemptRecord) -> Iterator[SpanValue]:
    attributes: Attributes = {
        "cleave.instance": call.target.instance,
        "cleave.boot_id": call.target.boot_id,
        "server.address": call.target.host,
        "server.port": call.target.port,
    }
    attributes |= _drop_empty({"cleave.handoff.blocks": call.blocks, "error.type": call.fault})
    yield SpanValue(
        call.phase,
        "client",
        call.span_id,
        attempt.span_id,
        call.sent_at,
        call.ended_at,
        attributes,
        (("first_token", call.first_byte_at),) if call.first_byte_at else (),
        call.fault,
    )
    first = attempt.calls[0]
    if call.phase == "decode" and call.first_byte_at and first.blocks:
        moved: Attributes = {
            "cleave.handoff.blocks": first.blocks,
            "cleave.prefill.instance": first.target.instance,
            "cleave.decode.instance": call.target.instance,
        }
        span_id, parent, start, end = make_span_id(), call.span_id, call.sent_at, call.first_byte_at
        yield SpanValue("kv_transfer", "internal", span_id, parent, start, end, moved)


def _drop_empty(attributes: Attributes) -> Attributes:
    return {name: value for name, value in attributes.items() if value}
