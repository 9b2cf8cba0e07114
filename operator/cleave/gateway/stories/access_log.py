"""The access log: one line for each request. Off by default; told by `watch`.

It says who was asked and what came of it, never what was said: no body, no header, no key, and no
name that is not one of ours except the request's own id.
"""

import logging

from cleave.gateway.stories.story import Story

ACCESS = "cleave.access"
"""Name of its logger."""

log = logging.getLogger(ACCESS)


class AccessLog:
    """Writes stories as lines."""

    def tell(self, story: Story) -> None:
        """A request is over."""
        fields = describe(story)
        asked = story.method or "-", story.path or "-"
        log.info("%s %s %d", *asked, story.status, extra={"fields": fields})


def describe(story: Story) -> dict[str, str | int | float]:
    """What a line says of a request that is over; what does not apply is left out."""
    told: dict[str, str | int | float] = {
        "request_id": story.request_id,
        "model": story.model,
        "tenant": story.tenant,
        "status": int(story.status),
        "outcome": story.outcome,
        "error": story.error,
        "duration_ms": _to_ms(story.ended_at - story.started_at),
        "prompt_tokens": story.prompt_tokens,
        "output_tokens": story.output_tokens,
        "attempts": len(story.tries),
    }
    if story.first_at:
        told["ttft_ms"] = _to_ms(story.first_at - story.started_at)
    if story.tries:
        told["estimated_prompt_tokens"] = story.tries[0].pick.prompt_tokens
        told["max_tokens"] = story.max_tokens
        pick = story.tries[-1].pick
        told["reason"] = pick.reason
        told["prefill"] = pick.prefill.instance if pick.prefill is not None else ""
        told["decode"] = pick.decode.instance
    if story.trace is not None:
        told["trace_id"] = f"{story.trace.trace_id:032x}"
    return {name: value for name, value in told.items() if value != ""}


def _to_ms(seconds: float) -> float:
    return round(seconds * 1_000, 2)
