"""In what answers of a gateway differ from an engine's, and why. No I/O.

Used by run.py. Ids and times differ in every answer, and how a stream's text is cut in every run.
So answers are compared without the former, and events are added up.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
from request_values import Case

DIRECT, WHOLE, SPLIT = "direct", "whole", "split"
_VARYING = frozenset((
    "id", "created", "created_at", "completed_at", "system_fingerprint", "item_id", "call_id",
    "sequence_number", "signature", "response_id", "request_id",
))  # fmt: skip
_TEXTS = frozenset((
    "content", "text", "delta", "reasoning", "arguments", "partial_json", "thinking",
))  # fmt: skip
"""Members that grow from event to event."""

Answer = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing in which a gateway's answer to a request differs from the engine's."""

    case: Case
    way: str
    what: str
    """The member that differs, or both statuses."""


def read_answer(answer: httpx.Response) -> Answer:
    """What is compared of an answer."""
    found: Answer = {"status": answer.status_code, "split": "x-cleave-prefill" in answer.headers}
    if answer.status_code != httpx.codes.OK:
        return found | {"message": answer.text[:300]}
    if answer.headers["content-type"].startswith("text/event-stream"):
        return found | {"body": add_events(answer.text)}
    return found | {"body": normalize(answer.json())}


def add_events(text: str) -> Answer:
    """A stream as one object: texts are joined, of other values the last one counts."""
    total: Answer = {"kinds": []}
    for event in text.split("\n\n"):
        lines = [line for line in event.split("\n") if line and not line.startswith(":")]
        data = "\n".join(line[6:] for line in lines if line.startswith("data: "))
        if not data:
            continue
        value = {"type": data} if data == "[DONE]" else normalize(json.loads(data))
        kind = value.get("type") or ("error" if "error" in value else "event")
        if total["kinds"][-1:] != [kind]:
            total["kinds"].append(kind)
        add(total, value)
    return total


def add(total: Answer, value: Answer) -> None:
    """Add an event to what came before it."""
    for key, each in value.items():
        before = total.get(key)
        if isinstance(each, dict) and isinstance(before, dict):
            add(before, each)
        elif isinstance(each, list) and isinstance(before, list):
            add_items(before, each)
        elif key in _TEXTS and isinstance(each, str) and isinstance(before, str):
            total[key] = before + each
        elif each is not None or key not in total:
            total[key] = each


def add_items(before: list[Any], items: list[Any]) -> None:
    """Add list elements: choices and calls by their index, all others at the end."""
    for item in items:
        index = item.get("index") if isinstance(item, dict) else None
        same = [each for each in before if index is not None and each.get("index") == index]
        if same:
            add(same[0], item)
        else:
            before.append(item)


def normalize(value: Any) -> Any:
    """A value without ids and times, and numbers as far as engines agree."""
    if isinstance(value, dict):
        return {key: normalize(each) for key, each in value.items() if key not in _VARYING}
    if isinstance(value, list):
        return [normalize(each) for each in value]
    return round(value, 2) if isinstance(value, float) else value


def compare(cases: Sequence[Case], answers: dict[str, list[Answer]]) -> Iterator[Difference]:
    """In what the answers of gateways differ from the engine's."""
    for way in (WHOLE, SPLIT):
        for case, direct, ours in zip(cases, answers[DIRECT], answers[way], strict=True):
            if direct["status"] != ours["status"]:
                yield Difference(case, way, f"{direct['status']}, here {ours['status']}")
                continue
            for what in sorted({*find_differences(direct.get("body"), ours.get("body"))}):
                yield Difference(case, way, what)


def find_differences(one: Any, other: Any, path: str = "") -> Iterator[str]:
    """The members in which two values differ; one that is null may be absent."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in {**one, **other}:
            yield from find_differences(one.get(key), other.get(key), f"{path}.{key}".strip("."))
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for each, its in zip(one, other, strict=True):
            yield from find_differences(each, its, path)
    elif one != other:
        yield path


def find_reason(each: Difference, reasons: Sequence[dict[str, Any]]) -> str:
    """Why it is so; empty: no reason is known."""
    for rule in reasons:
        is_path = rule.get("path") in (None, each.case.path)
        is_field = "fields" not in rule or each.case.field in rule["fields"].split()
        if is_path and is_field and re.fullmatch(rule["what"], each.what):
            return str(rule["reason"])
    return ""
