"""Questions to an owner, as whoever reads asks them: every end but an answer is a RefusedError."""

import socket
from typing import TypeVar

from cleave_worker.transfer import wire
from cleave_worker.transfer.identity import Reason, RefusedError

ANSWER_S = 20.0
"""The owner may first wait for its engine's word, see owner.py."""

Answer = TypeVar(
    "Answer", wire.Located, wire.Welcome, wire.Met, wire.News, wire.Grant, wire.Released
)


def dial(address: tuple[str, int], seconds: float) -> wire.Wire:
    """A connection that is not greeted yet. Raises RefusedError."""
    try:
        return wire.Wire(socket.create_connection(address, seconds))
    except (OSError, UnicodeError, OverflowError) as error:
        raise RefusedError(Reason.LOST, f"{address[0]}:{address[1]}: {error}") from error


def exchange(
    connection: wire.Wire, question: wire.Message, kind: type[Answer], seconds: float
) -> Answer:
    """The answer to a question, which must be of this kind. Raises RefusedError."""
    try:
        connection.send(question, seconds)
        message = connection.receive(seconds)
    except TimeoutError as error:
        raise RefusedError(Reason.TIME_OUT, str(error)) from error
    except wire.WireError as error:
        raise RefusedError(Reason.LOST, str(error)) from error
    if isinstance(message, wire.Refusal):
        raise RefusedError(message.reason, message.text)
    if not isinstance(message, kind):
        raise RefusedError(Reason.LOST, f"{type(message).__name__} in place of {kind.__name__}")
    return message
