"""Requests to a producer: every failure is a RefusedError."""

import socket
from typing import TypeVar

from cleave_worker.transfer import protocol
from cleave_worker.transfer.handoff import RefusalReason, RefusedError

RESPONSE_TIMEOUT_S = 20.0
"""Includes the time that the server waits for its engine to report a prefill, see `KvServer`."""

ResponseT = TypeVar(
    "ResponseT",
    protocol.RanksResponse,
    protocol.HandshakeResponse,
    protocol.RendezvousResponse,
    protocol.ProgressUpdate,
    protocol.PullResponse,
    protocol.ReleaseBlocksResponse,
)


def connect(address: tuple[str, int], seconds: float) -> protocol.FramedConnection:
    """Connect without a handshake. Raises RefusedError."""
    try:
        return protocol.FramedConnection(socket.create_connection(address, seconds))
    except (OSError, UnicodeError, OverflowError) as error:
        raise RefusedError(
            RefusalReason.PEER_LOST, f"{address[0]}:{address[1]}: {error}"
        ) from error


def send_request(
    connection: protocol.FramedConnection,
    request: protocol.Message,
    response_type: type[ResponseT],
    seconds: float,
) -> ResponseT:
    """Send a request and return the response, which must be of type `kind`. Raises RefusedError."""
    try:
        connection.send(request, seconds)
        response = connection.receive(seconds)
    except TimeoutError as error:
        raise RefusedError(RefusalReason.TIME_OUT, str(error)) from error
    except protocol.ProtocolError as error:
        raise RefusedError(RefusalReason.PEER_LOST, str(error)) from error
    if isinstance(response, protocol.ErrorResponse):
        raise RefusedError(response.reason, response.text)
    if not isinstance(response, response_type):
        raise RefusedError(
            RefusalReason.PEER_LOST,
            f"{type(response).__name__} in place of {response_type.__name__}",
        )
    return response
