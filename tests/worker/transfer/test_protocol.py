"""Frames of earlier and later versions of an engine: read, or a ProtocolError."""

import enum
import socket
import types
import typing
from dataclasses import is_dataclass
from typing import Any

import msgspec
import pytest

from cleave_worker.transfer import protocol
from cleave_worker.transfer.protocol import FramedConnection, Message, ProtocolError

MESSAGES = Message.__subclasses__()


def make(kind: Any) -> Any:
    """Any value of a type."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is types.UnionType or origin is typing.Union:
        return make(args[0])
    if origin is tuple:
        return [make(each) for each in args if each is not ...]
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return next(iter(kind)).value
    if isinstance(kind, type) and (issubclass(kind, msgspec.Struct) or is_dataclass(kind)):
        return {name: make(each) for name, each in typing.get_type_hints(kind).items()}
    return {str: "a", int: 1, bool: True, float: 1.0, bytes: b"a"}[kind]


def make_frame(kind: type[Message]) -> dict[str, Any]:
    return {"type": kind.__name__, **make(kind)}


def add_fields(value: Any) -> Any:
    """With an unknown field in each object."""
    if isinstance(value, list):
        return [add_fields(each) for each in value]
    if not isinstance(value, dict):
        return value
    return {**{name: add_fields(each) for name, each in value.items()}, "later": [1, {"a": None}]}


def receive(frame: object) -> Message:
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    with near, far:
        body = msgspec.msgpack.encode(frame)
        near.sendall(len(body).to_bytes(4, "big") + body)
        return FramedConnection(far).receive(5)


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
def test_unknown_fields_are_skipped(kind: type[Message]) -> None:
    frame = make_frame(kind)
    read = receive(frame)
    assert type(read) is kind
    assert receive(add_fields(frame)) == read


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
def test_absent_fields_have_defaults_or_end_the_connection(kind: type[Message]) -> None:
    for field in msgspec.structs.fields(kind):
        frame = {name: each for name, each in make_frame(kind).items() if name != field.name}
        if field.required:
            with pytest.raises(ProtocolError):
                receive(frame)
        else:
            assert getattr(receive(frame), field.name) == field.default


@pytest.mark.parametrize(
    "frame",
    [
        {"type": "LaterRequest", "boot_id": "a"},
        {"type": "RendezvousRequest", "transport": "pigeon"},
        {"type": "ErrorResponse", "reason": "someday", "text": ""},
        {},
        [],
        7,
    ],
)
def test_unknown_messages_and_values_end_the_connection(frame: object) -> None:
    with pytest.raises(ProtocolError):
        receive(frame)


def test_every_message_can_be_decoded() -> None:
    assert set(MESSAGES) == set(typing.get_args(protocol._decoder.type))


def test_a_connection_is_lost_when_the_peer_has_closed_it() -> None:
    near, far = socket.socketpair(socket.AF_UNIX)
    # As protocol.connect makes it, but for an option of TCP.
    connection = FramedConnection.__new__(FramedConnection)
    connection._socket = near
    near.settimeout(60)
    assert not connection.is_lost()
    far.sendall(b"a")
    assert not connection.is_lost()
    far.close()
    assert near.recv(1) == b"a"
    assert connection.is_lost()
    near.close()
    assert connection.is_lost()
