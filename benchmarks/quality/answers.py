"""Answers with their log-probabilities, and where two of them part."""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from cleave.policy.pair_trust import TIE_NATS


@dataclass(frozen=True)
class Output:
    """The tokens of an answer, and of each its log-probability and its lead over the next one."""

    tokens: list[int]
    logprobs: list[float]
    gaps: list[float]


@dataclass(frozen=True)
class Comparison:
    """Two answers to one request."""

    common: int
    """Equal tokens before the first that differs."""
    length: int
    shift: float
    """Greatest difference of the log-probabilities of equal tokens, nats."""
    gap: float
    """Between the two likeliest tokens where the answers part, nats; 0: they do not."""

    @property
    def verdict(self) -> str:
        if self.common == self.length:
            return "equal"
        return "near tie" if self.gap <= TIE_NATS else "other"


def read_output(choice: dict[str, Any]) -> Output:
    """The tokens and log-probabilities of a chat's or a completion's choice."""
    found = choice["logprobs"]
    if "content" in found:
        logprobs = [each["logprob"] for each in found["content"]]
        tops = [[top["logprob"] for top in each["top_logprobs"]] for each in found["content"]]
    else:
        logprobs = found["token_logprobs"]
        tops = [[*each.values()] for each in found["top_logprobs"]]
    gaps = [max(top) - min(sorted(top)[-2:]) for top in tops]
    return Output(choice["token_ids"], logprobs, gaps)


def join_choices(events: Iterable[str]) -> dict[str, Any]:
    """The choice that the lines of a stream add up to."""
    tokens: list[int] = []
    logprobs: dict[str, list[Any]] = {}
    for line in events:
        if not line.startswith("data: {"):
            continue
        for choice in json.loads(line.removeprefix("data: ")).get("choices", []):
            tokens += choice.get("token_ids") or []
            for name, values in (choice.get("logprobs") or {}).items():
                logprobs.setdefault(name, []).extend(values or [])
    return {"token_ids": tokens, "logprobs": logprobs}


def compare(reference: Output, other: Output) -> Comparison:
    """Where they part, and by how much the log-probabilities before that differ."""
    pairs = zip(reference.tokens, other.tokens, strict=False)
    length = max(len(reference.tokens), len(other.tokens))
    common = next((n for n, (a, b) in enumerate(pairs) if a != b), None)
    if common is None:
        common = min(len(reference.tokens), len(other.tokens))
    both = zip(reference.logprobs[:common], other.logprobs[:common], strict=True)
    shift = max((abs(a - b) for a, b in both), default=0.0)
    gaps = reference.gaps[common:] or [math.inf]
    return Comparison(common, length, shift, gaps[0] if common < length else 0.0)
