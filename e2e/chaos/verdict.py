"""Whether what a client saw is right, one of the documented failures, or a fault of ours. Pure.

`docs/serve.md`, "When an engine is lost", documents the same cases.
"""

import enum
import json
from dataclasses import dataclass, field
from typing import Any

from e2e.chaos.requests import Ask

HAND_OFF = "kv_transfer_params"
_DONE = b"data: [DONE]"


class Case(enum.Enum):
    """How a request may end while engines and gateways are lost."""

    RIGHT = "right"
    GATEWAY_LOST = "the client's gateway was killed"
    NOT_RESUMABLE = "sampled without a seed and bound to its engine: the stream ends with an error"
    ENGINES_FAILED = (
        "every attempt and every engine in reach was lost, or two that had just begun with it: "
        "502 or 504, or an error event"
    )
    NO_INSTANCE = "no instance could take it: 503"
    BUFFERS_FULL = "a large request while others took the gateway's memory for bodies: 503"
    WRONG = "undocumented"


@dataclass
class Seen:
    """What came back, as it came."""

    began_s: float
    gateway: str = ""
    status: int = 0
    body: bytes = b""
    broken: str = ""
    """The connection's end, where it had no other."""
    first_s: float = 0.0
    ended_s: float = 0.0
    pause_s: float = 0.0
    """The longest time without a byte, the one before the first not counted."""
    instances: tuple[str, ...] = ()
    """As the answer's head names them."""


@dataclass(frozen=True)
class Verdict:
    """A case, and why it is that one."""

    case: Case
    reason: str = ""


class WrongAnswerError(Exception):
    """The answer is wrong; says how."""


@dataclass
class _Answer:
    """Put together again from an answer's pieces."""

    texts: dict[int, str] = field(default_factory=dict)
    finishes: dict[int, str] = field(default_factory=dict)
    usage: dict[str, Any] | None = None


def check_answer(ask: Ask, seen: Seen, gateway_killed: bool, gateway_full: bool = False) -> Verdict:
    """`gateway_killed`, `gateway_full`: the client's own, while it waited."""
    try:
        verdict = _check_answer(ask, seen, gateway_killed)
        if verdict.case is Case.BUFFERS_FULL and not (gateway_full and ask.large):
            raise WrongAnswerError(f"refused with memory left, or small: {verdict.reason}")
        return verdict
    except (WrongAnswerError, ValueError, LookupError, TypeError, AttributeError) as fault:
        return Verdict(Case.WRONG, f"{type(fault).__name__}: {fault}")


def check_refusal_of_poison(seen: Seen, gateway_killed: bool) -> Verdict:
    """Of a request that ends the engines which run it: nothing but an error is right."""
    try:
        if seen.broken:
            if gateway_killed:
                return Verdict(Case.GATEWAY_LOST, seen.broken)
            raise WrongAnswerError(f"the gateway broke the connection: {seen.broken}")
        if seen.status == 200:
            raise WrongAnswerError("a request that ends engines was answered")
        return check_refusal(seen.status, json.loads(seen.body)["error"])
    except (WrongAnswerError, ValueError, LookupError, TypeError) as fault:
        return Verdict(Case.WRONG, f"{type(fault).__name__}: {fault}")


def _check_answer(ask: Ask, seen: Seen, gateway_killed: bool) -> Verdict:
    if seen.broken:
        if not gateway_killed:
            raise WrongAnswerError(f"the gateway broke the connection: {seen.broken}")
        if ask.stream and seen.status == 200:
            _check_events(ask, _split_events(seen.body)[:-1])
        return Verdict(Case.GATEWAY_LOST, seen.broken)
    if HAND_OFF.encode() in seen.body:
        raise WrongAnswerError("the hand-off leaked")
    if seen.status != 200:
        return check_refusal(seen.status, json.loads(seen.body)["error"])
    if not ask.stream:
        check(ask, read_whole(json.loads(seen.body)))
        return Verdict(Case.RIGHT)
    *events, rest = _split_events(seen.body)
    if rest:
        raise WrongAnswerError(f"half an event at the end: {rest[:200]!r}")
    verdict = _check_events(ask, events)
    if verdict is None:
        raise WrongAnswerError(f"no [DONE] at the end but {b''.join(events[-1:])[:200]!r}")
    return verdict


def _split_events(body: bytes) -> list[bytes]:
    """A stream's events, without the comments of one that was silent, and what is after them."""
    return [event for event in body.split(b"\n\n") if not event.startswith(b":")]


