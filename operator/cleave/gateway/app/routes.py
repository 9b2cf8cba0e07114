"""The paths for clients: one table that both routes requests and describes them.

Read by handlers.py, which handles the requests, and by openapi.py, which documents them.
"""

from dataclasses import dataclass

from cleave.gateway.http.error_dialects import COUNT_TOKENS_PATH, MESSAGES_PATH


@dataclass(frozen=True, slots=True)
class EngineRoute:
    """A POST path that engines handle, if they offer it."""

    path: bytes
    summary: str
    required: tuple[str, ...] = ()
    """Fields of the body's first level that a request must have."""
    optional: tuple[str, ...] = ()
    """The most common other fields."""


@dataclass(frozen=True, slots=True)
class OwnRoute:
    """A GET path that the gateway handles itself."""

    path: bytes
    summary: str
    needs_key: bool = False
    """Whether it requires an API key, if the gateway has keys."""


ROOT_PATH = b"/"
CHAT_PATH = b"/v1/chat/completions"
COMPLETIONS_PATH = b"/v1/completions"
MODELS_PATH = b"/v1/models"
MODEL_PREFIX = b"/v1/models/"
"""Prefix of the path of one model."""
HEALTH_PATH = b"/health"
METRICS_PATH = b"/metrics"
OPENAPI_PATH = b"/openapi.json"
FLEET_PATH = b"/fleet"
LIVEZ_PATH = b"/livez"

_SAMPLING_FIELDS = (
    "stream", "stream_options", "max_tokens", "min_tokens", "n", "temperature", "seed", "stop",
    "response_format",
)  # fmt: skip
_CHAT_FIELDS = ("max_completion_tokens", "tools", "tool_choice")
_RERANK_FIELDS = ("query", "documents")
_SCORE_FIELDS = ("text_1", "text_2")

COMPLETION_ROUTES = (
    EngineRoute(
        CHAT_PATH, "Complete a chat", ("messages",), ("model", *_SAMPLING_FIELDS, *_CHAT_FIELDS)
    ),
    EngineRoute(COMPLETIONS_PATH, "Complete a text", ("prompt",), ("model", *_SAMPLING_FIELDS)),
)
"""Requests that can be split over two instances and continued on another when an engine is lost."""

TRANSLATED_ROUTES = (
    EngineRoute(
        b"/v1/responses",
        "Create a response; nothing is stored",
        ("input",),
        (
            "model",
            "instructions",
            "max_output_tokens",
            "reasoning",
            "stream",
            "temperature",
            "text",
            "tools",
        ),
    ),
    EngineRoute(
        MESSAGES_PATH,
        "Complete a chat, in Anthropic's form",
        ("model", "messages", "max_tokens"),
        ("system", "stream", "stop_sequences", "temperature", "thinking", "tools"),
    ),
    EngineRoute(
        COUNT_TOKENS_PATH,
        "Count a chat's tokens, in Anthropic's form",
        ("model", "messages"),
        ("output_config", "system", "thinking", "tools"),
    ),
)
"""Requests that are translated: engines get completions of chats, or /tokenize."""

OTHER_ROUTES = (
    EngineRoute(b"/v1/embeddings", "Embed texts", ("input",), ("model",)),
    EngineRoute(b"/pooling", "Run a pooling model on texts", ("input",), ("model",)),
    EngineRoute(b"/classify", "Classify texts", ("input",), ("model",)),
    EngineRoute(b"/score", "Score pairs of texts", _SCORE_FIELDS, ("model",)),
    EngineRoute(b"/v1/score", "Score pairs of texts", _SCORE_FIELDS, ("model",)),
    EngineRoute(b"/rerank", "Rank documents by a query", _RERANK_FIELDS, ("model",)),
    EngineRoute(b"/v1/rerank", "Rank documents by a query", _RERANK_FIELDS, ("model",)),
    EngineRoute(b"/v2/rerank", "Rank documents by a query", _RERANK_FIELDS, ("model",)),
    EngineRoute(b"/tokenize", "Tokenize a text or a chat", (), ("model", "prompt")),
    EngineRoute(b"/detokenize", "Convert tokens to a text", ("tokens",), ("model",)),
)
"""Further paths that engines may offer; one instance handles the request."""

OWN_ROUTES = (
    OwnRoute(ROOT_PATH, "Name, version and paths of this server"),
    OwnRoute(MODELS_PATH, "List the models", needs_key=True),
    OwnRoute(HEALTH_PATH, "Whether any model can be served; with a key, which ones, and why not"),
    OwnRoute(METRICS_PATH, "Metrics, for Prometheus", needs_key=True),
    OwnRoute(OPENAPI_PATH, "This description"),
)
"""The paths below MODEL, one per model, are not listed."""

INTERNAL_ROUTES = (
    OwnRoute(HEALTH_PATH, "Which models can be served, and why not"),
    OwnRoute(METRICS_PATH, "Metrics, for Prometheus"),
    OwnRoute(FLEET_PATH, "Every instance and its load"),
    OwnRoute(LIVEZ_PATH, "Whether this process works; cheap, for liveness probes"),
)
"""Paths of the internal port, for the operator and scrapers."""
