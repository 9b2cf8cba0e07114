"""The paths whose requests are translated, and how. Used by the handlers. Pure."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec

from cleave.gateway.http.completion_request import (
    CompletionRequest,
    Fields,
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
from cleave.gateway.translation.request_fields import Chat
from cleave.gateway.translation.responses_answer import ResponsesAnswer
from cleave.gateway.translation.responses_request import convert_responses_request

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


def _convert_messages(fields: Fields) -> Translation:
    return _build_chat(convert_messages_request(fields), MessagesAnswer())


def _convert_responses(fields: Fields) -> Translation:
    return _build_chat(convert_responses_request(fields), ResponsesAnswer(fields))


def _convert_count(fields: Fields) -> Translation:
    body = msgspec.json.encode(convert_count_request(fields))
    return Translation(TOKENIZE_PATH, parse_engine_request(body, ""), TokenCountAnswer())


def _build_chat(chat: Chat, answer: Answer) -> Translation:
    # Parsed like a client's own request, so that the same rules hold.
    return Translation(CHAT_PATH, parse_completion(msgspec.json.encode(chat)), answer)


TRANSLATORS: Mapping[bytes, Callable[[Fields], Translation]] = {
    RESPONSES_PATH: _convert_responses,
    MESSAGES_PATH: _convert_messages,
    COUNT_TOKENS_PATH: _convert_count,
}
"""By path. They raise GatewayError (400)."""
