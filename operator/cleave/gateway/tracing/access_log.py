"""The access log: one line per request. Off by default; written through `recorder`.

It contains the instances used and the outcome, but nothing that the client wrote: no body, no
header, no key, and no name that is unknown here, except the request's own id.
"""

import logging

from cleave.gateway.tracing.request_record import RequestRecord

ACCESS_LOGGER = "cleave.access"
"""Name of the logger."""

log = logging.getLogger(ACCESS_LOGGER)


class AccessLog:
    """Logs finished requests."""

    def on_finished(self, record: RequestRecord) -> None:
        """A request has finished."""
        fields = build_fields(record)
        target = record.method or "-", record.path or "-"
        log.info("%s %s %d", *target, record.status, extra={"fields": fields})


def build_fields(record: RequestRecord) -> dict[str, str | int | float]:
    """The fields of a line; those that do not apply are omitted."""
    values: dict[str, str | int | float] = {
        "request_id": record.request_id,
        "model": record.model,
        "tenant": record.tenant,
        "status": int(record.status),
        "outcome": record.outcome,
        "error": record.error,
        "duration_ms": _to_ms(record.ended_at - record.started_at),
        "prompt_tokens": record.prompt_tokens,
        "output_tokens": record.output_tokens,
        "attempts": len(record.attempts),
    }
    if record.first_byte_at:
        values["ttft_ms"] = _to_ms(record.first_byte_at - record.started_at)
    if record.attempts:
        values["estimated_prompt_tokens"] = record.attempts[0].pick.prompt_tokens
        values["max_tokens"] = record.max_tokens
        pick = record.attempts[-1].pick
        values["reason"] = pick.reason
        values["prefill"] = pick.prefill.instance if pick.prefill is not None else ""
        values["decode"] = pick.decode.instance
    if record.trace is not None:
        values["trace_id"] = f"{record.trace.trace_id:032x}"
    return {name: value for name, value in values.items() if value != ""}


def _to_ms(seconds: float) -> float:
    return round(seconds * 1_000, 2)
