"""The OpenAPI description of the gateway's paths. Pure; built from the table of routes.

Used by handlers.py and by the generator of docs/reference. Bodies are described at their first
level only, because the gateway reads no further and relays all other fields that engines accept.
"""

from collections.abc import Mapping
from typing import Any

from cleave import distribution
from cleave.gateway.app import routes
from cleave.gateway.app.routes import EngineRoute, OwnRoute
from cleave.gateway.http.error_dialects import ANTHROPIC_PATHS, COUNT_TOKENS_PATH

Schema = dict[str, Any]

_DESCRIPTION = (
    "Bodies are described at their first level; every other field that the model's engine accepts "
    "may be used. kv_transfer_params is removed from requests and responses."
)
_TEXT: Schema = {"type": "string"}
MODEL_NAME: Schema = _TEXT
_MODEL: Schema = {"$ref": "#/components/schemas/ModelName"}
_FLAG: Schema = {"type": ["boolean", "null"]}
_COUNT: Schema = {"type": ["integer", "null"], "minimum": 1}
_OBJECT: Schema = {"type": "object"}

_FIELDS: Mapping[str, Schema] = {
    "documents": {"type": ["array", "object"]},
    "input": {"type": ["string", "array", "object"]},
    "instructions": {"type": ["string", "null"]},
    "max_completion_tokens": _COUNT,
    "max_output_tokens": _COUNT,
    "max_tokens": _COUNT,
    "messages": {"type": "array", "items": _OBJECT, "minItems": 1},
    "min_tokens": {"type": ["integer", "null"], "minimum": 0},
    "model": {"anyOf": [_MODEL, {"type": "null"}]},
    "n": _COUNT,
    "output_config": {"type": ["object", "null"]},
    "prompt": {
        "description": "A text, its token ids, or a list of either.",
        "type": ["string", "array"],
    },
    "query": {"type": ["string", "object"]},
    "reasoning": {"type": ["object", "null"]},
    "response_format": {"type": ["object", "null"]},
    "seed": {"type": ["integer", "null"]},
    "stop": {"type": ["string", "array", "null"]},
    "stop_sequences": {"type": ["array", "null"], "items": _TEXT},
    "stream": _FLAG,
    "stream_options": {"type": ["object", "null"]},
    "system": {"type": ["string", "array", "null"]},
    "temperature": {"type": ["number", "null"], "minimum": 0},
    "thinking": {"type": ["object", "null"]},
    "text": {"type": ["object", "null"]},
    "text_1": {"type": ["string", "array", "object"]},
    "text_2": {"type": ["string", "array", "object"]},
    "tokens": {"type": "array", "items": {"type": "integer"}},
    "tool_choice": {"type": ["string", "object", "null"]},
    "tools": {"type": ["array", "null"], "items": _OBJECT},
}

_STATUS_DESCRIPTIONS = {
    400: "The request is invalid.",
    401: "An API key is required, and the request has no valid one.",
    403: "There are several tenants: metrics are on the internal port only.",
    404: "No instance serves this model.",
    408: "The request was not received in time.",
    413: "The body is larger than --max-body.",
    415: "The body has a Content-Encoding, such as gzip.",
    417: "An expectation other than 100-continue.",
    429: "Too many requests wait, a limit of the tenant is reached, or "
    "the TTFT target would be missed; Retry-After says when to try again.",
    431: "The head is longer than 64 KiB.",
    501: "The model's engine does not offer this path.",
    502: "Engines failed, also after retries.",
    503: "No instance can take the request now; the message says why.",
    504: "The engine took too long.",
}
_COMMON_STATUSES = (400, 408, 413, 415, 417, 431)
_ENGINE_STATUSES = (401, 404, 429, 502, 503, 504)
_RETRYABLE_STATUSES = (429, 503)
_HEADERS: Schema = {"x-request-id": {"$ref": "#/components/headers/RequestId"}}
_SECURITY: list[Schema] = [{}, {"key": []}]


