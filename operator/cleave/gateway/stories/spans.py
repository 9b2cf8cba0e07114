"""A request's story as spans of a trace. Pure; `tracing` sends them.

    POST /v1/chat/completions      server
      attempt                      instances picked, why, and how it took up what was lost
        prefill                    client: the call to the prefill instance
        decode                     client: the call to the decode instance (whole: to the only one)
          kv_transfer              decode asked to its first bytes, its first step included

Names follow OpenTelemetry's conventions for HTTP and for generative AI; what they do not know
begins with `cleave.`.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from cleave.gateway.stories.story import Leg, Story, Try
from cleave.gateway.stories.traceparent import make_span_id

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
    """One span; moments in seconds of the gateway's clock."""

    name: str
    kind: str
    """server, client or internal."""
    span_id: int
    parent_id: int
    """0: the first of its trace."""
    began_at: float
    ended_at: float
    attributes: Attributes
    events: tuple[tuple[str, float], ...] = ()
    fault: str = ""
    """What went wrong; empty: nothing."""


def describe(story: Story) -> Iterator[SpanValue]:
    """The spans of a story that is over and traced.

    The request's own comes last, so that whoever has got it has got all.
    """
    assert story.trace is not None
    for number, told in enumerate(story.tries):
        yield _describe_try(number, told, story)
        for leg in told.legs:
            yield from _describe_leg(leg, told)
    yield SpanValue(
        f"{story.method} {story.path}",
        "server",
        story.span_id,
        story.trace.parent_id,
        story.started_at,
        story.ended_at,
        _describe_request(story),
        (("first_token", story.first_at),) if story.first_at else (),
        # A client that leaves or errs is no fault of the server's.
        story.error or story.outcome if story.status >= 500 or story.outcome == "broken" else "",
    )


def _describe_request(story: Story) -> Attributes:
    attributes: Attributes = {
        "http.request.method": story.method,
        "url.path": story.path,
        "url.scheme": "https" if story.secure else "http",
        "gen_ai.request.model": story.model,
        "gen_ai.request.stream": story.stream,
        "gen_ai.usage.input_tokens": story.prompt_tokens,
        "gen_ai.usage.output_tokens": story.output_tokens,
        "cleave.request_id": story.request_id,
        "cleave.outcome": story.outcome,
    }
    if story.path in _OPERATIONS:
        attributes["gen_ai.operation.name"] = _OPERATIONS[story.path]
    if story.status:
        attributes["http.response.status_code"] = story.status
    if story.first_at:
        waited_s = story.first_at - story.started_at
        attributes["gen_ai.response.time_to_first_chunk"] = waited_s
    if story.error:
        attributes["error.type"] = story.error
    if story.tenant:
        attributes["cleave.tenant"] = story.tenant
    return attributes


def _describe_try(number: int, told: Try, story: Story) -> SpanValue:
    pick = told.pick
    attributes: Attributes = {
        "cleave.attempt": number,
        "cleave.dispatch.reason": pick.reason,
        "cleave.decode.instance": pick.decode.instance,
    }
    if pick.prefill is not None:
        attributes["cleave.prefill.instance"] = pick.prefill.instance
    if told.way:
        attributes["cleave.recovery"] = told.way
    if told.fault:
        attributes["error.type"] = told.fault
    return SpanValue(
        "attempt",
        "internal",
        told.span_id,
        story.span_id,
        told.began_at,
        told.ended_at,
        attributes,
        fault=f"{told.fault}: instance {told.instance} {told.reason}" if told.fault else "",
    )


def _describe_leg(leg: Leg, told: Try) -> Iterator[SpanValue]:
    attributes: Attributes = {
        "cleave.instance": leg.target.instance,
        "cleave.boot_id": leg.target.boot_id,
        "server.address": leg.target.host,
        "server.port": leg.target.port,
    }
    if leg.blocks:
        attributes["cleave.handoff.blocks"] = leg.blocks
    if leg.fault:
        attributes["error.type"] = leg.fault
    yield SpanValue(
        leg.phase,
        "client",
        leg.span_id,
        told.span_id,
        leg.sent_at,
        leg.ended_at,
        attributes,
        (("first_token", leg.first_at),) if leg.first_at else (),
        leg.fault,
    )
    if leg.phase == "decode" and leg.first_at and told.legs[0].blocks:
        yield SpanValue(
            "kv_transfer",
            "internal",
            make_span_id(),
            leg.span_id,
            leg.sent_at,
            leg.first_at,
            {
                "cleave.handoff.blocks": told.legs[0].blocks,
                "cleave.prefill.instance": told.legs[0].target.instance,
                "cleave.decode.instance": leg.target.instance,
            },
        )
