"""What clients ask while faults come: every kind of request that recovers in a way of its own."""

import random
from dataclasses import dataclass
from typing import Any

from e2e.chaos.expected_output import ADAPTERS, CHAT, COMPLETIONS, Expected, expect

WORDS = ("alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa")
KINDS = (
    "plain",
    "plain",
    "plain",
    "seeded",
    "choices",
    "stop",
    "tools",
    "structured",
    "logprobs",
    "sampled",
    "large",
)
PADDING = 32 << 10
"""Bytes of a large request beyond its prompt: enough to count in the gateway's memory."""
SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
TOOLS = [{"type": "function", "function": {"name": "f"}}]


@dataclass(frozen=True)
class Ask:
    """One request."""

    name: str
    """For people: which one, and of what kind."""
    path: str
    body: dict[str, Any]
    resumable: bool
    """A stream of it can go on elsewhere after any failure of its engine."""
    expected: Expected

    @property
    def stream(self) -> bool:
        return bool(self.body.get("stream"))

    @property
    def large(self) -> bool:
        """Whether the gateway's memory for bodies limits it."""
        return "metadata" in self.body

    @property
    def counts(self) -> bool:
        """Whether the answer must state its usage."""
        return not self.stream or "stream_options" in self.body


def draw(rng: random.Random, name: str, model: str) -> Ask:
    """A request of some kind to an emulated fleet."""
    kind, path = rng.choice(KINDS), rng.choice((CHAT, COMPLETIONS))
    words = " ".join(rng.choices(WORDS, k=rng.choice((4, 30, 120, 400))))
    prompt = f"{name} {words}"
    requested_model = rng.choice((model, model, *ADAPTERS))
    body: dict[str, Any] = {
        "model": requested_model,
        "max_tokens": rng.choice((1, 4, 20, 60, 120)),
    }
    body |= (
        {"messages": [{"role": "user", "content": prompt}]} if path == CHAT else {"prompt": prompt}
    )
    if rng.random() < 0.8:
        body["ignore_eos"] = True
    if rng.random() < 0.7:
        body["stream"] = True
        if rng.random() < 0.5:
            body["stream_options"] = {"include_usage": True}
    body |= specialize(kind, path, rng, expect(path, body, model))
    return Ask(f"{name} {kind}", path, body, kind != "sampled", expect(path, body, model))


def specialize(kind: str, path: str, rng: random.Random, plain: Expected) -> dict[str, Any]:
    """The fields that make a request one of its kind; `plain`: its answer without them."""
    match kind:
        case "seeded":
            return {"temperature": 0.8, "seed": rng.randrange(1_000)}
        case "choices":
            return {"temperature": 0, "n": rng.choice((2, 3))}
        case "sampled":
            return {"temperature": 0.8, "n": 2}
        case "tools":
            return {"temperature": 0, "tools": TOOLS} if path == CHAT else {"temperature": 0}
        case "structured":
            return {"temperature": 0, "response_format": SCHEMA}
        case "logprobs":
            more = {"logprobs": True, "top_logprobs": 1} if path == CHAT else {"logprobs": 1}
            return {"temperature": 0} | more
        case "large":
            return {"temperature": 0, "metadata": {"padding": "x" * PADDING}}
        case "stop":
            # Some word of the answer, so that it ends there, perhaps cut out of a held back text.
            words = plain.texts[0].split() or ["never"]
            return {"temperature": 0, "stop": [rng.choice(words)]}
    return {"temperature": 0.7} if rng.random() < 0.5 else {}
