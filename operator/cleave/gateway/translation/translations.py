"""The paths whose requests are translated, and how. Used by the handlers. Pure."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec

from cleave.gateway.http.completion_request import (
    Body,
    CompletionRequest,
    parse_completion,
    parse_engine_request,
)
from cleave.gateway.http.error_dialects import COUNT_TOKENS_PATH, MESSAGES_PATH
from cleave.gateway.translation.answer import Answer
from cleave.gateway.translation.messages_answer import MessagesAnswer, TokenCountAnswer
from cleave.gateway.translation.messages_request import (
    convert_count_request,
    convert_messages_request,
)
from cleave.gateway.translation.request_fields import Chat, read_request
from cleave.gateway.translation.responses_answer import ResponsesAnswer
from cleave.gateway.translation.responses_request import convert_responses_request
from cleave.time_slices import Steps

CHAT_PATH = b"/v1/chat/completions"
RESPONSES_PATH = b"/v1/responses"
TOKENIZE_PATH = b"/tokenize"


@dataclass(frozen=True, slots=True)
class Translation:
    """A translated request."""

    path: bytes
    """Of the engine."""
    completion: CompletionRequest
    answer: Answer
    """Translates the engine's response."""


def _convert_messages(body: Body) -> Steps[Translation]:
    fields = yield from read_request(body)
    return (yield from _build_chat(convert_messages_request(fields), MessagesAnswer()))


def _convert_responses(body: Body) -> Steps[Translation]:
    fields = yield from read_request(body)
    return (yield from _build_chat(convert_responses_request(fields), ResponsesAnswer(fields)))


def _convert_count(body: Body) -> Steps[Translation]:
    fields = yield from read_request(body)
    body = msgspec.json.encode(convert_count_request(fields))
    completion = yield from parse_engine_request(TOKENIZE_PATH, body, "")
    return Translation(TOKENIZE_PATH, completion, TokenCountAnswer())


def _build_chat(chat: Chat, answer: Answer) -> Steps[Translation]:
    # Parsed like a client's own request, so that the same rules hold.
    completion = yield from parse_completion(CHAT_PATH, msgspec.json.encode(chat))
    return Translation(CHAT_PATH, completion, answer)


TRANSLATORS: Mapping[bytes, Callable[[Body], Steps[Translation]]] = {
    RESPONSES_PATH: _convert_responses,
    MESSAGES_PATH: _convert_messages,
    COUNT_TOKENS_PATH: _convert_count,
}
"""By path. They raise GatewayError (400)."""
