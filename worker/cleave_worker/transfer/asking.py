"""Requests to a producer: every failure is a RefusedError."""

import socket
from typing import TypeVar

from cleave_worker.transfer import protocol
from cleave_worker.transfer.handoff import Reason, RefusedError

ANSWER_S = 20.0
"""Includes the time that the server waits for its engine to report a prefill, see `Owner`."""

Answer = TypeVar(
    "Answer",
    protocol.Located,
    protocol.Welcome,
    protocol.Met,
    protocol.News,
    protocol.Grant,
    protocol.Released,
)


def dial(address: tuple[str, int], seconds: float) -> protocol.Wire:
    """Connect without a handshake. Raises RefusedError."""
    try:
        return protocol.Wire(socket.create_connection(address, seconds))
    except (OSError, UnicodeError, OverflowError) as error:
        raise RefusedError(Reason.LOST, f"{address[0]}:{address[1]}: {error}") from error


def exchange(
    connection: protocol.Wire,
    request: protocol.Message,
    response_type: type[Answer],
    seconds: float,
) -> Answer:
    """Send a request and return the response, which must be of type `kind`. Raises RefusedError."""
    try:
        connection.send(request, seconds)
        response = connection.receive(seconds)
    except TimeoutError as error:
        raise RefusedError(Reason.TIME_OUT, str(error)) from error
    except protocol.WireError as error:
        raise RefusedError(Reason.LOST, str(error)) from error
    if isinstance(response, protocol.Refusal):
        raise RefusedError(response.reason, response.text)
    if not isinstance(response, response_type):
        raise RefusedError(
            Reason.LOST, f"{type(response).__name__} in place of {response_type.__name__}"
        )
    return response