def _check_events(ask: Ask, events: list[bytes]) -> Verdict | None:
    """The verdict on a stream's complete events; None when its last one has not come.
    Raises WrongAnswerError unless they are how the expected answer begins."""
    if events and events[-1] == _DONE:
        check(ask, read_events(events[:-1]))
        return Verdict(Case.RIGHT)
    error = _decode(events[-1]).get("error") if events else None
    if error is None:
        check_beginning(ask, read_events(events))
        return None
    check_beginning(ask, read_events(events[:-1]))
    message = error["message"]
    if not ask.resumable and "temperature 0 or a seed" in message:
        return Verdict(Case.NOT_RESUMABLE, message)
    return check_refusal(502, error)


def check_refusal(status: int, error: dict[str, Any]) -> Verdict:
    """An error in OpenAI's form."""
    code, message = error["code"], error["message"]
    if code == "no_instance":
        return Verdict(Case.NO_INSTANCE, message)
    if code == "receiving_too_much":
        return Verdict(Case.BUFFERS_FULL, message)
    if code in ("engine_error", "engine_timeout", "suspect_request", "suspect_sender"):
        if "otherwise than" in message:
            raise WrongAnswerError(message)
        return Verdict(Case.ENGINES_FAILED, message)
    raise WrongAnswerError(f"{status} {message}")


def read_whole(body: dict[str, Any]) -> _Answer:
    """An answer that is not streamed."""
    answer = _Answer(usage=body["usage"])
    for choice in body["choices"]:
        text = choice["text"] if "text" in choice else choice["message"]["content"]
        answer.texts[choice["index"]] = text
        answer.finishes[choice["index"]] = choice["finish_reason"]
    return answer


def read_events(events: list[bytes]) -> _Answer:
    """A stream without its end. Raises WrongAnswerError when its events do not belong together."""
    answer, heads = _Answer(), set()
    for event in events:
        value = _decode(event)
        heads.add((value["id"], value["created"], value["object"], value["model"]))
        if value.get("usage"):
            if answer.usage is not None:
                raise WrongAnswerError("usage is told twice")
            answer.usage = value["usage"]
        for choice in value["choices"]:
            index = choice["index"]
            if index in answer.finishes:
                raise WrongAnswerError(f"choice {index} goes on after its end")
            text = choice.get("text") or choice.get("delta", {}).get("content") or ""
            answer.texts[index] = answer.texts.get(index, "") + text
            if choice.get("finish_reason") is not None:
                answer.finishes[index] = choice["finish_reason"]
    if len(heads) > 1:
        raise WrongAnswerError(f"one stream, {len(heads)} heads: {sorted(heads)}")
    return answer


def _decode(event: bytes) -> dict[str, Any]:
    try:
        value: dict[str, Any] = json.loads(event.removeprefix(b"data: "))
    except ValueError as fault:
        raise WrongAnswerError(f"an event is not JSON: {event[:200]!r}") from fault
    return value


def check(ask: Ask, answer: _Answer) -> None:
    """Raises WrongAnswerError unless the answer is the expected one to the last token."""
    expected = ask.expected
    for index, text in enumerate(expected.texts):
        if answer.texts.get(index) != text:
            raise WrongAnswerError(difference(f"choice {index}", text, answer.texts.get(index, "")))
    if len(answer.texts) != len(expected.texts):
        raise WrongAnswerError(f"{len(answer.texts)} choices instead of {len(expected.texts)}")
    finishes = tuple(answer.finishes.get(index, "") for index in range(len(expected.texts)))
    if finishes != expected.finishes:
        raise WrongAnswerError(f"ends with {finishes} instead of {expected.finishes}")
    if not ask.counts:
        return
    usage = answer.usage or {}
    counted = usage.get("prompt_tokens"), usage.get("completion_tokens")
    if counted != (expected.prompt_tokens, expected.completion_tokens):
        expected_tokens = expected.prompt_tokens, expected.completion_tokens
        raise WrongAnswerError(f"usage {counted} instead of {expected_tokens}")


def check_beginning(ask: Ask, answer: _Answer) -> None:
    """Raises WrongAnswerError unless all that came is how the expected answer begins."""
    for index, text in answer.texts.items():
        if not ask.expected.texts[index].startswith(text):
            raise WrongAnswerError(difference(f"choice {index}", ask.expected.texts[index], text))


def difference(what: str, expected: str, came: str) -> str:
    """Where two texts part."""
    pairs = zip(expected, came, strict=False)
    same = next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(expected), len(came)))
    return (
        f"{what} parts after {same} of {len(expected)} characters: "
        f"{expected[same : same + 30]!r} was expected, {came[same : same + 30]!r} came"
    )
