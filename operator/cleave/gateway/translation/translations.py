"""The paths whose requests are translated, and how. Used by the handlers. Pure."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec

from cleave.gateway.http.completion_request import (
    Body,
    CompletionRequest,
    Fields,
    build_completion,
    build_engine_request,
    read_model,
)
from cleave.gateway.http.error_dialects import COUNT_TOKENS_PATH, MESSAGES_PATH
from cleave.gateway.http.errors import build_bad_request
from cleave.gateway.translation.answer import Answer
from cleave.gateway.translation.messages_answer import MessagesAnswer, TokenCountAnswer
from cleave.gateway.translation.messages_request import (
    convert_count_request,
    convert_messages_request,
)
from cleave.gateway.translation.request_fields import ModelFacts, SystemText, read_request
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
    system: SystemText


Translator = Callable[[Body, ModelFacts], Steps[Translation]]


def _convert_messages(body: Body, facts: ModelFacts) -> Steps[Translation]:
    fields = yield from read_request(body)
    system = SystemText(fields, facts)
    chat = yield from convert_messages_request(fields, system, facts)
    return (yield from _build_chat(chat, MessagesAnswer(), system))


def _convert_responses(body: Body, facts: ModelFacts) -> Steps[Translation]:
    fields = yield from read_request(body)
    read_model(fields, facts.find_only)
    system = SystemText(fields, facts)
    chat, names = yield from convert_responses_request(fields, system)
    return (yield from _build_chat(chat, ResponsesAnswer(fields, names), system))


def _convert_count(body: Body, facts: ModelFacts) -> Steps[Translation]:
    fields = yield from read_request(body)
    system = SystemText(fields, facts)
    request = yield from convert_count_request(fields, system, facts)
    completion = yield from build_engine_request(TOKENIZE_PATH, request)
    return Translation(TOKENIZE_PATH, completion, TokenCountAnswer(), system)


def _build_chat(chat: Fields, answer: Answer, system: SystemText) -> Steps[Translation]:
    completion = yield from build_completion(CHAT_PATH, chat)
    return Translation(CHAT_PATH, completion, answer, system)


def _refuse_faults(convert: Translator) -> Translator:
    """The translation, which refuses with 400 what is malformed inside of a large body."""

    def convert_or_refuse(body: Body, facts: ModelFacts) -> Steps[Translation]:
        try:
            return (yield from convert(body, facts))
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise build_bad_request(f"the body is not a JSON object: {error}") from None

    return convert_or_refuse


TRANSLATORS: Mapping[bytes, Translator] = {
    RESPONSES_PATH: _refuse_faults(_convert_responses),
    MESSAGES_PATH: _refuse_faults(_convert_messages),
    COUNT_TOKENS_PATH: _refuse_faults(_convert_count),
}
"""By path. They raise GatewayError (400)."""