def build_openapi() -> Schema:
    """The document as JSON values."""
    paths = {}
    for route in (*routes.COMPLETION_ROUTES, *routes.TRANSLATED_ROUTES, *routes.OTHER_ROUTES):
        paths[route.path.decode()] = {"post": _describe_engine_operation(route)}
    for own in routes.OWN_ROUTES:
        paths[own.path.decode()] = {"get": _describe_own_operation(own)}
    paths[f"{routes.MODEL_PREFIX.decode()}{{model}}"] = {"get": _describe_get_model()}
    version = distribution.get_version()
    return {
        "openapi": "3.1.0",
        "info": {"title": "Cleave gateway", "version": version, "description": _DESCRIPTION},
        "paths": paths,
        "components": {
            "headers": {
                "RequestId": {
                    "description": "The client's own, if it sent a valid one.",
                    "required": True,
                    "schema": {"type": "string", "pattern": "^[A-Za-z0-9._:/+=@-]{1,128}$"},
                },
                "Instance": {"description": "The instance of this phase.", "schema": _TEXT},
                "RetryAfter": {"description": "Seconds.", "schema": {"type": "integer"}},
            },
            "schemas": {
                "AnthropicError": _build_anthropic_error_schema(),
                "Error": _build_error_schema(),
                "Model": _build_model_schema(),
                "ModelName": MODEL_NAME,
            },
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def describe_server() -> Schema:
    """The page at `/`: what answers here, for people who open the address in a browser."""
    known = (
        *routes.COMPLETION_ROUTES, *routes.TRANSLATED_ROUTES, *routes.OTHER_ROUTES,
        *routes.OWN_ROUTES,
    )  # fmt: skip
    return {
        "name": "Cleave gateway",
        "version": distribution.get_version(),
        "endpoints": [route.path.decode() for route in known if route.path != routes.ROOT_PATH],
    }


def _describe_engine_operation(route: EngineRoute) -> Schema:
    names = (*route.required, *route.optional)
    body = _describe_object({name: _FIELDS[name] for name in names}, route.required)
    content: Schema = {"application/json": {"schema": _OBJECT}}
    if "stream" in names:
        # Without a schema: OpenAPI 3.1 cannot describe events, and they are not strings.
        content["text/event-stream"] = {}
    instance = {"$ref": "#/components/headers/Instance"}
    instances = {"x-cleave-prefill": instance, "x-cleave-decode": instance}
    may_lack = route in routes.OTHER_ROUTES or route.path == COUNT_TOKENS_PATH
    statuses = _ENGINE_STATUSES + ((501,) if may_lack else ())
    error = "AnthropicError" if route.path in ANTHROPIC_PATHS else "Error"
    return {
        "summary": route.summary,
        "operationId": _make_operation_id("post", route.path.decode()),
        "security": _SECURITY,
        "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
        "responses": _describe_responses(
            "The engine's response.", content, statuses, instances, error
        ),
    }


def _describe_own_operation(route: OwnRoute) -> Schema:
    statuses: tuple[int, ...] = (401,) if route.needs_key else ()
    if route.path == routes.METRICS_PATH:
        statuses += (403,)
        content: Schema = {"text/plain": {"schema": _TEXT}}
    else:
        content = {"application/json": {"schema": _OWN_RESPONSES[route.path]}}
    responses = _describe_responses("The response.", content, statuses)
    if route.path == routes.HEALTH_PATH:
        responses["503"] = responses["200"] | {"description": "Nothing can be served."}
    operation: Schema = {
        "summary": route.summary,
        "operationId": _make_operation_id("get", route.path.decode()),
        "responses": responses,
    }
    return operation | ({"security": _SECURITY} if route.needs_key else {})


def _describe_get_model() -> Schema:
    name = {"name": "model", "in": "path", "required": True, "schema": _MODEL}
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/Model"}}}
    return {
        "summary": "Describe a model",
        "operationId": "getModel",
        "parameters": [name],
        "security": _SECURITY,
        "responses": _describe_responses("The response.", content, (401, 404)),
    }


def _describe_responses(
    text: str,
    content: Schema,
    statuses: tuple[int, ...],
    headers: Schema | None = None,
    error_schema: str = "Error",
) -> Schema:
    """The responses by status; all errors of a path have the same form."""
    headers = _HEADERS | (headers or {})
    responses: Schema = {"200": {"description": text, "headers": headers, "content": content}}
    error = {"application/json": {"schema": {"$ref": f"#/components/schemas/{error_schema}"}}}
    for status in sorted({*_COMMON_STATUSES, *statuses}):
        retry_after = {"retry-after": {"$ref": "#/components/headers/RetryAfter"}}
        responses[f"{status}"] = {
            "description": _STATUS_DESCRIPTIONS[status],
            "headers": _HEADERS | (retry_after if status in _RETRYABLE_STATUSES else {}),
            "content": error,
        }
    return responses


def _make_operation_id(method: str, path: str) -> str:
    """`postV1ChatCompletions` for POST /v1/chat/completions."""
    words = path.replace("_", "/").replace(".", "/").split("/")
    return method + "".join(map(str.capitalize, words))


def _build_error_schema() -> Schema:
    text: Schema = {"type": ["string", "null"]}
    fields = {"message": _TEXT, "type": _TEXT, "param": text, "code": text}
    return _describe_object({"error": _describe_object(fields, tuple(fields))}, ("error",))


def _build_anthropic_error_schema() -> Schema:
    fields = {"message": _TEXT, "type": _TEXT}
    error = _describe_object(fields, tuple(fields))
    return _describe_object({"type": {"const": "error"}, "error": error}, ("type", "error"))


def _build_model_schema() -> Schema:
    fields = {
        "id": _TEXT,
        "object": {"const": "model"},
        "created": {
            "type": "integer",
            "description": "Unix time when this gateway first found an instance that serves it.",
        },
        "owned_by": _TEXT,
        "parent": {"type": ["string", "null"], "description": "Of a LoRA adapter: its model."},
        "max_model_len": {"type": ["integer", "null"]},
    }
    return _describe_object(fields, tuple(fields))


def _describe_object(fields: Schema, required: tuple[str, ...]) -> Schema:
    return _OBJECT | {"properties": fields, "required": list(required)}


_MODELS: Schema = {"type": "array", "items": {"$ref": "#/components/schemas/Model"}}
_HEALTH: Schema = {
    "status": {"enum": ["ok", "unavailable", "draining"]},
    "reasons": {"type": "array", "items": _TEXT},
    "requests_in_flight": {"type": "integer", "minimum": 0},
    "models": _OBJECT,
}
_ROOT: Schema = {
    "name": _TEXT,
    "version": _TEXT,
    "endpoints": {"type": "array", "items": _TEXT},
}
_OWN_RESPONSES: Mapping[bytes, Schema] = {
    routes.MODELS_PATH: _describe_object(
        {"object": {"const": "list"}, "data": _MODELS}, ("object", "data")
    ),
    # If the gateway has keys, the other fields are sent only with a valid key.
    routes.HEALTH_PATH: _describe_object(_HEALTH, ("status",)),
    routes.ROOT_PATH: _describe_object(_ROOT, tuple(_ROOT)),
    routes.OPENAPI_PATH: _OBJECT | {"required": ["openapi", "info", "paths"]},
}
