"""Names of protobuf enum values, for logs, status and error messages.

Enums of proto3 are open: an agent of a newer version may send a role or a state that this version
does not know, which must not be an error.
"""

from typing import Protocol, TypeVar

Number = TypeVar("Number", bound=int, contravariant=True)


class ProtobufEnum(Protocol[Number]):
    """An enum as protobuf generates it."""

    def Name(self, number: Number) -> str:  # noqa: N802
        """The name of a number. Raises ValueError for unknown numbers."""


def get_enum_name(enum: ProtobufEnum[Number], number: Number) -> str:
    """`ROLE_PREFILL` -> `prefill`; a number that this version does not know -> `unknown_9`."""
    try:
        return enum.Name(number).partition("_")[2].lower()
    except ValueError:
        return f"unknown_{number}"
