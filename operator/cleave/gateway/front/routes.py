"""The paths that clients may ask for: one table, by which requests are routed and described.

Read by pages.py, which answers, and by openapi.py, which tells clients what there is.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineRoute:
    """A path that engines answer, or may; POST."""

    path: bytes
    summary: str
    required: tuple[str, ...] = ()
    """Fields of a body's first level without which it cannot be answered."""
    optional: tuple[str, ...] = ()
    """The more usual of the others."""


@dataclass(frozen=True, slots=True)
class OwnRoute:
    """A path that the gateway answers by itself; GET."""

    path: bytes
    summary: str
    needs_key: bool = False
    """Where keys are asked for."""


CHAT = b"/v1/chat/completions"
COMPLETION = b"/v1/completions"
MODELS = b"/v1/models"
MODEL = b"/v1/models/"
"""What a model's name follows."""
HEALTH = b"/health"
METRICS = b"/metrics"
OPENAPI = b"/openapi.json"
FLEET = b"/fleet"
LIVEZ = b"/livez"

_SAMPLING = (
    "stream",
    "stream_options",
    "max_tokens",
    "min_tokens",
    "n",
    "temperature",
    "seed",
    "stop",
    "response_format",
)
_TOOLS = ("max_completion_tokens", "tools", "tool_choice")
_RANKED = ("query", "documents")
_SCORED = ("text_1", "text_2")

COMPLETIONS = (
    EngineRoute(CHAT, "Answer a chat", ("model", "messages"), _SAMPLING + _TOOLS),
    EngineRoute(COMPLETION, "Go on with a text", ("model", "prompt"), _SAMPLING),
)
"""What two instances may share, and what goes on elsewhere when an engine is lost."""

OTHERS = (
    EngineRoute(
        b"/v1/responses", "Make a response", ("input",), ("model", "stream", "max_output_tokens")
    ),
    EngineRoute(
        b"/v1/messages",
        "Answer a chat, in Anthropic's form",
        ("messages", "max_tokens"),
        ("model", "system", "stream"),
    ),
    EngineRoute(
        b"/v1/messages/count_tokens", "Count a chat's tokens", ("messages",), ("model", "system")
    ),
    EngineRoute(b"/v1/embeddings", "Turn texts into vectors", ("input",), ("model",)),
    EngineRoute(b"/pooling", "What a pooling model makes of texts", ("input",), ("model",)),
    EngineRoute(b"/classify", "Tell the classes of texts", ("input",), ("model",)),
    EngineRoute(b"/score", "Tell how texts match", _SCORED, ("model",)),
    EngineRoute(b"/v1/score", "Tell how texts match", _SCORED, ("model",)),
    EngineRoute(b"/rerank", "Order documents by a query", _RANKED, ("model",)),
    EngineRoute(b"/v1/rerank", "Order documents by a query", _RANKED, ("model",)),
    EngineRoute(b"/v2/rerank", "Order documents by a query", _RANKED, ("model",)),
    EngineRoute(b"/tokenize", "Turn a text or a chat into tokens", (), ("model", "prompt")),
    EngineRoute(b"/detokenize", "Turn tokens into a text", ("tokens",), ("model",)),
)
"""What engines may offer beside completions; one instance answers it."""

OWN = (
    OwnRoute(MODELS, "List the models", needs_key=True),
    OwnRoute(HEALTH, "Tell whether anything can be served, and with a key what, and why not"),
    OwnRoute(METRICS, "Metrics, for Prometheus", needs_key=True),
    OwnRoute(OPENAPI, "This description"),
)
"""And below MODEL each model."""

INTERNAL = (
    OwnRoute(HEALTH, "Tell what can be served, and why not"),
    OwnRoute(METRICS, "Metrics, for Prometheus"),
    OwnRoute(FLEET, "Every instance, and what it carries"),
    OwnRoute(LIVEZ, "Whether this process runs; for liveness probes, as it costs nothing"),
)
"""Of the port that the operator and scrapers use."""
